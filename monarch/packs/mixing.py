"""How well a chunk-wise order of a pack mixes labels: figures for `monarch pack info`.

The label of a file is the first directory of its path that distinguishes files: the directories
that all files share are left out, and the next one is the label. Files without such a directory
have a label of their own together.
"""

from __future__ import annotations

import math
import stat

import numpy as np
import numpy.typing as npt

from monarch.packs.format import LARGE, NONE
from monarch.packs.pack import Pack


def numbers_with_bytes(pack: Pack) -> npt.NDArray[np.int64]:
    """The records of the files with bytes, each file once."""
    records = pack.records
    is_first = records["link"] == np.arange(len(records))
    is_file = records["mode"] & 0o170000 == stat.S_IFREG
    return np.flatnonzero(is_first & is_file & (records["chunk"] != NONE))


def chunk_of_each(pack: Pack, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The chunk of each record with bytes, numbered from 0 without gaps. A large file counts as a
    chunk, behind the others."""
    chunks = pack.chunk_of[numbers].astype(np.int64)
    is_large = chunks == LARGE
    chunks[is_large] = pack.info.chunks + pack.offset_of[numbers][is_large].astype(np.int64)
    # Chunks whose table is lost have no files.
    found: npt.NDArray[np.int64] = np.unique(chunks, return_inverse=True)[1]
    return found


def labels(pack: Pack, numbers: npt.NDArray[np.int64]) -> tuple[bytes, npt.NDArray[np.int64]]:
    """The directory whose entries are the labels, and the label of each record: the number of the
    entry, or 0 for a file that lies directly in that directory."""
    parents = pack.records["parent"]
    above = 1
    while True:
        children = pack.names(above).astype(np.int64)
        if not len(children) or not len(numbers):
            return pack.record(above).path, np.zeros(len(numbers), np.int64)
        # An entry's record is behind that of its directory, and before that of the next one.
        label = children[np.searchsorted(children, numbers, side="right") - 1]
        label[parents[numbers] == above] = 0
        if label[0] == 0 or (label != label[0]).any():
            return pack.record(above).path, label
        above = int(label[0])


def shared_chunks(order: npt.ArrayLike, chunks: npt.NDArray[np.int64], batch: int) -> float:
    """The probability that two samples of a batch are in one chunk: the mean over the full batches
    of ``batch`` samples of ``order``. NaN if there is no full batch of two samples or more."""
    seen = chunks[np.asarray(order, np.int64)]
    full = len(seen) // batch
    if not full or batch < 2:
        return math.nan
    batches = np.sort(seen[: full * batch].reshape(full, batch), axis=1)
    is_first = np.ones_like(batches, dtype=bool)
    is_first[:, 1:] = batches[:, 1:] != batches[:, :-1]
    begins = np.flatnonzero(is_first.ravel())
    lengths = np.diff(begins, append=batches.size)
    return float((lengths * (lengths - 1)).sum()) / (full * batch * (batch - 1))
