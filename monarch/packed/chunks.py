"""The chunks of a pack by the inode numbers of the mount, and the files of them without a copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from monarch.namespace.snapshot import Snapshot
from monarch.packed.source import FetchedRun, PackSource
from monarch.placement.residency import COPYING, SOURCE, Residency
from monarch.types import Ino

# Files of a chunk by which it is judged whether an order has the chunk as a whole.
_SAMPLE = 16


@dataclass(frozen=True, slots=True)
class Member:
    """A file of a chunk. ``offset`` and ``size`` in bytes; ``number`` is that of its record."""

    ino: Ino
    number: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class PackChunks:
    """Of each entry of the mount it has the record, and of each record the entry: 8 bytes."""

    def __init__(self, source: PackSource, snapshot: Snapshot, residency: Residency) -> None:
        self._source = source
        self._tiers = np.frombuffer(residency.tiers_table, np.uint8)
        self._marks = np.frombuffer(residency.marks_table, np.uint8)
        self._number_of = np.zeros(snapshot.entries + 1, np.uint32)
        inos, _, numbers = snapshot.files_in(range(1, snapshot.entries + 1))
        self._number_of[inos] = numbers
        self._ino_of = np.zeros(int(numbers.max(initial=0)) + 1, np.uint32)
        self._ino_of[numbers.astype(np.int64)] = inos

    def chunk_of(self, ino: Ino) -> int | None:
        """The chunk with the bytes of a file; None for a large or an empty file."""
        return self._source.chunk_of(int(self._number_of[ino]))

    def missing_totals(self, chunk: int) -> tuple[int, int]:
        """The number and the bytes of the files of a chunk that have no copy now or soon."""
        numbers = self._source.members(chunk)
        _, sizes = self._source.extents(numbers)
        missing = self._are_missing(self._ino_of[numbers])
        return int(np.count_nonzero(missing)), int(sizes[missing].sum())

    def is_under_way(self, chunk: int) -> bool:
        """Whether a copy of a file of a chunk is being made, or the bytes of one wait for a
        reader."""
        inos = self._ino_of[self._source.members(chunk)]
        return bool((self._marks[inos] & COPYING).any())

    def missing(self, chunk: int) -> list[Member]:
        """The files of a chunk that have no copy, in the order of their bytes."""
        numbers = self._source.members(chunk)
        inos = self._ino_of[numbers]
        found = np.flatnonzero(self._are_missing(inos))
        numbers = numbers[found]
        offsets, sizes = self._source.extents(numbers)
        return [
            Member(Ino(ino), number, offset, size)
            for ino, number, offset, size in zip(
                *(each.tolist() for each in (inos[found], numbers, offsets, sizes)), strict=True
            )
        ]

    def sample(self, chunk: int) -> list[Ino]:
        """Some files of a chunk without a copy, spread over it."""
        inos = self._ino_of[self._source.members(chunk)]
        inos = inos[self._are_missing(inos)]
        return [Ino(ino) for ino in inos[:: max(1, len(inos) // _SAMPLE)].tolist()]

    def fetch(self, members: list[Member]) -> FetchedRun:
        """Reads files of one chunk in one piece, in a thread. Raises OSError."""
        return self._source.fetch_run(np.array([each.number for each in members], np.uint32))

    def _are_missing(self, inos: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        missing: npt.NDArray[np.bool_] = (self._tiers[inos] == SOURCE) & (
            self._marks[inos] & COPYING == 0
        )
        return missing
