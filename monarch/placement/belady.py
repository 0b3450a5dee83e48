"""Eviction by the next use of each copy, where it is known: Belady's rule.

If a file that is opened has no copy, and the tiers are full, the copy leaves whose next use is the
farthest in the future. If that of the file itself is the farthest, the file gets no copy (Belady,
"A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5, 1966,
with bypass). For files of equal size no policy has more hits. Files whose next use is not known are
left to another policy.

A replacement costs a write in the tier. It is made if the copy that leaves is not used as far as
is known, or if some file is read twice between the next use of the new copy and that of the old
one, so that the room serves a hit between. Otherwise both bring one hit. So no copy is replaced if
each pass reads the same files, each once: a pass has as many hits as there were copies at its
begin, whichever they are.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from monarch.placement.ledger import Ledger
from monarch.placement.policy import Item, Placement, Policy, Victim
from monarch.telemetry.foresight_report import NextUseReport
from monarch.types import ROOT_INO, Ino

# Next uses within so many opens are kept together, and compared only when they are the farthest.
_WIDTH = 16
# After so many files in succession with as many opens until their next use, the next pass has the
# same order. Then the other policy fills the tiers in the first pass: it may spread the copies.
_ALIKE = 16
# Copies of all tiers whose next use is compared for one file.
_MOST_FARTHER = 256
# Copies whose next use has changed, and is recorded anew, for one file: when an order begins or
# ends, it changes for all copies.
_MOST_RENEWED = 64
# Copies whose next use is recorded anew for each file that needs room, those first that were
# recorded the longest time ago. Their use is later than recorded if their order has ended, or was
# not followed.
_RENEWED = 4
# Copies that are compared for one that leaves for a file which the other policy admits.
_MOST_GUESTS = 64
# Numbers of groups that may be kept although their groups are gone.
_STALE = 64


class NextUses(Protocol):
    """When files will be opened next, as numbers of opens; ``math.inf`` if that is not known."""

    def next_use(self, ino: Ino) -> float:
        """The next open, or the one that is being answered."""

    def use_after(self, ino: Ino) -> float:
        """The open after ``next_use``."""

    def repeats_within(self, begin: float, end: float) -> bool:
        """Whether a file is known to be opened twice from ``begin`` to ``end``."""

    @property
    def ended(self) -> int:
        """How many orders have ended."""


class ByUse:
    """Copies by their next use, in groups of ``_WIDTH`` opens. ``farthest`` records at most
    ``renewals`` copies anew, and counts them down."""

    def __init__(self) -> None:
        # The copies that were recorded the longest time ago first.
        self._uses: OrderedDict[Ino, float] = OrderedDict()
        # None is empty: the uses of a job advance for months, and each group is left behind. A
        # group may have all copies, so its first one is found without passing those that have left.
        self._groups: dict[float, OrderedDict[Ino, None]] = {}
        # A heap of the numbers of the groups, negative, the farthest first; some groups may be
        # gone.
        self._order: list[float] = []
        self.renewals = 0

    def put(self, ino: Ino, use: float) -> None:
        """Sets the next use of a copy."""
        self.discard(ino)
        number = _group_of(use)
        group = self._groups.get(number)
        if group is None:
            group = self._groups[number] = OrderedDict()
            heapq.heappush(self._order, -number)
            if len(self._order) > 2 * len(self._groups) + _STALE:
                # A sorted list is a heap.
                self._order = sorted(-number for number in self._groups)
        group[ino] = None
        self._uses[ino] = use

    def discard(self, ino: Ino) -> None:
        use = self._uses.pop(ino, None)
        if use is not None:
            number = _group_of(use)
            del self._groups[number][ino]
            if not self._groups[number]:
                del self._groups[number]

    def renew(self, next_use: Callable[[Ino], float]) -> None:
        """Records the present next use of a few copies, each in its turn."""
        for ino in list(islice(self._uses, _RENEWED)):
            self.put(ino, next_use(ino))

    def farthest(self, next_use: Callable[[Ino], float]) -> tuple[Ino, float] | None:
        """The copy that is used last, and its use; None if there is none, or if the next use of too
        many copies has changed. ``next_use`` returns the present next use, which may have changed
        since ``put``; the next call continues with the copies that were not recorded anew. A copy
        whose use is later than recorded is not found before its turn in ``renew``."""
        while self._order and self.renewals:
            number = -self._order[0]
            group = self._groups.get(number)
            if group is None:
                heapq.heappop(self._order)
                continue
            ino = max(group, key=self._uses.__getitem__) if number < math.inf else next(iter(group))
            use = next_use(ino)
            if use == self._uses[ino]:
                return ino, use
            self.put(ino, use)
            self.renewals -= 1
        return None


def _group_of(use: float) -> float:
    return use // _WIDTH if use < math.inf else use


class Belady(Policy):
    """Belady's rule for files whose next use ``uses`` knows, and the rules of ``inner`` for all
    others. Copies that ``inner`` would not have made leave for those that it admits, when their
    next use is not known any more.

    Needs about 400 bytes for each copy of a file that was opened while its next use was known.
    """

    def __init__(self, inner: Policy, uses: NextUses, size_of: Callable[[Ino], int]) -> None:
        """``size_of`` returns the size of a file of the snapshot, in bytes."""
        self.name = inner.name
        self._inner = inner
        self._uses = uses
        self._size_of = size_of
        # The size and tier of each copy that was opened, or made, while its next use was known.
        self._copies: dict[Ino, tuple[int, int]] = {}
        # Those of them that ``inner`` does not admit, and how many orders had ended when they were
        # opened last. The first ones leave first, as in a group of ``ByUse``.
        self._guests: OrderedDict[Ino, int] = OrderedDict()
        self._by_use = ByUse()
        # What the last decision removes, and for which file; and the files for which copies left.
        self._leaving: set[Ino] = set()
        self._decided: Ino = ROOT_INO
        self._replacing: set[Ino] = set()
        # Files of known orders that get a copy: the use after the next one, and whether ``inner``
        # does not admit them.
        self._coming: dict[Ino, tuple[float, bool]] = {}
        self._replaced_files = self._replaced_bytes = 0
        # The opens between the next use of the last file and the one after it, how many files in
        # succession had as many, and the next use of the first of them.
        self._gap: float = math.nan
        self._alike = 0
        self._since = math.inf

    def choose(
        self,
        item: Item,
        ledger: Ledger,
        *,
        forced: bool = False,
        is_kept: Callable[[Ino], bool] | None = None,
    ) -> Placement | None:
        self._leaving.clear()
        use = math.inf if forced else self._uses.next_use(item.ino)
        is_known = use < math.inf
        after = self._uses.use_after(item.ino) if is_known else math.inf
        if is_known:
            self._compare(use, after)
        placement = self._chosen(item, ledger, after, forced=forced, is_known=is_known)
        if placement is None:
            self._coming.pop(item.ino, None)
        elif is_known:
            is_guest = self._inner.tier_for(item, ledger) is None
            self._coming[item.ino] = after, is_guest
        return placement

    def _chosen(
        self, item: Item, ledger: Ledger, after: float, *, forced: bool, is_known: bool
    ) -> Placement | None:
        if after == math.inf:
            # No copy with a known use leaves for a file of a known order that has none.
            is_kept = self._is_used if is_known else None
            placement = self._inner.choose(item, ledger, forced=forced, is_kept=is_kept)
        else:
            tier = ledger.fastest_with_room(item.size)
            if tier is not None:
                is_first_pass = self._alike >= _ALIKE and after <= self._since + 2 * self._gap
                return self._inner.choose(item, ledger) if is_first_pass else Placement(tier)
            placement = self._instead_of_farther(item, after, ledger)
        return placement or self._instead_of_guests(item, ledger, forced=forced)

    def _compare(self, use: float, after: float) -> None:
        """Records the next two uses of a file of a known order that is decided."""
        if after - use == self._gap:
            self._alike += 1
        else:
            self._gap, self._alike, self._since = after - use, 0, use

    def _is_used(self, ino: Ino) -> bool:
        return self._uses.next_use(ino) < math.inf

    def tier_for(self, item: Item, ledger: Ledger) -> int | None:
        return self._inner.tier_for(item, ledger)

    def left(self, tier: int, ledger: Ledger) -> int:
        return self._inner.left(tier, ledger)

    def draw(
        self, shares: Mapping[range, npt.NDArray[np.uint64]], capacities: Sequence[int]
    ) -> None:
        self._inner.draw(shares, capacities)

    def _instead_of_farther(self, item: Item, after: float, ledger: Ledger) -> Placement | None:
        """The tier that has room first when the copies leave whose next use is the farthest, all of
        them after ``after``."""
        missing = _missing(item, ledger)
        victims: dict[int, list[Victim]] = {tier: [] for tier in missing}
        taken: list[tuple[Ino, float]] = []
        found = None
        self._by_use.renewals = _MOST_RENEWED
        self._by_use.renew(self._uses.next_use)
        while missing and found is None and len(taken) < _MOST_FARTHER:
            farthest = self._by_use.farthest(self._uses.next_use)
            if farthest is None:
                break
            ino, use = farthest
            if use <= after or (use < math.inf and not self._uses.repeats_within(after, use)):
                break
            taken.append(farthest)
            self._by_use.discard(ino)
            size, tier = self._copies[ino]
            if tier in missing:
                victims[tier].append(Victim(ino, size))
                missing[tier] -= size
                if missing[tier] <= 0:
                    found = Placement(tier, tuple(victims[tier]))
        # A copy is forgotten when it is removed.
        for ino, use in taken:
            self._by_use.put(ino, use)
        return self._replacing_by(item, found)

    def _instead_of_guests(self, item: Item, ledger: Ledger, *, forced: bool) -> Placement | None:
        """Room for a file that ``inner`` admits, in place of copies that it does not admit, of an
        order that has ended."""
        tier = None if forced else self._inner.tier_for(item, ledger)
        missing = _missing(item, ledger)
        if tier not in missing:
            return None
        victims = []
        for ino, ended in islice(self._guests.items(), _MOST_GUESTS):
            size, where = self._copies[ino]
            is_past = ended < self._uses.ended and not self._is_used(ino)
            if where == tier and is_past:
                victims.append(Victim(ino, size))
                missing[tier] -= size
                if missing[tier] <= 0:
                    return self._replacing_by(item, Placement(tier, tuple(victims)))
        return None

    def _replacing_by(self, item: Item, placement: Placement | None) -> Placement | None:
        if placement is not None:
            self._leaving = {victim.ino for victim in placement.evict}
            self._decided = item.ino
        return placement

    def accessed(self, ino: Ino, tier: int) -> None:
        self._inner.accessed(ino, tier)
        after = self._uses.use_after(ino)
        if ino not in self._copies:
            if after == math.inf:
                return
            # Of an earlier mount, or of the time before the order was known.
            self._copies[ino] = self._size_of(ino), tier
        if ino in self._guests and self._is_used(ino):
            self._guests[ino] = self._uses.ended
            self._guests.move_to_end(ino)
        self._by_use.put(ino, after)

    def placed(self, item: Item, tier: int) -> None:
        self._inner.placed(item, tier)
        is_known = item.ino in self._coming
        after, is_guest = self._coming.pop(item.ino, (math.inf, False))
        if item.ino in self._replacing:
            self._replacing.discard(item.ino)
            self._replaced_files += 1
            self._replaced_bytes += item.size
        elif not is_known:
            return
        self._copies[item.ino] = item.size, tier
        if is_guest:
            self._guests[item.ino] = self._uses.ended
        # It may be opened before: the next use of the farthest copy is looked up again.
        self._by_use.put(item.ino, after)

    def loaded(
        self, inos: npt.NDArray[np.integer], sizes: npt.NDArray[np.integer], *, tier: int
    ) -> None:
        self._inner.loaded(inos, sizes, tier=tier)

    def removed(self, ino: Ino) -> None:
        self.forget(ino)
        if ino in self._leaving:
            self._replacing.add(self._decided)

    def forget(self, ino: Ino) -> None:
        self._inner.forget(ino)
        self._copies.pop(ino, None)
        self._by_use.discard(ino)
        self._guests.pop(ino, None)

    def report(self) -> NextUseReport:
        return NextUseReport(self._replaced_files, self._replaced_bytes)


def _missing(item: Item, ledger: Ledger) -> dict[int, int]:
    """The bytes that each tier lacks for an item; without tiers that could never hold it."""
    return {
        tier: item.size - ledger.room(tier)
        for tier in ledger.tiers
        if ledger.is_open(tier) and item.size <= ledger.capacity(tier)
    }
