"""The interface of placement policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from monarch.placement.ledger import Ledger
from monarch.types import Ino


@dataclass(frozen=True, slots=True)
class Item:
    """The unit of placement: a whole file of ``size`` bytes.

    ``key`` is its inode number at the source, which survives a new snapshot, unlike ``ino``.
    """

    ino: Ino
    size: int
    key: int


@dataclass(frozen=True, slots=True)
class Victim:
    """A copy to be evicted, and the bytes that this frees."""

    ino: Ino
    size: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The tier for an item, and the copies of that tier that must be evicted first."""

    tier: int
    evict: tuple[Victim, ...] = ()


class Policy(Protocol):
    """A policy. Its methods use memory only, do not wait and do not reserve space.

    A policy that never evicts inherits all methods but ``choose``: they do nothing.
    """

    name: str

    def choose(self, item: Item, ledger: Ledger, *, forced: bool = False) -> Placement | None:
        """The tier for ``item``; None: leave it at the source.

        With ``forced`` the user requested it: only the space counts.
        """

    def accessed(self, ino: Ino, tier: int) -> None:
        """A resident item was opened."""
        return

    def placed(self, item: Item, tier: int) -> None:
        """A copy was committed."""
        return

    def loaded(
        self, inos: npt.NDArray[np.integer], sizes: npt.NDArray[np.integer], *, tier: int
    ) -> None:
        """Copies of an earlier daemon were found at start."""
        return

    def removed(self, ino: Ino) -> None:
        """A copy was removed."""
        return
