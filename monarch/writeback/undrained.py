"""The note in the state directory of the changes that the tier has and the source lacks.

The next mount compares the note with the journal in the tier (earlier.py). Without the note, a tier
whose disk is not mounted would look like a new tier. The first change waits until there is a note:
a prepared one, which names no files and gets its name by a rename. A full note replaces it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import trio

from monarch.control.state_directory import (
    UndrainedNote,
    prepare_undrained,
    put_undrained,
    write_undrained,
)
from monarch.errors import Unanswered
from monarch.posix.bounded_calls import BoundedCalls
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
# How long the event loop waits for that disk with the first change, in seconds.
_WAIT_S = 1.0
# The note names the files of at most this many changes, in at most this many bytes of JSON.
_MOST_CHANGES = 4096
_MOST_NAME_BYTES = 100 * KiB


class UndrainedNotes:
    """Writes the note when the source begins to lack changes or a file is opened for writing, and
    removes it when the source has all. ``state`` is the state directory. ``failure`` says why the
    note could not be written or removed at the last try; empty if it could. Belongs to the event
    loop. Raises OSError if the start of the machine cannot be read."""

    def __init__(self, state: Path, place: WriteStore, drain: Drain, table: ObjectTable) -> None:
        self.state = state
        self.failure = ""
        self._place = place
        self._drain = drain
        self._table = table
        self._boot = boot_now()
        # Writes in the order of the calls.
        self._threads = ThreadPool(1, "undrained", abandon=True)
        # Calls for which the event loop waits: no change is recorded meanwhile.
        self._calls = BoundedCalls("first undrained", wait_s=_WAIT_S)
        # Whether this mount has prepared a note: that of an earlier one may name another tier.
        self._is_prepared = False
        # Whether there is a note, as far as the disk has answered.
        self._is_there = False
        self._begins = trio.Event()
        # Whether the file is known to be as ``_noted``: an earlier mount may have left one.
        self._is_known = False
        self._noted: UndrainedNote | None = None
        self._limiter = Limiter(log)

    def begin(self) -> None:
        """Writes a note unless there is one. Call this before a change is recorded, and before a
        process may write to a file."""
        if self._is_there:
            return
        self._is_there, self._is_known = True, False
        self._begins.set()
        try:
            self._calls.call(self._put_first)
        except (OSError, Unanswered) as error:
            self._warn(error)

    def _put_first(self) -> None:
        is_prepared, self._is_prepared = self._is_prepared, False
        if is_prepared:
            with suppress(FileNotFoundError):
                put_undrained(self.state)
                return
        write_undrained(self.state, self._note(1, []))

    async def run(self) -> None:
        """Keeps the note up to date, until cancelled."""
        while True:
            await self._update()
            if self._is_there or not self._is_known:
                await trio.sleep(_STEP_S)
            else:
                await self._begins.wait()

    async def finish(self) -> None:
        """Updates the note for the last time, after the drain of the mount's end."""
        with trio.move_on_after(_LAST_S, shield=True):
            await self._update(is_last=True)
            with suppress(OSError):
                await self._threads.run(prepare_undrained, self.state, None)

    async def _update(self, *, is_last: bool = False) -> None:
        """``is_last``: no other change comes, so no other note is prepared."""
        note = self._now()
        if self._is_known and note == self._noted:
            return
        try:
            if note is not None:
                self._is_there = True
                await self._threads.run(write_undrained, self.state, note)
            else:
                # Without room for a prepared note the next first one is tried all the same.
                with suppress(OSError):
                    first = None if is_last else self._note(1, [])
                    await self._threads.run(prepare_undrained, self.state, first)
                    self._is_prepared = first is not None
                if self._now() is not None:
                    return
                self._is_there, self._begins = False, trio.Event()
                self._calls.call(write_undrained, self.state, None)
        except (OSError, Unanswered) as error:
            self._is_known = False
            self._warn(error)
        else:
            # A call that was given up may still be made.
            self._is_known, self._noted = not self._calls.is_stuck, note
            self.failure = ""

    def _warn(self, error: OSError | Unanswered) -> None:
        self.failure = errno_words(error.errno) if isinstance(error, OSError) else "no answer"
        self._limiter.warning(
            "undrained",
            "the state directory cannot note what the source lacks: %s; the next mount may not"
            " notice that the tier is missing",
            self.failure,
        )

    def _now(self) -> UndrainedNote | None:
        """None if the source has all changes, and no file is open for writing."""
        queue = self._drain.queue
        count, written = len(queue) + len(queue.held), len(self._table.writable())
        if not count and not written:
            return None
        ops = [entry.op for entry in islice(queue.entries(), _MOST_CHANGES)]
        return self._note(count + written, ops, changes=count)

    def _note(self, operations: int, ops: Sequence[Op], *, changes: int = 0) -> UndrainedNote:
        """A note of ``operations``, of which ``ops`` are the first of some ``changes``."""
        token = self._place.journal.token
        return UndrainedNote(
            version=_VERSION,
            tier=os.fspath(self._place.tier.path),
            directory=os.fspath(self._place.directory),
            journal=token,
            in_memory=self._place.tier.in_memory,
            boot=self._boot,
            operations=operations,
            bytes=self._drain.queue.waiting_bytes,
            names=_names(ops, changes, f"undrained-{token}"),
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
