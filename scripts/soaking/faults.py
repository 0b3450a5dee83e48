"""The faults of a soak, one after the other. A mount has to survive each of them."""

from __future__ import annotations

import contextlib
import errno
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from monarch.errors import MonarchError
from monarch.text import MiB
from scripts.soaking.soaked_mount import SoakedMount, Window
from tests.equipment.slowfs import SlowSource

# How long after a fault an error may still be its consequence.
GRACE_S = 3.0
# Errors of a source that fails or hangs.
OF_SOURCE = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EFAULT})


class Faults:
    """Each fault begins, lasts for some seconds, and is undone; then the next one begins.

    ``disk``: the disk of a tier can be filled.
    """

    def __init__(
        self,
        mounts: Sequence[SoakedMount],
        slow: SlowSource | None,
        dice: random.Random,
        disk: bool,
    ) -> None:
        self._mounts = mounts
        self._slow = slow
        self._dice = dice
        self._disk = disk
        self._undo: Callable[[], None] | None = None
        self._until_s = 0.0
        self.counts: dict[str, int] = {}

    @property
    def of_source(self) -> bool:
        return self._undo is not None

    def step(self, now_s: float) -> None:
        """Undo a fault whose time is over; perhaps begin another."""
        if self._undo is not None:
            if now_s < self._until_s:
                return
            self.end()
        elif now_s > self._until_s:
            kinds: list[Callable[[], float]] = [self._evict, self._warm, self._delete, self._damage]
            if self._slow is not None:
                kinds += [self._latency, self._errors, self._hang]
            if self._disk:
                kinds.append(self._full)
            kind = self._dice.choice(kinds)
            name = kind.__name__.lstrip("_")
            self.counts[name] = self.counts.get(name, 0) + 1
            self._until_s = now_s + kind()

    def end(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _mount(self) -> SoakedMount:
        return self._dice.choice(self._mounts)

    def _some(self, mount: SoakedMount) -> list[Path]:
        copies = mount.copies()
        return self._dice.sample(copies, min(len(copies), 5))

    def _ask(self, verb: str) -> float:
        mount = self._mount()
        with contextlib.suppress(MonarchError):
            mount.ask(verb, paths=[])
        return self._dice.uniform(1, 4)

    def _evict(self) -> float:
        return self._ask("evict")

    def _warm(self) -> float:
        return self._ask("warm")

    def _delete(self) -> float:
        for path in self._some(self._mount()):
            path.unlink(missing_ok=True)
        return self._dice.uniform(0.5, 2)

    def _damage(self) -> float:
        """Put files of random bytes in place of some copies; open files keep the old ones."""
        for path in self._some(self._mount()):
            # The copy may have been removed, and the disk may be full.
            with contextlib.suppress(OSError):
                staged = path.with_name(f"{path.name}.new")
                size = path.stat().st_size
                staged.write_bytes(self._dice.randbytes(size))
                staged.rename(path)
        return self._dice.uniform(0.5, 2)

    def _rules(self, *lines: str, seconds: float, numbers: frozenset[int]) -> float:
        assert self._slow is not None
        slow = self._slow
        begin_s = time.monotonic()
        slow.rules(*lines)

        def undo() -> None:
            slow.rules()
            window = Window(begin_s, time.monotonic() + GRACE_S, numbers)
            for mount in self._mounts:
                mount.windows.append(window)

        self._undo = undo
        return seconds

    def _latency(self) -> float:
        lines = ("lat open 20", "lat read 5", "lat getattr 5")
        return self._rules(*lines, seconds=self._dice.uniform(2, 6), numbers=frozenset())

    def _errors(self) -> float:
        kind = self._dice.choice(("open", "read", "getattr"))
        lines = (f"err {kind} {errno.EIO} .*",)
        return self._rules(*lines, seconds=self._dice.uniform(1, 4), numbers=OF_SOURCE)

    def _hang(self) -> float:
        kind = self._dice.choice(("open", "read"))
        lines = (f"hang {kind} .*",)
        return self._rules(*lines, seconds=self._dice.uniform(1, 4), numbers=OF_SOURCE)

    def _full(self) -> float:
        """Fill the disks of the first tiers."""
        fillers = [mount.tiers[0] / "filler" for mount in self._mounts]
        for filler in fillers:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(MiB)):
                    pass

        def undo() -> None:
            for filler in fillers:
                filler.unlink(missing_ok=True)

        self._undo = undo
        return self._dice.uniform(1, 5)
