"""Policies for comparison, which no mount has."""

from __future__ import annotations

import random
from collections.abc import Callable

from monarch.placement.ledger import Ledger
from monarch.placement.policy import Item, Lru, Placement, Policy, Victim
from monarch.types import Ino


class Fifo(Lru):
    """First in, first out: opens do not change the order in which copies leave."""

    name = "fifo"

    def accessed(self, ino: Ino, tier: int) -> None:
        return


class RandomEviction(Policy):
    """Copies of the first tier leave at random."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._copies: list[Victim] = []
        self._places: dict[Ino, int] = {}

    def choose(
        self,
        item: Item,
        ledger: Ledger,
        *,
        forced: bool = False,
        is_kept: Callable[[Ino], bool] | None = None,
    ) -> Placement | None:
        tier = ledger.tiers[0]
        if item.size > ledger.capacity(tier):
            return None
        victims: list[Victim] = []
        missing = item.size - ledger.room(tier)
        end = len(self._copies)
        while missing > 0:
            place = self._random.randrange(end)
            end -= 1
            self._swap(place, end)
            victims.append(self._copies[end])
            missing -= victims[-1].size
        return Placement(tier, tuple(victims))

    def placed(self, item: Item, tier: int) -> None:
        self._places[item.ino] = len(self._copies)
        self._copies.append(Victim(item.ino, item.size))

    def forget(self, ino: Ino) -> None:
        self._swap(self._places[ino], len(self._copies) - 1)
        self._copies.pop()
        del self._places[ino]

    def _swap(self, one: int, other: int) -> None:
        copies = self._copies
        copies[one], copies[other] = copies[other], copies[one]
        self._places[copies[one].ino] = one
        self._places[copies[other].ino] = other
