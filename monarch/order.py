"""The order of an epoch's samples, the same for ever, and how far a training run has come in it.

The generator is counter-based and our own, so that neither another release of a library nor the
number of workers changes an order: a run can be taken up again at any sample. The function is
splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
A run keeps the algorithm with which it was begun (``ALGORITHM``), and so all its orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from monarch.errors import CheckpointError

VERSION = 2
# What new runs take: 1, a shuffle by exchanges; 2, a sort, ten times as fast.
ALGORITHM = 2
# Draws are products of 32 bits by 32 bits.
MOST_SAMPLES = (1 << 32) - 1

# How many are drawn, or handed out, at a time.
_PIECE = 1 << 16

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def epoch_permutation(
    seed: int, epoch: int, count: int, *, algorithm: int = ALGORITHM
) -> npt.NDArray[np.int64]:
    """The order of ``count`` samples in ``epoch``: 0 to count-1, each once, of shape (count,).

    Draw i is ``mix(key + (i + 1) * golden)``, and the key
    ``mix(mix(seed + golden) + (epoch + 1) * golden)``, all modulo 2**64.

    Algorithm 2: sample i is sorted by draw i, of which the lowest bits, as many as ``count - 1``
    has, give way to i itself. Two samples whose other bits are the same are in their own order; of
    10 million some 50 pairs are. It takes 8 bytes a sample.

    Algorithm 1: Fisher and Yates' shuffle: for i from count-1 down to 1, element i changes places
    with element ``draw(i) * (i + 1) >> 64``.

    Raises ValueError if count is negative or above ``MOST_SAMPLES``, or there is no such algorithm.
    """
    if not 0 <= count <= MOST_SAMPLES:
        raise ValueError(f"{count} samples; an epoch has 0 to {MOST_SAMPLES}")
    key = np.uint64(_mix(_mix(seed + _GOLDEN) + (epoch + 1) * _GOLDEN))
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
        draws = _mixed(key + (number + np.uint64(1)) * np.uint64(_GOLDEN))
        sorted_by[start : start + _PIECE] = (draws & ~low) | number
    # No two are the same, so that any way of sorting gives this order.
    sorted_by.sort()
    sorted_by &= low
    return order


def _by_exchanges(key: np.uint64, count: int) -> npt.NDArray[np.int64]:
    number = np.arange(1, count + 1, dtype=np.uint64)
    draws = _mixed(key + number * np.uint64(_GOLDEN))
    # The upper half of a product of 64 by 32 bits, by halves.
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    places = ((draws >> shift) * number + ((draws & low) * number >> shift)) >> shift
    order = list(range(count))
    # Each exchange needs the one before it. Lists are three times as fast here as an array.
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
    """How far a run has come: the first ``consumed`` samples of the epoch's order were trained on.

    ``consumed`` counts over all ranks together; ``count`` samples make an epoch. ``world_size`` is
    told for people only: a run goes on with any other. ``algorithm``: of ``epoch_permutation``.
    """

    seed: int
    epoch: int
    consumed: int
    count: int
    world_size: int
    fingerprint: str
    algorithm: int = ALGORITHM

    def to_json(self) -> dict[str, int | str]:
        return {
            "version": VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "N": self.count,
            "world_size": self.world_size,
            "fingerprint": self.fingerprint,
            "algorithm": self.algorithm,
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> OrderState:
        """Raises CheckpointError if it is not one, or a newer Monarch's."""
        version = told.get("version")
        if isinstance(version, int) and version > VERSION:
            raise CheckpointError(
                f"the data order has version {version}, this Monarch knows {VERSION}",
                hint="go on with the Monarch that saved it",
            )
        numbers = [told.get(key) for key in ("seed", "epoch", "consumed", "N", "world_size")]
        whole = [number for number in numbers if type(number) is int]
        mark = told.get("fingerprint")
        # The first version knew of one only.
        algorithm = 1 if version == 1 else told.get("algorithm")
        if version not in (1, VERSION) or len(whole) != len(numbers) or not isinstance(mark, str):
            raise CheckpointError("this is not the state of a data order")
        seed, epoch, consumed, count, world_size = whole
        if not (0 <= consumed <= count and epoch >= 0 and world_size >= 1 and algorithm in (1, 2)):
            raise CheckpointError("this is not the state of a data order")
        return cls(
            seed=seed,
            epoch=epoch,
            consumed=consumed,
            count=count,
            world_size=world_size,
            fingerprint=mark,
            algorithm=algorithm,
        )


