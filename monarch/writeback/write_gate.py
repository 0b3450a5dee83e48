"""What a change needs before it is made: a pattern, the journal, memory, and room in the tier.

Written files take precedence over copies of the source. Their room is the size of the present ones,
at least the reserve. Copies are evicted to make that room. Drained objects stay while they fit into
the reserve; the oldest are released first. The number of drained objects is limited too, since each
takes memory. Both give way as well when the journal has no room on the tier's disk.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import trio

from monarch.config.settings import MountSettings
from monarch.config.write_patterns import WritePatterns, is_staged
from monarch.errors import Refused
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import NAME_BYTES
from monarch.placement.ledger import Ledger
from monarch.posix.mounts import mount_table
from monarch.posix.thread_pool import ThreadPool
from monarch.text import KiB, MiB
from monarch.tiers.tier import Space
from monarch.types import Ino
from monarch.writeback.object_states import ObjectStates
from monarch.writeback.recorder import Recorder
from monarch.writeback.source_files import DrainedObjects
from monarch.writeback.store import WriteStore
from monarch.writeback.tier_objects import TierObjects
from monarch.writeback.unlinked import UnlinkedFiles

# An empty object, and what its directory may need.
OBJECT_BYTES = 64 * KiB
# How long the mount table is not read again, in seconds.
_FRESH_S = 1.0
# The interval of checks of the room, in seconds.
_CHECK_S = 0.5
# The default reserve: at least this share of the tier, and this many times the largest file.
_RESERVE_SHARE = 0.05
_LARGEST_FILES = 2
# The most drained objects that stay: each takes about a kilobyte of memory.
_MOST_DRAINED = 32768
# What is released for the journal, in bytes, when it has no room: more than it asks for.
_JOURNAL_BYTES = 2 * MiB
# How long ``make`` waits for the disk to show released room, and between two checks, in seconds.
_PATIENCE_S = 2.0
_STEP_S = 0.02
# How long a removal waits for room in the journal while the drain makes changes, in seconds: in
# this time the journal is shortened as well.
_PATIENCE_TO_REMOVE_S = 30.0
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

    ``copies``, ``evict`` and ``evicted`` as of ``front.Reading``.
    """

    _place: WriteStore
    _threads: ThreadPool
    reserve: WriteReserve
    _drained: DrainedObjects
    _copies: Callable[[int], Iterator[Ino]]
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

    async def run(self) -> None:
        """Calls ``keep`` at regular intervals, until cancelled."""
        while True:
            with suppress(OSError):
                self.space = await self._threads.run(self._place.space)
                await self.keep()
            await trio.sleep(_CHECK_S)

    async def keep(self) -> None:
        """Releases drained objects that do not fit into the reserve, and evicts copies as far as
        written files need their room. Does the same for the journal: without room for its marks the
        drain stops."""
        number, reserve = self.reserve.tier, self.reserve.bytes
        self._drained.release_oldest(
            self._states.drained_bytes - reserve,
            count=len(self._states.drained) - _MOST_DRAINED,
        )
        written = self._states.bytes + self._place.doubtful.held
        self._ledger.hold(number, max(reserve, written))
        wanted = max(0, reserve - written) - self.space.available
        await self._drop_copies(max(wanted, -self._ledger.room(number)))
        if not self._place.journal.has_room():
            await self.make(_JOURNAL_BYTES)

    async def make(self, size: int) -> bool:
        """Makes room for ``size`` bytes now; returns whether any room was released."""
        freed = self._drained.release_oldest(size)
        if not (await self._drop_copies(size - freed) or freed > 0):
            return False
        # A released object is removed only when its record is in the journal.
        with trio.move_on_after(_PATIENCE_S), suppress(OSError):
            while (await self._threads.run(self._place.space)).available < size:
                await trio.sleep(_STEP_S)
        return True

    async def _drop_copies(self, size: int) -> bool:
        freed = dropped = 0
        for ino in self._copies(self.reserve.tier):
            if freed >= size:
                break
            freed += self._evict(ino)
            dropped += 1
            if dropped % _STRIDE == 0:
                await trio.sleep(0)
        if dropped:
            await self._evicted()
        return dropped > 0


