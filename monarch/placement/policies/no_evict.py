"""No eviction (CoorDL's MinIO), the residents chosen by hash. The default policy.

For one pass per epoch in a fresh random order no demand policy has more hits per epoch than a
fixed set of residents. Which set does not matter for a shuffled order; for a constant one it
should be spread over the epoch, so that hits overlap with misses, and so should the promotions of
the first epoch. A hash does both. See docs/adr/0001-admission-by-hash-buckets.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from monarch.buckets import bucket
from monarch.placement.ledger import Ledger
from monarch.placement.policies.first_come import FirstCome
from monarch.placement.policy import Item, Placement


def assign(curve: npt.NDArray[np.uint64], capacities: Sequence[int]) -> bytes:
    """The tier of every hash bucket (0: none), given the bytes of the files in each bucket.

    Buckets are taken in the order of the hash; each goes to the fastest tier that still
    holds all of it. One that fits nowhere is skipped, so that a huge file does not stop the rest.
    No tier is given more bytes than its capacity.
    """
    filled = np.flatnonzero(curve)
    table = bytearray(len(curve))
    room = list(capacities)
    smallest = int(curve[filled].min()) if filled.size else 0
    for index, size in zip(filled.tolist(), curve[filled].tolist(), strict=True):
        for tier, left in enumerate(room, 1):
            if size <= left:
                table[index] = tier
                room[tier - 1] = left = left - size
                if left < smallest and max(room) < smallest:
                    return bytes(table)
                break
    return bytes(table)


class NoEvict(FirstCome):
    """Admits the buckets that ``assign`` gives to a tier, and everything when everything fits."""

    def __init__(self, curve: npt.NDArray[np.uint64], capacities: Sequence[int]) -> None:
        # Python's integers: the sum of a hostile tree's sizes may pass 64 bits.
        all_fits = sum(curve.tolist()) <= sum(capacities)
        self._tier_of_bucket = None if all_fits else assign(curve, capacities)

    @property
    def name(self) -> str:
        return "no_evict"

    def choose(self, item: Item, ledger: Ledger, *, forced: bool = False) -> Placement | None:
        # An empty file takes no room, so its bucket may have none.
        if forced or not item.size or self._tier_of_bucket is None:
            return super().choose(item, ledger)
        tier = self._tier_of_bucket[bucket(item.key)]
        return Placement(tier) if tier and ledger.fits(tier, item.size) else None
