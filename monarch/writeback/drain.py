"""The drain: makes at the source what was done on the mount, in the order in which it was done.

Changes are made one after the other from the front of the queue, a few in one turn of a thread.
Contents take long, so they are staged ahead of their turn, several at once, and published in it. A
change is marked as done when the source has it for good. A change of the same paths as another
whose mark could still be lost waits for that mark (conflicts.py).

A call that the source does not answer is waited for as long as it takes: if it were given up, the
source could still make that change after later ones.

The parts, each with its own state: what the source has (source_state.py), the changes that wait
and those that are refused (drain_queue.py), which content comes with a later one
(content_order.py), staging (stager.py), growth in place (growth.py), the calls to the
source (steps.py), the marks in the journal and callers that wait (progress.py).
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import trio

from monarch.config.settings import WritebackSettings
from monarch.errors import Refused
from monarch.posix import failpoints
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.text import errno_words
from monarch.transfer.pace import TokenBucket
from monarch.types import Identity
from monarch.writeback.conflicts import PathSet
from monarch.writeback.content_order import ContentOrder
from monarch.writeback.drain_queue import REMOVALS, DrainQueue
from monarch.writeback.expected import with_known_time
from monarch.writeback.growth import Grower
from monarch.writeback.history import Numbered
from monarch.writeback.journal import Journal, Known, Replay
from monarch.writeback.mover import TURN_BYTES, Courtesy, Mover
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.objects import Objects, TierCallError, of_tier
from monarch.writeback.op import Op
from monarch.writeback.progress import Marks, Progress
from monarch.writeback.queue_entry import Backlog, Entry
from monarch.writeback.source_contents import Place
from monarch.writeback.source_state import SourceState
from monarch.writeback.source_writer import SourceWriter, Step
from monarch.writeback.stager import StageAhead, Stager
from monarch.writeback.steps import Steps, with_rights_to_read
from monarch.writeback.wakeups import Cause, Trouble, Wakeups

log = logging.getLogger(__name__)

# The interval of checks whether a process that writes many files has paused, in seconds.
_HOLD_STEP_S = 0.05
# How long changes wait for a process that writes many files, in seconds.
_HOLD_S = 5.0
# Changes made at the source in one turn: the hop costs as much as a change of a fast source. A file
# that a program unpacks has up to five changes in the queue, and only its content is made there.
_BATCH = 64
_MOST_LOOKED_AT = 8 * _BATCH
# What a source answers to one change, and not to all.
_REFUSALS = frozenset(
    {errno.EPERM, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY}
    | {errno.ENOSYS}
    | {errno.ELOOP, errno.EINVAL, errno.EILSEQ, errno.ENAMETOOLONG, errno.EFBIG, errno.EDQUOT}
    | {errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.EOVERFLOW, errno.E2BIG, errno.ETXTBSY}
)
# How many times a content is staged again at once because the source has changed what it replaces.
_RESTAGED = 3
# A call that lasts longer than this, in seconds, is shown as trouble.
_HANGS_S = 30.0


class _RefusedError(Exception):
    """The source does not take the change at the front. ``is_full``: it has no room for any."""

    def __init__(self, error: OSError, *, is_full: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_full = is_full


class Drain:
    """``load`` what the journal held, ``put`` what is appended to it, and ``run``.

    ``busy`` and ``hold_s`` as in ``Courtesy``. ``is_urgent`` returns whether this number of waiting
    bytes goes before readers. ``threads`` is where calls wait that may hang; it abandons the calls
    of a task that is cancelled.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        objects: Objects,
        writer: SourceWriter,
        contents: ObjectTable,
        threads: ThreadPool,
        settings: WritebackSettings,
        busy: Callable[[float], bool],
        is_urgent: Callable[[int], bool],
        hold_s: float = _HOLD_S,
    ) -> None:
        self._journal = journal
        self.writer = writer
        self._contents = contents
        self._threads = threads
        self._wakeups = wakeups = Wakeups()
        self._trouble = trouble = Trouble(wakeups)
        self.state = state = SourceState()
        self._order = order = ContentOrder(state, contents)
        self.queue = queue = DrainQueue(wakeups, journal.mark_aside, order.is_skipped)
        self.progress = Progress(queue, order, trouble, wakeups)
        bucket = TokenBucket(settings.bandwidth, 2 * TURN_BYTES)
        self._courtesy = courtesy = Courtesy(
            wakeups, bucket, busy, lambda: is_urgent(queue.waiting_bytes), hold_s
        )
        self._steps = steps = Steps(writer, state, order, contents)
        self._marks = marks = Marks(journal, threads, state)
        mover = self._mover = Mover(threads, courtesy, verify=settings.verify)
        self._stager = stager = Stager(
            objects, contents, threads, queue, state, order, steps, marks, mover, wakeups
        )
        self._ahead = StageAhead(
            queue, state, order, stager, courtesy, trouble, wakeups, settings.workers
        )
        self._grower = Grower(objects, threads, state, order, steps, marks, courtesy)
        self._drained_files = self._drained_bytes = 0
        self._limiter = Limiter(log)

    # -- what the mount does and asks --------------------------------------------------------

    def load(self, replay: Replay) -> None:
        """Continue where an earlier mount has stopped. Before any other call."""
        self.state.load(replay)
        self._order.load(replay)
        self._steps.load(replay)
        self.queue.load(replay.aside)
        self.progress.load(replay)
        for seq, op in replay.ops:
            if seq not in replay.done:
                entry = Entry(seq, op, replay.recorded_ns[seq], 0, was_tried=True)
                entry.is_aside = seq in replay.aside
                self.queue.append(entry)

    def known_of(self, ops: Iterable[Numbered]) -> Known:
        """The state of the source that a journal must record when it is compacted to ``ops``, after
        ``load``."""
        ops = list(ops)
        known = self.state.known_of(ops, self.progress.is_done)
        doubtful, withheld = self._steps.set_id_of({op.object for _, op in ops})
        return replace(known, set_id=doubtful, withheld=withheld)

    def put(self, seq: int, op: Op) -> None:
        """A change was appended to the journal. Never waits."""
        self._courtesy.note_change()
        self.state.entries.queued(op)
        self.state.foresee(op)
        self.queue.append(
            Entry(seq, op, time.time_ns(), self._journal.file.written, was_tried=False)
        )
        self._order.expect(seq, op)
        self._note_removal(op)
        if len(self.queue) <= 2:
            self._wakeups.wake_all()
        elif op.kind == "content" and not self._courtesy.lets_write(self.queue):
            # It is work for one task; the tasks that stage others find it by themselves.
            self._wakeups.wake_stager()

    def _note_removal(self, op: Op) -> None:
        """A change was recorded or made. If it may give room at the source, or frees the way for
        one that may, what lacks room is tried again soon."""
        has_cause = op.object in self.queue.lacking or not self.state.has_nothing_of(op)
        if op.kind in REMOVALS and has_cause:
            self.queue.retry_soon(op)

    def give_up(self, concerns: Callable[[Op], bool], objects: Iterable[int]) -> list[int]:
        """Gives up the waiting changes that ``concerns`` selects, and all further ones of
        ``objects``; returns the numbers of the former."""
        given_up = [entry for entry in self.queue.entries() if concerns(entry.op)]
        self.state.give_up((entry.op for entry in given_up), objects)
        for entry in given_up:
            entry.is_moot = True
        self._wakeups.end_pause()
        self._wakeups.wake_all()
        return [entry.seq for entry in given_up]

    def backlog(self) -> Backlog:
        """The changes that are not at the source now."""
        waiting = list(self.queue.entries())
        sizes = {entry.op.object: entry.op.size for entry in waiting if entry.op.kind == "content"}
        conflicts = self.writer.log.conflicts
        aside = tuple(refusal for refusal in self.queue.refusals() if refusal.is_aside)
        other = self.stopped or self.queue.refusal(is_aside=False)
        return Backlog(
            ops=len(waiting),
            files=len(sizes),
            bytes=sum(sizes.values()),
            oldest_ns=waiting[0].recorded_ns if waiting else 0,
            drained_files=self._drained_files + self._grower.files,
            drained_bytes=self._drained_bytes + self._grower.bytes,
            failures=self._trouble.stops + self.queue.refused,
            trouble=other or self.queue.refusal(is_aside=True),
            cause=self.cause,
            lost=tuple(self._order.lost.values()),
            moving_bytes=self._mover.moved_bytes,
            conflicts=self.writer.log.conflict_count,
            conflict=conflicts[-1] if conflicts else None,
            aside=aside,
            aside_ops=sum(entry.is_aside for entry in waiting) if aside else 0,
            only_aside=bool(aside) and other is None,
        )

    @property
    def stopped(self) -> str | None:
        """Why no change at all reaches the source now; None if the source accepts changes."""
        oldest_s = self._threads.oldest_s()
        hanging = f"no answer for {oldest_s:.0f} s" if oldest_s > _HANGS_S else None
        return self._trouble.reason or hanging

    @property
    def cause(self) -> Cause:
        """The part that has failed while changes do not reach the source."""
        return self._trouble.cause if self._trouble.reason else "source"

    # -- the front of the queue --------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled. The next mount finds what is under way then, and does it again."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ahead.run)
            while True:
                try:
                    if self.queue.sift():
                        await trio.sleep(0)
                        continue
                    if self._courtesy.lets_write(self.queue):
                        await trio.sleep(_HOLD_STEP_S)
                        self._wakeups.wake_all()
                        continue
                    if self.queue:
                        await self._advance()
                    elif self._marks.unsynced:
                        await self._marks.sync_done()
                    else:
                        with trio.move_on_after(self.queue.retry_in_s()):
                            await self._wakeups.change()
                        continue
                except _RefusedError as refused:
                    self._hold_front(refused)
                except (OSError, Refused) as error:
                    await self._rest(error, errno_words(error.errno))
                except Exception as error:
                    self._limiter.exception(
                        "unforeseen",
                        "internal error in the drain: it will try again. This is a bug, please"
                        " report it",
                    )
                    await self._rest(error, repr(error))
                else:
                    if not self.queue.is_full:
                        self._trouble.end()

    async def _rest(self, error: Exception, words: str) -> None:
        what = _described(self.queue.front.op) if self.queue else "the journal's marks"
        waiting = len(self.queue) + len(self.queue.held)
        await self._trouble.rest(error, words, what=what, waiting=waiting)

    def _hold_front(self, refused: _RefusedError) -> None:
        """Make others before the change at the front, which the source refuses."""
        error = refused.error
        entry = self.queue.front
        if self.state.is_needless(entry.op, self._contents.is_removed):
            entry.is_moot = True
            self.state.give_up([entry.op])
            log.info(
                "the source refuses %s %r (%s), and it was removed on the mount since: given up",
                entry.op.kind,
                os.fsdecode(entry.op.path),
                errno_words(error.errno),
            )
            return
        self.queue.hold_front(error, is_full=refused.is_full)
        if refused.is_full:
            waiting = len(self.queue) + len(self.queue.held)
            self._trouble.note_full(error, what=_described(entry.op), waiting=waiting)
        elif not self.queue.is_full:
            self._trouble.answered()
        # Some callers may not have to wait for it.
        self._wakeups.wake_all()

    async def _advance(self) -> None:
        """Bring the queue forward by at least one change. Raises OSError, _RefusedError."""
        entry = self.queue.front
        if entry.op.kind == "content":
            try:
                await self._make_ready(entry)
            except TierCallError:
                raise
            except OSError as error:
                refusal = None if entry.is_staging else await self._refusal(entry.op, error)
                if refusal is None:
                    raise
                raise refusal from error
        batch = self._next_batch()
        if batch:
            await self._carry_out(batch)
        else:
            await self._marks.sync_done()

    async def _make_ready(self, entry: Entry) -> None:
        while entry.is_staging:
            await self._wakeups.change()
        op, number = entry.op, entry.op.object
        if op.same and self.state.is_present(number) and self.state.identity(number):
            entry.published = True
        elif op.same:
            is_lost = self._steps.expected_now(entry).was_there
            entry.op = with_rights_to_read(op, is_lost=is_lost)
        if entry.is_ready or self._order.is_left_out(entry):
            return
        if not await self._grower.grow(entry):
            await self._stager.stage(entry, in_turn=True)

    # -- a batch -----------------------------------------------------------------------------

    def _next_batch(self) -> list[tuple[Entry, Step | None]]:
        """The changes at the front that may be made in one turn, with the call, None if none is
        needed. None of them is about a path of another, or of one whose mark may be lost."""
        touched = PathSet()
        # Objects and inode numbers of the entries that are changed in this turn: later changes of
        # them depend on the result.
        changed: set[int] = set()
        changed_inos: set[int] = set()
        batch: list[tuple[Entry, Step | None]] = []
        made = 0
        for entry in self.queue.first(_MOST_LOOKED_AT):
            if made == _BATCH:
                break
            op = entry.op
            if self.queue.is_behind(entry):
                break
            if {op.object, op.over_object} & changed or {op.ino, op.over_ino} & changed_inos:
                break
            if (changed or changed_inos) and self.state.is_to_replace(op):
                # It has to find the replaced file, which may be a changed one, by another name.
                break
            if op.kind == "content" and (
                entry.is_staging or not (self._order.is_left_out(entry) or entry.is_ready)
            ):
                break
            step = self._steps.of(entry)
            if step is not None:
                if op.kind in ("content", "rename", "attr") and op.object:
                    changed.add(op.object)
                elif op.ino and not op.object:
                    changed_inos.add(op.ino)
                if op.kind == "rename" and op.over_ino and not op.over_object:
                    # A copy-up of the replaced file changes what is known of it.
                    changed_inos.add(op.over_ino)
                if touched.conflicts_with(op) or self._marks.unsynced.conflicts_with(op):
                    break
                touched.add(op)
                made += 1
            batch.append((entry, step))
        return batch

    async def _carry_out(self, batch: list[tuple[Entry, Step | None]]) -> None:
        """Makes a batch of changes and marks those made. Raises OSError, _RefusedError."""
        steps = [step for _, step in batch if step is not None]
        results: list[Identity | None] = []
        error: OSError | None = None
        if steps:
            await self._marks.sync(max(entry.record for entry, _ in batch))
            results, error = await self._threads.run(self.writer.carry_out, steps)
        made = iter(results)
        done: dict[int, Identity | None] = {}
        failed: Entry | None = None
        for entry, step in batch:
            try:
                done[entry.seq] = None if step is None else next(made)
            except StopIteration:
                failed = entry
                self._stager.forget(entry)
                break
        batch = batch[: len(done)]
        for entry, step in batch:
            is_whole = entry.published and not (entry.is_grown or entry.op.same)
            if done[entry.seq] is None and is_whole:
                # The bytes came to the source, and others have the name now: no mount brings them
                # again.
                done[entry.seq] = self.state.identity(entry.op.object)
            if done[entry.seq] is None and self._steps.lacks_its_file(entry, step):
                self._bring_back(entry)
        withheld: dict[int, int] = {}
        for entry, _ in batch:
            if (bits := self._steps.arrived(entry, done[entry.seq])) is not None:
                withheld[entry.seq] = bits
        if done:
            await self._mark(done, withheld, self._steps.removed_now())
            failpoints.failpoint("drain-marked")
        for entry, step in batch:
            self.queue.remove_front()
            self._arrived(entry, step is not None, done[entry.seq])
        self._wakeups.wake_all()
        if error is None:
            return
        if failed is not None and failed.op.kind == "content":
            failed.restaged += 1
            again = error.errno in (errno.EAGAIN, errno.ESTALE)
            if again and failed.restaged <= _RESTAGED:
                return
        refusal = None if failed is None else await self._refusal(failed.op, error)
        if refusal is None:
            raise error
        raise refusal from error

    async def _refusal(self, op: Op, error: OSError) -> _RefusedError | None:
        """The error as a refusal, if the source may accept other changes: so also if it has no
        space for this one, by a quota of a directory, although its file system has room, or if the
        change is in a read-only file system below the source. A full source may accept removals."""
        if error.errno == errno.ENOSPC:
            has_room = await self._threads.run(self.writer.has_room, op.size)
            return _RefusedError(error, is_full=not has_room)
        is_refusal = error.errno in _REFUSALS
        if error.errno == errno.EROFS:
            is_refusal = await self._threads.run(self.writer.is_read_only_there, op)
        return _RefusedError(error) if is_refusal else None

    def _bring_back(self, entry: Entry) -> None:
        """Record a content of a file that the source has lost, unless one waits. Raises OSError."""
        op, number = entry.op, entry.op.object
        self.state.note_version(number, None)
        if self._order.later(entry) is None:
            content = self._contents.whole(number)
            if content is None:
                # Its bytes are not here.
                return
            shown = content.mode or 0
            content = with_rights_to_read(replace(content, by=op.by), is_lost=True)
            self._contents.drop_bits(number, shown & ~(content.mode or 0))
            with of_tier():
                seq = self._journal.append(content, is_due=True)
            self.put(seq, content)
            self._contents.states.record(number, seq, synced=False)
        # A caller that waits for the change waits for the content.
        self._order.await_later(entry)

    async def _mark(
        self,
        done: dict[int, Identity | None],
        withheld: dict[int, int],
        removed: Collection[int],
    ) -> None:
        upto = max(done)
        if self.queue.held:
            upto = min(upto, self.queue.held[0].seq - 1)
        while True:
            try:
                self._marks.done(done, upto=upto, withheld=withheld, removed=removed)
            except OSError as error:
                # The changes are not made once more for that.
                await self._rest(error, errno_words(error.errno))
            else:
                break

    def _arrived(self, entry: Entry, was_made: bool, identity: Identity | None) -> None:
        """A change is done, and not in the queue any more."""
        op = entry.op
        if op.kind == "content":
            self.state.rebase(op, identity)
        self._order.settle(entry)
        self.progress.note_done(entry.seq)
        self._note_removal(op)
        if was_made:
            self._marks.unsynced.add(op)
        # A content that was given up leaves the source with what it has.
        is_given_up = entry.is_moot and op.kind == "content"
        known = self.state.expected(entry.seq, op).known if op.file else None
        before = self.state.identity(op.object)
        if not (is_given_up or (entry.published and identity is None)):
            self.state.note(op, identity)
        if op.file:
            dropped = self.writer.log.dropped_xattrs
            attributes = self._contents.attributes
            attributes.drained(entry.seq, op, known, identity, dropped=dropped)
        self.state.entries.left(op)
        staged, place = entry.staged, entry.place
        self._stager.forget(entry)
        if identity is None:
            return
        if op.kind != "content":
            if (known := self.state.identity(op.object)) is not None:
                self._contents.states.changed(op.object, known)
            return
        if staged is not None:
            self.state.note_version(op.object, staged)
            self._drained_files += 1
            self._drained_bytes += staged.size
        self._contents.states.published(op.object, _as_shown(before, place, identity))


def _as_shown(known: Identity | None, place: Place | None, now: Identity) -> Identity:
    """The version that the mount shows of a file when the source has its last content as ``now``.
    A content that replaces an older version has the mode that others have given that one."""
    if place is None or place.kind != "over" or place.target is None:
        return now
    return with_known_time(known, place.target, now)


def _described(op: Op) -> str:
    return f"{op.kind} {os.fsdecode(op.path)!r}"
