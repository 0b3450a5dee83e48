"""The order of the next epoch of a DataLoader of PyTorch, where it can be computed in advance.

No random number of the program is drawn: a sampler with a seed of its own is copied, and so is the
state of a generator. What the program does until the next epoch may change its order; then another
order is announced when that epoch begins.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from monarch.frameworks.chunk_order import ChunkwiseSampler
from monarch.frameworks.sampler import ResumableSampler


class NextEpoch:
    """For a loader with ``sampler``, a sampler of samples or of batches. ``generator`` is the one
    from which the loader draws a seed for its workers in each epoch, if any. An epoch of more than
    ``most`` indices is not computed."""

    def __init__(self, sampler: Any, generator: torch.Generator | None, most: int) -> None:
        self._sampler = sampler
        self._generator = generator
        self._most = most
        self._inner = sampler.sampler if type(sampler) is BatchSampler else sampler
        self._last_epoch: int | None = None

    def items(self) -> list[Any]:
        """What the sampler yields in the epoch after the one that begins now; empty if that is not
        known. Called before the sampler draws the indices of the present epoch."""
        ahead = self._ahead()
        if ahead is None:
            return []
        if self._inner is self._sampler:
            return list(ahead)
        return list(BatchSampler(ahead, self._sampler.batch_size, self._sampler.drop_last))

    def _ahead(self) -> Any:
        """A sampler that yields the indices of the next epoch; None if there is none."""
        inner: Any = self._inner
        counts_epochs = type(inner) in (DistributedSampler, ResumableSampler, ChunkwiseSampler)
        is_drawn = type(inner) is RandomSampler and inner.generator is not None
        is_computed = counts_epochs or is_drawn or type(inner) is SequentialSampler
        if not is_computed or len(inner) > self._most:
            return None
        if is_drawn:
            return self._drawn(inner, inner.generator)
        if not counts_epochs:
            return inner
        last, self._last_epoch = self._last_epoch, inner.epoch
        if last is None or inner.epoch != last + 1:
            # The program calls ``set_epoch`` with other numbers, or not at all, or it is not known.
            return inner if last == inner.epoch and type(inner) is DistributedSampler else None
        ahead = copy.copy(inner)
        ahead.set_epoch(inner.epoch + 1)
        return ahead

    def _drawn(self, inner: RandomSampler, generator: torch.Generator) -> RandomSampler:
        """A sampler whose generator has the state that that of ``inner`` will have."""
        ahead = copy.copy(inner)
        ahead.generator = torch.Generator(generator.device)
        ahead.generator.set_state(generator.get_state())
        for _ in ahead:
            pass
        if self._generator is generator:
            # The loader draws that seed before the indices.
            torch.empty((), dtype=torch.int64).random_(generator=ahead.generator)
        return ahead
