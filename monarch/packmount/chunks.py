"""The chunks of a pack by the inode numbers of the mount, and the files of them without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from monarch.namespace.snapshot import Snapshot
from monarch.packmount.source import FetchedRun, PackSource
from monarch.placement.residency import COPYING, SOURCE, Residency
from monarch.types import Identity, Ino

# Files of a chunk by which it is judged whether an order has the chunk as a whole.
_SAMPLE = 16


class Member(NamedTuple):
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
        self._source, self._files = source, source.files
        self._tier_of, self._marks_of = residency.tiers_table, residency.marks_table
        self._tiers = np.frombuffer(residency.tiers_table, np.uint8)
        self._marks = np.frombuffer(residency.marks_table, np.uint8)
        self._number_of = np.zeros(snapshot.entries + 1, np.uint32)
        inos, _, numbers = snapshot.files_in(range(1, snapshot.entries + 1))
        self._number_of[inos] = numbers
        self._ino_of = np.zeros(int(numbers.max(initial=0)) + 1, np.uint32)
        self._ino_of[numbers.astype(np.int64)] = inos

    def chunk_of(self, ino: Ino) -> int | None:
        """The chunk with the bytes of a file; None for a large or an empty file."""
        return self._files.chunk_of(int(self._number_of[ino]))

    def member(self, ino: Ino) -> Member:
        """A file of the pack."""
        number = int(self._number_of[ino])
        return Member(ino, number, int(self._files.offset[number]), int(self._files.size[number]))

    def identity(self, member: Member) -> Identity:
        """The version of a file."""
        return self._files.identity(member.number)

    def is_right(self, ino: Ino) -> None:
        """The bytes of a file were read, and are right."""
        if self._source.damage:
            self._source.damage.is_read(int(self._number_of[ino]))

    def is_missing(self, ino: Ino) -> bool:
        """Whether a file has no copy now or soon."""
        return self._tier_of[ino] == SOURCE and not self._marks_of[ino] & COPYING

    def missing_totals(self, chunk: int) -> tuple[int, int]:
        """The number and the bytes of the files of a chunk that have no copy now or soon."""
        numbers = self._files.members(chunk)
        _, sizes = self._files.extents(numbers)
        missing = self._are_missing(self._ino_of[numbers])
        return int(np.count_nonzero(missing)), int(sizes[missing].sum())

    def is_under_way(self, chunk: int) -> bool:
        """Whether a copy of a file of a chunk is being made, or the bytes of one wait for a
        reader."""
        inos = self._ino_of[self._files.members(chunk)]
        return bool((self._marks[inos] & COPYING).any())

    def missing(self, chunk: int) -> list[Member]:
        """The files of a chunk that have no copy, in the order of their bytes."""
        numbers = self._files.members(chunk)
        inos = self._ino_of[numbers]
        found = np.flatnonzero(self._are_missing(inos))
        numbers = numbers[found]
        offsets, sizes = self._files.extents(numbers)
        columns = (each.tolist() for each in (inos[found], numbers, offsets, sizes))
        return list(map(Member._make, zip(*columns, strict=True)))

    def sample(self, chunk: int) -> list[Ino]:
        """Some files of a chunk without a copy, spread over it."""
        inos = self._ino_of[self._files.members(chunk)]
        inos = inos[self._are_missing(inos)]
        return [Ino(ino) for ino in inos[:: max(1, len(inos) // _SAMPLE)].tolist()]

    def first_of_each(self, inos: Sequence[int], known: Sequence[int], most: int) -> list[Ino]:
        """The first file without a copy of each chunk, in the order of ``inos``, without the chunks
        ``known``; at most ``most``. Entries of 0 are no files."""
        entries = np.asarray(inos, np.uint32)
        entries = entries[(entries > 0) & (entries < len(self._number_of))]
        entries = entries[self._are_missing(entries)]
        chunks = self._files.chunk[self._number_of[entries]]
        count = self._source.info.chunks
        is_new = np.ones(count + 1, bool)
        is_new[[*known, count]] = False
        found = np.flatnonzero(is_new[np.minimum(chunks, count)])
        # The first place of each chunk: a later assignment replaces an earlier one.
        first = np.full(count, len(entries))
        first[chunks[found[::-1]]] = found[::-1]
        places = np.sort(first[first < len(entries)])[:most]
        return [Ino(ino) for ino in entries[places].tolist()]

    def fetch(self, members: list[Member]) -> FetchedRun:
        """Reads files of one chunk in one piece, in a thread. Raises OSError."""
        return self._source.fetch_run(np.array([each.number for each in members], np.uint32))

    def _are_missing(self, inos: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        missing: npt.NDArray[np.bool_] = (self._tiers[inos] == SOURCE) & (
            self._marks[inos] & COPYING == 0
        )
        return missing
