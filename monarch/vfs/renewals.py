"""Copies of files whose attributes the drain has changed at the source.

Such a file has the same bytes and another identity. The record and the seal of its copy name the
identity, so both are renewed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from monarch.placement.residency import SOURCE, Residency
from monarch.tiers.doubts import Doubts
from monarch.tiers.records import Record, Records
from monarch.tiers.tier import Tier
from monarch.types import Identity, Ino
from monarch.vfs.interfaces import TierCalls
from monarch.vfs.promotions import Promotions

_STEP_S = 0.005


@dataclass(eq=False, repr=False)
class Renewals:
    """Belongs to the event loop. ``run`` is its task."""

    _tiers: Mapping[int, Tier]
    _records: Records
    _residency: Residency
    _promotions: Promotions
    _tier_calls: TierCalls
    _doubts: Doubts
    # Copies whose seal is of an earlier identity: by inode number the tier, and the first and the
    # last identity.
    _unsealed: dict[Ino, tuple[int, Identity, Identity]] = field(default_factory=dict, init=False)
    _added: trio.Event = field(default_factory=trio.Event, init=False)
    # The copy whose seal is being renewed.
    _current: Ino | None = field(default=None, init=False)

    def renewed(self, ino: Ino, before: Identity, now: Identity) -> None:
        """The drain has changed the attributes of a file that was ``before`` at the source and is
        ``now``. A copy of another version is dropped, and so is a partial copy.

        If the drain has found a version that others have made, ``now`` is that of the bytes that
        the mount knows, with the time of change before. The file is then compared with the source.
        """
        self._doubts.renew(ino, before, now)
        if now.ctime_ns == before.ctime_ns:
            self._doubts.postpone(ino, now, until_ns=time.monotonic_ns())
        if before == now:
            return
        if self._residency.tier_of(ino) == SOURCE:
            if self._promotions.has_copy(ino):
                # The next open would take it for a damaged one.
                self._promotions.forget_copy(ino)
            return
        record = self._records.get(ino)
        if record is not None and record.identity == now:
            return
        if record is None or record.identity != before:
            self._promotions.forget_copy(ino)
            return
        fresh = Record(record.tier, now, record.digest)
        doubted, young = self._records.doubts(ino), self._records.is_young(ino)
        try:
            self._records.put(ino, fresh, doubted=doubted, young=young)
        except OSError:
            self._promotions.forget_copy(ino)
            return
        sealed = self._unsealed.pop(ino, (record.tier, before, now))
        self._unsealed[ino] = (record.tier, sealed[1], now)
        self._added.set()

    async def run(self) -> None:
        """Renews the seals of copies, until cancelled. A copy that is opened before, or whose tier
        does not answer, is compared with its digest."""
        while True:
            await self._added.wait()
            self._added = trio.Event()
            while self._unsealed:
                ino = next(iter(self._unsealed))
                number, before, now = self._unsealed.pop(ino)
                self._current = ino
                try:
                    with suppress(OSError):
                        await self._tier_calls.ask(
                            number, self._tiers[number].renew_seal, ino, before, now
                        )
                finally:
                    self._current = None

    async def settled(self, ino: Ino) -> None:
        """Waits until the seal of a copy has been renewed, or could not be."""
        while ino in self._unsealed or ino == self._current:
            await trio.sleep(_STEP_S)
