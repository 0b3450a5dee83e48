"""Room in the absorbing tier: written files take precedence over copies of the source.

The room for written files is the size of the present ones, at least the reserve. Copies are evicted
to make that room. Drained objects stay while they fit into the reserve; the oldest are released
first. The number of drained objects is limited too, since each takes memory.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import trio

from monarch.placement.ledger import Ledger
from monarch.placement.residency import Residency
from monarch.posix.thread_pool import ThreadPool
from monarch.tiers.tier import Space
from monarch.types import Ino
from monarch.writeback.drained import DrainedObjects
from monarch.writeback.object_states import ObjectStates
from monarch.writeback.store import WriteStore

log = logging.getLogger(__name__)

# The interval of checks of the room, in seconds.
_CHECK_S = 0.5
# The default reserve: at least this share of the tier, and this many times the largest file.
_RESERVE_SHARE = 0.05
_LARGEST_FILES = 2
# The most drained objects that stay: each takes about a kilobyte of memory.
_MOST_DRAINED = 32768
# How long ``make`` waits for the disk to show released room, and between two checks, in seconds.
_PATIENCE_S = 2.0
_STEP_S = 0.02
# The number of copies that are evicted between two turns of the event loop.
_STRIDE = 64


@dataclass(frozen=True, eq=False, repr=False)
class WriteReserve:
    """The room in ``tier`` that is kept for written files. ``size`` is in bytes; None means twice
    the largest file, at least a share of the tier."""

    size: int | None
    tier: int
    ledger: Ledger
    states: ObjectStates

    @property
    def bytes(self) -> int:
        if self.size is not None:
            return self.size
        share = int(self.ledger.capacity(self.tier) * _RESERVE_SHARE)
        return max(share, _LARGEST_FILES * self.states.largest)

    def is_short(self, waiting_bytes: int) -> bool:
        """Whether so much waits for the drain that it goes before readers of the source."""
        return waiting_bytes > self.bytes / 2


@dataclass(eq=False, repr=False)
class SpaceReclaimer:
    """Keeps room for written files in the tier of ``reserve``. Belongs to the event loop.

    ``evict`` evicts a copy and returns its size in bytes; ``evicted`` is called after the last of
    several.
    """

    _place: WriteStore
    _threads: ThreadPool
    reserve: WriteReserve
    _drained: DrainedObjects
    _residency: Residency
    _evict: Callable[[Ino], int]
    _evicted: Callable[[], Awaitable[None]]

    def __post_init__(self) -> None:
        self._states, self._ledger = self.reserve.states, self.reserve.ledger
        self.space = self._place.tier.space()

    def statfs(self) -> Space:
        """The room for written files: the free room, copies, and drained objects."""
        gives_way = self._ledger.used(self.reserve.tier) + self._states.drained_bytes
        available = min(self.space.total, self.space.available + gives_way)
        return Space(self.space.total, available)

    async def _look(self) -> Space:
        """The space of the tier's disk. Raises OSError."""
        return await self._threads.run(self._place.space)

    async def run(self) -> None:
        """Calls ``keep`` at regular intervals, until cancelled."""
        while True:
            with suppress(OSError):
                self.space = await self._look()
                await self.keep()
            await trio.sleep(_CHECK_S)

    async def keep(self) -> None:
        """Releases drained objects that do not fit into the reserve, and evicts copies as far as
        written files need their room."""
        number, reserve = self.reserve.tier, self.reserve.bytes
        self._drained.release_oldest(
            self._states.drained_bytes - reserve,
            count=len(self._states.drained) - _MOST_DRAINED,
        )
        written = self._states.bytes + self._place.doubtful.held
        self._ledger.hold(number, max(reserve, written))
        wanted = max(0, reserve - written) - self.space.available
        await self._drop_copies(max(wanted, -self._ledger.room(number)))

    async def make(self, size: int) -> bool:
        """Makes room for ``size`` bytes now; returns whether any room was released."""
        freed = self._drained.release_oldest(size)
        if not (await self._drop_copies(size - freed) or freed > 0):
            return False
        # A released object is removed only when its record is in the journal.
        with trio.move_on_after(_PATIENCE_S), suppress(OSError):
            while (await self._look()).available < size:
                await trio.sleep(_STEP_S)
        return True

    async def _drop_copies(self, size: int) -> bool:
        freed = dropped = 0
        for ino in self._residency.resident_in(self.reserve.tier):
            if freed >= size:
                break
            freed += self._evict(ino)
            dropped += 1
            if dropped % _STRIDE == 0:
                await trio.sleep(0)
        if dropped:
            await self._evicted()
        return dropped > 0
