"""The chunk-wise order of the samples of an epoch, for samples that are stored in chunks.

The order visits all samples of a group of ``group`` chunks before those of the next group. So a
reader that keeps ``group + 1`` chunks in memory reads each chunk once an epoch. The order of the
chunks and the order inside each group are random. The algorithm is the chunk-wise shuffle of
DIESEL (Wang et al., "DIESEL: A Dataset-Based Distributed Storage and Caching System for Large-Scale
Deep Learning Training", ICPP 2020).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import chain
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
import xxhash

from monarch.frameworks.sampler import (
    ALGORITHM,
    MOST_SAMPLES,
    OrderState,
    ResumableSampler,
    epoch_permutation,
)
from monarch.posix.buckets import mix

# The version of ``chunkwise_order``, which is part of the fingerprint of a saved state.
CHUNKWISE = 1

# "chunks", so that the order of chunks is not that of as many samples.
_CHUNKS = 0x6368756E6B73


def chunk_numbers(chunks: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """The chunk of each sample, of shape (samples,), from the lists of the samples of each chunk.

    Raises ValueError if the lists do not have each number from 0 on exactly once.
    """
    sizes = np.fromiter(map(len, chunks), np.int64, len(chunks))
    count = int(sizes.sum())
    samples = np.fromiter(chain.from_iterable(chunks), np.int64, count)
    chunk_of = np.full(count, -1, np.int64)
    if count and not (samples.min() >= 0 and samples.max() < count):
        raise ValueError(f"{count} samples in chunks; their numbers are 0 to {count - 1}")
    chunk_of[samples] = np.repeat(np.arange(len(chunks)), sizes)
    if (chunk_of < 0).any():
        raise ValueError("a sample is in two chunks")
    return chunk_of


def order_of_chunks(
    seed: SupportsIndex,
    epoch: SupportsIndex,
    count: SupportsIndex,
    *,
    algorithm: int = ALGORITHM,
) -> npt.NDArray[np.int64]:
    """The order of ``count`` chunks in ``epoch``, of shape (count,): ``epoch_permutation`` with the
    seed ``mix(seed ^ 0x6368756E6B73)``. Consecutive chunks of it are a group."""
    return epoch_permutation(mix(operator.index(seed) ^ _CHUNKS), epoch, count, algorithm=algorithm)


def chunkwise_order(
    seed: SupportsIndex,
    epoch: SupportsIndex,
    chunk_of: npt.ArrayLike,
    group: SupportsIndex,
    *,
    algorithm: int = ALGORITHM,
) -> npt.NDArray[np.int64]:
    """The order of the samples in ``epoch``: 0 to n-1, each once, of shape (n,).

    ``chunk_of`` is the number of the chunk of each sample, of shape (n,); chunks are numbered from
    0. The groups follow each other as ``order_of_chunks`` orders their chunks. The samples of a
    group are in the order in which they come in ``epoch_permutation(seed, epoch, n)``; so with a
    single group the two orders are equal. It needs 26 to 32 bytes a sample.

    Raises ValueError if ``group`` is not positive, a chunk has a negative number, or there are more
    than ``MOST_SAMPLES`` samples or chunks.
    """
    group = _checked_group(group)
    chunks = _checked(chunk_of)
    count = int(chunks.max()) + 1 if len(chunks) else 0
    # Numbers of 16 bits are sorted in linear time.
    number = np.uint16 if -(-count // group) <= 1 << 16 else np.uint32
    group_of = np.empty(count, number)
    places = np.arange(count, dtype=np.int64) // group
    group_of[order_of_chunks(seed, epoch, count, algorithm=algorithm)] = places
    order = epoch_permutation(seed, epoch, len(chunks), algorithm=algorithm)
    return order[np.argsort(group_of[chunks[order]], kind="stable")]


def distinct_labels(order: npt.ArrayLike, labels: npt.ArrayLike, batch: int) -> float:
    """The mean number of distinct labels in the full batches of ``batch`` samples of ``order``.

    ``labels`` is the label of each sample, an integer. The figure shows how well an order mixes the
    classes: compare it with that of ``epoch_permutation``. NaN if there is no full batch. Raises
    ValueError if ``batch`` is not positive.
    """
    if batch < 1:
        raise ValueError(f"batches of {batch} samples")
    seen = np.asarray(labels)[np.asarray(order, np.int64)]
    full = len(seen) // batch
    if not full:
        return math.nan
    batches = np.sort(seen[: full * batch].reshape(full, batch), axis=1)
    return 1 + float(np.count_nonzero(np.diff(batches, axis=1))) / full


class ChunkwiseSampler(ResumableSampler):
    """A ``ResumableSampler`` whose order is ``chunkwise_order``.

    The ranks share the samples of each group, so ranks on one node read each chunk of their node
    once. A saved state can be loaded with another number of ranks, but only with the same chunks
    and the same ``group``: ``load_state_dict`` raises CheckpointError otherwise, since the order
    would be another one.
    """

    def __init__(
        self,
        chunk_of: npt.ArrayLike,
        *,
        group: SupportsIndex,
        seed: SupportsIndex,
        rank: SupportsIndex = 0,
        world_size: SupportsIndex = 1,
        fingerprint: str = "",
        drop_last: bool = False,
    ) -> None:
        """``chunk_of`` is the number of the chunk of each sample, from 0 on (``chunk_numbers``
        makes it from lists), and ``group`` the number of chunks in a group. Raises ValueError for
        an invalid chunk, group, rank or number of samples."""
        self._group = _checked_group(group)
        # 4 bytes a sample are kept.
        self._chunk_of = _checked(chunk_of).astype(np.uint32)
        digest = xxhash.xxh3_64_hexdigest(self._chunk_of.astype("<u4").tobytes())
        super().__init__(
            len(self._chunk_of),
            seed=seed,
            rank=rank,
            world_size=world_size,
            fingerprint=f"{fingerprint} chunk-wise:{CHUNKWISE}:{self._group}:{digest}".lstrip(),
            drop_last=drop_last,
        )

    def _order(self, at: OrderState) -> npt.NDArray[np.int64]:
        return chunkwise_order(
            at.seed, at.epoch, self._chunk_of, self._group, algorithm=at.algorithm
        )


def _checked_group(group: SupportsIndex) -> int:
    """``group`` as an integer. Raises ValueError if it is not positive."""
    number = operator.index(group)
    if number < 1:
        raise ValueError(f"groups of {number} chunks; a group has at least one")
    return number


def _checked(chunk_of: npt.ArrayLike) -> npt.NDArray[np.integer[npt.NBitBase]]:
    """``chunk_of`` as an array of integers. Raises ValueError if it is not a list of numbers."""
    chunks = np.asarray(chunk_of)
    if not len(chunks):
        return np.empty(0, np.int64)
    if chunks.ndim != 1 or chunks.dtype.kind not in "iu":
        raise ValueError("the chunks of the samples are not a list of integers")
    if chunks.min() < 0 or chunks.max() >= MOST_SAMPLES:
        raise ValueError(f"a chunk has a number from 0 to {MOST_SAMPLES - 1}")
    return chunks
