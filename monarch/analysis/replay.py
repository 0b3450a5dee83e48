"""Replays epochs of opens under a placement policy: the code that decides in a mount, without one.

A copy is complete as soon as it is decided. There is one tier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from monarch.analysis.eviction import Fifo, RandomEviction
from monarch.placement.belady import Belady
from monarch.placement.controller import Controller
from monarch.placement.ledger import Ledger
from monarch.placement.policy import FirstCome, Item, Lru, NoEvict, Policy
from monarch.placement.residency import SOURCE, Residency
from monarch.posix.buckets import BUCKETS, buckets
from monarch.types import Ino

POLICIES = ("no_evict", "first_come", "lru", "fifo", "random", "belady")

# Opens between two calls of ``on_opens``.
_REPORTED = 10_000

# An epoch: the indices of the files in the order of their opens.
Order = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a data set: sizes in bytes, and the keys by which ``no_evict`` chooses (inode
    numbers at the source)."""

    sizes: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        return int(self.sizes.sum())

    def chosen(self, indices: npt.NDArray[np.int64]) -> Files:
        return Files(self.sizes[indices], self.keys[indices])


@dataclass(frozen=True, slots=True)
class Epoch:
    """What one epoch read, and copied into the tier. ``seconds`` is its duration in virtual time,
    None without a rate of the source."""

    opens: int
    hits: int
    bytes: int
    hit_bytes: int
    copies: int
    copied_bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Rates:
    """A loader fetches files in order, ``buffer`` files before the job needs them. The source gives
    ``source`` bytes a second, the job uses up to ``job`` bytes a second, and a hit takes no time to
    fetch."""

    source: float
    job: float
    buffer: int = 64


class Future:
    """When files are opened next, from the whole order: the perfect knowledge for ``Belady``.
    ``next_use`` of a file that is opened is the present position."""

    ended = 0

    def __init__(self, orders: Sequence[Order], files: int) -> None:
        order = np.concatenate([np.asarray(each) for each in orders])
        # The position of the next open of the same file, for each position.
        by_file = np.argsort(order, kind="stable")
        following = np.full(len(order), math.inf)
        is_same = order[by_file[1:]] == order[by_file[:-1]]
        following[by_file[:-1][is_same]] = by_file[1:][is_same]
        self._following: list[float] = following.tolist()
        # The end of the first pair of opens of one file that begins at a position or later.
        pairs = np.minimum.accumulate(following[::-1])[::-1]
        self._pairs: list[float] = [*pairs.tolist(), math.inf]
        self._next = [math.inf] * (files + 1)
        files_opened, first = np.unique(order, return_index=True)
        for index, position in zip(files_opened.tolist(), first.tolist(), strict=True):
            self._next[index + 1] = position
        self.now = 0

    def opened(self, ino: Ino) -> None:
        """The open at the present position is over."""
        self._next[ino] = self._following[self.now]
        self.now += 1

    def next_use(self, ino: Ino) -> float:
        return self._next[ino]

    def use_after(self, ino: Ino) -> float:
        position = self._next[ino]
        return self._following[int(position)] if position < math.inf else math.inf

    def repeats_within(self, begin: float, end: float) -> bool:
        return begin < len(self._pairs) and self._pairs[int(begin)] <= end


def replay(
    name: str,
    files: Files,
    orders: Sequence[Order],
    capacity: int,
    *,
    seed: int = 0,
    rates: Rates | None = None,
    on_opens: Callable[[int], None] = lambda opens: None,
) -> Iterator[Epoch]:
    """The epochs that a tier of ``capacity`` bytes serves under the policy ``name``, one of
    ``POLICIES``. ``on_opens`` is called with the number of opens since its last call."""
    future = Future(orders, len(files)) if name == "belady" else None
    policy = _policy(name, files, capacity, seed, future)
    residency = Residency(len(files))
    controller = Controller(residency, Ledger([capacity]), policy)
    sizes, keys = files.sizes.tolist(), files.keys.tolist()
    tiers = residency.tiers_table
    for order in orders:
        hits: list[bool] = []
        copies = copied_bytes = 0
        for index in order.tolist():
            ino = Ino(index + 1)
            is_hit = tiers[ino] != SOURCE
            hits.append(is_hit)
            if is_hit:
                controller.accessed(ino, tiers[ino])
            else:
                promote = controller.opened(Item(ino, sizes[index], keys[index]))
                if promote is not None:
                    controller.committed(promote.item, promote.tier)
                    copies += 1
                    copied_bytes += promote.size
            if future is not None:
                future.opened(ino)
            if len(hits) % _REPORTED == 0:
                on_opens(_REPORTED)
        on_opens(len(hits) % _REPORTED)
        opened, is_resident = files.sizes[order], np.array(hits, bool)
        yield Epoch(
            opens=len(hits),
            hits=int(is_resident.sum()),
            bytes=int(opened.sum()),
            hit_bytes=int(opened[is_resident].sum()),
            copies=copies,
            copied_bytes=copied_bytes,
            seconds=None if rates is None else epoch_seconds(opened, is_resident, rates),
        )


def epoch_seconds(
    sizes: npt.NDArray[np.int64], is_hit: npt.NDArray[np.bool_], rates: Rates
) -> float:
    """The duration of an epoch in virtual time. ``sizes`` are those of the files in the order of
    their opens, in bytes."""
    fetched = consumed = 0.0
    # When the files of the buffer were used by the job, the oldest first.
    ends = [0.0] * rates.buffer
    fetch_s = np.where(is_hit, 0, sizes / rates.source).tolist()
    for position, (fetch, use) in enumerate(
        zip(fetch_s, (sizes / rates.job).tolist(), strict=True)
    ):
        place = position % rates.buffer
        fetched = max(fetched, ends[place]) + fetch
        consumed = ends[place] = max(consumed, fetched) + use
    return consumed


def shuffled(files: int, epochs: int, seed: int) -> list[Order]:
    """A new random order of all files for each epoch."""
    return [np.random.default_rng((seed, epoch)).permutation(files) for epoch in range(epochs)]


def _policy(name: str, files: Files, capacity: int, seed: int, future: Future | None) -> Policy:
    match name:
        case "no_evict":
            return _no_evict(files, capacity)
        case "first_come":
            return FirstCome()
        case "lru":
            return Lru()
        case "fifo":
            return Fifo()
        case "random":
            return RandomEviction(seed)
        case "belady" if future is not None:
            sizes = files.sizes.tolist()
            return Belady(_no_evict(files, capacity), future, lambda ino: sizes[ino - 1])
    raise ValueError(f"no policy {name!r}")


def _no_evict(files: Files, capacity: int) -> NoEvict:
    curve = np.bincount(buckets(files.keys), weights=files.sizes, minlength=BUCKETS)
    return NoEvict(curve.astype(np.uint64), [capacity])
