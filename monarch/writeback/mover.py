"""Copies the bytes of staged files to the source, in turns, so that readers of the source and
processes that write go first.

Many small contents are staged together, as a *lot*: few hops to a thread, and one wait for each
disk. A file system that syncs small files one after the other writes its own journal for each. So
the bytes of all files are given to the disk first; the first sync then writes most bytes of the
others, too. Each function of a lot runs in a worker thread, and leaves out the contents whose calls
fail: they are staged again in their turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import trio

from monarch.posix.thread_pool import ThreadPool
from monarch.text import MiB
from monarch.transfer.pace import TokenBucket
from monarch.types import Identity
from monarch.writeback.drain_queue import DrainQueue
from monarch.writeback.staging import Staging
from monarch.writeback.wakeups import Wakeups

# The number of bytes that one turn in a worker thread moves.
TURN_BYTES = 4 * MiB
# A process that writes many files has paused after this time without a change, in seconds.
_QUIET_S = 0.3
# How long a turn waits for a pause of the source's readers before it continues, in seconds.
_PATIENCE_S = 1.0
_STEP_S = 0.005

Apply = Callable[[int], None]


@dataclass(eq=False, repr=False)
class Courtesy:
    """``bucket`` limits the bandwidth. ``busy`` returns whether a reader uses the source at a time
    of the event loop's clock. Readers go first, unless a caller waits for the drain, or ``demand``
    returns that the backlog must shrink.

    While a process makes one change after the other, the drain waits, for up to ``hold_s`` seconds
    from the oldest change on: it would compete for the disk of the tier.
    """

    _wakeups: Wakeups
    _bucket: TokenBucket
    _busy: Callable[[float], bool]
    _demand: Callable[[], bool]
    _hold_s: float
    _last_change_s: float = -math.inf

    def note_change(self) -> None:
        """Call this when a change was recorded."""
        if self._hold_s:
            self._last_change_s = trio.current_time()

    def lets_write(self, queue: DrainQueue) -> bool:
        """Whether the changes of the queue wait for a process that is writing files. They do not
        if a process has synced one of them: it needs the file to be safe."""
        if not (queue and self._hold_s) or self._wakeups.waiters:
            return False
        if trio.current_time() - self._last_change_s > _QUIET_S:
            return False
        age_s = (time.time_ns() - queue.front.recorded_ns) / 1e9
        if not 0 <= age_s < self._hold_s or self._demand():
            return False
        return queue.last_synced < queue.front.seq

    async def wait(self, count: int) -> None:
        """Waits until ``count`` bytes may be brought to the source."""
        await trio.sleep(self._bucket.take(count, trio.current_time()))
        patience = trio.current_time() + _PATIENCE_S
        while (
            self._busy(trio.current_time())
            and not (self._wakeups.waiters or self._demand())
            and trio.current_time() < patience
        ):
            await trio.sleep(_STEP_S)


class Mover:
    """With ``verify`` each staged file is read back."""

    def __init__(self, threads: ThreadPool, courtesy: Courtesy, *, verify: bool) -> None:
        self._threads = threads
        self._courtesy = courtesy
        self._verify = verify
        self._moving: list[Staging] = []

    @property
    def moved_bytes(self) -> int:
        """The bytes of the files under way that have reached the source."""
        return sum(staging.moved for staging in self._moving)

    async def move(self, staging: Staging, size: int, apply: Apply) -> None:
        """Copies the ``size`` bytes of a staged file, sets its attributes with ``apply``, and makes
        it durable. Raises OSError."""
        self._moving.append(staging)
        try:
            await self._courtesy.wait(min(size, TURN_BYTES))
            if size <= TURN_BYTES:
                await self._threads.run(_move_at_once, staging, apply, self._verify)
                return
            while await self._threads.run(staging.turn, TURN_BYTES):
                await self._courtesy.wait(TURN_BYTES)
            await self._threads.run(staging.finish, apply)
            if self._verify:
                while await self._threads.run(staging.verify, TURN_BYTES):
                    await self._courtesy.wait(0)
        finally:
            self._moving.remove(staging)

    async def move_lot(self, lot: Mapping[Staging, Apply], size: int) -> dict[Staging, Identity]:
        """As ``move``, for small files together; returns the versions of their objects after it."""
        self._moving += lot
        try:
            await self._courtesy.wait(size)
            return await self._threads.run(_move_all, lot, self._verify)
        finally:
            for staging in lot:
                self._moving.remove(staging)


def _move_at_once(staging: Staging, apply: Apply, verify: bool) -> None:
    while staging.turn(TURN_BYTES):
        pass
    staging.finish(apply)
    while verify and staging.verify(TURN_BYTES):
        pass


def open_all(lot: Mapping[Staging, bool]) -> dict[Staging, Identity]:
    """Opens the objects of a lot, and syncs those with true. Returns their identities."""
    opened: dict[Staging, Identity] = {}
    for it in lot:
        with suppress(OSError):
            opened[it] = it.open(sync=False)
    for it in opened:
        if lot[it]:
            it.start_object_writeback()
    found: dict[Staging, Identity] = {}
    for it, version in opened.items():
        with suppress(OSError):
            found[it] = it.sync_object() if lot[it] else version
    return found


def begin_all(lot: Iterable[Staging]) -> list[Staging]:
    """Opens the empty staged files of a lot. Returns the contents that have one."""
    begun = []
    for it in lot:
        with suppress(OSError):
            it.begin()
            begun.append(it)
    return begun


def _move_all(lot: Mapping[Staging, Apply], verify: bool) -> dict[Staging, Identity]:
    moved, synced = [], []
    for it, apply in lot.items():
        with suppress(OSError):
            while it.turn(TURN_BYTES):
                pass
            it.apply_attributes(apply)
            moved.append(it)
    for it in moved:
        with suppress(OSError):
            it.sync()
            synced.append(it)
    for it in synced:
        if verify:
            it.expect()
    found: dict[Staging, Identity] = {}
    for it in synced:
        with suppress(OSError):
            while verify and it.verify(TURN_BYTES):
                pass
            found[it] = it.version()
    return found


def close_all(lot: Iterable[Staging]) -> None:
    """Closes the descriptors of a lot."""
    for it in lot:
        it.close()
