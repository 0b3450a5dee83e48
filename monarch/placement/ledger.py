"""The used, reserved and free bytes of each tier. No tier is filled beyond its capacity.

reserve -> commit -> release        a copy is made and later removed
reserve -> cancel                   a copy is given up

The disk of a tier may have less free space than its capacity, since other programs use it, too:
``see_room`` sets the space found there, which then limits reservations as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy


class Ledger:
    """The accounts of the tiers 1 to ``len(capacities)``, fastest first, in bytes. A call that
    would make an account negative raises ValueError: it is a bug of the caller."""

    def __init__(self, capacities: Sequence[int]) -> None:
        for capacity in capacities:
            _require_size(capacity)
        self._capacity = [0, *capacities]
        self._used = [0] * len(self._capacity)
        self._reserved = [0] * len(self._capacity)
        # Bytes that are not available for copies.
        self._held = [0] * len(self._capacity)
        # Free bytes of the disk beyond all reservations; negative if other programs filled it.
        self._disk: list[float] = [math.inf] * len(self._capacity)
        self._closed: set[int] = set()
        self.tiers = range(1, len(self._capacity))

    def only(self, tier: int) -> Ledger:
        """The same accounts, of one tier only."""
        view = copy(self)
        self._known(tier)
        view.tiers = range(tier, tier + 1)
        return view

    def usable(self, tier: int) -> int:
        """Bytes of the capacity that are not set aside."""
        return max(0, self.capacity(tier) - self._held[tier])

    def capacity(self, tier: int) -> int:
        return self._capacity[self._known(tier)]

    def used(self, tier: int) -> int:
        return self._used[self._known(tier)]

    def reserved(self, tier: int) -> int:
        return self._reserved[self._known(tier)]

    def free(self, tier: int) -> int:
        """Bytes neither used nor reserved; 0 if a tier holds more than its reduced capacity."""
        return max(0, self._unclaimed(tier))

    def _unclaimed(self, tier: int) -> int:
        used = self._used[self._known(tier)] + self._reserved[tier] + self._held[tier]
        return self._capacity[tier] - used

    def hold(self, tier: int, size: int) -> None:
        """Sets ``size`` bytes of the capacity of a tier aside from copies."""
        _require_size(size)
        self._held[self._known(tier)] = size

    def is_open(self, tier: int) -> bool:
        return self._known(tier) not in self._closed

    def room(self, tier: int) -> int:
        """Bytes that can be reserved, also on the disk; negative if copies must go first."""
        return int(min(self._unclaimed(tier), self._disk[tier]))

    def see_room(self, tier: int, available: int) -> None:
        """Sets the bytes that can still be written to the disk, with those of running copies."""
        self._disk[tier] = available - self._reserved[self._known(tier)]

    def fits(self, tier: int, size: int) -> bool:
        """Whether ``reserve`` would succeed."""
        return self.is_open(tier) and size <= max(0, self.room(tier))

    def fastest_with_room(self, size: int) -> int | None:
        return next((tier for tier in self.tiers if self.fits(tier, size)), None)

    def reserve(self, tier: int, size: int) -> bool:
        """Reserves ``size`` bytes; returns False, and reserves nothing, if there is no space."""
        _require_size(size)
        if not self.fits(tier, size):
            return False
        self._reserved[tier] += size
        self._disk[tier] -= size
        return True

    def commit(self, tier: int, size: int) -> None:
        """Turns ``size`` reserved bytes into used ones."""
        self.cancel(tier, size)
        self._used[tier] += size
        self._disk[tier] -= size

    def cancel(self, tier: int, size: int) -> None:
        _require_size(size)
        if size > self.reserved(tier):
            raise ValueError(f"tier {tier}: {size} bytes of {self._reserved[tier]} reserved")
        self._reserved[tier] -= size
        self._disk[tier] += size

    def release(self, tier: int, size: int) -> None:
        _require_size(size)
        if size > self.used(tier):
            raise ValueError(f"tier {tier}: {size} bytes of {self._used[tier]} used")
        self._used[tier] -= size
        self._disk[tier] += size

    def load(self, tier: int, size: int) -> None:
        """Counts the bytes that a tier holds at start, even if they exceed its capacity."""
        _require_size(size)
        self._used[self._known(tier)] += size

    def close(self, tier: int) -> None:
        """Takes a tier out of service: no new reservations; running ones can still be settled."""
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
