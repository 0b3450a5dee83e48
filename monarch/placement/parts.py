"""Partial copies: which files may have one, which granules are admitted, and their bytes.

A partial copy takes its space granule by granule. A file that the policy admits may get all of its
granules. A file that is larger than every tier gets a share: the bytes of a tier that the policy
does not give to whole files. Its blocks are admitted by hash, as many as fit into the share, so
each pass over the file has the same hits. No copy is removed for a partial copy. A file has either
a whole copy, or a partial one, or none. If other nodes keep some blocks of a file, only the other
blocks count for its admission.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from monarch.placement.ledger import Ledger
from monarch.placement.policy import Item, Placement, Policy
from monarch.placement.residency import SOURCE, Residency
from monarch.posix.buckets import mix, mixed
from monarch.text import MiB
from monarch.types import Ino

# The unit of the admission by hash, a multiple of a granule: large enough for efficient reads of
# the source, small enough that the share is used up.
BLOCK = 4 * MiB


@dataclass(frozen=True, slots=True)
class PartAdmission:
    """The ``tier`` for a partial copy. ``blocks`` has one byte for each block of the file, 1 if it
    is admitted; None: all are. Blocks may be added later."""

    tier: int
    blocks: bytearray | None = None


@dataclass(slots=True, eq=False)
class _Account:
    """``held`` bytes are on the disk, with ``overhead`` that is not data. ``share``: the bytes that
    a file that is larger than every tier may use, 0 for other files."""

    item: Item
    tier: int
    overhead: int
    held: int
    share: int = 0


class Parts:
    """The accounts of all partial copies. Belongs to the event loop; no method waits.

    ``on_drop`` is called with the inode number of a partial copy that is dropped, before its space
    is released. A call for a file without a partial copy raises KeyError, but for ``tier_of``,
    ``held`` and ``drop``.
    """

    def __init__(self, residency: Residency, ledger: Ledger, policy: Policy) -> None:
        self._residency = residency
        self._ledger = ledger
        self._policy = policy
        self._accounts: dict[Ino, _Account] = {}
        self.on_drop: Callable[[Ino], None] = lambda ino: None
        # The blocks of a file that this node keeps, as in ``PartAdmission``; None: it keeps all.
        self.blocks_of: Callable[[Item], bytearray | None] = _all_blocks

    def __len__(self) -> int:
        return len(self._accounts)

    def tier_of(self, ino: Ino) -> int:
        """The tier that has a partial copy of a file; SOURCE if there is none."""
        account = self._accounts.get(ino)
        return SOURCE if account is None else account.tier

    def held(self, ino: Ino) -> int:
        """The bytes that the partial copy of a file uses, 0 if it has none."""
        account = self._accounts.get(ino)
        return 0 if account is None else account.held

    def inos(self, tier: int) -> list[Ino]:
        return [ino for ino, account in self._accounts.items() if account.tier == tier]

    def bytes(self, tier: int) -> int:
        """The bytes that all partial copies in a tier use."""
        return sum(account.held for account in self._accounts.values() if account.tier == tier)

    def load(self, item: Item, *, tier: int, overhead: int, held: int) -> None:
        """Registers a partial copy that a tier holds at start."""
        self._accounts[item.ino] = _Account(item, tier, overhead, held)
        self._ledger.load(tier, held)
        self._policy.placed(Item(item.ino, held, item.key), tier)

    def kept(self, item: Item) -> Item | None:
        """The part of a file that this node keeps, if other nodes keep the rest; None if it is not
        shared."""
        blocks = self.blocks_of(item)
        return None if blocks is None else _kept(item, blocks)

    def owns_block(self, ino: Ino, block: int) -> bool:
        """Whether a block is one that this node keeps if it has the space."""
        blocks = self.blocks_of(self._accounts[ino].item)
        return blocks is None or blocks[block] == 1

    def begin(
        self, item: Item, placement: Placement | None, tiers: range, *, overhead: int
    ) -> PartAdmission | None:
        """As ``Controller.begin_part``. ``placement`` is that of a copy of all that this node keeps
        of the file, ``tiers`` are those that the rule of the file allows."""
        ino = item.ino
        if (
            ino in self._accounts
            or self._residency.tier_of(ino) != SOURCE
            or self._residency.is_copying(ino)
            or self._residency.is_wanted(ino)
        ):
            return None
        tier, share = self._place_for(self.kept(item) or item, placement, tiers)
        if tier == SOURCE or not self._ledger.reserve(tier, overhead):
            return None
        self._ledger.commit(tier, overhead)
        self._accounts[ino] = _Account(item, tier, overhead, overhead, share)
        self._policy.placed(Item(ino, overhead, item.key), tier)
        return self.admission(ino)

    def _place_for(self, item: Item, placement: Placement | None, tiers: range) -> tuple[int, int]:
        """A tier, SOURCE if there is none, and the share of a file that is larger than all. None of
        the file may be for this node."""
        if not item.size:
            return SOURCE, 0
        if tiers and all(item.size > self._ledger.capacity(tier) for tier in tiers):
            share, tier = max((self._share(tier), -tier) for tier in tiers)
            return (-tier, share) if share > 0 else (SOURCE, 0)
        if placement is None or placement.evict or placement.tier not in tiers:
            return SOURCE, 0
        return placement.tier, 0

    def _share(self, tier: int, held: int = 0) -> int:
        """The bytes of a tier for one more file that is larger than every tier, and already has
        ``held`` bytes there."""
        if not self._ledger.is_open(tier):
            return held
        given = [account for account in self._accounts.values() if account.tier == tier]
        promised = sum(account.share for account in given)
        unused = sum(max(0, account.share - account.held) for account in given)
        left = self._policy.left(tier, self._ledger) - promised
        return max(held, min(left, self._ledger.room(tier) + held - unused))

    def admission(self, ino: Ino) -> PartAdmission:
        """The granules that are admitted now. That of a file that is larger than every tier is the
        same as at the last mount, if the tiers and the other such files are the same."""
        account = self._accounts[ino]
        item, tier = account.item, account.tier
        own = self.blocks_of(item)
        kept = item if own is None else _kept(item, own)
        if kept.size <= self._ledger.capacity(tier):
            return PartAdmission(tier, own)
        if not account.share:
            # It was loaded: what it holds is a part of its share.
            account.share = self._share(tier, account.held)
        count = -(-item.size // BLOCK)
        most = max(0, account.share - account.overhead) // BLOCK
        keys = mixed(np.arange(count, dtype=np.uint64) ^ np.uint64(mix(item.key)))
        order = np.argsort(keys, kind="stable")
        if own is not None:
            order = order[np.frombuffer(bytes(own), np.uint8)[order] == 1]
        blocks = np.zeros(count, np.uint8)
        blocks[order[:most]] = 1
        return PartAdmission(tier, bytearray(blocks.tobytes()))

    def room(self, ino: Ino) -> int:
        """The bytes that granules of a partial copy can take now."""
        tier = self._accounts[ino].tier
        return max(0, self._ledger.room(tier)) if self._ledger.is_open(tier) else 0

    def reserve(self, ino: Ino, size: int) -> bool:
        """Reserves ``size`` bytes for granules; False if there is no space. Then ``stored`` or
        ``cancel`` must be called."""
        return self._ledger.reserve(self._accounts[ino].tier, size)

    def stored(self, ino: Ino, size: int) -> None:
        """Granules with ``size`` reserved bytes were written."""
        account = self._accounts[ino]
        self._ledger.commit(account.tier, size)
        account.held += size
        self._policy.placed(Item(ino, account.held, account.item.key), account.tier)

    def cancel(self, tier: int, size: int) -> None:
        """Granules with ``size`` reserved bytes were not written; the copy may be dropped."""
        self._ledger.cancel(tier, size)

    def lost(self, ino: Ino, size: int) -> None:
        """Granules with ``size`` bytes were removed, since they differed from their digests."""
        account = self._accounts[ino]
        account.held -= size
        self._ledger.release(account.tier, size)

    def used(self, ino: Ino) -> None:
        """A partial copy was opened. For a policy it is placed again, with the bytes that it uses:
        a policy may know only the size of the whole file."""
        account = self._accounts[ino]
        self._policy.placed(Item(ino, account.held, account.item.key), account.tier)

    def completed(self, ino: Ino) -> Item:
        """As ``Controller.part_completed``. Returns the item of the copy."""
        account = self._accounts.pop(ino)
        item = account.item
        self._ledger.release(account.tier, account.held - item.size)
        self._residency.place(ino, account.tier)
        self._policy.placed(item, account.tier)
        return item

    def drop(self, ino: Ino) -> int:
        """Records that a partial copy is removed or invalid. Returns its tier (0: none)."""
        account = self._accounts.get(ino)
        if account is None:
            return SOURCE
        self.on_drop(ino)
        del self._accounts[ino]
        self._ledger.release(account.tier, account.held)
        self._policy.removed(ino)
        return account.tier


def _all_blocks(item: Item) -> None:
    return None


def _kept(item: Item, blocks: bytearray) -> Item:
    """The part of a file that has these blocks."""
    size = blocks.count(1) * BLOCK
    if blocks and blocks[-1]:
        size -= -item.size % BLOCK
    return Item(item.ino, size, item.key)
