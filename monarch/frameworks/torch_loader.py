"""A DataLoader of PyTorch that announces the files of each epoch, and is otherwise the same."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
)

from monarch.frameworks.announce import FIRST_FILES, AnnouncedFiles, AnyPath
from monarch.frameworks.chunk_order import ChunkwiseSampler
from monarch.frameworks.next_epoch import NextEpoch
from monarch.frameworks.sampler import ResumableSampler

Loader = TypeVar("Loader", bound="DataLoader[Any]")
Paths: TypeAlias = Sequence[AnyPath] | Callable[[int], AnyPath]

# A sampler is asked in advance for at most so many indices, or for so many times the samples of the
# data set if that is more: that of an endless sampler may have any length.
_MOST_KNOWN, _MOST_TIMES = 1 << 20, 4
# Indices may be more than numbers, or the data set may have a sample for any number.
_NO_ORDER = (TypeError, ValueError, LookupError, OverflowError)


def announce(loader: Loader, paths: Paths | None = None) -> Loader:
    """A loader with the same batches as ``loader``, in the same order, that announces the files of
    each epoch to a mount of Monarch when the epoch begins.

    ``paths`` are the files of the samples by index: a sequence, or a function of the index. Without
    it they are those of ``dataset.samples`` or ``dataset.imgs``, as in torchvision's ImageFolder,
    also within a Subset. In the first epoch the directories of all samples are listed.

    The sampler, or the batch sampler, is asked once an epoch for all indices of that epoch, or for
    the first ones of an epoch that is much longer than the data set. All random numbers are drawn
    as without this function, unless a sampler that is not of PyTorch draws some for each index. If
    the order of the next epoch can be computed without the random numbers of the program
    (``next_epoch.py``), it is announced, too. Nothing is announced for a sampler without a length,
    with a ``state_dict`` that an iteration may change, or with indices that are no numbers of
    samples. Raises TypeError if the data set does not name its files, or is iterable.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise TypeError("an iterable data set has no indices; announce the files of its shards")
    count = len(cast(Any, dataset))
    files = AnnouncedFiles(_path_of(dataset, paths), count)
    most = max(_MOST_KNOWN, _MOST_TIMES * count)
    announcing = copy.copy(loader)
    in_flight = (loader.prefetch_factor or 0) * loader.num_workers
    # Workers that live on keep the seed of the first epoch.
    seeds = None if loader.persistent_workers else loader.generator
    kind: type[_Announcing]
    if loader.batch_sampler is None:
        place, kind, sampler = "sampler", _Samples, loader.sampler
    else:
        place, kind, sampler = "batch_sampler", _Batches, loader.batch_sampler
    if isinstance(sampler, _Announcing):
        # The loader was announced before: one order is enough.
        sampler = sampler._sampler
    coming = NextEpoch(sampler, seeds, most)
    replaced = {place: kind(sampler, files, in_flight, coming, most)}
    # A loader does not let these be set. An iterator that it keeps belongs to the other loader.
    vars(announcing).update({**replaced, "_iterator": None})
    return announcing


def _path_of(dataset: object, paths: Paths | None) -> Callable[[int], AnyPath]:
    if callable(paths):
        return paths
    if paths is not None:
        return paths.__getitem__
    if isinstance(dataset, Subset):
        return partial(_path_in_subset, _path_of(dataset.dataset, None), dataset.indices)
    for name in ("samples", "imgs"):
        samples = getattr(dataset, name, None)
        if samples is not None:
            return partial(_path_in, samples)
    raise TypeError(
        f"a {type(dataset).__name__} has no `samples` or `imgs` that name its files;"
        " give them as `paths`"
    )


# Functions of the module, so that the loader can be sent to another process.


def _path_in(samples: Sequence[Any], index: int) -> AnyPath:
    return cast(AnyPath, samples[index][0])


def _path_in_subset(
    path_of: Callable[[int], AnyPath], indices: Sequence[int], index: int
) -> AnyPath:
    return path_of(indices[index])


