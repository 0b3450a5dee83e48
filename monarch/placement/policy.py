"""The placement policies, and their interface.

No eviction (CoorDL's MinIO), the residents chosen by hash, is the default. For one pass per epoch
in a new random order, no demand policy has more hits per epoch than a fixed set of residents. For a
shuffled order any set is as good. For a constant order the set should be spread over the epoch, so
that hits and the promotions of the first epoch overlap with misses. A hash does both. See
docs/adr/0001-admission-by-hash-buckets.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from monarch.placement.ledger import Ledger
from monarch.posix.buckets import bucket
from monarch.types import Attributes, Ino


@dataclass(frozen=True, slots=True)
class Item:
    """The unit of placement: a whole file of ``size`` bytes. ``key`` is its inode number at the
    source, which survives a new snapshot, unlike ``ino``."""

    ino: Ino
    size: int
    key: int

    @classmethod
    def of(cls, attributes: Attributes) -> Item:
        return cls(attributes.ino, attributes.size, attributes.source_ino)


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
    """A policy. Its methods use memory only, do not wait and do not reserve space. One that never
    evicts inherits all methods but ``choose``: they do nothing."""

    name: str

    def choose(
        self,
        item: Item,
        ledger: Ledger,
        *,
        forced: bool = False,
        is_kept: Callable[[Ino], bool] | None = None,
    ) -> Placement | None:
        """The tier for ``item``; None: leave it at the source. ``forced``: only the space counts.
        No copy is evicted for which ``is_kept`` returns True."""

    def tier_for(self, item: Item, ledger: Ledger) -> int | None:
        """The tier of ``ledger`` that the policy gives to an item whatever space there is now;
        None: none, or it has no such rule."""
        return None

    def left(self, tier: int, ledger: Ledger) -> int:
        """The bytes of a tier that are not kept for whole files."""
        return ledger.capacity(tier)

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
        self.forget(ino)

    def forget(self, ino: Ino) -> None:
        """Drops what is known of a copy: it was removed, or must not be evicted."""
        return

    def draw(
        self, shares: Mapping[range, npt.NDArray[np.uint64]], capacities: Sequence[int]
    ) -> None:
        """Sets what the policy may choose from: the bytes in each bucket of the files that may be
        in a range of tiers only, and the capacity of each tier for them."""
        return


class FirstCome(Policy):
    """First come, first placed: the fastest tier with space; no evictions. For trees of unknown
    size. An item that is too large for every tier does not block later ones."""

    name = "first_come"

    def choose(
        self,
        item: Item,
        ledger: Ledger,
        *,
        forced: bool = False,
        is_kept: Callable[[Ino], bool] | None = None,
    ) -> Placement | None:
        tier = ledger.fastest_with_room(item.size)
        return None if tier is None else Placement(tier)


def assign(
    shares: Mapping[range, npt.NDArray[np.uint64]], capacities: Sequence[int]
) -> dict[range, bytes]:
    """The tier of every hash bucket (0: none), from the bytes of the files in each bucket.

    Each of ``shares`` has the files that may be in a range of tiers only: one sum for each bucket,
    in the order of the hash. Each bucket goes to the fastest tier of the range that can still hold
    all of it. A bucket that fits nowhere is skipped, so that a huge file does not block the rest.
    No tier gets more bytes than its capacity. One byte for each bucket.
    """
    tables = {tiers: bytearray(len(curve)) for tiers, curve in shares.items()}
    room = [0, *capacities]
    waiting = [
        (index, int(curve[index]), tiers)
        for tiers, curve in shares.items()
        for index in np.flatnonzero(curve).tolist()
    ]
    waiting.sort(key=lambda part: part[0])
    smallest = min((size for _, size, _ in waiting), default=0)
    for index, size, tiers in waiting:
        for tier in tiers:
            if size <= room[tier]:
                tables[tiers][index] = tier
                room[tier] -= size
                break
        if max(room) < smallest:
            break
    return {tiers: bytes(table) for tiers, table in tables.items()}


class NoEvict(FirstCome):
    """Admits the buckets that ``assign`` gives to a tier, or all files if all fit. ``curve`` has
    the bytes of all files in each bucket, which ``bucket`` returns for the key of a file."""

    name = "no_evict"

    def __init__(
        self,
        curve: npt.NDArray[np.uint64],
        capacities: Sequence[int],
        bucket: Callable[[int], int] = bucket,
    ) -> None:
        self._bucket = bucket
        self.draw({range(1, len(capacities) + 1): curve}, capacities)

    def draw(
        self, shares: Mapping[range, npt.NDArray[np.uint64]], capacities: Sequence[int]
    ) -> None:
        # Python integers: the sum of the sizes of a hostile tree may exceed 64 bits.
        totals = {tiers: sum(curve.tolist()) for tiers, curve in shares.items()}
        all_fits = sum(totals.values()) <= sum(capacities) and all(
            total <= sum(capacities[tier - 1] for tier in tiers) for tiers, total in totals.items()
        )
        self._tables = None if all_fits else assign(shares, capacities)
        # The bytes of each tier that are kept for whole files.
        self._kept = [0] * (len(capacities) + 1)
        for tiers, table in (self._tables or {}).items():
            for tier in tiers:
                here = np.frombuffer(table, np.uint8) == tier
                self._kept[tier] += sum(shares[tiers][here].tolist())

    def choose(
        self,
        item: Item,
        ledger: Ledger,
        *,
        forced: bool = False,
        is_kept: Callable[[Ino], bool] | None = None,
    ) -> Placement | None:
        # An empty file needs no space, so its bucket may have no tier.
        if forced or not item.size or self._tables is None:
            return super().choose(item, ledger)
        # Until the files of a rule for one tier are counted, they have no table of their own.
        table = self._tables.get(ledger.tiers)
        tier = table[self._bucket(item.key)] if table is not None else 0
        return Placement(tier) if tier and ledger.fits(tier, item.size) else None

    def left(self, tier: int, ledger: Ledger) -> int:
        return max(0, ledger.capacity(tier) - self._kept[tier])

    def tier_for(self, item: Item, ledger: Ledger) -> int | None:
        table = self._tables.get(ledger.tiers) if self._tables is not None else None
        return (table[self._bucket(item.key)] or None) if table is not None else None


# Copies that must not be evicted which ``Lru`` passes for one file.
_MOST_KEPT = 64


class Lru(Policy):
    """Least recently used, over all tiers as one. For comparison: no_evict has more hits.

    A new item goes to the fastest tier with space. Without space it goes to the tier that has space
    first when copies are evicted in the order of their last use; no copy moves to a lower tier.
    Needs about 200 bytes for each resident item; the other policies need none.
    """

    name = "lru"

    def __init__(self) -> None:
        self._copies: OrderedDict[Ino, tuple[int, int]] = OrderedDict()  # size, tier

    def choose(
        self,
        item: Item,
        ledger: Ledger,
        *,
        forced: bool = False,
        is_kept: Callable[[Ino], bool] | None = None,
    ) -> Placement | None:
        tier = ledger.fastest_with_room(item.size)
        if tier is not None:
            return Placement(tier)
        victims: dict[int, list[Victim]] = {tier: [] for tier in ledger.tiers}
        missing = {
            tier: item.size - ledger.room(tier)
            for tier in ledger.tiers
            if ledger.is_open(tier) and item.size <= ledger.capacity(tier)
        }
        if not missing:
            return None
        kept = []
        for ino, (size, tier) in self._copies.items():
            if is_kept is not None and is_kept(ino):
                kept.append(ino)
                if len(kept) == _MOST_KEPT:
                    break
            elif tier in missing:
                victims[tier].append(Victim(ino, size))
                missing[tier] -= size
                if missing[tier] <= 0:
                    return Placement(tier, tuple(victims[tier]))
        # They will be used: the next call finds others first.
        for ino in kept:
            self._copies.move_to_end(ino)
        return None

    def accessed(self, ino: Ino, tier: int) -> None:
        if ino in self._copies:
            self._copies.move_to_end(ino)

    def placed(self, item: Item, tier: int) -> None:
        self._copies[item.ino] = (item.size, tier)
        self._copies.move_to_end(item.ino)

    def loaded(
        self, inos: npt.NDArray[np.integer], sizes: npt.NDArray[np.integer], *, tier: int
    ) -> None:
        for ino, size in zip(inos.tolist(), sizes.tolist(), strict=True):
            self._copies[Ino(ino)] = (size, tier)

    def forget(self, ino: Ino) -> None:
        self._copies.pop(ino, None)
