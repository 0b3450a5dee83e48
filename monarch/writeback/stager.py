"""Stages contents: copies the bytes of an object to a file beside its name at the source.

A content is staged in its turn, or ahead of it, since moving the bytes takes long. A failure ahead
of its turn has no consequence: the content is staged again in its turn, and the failure is raised
then.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import trio

from monarch.errors import Refused
from monarch.posix.thread_pool import ThreadPool
from monarch.text import KiB, counted, errno_words
from monarch.types import Identity
from monarch.writeback.content_order import ContentOrder
from monarch.writeback.drain_queue import DrainQueue
from monarch.writeback.mover import Courtesy, Mover, begin_all, close_all, open_all
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.objects import NotAnObjectError, Objects
from monarch.writeback.op import above
from monarch.writeback.open_file import UNTOUCHED
from monarch.writeback.progress import Marks
from monarch.writeback.queue_entry import Entry
from monarch.writeback.source_state import SourceState
from monarch.writeback.staging import Staging
from monarch.writeback.steps import Steps
from monarch.writeback.wakeups import Trouble, Wakeups

log = logging.getLogger(__name__)

# Contents up to this size, in bytes, are staged in lots.
_SMALL_BYTES = 256 * KiB
# A content of a file that is being written is tried this number of times, with this pause in
# seconds, before it is left to the content that the writer's close will record.
_TRIES = 4
_TRY_S = 0.5
# A tick of the kernel's clock, in seconds: two writes within it leave the same modification time.
_TICK_S = 0.02
# The number of changes of the queue that are searched for contents to stage, and the number of
# contents staged ahead at a time. Staged files take room at the source.
_WINDOW = 1024
_MOST_STAGED = 128
# The most small contents in one lot.
_LOT = 32
# How long a search waits for further contents after the first one was recorded, in seconds. A
# process that writes many files would cause a search for each of them.
_GATHER_S = 0.01


class _MissingError(Exception):
    """The object does not have the recorded bytes."""


class _WrittenError(Exception):
    """A process is writing the object, which is not in the recorded version."""


@dataclass(eq=False, repr=False)
class Stager:
    """Belongs to the event loop. ``count`` is the number of contents that are staged now."""

    _objects: Objects
    _files: ObjectTable
    _threads: ThreadPool
    _queue: DrainQueue
    _state: SourceState
    _order: ContentOrder
    _steps: Steps
    _marks: Marks
    _mover: Mover
    _wakeups: Wakeups
    count: int = 0

    def forget(self, entry: Entry) -> None:
        """Call this when the staged file of a content is published, or is not used any more."""
        if entry.staged is not None:
            self.count -= 1
        entry.staged = None
        entry.place = None
        entry.published = False

    # -- one content -------------------------------------------------------------------------

    async def stage(self, entry: Entry, *, in_turn: bool) -> None:
        """Stages a content, or finds that it is not needed. Raises OSError in its turn."""
        entry.is_staging = entry.was_tried = True
        try:
            entry.staged = await self._staged_content(entry, in_turn)
            self.count += entry.staged is not None
        except _MissingError as error:
            if in_turn:
                self._lose(entry, str(error))
        except _WrittenError:
            if in_turn:
                entry.skipped = True
                self._files.left_out(entry.op.object)
        except Exception:
            if in_turn:
                raise
        finally:
            entry.was_ahead = not in_turn
            entry.is_staging = False
            self._wakeups.wake_all()

    def _lose(self, entry: Entry, why: str) -> None:
        op = entry.op
        if self._order.is_skipped(entry):
            return
        self._order.lost[op.object] = op.path
        entry.skipped = True
        try:
            self._marks.lost(op.object)
        except OSError as error:
            log.warning("the journal cannot record the loss: %s", errno_words(error.errno))
        log.error(
            "%r is lost: the tier does not have the %s written to it: %s; the source keeps what it"
            " has of that name",
            os.fsdecode(op.path),
            counted(op.size, "byte that was", "bytes that were"),
            why,
        )

    async def _staged_content(self, entry: Entry, in_turn: bool) -> Identity | None:
        """Stages a content; returns the version of its object, None if the source has these bytes
        already. Raises OSError, _MissingError, _WrittenError."""
        op, tries = entry.op, 0
        if op.through:
            return await self._staged_at_source(entry)
        while True:
            staging = self._staging(entry, make=in_turn)
            try:
                staged = await self._copied(entry, staging)
            finally:
                self._threads.start(staging.close)
            if staged is not None or entry.published:
                return staged
            tries += 1
            if not in_turn or tries > _TRIES:
                raise _WrittenError
            # If the process has closed the file meanwhile, no later content may follow.
            if self._files.is_written(op.object) and not await self._is_alone(_TRY_S):
                raise _WrittenError

    def _staging(self, entry: Entry, *, make: bool) -> Staging:
        opening = self._steps.opening(entry, make=make)
        return Staging(self._objects, entry.op.object, open_part=opening)

    async def _is_alone(self, pause_s: float) -> bool:
        """Waits a moment; returns whether no other change has come meanwhile."""
        with trio.move_on_after(pause_s):
            while len(self._queue) <= 1:
                await self._wakeups.change()
            return False
        return True

    async def _staged_at_source(self, entry: Entry) -> Identity | None:
        """As ``_staged_content``, for a content that was written at the source directly."""
        op = entry.op
        if self._files.is_written(op.object):
            # The file would get its name before it is complete.
            raise _WrittenError
        try:
            size, identity = await self._threads.run(self._steps.finishing(entry))
        except FileNotFoundError as error:
            raise _MissingError(
                f"others have removed {error.filename!r} at the source, or have moved it with its"
                " directory"
            ) from error
        version = Identity(size, op.mtime_ns or 0, 0, 0)
        if identity is None:
            self._marks.staged({entry: version})
            await self._marks.sync(entry.record)
            return version
        self._state.note_version(op.object, version)
        entry.published = True
        return None

    async def _copied(self, entry: Entry, staging: Staging) -> Identity | None:
        """One try; returns None if a process was writing, or if it has set ``published``."""
        op = entry.op
        written = self._files.is_written(op.object)
        try:
            # Writes to mapped pages show in the modification time only after a sync.
            version = await self._threads.run(partial(staging.open, sync=written or not op.synced))
        except NotAnObjectError as error:
            raise _MissingError(f"{error.strerror} {error.filename!r}") from error
        except FileNotFoundError as error:
            raise _MissingError("there is no such object") from error
        is_recorded = (version.size, version.mtime_ns) == (op.size, op.mtime_ns)
        # Only the recorded bytes of a file that is appended to are copied.
        is_part = not is_recorded and self._is_part(entry, version, written)
        if is_part:
            version = replace(version, size=op.size, mtime_ns=op.mtime_ns or 0)
            staging.limit = op.size
        elif written:
            if not is_recorded:
                return None
            if abs(time.time_ns() - version.mtime_ns) < _TICK_S * 1e9:
                await trio.sleep(_TICK_S)
                if await self._threads.run(staging.version) != version:
                    return None
        elif self._is_short(entry, version):
            if self._files.is_written(op.object):
                # A process has truncated the file since this try began.
                return None
            raise _MissingError(f"the object has {version.size}")
        if self._state.version(op.object) == version:
            entry.published = True
            return None
        if not (op.synced or self._objects.failure(op.object)):
            self._marks.durable(entry)
        # A staged file that exists before the records of its object are durable would never be
        # removed after a power cut.
        await self._marks.sync(entry.record)
        await self._threads.run(staging.begin)
        # This mark is durable before the file gets its name, and so are all earlier records.
        self._marks.staged({entry: version})
        await self._mover.move(staging, version.size, self._steps.applying(entry, version))
        if is_part:
            return version if self._order.is_intact(entry) else None
        now = await self._threads.run(staging.version)
        if now != version and not (now.size == version.size and self._is_unwritten(entry)):
            return None
        # A process that has the file open may write more.
        if not is_recorded and self._files.is_written(op.object):
            return None
        return version

    def _is_unwritten(self, entry: Entry) -> bool:
        """Whether no bytes of an object have changed since its last content was recorded, which is
        this one: then a process has set its times, which is a change behind this one."""
        is_last = self._order.later(entry) is None
        return is_last and self._files.lowest(entry.op.object) == UNTOUCHED

    def _is_part(self, entry: Entry, version: Identity, written: bool) -> bool:
        """Whether an object begins with the recorded bytes, and has more since. False for a file
        that is not open and has no later content: the changed bytes are not known then."""
        op = entry.op
        is_known = written or self._order.later(entry) is not None
        return (
            is_known
            and op.mtime_ns is not None
            and version.size >= op.size > 0
            and self._order.is_intact(entry)
        )

    def _is_short(self, entry: Entry, version: Identity) -> bool:
        """Whether an object has lost bytes, and was not truncated since."""
        op = entry.op
        is_changed = op.mtime_ns is not None and (
            version.mtime_ns > op.mtime_ns
            # A process has set a time in the future, and a later change has set both times anew.
            or (op.mtime_ns > entry.recorded_ns and version.mtime_ns == version.ctime_ns)
        )
        return (
            version.size < op.size
            and not is_changed
            and not any(later.kind in ("content", "attr") for later in self._order.behind(entry))
        )

    # -- a lot of small contents -------------------------------------------------------------

    def is_small(self, entry: Entry) -> bool:
        """Whether a content may be staged in a lot: a small file in the recorded state."""
        op = entry.op
        return (
            op.size <= _SMALL_BYTES
            and not op.through
            and op.mtime_ns is not None
            and not self._files.is_written(op.object)
            and not self._objects.failure(op.object)
        )

    async def stage_lot(self, entries: Sequence[Entry]) -> None:
        """Stages small contents ahead of their turn, except those with any special condition."""
        lot: dict[Staging, Entry] = {}
        for entry in entries:
            entry.is_staging = entry.was_tried = True
            lot[self._staging(entry, make=False)] = entry
        try:
            await self._copied_lot(lot)
        except OSError:
            # Of the journal: the change whose turn it is meets it as well.
            pass
        finally:
            self._threads.start(close_all, lot)
            for entry in entries:
                entry.was_ahead = True
                entry.is_staging = False
            self._wakeups.wake_all()

    async def _copied_lot(self, lot: Mapping[Staging, Entry]) -> None:
        """As ``_copied``. Raises OSError of the journal."""
        to_sync = {it: not entry.op.synced for it, entry in lot.items()}
        wanted: dict[Staging, Identity] = {}
        for it, version in (await self._threads.run(open_all, to_sync)).items():
            op = lot[it].op
            if self._files.is_written(op.object):
                continue
            if (version.size, version.mtime_ns) != (op.size, op.mtime_ns):
                continue
            if self._state.version(op.object) == version:
                lot[it].published = True
            else:
                wanted[it] = version
        if not wanted:
            return
        self._marks.durable(*(lot[it] for it in wanted if to_sync[it]))
        # A staged file that exists before the records of its object are durable would never be
        # removed after a power cut.
        await self._marks.sync(max(lot[it].record for it in wanted))
        begun = await self._threads.run(begin_all, wanted)
        if not begun:
            return
        # This mark is durable before the files get their names, and so are all earlier records.
        self._marks.staged({lot[it]: wanted[it] for it in begun})
        moved = await self._mover.move_lot(
            {it: self._steps.applying(lot[it], wanted[it]) for it in begun},
            sum(wanted[it].size for it in begun),
        )
        for it, now in moved.items():
            # A file that was written meanwhile is staged again in its turn.
            if now == wanted[it]:
                lot[it].staged = now
                self.count += 1


@dataclass(eq=False, repr=False)
class StageAhead:
    """Stages contents ahead of their turn, in ``workers`` tasks. Belongs to the event loop."""

    _queue: DrainQueue
    _state: SourceState
    _order: ContentOrder
    _stager: Stager
    _courtesy: Courtesy
    _trouble: Trouble
    _wakeups: Wakeups
    _workers: int

    async def run(self) -> None:
        """Stages contents ahead of their turn, until cancelled."""
        found, lots = trio.open_memory_channel[list[Entry]](0)
        async with trio.open_nursery() as nursery:
            for _ in range(self._workers):
                nursery.start_soon(self._stage, lots)
            while True:
                try:
                    next_lots = self.next_lots()
                except Refused:
                    # Some names cannot be read now. The change at the front of the queue will
                    # report that.
                    next_lots = []
                for lot in next_lots:
                    await found.send(lot)
                if not next_lots:
                    await self._wakeups.content()
                    await trio.sleep(_GATHER_S)

    async def _stage(self, lots: trio.MemoryReceiveChannel[list[Entry]]) -> None:
        async for lot in lots:
            # The drain may have made, or begun, some of them while the lot waited for this task.
            try:
                waiting = [it for it in lot if self._is_waiting(it) and self._may_be_staged(it)]
            except Refused:
                continue
            if len(waiting) > 1:
                await self._stager.stage_lot(waiting)
            elif waiting:
                await self._stager.stage(waiting[0], in_turn=False)

    def next_lots(self) -> list[list[Entry]]:
        """Chooses the contents to stage next: a large one, or up to one lot of small ones for each
        worker. Raises Refused.

        A content may be staged before its turn if no earlier change of the same object, of its
        names or of the directories above them waits. Attributes of a file that the source does not
        have yet are not changed there: the content brings them.
        """
        if self._trouble.reason is not None or self._stager.count >= _MOST_STAGED:
            return []
        if self._courtesy.lets_write(self._queue):
            return []
        found: list[Entry] = []
        objects: set[int] = set()
        changing: set[bytes] = set()
        named: set[bytes] = set()
        for entry in self._queue.first(_WINDOW):
            op = entry.op
            if op.kind == "content":
                if (
                    op.object not in objects
                    and named.isdisjoint(op.paths)
                    and changing.isdisjoint(above(op.path))
                    and self._may_be_staged(entry)
                ):
                    if not self._stager.is_small(entry):
                        return self._shared(found) if found else [[entry]]
                    found.append(entry)
                    if len(found) == _LOT * self._workers:
                        break
                objects.add(op.object)
            elif op.kind in ("mkdir", "rmdir", "rename", "symlink"):
                changing.update(op.names())
            if op.object and (
                op.kind in ("link", "rename", "unlink")
                or (op.kind in ("attr", "xattr") and not self._state.has_nothing_of(op))
            ):
                # The next content of the file depends on the result of this change, so it waits.
                objects.add(op.object)
            if op.over_object:
                # Another file takes the name, perhaps the last one, of its older version.
                objects.add(op.over_object)
            if op.kind not in ("content", "attr", "xattr", "create", "take"):
                named.update(op.names())
        return self._shared(found)

    def _shared(self, small: list[Entry]) -> list[list[Entry]]:
        """The lots of small contents: about the same number for each worker."""
        size = -(-len(small) // self._workers)
        return [small[at : at + size] for at in range(0, len(small), size)] if small else []

    def _is_waiting(self, entry: Entry) -> bool:
        return len(self._queue) > 0 and entry.seq >= self._queue.front.seq

    def _may_be_staged(self, entry: Entry) -> bool:
        is_idle = not (entry.is_staging or entry.was_ahead or entry.is_ready)
        return (
            is_idle
            and not (entry.op.same or entry.op.through)
            and not self._queue.is_behind(entry)
            and self._order.later(entry) is None
            and self._state.grows_from(entry.op) is None
            and not self._order.is_skipped(entry)
        )
