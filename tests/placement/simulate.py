"""Drives the real controller through epochs of opens, and times them in virtual seconds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from monarch.placement.belady import Belady, NextUses
from monarch.placement.controller import Controller, Promote
from monarch.placement.ledger import Ledger
from monarch.placement.policy import FirstCome, Item, Lru, NoEvict, Policy, assign
from monarch.placement.residency import Residency
from monarch.posix.buckets import BUCKETS, bucket
from monarch.types import Ino

# As a parallel file system numbers its files: large, dense, in the order of creation.
FIRST_SOURCE_INO = 144_115_205_255_725_056


def items_of(sizes: Iterable[int]) -> list[Item]:
    return [Item(Ino(n), size, FIRST_SOURCE_INO + n) for n, size in enumerate(sizes, 2)]


def curve_of(items: Iterable[Item]) -> npt.NDArray[np.uint64]:
    curve = np.zeros(BUCKETS, dtype=np.uint64)
    for item in items:
        curve[bucket(item.key)] += np.uint64(item.size)
    return curve


def policy_named(name: str, items: Sequence[Item], capacities: Sequence[int]) -> Policy:
    policies: dict[str, Policy] = {
        "no_evict": NoEvict(curve_of(items), capacities),
        "first_come": FirstCome(),
        "lru": Lru(),
    }
    return policies[name]


def predicted(items: Sequence[Item], capacities: Sequence[int]) -> dict[Ino, int]:
    """The tier of each item that ``no_evict`` admits."""
    tiers = range(1, len(capacities) + 1)
    table = assign({tiers: curve_of(items)}, capacities)[tiers]
    return {item.ino: tier for item in items if (tier := table[bucket(item.key)])}


@dataclass(frozen=True, slots=True)
class Pass:
    """One epoch: which opens hit, and which led to a promotion, by position."""

    hits: list[bool]
    promotions: list[int]


class Mount:
    """A controller over ``items`` whose copies are committed as soon as they are chosen."""

    def __init__(
        self,
        policy_name: str,
        items: Sequence[Item],
        capacities: Sequence[int],
        uses: NextUses | None = None,
    ) -> None:
        self.items = items
        self.residency = Residency(max(item.ino for item in items))
        self.ledger = Ledger(capacities)
        policy = policy_named(policy_name, items, capacities)
        if uses is not None:
            sizes = {item.ino: item.size for item in items}
            policy = Belady(policy, uses, sizes.__getitem__)
        self.policy = policy
        self.controller = Controller(self.residency, self.ledger, policy)

    def read(self, order: Iterable[Item]) -> Pass:
        result = Pass([], [])
        for position, item in enumerate(order):
            result.hits.append(self.residency.tier_of(item.ino) != 0)
            promote = self.controller.opened(item)
            if promote is not None:
                self.commit(promote)
                result.promotions.append(position)
        return result

    def commit(self, promote: Promote) -> None:
        self.controller.committed(promote.item, promote.tier)

    def shuffled(self, seed: int) -> list[Item]:
        order = list(self.items)
        random.Random(seed).shuffle(order)
        return order

    def resident(self) -> dict[Ino, int]:
        tiers = self.ledger.tiers
        return {ino: tier for tier in tiers for ino in self.residency.resident_in(tier)}


def belady_hits(order: Sequence[Ino], capacity: int) -> list[bool]:
    """Belady's rule with bypass, for files of one size, from its definition: at a miss with a full
    cache, of the cached files and the new one, the one whose next use is the farthest is left
    out."""
    cached: set[Ino] = set()
    hits = []
    uses: dict[Ino, list[int]] = {}
    for position in range(len(order) - 1, -1, -1):
        uses.setdefault(order[position], []).append(position)
    for ino in order:
        uses[ino].pop()
        hits.append(ino in cached)
        if ino not in cached:
            cached.add(ino)
            if len(cached) > capacity:
                cached.remove(max(cached, key=lambda each: (uses[each] or [math.inf])[-1]))
    return hits


def epoch_time(hits: Sequence[bool], *, miss_s: float, step_s: float, buffer: int) -> float:
    """Seconds of an epoch: a loader fetches in order, ``buffer`` items ahead of the consumer.

    A miss takes ``miss_s``, a hit nothing, and the consumer ``step_s`` for each item.
    """
    fetched = 0.0
    consumed = [0.0] * len(hits)
    for position, hit in enumerate(hits):
        slot_free = consumed[position - buffer] if position >= buffer else 0.0
        fetched = max(fetched, slot_free) + (0.0 if hit else miss_s)
        consumed[position] = max(consumed[position - 1], fetched) + step_s
    return consumed[-1]
