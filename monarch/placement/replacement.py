"""Chooses copies that make room for a more important one, under policies that evict nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from monarch.placement.ledger import Ledger
from monarch.placement.policy import Item, Placement, Victim
from monarch.placement.residency import Residency
from monarch.types import Ino

# Copies that are compared for one file. The next file continues after them.
_MOST_COMPARED = 1024


class Replacement:
    """Takes the copies of a tier in turn, so that no part of a data set loses all of its copies to
    the first files. ``size_of`` returns the size of a copy in bytes."""

    def __init__(self, residency: Residency, ledger: Ledger) -> None:
        self._residency = residency
        self._ledger = ledger
        self._turns: dict[int, Iterator[Ino]] = {}
        self.size_of: Callable[[Ino], int] = _unknown

    def make(self, item: Item, tiers: range, is_kept: Callable[[Ino], bool]) -> Placement | None:
        """Room for an item in the fastest of ``tiers`` in which copies can make it; None if there
        is none, or only among more copies than one call compares. Copies for which ``is_kept`` is
        true stay."""
        for tier in tiers:
            ledger = self._ledger
            if not ledger.is_open(tier) or item.size > ledger.usable(tier):
                continue
            missing = item.size - ledger.room(tier)
            victims: dict[Ino, Victim] = {}
            for ino in self._next(tier):
                if missing <= 0:
                    break
                size = self.size_of(ino)
                is_free = not is_kept(ino) and not self._residency.is_copying(ino)
                if size and is_free and ino not in victims:
                    victims[ino] = Victim(ino, size)
                    missing -= size
            if missing <= 0:
                return Placement(tier, tuple(victims.values()))
        return None

    def _next(self, tier: int) -> Iterator[Ino]:
        """The next copies of a tier; after the last comes the first."""
        seen = 0
        for _ in range(2):
            turn = self._turns.get(tier) or self._residency.resident_in(tier)
            self._turns[tier] = turn
            for ino in turn:
                if self._residency.tier_of(ino) == tier:
                    yield ino
                seen += 1
                if seen >= _MOST_COMPARED:
                    return
            del self._turns[tier]


def _unknown(ino: Ino) -> int:
    raise ValueError(f"no size of the copy of inode {ino} is known")
