"""The note in the state directory of the changes that the tier has and the source lacks.

The next mount compares the note with the journal in the tier (earlier.py). Without the note, a tier
whose disk is not mounted would look like a new tier.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import trio

from monarch.control.state_directory import UndrainedNote, write_undrained
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.text import KiB, errno_words
from monarch.writeback.drain import Drain
from monarch.writeback.journal_found import boot_now
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.op import Op
from monarch.writeback.store import WriteStore

log = logging.getLogger(__name__)

_VERSION = 1
# The interval of updates while the source lacks changes, in seconds.
_STEP_S = 2.0
# Time limit for the state directory's disk at the end of the mount, in seconds.
_LAST_S = 5.0
# The note names the files of at most this many changes, in at most this many bytes of JSON.
_MOST_CHANGES = 4096
_MOST_NAME_BYTES = 100 * KiB


class UndrainedNotes:
    """Writes the note when the source begins to lack changes, and removes it when they are drained.
    ``state`` is the state directory. Belongs to the event loop. Raises OSError if the start of the
    machine cannot be read."""

    def __init__(self, state: Path, place: WriteStore, drain: Drain, table: ObjectTable) -> None:
        self._state = state
        self._place = place
        self._drain = drain
        self._table = table
        self._boot = boot_now()
        # Writes in the order of the calls.
        self._threads = ThreadPool(1, "undrained", abandon=True)
        # Whether the file is known to be as ``_noted``: an earlier mount may have left one.
        self._is_known = False
        self._noted: UndrainedNote | None = None
        self._limiter = Limiter(log)

    async def run(self) -> None:
        """Keeps the note up to date, until cancelled."""
        while True:
            await self._update()
            if self._is_known and self._noted is None:
                await self._drain.progress.until_waiting()
            else:
                await trio.sleep(_STEP_S)

    async def finish(self) -> None:
        """Updates the note for the last time, after the drain of the mount's end."""
        with trio.move_on_after(_LAST_S, shield=True):
            await self._update()

    async def _update(self) -> None:
        note = self._now()
        if self._is_known and note == self._noted:
            return
        self._is_known, self._noted = True, note
        try:
            await self._threads.run(write_undrained, self._state, note)
        except OSError as error:
            self._is_known = False
            self._limiter.warning(
                "undrained",
                "the state directory cannot note what the source lacks: %s; the next mount may not"
                " notice that the tier is missing",
                errno_words(error.errno),
            )

    def _now(self) -> UndrainedNote | None:
        """None if the source has all changes."""
        queue, journal = self._drain.queue, self._place.journal
        count, unrecorded = len(queue) + len(queue.held), len(self._table.unrecorded())
        if not count and not unrecorded:
            return None
        ops = [entry.op for entry in islice(queue.entries(), _MOST_CHANGES)]
        return UndrainedNote(
            version=_VERSION,
            tier=os.fspath(self._place.tier.path),
            directory=os.fspath(self._place.directory),
            journal=journal.token,
            in_memory=self._place.tier.in_memory,
            boot=self._boot,
            operations=count + unrecorded,
            bytes=queue.waiting_bytes,
            names=_names(ops, count, f"undrained-{journal.token}"),
        )


def _names(ops: Iterable[Op], count: int, others: str) -> list[str]:
    """The last paths of the files that ``ops``, the first of ``count`` changes, have made or
    changed. ``others`` stands for files whose paths are not known or do not fit."""
    paths: dict[int | bytes, bytes] = {}
    for op in ops:
        count -= 1
        key = op.object or op.path
        if op.kind in ("unlink", "rmdir", "gone"):
            paths.pop(key, None)
        elif op.kind == "rename":
            paths.pop(op.path, None)
            paths[op.object or op.to] = op.to
        else:
            paths[key] = op.to if op.kind == "link" else op.path
    names: list[str] = []
    size = 0
    for name in dict.fromkeys(map(os.fsdecode, paths.values())):
        size += len(json.dumps(name))
        if size > _MOST_NAME_BYTES:
            count += 1
            break
        names.append(name)
    return names if names and not count else [*names, others]
