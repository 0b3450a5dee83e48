"""How many bytes of each tier are used, reserved and free. No tier is ever filled past capacity.

reserve -> commit -> release        a copy that is made and later dropped
reserve -> cancel                   a copy that is given up

A tier's disk may have less room than its capacity promises, because others use it too: ``see_room``
says how much was seen there, and from then on that is accounted for as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class Ledger:
    """Accounts of the tiers 1 to ``len(capacities)``, fastest first, in bytes.

    What would make an account negative raises ValueError: it is a mistake of the caller.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        for capacity in capacities:
            _require_size(capacity)
        self._capacity = [0, *capacities]
        self._used = [0] * len(self._capacity)
        self._reserved = [0] * len(self._capacity)
        # What is kept for others than copies.
        self._held = [0] * len(self._capacity)
        # What the disk has room for beyond what is reserved; less than nothing if others filled it.
        self._disk: list[float] = [math.inf] * len(self._capacity)
        self._closed: set[int] = set()

    @property
    def tiers(self) -> range:
        return range(1, len(self._capacity))

    def capacity(self, tier: int) -> int:
        return self._capacity[self._known(tier)]

    def used(self, tier: int) -> int:
        return self._used[self._known(tier)]

    def reserved(self, tier: int) -> int:
        return self._reserved[self._known(tier)]

    def free(self, tier: int) -> int:
        """Bytes neither used nor reserved; 0 in a tier that was made smaller than what it holds."""
        return max(0, self._left(tier))

    def _left(self, tier: int) -> int:
        used = self._used[self._known(tier)] + self._reserved[tier] + self._held[tier]
        return self._capacity[tier] - used

    def hold(self, tier: int, size: int) -> None:
        """Keep so many bytes of a tier's capacity for others than copies, from now on."""
        _require_size(size)
        self._held[self._known(tier)] = size

    def is_open(self, tier: int) -> bool:
        return self._known(tier) not in self._closed

    def room(self, tier: int) -> int:
        """Bytes that can be reserved, on the disk too; negative if something is to leave first."""
        return int(min(self._left(tier), self._disk[tier]))

    def see_room(self, tier: int, available: int) -> None:
        """So many bytes may still be written to the disk, by copies under way and all others."""
        self._disk[tier] = available - self._reserved[self._known(tier)]

    def fits(self, tier: int, size: int) -> bool:
        """Whether ``reserve`` would succeed."""
        return self.is_open(tier) and size <= max(0, self.room(tier))

    def fastest_with_room(self, size: int) -> int | None:
        return next((tier for tier in self.tiers if self.fits(tier, size)), None)

    def reserve(self, tier: int, size: int) -> bool:
        """Claim ``size`` bytes; False, and nothing claimed, when there is no room."""
        _require_size(size)
        if not self.fits(tier, size):
            return False
        self._reserved[tier] += size
        self._disk[tier] -= size
        return True

    def commit(self, tier: int, size: int) -> None:
        """Reserved bytes have become used ones."""
        self.cancel(tier, size)
        self._used[tier] += size
        self._disk[tier] -= size

    def cancel(self, tier: int, size: int) -> None:
        """Return a reservation."""
        _require_size(size)
        if size > self.reserved(tier):
            raise ValueError(f"tier {tier}: {size} bytes of {self._reserved[tier]} reserved")
        self._reserved[tier] -= size
        self._disk[tier] += size

    def release(self, tier: int, size: int) -> None:
        """A copy is gone."""
        _require_size(size)
        if size > self.used(tier):
            raise ValueError(f"tier {tier}: {size} bytes of {self._used[tier]} used")
        self._used[tier] -= size
        self._disk[tier] += size

    def load(self, tier: int, size: int) -> None:
        """Count what a tier holds at start, even if it is more than its capacity is now."""
        _require_size(size)
        self._used[self._known(tier)] += size

    def close(self, tier: int) -> None:
        """Take a tier out of service: no new reservation. Running ones can still be settled."""
        self._closed.add(self._known(tier))

    def open(self, tier: int) -> None:
        self._closed.discard(self._known(tier))

    def _known(self, tier: int) -> int:
        if tier not in self.tiers:
            raise ValueError(f"no tier {tier}")
        return tier


def _require_size(size: int) -> None:
    if size < 0:
        raise ValueError(f"a negative size: {size}")
