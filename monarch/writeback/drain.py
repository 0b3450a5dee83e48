"""The drain: brings what was absorbed to the source, in the order in which it was done.

Changes are made one after the other from the front of the queue, a few in one turn of a thread.
Contents, which take long, are staged ahead of their turn, several at once, and published in it. A
change is marked as done when the source has it for good; one that is about the same paths as
another whose mark could still be lost waits for that mark (touched.py).

A call that the source leaves without an answer is waited for as long as it takes: one that was
given up could still be carried out, behind what came after it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar

import trio

from monarch import points
from monarch.log import Limiter
from monarch.text import errno_words
from monarch.threads import Threads
from monarch.transfer.throttle import TokenBucket
from monarch.types import Identity
from monarch.units import MiB
from monarch.writeback.home import Folders, Home, Outcome, Step
from monarch.writeback.journal import Journal, Replay
from monarch.writeback.objects import Objects
from monarch.writeback.ops import Op, above
from monarch.writeback.staging import Staged, Staging
from monarch.writeback.touched import Touched

log = logging.getLogger(__name__)

T = TypeVar("T")
Paths = tuple[bytes, ...]

# Who writes many files is let be for so long after each. Seconds.
_QUIET_S = 0.3
_HOLD_STEP_S = 0.05
# What one turn in a worker thread moves.
_TURN_BYTES = 4 * MiB
# Changes made in one turn: the hop costs as much as a change of a fast source.
_BATCH = 32
# How far ahead contents are staged: in the queue, and how many at the source, where they take room.
_WINDOW = 256
_MOST_STAGED = 64
# After a failure all rests: doubling from the first to the second. Seconds.
_BACKOFF_S = (1.0, 60.0)
# The longest pause while somebody waits for what is behind it. Seconds.
_WAITED_S = 5.0
# A content of a file that somebody writes is looked at so often, so far apart, before it is left to
# the one that his close will record. Seconds.
_LOOKS = 4
_LOOK_S = 0.5
# Two writes within a tick of the kernel's clock leave the same time of modification. Seconds.
_TICK_S = 0.02
# How long a turn waits for readers of the source to pause before it takes its share. Seconds.
_COURTESY_S = 1.0
_STEP_S = 0.005
# A call that lasts longer is trouble. Seconds.
_HANGS_S = 30.0


class Contents(Protocol):
    """What the drain asks the file system of absorbed files. Called on the event loop."""

    def is_dead(self, object: int) -> bool:
        """Whether it has no name any more."""
        ...

    def is_written(self, object: int) -> bool:
        """Whether somebody has it open for writing."""
        ...

    def left_out(self, object: int) -> None:
        """A content of it was left out, since somebody writes: his close must record another,
        whether or not he writes any more."""
        ...

    def published(self, object: int, path: bytes, identity: Identity) -> None:
        """The source has its bytes as they were recorded; ``path`` is its first name there."""
        ...


@dataclass(frozen=True, slots=True)
class Backlog:
    """What the source has not got yet, and what it has got since the start.

    ``ops`` counts all changes, ``files`` those that have contents among them, ``bytes`` theirs.
    ``oldest_ns``: when the oldest was recorded, 0 if there is none. ``failures`` counts tries in
    vain, ``trouble`` says what is wrong now. ``lost``: paths of files whose bytes the
    tier has lost. ``moving_bytes`` of the files being moved now have reached the source.
    """

    ops: int
    files: int
    bytes: int
    oldest_ns: int
    drained_files: int
    drained_bytes: int
    failures: int
    trouble: str | None
    lost: Paths
    moving_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """A change that waits. ``record``: which of the journal's is its own. The rest is of
    contents.

    ``was_tried``: something of it may be staged. ``is_staging``: somebody is at it; ``is_left``:
    it was tried ahead of its turn, in vain. Ready are those that are ``staged``, those that are
    ``published``: the source has these bytes already, and those that are ``skipped``.
    """

    seq: int
    op: Op
    recorded_ns: int
    record: int
    was_tried: bool
    is_staging: bool = False
    is_left: bool = False
    staged: Staged | None = None
    published: bool = False
    skipped: bool = False

    @property
    def is_ready(self) -> bool:
        return self.staged is not None or self.published or self.skipped


class _Missing(Exception):
    """The object has not got the bytes that were recorded."""


class _Written(Exception):
    """Somebody writes the object, and it is not as it was recorded."""


class Drain:
    """``load`` what the journal held, ``put`` what is appended to it, and ``run``.

    ``bandwidth`` in bytes a second, 0 for no limit. ``workers`` contents are staged at once; with
    ``verify`` each is read back. ``busy``: whether somebody reads the source at that time of the
    loop's clock, who then goes first unless ``demand`` says that the backlog must shrink.
    While changes come one after the other they wait, up to ``hold_s``: the disk that they go to is
    the one that the drain would keep busy. ``threads`` is where calls wait that may hang; it
    abandons those of a caller who is cancelled.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        objects: Objects,
        home: Home,
        contents: Contents,
        threads: Threads,
        bandwidth: int,
        verify: bool,
        workers: int,
        busy: Callable[[float], bool],
        demand: Callable[[], bool],
        hold_s: float = 0.0,
    ) -> None:
        self._hold_s = hold_s
        # Of all contents that wait, also of several of one file.
        self.waiting_bytes = 0
        self._last_put_s = -math.inf
        self._journal = journal
        self._objects = objects
        self._home = home
        self._contents = contents
        self._threads = threads
        self._verify = verify
        self._workers = workers
        self._busy = busy
        self._demand = demand
        self._bucket = TokenBucket(bandwidth, 2 * _TURN_BYTES)
        self._queue: deque[_Entry] = deque()
        # Objects of which the source has a file under the names that they have by then; those that
        # a content of theirs was left out of are not among them.
        self._present: set[int] = set()
        # What of an object was published last, and as what.
        self._published: dict[int, tuple[Identity, Identity]] = {}
        self._lost: dict[int, bytes] = {}
        self._moving: list[Staging] = []
        # Objects whose bytes are at the source: what was recorded of them before comes with those.
        self._through: set[int] = set()
        # Paths at the source whose marks may be lost, and which record is the last of these.
        self._touched = Touched()
        self._last_mark = 0
        self._done_upto = 0
        self._waiters = 0
        self._changed = trio.lowlevel.ParkingLot()
        self._hurry = trio.Event()
        self._pause_s = _BACKOFF_S[0]
        self._trouble: str | None = None
        self._staged = 0
        self._drained_files = self._drained_bytes = self._failures = 0
        self._limiter = Limiter(60.0)

    # -- what others see ---------------------------------------------------------------------

    def load(self, replay: Replay) -> None:
        """Go on where an earlier life has stopped. Before all else."""
        for seq, op in replay.ops:
            if op.kind == "through":
                self._through.add(op.object)
            if seq in replay.done:
                self._note(op, replay.done[seq])
                self._done_upto = seq
            else:
                self._queue.append(_Entry(seq, op, replay.recorded_ns[seq], 0, was_tried=True))
                self.waiting_bytes += op.size

    def put(self, seq: int, op: Op) -> None:
        """A change that was appended to the journal. Never waits."""
        record = self._journal.written
        if self._hold_s:
            self._last_put_s = trio.current_time()
        self._queue.append(_Entry(seq, op, time.time_ns(), record, was_tried=False))
        self.waiting_bytes += op.size
        if op.kind == "content" or len(self._queue) == 1:
            self._changed.unpark_all()

    def is_done(self, seq: int) -> bool:
        """Whether the source has all up to ``seq`` for good."""
        return seq <= self._done_upto

    async def wait(self, seq: int) -> None:
        """Until the source has all up to ``seq``; a pause after a failure ends now."""
        self._waiters += 1
        try:
            self._hurry.set()
            while not self.is_done(seq):
                await self._changed.park()
        finally:
            self._waiters -= 1

    async def settle(self) -> None:
        """Until the source has all that was put by now."""
        await self.wait(self.last_seq)

    @property
    def last_seq(self) -> int:
        """Of the last change that was put and is not at the source; 0 if it has all."""
        return self._queue[-1].seq if self._queue else 0

    def backlog(self) -> Backlog:
        sizes = {
            entry.op.object: entry.op.size for entry in self._queue if entry.op.kind == "content"
        }
        return Backlog(
            ops=len(self._queue),
            files=len(sizes),
            bytes=sum(sizes.values()),
            oldest_ns=self._queue[0].recorded_ns if self._queue else 0,
            drained_files=self._drained_files,
            drained_bytes=self._drained_bytes,
            failures=self._failures,
            trouble=self._trouble or self._hanging(),
            lost=tuple(self._lost.values()),
            moving_bytes=sum(staging.moved for staging in self._moving),
        )

    def _hanging(self) -> str | None:
        oldest_s = self._threads.oldest_s()
        return f"no answer for {oldest_s:.0f} s" if oldest_s > _HANGS_S else None

    # -- the front of the queue --------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled. What is under way then is found and done again by another life."""
        async with trio.open_nursery() as nursery:
            for _ in range(self._workers):
                nursery.start_soon(self._stage_ahead)
            while True:
                try:
                    if self._queue and self._is_held():
                        await trio.sleep(_HOLD_STEP_S)
                        self._changed.unpark_all()
                        continue
                    if self._queue:
                        await self._advance()
                    elif self._touched:
                        await self._sync_marks()
                    else:
                        await self._changed.park()
                        continue
                except OSError as error:
                    await self._rest(error, errno_words(error.errno))
                except Exception as error:
                    self._limiter.exception(
                        log,
                        "unforeseen",
                        "internal error in the drain: it will try again. This is a bug, please"
                        " report it",
                    )
                    await self._rest(error, repr(error))
                else:
                    if self._trouble is not None:
                        log.info("the drain to the source goes on")
                        self._trouble = None
                        self._changed.unpark_all()
                    self._pause_s = _BACKOFF_S[0]

    def _is_held(self) -> bool:
        """Whether somebody is writing one file after the other, and nobody waits for the source.

        Who has synced a file wants it to be safe: that is not held.
        """
        if not self._hold_s or self._waiters:
            return False
        if trio.current_time() - self._last_put_s > _QUIET_S:
            return False
        age_s = (time.time_ns() - self._queue[0].recorded_ns) / 1e9
        if not 0 <= age_s < self._hold_s or self._demand():
            return False
        return not any(entry.op.synced for entry in islice(self._queue, _WINDOW))

    async def _rest(self, error: Exception, words: str) -> None:
        what = "the journal's marks"
        if self._queue:
            op = self._queue[0].op
            what = f"{op.kind} {os.fsdecode(op.path)!r}"
        self._failures += 1
        self._trouble = f"{what}: {words}"
        self._limiter.warning(
            log,
            f"drain {type(error).__name__} {words}",
            "draining to the source has stopped and will be tried again; %d changes are kept in the"
            " tier: %s: %s",
            len(self._queue),
            what,
            words,
        )
        self._hurry = trio.Event()
        pause_s = min(self._pause_s, _WAITED_S) if self._waiters else self._pause_s
        with trio.move_on_after(pause_s):
            await self._hurry.wait()
        self._pause_s = min(2 * self._pause_s, _BACKOFF_S[1])

    async def _advance(self) -> None:
        """Bring the queue forward by at least one change. Raises OSError."""
        entry = self._queue[0]
        if entry.op.kind == "content":
            await self._make_ready(entry)
        batch, steps = self._next_batch()
        if not batch:
            await self._sync_marks()
            return
        await self._carry_out(batch, steps)

    async def _make_ready(self, entry: _Entry) -> None:
        while entry.is_staging:
            await self._changed.park()
        if not entry.is_ready and not self._is_skipped(entry):
            await self._stage(entry, in_turn=True)

    def _next_batch(self) -> tuple[list[_Entry], list[Step | None]]:
        """The changes at the front that may be made in one turn, and how; None: nothing is to be.

        None of them is about a path of another, or of one whose mark may be lost.
        """
        touched = Touched()
        # What is to be done with a file of which a content comes in this turn is known after it.
        moved: set[int] = set()
        batch: list[_Entry] = []
        steps: list[Step | None] = []
        for entry in islice(self._queue, _BATCH):
            op = entry.op
            if op.kind == "content" and (
                entry.is_staging or not (self._is_skipped(entry) or entry.is_ready)
            ):
                break
            if op.object and op.object in moved:
                break
            step = self._step(entry)
            if step is not None:
                if op.kind == "content":
                    moved.add(op.object)
                if touched.meets(op) or self._touched.meets(op):
                    break
                touched.add(op)
            batch.append(entry)
            steps.append(step)
        return batch, steps

    def _is_skipped(self, entry: _Entry) -> bool:
        """Whether a content is left out: nobody has the file any more, or it will come again."""
        op = entry.op
        entry.skipped = (
            entry.skipped
            or op.object in self._lost
            or (op.object in self._through and not op.through)
            or self._contents.is_dead(op.object)
        )
        return entry.skipped

    def _step(self, entry: _Entry) -> Step | None:
        """How a change is made at the source, by what there is of its file."""
        op, home = entry.op, self._home
        absent = bool(op.object) and op.object not in self._present
        match op.kind:
            case "create" | "take" | "through" | "gone":
                self._note(op, None)
                return None
            case "content" if entry.skipped:
                is_ours = entry.was_tried and not op.through
                return partial(_none, home.discard, op) if is_ours else None
            case "content" if entry.staged is not None:
                return partial(home.publish, op=_as_staged(op, entry.staged), staged=entry.staged)
            case "content":
                _, identity = self._published[op.object]
                return partial(home.renew, op=op, known=identity)
            case "mkdir":
                return partial(_none, home.mkdir, op)
            case "symlink":
                return partial(_none, home.symlink, op)
            case "mknod":
                return partial(_none, home.mknod, op)
            case "unlink":
                return partial(_none, home.unlink, op.path)
            case "rmdir":
                return partial(_none, home.rmdir, op.path)
            case "rename" if absent:
                # What is in its new place stays until the content comes, which brings its name.
                return None if op.object in self._lost else partial(_none, home.unlink, op.path)
            case "rename":
                return partial(_none, home.rename, op)
            case "link":
                return None if absent else partial(_none, home.link, op)
            case "attr" | "xattr":
                return None if absent else partial(_none, home.attr, op)

    async def _carry_out(self, batch: list[_Entry], steps: list[Step | None]) -> None:
        """Make a batch of changes and mark those that were made. Raises OSError of another."""
        real = [step for step in steps if step is not None]
        outcome = Outcome((), None)
        if real:
            await self._sync(max(entry.record for entry in batch))
            outcome = await self._threads.run(self._home.carry_out, real)
        made = iter(outcome.made)
        done: dict[int, Identity | None] = {}
        for entry, step in zip(batch, steps, strict=True):
            if step is None:
                done[entry.seq] = None
                continue
            try:
                done[entry.seq] = next(made)
            except StopIteration:
                self._unstage(entry)
                break
        if done:
            await self._mark(done)
            points.reached("drain-marked")
        for entry, step in zip(batch[: len(done)], steps, strict=False):
            self._queue.popleft()
            self.waiting_bytes -= entry.op.size
            self._arrived(entry, step is not None, done[entry.seq])
        self._changed.unpark_all()
        if outcome.error is not None:
            raise outcome.error

    async def _mark(self, done: dict[int, Identity | None]) -> None:
        while True:
            try:
                self._journal.mark_done(done)
            except OSError as error:
                # They are not made once more for that.
                await self._rest(error, errno_words(error.errno))
            else:
                break
        self._last_mark = self._journal.written

    async def _sync(self, record: int) -> None:
        """Until the journal is on the disk up to that record.

        Nothing is done at the source of which a power cut could take the record: the mount would
        show what the source has not got any more.
        """
        if self._journal.synced < record:
            await self._threads.run(self._journal.sync)

    async def _sync_marks(self) -> None:
        await self._sync(self._last_mark)
        self._touched.clear()

    def _arrived(self, entry: _Entry, was_made: bool, identity: Identity | None) -> None:
        op = entry.op
        self._done_upto = entry.seq
        if was_made:
            self._touched.add(op)
        self._note(op, identity)
        if identity is None:
            self._unstage(entry)
            return
        version, _ = self._published.get(op.object, (None, None))
        if entry.staged is not None:
            version = entry.staged.version
            self._drained_files += 1
            self._drained_bytes += entry.staged.size
            self._unstage(entry)
        if version is not None:
            self._published[op.object] = (version, identity)
        self._contents.published(op.object, op.path, identity)

    def _note(self, op: Op, identity: Identity | None) -> None:
        """What the source has of an object after a change of it."""
        if op.kind == "take" or identity is not None:
            self._present.add(op.object)
        elif op.kind in ("create", "content", "gone"):
            self._present.discard(op.object)
            self._published.pop(op.object, None)

    def _unstage(self, entry: _Entry) -> None:
        if entry.staged is not None:
            self._staged -= 1
        entry.staged = None
        entry.published = False

    # -- contents ----------------------------------------------------------------------------

    async def _stage_ahead(self) -> None:
        while True:
            entry = self._next_to_stage()
            if entry is None:
                await self._changed.park()
            else:
                await self._stage(entry, in_turn=False)

    def _next_to_stage(self) -> _Entry | None:
        """The first content that may be staged before it is its turn: no earlier one of the same
        object waits, and the directory that it comes into is the one that is there now."""
        if self._trouble is not None or self._staged >= _MOST_STAGED:
            return None
        if self._queue and self._is_held():
            return None
        objects: set[int] = set()
        changing: set[bytes] = set()
        for entry in islice(self._queue, _WINDOW):
            op = entry.op
            if op.kind == "content":
                is_idle = not (entry.is_staging or entry.is_left or entry.is_ready)
                if (
                    is_idle
                    and op.object not in objects
                    and changing.isdisjoint(above(op.path))
                    and not self._is_skipped(entry)
                ):
                    return entry
                objects.add(op.object)
            elif op.kind in ("mkdir", "rmdir", "rename", "symlink"):
                changing.update(op.names())
        return None

    async def _stage(self, entry: _Entry, *, in_turn: bool) -> None:
        """Make a content ready. Ahead of its turn a failure is nothing: it is tried again in it.

        Raises OSError.
        """
        entry.is_staging = entry.was_tried = True
        try:
            entry.staged = await self._staged_content(entry, in_turn)
            self._staged += entry.staged is not None
        except _Missing as error:
            if in_turn:
                self._lose(entry, str(error))
        except _Written:
            if in_turn:
                entry.skipped = True
                self._contents.left_out(entry.op.object)
        except Exception:
            if in_turn:
                raise
        finally:
            entry.is_left = not in_turn
            entry.is_staging = False
            self._changed.unpark_all()

    def _lose(self, entry: _Entry, why: str) -> None:
        op = entry.op
        if self._is_skipped(entry):
            return
        self._lost[op.object] = op.path
        entry.skipped = True
        try:
            self._journal.mark_lost(op.object)
        except OSError as error:
            log.warning("the journal does not take that: %s", errno_words(error.errno))
        log.error(
            "%r is lost: the tier has not got the %d bytes that were written to it: %s; the source"
            " keeps what it has of that name",
            os.fsdecode(op.path),
            op.size,
            why,
        )

    async def _staged_content(self, entry: _Entry, in_turn: bool) -> Staged | None:
        """Stage a content; None if the source has these bytes already.

        Raises OSError, _Missing, _Written.
        """
        op, looks = entry.op, 0
        if op.through:
            return await self._there_already(entry)
        while True:
            staging = Staging(
                self._objects,
                op.object,
                open_part=partial(self._home.open_part, op.path, op.object, make=in_turn),
            )
            try:
                staged = await self._copied(entry, staging)
            finally:
                self._threads.start(staging.close)
            if staged is not None or entry.published:
                return staged
            looks += 1
            if not in_turn or looks > _LOOKS:
                raise _Written
            await trio.sleep(_LOOK_S)

    async def _there_already(self, entry: _Entry) -> Staged | None:
        """A content that was written at the source, as ``_staged_content``."""
        op = entry.op
        if self._contents.is_written(op.object):
            # It would get its name before it is whole.
            raise _Written
        try:
            size, identity = await self._threads.run(self._home.finish_part, op)
        except FileNotFoundError as error:
            raise _Missing("others have removed it at the source") from error
        version = Identity(size, op.mtime_ns or 0, 0, 0)
        if identity is None:
            return Staged(size, version)
        self._published[op.object] = (version, identity)
        entry.published = True
        return None

    async def _copied(self, entry: _Entry, staging: Staging) -> Staged | None:
        """One attempt; None if somebody was writing. Sets ``published`` instead if that is so."""
        op = entry.op
        written = self._contents.is_written(op.object)
        try:
            # What may still be stored into mapped pages shows only after a sync.
            version = await self._threads.run(partial(staging.open, sync=written or not op.synced))
        except FileNotFoundError as error:
            raise _Missing("there is no such object") from error
        is_recorded = (version.size, version.mtime_ns) == (op.size, op.mtime_ns)
        if written:
            if not is_recorded:
                return None
            if abs(time.time_ns() - version.mtime_ns) < _TICK_S * 1e9:
                await trio.sleep(_TICK_S)
                if await self._threads.run(staging.version) != version:
                    return None
        elif self._is_short(entry, version):
            raise _Missing(f"the object has {version.size}")
        known, _ = self._published.get(op.object, (None, None))
        if known == version:
            entry.published = True
            return None
        if not op.synced:
            # It is on the disk now. Without that a power cut would take here what is there.
            self._journal.mark_believed(op.object)
            entry.record = self._journal.written
        await self._sync(entry.record)
        staged = Staged(version.size, version)
        dress = partial(self._home.dress, op=_as_staged(op, staged))
        await self._move(staging, version.size, dress)
        if await self._threads.run(staging.version) != version:
            return None
        # Whoever has come since then, and is still there, has not left it half written.
        if not is_recorded and self._contents.is_written(op.object):
            return None
        return staged

    def _is_short(self, entry: _Entry, version: Identity) -> bool:
        """Whether an object has lost bytes that were synced, and was not made shorter since."""
        op = entry.op
        return (
            op.synced
            and version.size < op.size
            and (op.mtime_ns is None or version.mtime_ns <= op.mtime_ns)
            and not any(
                later.op.object == op.object and later.op.kind in ("content", "attr")
                for later in self._queue
                if later.seq > entry.seq
            )
        )

    async def _move(self, staging: Staging, size: int, dress: Callable[[int], None]) -> None:
        """Bring the bytes to the source, in turns; readers of the source go first."""
        self._moving.append(staging)
        try:
            await self._move_in_turns(staging, size, dress)
        finally:
            self._moving.remove(staging)

    async def _move_in_turns(
        self, staging: Staging, size: int, dress: Callable[[int], None]
    ) -> None:
        await self._courtesy(min(size, _TURN_BYTES))
        if size <= _TURN_BYTES:
            await self._threads.run(_move_at_once, staging, dress, self._verify)
            return
        await self._threads.run(staging.begin)
        while await self._threads.run(staging.turn, _TURN_BYTES):
            await self._courtesy(_TURN_BYTES)
        await self._threads.run(staging.finish, dress)
        if self._verify:
            while await self._threads.run(staging.verify, _TURN_BYTES):
                await self._courtesy(0)

    async def _courtesy(self, count: int) -> None:
        await trio.sleep(self._bucket.take(count, trio.current_time()))
        patience = trio.current_time() + _COURTESY_S
        while (
            self._busy(trio.current_time())
            and not (self._waiters or self._demand())
            and trio.current_time() < patience
        ):
            await trio.sleep(_STEP_S)


def _none(change: Callable[[Folders, T], None], what: T, folders: Folders) -> None:
    """A step that has no identity to tell."""
    change(folders, what)


def _as_staged(op: Op, staged: Staged) -> Op:
    """What the source is to be told of a file whose bytes may be newer than the record."""
    version = staged.version
    is_recorded = (version.size, version.mtime_ns) == (op.size, op.mtime_ns)
    return op if is_recorded else replace(op, mtime_ns=version.mtime_ns)


def _move_at_once(staging: Staging, dress: Callable[[int], None], verify: bool) -> None:
    staging.begin()
    while staging.turn(_TURN_BYTES):
        pass
    staging.finish(dress)
    while verify and staging.verify(_TURN_BYTES):
        pass
