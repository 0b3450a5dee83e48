"""Chooses copies that make room for a more important one, under policies that evict nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from monarch.placement.ledger import Ledger
from monarch.placement.parts import Parts
from monarch.placement.policy import Item, Placement, Victim
from monarch.placement.residency import Residency
from monarch.types import Ino

# Copies of a subtree whose frequencies are compared for one file.
_SAMPLE = 16
# Copies that are compared for one file. The next file continues after them.
_MOST_COMPARED = 1024
# Subtrees whose copies are taken in turn.
_MOST_TURNS = 256


class Replacement:
    """Takes the copies of a tier in turn, so that no part of a data set loses all of its copies to
    the first files. Partial copies leave first. ``size_of`` returns the size of a copy in bytes."""

    def __init__(self, residency: Residency, ledger: Ledger, parts: Parts) -> None:
        self._parts = parts
        self._residency = residency
        self._ledger = ledger
        # The copies that come next, by tier and by the numbers among which they are.
        self._turns: dict[tuple[int, range | None], Iterator[Ino]] = {}
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
            for ino in self._parts.inos(tier):
                if missing > 0:
                    victims[ino] = Victim(ino, self._parts.held(ino))
                    missing -= victims[ino].size
            for ino in self._next(tier, None, _MOST_COMPARED):
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

    def exchange(
        self,
        item: Item,
        tiers: range,
        files: range,
        is_kept: Callable[[Ino], bool],
        count: Callable[[Ino], int],
    ) -> Placement | None:
        """As ``make``, with copies of ``files`` that have at least the size of the item, even if
        there is free room: the copies with the lowest ``count`` of a few."""
        for tier in tiers:
            ledger = self._ledger
            if not ledger.is_open(tier) or item.size > ledger.usable(tier):
                continue
            missing = item.size - min(0, ledger.room(tier))
            sample = {
                ino
                for ino in self._next(tier, files, _SAMPLE)
                if not is_kept(ino) and not self._residency.is_copying(ino)
            }
            victims: list[Victim] = []
            for ino in sorted(sample, key=count):
                if missing <= 0:
                    break
                victims.append(Victim(ino, self.size_of(ino)))
                missing -= victims[-1].size
            if victims and missing <= 0:
                return Placement(tier, tuple(victims))
        return None

    def _next(self, tier: int, files: range | None, most: int) -> Iterator[Ino]:
        """The next copies of a tier, all of them or those among ``files``; after the last comes the
        first."""
        key = tier, files
        if len(self._turns) > _MOST_TURNS:
            self._turns.clear()
        seen = 0
        for _ in range(2):
            turn = self._turns.get(key) or self._residency.resident_in(tier, files)
            self._turns[key] = turn
            for ino in turn:
                if self._residency.tier_of(ino) == tier:
                    yield ino
                seen += 1
                if seen >= most:
                    return
            del self._turns[key]


def _unknown(ino: Ino) -> int:
    raise ValueError(f"no size of the copy of inode {ino} is known")
