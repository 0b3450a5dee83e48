"""The places of all records of an LMDB file, found by reading its branch and leaf pages only.

The tree is read level by level. The pages of a level are read in the order of the file, several at
once where they are near each other, so that few large reads reach the storage.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
import numpy.typing as npt

from monarch.datasets.lmdb_file import LmdbFile
from monarch.datasets.lmdb_pages import Leaf, children, leaf, order_of_keys, require_order
from monarch.datasets.ranges import GAP_BYTES, Range, merged
from monarch.errors import LmdbError
from monarch.text import MiB
from monarch.types import Progress

# The pages that are parsed together, and the bytes of a read.
_TOGETHER = 1024
_READ_BYTES = 4 * MiB
# The end of a key in an index file has 32 bits.
_MOST_KEY_BYTES = (1 << 32) - 1

Places = npt.NDArray[np.uint64]
Lengths = npt.NDArray[np.uint32]


class Keys(Sequence[bytes]):
    """The keys of all records, in the order of the database."""

    def __init__(self, heap: bytes, ends: Lengths, flags: int) -> None:
        self._heap = heap
        self._ends = ends
        self._flags = flags

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        place = range(len(self))[at]
        begin = int(self._ends[place - 1]) if place else 0
        return self._heap[begin : int(self._ends[place])]

    def place_of(self, key: bytes) -> int:
        """The index of the record ``key``, by binary search. Raises KeyError if there is none."""
        compared = order_of_keys(self._flags)
        place = bisect.bisect_left(self, compared(key), key=compared)
        if place == len(self) or self[place] != key:
            raise KeyError(key)
        return place


@dataclass(frozen=True, slots=True)
class Table:
    """The records in the order of their keys: arrays of shape (n,), and the keys end to end.

    ``offsets`` are the places of the values in the file, and ``key_ends`` those of the ends of the
    keys in ``heap``. ``flags`` are those of the database (``lmdb_pages.py``).
    """

    offsets: Places
    lengths: Lengths
    key_ends: Lengths
    heap: bytes = field(repr=False)
    flags: int

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def keys(self) -> Keys:
        return Keys(self.heap, self.key_ends, self.flags)


def read_table(file: LmdbFile, progress: Progress | None = None) -> Table:
    """The table of ``file``, from its pages. ``progress`` counts pages.

    It needs 16 bytes and the key for each record. Raises LmdbError if the tree is damaged or has
    records of a kind that is not supported, or if the file is changed meanwhile; and OSError.
    """
    try:
        return _walked(file, progress)
    finally:
        # Instead of another error: a file that is written meanwhile is not damaged.
        file.require_unchanged(at_once=True)


def _walked(file: LmdbFile, progress: Progress | None) -> Table:
    meta = file.meta
    pages = array("Q", () if meta.root is None else (meta.root,))
    walk = _Walk(file, progress)
    for _ in range(meta.depth - 1):
        below = array("Q")
        for found in walk.branches(pages):
            below.extend(found)
        pages = below
    offsets, lengths, ends, heap = array("Q"), array("I"), array("I"), bytearray()
    last = b""
    for number, records in walk.leaves(pages):
        if len(offsets):
            require_order((last, records.keys[0]), number, meta)
        last = records.keys[-1]
        offsets.extend(records.offsets)
        lengths.extend(records.lengths)
        for key in records.keys:
            heap += key
            if len(heap) > _MOST_KEY_BYTES:
                raise LmdbError("has more than 4 GiB of keys, which is not supported")
            ends.append(len(heap))
    if len(offsets) != meta.entries:
        raise LmdbError(f"is damaged: it has {len(offsets)} records instead of {meta.entries}")
    return Table(
        np.frombuffer(offsets, np.uint64),
        np.frombuffer(lengths, np.uint32),
        np.frombuffer(ends, np.uint32),
        bytes(heap),
        meta.flags,
    )


class _Walk:
    """Reads the pages of a tree."""

    def __init__(self, file: LmdbFile, progress: Progress | None) -> None:
        self._file = file
        self._progress = progress
        self._read = 0

    def branches(self, pages: array[int]) -> Iterator[list[int]]:
        for number, page in self._pages(pages):
            yield children(page, number, self._file.meta)

    def leaves(self, pages: array[int]) -> Iterator[tuple[int, Leaf]]:
        for number, page in self._pages(pages):
            yield number, leaf(page, number, self._file.meta)

    def _pages(self, numbers: array[int]) -> Iterator[tuple[int, memoryview]]:
        """The pages ``numbers`` of a level of the tree, in this order. Each is there once, so no
        cycle is followed, and no level has more pages than the file."""
        meta = self._file.meta
        if len(np.unique(np.frombuffer(numbers, np.uint64))) != len(numbers):
            raise LmdbError("is damaged: two pages refer to the same page")
        if any(number >= meta.pages for number in numbers):
            raise LmdbError("is truncated: pages of its tree are not in it")
        for start in range(0, len(numbers), _TOGETHER):
            together = np.frombuffer(numbers[start : start + _TOGETHER], np.uint64)
            places = together * np.uint64(meta.page_bytes)
            lengths = np.full(len(places), meta.page_bytes, np.uint32)
            pages: list[memoryview] = [memoryview(b"")] * len(places)
            for found in merged(places, lengths, gap_bytes=GAP_BYTES, most_bytes=_READ_BYTES):
                self._read_range(found, places, pages)
            for number, page in zip(together.tolist(), pages, strict=True):
                self._read += 1
                yield number, page
            if self._progress is not None:
                total = max(self._read, meta.branch_pages + meta.leaf_pages)
                self._progress(self._read, total, "pages of the tree")

    def _read_range(self, found: Range, places: Places, pages: list[memoryview]) -> None:
        """Reads a range, and keeps a copy of the pages in it, not of those between them."""
        buffer = memoryview(bytearray(found.length))
        self._file.read_into(buffer, found.offset)
        for member in found.members.tolist():
            begin = int(places[member]) - found.offset
            pages[member] = memoryview(bytes(buffer[begin : begin + self._file.meta.page_bytes]))
