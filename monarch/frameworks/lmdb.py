"""A data set of PyTorch over an LMDB file, whose batches are read with few large reads.

The loader of PyTorch calls ``__getitems__`` with the indices of a batch. With a chunk-wise order
the batches of an epoch read each extent of the file once, or a few times::

    dataset = LmdbDataset("train.mdb", index="train.mlx", decode=decode, whole_extents=True)
    sampler = ChunkwiseSampler(dataset.extents(), group=8, seed=1)
    loader = DataLoader(dataset, batch_size=256, sampler=sampler, num_workers=4)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from monarch.datasets.lmdb_file import AnyPath
from monarch.datasets.lmdb_reader import LmdbReader

__all__ = ["LmdbDataset"]


class LmdbDataset(Dataset):
    """The records of an LMDB file as samples, for a loader with workers or without.

    ``decode`` makes a sample from the value of a record, a read-only memoryview that it must not
    keep; without it a sample is the value as ``bytes``. The samples are the records ``keys``, in
    this order, or without ``keys`` all records in the order of the database. ``path``, ``index``
    and ``whole_extents`` are as in ``LmdbReader``, which is ``reader``. Raises KeyError for a key
    that is missing.
    """

    def __init__(
        self,
        path: AnyPath,
        *,
        index: AnyPath | None = None,
        decode: Callable[[memoryview], Any] = bytes,
        keys: Iterable[bytes] | None = None,
        whole_extents: bool = False,
    ) -> None:
        self.reader = LmdbReader(path, index, whole_extents=whole_extents)
        self._decode = decode
        self._records: npt.NDArray[np.int64] | None = None
        if keys is not None:
            self._records = np.fromiter(map(self.reader.keys.place_of, keys), np.int64)

    def __len__(self) -> int:
        return len(self.reader) if self._records is None else len(self._records)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__((index,))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples ``indices``, read together."""
        if self._records is None:
            return [self._decode(value) for value in self.reader.get_many(indices)]
        if len(indices) and not 0 <= min(indices) <= max(indices) < len(self):
            raise IndexError(f"a sample of {len(self)}")
        records = self._records[np.asarray(indices, np.int64)]
        return [self._decode(value) for value in self.reader.get_many(records)]

    def extents(self) -> npt.NDArray[np.int64]:
        """For each sample the number of its extent, for a ``ChunkwiseSampler``."""
        numbers = self.reader.extents()
        if self._records is None:
            return numbers
        _, used = np.unique(numbers[self._records], return_inverse=True)
        return used.astype(np.int64)
