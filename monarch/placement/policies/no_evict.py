"""No eviction (CoorDL's MinIO), the residents chosen by hash. The default policy.

For one pass per epoch in a new random order, no demand policy has more hits per epoch than a fixed
set of residents. For a shuffled order any set is as good. For a constant order the set should be
spread over the epoch, so that hits and the promotions of the first epoch overlap with misses. A
hash does both. See docs/adr/0001-admission-by-hash-buckets.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from monarch.placement.ledger import Ledger
from monarch.placement.policies.first_come import FirstCome
from monarch.placement.policy import Item, Placement
from monarch.posix.buckets import bucket


def assign(curve: npt.NDArray[np.uint64], capacities: Sequence[int]) -> bytes:
    """The tier of every hash bucket (0: none), from the bytes of the files in each bucket.

    ``curve`` has one sum for each bucket, in the order of the hash. Each bucket goes to the fastest
    tier that can still hold all of it. A bucket that fits nowhere is skipped, so that a huge file
    does not block the rest. No tier gets more bytes than its capacity. One byte for each bucket.
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
    """Admits the buckets that ``assign`` gives to a tier, or all files if all fit."""

    name = "no_evict"

    def __init__(self, curve: npt.NDArray[np.uint64], capacities: Sequence[int]) -> None:
        # Python integers: the sum of the sizes of a hostile tree may exceed 64 bits.
        all_fits = sum(curve.tolist()) <= sum(capacities)
        self._tier_of_bucket = None if all_fits else assign(curve, capacities)

    def choose(self, item: Item, ledger: Ledger, *, forced: bool = False) -> Placement | None:
        # An empty file needs no space, so its bucket may have no tier.
        if forced or not item.size or self._tier_of_bucket is None:
            return super().choose(item, ledger)
        tier = self._tier_of_bucket[bucket(item.key)]
        return Placement(tier) if tier and ledger.fits(tier, item.size) else None