class _Announcing:
    """A sampler in place of ``sampler``: it yields the same, and has the same attributes.

    ``in_flight`` of its items may be taken from it and not read yet. It is asked in advance for at
    most ``most`` indices.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        files: AnnouncedFiles,
        in_flight: int,
        coming: NextEpoch,
        most: int,
    ) -> None:
        self._sampler = sampler
        self._files = files
        self._in_flight = in_flight
        self._coming = coming
        self._most = most
        # The number of iterations that have begun: the last one has the announced order.
        self._begun = 0
        # The first samples of the first order, if they are announced before it.
        self._early: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":  # while this object is being copied
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(cast(Any, self._sampler))

    def __iter__(self) -> Iterator[Any]:
        inner = _inner(self._sampler)
        is_known = type(inner) in (ResumableSampler, ChunkwiseSampler)
        # No random number is drawn for the order. A loader asks for two iterators.
        if is_known and self._in_flight and not (self._begun or self._early):
            self._announce_early(inner)
        # At once, as without this object: the sampler may draw random numbers now.
        return self._announced(iter(self._sampler))

    def _announced(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yields ``items``. Begins when the first one is wanted, as most samplers do."""
        self._begun += 1
        number, following = self._begun, self._coming.items()
        known, items = _known(self._sampler, items, self._most)
        progress = self._announce(known, following)
        del known, following
        read, sizes = 0, deque[int]()
        try:
            for item in items:
                if progress is not None:
                    progress(read)
                    sizes.append(_size(item))
                    if len(sizes) > self._in_flight:
                        read += sizes.popleft()
                yield item
        except GeneratorExit:
            # The epoch ends early. At its usual end the last items are still to be read. A program
            # may begin the next epoch before it gives up this one.
            if number == self._begun:
                self._files.close()
            raise

    def _announce_early(self, inner: ResumableSampler) -> None:
        """Announces the first samples of ``inner``: the mount fetches while the loader starts its
        workers."""
        first = [*islice(inner, FIRST_FILES)]
        batch = getattr(self._sampler, "batch_size", 1)
        with suppress(*_NO_ORDER):
            if self._files.begin(first, min(len(inner), len(self) * batch)):
                self._early = first

    def _announce(
        self, items: Iterable[Any], following: Iterable[Any]
    ) -> Callable[[int], None] | None:
        early, self._early = self._early, []
        try:
            indices, more = _indices(items), _indices(following)
            begun = len(early) if early == indices[: len(early)] else 0
            return self._files.announce(indices, more, begun) if indices else None
        except _NO_ORDER:
            self._files.close()
            return None


class _Samples(_Announcing, Sampler[Any]):
    """In place of a sampler of single samples."""


class _Batches(_Announcing, BatchSampler):
    """In place of a sampler of batches."""


def _inner(sampler: Any) -> Any:
    """The sampler of the samples of a sampler of samples or of batches."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def _known(sampler: Any, items: Iterator[Any], most: int) -> tuple[Iterable[Any], Iterator[Any]]:
    """The items that are known before the first is yielded, with about ``most`` indices at most,
    and those to be yielded, from ``items``, an iterator of ``sampler``."""
    inner = _inner(sampler)
    if type(inner) is RandomSampler and inner.generator is not None:
        # It draws from a generator of the caller, perhaps not all at the begin: a copy draws here.
        ahead = copy.copy(inner)
        ahead.generator = torch.Generator(inner.generator.device)
        ahead.generator.set_state(inner.generator.get_state())
        if inner is not sampler:
            ahead = BatchSampler(ahead, sampler.batch_size, sampler.drop_last)
        return _taken(ahead, most), items
    keeps_state = (sampler, getattr(sampler, "sampler", None))
    if any(hasattr(each, "state_dict") and not _is_resumable(each) for each in keeps_state):
        return (), items
    try:
        count = len(sampler)
    except (AttributeError, TypeError, NotImplementedError, ValueError, OverflowError):
        # It may be known only when an iteration has begun.
        return (), items
    taken = _taken(islice(items, count), most)
    return taken, chain(_each(taken), items)


def _taken(items: Iterable[Any], most: int) -> list[Any]:
    """The first items, until they have ``most`` indices."""
    taken, indices = [], 0
    for item in items:
        taken.append(_as_it_is(item))
        indices += _size(item)
        if indices >= most:
            break
    return taken


def _as_it_is(item: Any) -> Any:
    """The item, or a copy of it: a sampler may fill one list, tensor or array again and again."""
    if isinstance(item, torch.Tensor):
        return item.clone()
    return copy.copy(item) if isinstance(item, list | np.ndarray) else item


def _is_resumable(sampler: object) -> bool:
    """Whether it is a sampler whose state does not change when it is iterated."""
    return isinstance(sampler, ResumableSampler)


def _each(items: list[Any]) -> Iterator[Any]:
    """The items, each released when it is yielded."""
    for place, item in enumerate(items):
        items[place] = None
        yield item


def _indices(items: Iterable[Any]) -> list[int]:
    """The indices of the samples in items of a sampler: an index, or some of them in a list, a
    tensor or an array. Raises TypeError, ValueError if they are not numbers."""
    found: list[int] = []
    for item in map(_plain, items):
        found += map(int, item) if isinstance(item, list | tuple) else (int(item),)
    return found


def _size(item: Any) -> int:
    """How many indices an item has."""
    item = _plain(item)
    return len(item) if isinstance(item, list | tuple) else 1


def _plain(item: Any) -> Any:
    """An item without the type of a tensor or an array."""
    return item.tolist() if hasattr(item, "tolist") else item
