"""What foresight costs the daemon for an open that the datapath has answered.

The readers of a file system below the kernel get the events of such opens in lots, as from the
datapath: shuffled epochs of files that have copies. The same events go to the readers of a daemon
that foresees nothing, in turns. Only processor time counts, so a slow disk or a full machine does
not.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from monarch.config.settings import ForesightSettings
from monarch.foresight.foresight import Foresight
from monarch.placement.epochs import Epochs
from monarch.types import Ino
from monarch.vfs.filesystem import FileSystem
from monarch.vfs.interfaces import Served
from monarch.vfs.readers import Readers
from tests.vfs.rig import FakeFastPath, Rig

# The most microseconds that foresight may cost an open.
BAR_US = 2.0
# Files, and directories that have them; the opens of one lot of events, and the lots of one slice.
FILES, DIRECTORIES = 20_000, 50
LOT, LOTS = 64, 32
SLICES = 40


class _Nothing(Foresight):
    """Foresees nothing, and records no open."""

    def opened_all(
        self, inos: array[int], job: int = 0, processes: Sequence[int] | None = None
    ) -> None:
        return


class OpenCost:
    """The two sides. ``work`` is an empty directory for the files."""

    def __init__(self, work: Path) -> None:
        source = work / "source"
        for number in range(FILES):
            path = source / f"{number % DIRECTORIES:03}" / f"{number:06}"
            if number < DIRECTORIES:
                path.parent.mkdir(parents=True)
            path.touch()
        self._fast = FakeFastPath()
        self._rig = Rig(work / "rig", source, fast=self._fast)
        snapshot = self._rig.snapshot
        settings = ForesightSettings()
        # Without foresight, and with it.
        self._sides = [
            FileSystem(self._rig.read_side, Epochs(snapshot.entries), foresight, None).readers
            for foresight in (_Nothing(snapshot, settings), Foresight(snapshot, settings))
        ]
        self._files = [
            Ino(ino)
            for ino in range(1, snapshot.entries + 1)
            if snapshot.attributes(Ino(ino)).is_file
        ]
        self._chance = random.Random(1)
        self._epoch: list[Ino] = []

    def close(self) -> None:
        self._rig.close()

    def measure(self) -> tuple[float, float]:
        """Microseconds of an open without foresight, and what foresight adds to them."""
        times: tuple[list[float], list[float]] = [], []
        for turn in range(SLICES):
            inos = self._next(LOT * LOTS)
            # In turns: the first side finds colder caches.
            for side in (0, 1) if turn % 2 else (1, 0):
                times[side].append(self._slice(self._sides[side], inos))
        added = [theirs - ours for ours, theirs in zip(*times, strict=True)]
        return statistics.median(times[0]), statistics.median(added)

    def _next(self, count: int) -> list[Ino]:
        """The next opens of shuffled epochs."""
        if len(self._epoch) < count:
            self._epoch = self._chance.sample(self._files, len(self._files))
        taken, self._epoch = self._epoch[:count], self._epoch[count:]
        return taken

    def _slice(self, readers: Readers, inos: Sequence[Ino]) -> float:
        """Microseconds of processor time of each open."""
        process, session, user = os.getpid(), os.getsid(0), os.getuid()
        events: list[Served] = [(ino, 1, None, process, session, user) for ino in inos]
        lots = [events[start : start + LOT] for start in range(0, len(events), LOT)]
        begin = time.thread_time()
        for lot in lots:
            self._fast.events = lot
            readers.catch_up()
        return (time.thread_time() - begin) / len(events) * 1e6
