"""How many bytes of each tier are used, reserved and free. No tier is ever filled past capacity.

reserve -> commit -> release        a copy that is made and later dropped
reserve -> cancel                   a copy that is given up
"""

from __future__ import annotations

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
        self._known(tier)
        return max(0, self._capacity[tier] - self._used[tier] - self._reserved[tier])

    def is_open(self, tier: int) -> bool:
        return self._known(tier) not in self._closed

    def fits(self, tier: int, size: int) -> bool:
        """Whether ``reserve`` would succeed."""
        return self.is_open(tier) and size <= self.free(tier)

    def fastest_with_room(self, size: int) -> int | None:
        return next((tier for tier in self.tiers if self.fits(tier, size)), None)

    def reserve(self, tier: int, size: int) -> bool:
        """Claim ``size`` bytes; False, and nothing claimed, when there is no room."""
        _require_size(size)
        if not self.fits(tier, size):
            return False
        self._reserved[tier] += size
        return True

    def commit(self, tier: int, size: int) -> None:
        """Reserved bytes have become used ones."""
        self.cancel(tier, size)
        self._used[tier] += size

    def cancel(self, tier: int, size: int) -> None:
        """Return a reservation."""
        _require_size(size)
        if size > self.reserved(tier):
            raise ValueError(f"tier {tier}: {size} bytes of {self._reserved[tier]} reserved")
        self._reserved[tier] -= size

    def release(self, tier: int, size: int) -> None:
        """A copy is gone."""
        _require_size(size)
        if size > self.used(tier):
            raise ValueError(f"tier {tier}: {size} bytes of {self._used[tier]} used")
        self._used[tier] -= size

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
