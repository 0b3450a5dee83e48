"""Decides what is promoted and keeps residency, ledger and policy in step.

Decisions are plain values: the transfer engine carries a ``Promote`` out and then says, exactly
once, how it went. An item's way, and what is held for it meanwhile:

    source --opened, warm--> wanted, copying --committed--> resident --dropped--> source
                reservation   |     ^
                              |     '--opened, warm, next_wanted--.
                              |--deferred, abandoned(retry)--> wanted       no reservation
                              '--abandoned--> source

A reservation is held exactly while an item is copying, so that what only waits for its turn keeps
no other item out. The wanted mark is kept until the item is resident, is given up, is evicted, or
its turn comes and there is no room for it: then it is as if it had not been opened yet. A copy
under way without the mark is of no use to anybody, unless somebody asks for it again before it
ends. What somebody has open at the source is offered again from time to time, since no first open
of it may come for days.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, takewhile

import numpy as np
import numpy.typing as npt

from monarch.placement.ledger import Ledger
from monarch.placement.policy import Item, Policy
from monarch.placement.residency import SOURCE, Residency
from monarch.types import ROOT_INO, Ino


@dataclass(frozen=True, slots=True)
class Promote:
    """Copy ``item`` to ``tier``; the room is reserved.

    The copies of ``evict`` count as gone: remove them first, also when the copy is then deferred
    or abandoned.
    """

    item: Item
    tier: int
    evict: tuple[Ino, ...] = ()

    @property
    def ino(self) -> Ino:
        return self.item.ino

    @property
    def size(self) -> int:
        return self.item.size


class Controller:
    """Belongs to the event loop; no method waits. Sizes are those of the item when it was chosen.

    ValueError: an answer to a ``Promote`` that is not under way.
    """

    def __init__(self, residency: Residency, ledger: Ledger, policy: Policy) -> None:
        self._residency = residency
        self._ledger = ledger
        self._policy = policy
        self._next_ino = ROOT_INO

    def load(
        self, inos: npt.NDArray[np.integer], sizes: npt.NDArray[np.integer], *, tier: int
    ) -> None:
        """Take over the copies that a tier holds at start. Each ``ino`` once, and in one tier.

        The policy learns of copies here alone, so the table must not be filled behind its back.
        """
        self._residency.load(inos, tier)
        self._ledger.load(tier, int(sizes.sum()))
        self._policy.loaded(inos, sizes, tier=tier)

    def opened(self, item: Item) -> Promote | None:
        """An item is being opened: what to copy, if anything.

        An item that only waits for its turn is decided upon anew: its bytes are being read now.
        """
        tier = self._residency.tier_of(item.ino)
        if tier != SOURCE:
            self._policy.accessed(item.ino, tier)
            return None
        return self._promote(item, forced=self._residency.is_forced(item.ino))

    def offered(self, item: Item) -> Promote | None:
        """An item that was opened is still read from the source: what to copy, if there is room.

        No copy leaves for it: that was decided upon when it was opened.
        """
        if self._residency.tier_of(item.ino) != SOURCE or self._residency.is_copying(item.ino):
            return None
        forced = self._residency.is_forced(item.ino)
        placement = self._policy.choose(item, self._ledger, forced=forced)
        if placement is None or placement.evict:
            return None
        return self._promote(item, forced=forced)

    def accessed(self, ino: Ino, tier: int) -> None:
        """Opened by who did not ask, from a copy (tier > 0) that may have left since."""
        if tier != SOURCE and self._residency.tier_of(ino) == tier:
            self._policy.accessed(ino, tier)

    def warm(self, item: Item) -> Promote | None:
        """A person asks for the item: only the room counts, not what the policy would admit."""
        if self._residency.tier_of(item.ino) != SOURCE:
            return None
        return self._promote(item, forced=True)

    def is_wanted(self, ino: Ino) -> bool:
        """Whether a copy of it, when it is complete, is to be kept."""
        return self._residency.is_wanted(ino)

    def next_wanted(self, lookup: Callable[[Ino], Item | None]) -> Promote | None:
        """The next item that waits for its turn, round robin; None when there is none.

        ``lookup`` answers None for an inode that is no longer a file. That one, and one without
        room, lose their mark, so a call costs no more than the marks that it consumes.
        """
        for ino in self._wanted_round_robin():
            if self._residency.is_copying(ino):
                continue
            self._next_ino = Ino(ino + 1)
            item = lookup(ino)
            if item is not None:
                promote = self._promote(item, forced=self._residency.is_forced(ino))
                if promote is not None:
                    return promote
            self._residency.unwant(ino)
        return None

    def committed(self, item: Item, tier: int) -> None:
        """The copy is complete, verified and visible."""
        self._end_copy(item)
        self._ledger.commit(tier, item.size)
        self._residency.unwant(item.ino)
        self._residency.place(item.ino, tier)
        self._policy.placed(item, tier)

    def abandoned(self, item: Item, tier: int, *, retry: bool) -> None:
        """The copy failed and nothing of it is left; with ``retry`` it stays wanted."""
        self._end_copy(item)
        self._ledger.cancel(tier, item.size)
        if not retry:
            self._residency.unwant(item.ino)

    def deferred(self, promote: Promote) -> None:
        """The queue cannot take it now: it stays wanted and waits for ``next_wanted``."""
        self.abandoned(promote.item, promote.tier, retry=True)

    def dropped(self, ino: Ino, size: int) -> int:
        """A copy of ``size`` bytes is gone, or must not be used. Returns its tier (0: none)."""
        tier = self._residency.clear(ino)
        if tier != SOURCE:
            self._ledger.release(tier, size)
            self._policy.removed(ino)
        return tier

    def _promote(self, item: Item, *, forced: bool) -> Promote | None:
        if self._residency.is_copying(item.ino):
            self._residency.want(item.ino, forced=forced)
            return None
        placement = self._policy.choose(item, self._ledger, forced=forced)
        if placement is None:
            return None
        if any(self._residency.is_copying(victim.ino) for victim in placement.evict):
            return None
        for victim in placement.evict:
            self.dropped(victim.ino, victim.size)
        if not self._ledger.reserve(placement.tier, item.size):
            raise ValueError(f"{self._policy.name} chose tier {placement.tier}, which has no room")
        self._residency.want(item.ino, forced=forced)
        self._residency.start_copy(item.ino)
        return Promote(item, placement.tier, tuple(victim.ino for victim in placement.evict))

    def _end_copy(self, item: Item) -> None:
        if not self._residency.is_copying(item.ino):
            raise ValueError(f"inode {item.ino} is not being copied")
        self._residency.end_copy(item.ino)

    def _wanted_round_robin(self) -> Iterator[Ino]:
        start = self._next_ino
        before = takewhile(lambda ino: ino < start, self._residency.wanted_from(ROOT_INO))
        return chain(self._residency.wanted_from(start), before)
