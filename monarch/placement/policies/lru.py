"""Least recently used, over all tiers as one. For comparison: no_evict has more hits.

Needs about 200 bytes for each resident item; the other policies need none.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from monarch.placement.ledger import Ledger
from monarch.placement.policy import Item, Placement, Policy, Victim
from monarch.types import Ino


class Lru(Policy):
    """A new item goes to the fastest tier with space. Without space it goes to the tier that has
    space first when copies are evicted in the order of their last use; no copy moves to a lower
    tier.
    """

    name = "lru"

    def __init__(self) -> None:
        self._copies: OrderedDict[Ino, tuple[int, int]] = OrderedDict()  # size, tier

    def choose(self, item: Item, ledger: Ledger, *, forced: bool = False) -> Placement | None:
        tier = ledger.fastest_with_room(item.size)
        if tier is not None:
            return Placement(tier)
        victims: dict[int, list[Victim]] = {tier: [] for tier in ledger.tiers}
        missing = {
            tier: item.size - ledger.room(tier)
            for tier in ledger.tiers
            if ledger.is_open(tier) and item.size <= ledger.capacity(tier)
        }
        if not missing:
            return None
        for ino, (size, tier) in self._copies.items():
            if tier in missing:
                victims[tier].append(Victim(ino, size))
                missing[tier] -= size
                if missing[tier] <= 0:
                    return Placement(tier, tuple(victims[tier]))
        return None

    def accessed(self, ino: Ino, tier: int) -> None:
        self._copies.move_to_end(ino)

    def placed(self, item: Item, tier: int) -> None:
        self._copies[item.ino] = (item.size, tier)
        self._copies.move_to_end(item.ino)

    def loaded(
        self, inos: npt.NDArray[np.integer], sizes: npt.NDArray[np.integer], *, tier: int
    ) -> None:
        for ino, size in zip(inos.tolist(), sizes.tolist(), strict=True):
            self._copies[Ino(ino)] = (size, tier)

    def removed(self, ino: Ino) -> None:
        self._copies.pop(ino, None)
