"""Loaders of PyTorch and WebDataset over files of several formats, with announcements or without.

The last two names of the root are ``announced`` or ``plain``, and the kind of the loader. A loader
is kept from epoch to epoch. The reply has the samples in the order in which the loader yields them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import h5py
import pyarrow.parquet as parquet
import torch
import webdataset
from _protocol import digest, serve
from torch.utils import data

from monarch.frameworks import webdataset as shards
from monarch.frameworks.torch import announce

BATCH = 8


class Images(data.Dataset[tuple[str, str]]):
    """As torchvision's ImageFolder: a file is a sample."""

    def __init__(self, root: Path) -> None:
        names = sorted(root.glob("*/*.jpg"))
        self.samples = [(str(path), path.parent.name) for path in names]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[str, str]:
        path = Path(self.samples[index][0])
        return f"{path.parent.name}/{path.name}", digest(path.read_bytes())


class Parts(data.Dataset[tuple[str, str]]):
    """Samples that are parts of files: ``read`` returns the bytes of a part."""

    def __init__(self, files: list[Path], parts: int, read: Callable[[Path, int], bytes]) -> None:
        self._where = [(path, part) for path in files for part in range(parts)]
        self._read = read

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, index: int) -> tuple[str, str]:
        path, part = self._where[index]
        return f"{path.name} {part}", digest(self._read(path, part))

    def path(self, index: int) -> Path:
        return self._where[index][0]


def row_group(path: Path, part: int) -> bytes:
    with parquet.ParquetFile(path, memory_map=part % 2 == 1) as file:
        read: bytes = file.read_row_group(part).column("image").combine_chunks().to_pylist()[0]
        return read


def row(path: Path, part: int) -> bytes:
    content: bytes = opened(path)["images"][part].tobytes()
    return content


@cache
def opened(path: Path) -> h5py.File:
    """A file that each worker keeps open, as loaders of HDF5 do."""
    return h5py.File(path, "r")


class Batches:
    """A batch sampler of a program: batches of different sizes."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self._count = count
        self._generator = generator

    def __len__(self) -> int:
        return -(-self._count // 3)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self._count, generator=self._generator).tolist()
        sizes = (2, 4) * self._count
        for _, size in zip(range(len(self)), sizes, strict=False):
            yield [order.pop() for _ in range(min(size, len(order)))]


def loader_of(root: Path, kind: str) -> tuple[data.DataLoader[Any], Any]:
    """A loader, and the paths of its samples if they are not those of ``samples``."""
    generator = torch.Generator().manual_seed(11)
    of_files: dict[str, tuple[str, int, Callable[[Path, int], bytes]]] = {
        "parquet": ("*.parquet", 6, row_group),
        "hdf5": ("*.h5", 25, row),
    }
    found: data.Dataset[tuple[str, str]]
    if kind in of_files:
        pattern, parts, read = of_files[kind]
        found = Parts(sorted(root.glob(pattern)), parts, read)
        count, paths = len(found), found.path
    else:
        found = Images(root)
        count, paths = len(found), None
    draws: dict[str, Callable[[], dict[str, Any]]] = {
        "random": lambda: {"batch_size": BATCH, "shuffle": True, "generator": generator},
        "distributed": lambda: {
            "batch_size": BATCH,
            "sampler": data.DistributedSampler(found, num_replicas=2, rank=1, seed=5),
        },
        "weighted": lambda: {
            "batch_size": BATCH,
            "sampler": data.WeightedRandomSampler(
                [float(1 + number % 7) for number in range(count)], count, generator=generator
            ),
        },
        "batches": lambda: {"batch_sampler": Batches(count, generator)},
        "persistent": lambda: {
            "batch_size": BATCH,
            "sampler": data.RandomSampler(found, generator=generator),
            "persistent_workers": True,
        },
    }
    options = draws.get(kind, draws["random"])()
    loader = data.DataLoader(found, num_workers=2, multiprocessing_context="fork", **options)
    return loader, paths


@cache
def samples_of(root: Path) -> Callable[[int], Iterator[tuple[str, str]]]:
    """The samples of an epoch by its number."""
    how, kind = root.parts[-2:]
    if kind == "webdataset":
        return partial(samples_of_shards, root, how)
    loader, paths = loader_of(root, kind)
    return partial(samples_of_loader, loader if how == "plain" else announce(loader, paths))


def samples_of_loader(loader: data.DataLoader[Any], number: int) -> Iterator[tuple[str, str]]:
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(number)
    for names, digests in loader:
        yield from zip(names, digests, strict=True)


def samples_of_shards(root: Path, how: str, number: int) -> Iterator[tuple[str, str]]:
    names = sorted(map(str, root.glob("*.tar")))
    dataset = webdataset.WebDataset(names, shardshuffle=len(names), seed=number)
    if how == "announced":
        shards.announce(dataset)
    workers = data.DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    for sample in workers:
        yield sample["__key__"], digest(sample["bin"])


def epoch(root: Path, number: int) -> dict[str, str]:
    return {f"{place} {name}": read for place, (name, read) in enumerate(samples_of(root)(number))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(epoch)
