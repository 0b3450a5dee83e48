"""First come, first placed: the fastest tier with room, for ever. For trees of unknown size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from monarch.placement.ledger import Ledger
from monarch.placement.policy import Item, Placement
from monarch.types import Ino


class FirstCome:
    """An item too big for every tier stays at the source and does not stop those after it."""

    @property
    def name(self) -> str:
        return "first_come"

    def choose(self, item: Item, ledger: Ledger, *, forced: bool = False) -> Placement | None:
        tier = ledger.fastest_with_room(item.size)
        return None if tier is None else Placement(tier)

    def accessed(self, ino: Ino, tier: int) -> None:
        """Nothing ever leaves, so nothing is learnt."""

    def placed(self, item: Item, tier: int) -> None:
        """See ``accessed``."""

    def loaded(
        self, inos: npt.NDArray[np.integer], sizes: npt.NDArray[np.integer], *, tier: int
    ) -> None:
        """See ``accessed``."""

    def removed(self, ino: Ino) -> None:
        """See ``accessed``."""
