"""The positions of each file in an announced order, to find the next one after another.

A *run* has the positions of up to ``_MOST`` entries, sorted by file and position: 8 bytes an entry.
New entries form a run, and small neighbouring runs are merged. So an entry is sorted few times, and
no call sorts more than one run.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_MOST = 1 << 18
_LOW = 0xFFFFFFFF


@dataclass(slots=True)
class _Run:
    """The entries from ``begin`` to before ``end``: inode number times 2**32, plus the position
    after ``begin``."""

    begin: int
    end: int
    numbers: npt.NDArray[np.uint64]
    # The same, for ``bisect``.
    keys: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.keys = self.numbers.data


class Positions:
    """``bytes``: the memory of the positions."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        # Pairs of positions of one file, the second ascending, without those that surround another.
        # The first is then ascending, too.
        self._first = array("Q")
        self._second = array("Q")

    @property
    def bytes(self) -> int:
        return 8 * (sum(len(run.keys) for run in self._runs) + 2 * len(self._first))

    def extend(self, begin: int, inos: array[int]) -> None:
        """Appends entries; ``begin`` is the position of the first, and those that are 0 have no
        file."""
        numbers = np.frombuffer(inos, np.uint32).astype(np.uint64)
        offsets = np.arange(len(inos), dtype=np.uint64)
        keys = ((numbers << np.uint64(32)) | offsets)[numbers != 0]
        if not len(keys):
            return
        keys.sort()
        self._add_pairs(begin, keys)
        new = _Run(begin, begin + len(inos), keys)
        while self._runs and _are_to_be_merged(self._runs[-1], new):
            new = _merged(self._runs.pop(), new)
        self._runs.append(new)

    def after(self, ino: int, position: int) -> int | None:
        """The first position of a file at or after ``position``; None if there is none."""
        for run in self._runs:
            if run.end <= position:
                continue
            at = bisect_left(run.keys, ino << 32 | max(0, position - run.begin))
            if at < len(run.keys) and run.keys[at] >> 32 == ino:
                return run.begin + (run.keys[at] & _LOW)
        return None

    def repeats_within(self, begin: int, end: float) -> bool:
        """Whether a file has two positions from ``begin`` to ``end``."""
        at = bisect_left(self._first, begin)
        return at < len(self._second) and self._second[at] <= end

    def trim(self, position: int) -> None:
        """Forgets runs before a position."""
        while self._runs and self._runs[0].end <= position:
            del self._runs[0]
        passed = bisect_left(self._first, position)
        if passed > len(self._first) // 2:
            del self._first[:passed], self._second[:passed]

    def _add_pairs(self, begin: int, keys: npt.NDArray[np.uint64]) -> None:
        """Adds the pairs of new positions, and of the last position of the same file before."""
        inos, offsets = keys >> np.uint64(32), (keys & np.uint64(_LOW)).astype(np.int64)
        before = np.full(len(keys), -1, np.int64)
        for run in self._runs:
            numbers = run.numbers
            last = np.searchsorted(numbers, (inos << np.uint64(32)) | np.uint64(_LOW), "right") - 1
            found = (last >= 0) & (numbers[last] >> np.uint64(32) == inos)
            found_at = (numbers[last] & np.uint64(_LOW)).astype(np.int64) + run.begin
            before = np.where(found, found_at, before)
        same = inos[1:] == inos[:-1]
        before[1:][same] = offsets[:-1][same] + begin
        by_position = np.argsort(offsets)
        first, second = before[by_position], offsets[by_position] + begin
        highest = np.maximum.accumulate(
            np.concatenate(([self._first[-1] if self._first else -1], first))
        )
        is_new = first > highest[:-1]
        self._first.frombytes(first[is_new].astype(np.uint64).tobytes())
        self._second.frombytes(second[is_new].astype(np.uint64).tobytes())


def _are_to_be_merged(before: _Run, after: _Run) -> bool:
    return after.end - before.begin <= _MOST and len(before.keys) < 2 * len(after.keys)


def _merged(before: _Run, after: _Run) -> _Run:
    moved = after.numbers + np.uint64(after.begin - before.begin)
    keys = np.concatenate((before.numbers, moved))
    # Two sorted halves: a stable sort merges them.
    keys.sort(kind="stable")
    return _Run(before.begin, after.end, keys)
