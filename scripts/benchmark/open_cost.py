"""What foresight costs the daemon for an open that the datapath has answered.

The readers of a file system below the kernel get the events of such opens in lots, as from the
datapath: epochs of files that have copies, each in another random order, or all in the same order,
which is recognised. The same events go to the readers of a daemon that foresees nothing, in turns.
Only processor time counts, so a slow disk or a full machine does not.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.config.settings import ForesightSettings
from monarch.foresight.foresight import Foresight
from monarch.placement.epochs import Epochs
from monarch.types import Ino
from monarch.vfs.filesystem import FileSystem
from monarch.vfs.interfaces import Served
from monarch.vfs.readers import Readers
from scripts.benchmark.rows import BenchError
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


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of an open without foresight; what foresight adds to it in epochs with different
    orders; and what it adds in epochs with the same order."""

    without: float
    added: float
    added_recognised: float


class _Pair:
    """The readers without foresight, and those with it, which get the same opens. ``epoch`` returns
    the files of the next epoch in the order of their opens."""

    def __init__(self, rig: Rig, fast: FakeFastPath, epoch: Callable[[], list[Ino]]) -> None:
        snapshot, settings = rig.snapshot, ForesightSettings()
        self._fast, self._epoch, self._left = fast, epoch, list[Ino]()
        self.foresight = Foresight(snapshot, settings, lambda ino: True, lambda files: True)
        self._sides = [
            FileSystem(rig.read_side, Epochs(snapshot.entries), each, None).readers
            for each in (_Nothing(snapshot, settings), self.foresight)
        ]

    def slice(self, turn: int) -> list[float]:
        """Microseconds of processor time of each open, of both sides."""
        if len(self._left) < LOT * LOTS:
            self._left = self._epoch()
        inos, self._left = self._left[: LOT * LOTS], self._left[LOT * LOTS :]
        times = [0.0, 0.0]
        # In turns: the first side finds colder caches.
        for side in (0, 1) if turn % 2 else (1, 0):
            times[side] = self._time(self._sides[side], inos)
        return times

    def _time(self, readers: Readers, inos: Sequence[Ino]) -> float:
        process, session, user = os.getpid(), os.getsid(0), os.getuid()
        events: list[Served] = [(ino, 1, None, process, session, user) for ino in inos]
        lots = [events[start : start + LOT] for start in range(0, len(events), LOT)]
        begin = time.thread_time()
        for lot in lots:
            self._fast.events = lot
            readers.catch_up()
        return (time.thread_time() - begin) / len(events) * 1e6


class OpenCost:
    """``work`` is an empty directory for the files."""

    def __init__(self, work: Path) -> None:
        source = work / "source"
        for number in range(FILES):
            path = source / f"{number % DIRECTORIES:03}" / f"{number:06}"
            if number < DIRECTORIES:
                path.parent.mkdir(parents=True)
            path.touch()
        fast = FakeFastPath()
        self._rig = Rig(work / "rig", source, fast=fast)
        snapshot, chance = self._rig.snapshot, random.Random(1)
        files = [
            Ino(ino)
            for ino in range(1, snapshot.entries + 1)
            if snapshot.attributes(Ino(ino)).is_file
        ]
        same = chance.sample(files, len(files))
        self._shuffled = _Pair(self._rig, fast, lambda: chance.sample(files, len(files)))
        self._recognised = _Pair(self._rig, fast, lambda: list(same))
        # After two epochs the order is known.
        for turn in range(2 * FILES // (LOT * LOTS)):
            self._recognised.slice(turn)

    def close(self) -> None:
        self._rig.close()

    def measure(self) -> Cost:
        # Not in turns: each would find the caches full of the other.
        shuffled, same = (
            [pair.slice(turn) for turn in range(SLICES)]
            for pair in (self._shuffled, self._recognised)
        )
        report = self._recognised.foresight.report(counts_opens=True)
        if [stream.pattern for stream in report.streams] != ["same order"]:
            raise BenchError("the order of the opens was not recognised")
        return Cost(
            statistics.median(without for without, _ in shuffled),
            statistics.median(having - without for without, having in shuffled),
            statistics.median(having - without for without, having in same),
        )
