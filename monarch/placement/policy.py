"""What a placement policy is told and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from monarch.placement.ledger import Ledger
from monarch.types import Ino


@dataclass(frozen=True, slots=True)
class Item:
    """What placement moves: a whole file of ``size`` bytes.

    ``key`` is its inode number at the source: it survives a new snapshot, ``ino`` does not.
    """

    ino: Ino
    size: int
    key: int


@dataclass(frozen=True, slots=True)
class Victim:
    """A copy that has to go, and the bytes that it frees."""

    ino: Ino
    size: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The tier for an item, and the copies of that tier that have to go first."""

    tier: int
    evict: tuple[Victim, ...] = ()


class Policy(Protocol):
    """Answers at once and from memory; reserves nothing."""

    @property
    def name(self) -> str: ...

    def choose(self, item: Item, ledger: Ledger, *, forced: bool = False) -> Placement | None:
        """Where ``item`` should go; None: leave it at the source.

        With ``forced`` a person asked for it: only the room counts.
        """

    def accessed(self, ino: Ino, tier: int) -> None:
        """A resident item was opened."""

    def placed(self, item: Item, tier: int) -> None:
        """A copy was committed."""

    def loaded(
        self, inos: npt.NDArray[np.integer], sizes: npt.NDArray[np.integer], *, tier: int
    ) -> None:
        """Copies of an earlier run were found at start."""

    def removed(self, ino: Ino) -> None:
        """A copy is gone."""
