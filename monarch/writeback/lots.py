"""Stages many small contents together: few hops to a thread, and one wait for each disk.

A file system that syncs small files one after the other writes its own journal for each. So the
bytes of all files are given to the disk first; the first sync then writes most bytes of the others,
too. Each function runs in a worker thread, and returns for each content its own result, or the
OSError with which it failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from monarch.types import Identity
from monarch.units import MiB
from monarch.writeback.staging import Staging

# The number of bytes of each file that one turn moves.
_TURN_BYTES = MiB

T = TypeVar("T")

Apply = Callable[[int], None]


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
    while it.turn(_TURN_BYTES):
        pass
    it.apply_attributes(apply)


def _verified(it: Staging, verify: bool) -> Identity:
    while verify and it.verify(_TURN_BYTES):
        pass
    return it.version()


def _tried(call: Callable[[], T]) -> T | OSError:
    try:
        return call()
    except OSError as error:
        return error
