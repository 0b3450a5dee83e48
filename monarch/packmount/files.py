"""Where the small files of a pack are, by the numbers of their records."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from monarch.packs.format import LARGE, NONE
from monarch.packs.pack import Pack
from monarch.posix.buckets import bucket, buckets
from monarch.types import Identity

# Added to the number of a chunk: no record has such a number.
_CHUNK_KEY = 1 << 32


def chunk_buckets(
    numbers: npt.NDArray[np.uint64], chunk_of: npt.NDArray[np.uint32]
) -> npt.NDArray[np.int64]:
    """The buckets (posix.buckets) by which files are admitted: the files of a chunk have the same
    one, so that a chunk is admitted as a whole. ``chunk_of``: the chunk of each record."""
    chunks = chunk_of[numbers.astype(np.int64)].astype(np.uint64)
    keys = np.where(chunks < LARGE, chunks + np.uint64(_CHUNK_KEY), numbers.astype(np.uint64))
    return buckets(keys)


class PackFiles:
    """Arrays by the number of a record, in memory: another program that cuts the index off does not
    disturb the process. Those of an entry that is no small file mean nothing, but ``chunk`` is at
    least LARGE."""

    def __init__(self, pack: Pack) -> None:
        """``pack`` is open and sound."""
        records = pack.records
        self.chunk = np.array(records["chunk"])
        self.offset = np.array(records["offset"])
        self.size = np.array(records["size"])
        self.digest = np.array(records["digest"])
        self.mtime_ns = np.array(records["mtime_ns"])
        self._members = [np.array(pack.chunk_numbers(n)) for n in range(pack.info.chunks)]

    def chunk_of(self, number: int) -> int | None:
        """The chunk with the bytes of a file; None for a large, an empty and an unknown file."""
        chunk = int(self.chunk[number]) if 0 < number < len(self.chunk) else NONE
        return chunk if chunk < LARGE else None

    def members(self, chunk: int) -> npt.NDArray[np.uint32]:
        """The files of a chunk in the order of their bytes."""
        return self._members[chunk]

    def extents(
        self, numbers: npt.NDArray[np.uint32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The positions of the first bytes of files in their chunk, and their sizes, in bytes."""
        return self.offset[numbers].astype(np.int64), self.size[numbers].astype(np.int64)

    def identity(self, number: int) -> Identity:
        """The version of a file."""
        size, mtime_ns = int(self.size[number]), int(self.mtime_ns[number])
        return Identity(size, mtime_ns, mtime_ns, number)

    def bucket(self, number: int) -> int:
        """``chunk_buckets`` of one file."""
        chunk = self.chunk_of(number)
        return bucket(number if chunk is None else chunk + _CHUNK_KEY)

    def buckets(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """``chunk_buckets`` of files."""
        return chunk_buckets(numbers, self.chunk)