class ResumableSampler:
    """The indices of one rank's samples in each epoch, from where the run has come to.

    For PyTorch's ``DataLoader(sampler=...)``, with workers or without, and for any loop::

        for epoch in sampler.epochs(10):
            for batch in loader:
                ...train...
                sampler.consumed(len(batch))

    Iterating gives the indices of the samples not yet consumed, and counts nothing: what workers
    have fetched ahead is lost in a crash and was never trained on. Rank r of w takes each w-th
    sample from the r-th on, so that ranks in step have together always consumed the beginning of
    the order, and a run can go on with another w: save the state of any rank, and load it in every
    one.

    All ranks have equally many samples, and so equally many batches: as torch's DistributedSampler
    does, the first samples of the order are given again where the last round has too few, at most
    w - 1 an epoch, or with ``drop_last`` the last round is left out. Frameworks that call
    ``set_epoch`` may do so.
    """

    def __init__(
        self,
        count: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        fingerprint: str = "",
        drop_last: bool = False,
    ) -> None:
        """``count`` samples make an epoch. Raises ValueError for a rank or count that cannot be."""
        if not 0 <= count <= MOST_SAMPLES:
            raise ValueError(f"{count} samples; an epoch has 0 to {MOST_SAMPLES}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self._count = count
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._fingerprint = fingerprint
        self._drop_last = drop_last
        self._algorithm = ALGORITHM
        self._epoch = 0
        self._consumed = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def state(self) -> OrderState:
        return OrderState(
            seed=self._seed,
            epoch=self._epoch,
            consumed=self._consumed,
            count=self._count,
            world_size=self._world_size,
            fingerprint=self._fingerprint,
            algorithm=self._algorithm,
        )

    def __iter__(self) -> Iterator[int]:
        order = epoch_permutation(self._seed, self._epoch, self._count, algorithm=self._algorithm)
        count = len(self)
        first = self._consumed + self._rank
        share = order[first :: self._world_size][:count]
        more = []
        if len(share) < count:
            beyond = first + (count - 1) * self._world_size - self._count
            more.append(int(order[beyond % self._count]))
        # To the front, piece by piece: a copy would take as much memory again.
        kept = len(share)
        for start in range(0, kept, _PIECE):
            piece = share[start : start + _PIECE].copy()
            order[start : start + len(piece)] = piece
        del share
        order.resize(kept, refcheck=False)
        return chain(_numbers(order), more)

    def __len__(self) -> int:
        """How many indices an iteration begun now gives, at every rank."""
        left = self._count - self._consumed
        return left // self._world_size if self._drop_last else -(-left // self._world_size)

    def set_epoch(self, epoch: int) -> None:
        """Go on to the beginning of ``epoch``; if it is the one under way, nothing changes.

        Raises ValueError if it is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch {epoch}")
        if epoch != self._epoch:
            self._epoch, self._consumed = epoch, 0

    def consumed(self, samples: int) -> None:
        """This rank trained on ``samples`` more, and each other one on as many.

        Raises ValueError if the epoch does not have so many.
        """
        left = len(self)
        if not 0 <= samples <= left:
            raise ValueError(f"{samples} samples consumed; the epoch has {left} left")
        self._consumed = min(self._count, self._consumed + samples * self._world_size)

    def next_epoch(self) -> None:
        """Go on to the beginning of the next epoch, whatever is left of this one."""
        self._epoch += 1
        self._consumed = 0

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs below ``total`` that are not over, beginning with this one."""
        while self._epoch < total:
            yield self._epoch
            self.next_epoch()

    def state_dict(self) -> dict[str, int | str]:
        return self.state.to_json()

    def load_state_dict(self, told: Mapping[str, Any]) -> None:
        """Go on where ``told`` says, with its seed. Raises CheckpointError, and nothing changes, if
        it is of another data set: another number of samples or another fingerprint.
        """
        state = OrderState.from_json(told)
        if state.count != self._count:
            raise CheckpointError(
                f"the run was begun with {state.count} samples, now there are {self._count}",
                hint="its order means nothing here; begin a new run, or bring the old data back",
            )
        if state.fingerprint != self._fingerprint:
            raise CheckpointError(
                f"the run was begun with the data {state.fingerprint!r}, "
                f"now it is {self._fingerprint!r}",
                hint="its order means nothing here; begin a new run, or bring the old data back",
            )
        self._seed, self._epoch, self._consumed = state.seed, state.epoch, state.consumed
        self._algorithm = state.algorithm


def _numbers(order: npt.NDArray[np.int64]) -> Iterator[int]:
    """As numbers of Python, which take five times the memory, a few at a time."""
    for start in range(0, len(order), _PIECE):
        yield from order[start : start + _PIECE].tolist()


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """``_mix`` of each element."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))
