"""First come, first placed: the fastest tier with space; no evictions. For trees of unknown
size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from monarch.placement.ledger import Ledger
from monarch.placement.policy import Item, Placement
from monarch.types import Ino


class FirstCome:
    """An item that is too large for every tier stays at the source and does not block later
    ones."""

    @property
    def name(self) -> str:
        return "first_come"

    def choose(self, item: Item, ledger: Ledger, *, forced: bool = False) -> Placement | None:
        tier = ledger.fastest_with_room(item.size)
        return None if tier is None else Placement(tier)

    def accessed(self, ino: Ino, tier: int) -> None:
        """Does nothing: this policy never evicts."""

    def placed(self, item: Item, tier: int) -> None:
        """See ``accessed``."""

    def loaded(
        self, inos: npt.NDArray[np.integer], sizes: npt.NDArray[np.integer], *, tier: int
    ) -> None:
        """See ``accessed``."""

    def removed(self, ino: Ino) -> None:
        """See ``accessed``."""
