"""Room in the absorbing tier: what is written goes before copies of the source.

So much is kept for writing as is written now, and at least the reserve. Copies make room for it,
and what has been drained stays as long as the reserve has place for it, oldest out first. Of small
files so many stay that what is kept in memory of each is no matter.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from monarch.placement.ledger import Ledger
from monarch.placement.residency import Residency
from monarch.tiers.tier import Space, Tier
from monarch.types import Ino
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.open_files import WrittenFiles

log = logging.getLogger(__name__)

_LOOK_S = 0.5
# Of the tier, if nothing is configured.
_RESERVE_SHARE = 0.05
_LARGEST_FILES = 2
# So many objects that are at the source as well stay: each takes about a kilobyte of memory.
_MOST_DRAINED = 32768
# How long it may take until what was let go of is gone from the disk. Seconds.
_PATIENCE_S = 2.0
_STEP_S = 0.02
# Copies dropped between two looks of the event loop at its other work.
_STRIDE = 64


class SpaceReclaimer:
    """``look`` finds out in a thread what the tier's disk has; ``evict`` drops a copy.

    ``kept``: what else lies there that was written, in bytes. ``reserve`` in bytes, None for twice
    the largest file and a share of the tier.
    """

    def __init__(
        self,
        *,
        tier: Tier,
        reserve: int | None,
        files: WrittenFiles,
        object_table: ObjectTable,
        ledger: Ledger,
        residency: Residency,
        look: Callable[[], Awaitable[Space]],
        evict: Callable[[Ino], int],
        evicted: Callable[[], Awaitable[None]],
        kept: Callable[[], int],
    ) -> None:
        self._tier = tier
        self._reserve = reserve
        self._files = files
        self._object_table = object_table
        self._ledger = ledger
        self._residency = residency
        self._look = look
        self._evict = evict
        self._evicted = evicted
        self._kept = kept
        self.space = tier.space()

    @property
    def reserve(self) -> int:
        if self._reserve is not None:
            return self._reserve
        share = int(self._ledger.capacity(self._tier.number) * _RESERVE_SHARE)
        return max(share, _LARGEST_FILES * self._object_table.largest)

    def statfs(self) -> Space:
        """What may be written: what is free, and what would give way to it."""
        gives_way = self._ledger.used(self._tier.number) + self._object_table.drained_bytes
        available = min(self.space.total, self.space.available + gives_way)
        return Space(self.space.total, available)

    async def run(self) -> None:
        """Keep the room, until cancelled."""
        while True:
            with suppress(OSError):
                self.space = await self._look()
                await self.keep()
            await trio.sleep(_LOOK_S)

    async def keep(self) -> None:
        """Let go of what has been drained beyond the reserve, and of copies that are in the way."""
        number, reserve = self._tier.number, self.reserve
        self._files.release_drained(
            self._object_table.drained_bytes - reserve,
            count=self._object_table.drained_count - _MOST_DRAINED,
        )
        written = self._object_table.bytes + self._kept()
        self._ledger.hold(number, max(reserve, written))
        wanted = max(0, reserve - written) - self.space.available
        await self._drop_copies(max(wanted, -self._ledger.room(number)))

    async def make(self, size: int) -> bool:
        """Make room for so many bytes now; whether anything was let go of."""
        freed = self._files.release_drained(size)
        if not (await self._drop_copies(size - freed) or freed > 0):
            return False
        # Who lets go of a file waits for the journal first.
        with trio.move_on_after(_PATIENCE_S), suppress(OSError):
            while (await self._look()).available < size:
                await trio.sleep(_STEP_S)
        return True

    async def _drop_copies(self, size: int) -> bool:
        freed = dropped = 0
        for ino in self._residency.resident_in(self._tier.number):
            if freed >= size:
                break
            freed += self._evict(ino)
            dropped += 1
            if dropped % _STRIDE == 0:
                await trio.sleep(0)
        if dropped:
            await self._evicted()
        return dropped > 0
