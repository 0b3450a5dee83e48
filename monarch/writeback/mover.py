"""Copies the bytes of staged files to the source, in turns, so that readers of the source go
first.

Many small contents are staged together, as a *lot*: few hops to a thread, and one wait for each
disk. A file system that syncs small files one after the other writes its own journal for each. So
the bytes of all files are given to the disk first; the first sync then writes most bytes of the
others, too. Each function of a lot runs in a worker thread, and returns for each content its own
result, or the OSError with which it failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from monarch.posix.thread_pool import ThreadPool
from monarch.types import Identity
from monarch.units import MiB
from monarch.writeback.courtesy import Courtesy
from monarch.writeback.staging import Staging

# The number of bytes that one turn in a worker thread moves.
TURN_BYTES = 4 * MiB

T = TypeVar("T")

Apply = Callable[[int], None]


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

    async def move_lot(
        self, stagings: Sequence[Staging], applies: Sequence[Apply], size: int
    ) -> list[Identity | OSError]:
        """Copies many small files of ``size`` bytes together, in one turn. Returns the versions of
        their objects after it, or the errors of files that failed."""
        self._moving += stagings
        try:
            await self._courtesy.wait(size)
            return await self._threads.run(
                partial(move_all, stagings, applies, verify=self._verify)
            )
        finally:
            for staging in stagings:
                self._moving.remove(staging)


def _move_at_once(staging: Staging, apply: Apply, verify: bool) -> None:
    while staging.turn(TURN_BYTES):
        pass
    staging.finish(apply)
    while verify and staging.verify(TURN_BYTES):
        pass


def open_all(stagings: Sequence[Staging], are_synced: Sequence[bool]) -> list[Identity | OSError]:
    """Opens the objects; returns their identities when the bytes of the unsynced ones are on the
    disk."""
    opened = [_tried(partial(it.open, sync=False)) for it in stagings]
    unsynced = [not synced for synced in are_synced]
    for it, found, sync in zip(stagings, opened, unsynced, strict=True):
        if sync and not isinstance(found, OSError):
            it.start_object_writeback()
    return [
        _tried(it.sync_object) if sync and not isinstance(found, OSError) else found
        for it, found, sync in zip(stagings, opened, unsynced, strict=True)
    ]


def begin_all(stagings: Sequence[Staging]) -> list[OSError | None]:
    """Opens the empty staged file of each content."""
    return [_tried(it.begin) for it in stagings]


def move_all(
    stagings: Sequence[Staging], applies: Sequence[Apply], *, verify: bool
) -> list[Identity | OSError]:
    """Copies all bytes of each content, sets its attributes and makes it durable; with ``verify``
    reads it back. Returns the identities of the objects then."""
    moved = [
        _tried(partial(_moved, it, apply)) for it, apply in zip(stagings, applies, strict=True)
    ]
    synced = [
        found if isinstance(found, OSError) else _tried(it.sync)
        for it, found in zip(stagings, moved, strict=True)
    ]
    for it, found in zip(stagings, synced, strict=True):
        if verify and not isinstance(found, OSError):
            it.expect()
    return [
        found if isinstance(found, OSError) else _tried(partial(_verified, it, verify))
        for it, found in zip(stagings, synced, strict=True)
    ]


def close_all(stagings: Sequence[Staging]) -> None:
    for it in stagings:
        it.close()


def _moved(it: Staging, apply: Apply) -> None:
    while it.turn(TURN_BYTES):
        pass
    it.apply_attributes(apply)


def _verified(it: Staging, verify: bool) -> Identity:
    while verify and it.verify(TURN_BYTES):
        pass
    return it.version()


def _tried(call: Callable[[], T]) -> T | OSError:
    try:
        return call()
    except OSError as error:
        return error
