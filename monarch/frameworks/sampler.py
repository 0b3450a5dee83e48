"""The order of the samples of an epoch, which never changes, and the progress of a training run.

The generator is counter-based and Monarch's own: neither a new release of a library nor the number
of workers changes an order, and a run can be resumed at any sample. The function is splitmix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). A run keeps
the algorithm with which it began (``ALGORITHM``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import xxhash

from monarch.errors import CheckpointError
from monarch.posix.buckets import mix, mixed

VERSION = 2
# The algorithm of new runs. 1 is a shuffle by exchanges; 2 is a sort, ten times as fast.
ALGORITHM = 2
# The limit of draws, which are products of 32 bits by 32 bits.
MOST_SAMPLES = (1 << 32) - 1

# The number of samples that are drawn, or returned, at a time.
_PIECE = 1 << 16

_GOLDEN = 0x9E3779B97F4A7C15


def epoch_permutation(
    seed: SupportsIndex,
    epoch: SupportsIndex,
    count: SupportsIndex,
    *,
    algorithm: int = ALGORITHM,
) -> npt.NDArray[np.int64]:
    """The order of ``count`` samples in ``epoch``: 0 to count-1, each once, of shape (count,).

    Draw i is ``mix(key + (i + 1) * golden)``, and the key
    ``mix(mix(seed + golden) + (epoch + 1) * golden)``, all modulo 2**64.

    Algorithm 2: sample i is sorted by draw i, whose lowest bits, as many as ``count - 1`` has, are
    replaced by i. Samples whose other bits are equal are in ascending order; of 10 million samples
    some 50 pairs are. It needs 8 bytes a sample.

    Algorithm 1: the shuffle of Fisher and Yates: for i from count-1 down to 1, element i is
    exchanged with element ``draw(i) * (i + 1) >> 64``.

    Raises ValueError if count is negative or above ``MOST_SAMPLES``, or ``algorithm`` is unknown.
    """
    # An integer of numpy would overflow.
    seed, epoch, count = map(operator.index, (seed, epoch, count))
    if not 0 <= count <= MOST_SAMPLES:
        raise ValueError(f"{count} samples; an epoch has 0 to {MOST_SAMPLES}")
    key = np.uint64(mix(mix(seed + _GOLDEN) + (epoch + 1) * _GOLDEN))
    if algorithm == 2:
        return _by_sorting(key, count)
    if algorithm == 1:
        return _by_exchanges(key, count)
    raise ValueError(f"an order has algorithm 1 or 2, not {algorithm}")


def _by_sorting(key: np.uint64, count: int) -> npt.NDArray[np.int64]:
    bits = max(0, count - 1).bit_length()
    low = np.uint64((1 << bits) - 1)
    order = np.empty(count, np.int64)
    sorted_by = order.view(np.uint64)
    for start in range(0, count, _PIECE):
        number = np.arange(start, min(count, start + _PIECE), dtype=np.uint64)
        draws = mixed(key + (number + np.uint64(1)) * np.uint64(_GOLDEN))
        sorted_by[start : start + _PIECE] = (draws & ~low) | number
    # All values differ, so any sorting algorithm gives this order.
    sorted_by.sort()
    sorted_by &= low
    return order


def _by_exchanges(key: np.uint64, count: int) -> npt.NDArray[np.int64]:
    number = np.arange(1, count + 1, dtype=np.uint64)
    draws = mixed(key + number * np.uint64(_GOLDEN))
    # The upper half of a product of 64 by 32 bits, computed from halves.
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    places = ((draws >> shift) * number + ((draws & low) * number >> shift)) >> shift
    order = list(range(count))
    # Each exchange needs the previous one. Lists are three times as fast here as an array.
    for i, j in zip(range(count - 1, 0, -1), places[:0:-1].tolist(), strict=True):
        order[i], order[j] = order[j], order[i]
    return np.array(order, dtype=np.int64)


def fingerprint(names: Iterable[str | bytes]) -> str:
    """16 hexadecimal digits that change when the names of the samples, or their order, do."""
    digest = xxhash.xxh3_64()
    for name in names:
        content = name.encode("utf-8", "surrogateescape") if isinstance(name, str) else name
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderState:
    """The progress of a run: the first ``consumed`` samples of the epoch's order were trained on.

    ``consumed`` counts over all ranks; ``count`` is the samples of an epoch. ``world_size`` is for
    information only: a run may be resumed with any other. ``algorithm`` is that of
    ``epoch_permutation``.
    """

    seed: int
    epoch: int = 0
    consumed: int = 0
    count: int
    world_size: int
    fingerprint: str
    algorithm: int = ALGORITHM

    def to_json(self) -> dict[str, int | str]:
        fields = {"N" if key == "count" else key: value for key, value in asdict(self).items()}
        return {"version": VERSION, **fields}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> OrderState:
        """Raises CheckpointError if ``raw`` is not a valid state, or is of a newer Monarch."""
        version = raw.get("version")
        if isinstance(version, int) and version > VERSION:
            raise CheckpointError(
                f"the data order has version {version}, this Monarch knows {VERSION}",
                hint="resume with the Monarch that saved it",
            )
        names = ("seed", "epoch", "consumed", "world_size")
        numbers = {name: raw.get(name) for name in names} | {"count": raw.get("N")}
        fields: dict[str, Any] = {**numbers, "fingerprint": raw.get("fingerprint")}
        # Version 1 of the format knew only algorithm 1.
        fields["algorithm"] = 1 if version == 1 else raw.get("algorithm")
        is_valid = isinstance(fields["fingerprint"], str) and fields["algorithm"] in (1, 2)
        if version not in (1, VERSION) or not is_valid or {*map(type, numbers.values())} != {int}:
            raise CheckpointError("this is not the state of a data order")
        state = cls(**fields)
        if not 0 <= state.consumed <= state.count or state.epoch < 0 or state.world_size < 1:
            raise CheckpointError("this is not the state of a data order")
        return state


class ResumableSampler:
    """The indices of the samples of one rank in each epoch, from the current position on.

    For PyTorch's ``DataLoader(sampler=...)``, with workers or without, and for any loop::

        for epoch in sampler.epochs(10):
            for batch in loader:
                ...train...
                sampler.consumed(len(batch))

    Iterating yields the indices of samples that are not consumed, and counts nothing: samples that
    workers have fetched ahead were not trained on. Rank r of w gets each w-th sample from the r-th
    on. So ranks in step have always consumed the beginning of the order, and a run can be resumed
    with another w: save the state of any rank, and load it in every rank.

    All ranks get the same number of samples, and so of batches: as in torch's DistributedSampler,
    an incomplete last round is filled with the first samples of the order, at most w - 1 an epoch,
    or with ``drop_last`` it is left out. Frameworks that call ``set_epoch`` may do so.
    """

    def __init__(
        self,
        count: SupportsIndex,
        *,
        seed: SupportsIndex,
        rank: SupportsIndex = 0,
        world_size: SupportsIndex = 1,
        fingerprint: str = "",
        drop_last: bool = False,
    ) -> None:
        """``count`` is the samples of an epoch. Raises ValueError for an invalid rank or count."""
        # The state is saved as JSON, which has no integers of numpy.
        count, seed, rank, world_size = map(operator.index, (count, seed, rank, world_size))
        if not 0 <= count <= MOST_SAMPLES:
            raise ValueError(f"{count} samples; an epoch has 0 to {MOST_SAMPLES}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self._rank = rank
        self._drop_last = drop_last
        self.state = OrderState(
            seed=seed, count=count, world_size=world_size, fingerprint=fingerprint
        )

    @property
    def epoch(self) -> int:
        return self.state.epoch

    def __iter__(self) -> Iterator[int]:
        at = self.state
        order = self._order(at)
        count = len(self)
        first = at.consumed + self._rank
        share = order[first :: at.world_size][:count]
        more = []
        if len(share) < count:
            beyond = first + (count - 1) * at.world_size - at.count
            more.append(int(order[beyond % at.count]))
        # Moved to the front in pieces: a copy would need as much memory again.
        kept = len(share)
        for start in range(0, kept, _PIECE):
            piece = share[start : start + _PIECE].copy()
            order[start : start + len(piece)] = piece
        del share
        order.resize(kept, refcheck=False)
        return chain(_numbers(order), more)

    def _order(self, at: OrderState) -> npt.NDArray[np.int64]:
        """All samples of the epoch of ``at``, an array that the caller may change."""
        return epoch_permutation(at.seed, at.epoch, at.count, algorithm=at.algorithm)

    def __len__(self) -> int:
        """The number of indices that an iteration begun now yields, the same at every rank."""
        rest, ranks = self.state.count - self.state.consumed, self.state.world_size
        return rest // ranks if self._drop_last else -(-rest // ranks)

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Moves to the beginning of ``epoch``; does nothing if it is the current epoch.

        Raises ValueError if ``epoch`` is negative.
        """
        epoch = operator.index(epoch)
        if epoch < 0:
            raise ValueError(f"epoch {epoch}")
        if epoch != self.epoch:
            self.state = replace(self.state, epoch=epoch, consumed=0)

    def consumed(self, samples: SupportsIndex) -> None:
        """Records that this rank, and each other rank, trained on ``samples`` more samples.

        Raises ValueError if the epoch does not have so many left.
        """
        samples = operator.index(samples)
        if not 0 <= samples <= len(self):
            raise ValueError(f"{samples} samples consumed; the epoch has {len(self)} left")
        consumed = self.state.consumed + samples * self.state.world_size
        self.state = replace(self.state, consumed=min(self.state.count, consumed))

    def next_epoch(self) -> None:
        """Moves to the beginning of the next epoch, even if this one is not finished."""
        self.set_epoch(self.epoch + 1)

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the unfinished epochs below ``total``, beginning with the current one."""
        while self.epoch < total:
            yield self.epoch
            self.next_epoch()

    def state_dict(self) -> dict[str, int | str]:
        return self.state.to_json()

    def load_state_dict(self, raw: Mapping[str, Any]) -> None:
        """Resumes from the state ``raw``, with its seed. Raises CheckpointError, without a change,
        if the state is of another data set: of another number of samples or another fingerprint.
        """
        state, now = OrderState.from_json(raw), self.state
        hint = "its order is not valid here; begin a new run, or restore the old data"
        if state.count != now.count:
            what = f"the run began with {state.count} samples, now there are {now.count}"
            raise CheckpointError(what, hint=hint)
        if state.fingerprint != now.fingerprint:
            what = f"the run began with the data {state.fingerprint!r}, now it is"
            raise CheckpointError(f"{what} {now.fingerprint!r}", hint=hint)
        self.state = replace(state, world_size=now.world_size)


def _numbers(order: npt.NDArray[np.int64]) -> Iterator[int]:
    """The elements as Python integers, converted in pieces: integers need five times the memory."""
    for start in range(0, len(order), _PIECE):
        yield from order[start : start + _PIECE].tolist()
