"""The order of an epoch's samples, by the name under which trainers import it."""

from monarch.frameworks.chunk_order import (
    ChunkwiseSampler,
    chunk_numbers,
    chunkwise_order,
    distinct_labels,
)
from monarch.frameworks.pack_order import chunks_of_files, pack_sampler
from monarch.frameworks.sampler import (
    ALGORITHM,
    MOST_SAMPLES,
    VERSION,
    OrderState,
    ResumableSampler,
    epoch_permutation,
    fingerprint,
)

__all__ = [
    "ALGORITHM",
    "MOST_SAMPLES",
    "VERSION",
    "ChunkwiseSampler",
    "OrderState",
    "ResumableSampler",
    "chunk_numbers",
    "chunks_of_files",
    "chunkwise_order",
    "distinct_labels",
    "epoch_permutation",
    "fingerprint",
    "pack_sampler",
]
