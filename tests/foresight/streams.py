"""Synthetic streams of opens, and a tree of files for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from monarch.types import ROOT_INO, Attributes, Ino

SIZE = 1000


class Tree:
    """The root, its directories (``classes`` of each), and in each class ``files`` files, numbered
    breadth first as in a snapshot."""

    def __init__(self, *directories: tuple[int, int]) -> None:
        first_class = 2 + len(directories)
        self._parents: list[int] = [0, 1, *[1] * len(directories)]
        for index, (classes, _) in enumerate(directories):
            self._parents += [2 + index] * classes
        number = first_class
        for classes, files in directories:
            for _ in range(classes):
                self._parents += [number] * files
                number += 1
        starts = list(accumulate((c * f for c, f in directories), initial=number))
        self.files = [range(a, b) for a, b in pairwise(starts)]
        self.entries = len(self._parents) - 1
        # Entries that are directories without entries.
        self.empty: frozenset[int] = frozenset()

    def parent(self, slot: Ino) -> Ino:
        return Ino(self._parents[slot])

    def path(self, ino: Ino) -> bytes:
        return b"" if ino == ROOT_INO else str(ino).encode()

    def level(self, directory: Ino, depth: int) -> range:
        found = [ino for ino in range(1, self.entries + 1) if self._above(ino, depth) == directory]
        return range(found[0], found[-1] + 1) if found else range(0)

    def count_files(self, slots: range) -> int:
        return len(slots) - len(self.empty.intersection(slots))

    def files_in(self, slots: range) -> tuple[npt.NDArray[np.int64], None, None]:
        return np.array([ino for ino in slots if self.attributes(Ino(ino)).is_file]), None, None

    def _above(self, ino: int, depth: int) -> int:
        for _ in range(depth):
            if ino == ROOT_INO:
                return 0
            ino = self._parents[ino]
        return ino

    def attributes(self, ino: Ino) -> Attributes:
        is_file = ino not in self.empty and any(ino in files for files in self.files)
        mode = 0o100644 if is_file else 0o040755
        return Attributes(ino, self.parent(ino), mode, 1, 0, 0, SIZE, 0, 0, ino, 2, 0)


def workers(order: Sequence[int], count: int, batch: int, rng: random.Random) -> list[int]:
    """The order in which ``count`` workers of a DataLoader open the files of ``order``.

    Batches go to the workers in turn. A worker is fast or slow by chance, and begins a batch when
    all but the last ``2 * count`` batches before it are complete (``prefetch_factor``).
    """
    batches = [list(order[start : start + batch])[::-1] for start in range(0, len(order), batch)]
    current = list(range(min(count, len(batches))))
    complete = 0
    opened = []
    while complete < len(batches):
        may_run = [
            worker
            for worker, number in enumerate(current)
            if number < len(batches) and number < complete + 2 * count
        ]
        worker = rng.choice(may_run)
        opened.append(batches[current[worker]].pop())
        if not batches[current[worker]]:
            current[worker] += count
            while complete < len(batches) and not batches[complete]:
                complete += 1
    return opened


def with_noise(order: Sequence[int], share: float, files: range, rng: random.Random) -> list[int]:
    """The order with a ``share`` of opens of other files before its own."""
    opened = []
    for item in order:
        if rng.random() < share:
            opened.append(rng.choice(files))
        opened.append(item)
    return opened
