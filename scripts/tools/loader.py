"""A data set of files, and a PyTorch DataLoader whose worker processes stay and read a new list of
paths in each epoch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Protocol

WORKERS = 4


class Files:
    """A map-style data set of paths that names its files as torchvision's ImageFolder does."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.samples = [(path, 0) for path in paths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        with open(self.samples[index][0], "rb", buffering=0) as file:
            return len(file.read())


class Dataset(Protocol):
    """The index of a sample is its path, so that the same workers read every tree."""

    def __getitem__(self, path: str) -> Any: ...


class _Paths(Sized):
    """A sampler that gives the paths of the current epoch."""

    def __init__(self) -> None:
        self.paths: Sequence[str] = ()

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


class Loader:
    """The workers are started by the first epoch and end with this object."""

    def __init__(self, dataset: Dataset, *, batch_size: int) -> None:
        from torch.utils.data import DataLoader

        # PyTorch warns of more workers than processors, which is so wherever this runs.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        self._sampler = _Paths()
        samples: Any = dataset
        self._loader: Any = DataLoader(
            samples,
            sampler=self._sampler,
            batch_size=batch_size,
            num_workers=WORKERS,
            persistent_workers=True,
            multiprocessing_context="fork",
        )

    def epoch(self, paths: Sequence[str]) -> Iterable[Any]:
        """The batches of one epoch, in the order of ``paths``."""
        self._sampler.paths = paths
        return self._loader  # type: ignore[no-any-return]
