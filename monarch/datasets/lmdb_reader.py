"""Reads records of an LMDB file by their index, many at once, with few large reads.

An LMDB environment maps the file, so each page that is missing in memory is a read of its own, and
a training that reads records at random waits for one after the other. This reader knows the place
of each value, from an index file or from the pages of the tree, and reads those of a batch in the
order of the file (LMDBIO: Pumma et al., "Scalable Deep Learning via I/O Analysis and Optimization",
ACM TOPC 2019).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from monarch.datasets.lmdb_file import AnyPath, LmdbFile, Version, naming
from monarch.datasets.lmdb_index import open_indexed
from monarch.datasets.lmdb_pages import HEADER_BYTES, is_overflow, require_overflow
from monarch.datasets.lmdb_table import Keys, Table, read_table
from monarch.datasets.ranges import merged
from monarch.errors import LmdbError
from monarch.text import MiB
from monarch.types import Progress

EXTENT_BYTES = 4 * MiB


class LmdbReader:
    """The records of the LMDB file ``path``, or of ``data.mdb`` in the directory ``path``, by their
    index in the order of the keys.

    ``index`` is its index file (``monarch lmdb index``); without it the branch and leaf pages are
    read at first. Raises LmdbError if the file cannot be read or its index is stale, and OSError.
    The calls wait for the storage. Threads may share a reader, and so may forked processes. A
    pickled reader opens the same version of the file again.

    With ``whole_extents`` the extents of 4 MiB that have a wanted record are read as a whole into
    the page cache, in the background. That is for a chunk-wise order of ``extents``, where their
    other records are wanted soon. In any other order most of these bytes are read in vain.
    """

    # None: the records were found in the pages.
    _index: AnyPath | None
    _whole_extents: bool

    def __init__(
        self,
        path: AnyPath,
        index: AnyPath | None = None,
        *,
        whole_extents: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """``progress`` counts the pages that are read without an index file."""
        self._file, self._table = _opened(path, index, progress)
        self._index = index
        self._whole_extents = whole_extents

    def __len__(self) -> int:
        return len(self._table)

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def version(self) -> Version:
        return self._file.version

    @property
    def table(self) -> Table:
        """The places of all records."""
        return self._table

    @property
    def keys(self) -> Keys:
        """The keys, in the order of the indices. ``keys.place_of(key)`` is the index of a key."""
        return self._table.keys

    def get(self, index: int) -> memoryview:
        """The value of record ``index``. As ``get_many``."""
        return self.get_many((index,))[0]

    def get_many(self, indices: Iterable[int]) -> list[memoryview]:
        """The values of the records ``indices``, in this order; an index may occur several times.

        Values that lie at most 64 KiB apart are read at once, and up to 8 such ranges at the same
        time if the file system lets them wait. The views are read-only, and share
        one buffer for the call, which is as large as the ranges: copy a value (``bytes``) to
        keep it longer than the others. Raises IndexError for an index below 0 or beyond the last
        record, LmdbError if the file was changed since it was opened, and OSError.
        """
        asked = [*map(operator.index, indices)]
        if not asked:
            return []
        if min(asked) < 0 or max(asked) >= len(self):
            raise IndexError(f"an index from {min(asked)} to {max(asked)}, of {len(self)}")
        wanted = np.array(asked, np.int64)
        offsets, lengths = self._table.offsets[wanted], self._table.lengths[wanted]
        # A reader that is closed meanwhile reads to the end of the call.
        file = self._file.share()
        if self._whole_extents:
            for extent in np.unique(offsets // EXTENT_BYTES).tolist():
                file.fetch(extent * EXTENT_BYTES, EXTENT_BYTES)
        with naming(file.path):
            return _read(file, offsets, lengths)

    def extents(self) -> npt.NDArray[np.int64]:
        """For each record the extent of 4 MiB in which its value begins, of shape (n,).

        Only the extents with a value are counted, from 0 on. They are the chunks of a chunk-wise
        order (``monarch.order.ChunkwiseSampler``).
        """
        _, numbers = np.unique(self._table.offsets // EXTENT_BYTES, return_inverse=True)
        return numbers.astype(np.int64)

    def close(self) -> None:
        """Closes the file. Values that were read stay valid."""
        self._file.close()

    def __enter__(self) -> LmdbReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # With an index file the records are read again from there: other processes on the node
        # have it in the page cache.
        table = self._table if self._index is None else None
        version = self._file.version
        return {
            "path": self.path,
            "index": self._index,
            "table": table,
            "version": version,
            "whole_extents": self._whole_extents,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        table: Table | None = state["table"]
        version: Version = state["version"]
        self._index = state["index"]
        self._whole_extents = state["whole_extents"]
        if table is None:
            self._file, self._table = _opened(state["path"], self._index)
        else:
            self._file, self._table = LmdbFile.open(state["path"]), table
        if self._file.version != version:
            self._file.close()
            with naming(self.path):
                raise LmdbError("was changed since it was opened", hint="open it again")


def _opened(
    path: AnyPath, index: AnyPath | None, progress: Progress | None = None
) -> tuple[LmdbFile, Table]:
    """Opens an LMDB file, and gets its records from the index file or from its pages."""
    if index is not None:
        return open_indexed(path, index)
    file = LmdbFile.open(path)
    try:
        with naming(file.path):
            return file, read_table(file, progress)
    except BaseException:
        file.close()
        raise


def _read(
    file: LmdbFile, offsets: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint32]
) -> list[memoryview]:
    """The values at these places of a file."""
    page_bytes = file.meta.page_bytes
    # The header of an overflow page is read with its value, and compared.
    large = is_overflow(offsets, page_bytes)
    before = large * np.uint64(HEADER_BYTES)
    begins = offsets - before
    ranges = list(merged(begins, lengths + before))
    # Not filled with zeros first.
    buffer = np.empty(sum(found.length for found in ranges), np.uint8).data
    values = [buffer] * len(offsets)
    place = 0
    file.read_ranges(buffer, ranges)
    # Before the headers are compared: a file that was written is not damaged.
    file.require_unchanged()
    for found in ranges:
        for member in found.members.tolist():
            offset, length = int(offsets[member]), int(lengths[member])
            begin = place + offset - found.offset
            if large[member]:
                head = buffer[begin - HEADER_BYTES : begin]
                require_overflow(head, offset, length, page_bytes)
            values[member] = buffer[begin : begin + length].toreadonly()
        place += found.length
    return values