class WriteGate:
    """Belongs to the event loop. Everything raises Refused.

    Names that the snapshot does not have, and what else is kept in memory, may take as much as
    ``names_max`` new files.
    """

    def __init__(
        self,
        names: Namespace,
        settings: MountSettings,
        recorder: Recorder,
        objects: TierObjects,
        unlinked: UnlinkedFiles,
        space: SpaceReclaimer,
    ) -> None:
        self._names = names
        self.patterns = WritePatterns(settings.absorbs)
        self.names_max = settings.writeback.names_within(0, each=NAME_BYTES)
        self._recorder = recorder
        self._objects = objects
        self._unlinked = unlinked
        self._space = space
        self._source = os.path.realpath(os.fsencode(settings.source))
        # The file systems that are mounted below the source, and when that was read.
        self._mount_points: list[bytes] = []
        self._read_s = -math.inf

    def require_covered(self, parent: Ino, name: bytes) -> bytes:
        """The path of a name that may be made, changed or removed."""
        path = self._require_pattern(self._names.path_of(parent, name))
        if is_staged(name):
            # At the source such a name is of a file on its way there.
            raise Refused(errno.EPERM)
        return path

    def require_node_covered(self, ino: Ino) -> bytes:
        """The path of an inode that may be changed."""
        return self._require_pattern(self._names.visible_path(ino))

    def _require_pattern(self, path: bytes) -> bytes:
        self.require_journal()
        if not self.patterns.covers(path):
            raise Refused(errno.EROFS)
        return path

    def require_journal(self) -> None:
        if self._recorder.is_broken:
            raise Refused(errno.EIO)

    async def require_room(self) -> None:
        """Before a change that takes room of the journal's disk; ENOSPC if there is none."""
        if self._recorder.has_room():
            return
        # What a quota leaves is not known: the room comes when the released objects are removed.
        is_released = await self._space.make(OBJECT_BYTES)
        if is_released and await self._comes(self._recorder.has_room, lambda: _PATIENCE_S):
            return
        self._objects.count_failure(errno.ENOSPC)
        raise Refused(errno.ENOSPC)

    async def require_room_to_remove(self) -> None:
        """Before a removal. While the journal has only the room for the marks of the drain, it
        waits for the objects of removed files to leave, and for the drain: its changes need no more
        marks, and their records may leave the journal. ENOSPC if that takes too long."""
        if self._recorder.takes_removal():
            return
        self.require_journal()

        def has_made_room() -> bool:
            with suppress(Refused):
                self._unlinked.forget_objects()
            return self._recorder.takes_removal()

        await self._space.make(OBJECT_BYTES)
        if not await self._comes(has_made_room, self._patience_to_remove_s):
            self._objects.count_failure(errno.ENOSPC)
            raise Refused(errno.ENOSPC)

    def _patience_to_remove_s(self) -> float:
        return _PATIENCE_TO_REMOVE_S if self._recorder.is_draining else _PATIENCE_S

    async def _comes(self, holds: Callable[[], bool], patience_s: Callable[[], float]) -> bool:
        """Waits until ``holds`` returns true, up to ``patience_s``; returns whether it has."""
        begun_s = trio.current_time()
        while True:
            self._recorder.note_delayed()
            if holds():
                return True
            if trio.current_time() - begun_s >= patience_s():
                return False
            await trio.sleep(_STEP_S)

    @property
    def names_held(self) -> int:
        """How many new files would take the memory that is in use."""
        return -(-self._names.held_bytes // NAME_BYTES)

    @property
    def names_free(self) -> int:
        """How many new files there may still be."""
        return max(0, self.names_max - self.names_held)

    def require_memory(self, count: int) -> None:
        """``count`` bytes of memory for names and attributes; ENOSPC if they are not left."""
        most = self.names_max * NAME_BYTES
        if count <= 0 or self._names.held_bytes + count <= most:
            return
        self._unlinked.forget_all()
        if self._names.held_bytes + count > most:
            raise Refused(errno.ENOSPC)

    def require_held(self, ino: Ino) -> None:
        """Memory for what is about to be noted of an inode, if nothing is noted of it yet."""
        if not self._names.is_written(ino):
            self.require_memory(NAME_BYTES)

    def require_one_file_system(self, path: bytes, other: bytes) -> None:
        """EXDEV if the source cannot move or link a name from one path to the other."""
        now = time.monotonic()
        if now - self._read_s > _FRESH_S:
            try:
                table = [os.fsencode(mounted.mount_point) for mounted in mount_table()]
            except OSError as error:
                raise Refused(error.errno or errno.EIO) from error
            self._mount_points = [at for at in table if at.startswith(self._source + b"/")]
            self._read_s = now
        if self._mount_points and self._mounted_at(path) != self._mounted_at(other):
            raise Refused(errno.EXDEV)

    def _mounted_at(self, path: bytes) -> bytes:
        full = os.path.join(self._source, path)
        holders = (at for at in self._mount_points if full == at or full.startswith(at + b"/"))
        return max(holders, key=len, default=b"")
