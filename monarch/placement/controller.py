"""Decides what is promoted and keeps residency, ledger and policy consistent.

Decisions are plain values: the transfer engine carries out a ``Promote`` and then reports its
result exactly once. The states of an item, and its reservation:

    source --opened, warm--> wanted, copying --committed--> resident --dropped--> source
                reservation   |     ^
                              |     '--opened, warm, next_wanted--.
                              |--deferred, abandoned(retry)--> wanted       no reservation
                              '--abandoned--> source

An item has a reservation exactly while it is copying, so that a waiting item does not keep out
others. The wanted mark is kept until the item is resident, is given up, is evicted, or its turn
comes and there is no space; then the item counts as not opened. A running copy without the mark is
useless, unless the item is requested again before the copy ends. Files that are open at the source
are offered again from time to time, since their next first open may be days away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

import numpy as np
import numpy.typing as npt

from monarch.placement.admission import Admission
from monarch.placement.ledger import Ledger
from monarch.placement.parts import PartAdmission, Parts
from monarch.placement.policy import Item, Placement, Policy
from monarch.placement.quotas import Quotas
from monarch.placement.replacement import Replacement
from monarch.placement.residency import SOURCE, Residency
from monarch.placement.rules import Rules
from monarch.types import ROOT_INO, Ino

# Pinned copies that are passed over for others, and that a policy forgets for one file: a few
# milliseconds each.
_MOST_SKIPPED = 4096
_MOST_FORGOTTEN = 512


@dataclass(frozen=True, slots=True)
class Promote:
    """Copy ``item`` to ``tier``; the space is reserved. The copies in ``evict`` must be removed
    first, also if the copy is then deferred or abandoned."""

    item: Item
    tier: int
    evict: tuple[Ino, ...] = ()

    @property
    def ino(self) -> Ino:
        return self.item.ino

    @property
    def size(self) -> int:
        return self.item.size


def _never(ino: Ino) -> bool:
    return False


def _always(item: Item) -> bool:
    return True


class Controller:
    """Belongs to the event loop; no method waits. Sizes are those of the item at the decision.
    Raises ValueError for a result of a ``Promote`` that is not running."""

    def __init__(
        self, residency: Residency, ledger: Ledger, policy: Policy, rules: Rules | None = None
    ) -> None:
        self._residency = residency
        self._ledger = ledger
        self._policy = policy
        self._rules = rules
        # The partial copies. A file with one gets no whole copy.
        self.parts = Parts(residency, ledger, policy)
        self._replacement = Replacement(residency, ledger, self.parts)
        self._admission: Admission | None = None
        # With other nodes: whether this one copies an item that no user and no rule asks for, and
        # the bytes in each bucket of the files that it keeps; None: of all files.
        self.keeps: Callable[[Item], bool] = _always
        self.kept_curve: npt.NDArray[np.uint64] | None = None
        # The quotas of jobs, None if there are none. With quotas an open brings a copy only within
        # the quota of its job, and nothing else does but rules and users.
        self.quotas: Quotas | None = None
        self._next_ino = ROOT_INO
        # Whether a complete copy of an inode is to be kept.
        self.is_wanted = residency.is_wanted

    def load(
        self, inos: npt.NDArray[np.integer], sizes: npt.NDArray[np.integer], *, tier: int
    ) -> None:
        """Registers the copies that a tier holds at start, each ``ino`` once, in one tier. The
        policy learns of copies only here, so no other code may fill the residency table."""
        self._residency.load(inos, tier)
        self._ledger.load(tier, int(sizes.sum()))
        self._policy.loaded(inos, sizes, tier=tier)

    def opened(
        self, item: Item, *, may_evict: bool = True, job: int | None = None, is_held: bool = False
    ) -> Promote | None:
        """Called when an item is opened: what to copy, if anything. An item that waits for its turn
        is decided again: its bytes are being read now. Without ``may_evict`` only free space
        counts. ``job``: whose quota is charged. ``is_held``: ends ``hold`` if it is not copied."""
        tier = self._residency.tier_of(item.ino)
        if tier != SOURCE:
            self._policy.accessed(item.ino, tier)
            return None
        forced = self._residency.is_forced(item.ino)
        if self._residency.is_copying(item.ino) and not is_held:
            self._residency.want(item.ino, forced=forced)
            return None
        may_evict = may_evict or (self.quotas is None and self._is_pinned(item.ino))
        promote = self._promote(item, forced=forced, may_evict=may_evict, job=job)
        if promote is None and is_held:
            self.release(item.ino)
        return promote

    def offered(self, item: Item) -> Promote | None:
        """Offers an item that the source serves, and that is open or will be opened: what to copy,
        if anything. No copy is evicted for it, unless it is pinned: its open decides that."""
        if self.is_placed(item.ino):
            return None
        forced = self._residency.is_forced(item.ino)
        return self._promote(item, forced=forced, may_evict=self._is_pinned(item.ino))

    def admits(self, item: Item, *, forced: bool = False) -> bool:
        """Whether there is a place for an item of this size while no copy leaves for it. ``forced``
        as in ``warm``."""
        placement = self._choose(item, forced=forced, may_evict=False)
        return placement is not None and not placement.evict

    def offered_together(self, items: Sequence[Item], *, forced: bool = False) -> list[Promote]:
        """Offers items that are read at once, as ``offered`` one: which of them to copy. All get a
        place in one tier, or none does; the first decides which. Those that a rule keeps out of
        this tier, and those that have a place, are left out. ``forced`` as in ``warm``."""
        free = [item for item in items if not self.is_placed(item.ino)]
        if self._rules is not None and free:
            rule = self._rules.of(free[0].ino)
            free = [item for item in free if self._rules.of(item.ino) is rule]
        if not free:
            return []
        total = Item(free[0].ino, sum(item.size for item in free), free[0].key)
        placement = self._choose(total, forced=forced, may_evict=False)
        if placement is None or placement.evict:
            return []
        if not self._ledger.fits(placement.tier, total.size):
            raise ValueError(f"{self._policy.name} chose tier {placement.tier}, which has no space")
        promotes = []
        for item in free:
            self._ledger.reserve(placement.tier, item.size)
            self._residency.want(item.ino, forced=forced or self._residency.is_forced(item.ino))
            self._residency.start_copy(item.ino)
            promotes.append(Promote(item, placement.tier))
        return promotes

    def copies(self, tier: int) -> Iterator[Ino]:
        """The items with copies in a tier, partial ones first, pinned ones last, if the others are
        found soon. They may change meanwhile."""
        yield from self.parts.inos(tier)
        pinned: list[Ino] = []
        for ino in self._residency.resident_in(tier):
            if len(pinned) < _MOST_SKIPPED and self._is_pinned(ino):
                pinned.append(ino)
            else:
                yield ino
        yield from pinned

    def is_placed(self, ino: Ino) -> bool:
        """Whether an item is resident, being copied, or has a partial copy."""
        return (
            self._residency.tier_of(ino) != SOURCE
            or self._residency.is_copying(ino)
            or self.parts.tier_of(ino) != SOURCE
        )

    def is_excluded(self, ino: Ino) -> bool:
        """Whether a rule forbids a copy of the item."""
        rule = self._rules.of(ino) if self._rules is not None else None
        return rule is not None and rule.never

    def hold(self, ino: Ino) -> None:
        """Marks an item of the source whose bytes are, or will be, in memory for its readers."""
        self._residency.start_copy(ino)

    def release(self, ino: Ino) -> None:
        """Ends ``hold``."""
        self._residency.end_copy(ino)

    def accessed(self, ino: Ino, tier: int) -> None:
        """Records an open that the datapath served from a copy, which may be gone by now."""
        if tier != SOURCE and self._residency.tier_of(ino) == tier:
            self._policy.accessed(ino, tier)

    def warm(self, item: Item, *, is_held: bool = False) -> Promote | None:
        """Handles a user's request: only space matters. ``is_held``: a copy takes over ``hold``."""
        if self._residency.is_copying(item.ino) and not is_held:
            self._residency.want(item.ino, forced=True)
        is_free = is_held or not self.is_placed(item.ino)
        return self._promote(item, forced=True) if is_free else None

    @property
    def wanted(self) -> int:
        """The number of items that are wanted, including those being copied."""
        return self._residency.wanted

    def next_wanted(
        self, lookup: Callable[[Ino], Item | None], must_wait: Callable[[Ino], bool] = _never
    ) -> Promote | None:
        """The next waiting item for which ``must_wait`` returns False, round robin; None if there
        is none.

        ``lookup`` returns None for an inode that is no longer a file. Such an inode, and one
        without space, loses its mark, so that a call costs no more than the marks that it removes.
        """
        start = self._next_ino
        before = takewhile(lambda ino: ino < start, self._residency.wanted_from(ROOT_INO))
        for ino in chain(self._residency.wanted_from(start), before):
            if self._residency.is_copying(ino) or must_wait(ino):
                continue
            self._next_ino = Ino(ino + 1)
            item = lookup(ino)
            if item is not None:
                # It was read some time ago: no copy leaves for it, unless a user requests it.
                forced = self._residency.is_forced(ino)
                promote = self._promote(item, forced=True) if forced else self.offered(item)
                if promote is not None:
                    return promote
            self._residency.unwant(ino)
        return None

    def committed(self, item: Item, tier: int) -> None:
        """The copy is complete, verified and visible."""
        self._end_copy(item, tier)
        self._ledger.commit(tier, item.size)
        self._residency.unwant(item.ino)
        self._policy.placed(item, tier)
        if self._is_pinned(item.ino):
            self._policy.forget(item.ino)
        if self._rules is not None:
            self._rules.placed(item.ino, item.size)

    def abandoned(self, item: Item, tier: int, *, retry: bool) -> None:
        """The copy failed and its files are removed; with ``retry`` the item stays wanted."""
        self._end_copy(item)
        self._ledger.cancel(tier, item.size)
        if self.quotas is not None:
            self.quotas.removed(item.ino, item.size)
        if not retry:
            self._residency.unwant(item.ino)

    def deferred(self, promote: Promote) -> None:
        """The queue is full: the item stays wanted and waits for ``next_wanted``."""
        self.abandoned(promote.item, promote.tier, retry=True)

    def dropped(self, ino: Ino, size: int) -> int:
        """A copy, whole or partial, is removed or invalid. Returns its tier (0: none)."""
        if part := self.parts.drop(ino):
            return part
        tier = self._residency.clear(ino)
        if tier != SOURCE:
            self._ledger.release(tier, size)
            self._policy.removed(ino)
            if self._rules is not None:
                self._rules.removed(ino, size)
            if self.quotas is not None:
                self.quotas.removed(ino, size)
        return tier

    def begin_part(self, item: Item, *, overhead: int) -> PartAdmission | None:
        """Begins a partial copy, with ``overhead`` bytes beside the granules; None if the file may
        not have one: it has or will have a whole copy, or no tier has a place for it."""
        kept = self.parts.kept(item)
        placement = self._choose(kept or item, forced=False, may_evict=False, is_part=bool(kept))
        return self.parts.begin(item, placement, self.tiers_for_part(item.ino), overhead=overhead)

    def part_completed(self, ino: Ino) -> None:
        """A partial copy has become the whole copy, and is recorded."""
        item = self.parts.completed(ino)
        if self._rules is not None:
            self._rules.placed(ino, item.size)

    def tiers_for_part(self, ino: Ino) -> range:
        """The tiers that may have a partial copy of a file. A pinned file gets a whole copy."""
        rule = self._rules.of(ino) if self._rules is not None else None
        if rule is None:
            return self._ledger.tiers
        if rule.never or rule.pin:
            return range(0)
        return self._ledger.tiers if rule.tier is None else range(rule.tier, rule.tier + 1)

    def draw(self, curve: npt.NDArray[np.uint64]) -> None:
        """Lets the policy choose again, when the files of the rules are counted, or ``kept_curve``
        has changed. ``curve`` has the bytes of all files in each bucket."""
        if self.kept_curve is not None:
            curve = self.kept_curve
        tiers = self._ledger.tiers
        left = [self._ledger.capacity(tier) for tier in tiers]
        shares = {tiers: curve}
        if self._rules is not None and self._rules.is_measured:
            shares, left = self._rules.shares(curve, left)
        self._policy.draw(shares, left)

    def admit_by(self, admission: Admission) -> None:
        """From now on ``admission`` decides whether copies leave for a file."""
        self._admission = admission

    def sizes_by(self, size_of: Callable[[Ino], int]) -> None:
        """``size_of`` returns the size of a copy, in bytes, from now on."""
        self._replacement.size_of = size_of

    def _promote(
        self, item: Item, *, forced: bool, may_evict: bool = True, job: int | None = None
    ) -> Promote | None:
        if self.parts.tier_of(item.ino) != SOURCE:
            return None
        placement = self._choose(item, forced=forced, may_evict=may_evict, job=job)
        if placement is None or (placement.evict and not may_evict):
            return None
        if any(self._residency.is_copying(victim.ino) for victim in placement.evict):
            return None
        for victim in placement.evict:
            self.dropped(victim.ino, victim.size)
        if not self._ledger.reserve(placement.tier, item.size):
            raise ValueError(f"{self._policy.name} chose tier {placement.tier}, which has no space")
        self._residency.want(item.ino, forced=forced)
        self._residency.start_copy(item.ino)
        if self.quotas is not None and job is not None:
            self.quotas.opened(item.ino, item.size, job)
        return Promote(item, placement.tier, tuple(victim.ino for victim in placement.evict))

    def _choose(
        self,
        item: Item,
        *,
        forced: bool,
        may_evict: bool,
        job: int | None = None,
        is_part: bool = False,
    ) -> Placement | None:
        """The tier for an item, and the copies that leave for it, by its rule or the policy.
        ``is_part``: it is the part of a file that this node keeps."""
        rules, ledger = self._rules, self._ledger
        rule = rules.of(item.ino) if rules is not None else None
        if rule is not None and rule.never:
            return None
        if rule is not None and rule.tier is not None:
            ledger = ledger.only(rule.tier)
        if rule is not None and rule.pin:
            placement = self._keep_pinned(item, ledger, forced=True)
            return placement or self._replacement.make(item, ledger.tiers, self._is_pinned)
        if (quotas := self.quotas) is not None and not forced:
            if job is None or not quotas.fits(job, item.size):
                return None
            placement = self._policy.choose(item, ledger, forced=True)
            # Copies of no job leave.
            return placement or self._replacement.make(
                item, ledger.tiers, lambda ino: self._is_pinned(ino) or quotas.is_charged(ino)
            )
        if not (forced or is_part or self.keeps(item)):
            return None
        placement = self._keep_pinned(item, ledger, forced=forced)
        if forced or not may_evict or self._admission is None:
            return placement
        return self._admission.decide(
            item, placement, ledger.tiers, self._replacement, self._is_pinned
        )

    def _keep_pinned(self, item: Item, ledger: Ledger, *, forced: bool) -> Placement | None:
        """What the policy chooses, without pinned copies among those to be evicted; None also if
        the policy knows too many of these. The next call continues with the others."""
        forgotten = 0
        while forgotten < _MOST_FORGOTTEN:
            placement = self._policy.choose(item, ledger, forced=forced)
            pinned = [v for v in placement.evict if self._is_pinned(v.ino)] if placement else []
            if not pinned:
                return placement
            for victim in pinned:
                self._policy.forget(victim.ino)
            forgotten += len(pinned)
        return None

    def _is_pinned(self, ino: Ino) -> bool:
        return self._rules is not None and self._rules.is_pinned(ino)

    def _end_copy(self, item: Item, tier: int = SOURCE) -> None:
        """Ends a copy, which is in ``tier`` from now on."""
        if not self._residency.is_copying(item.ino):
            raise ValueError(f"inode {item.ino} is not being copied")
        if tier != SOURCE:
            # First: the datapath fetches a file that has neither a copy nor the mark of one.
            self._residency.place(item.ino, tier)
        self._residency.end_copy(item.ino)
