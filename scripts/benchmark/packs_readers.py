"""One epoch of training readers over a tree, a pack, and the formats of other libraries.

Each library reads as its documents recommend, with four readers, and shuffles in its own way. Each
sample is reduced to its size where it is read, so that no contender sends contents between
processes. The clock begins when the library is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import random
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import monarch
from monarch.order import pack_sampler
from scripts.benchmark.rows import BenchError
from scripts.tools.loader import WORKERS, Files

BATCH = 32
# Chunks in a group of the chunk-wise order.
GROUP = 8
# Samples in the shuffle buffers of WebDataset and tf.data.
SHUFFLED = 1000
# tf.data: 1 to 100 MB where the input is limited by reads.
_RECORD_BUFFER = 8_000_000


@dataclass(frozen=True, slots=True)
class Epoch:
    files: int
    bytes: int
    seconds: float
    first_batch_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where a reader reads: ``root`` has the data, ``pack`` is the pack that is mounted there, and
    ``cache`` is a new directory on the file system of the tier. ``names`` are all files."""

    root: Path
    names: Sequence[str]
    seed: int
    cache: Path
    pack: Path | None = None


Read = Callable[[Place], Epoch]


class FilesTogether(Files):
    """As ``Files``, with ``get_many`` for the files of a batch (docs/training.md)."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        super().__init__([f"{root}/{name}" for name in names])
        self._names = names
        self._directory = monarch.open_dataset(root)

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        return [*map(len, self._directory.get_many(self._names[index] for index in indices))]


def by_files(place: Place, *, together: bool = False) -> Epoch:
    """A shuffle of all files, by a program that knows nothing of Monarch. ``together``: it reads
    the files of a batch by ``get_many``."""
    import torch.utils.data

    begin = time.perf_counter()
    order = random.Random(place.seed).sample(range(len(place.names)), len(place.names))
    return _timed(_loader(torch.utils.data.DataLoader, place, order, together), begin)


def by_chunks(place: Place, *, group: int = GROUP, together: bool = False) -> Epoch:
    """The chunk-wise order of a pack, announced, as docs/packs.md recommends."""
    import torch.utils.data

    from monarch.frameworks.torch import announce

    assert place.pack is not None
    begin = time.perf_counter()
    sampler = pack_sampler(place.pack, place.names, group=group, seed=place.seed)
    loader = _loader(torch.utils.data.DataLoader, place, sampler, together)
    return _timed(announce(loader), begin)


def by_webdataset(place: Place) -> Epoch:
    import webdataset

    begin = time.perf_counter()
    shards = [str(path) for path in sorted(place.root.glob("*.tar"))]
    samples = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=place.seed)
    batches = samples.shuffle(SHUFFLED).to_tuple("bin").map_tuple(len).batched(BATCH)
    loader = webdataset.WebLoader(batches, batch_size=None, num_workers=WORKERS)
    return _timed((sizes for (sizes,) in loader), begin)


def by_tfrecord(place: Place) -> Epoch:
    tensorflow = imported_tensorflow()
    begin = time.perf_counter()
    data, tune = tensorflow.data, tensorflow.data.AUTOTUNE
    shards = [str(path) for path in sorted(place.root.glob("*.tfrecord"))]

    def records(shard: Any) -> Any:
        return data.TFRecordDataset(shard, buffer_size=_RECORD_BUFFER)

    def sizes(batch: Any) -> Any:
        features = {"file": tensorflow.io.FixedLenFeature([], tensorflow.string)}
        return tensorflow.strings.length(tensorflow.io.parse_example(batch, features)["file"])

    order = data.Dataset.from_tensor_slices(shards).shuffle(len(shards), seed=place.seed)
    mixed = order.interleave(
        records, cycle_length=WORKERS, num_parallel_calls=tune, deterministic=False
    )
    batches = mixed.shuffle(SHUFFLED, seed=place.seed).batch(BATCH)
    prepared = batches.map(sizes, num_parallel_calls=tune, deterministic=False).prefetch(tune)
    return _timed(prepared.as_numpy_iterator(), begin)


def by_litdata(place: Place) -> Epoch:
    """``local:``, which copies the chunks to a local cache, is for a network drive."""
    import litdata

    begin = time.perf_counter()
    samples = litdata.StreamingDataset(
        f"local:{place.root}",
        cache_dir=str(place.cache),
        shuffle=True,
        seed=place.seed,
        transform=len,
    )
    loader = litdata.StreamingDataLoader(samples, batch_size=BATCH, num_workers=WORKERS)
    return _timed(loader, begin)


def imported_tensorflow() -> Any:
    """TensorFlow, without the lines that it writes when it is imported. oneDNN computes nothing
    here."""
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0")
    import tensorflow

    return tensorflow


@dataclass(frozen=True, slots=True)
class Peer:
    """A library with a format of its own: its name in ``--peers``, and the module it needs."""

    name: str
    module: str
    title: str
    read: Read


PEERS = (
    Peer("webdataset", "webdataset", "WebDataset", by_webdataset),
    Peer("tfrecord", "tensorflow", "TFRecord", by_tfrecord),
    Peer("litdata", "litdata", "litdata", by_litdata),
)


def epoch_of(read: Read, place: Place) -> Epoch:
    # PyTorch warns of more workers than processors, which is so wherever this runs.
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    return read(place)


def import_all(peers: Sequence[Peer]) -> None:
    """Imports what a process may import before it forks. TensorFlow starts threads."""
    ours = "monarch.datasets.files", "monarch.frameworks.torch"
    for module in ("torch.utils.data", *ours, *(peer.module for peer in peers)):
        if module != "tensorflow":
            importlib.import_module(module)


def versions(peers: Sequence[Peer]) -> dict[str, str]:
    """The version of the library of each peer."""
    packages = importlib.metadata.packages_distributions()
    return {peer.name: importlib.metadata.version(packages[peer.module][0]) for peer in peers}


def available(asked: Sequence[str] | None) -> list[Peer]:
    """The peers that ``--peers`` asks for, or those that are installed. Raises BenchError for one
    that is unknown, and for one that was asked for and is not installed."""
    known = {peer.name: peer for peer in PEERS}
    for name in asked or ():
        if name not in known:
            raise BenchError(f"there is no {name}; {', '.join(known)}")
    installed = [peer for peer in PEERS if importlib.util.find_spec(peer.module) is not None]
    if asked is None:
        return installed
    wanted = [known[name] for name in asked]
    for peer in wanted:
        if peer not in installed:
            raise BenchError(f"{peer.module} is not installed; the extra bench-formats has it")
    return wanted


def _loader(kind: Any, place: Place, order: Any, together: bool) -> Any:
    if together:
        files: Files = FilesTogether(place.root, place.names)
    else:
        files = Files([f"{place.root}/{name}" for name in place.names])
    return kind(
        files,
        batch_size=BATCH,
        num_workers=WORKERS,
        sampler=order,
        multiprocessing_context="fork",
    )


def _timed(batches: Iterable[Any], begin: float) -> Epoch:
    """``batches`` have the sizes of their samples, as a tensor or an array."""
    files = size = 0
    first = 0.0
    for sizes in batches:
        first = first or time.perf_counter() - begin
        files += len(sizes)
        size += int(sizes.sum())
    return Epoch(files, size, time.perf_counter() - begin, first)
