"""First come, first placed: the fastest tier with space; no evictions. For trees of unknown
size."""

from __future__ import annotations

from monarch.placement.ledger import Ledger
from monarch.placement.policy import Item, Placement, Policy


class FirstCome(Policy):
    """An item that is too large for every tier stays at the source and does not block later
    ones."""

    name = "first_come"

    def choose(self, item: Item, ledger: Ledger, *, forced: bool = False) -> Placement | None:
        tier = ledger.fastest_with_room(item.size)
        return None if tier is None else Placement(tier)
