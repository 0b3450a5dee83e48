"""The drain: brings what was absorbed to the source, in the order in which it was done.

A change that the source refuses, of this path or to this user, is *held*, with all that depends on
it: what is about its path or its file, and all later changes of the same user. The changes of
others go on. What is held is tried again, in its order, after a pause.

Changes are made one after the other from the front of the queue, a few in one turn of a thread.
Contents, which take long, are staged ahead of their turn, several at once, and published in it. A
change is marked as done when the source has it for good; one that is about the same paths as
another whose mark could still be lost waits for that mark (conflicts.py).

A call that the source leaves without an answer is waited for as long as it takes: one that was
given up could still be carried out, behind what came after it.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from heapq import merge
from itertools import islice
from typing import Protocol, TypeVar

import trio

from monarch.errors import Refused
from monarch.posix import failpoints
from monarch.posix.credentials import USER_BITS, Credentials
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.text import errno_words
from monarch.transfer.throttle import TokenBucket
from monarch.types import ANY_SIZE, Identity
from monarch.units import KiB, MiB
from monarch.writeback.conflicts import PathSet, PendingNames
from monarch.writeback.growth import Growth, OthersWroteError
from monarch.writeback.journal import Journal, Known, Replay
from monarch.writeback.lots import begin_all, close_all, move_all, open_all
from monarch.writeback.objects import Objects
from monarch.writeback.op import Op, above
from monarch.writeback.source_writer import (
    Conflict,
    Expected,
    OpenDirectories,
    Outcome,
    Place,
    SourceWriter,
    Step,
    is_shared,
    is_time,
    shared,
)
from monarch.writeback.staging import Staged, Staging

log = logging.getLogger(__name__)

T = TypeVar("T")
Paths = tuple[bytes, ...]

# Who writes many files is let be for so long after each. Seconds.
_QUIET_S = 0.3
_HOLD_STEP_S = 0.05
# What one turn in a worker thread moves.
_TURN_BYTES = 4 * MiB
# Changes made in one turn: the hop costs as much as a change of a fast source.
_BATCH = 64
# How far ahead contents are staged: in the queue, and how many at the source, where they take room.
_WINDOW = 512
_MOST_STAGED = 128
# Contents up to so many bytes go in lots, so many in one.
_SMALL_BYTES = 256 * KiB
_LOT = 32
# After a failure all rests: doubling from the first to the second. Seconds.
_BACKOFF_S = (1.0, 60.0)
# A change that was refused so often, for so long, is set aside: what depends on its path or file
# waits with it, and the other changes of its user go on. Seconds.
_TRIES = 8
_ASIDE_S = 600.0
# By these a source says that it has no symbolic links: it will not take one, however often.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
# The longest pause while a caller waits for a change behind it. Seconds.
_WAITED_S = 5.0
# A content of a file that is being written is looked at so often, so far apart, before it is left
# to the one that the writer's close will record. Seconds.
_LOOKS = 4
_LOOK_S = 0.5
# A file that is appended to and synced again and again comes with the last of what waits of it, but
# is put off for no longer than this. Seconds.
_PUT_OFF_S = 10.0
# Two writes within a tick of the kernel's clock leave the same time of modification. Seconds.
_TICK_S = 0.02
# How long a turn waits for readers of the source to pause before it takes its share. Seconds.
_COURTESY_S = 1.0
_STEP_S = 0.005
# What a source answers to one change, and not to all.
_REFUSALS = frozenset(
    {errno.EPERM, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY}
    | {errno.ENOSYS}
    | {errno.ELOOP, errno.EINVAL, errno.EILSEQ, errno.ENAMETOOLONG, errno.EFBIG, errno.EDQUOT}
    | {errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.EOVERFLOW, errno.E2BIG, errno.ETXTBSY}
)
# So often the source may change what is to be replaced while a content is brought, at once.
_RESTAGED = 3
_SET_ID = stat.S_ISUID | stat.S_ISGID
_SOME = Identity(0, 0, 0, 0)
# A call that lasts longer is trouble. Seconds.
_HANGS_S = 30.0


class Contents(Protocol):
    """What the drain asks the file system of absorbed files. Called on the event loop."""

    def is_dead(self, object: int) -> bool:
        """Whether it has no name any more."""
        ...

    def is_removed(self, ino: int) -> bool:
        """Whether an inode that was made or changed on the mount has no name there any more."""
        ...

    def is_written(self, object: int) -> bool:
        """Whether somebody has it open for writing."""
        ...

    def lowest(self, object: int) -> int:
        """The lowest offset at which bytes were changed since the last content was recorded; more
        than any size if none were."""
        ...

    def left_out(self, object: int) -> None:
        """A content was skipped because the file is being written.

        The writer's next close must record a new content, even if nothing more is written.
        """
        ...

    def published(self, object: int, path: bytes, identity: Identity) -> None:
        """The source has its bytes as they were recorded; ``path`` is its first name there."""
        ...

    def changed(self, object: int, identity: Identity) -> None:
        """The source's file of an object is known as that now, with the bytes that it had."""
        ...

    def whole(self, object: int) -> Op | None:
        """A content of the file as it is now, for a source that has lost it; None if it has no name
        any more, or its bytes are not here."""
        ...

    def recorded(self, object: int, seq: int) -> None:
        """That was recorded."""
        ...


@dataclass(frozen=True, slots=True)
class Backlog:
    """What the source has not got yet, and what it has got since the start.

    ``ops`` counts all changes, ``files`` those that have contents among them, ``bytes`` theirs.
    ``oldest_ns``: when the oldest was recorded, 0 if there is none. ``failures`` counts tries in
    vain, ``trouble`` says what is wrong now. ``lost``: paths of files whose bytes the
    tier has lost. ``moving_bytes`` of the files being moved now have reached the source.
    ``conflicts`` counts what others had changed at the source, ``conflict`` is the last of them:
    its path, where the bytes are kept, and why. ``aside`` are changes that are set aside, and
    ``aside_ops`` counts these and what waits with them; ``only_aside``: ``trouble`` is one of them.
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
    conflicts: int = 0
    conflict: Conflict | None = None
    aside: tuple[Refusal, ...] = ()
    aside_ops: int = 0
    only_aside: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A change that the source refuses: a ``kind`` of change of ``path``, and ``why``.

    ``is_aside``: the other changes of its user go on.
    """

    seq: int
    kind: str
    path: bytes
    why: str
    tries: int
    is_aside: bool


@dataclass(slots=True, eq=False)
class _Entry:
    """A change that waits. ``record``: which of the journal's is its own. The rest is of
    contents.

    ``was_tried``: something of it may be staged. ``is_staging``: somebody is at it; ``is_left``:
    it was tried ahead of its turn, in vain. Ready are those that are ``staged``, those that are
    ``published``: the source has these bytes already, and those that are ``skipped``. ``place``:
    where what is staged goes. Of those that are held, ``refusal`` is why, empty for one that only
    depends on another, and ``answer`` the errno; ``tries``: how often it was refused, since
    ``refused_s``. ``is_aside``: later changes of its user do not wait for it any more. ``is_moot``:
    it was refused, and is not needed any more, or was given up.
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
    place: Place | None = None
    restaged: int = 0
    is_held: bool = False
    refusal: str = ""
    why: str = ""
    answer: int = errno.EIO
    is_moot: bool = False
    tries: int = 0
    refused_s: float = math.inf
    is_aside: bool = False
    is_grown: bool = False

    @property
    def is_ready(self) -> bool:
        return self.staged is not None or self.published or self.skipped


class _Missing(Exception):
    """The object has not got the bytes that were recorded."""


class _Written(Exception):
    """Somebody writes the object, and it is not as it was recorded."""


class _Refused(Exception):
    """The source does not take one change."""

    def __init__(self, entry: _Entry, error: OSError) -> None:
        super().__init__(str(error))
        self.entry = entry
        self.error = error


class _What:
    """The files and paths that some changes are about."""

    def __init__(self) -> None:
        self._objects: set[int] = set()
        self._paths = PathSet()
        self._folders: set[bytes] = set()

    def add(self, op: Op) -> None:
        # What a rename replaces is to be known until that is done.
        self._objects |= {op.object, op.over_object} - {0}
        if op.names() != (b"",):
            self._paths.add(op)
        if op.kind == "mkdir":
            self._folders.add(op.path)

    def meets(self, op: Op) -> bool:
        """Whether a change is about one of them, above and beneath included."""
        if {op.object, op.over_object} & self._objects:
            return True
        if op.names() == (b"",):
            return False
        return self._paths.conflicts_with(op) or any(
            directory in self._folders for path in op.names() for directory in above(path)
        )


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
        writer: SourceWriter,
        contents: Contents,
        threads: ThreadPool,
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
        self._writer = writer
        self._contents = contents
        self._threads = threads
        self._verify = verify
        self._workers = workers
        self._busy = busy
        self._demand = demand
        self._bucket = TokenBucket(bandwidth, 2 * _TURN_BYTES)
        self._queue: deque[_Entry] = deque()
        self.pending = PendingNames()
        # Objects of which the source has a file under the names that they have by then; those that
        # a content of theirs was left out of are not among them.
        self._present: set[int] = set()
        # What waits of each object, by number: contents and renames.
        self._coming: dict[int, dict[int, Op]] = {}
        # Contents whose bytes come with a later one: by object, all, and since when it is put off.
        self._gave_way: dict[int, list[int]] = {}
        self._unmet: set[int] = set()
        self._put_off_s: dict[int, float] = {}
        # So many first bytes of an object are those of its file at the source but for what contents
        # that were left out have changed; of these the lowest ``intact``.
        self._base: dict[int, int] = {}
        self._intact: dict[int, int] = {}
        # How long a content of it was that may have been brought in place and is not known to be.
        self._longest: dict[int, int] = {}
        # What of an object was published last, and as what.
        self._published: dict[int, tuple[Identity, Identity]] = {}
        # What the source is known to have of an object's file, and, of what was made on the mount
        # and has no object, by its number there.
        self._known: dict[int, Identity] = {}
        # Objects of files of the source whose "take" is still in the queue.
        self._to_take: set[int] = set()
        self._made: dict[int, Identity] = {}
        # What was made on the mount and is given up, or is at the source under another name only:
        # nothing more of it goes to the source. Objects that were given up.
        self._given_up: set[int] = set()
        self._discarded: set[int] = set()
        # Objects of files that were made on the mount, and what renames on the mount have replaced
        # by one of them.
        self._new: set[int] = set()
        self._over: dict[int, tuple[Identity, ...]] = {}
        self._ours: dict[int, frozenset[Identity]] = {}
        # Times of modification that an earlier life may have set without marking it, by object.
        self._set_times: dict[int, frozenset[int]] = {}
        # What the source refuses and what depends on it, in order; users, paths and objects of it.
        self._held: list[_Entry] = []
        self._held_users: set[int | None] = set()
        self._held_what = _What()
        # Of those among them that are set aside.
        self._aside_what = _What()
        self._retry_s = math.inf
        self._retry_pause_s = _BACKOFF_S[0]
        # How often all of it was tried anew.
        self._retries = 0
        # Those of which the journal says that they are set aside.
        self._aside: set[int] = set()
        # Those that the source has though it has not got one before them.
        self._done_beyond: set[int] = set()
        self._lost: dict[int, bytes] = {}
        self._moving: list[Staging] = []
        # Objects whose bytes are at the source: what was recorded of them before comes with those.
        self._through: set[int] = set()
        # Paths at the source whose marks may be lost, and which record is the last of these.
        self._touched = PathSet()
        self._last_mark = 0
        self._done_upto = 0
        self._waiters = 0
        self._changed = trio.lowlevel.ParkingLot()
        # Workers that have found nothing to stage.
        self._stagers = trio.lowlevel.ParkingLot()
        # The last content that came synced.
        self._last_synced = 0
        self._hurry = trio.Event()
        self._pause_s = _BACKOFF_S[0]
        self._trouble: str | None = None
        # How often all had to rest, and for which error the last time.
        self._stops = 0
        self._stopped_by = errno.EIO
        self._staged = 0
        self._drained_files = self._drained_bytes = self._failures = 0
        self._limiter = Limiter(60.0)

    # -- what others see ---------------------------------------------------------------------

    def load(self, replay: Replay) -> None:
        """Go on where an earlier life has stopped. Before all else."""
        # What a rename that is done has replaced may have been one of these.
        self._ours = dict(replay.staged)
        if replay.known is not None:
            self._begin_with(replay.known)
        else:
            # A journal that an older version wrote anew tells of nothing that the source had then:
            # of the making of a file neither.
            made = {op.object for _, op in replay.ops if op.kind in ("create", "take")}
            self._present = {op.object for _, op in replay.ops if op.object} - made
        self._aside = set(replay.aside)
        settled = replay.known.settled if replay.known is not None else frozenset()
        for seq, op in replay.ops:
            self._foresee(op)
            if op.kind == "through":
                self._through.add(op.object)
            if op.kind == "content":
                self._longest[op.object] = max(self._longest.get(op.object, 0), op.size)
            if seq in replay.done:
                if not (op.kind == "take" and op.object in settled):
                    self._note(op, replay.done[seq])
                if op.kind == "content":
                    self._rebase(op, replay.done[seq])
                if op.object in replay.staged:
                    # These came after what is marked.
                    ours = self._ours.get(op.object, frozenset())
                    self._ours[op.object] = ours | replay.staged[op.object]
                if self._queue:
                    self._done_beyond.add(seq)
                else:
                    self._done_upto = seq
            else:
                self._expect(seq, op)
                entry = _Entry(seq, op, replay.recorded_ns[seq], 0, was_tried=True)
                entry.is_aside = seq in replay.aside
                if op.synced:
                    self._last_synced = seq
                self._queue.append(entry)
                self.pending.add(op)
                self.waiting_bytes += op.size
                if op.object and op.mtime_ns is not None:
                    times = self._set_times.get(op.object, frozenset())
                    self._set_times[op.object] = times | {op.mtime_ns}

        if replay.known is not None:
            # Contents may be missing by which bytes were changed.
            self._base.clear()

    def _begin_with(self, known: Known) -> None:
        self._known.update(known.known)
        self._made.update(known.made)
        self._over.update(known.over)
        for number, inos in known.ours.items():
            self._ours[number] = self._ours.get(number, frozenset()) | inos
        self._new |= known.new
        self._present |= known.present
        self._given_up |= known.given_up

    def known_of(self, ops: Iterable[tuple[int, Op]]) -> Known:
        """What a journal that is written anew with ``ops`` alone must tell of the source."""
        numbers: set[int] = set()
        inos: set[int] = set()
        settled = set()
        for seq, op in ops:
            if op.kind == "take" and self.is_done(seq):
                settled.add(op.object)
            numbers |= {op.object, op.over_object}
            inos |= {op.ino, op.over_ino}
        return Known(
            known=_of(self._known, numbers),
            made=_of(self._made, inos),
            over=_of(self._over, numbers),
            ours=_of(self._ours, numbers),
            new=frozenset(self._new & numbers),
            present=frozenset(self._present & numbers),
            given_up=frozenset(self._given_up & inos),
            settled=frozenset(settled),
        )

    def put(self, seq: int, op: Op) -> None:
        """A change that was appended to the journal. Never waits."""
        record = self._journal.written
        if self._hold_s:
            self._last_put_s = trio.current_time()
        self._foresee(op)
        self._queue.append(_Entry(seq, op, time.time_ns(), record, was_tried=False))
        self.pending.add(op)
        self._expect(seq, op)
        self.waiting_bytes += op.size
        if op.synced:
            self._last_synced = seq
        if len(self._queue) <= 2:
            self._wake()
        elif op.kind == "content" and not self._is_held():
            # It is work for one. Whoever is at work looks for more.
            self._stagers.unpark()

    def _wake(self) -> None:
        """Something has changed: have all look what they can do."""
        self._changed.unpark_all()
        self._stagers.unpark_all()

    def _foresee(self, op: Op) -> None:
        """Know what holds for all that comes behind a change, also before it is made."""
        if op.kind == "create":
            self._new.add(op.object)
        elif op.kind == "take":
            self._to_take.add(op.object)

    def _expect(self, seq: int, op: Op) -> None:
        """Know of what waits of an object."""
        if op.object and op.kind in ("content", "rename"):
            self._coming.setdefault(op.object, {})[seq] = op

    def is_done(self, seq: int) -> bool:
        """Whether the source has that change for good, and all that it depends on."""
        is_made = seq <= self._done_upto or seq in self._done_beyond
        return is_made and seq not in self._unmet

    def has_all(self, seq: int) -> bool:
        """Whether the source has all up to ``seq`` for good."""
        return seq <= self._done_upto and min(self._unmet, default=seq + 1) > seq

    async def wait(self, seq: int) -> None:
        """Until the source has that change; a pause after a failure ends now."""
        await self._wait(lambda: self.is_done(seq))

    async def wait_or_fail(self, seq: int) -> None:
        """Until the source has that change.

        Raises OSError with what the source answers, if it takes nothing, or not that change.
        """
        stops = self._stops

        def held() -> _Entry | None:
            return next((each for each in self._held if each.seq == seq), None)

        await self._wait(lambda: self.is_done(seq) or self._stops > stops or held() is not None)
        if not self.is_done(seq):
            entry = held()
            number = self._stopped_by if entry is None else entry.answer
            raise OSError(number, os.strerror(number))

    async def wait_all(self, seq: int) -> None:
        """Until the source has all up to ``seq``; a pause after a failure ends now."""
        await self._wait(lambda: self.has_all(seq))

    async def settle(self) -> None:
        """Until the source has all that was put by now."""
        await self.wait_all(self.last_seq)

    async def come_to_rest(self) -> None:
        """Until the source has all that was put by now but what it refuses."""
        seq = self.last_seq
        await self._wait(lambda: self._has_all_but_held(seq))

    async def wait_for(self, path: bytes, *, object: int, user: int | None) -> None:
        """Until the source has all that was put by now, as far as it concerns who asks.

        That is all that the source takes, and, of what it refuses, the changes of the ``object``
        and of the ``user``. Of that number only the low bits count (USER_BITS); where it is not
        known, changes of the path, of what is directly in it, and of what is above.
        """
        seq = self.last_seq

        def concerns(op: Op) -> bool:
            if object and object in (op.object, op.over_object):
                return True
            if op.by is None or user is not None:
                return op.by is None or op.by.uid & USER_BITS == user
            beside = (path, *above(path))
            return any(name in beside or name.rpartition(b"/")[0] == path for name in op.names())

        def holds() -> bool:
            return self._has_all_but_held(seq) and not any(
                entry.is_held and entry.seq <= seq and concerns(entry.op)
                for entry in (*self._held, *self._queue)
            )

        await self._wait(holds)

    async def settle_path(self, path: bytes) -> None:
        """Until the source has all that was put by now of a path, and of the directories above, but
        what it refuses."""
        seq = self.last_seq

        def concerns(op: Op) -> bool:
            return any(name == path or path.startswith(name + b"/") for name in op.names())

        await self._wait(
            lambda: (
                not any(
                    entry.seq <= seq and not entry.is_held and concerns(entry.op)
                    for entry in self._queue
                )
            )
        )

    def _has_all_but_held(self, seq: int) -> bool:
        first = next((entry for entry in self._queue if not entry.is_held), None)
        return first is None or first.seq > seq

    async def _wait(self, holds: Callable[[], bool]) -> None:
        self._waiters += 1
        try:
            self._hurry.set()
            while not holds():
                await self._changed.park()
        finally:
            self._waiters -= 1

    @property
    def last_seq(self) -> int:
        """Of the last change that was put and is not at the source; 0 if it has all."""
        return max((pending[-1].seq for pending in (self._held, self._queue) if pending), default=0)

    def _first_seq(self) -> int:
        """Of the first change that is not at the source; 0 if it has all."""
        return min((pending[0].seq for pending in (self._held, self._queue) if pending), default=0)

    def conflicts(self) -> list[Conflict]:
        """The last ones that were met and not acknowledged yet, the newest last."""
        return list(self._writer.conflicts)

    def dropped_xattrs(self) -> dict[tuple[bytes, bytes], str]:
        """Extended attributes, by path and name, that the source has not taken, and why: the last
        of them."""
        return dict(self._writer.dropped_xattrs)

    def acknowledge_conflicts(self) -> None:
        self._writer.forget_conflicts()

    def backlog(self) -> Backlog:
        waiting = [*self._held, *self._queue]
        sizes = {entry.op.object: entry.op.size for entry in waiting if entry.op.kind == "content"}
        conflicts = self._writer.conflicts
        refusals = self.refusals()
        aside = tuple(refusal for refusal in refusals if refusal.is_aside)
        other = self._trouble or self._refusal(is_aside=False) or self._hanging()
        return Backlog(
            ops=len(waiting),
            files=len(sizes),
            bytes=sum(sizes.values()),
            oldest_ns=min(
                (pending[0].recorded_ns for pending in (self._held, self._queue) if pending),
                default=0,
            ),
            drained_files=self._drained_files,
            drained_bytes=self._drained_bytes,
            failures=self._failures,
            trouble=other or self._refusal(is_aside=True),
            lost=tuple(self._lost.values()),
            moving_bytes=sum(staging.moved for staging in self._moving),
            conflicts=self._writer.conflict_count,
            conflict=conflicts[-1] if conflicts else None,
            aside=aside,
            aside_ops=sum(entry.is_aside for entry in waiting) if aside else 0,
            only_aside=bool(aside) and other is None,
        )

    def _refusal(self, *, is_aside: bool) -> str | None:
        for entry in (*self._held, *islice(self._queue, 1)):
            if entry.refusal and entry.is_aside is is_aside:
                return entry.refusal
        return None

    # -- what is refused, as a person decides --------------------------------------------------

    def refusals(self) -> list[Refusal]:
        """The changes that the source refuses, in their order."""
        return [
            Refusal(
                seq=entry.seq,
                kind=entry.op.kind,
                path=entry.op.to if entry.op.kind in ("rename", "link") else entry.op.path,
                why=entry.why,
                tries=entry.tries,
                is_aside=entry.is_aside,
            )
            for entry in (*self._held, *self._queue)
            if entry.refusal and not entry.is_moot
        ]

    async def set_aside(self, seqs: Container[int]) -> None:
        """Let the other changes of their users go on, whatever becomes of these."""
        for entry in (*self._held, *self._queue):
            if entry.refusal and entry.seq in seqs:
                self._put_aside(entry)
        await self.retry()

    async def retry(self) -> None:
        """Until all that the source refuses has been tried once more."""
        refused = [entry for entry in (*self._held, *self._queue) if entry.refusal]
        before = self._retries
        if refused:
            await self._wait(
                lambda: (
                    self._retries > before
                    and all(entry.is_held or self.is_done(entry.seq) for entry in refused)
                )
            )

    async def come_to_hold(self) -> None:
        """Until nothing that was refused is tried at this moment."""
        await self._wait(lambda: all(entry.is_held or not entry.refusal for entry in self._queue))

    def waiting(self) -> list[Op]:
        """All changes that the source has not got, in their order."""
        return [entry.op for entry in (*self._held, *self._queue)]

    def path_of(self, number: int) -> bytes | None:
        """Where the source has the file of an object whose next change waits; None if none does."""
        waiting = (entry for entry in (*self._held, *self._queue) if entry.op.object == number)
        first = min(waiting, key=lambda entry: entry.seq, default=None)
        return first.op.path if first is not None else None

    def has_nothing_of(self, op: Op) -> bool:
        """Whether the source has nothing of what a change is of: it was made on the mount, and
        never came there."""
        number = op.object
        if not number:
            return op.was is None and op.ino > 0 and op.ino not in self._made
        return number in self._new and not (number in self._present or number in self._known)

    def give_up(self, concerns: Callable[[Op], bool], objects: Iterable[int]) -> list[int]:
        """Bring no change that waits and is concerned, nor any more of ``objects``; the numbers of
        those that are given up."""
        self._discarded.update(objects)
        seqs = []
        for entry in (*self._held, *self._queue):
            if concerns(entry.op):
                entry.is_moot = True
                seqs.append(entry.seq)
                if entry.op.kind in ("mkdir", "symlink", "mknod"):
                    self._given_up.add(entry.op.ino)
        self._hurry.set()
        self._wake()
        return seqs

    def forget(self, number: int) -> None:
        """The source is to get all of an object's file anew, as one that it does not know."""
        self._note(Op(kind="gone", object=number), None)

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
                    self._sift()
                    if self._queue and self._is_held():
                        await trio.sleep(_HOLD_STEP_S)
                        self._wake()
                        continue
                    if self._queue:
                        await self._advance()
                    elif self._touched:
                        await self._sync_marks()
                    else:
                        await self._idle()
                        continue
                except _Refused as refused:
                    self._hold(refused.entry, refused.error)
                except (OSError, Refused) as error:
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
                        self._wake()
                    self._pause_s = _BACKOFF_S[0]

    # -- what the source refuses -------------------------------------------------------------

    def _hold(self, entry: _Entry, error: OSError) -> None:
        """Let others go before the change at the front, which the source refuses."""
        assert self._queue[0] is entry
        op = entry.op
        if self._is_moot(entry):
            entry.is_moot = True
            if op.kind in ("mkdir", "symlink", "mknod"):
                self._given_up.add(op.ino)
            log.info(
                "the source refuses %s %r (%s), and it was removed on the mount since: given up",
                op.kind,
                os.fsdecode(op.path),
                errno_words(error.errno),
            )
            return
        entry.answer = error.errno or errno.EIO
        entry.why = errno_words(error.errno)
        entry.refusal = f"{op.kind} {os.fsdecode(op.path)!r}: {entry.why}"
        self._failures += 1
        self._limiter.warning(
            log,
            f"drain refused {op.kind} {error.errno}",
            "the source refuses %s; it is kept here, with what depends on it, and tried again; the"
            " changes of other users go on",
            entry.refusal,
        )
        if not self._held:
            self._hurry = trio.Event()
            pause_s = min(self._retry_pause_s, _WAITED_S) if self._waiters else self._retry_pause_s
            self._retry_s = trio.current_time() + pause_s
            self._retry_pause_s = min(2 * self._retry_pause_s, _BACKOFF_S[1])
        entry.tries += 1
        entry.refused_s = min(entry.refused_s, trio.current_time())
        is_long = trio.current_time() - entry.refused_s >= _ASIDE_S
        is_never = op.kind == "symlink" and error.errno in _NO_LINKS
        if is_never or (entry.tries >= _TRIES and is_long):
            self._put_aside(entry)
        self._queue.popleft()
        self._set_aside(entry)
        # Others may not have to wait for it.
        self._wake()

    def _put_aside(self, entry: _Entry) -> None:
        if entry.is_aside:
            return
        entry.is_aside = True
        log.warning(
            "set aside: %s; it is kept here and tried again every minute, and the other changes"
            " of its user go on",
            entry.refusal,
        )
        self._aside.add(entry.seq)
        # Without that another life counts its tries anew.
        with suppress(OSError):
            self._journal.mark_aside(self._aside)

    def _is_moot(self, entry: _Entry) -> bool:
        """Whether the source needs no more to be told a change that it refuses: of what was removed
        on the mount since, or the removal of what it never got."""
        op = entry.op
        match op.kind:
            case "mkdir" | "symlink" | "mknod" | "attr" | "xattr":
                return op.ino > 0 and self._contents.is_removed(op.ino)
            case "unlink" if op.object:
                had = (self._present, self._known, self._over, self._ours)
                return op.object in self._new and not any(op.object in table for table in had)
            case "unlink" | "rmdir":
                return op.ino != 0 and op.strict and op.was is None and op.ino not in self._made
        return False

    def _set_aside(self, entry: _Entry) -> None:
        op = entry.op
        entry.is_held = True
        self._held.append(entry)
        if not entry.is_aside:
            entry.is_aside = _user(op) not in self._held_users and self._aside_what.meets(op)
        if not entry.is_aside:
            self._held_users.add(_user(op))
        self._held_what.add(op)
        if entry.is_aside:
            self._aside_what.add(op)

    def _is_behind(self, entry: _Entry) -> bool:
        """Whether a change depends on one that is held."""
        op = entry.op
        if entry.is_moot:
            return False
        return bool(self._held) and (_user(op) in self._held_users or self._held_what.meets(op))

    def _sift(self) -> None:
        """Take from the front what depends on what is held; when it is time, try that again."""
        if not self._held:
            if self._retry_pause_s != _BACKOFF_S[0] and not (
                self._queue and self._queue[0].refusal
            ):
                log.info("the drain to the source goes on")
                self._retry_pause_s = _BACKOFF_S[0]
            return
        if trio.current_time() >= self._retry_s or self._hurry.is_set():
            self._retries += 1
            for entry in self._held:
                entry.is_held = False
            self._queue = deque(merge(self._held, self._queue, key=lambda entry: entry.seq))
            self._held.clear()
            self._held_users.clear()
            self._held_what, self._aside_what = _What(), _What()
            return
        while self._queue and self._is_behind(self._queue[0]):
            self._set_aside(self._queue.popleft())

    async def _idle(self) -> None:
        """Until there is something to do."""
        if not self._held:
            await self._changed.park()
            return
        with trio.move_on_after(max(0.0, self._retry_s - trio.current_time())):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_pause, nursery.cancel_scope)
                await self._changed.park()
                nursery.cancel_scope.cancel()

    async def _end_pause(self, scope: trio.CancelScope) -> None:
        await self._hurry.wait()
        scope.cancel()

    # -- the front of the queue, again -------------------------------------------------------

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
        return self._last_synced < self._queue[0].seq

    async def _rest(self, error: Exception, words: str) -> None:
        what = "the journal's marks"
        if self._queue:
            op = self._queue[0].op
            what = f"{op.kind} {os.fsdecode(op.path)!r}"
        self._failures += 1
        self._trouble = f"{what}: {words}"
        self._stops += 1
        self._stopped_by = error.errno or errno.EIO if isinstance(error, OSError) else errno.EIO
        self._wake()
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
            try:
                await self._make_ready(entry)
            except OSError as error:
                if error.errno in _REFUSALS and not entry.is_staging:
                    raise _Refused(entry, error) from error
                raise
        batch, steps = self._next_batch()
        if not batch:
            await self._sync_marks()
            return
        await self._carry_out(batch, steps)

    async def _make_ready(self, entry: _Entry) -> None:
        while entry.is_staging:
            await self._changed.park()
        op = entry.op
        if op.same and op.object in self._present and op.object in self._known:
            entry.published = True
        elif op.same:
            entry.op = _with_rights_to_read(op)
        if entry.is_ready or self._is_left(entry):
            return
        if not await self._grow(entry):
            await self._stage(entry, in_turn=True)

    # -- what comes with a later content -----------------------------------------------------

    def _is_left(self, entry: _Entry) -> bool:
        """As ``_is_skipped``, of a content whose turn it is: also if a later one brings it."""
        if self._is_skipped(entry):
            return True
        if entry.is_staging or entry.is_ready or not self._gives_way(entry):
            return False
        number = entry.op.object
        self._put_off_s.setdefault(number, trio.current_time())
        self._gave_way.setdefault(number, []).append(entry.seq)
        self._unmet.add(entry.seq)
        # What is behind it in the same turn has to know.
        self._note(entry.op, None)
        entry.skipped = True
        return True

    def _gives_way(self, entry: _Entry) -> bool:
        """Whether a content comes in the place of a later one of the same file.

        The object has the newest bytes. At the place of older ones they would be at the source
        before what they refer to. What the source has of the file stays there until then.
        """
        op, number = entry.op, entry.op.object
        later = self._later(entry)
        if op.same or op.through or later is None:
            return False
        if op.by != later.by or not set(op.also) <= {op.by, *later.also}:
            # The bytes of each user come with the rights of that user.
            return False
        if entry.was_tried and len(op.paths) > 1 and number in self._ours:
            # Some of its names may be of the new file already, and others of the old one.
            return False
        is_there = number in self._known and number not in self._over
        if is_there and self._is_renamed_first(entry):
            # It would have to leave its old name before its new bytes come.
            return False
        since_s = self._put_off_s.get(number, math.inf)
        is_due = not is_there or trio.current_time() - since_s >= _PUT_OFF_S
        return not (is_due and self._is_intact(entry))

    def _behind(self, entry: _Entry) -> Iterator[Op]:
        """Contents and renames of the same object that wait behind a content, in their order."""
        coming = self._coming.get(entry.op.object, {})
        return (op for seq, op in coming.items() if seq > entry.seq)

    def _later(self, entry: _Entry) -> Op | None:
        """The next content of the same object; None if there is none."""
        return next((op for op in self._behind(entry) if op.kind == "content"), None)

    def _is_renamed_first(self, entry: _Entry) -> bool:
        """Whether its file gets another name before its next content."""
        return next(self._behind(entry), entry.op).kind == "rename"

    def _is_intact(self, entry: _Entry) -> bool:
        """Whether the object begins with the very bytes that were recorded: it was only appended
        to since, as its size may tell."""
        size = entry.op.size
        return self._contents.lowest(entry.op.object) >= size and all(
            op.intact >= size for op in self._behind(entry) if op.kind == "content"
        )

    def _settle(self, entry: _Entry, identity: Identity | None) -> None:
        """A change is made, or needs not to be made."""
        op, number = entry.op, entry.op.object
        if op.kind == "content":
            self._rebase(op, identity)
        if op.kind not in ("content", "rename") or number not in self._coming:
            return
        coming = self._coming[number]
        coming.pop(entry.seq, None)
        if not coming:
            del self._coming[number]
        if op.kind == "content" and entry.seq not in self._unmet:
            self._put_off_s.pop(number, None)
            self._unmet.difference_update(self._gave_way.pop(number, ()))

    # -- what was appended to -------------------------------------------------------------------

    def _rebase(self, op: Op, identity: Identity | None) -> None:
        """A content is at the source, as ``identity``, or was left out."""
        number = op.object
        if identity is not None:
            self._base[number] = identity.size
            self._intact.pop(number, None)
        else:
            self._intact[number] = min(self._intact.get(number, op.intact), op.intact)

    def _grows_from(self, entry: _Entry) -> int | None:
        """How many bytes of a content the source has at its beginning, if that is all that it has
        of the file; None if the file is to be brought whole."""
        op, number = entry.op, entry.op.object
        base = self._base.get(number)
        if base is None or op.same or op.through or not op.strict or number in self._over:
            return None
        intact = min(self._intact.get(number, op.intact), op.intact)
        is_known = number in self._known and op.mtime_ns is not None
        return base if is_known and 0 < base <= min(intact, op.size) else None

    async def _grow(self, entry: _Entry) -> bool:
        """Bring what was appended to a file, behind what the source has of it.

        Whether that was possible: not if the object has not got the bytes any more that were
        recorded, or others have changed the file. Raises OSError.
        """
        op, number = entry.op, entry.op.object
        base = self._grows_from(entry)
        if base is None or not self._is_intact(entry):
            return False
        if self._touched.conflicts_with(op):
            await self._sync_marks()
        object_fd = -1
        try:
            object_fd = await self._threads.run(self._objects.open, number)
            if not await self._threads.run(_is_as_long, self._objects, number, object_fd, op):
                return False
            opened = await self._threads.run(
                self._writer.open_to_grow, op, self._expected(entry), base
            )
            if opened is None:
                return False
            growth = Growth(object_fd, opened[0], by=opened[1], base=base)
            object_fd = -1
        except FileNotFoundError:
            return False
        finally:
            if object_fd >= 0:
                self._threads.start(os.close, object_fd)
        try:
            return await self._grown(entry, growth)
        except OthersWroteError:
            # It is a conflict, whoever may have written there before.
            self._base.pop(number, None)
            self._ours.pop(number, None)
            return False
        finally:
            self._threads.start(growth.close)

    async def _grown(self, entry: _Entry, growth: Growth) -> bool:
        op, number = entry.op, entry.op.object
        if not op.synced:
            # It is on the disk now. Without that a power cut would take here what is there.
            self._journal.mark_durable(number)
        self._longest[number] = max(self._longest.get(number, 0), op.size)
        place = Place(source_ino=self._known[number].source_ino)
        # Another life finds by it that what is behind the bytes that are known is ours.
        self._mark_staged(entry, place, Identity(ANY_SIZE, 0, 0, 0))
        await self._sync(entry.record)
        base = op.size - growth.left(op.size)
        while left := growth.left(op.size):
            await self._courtesy(min(left, _TURN_BYTES))
            if not await self._threads.run(growth.read, min(left, _TURN_BYTES), op.size):
                return False
            if not self._is_intact(entry):
                return False
            self._known[number] = await self._threads.run(growth.write)
        identity = await self._threads.run(growth.finish, op.size, op.mtime_ns)
        self._known[number] = identity
        self._published[number] = (Identity(op.size, op.mtime_ns or 0, 0, 0), identity)
        self._drained_files += op.size > base
        self._drained_bytes += op.size - base
        entry.published = entry.is_grown = True
        return True

    # -- a batch -----------------------------------------------------------------------------

    def _next_batch(self) -> tuple[list[_Entry], list[Step | None]]:
        """The changes at the front that may be made in one turn, and how; None: nothing is to be.

        None of them is about a path of another, or of one whose mark may be lost.
        """
        touched = PathSet()
        # What is to be done with a file that is changed in this turn is known after it. Objects,
        # and the numbers on the mount of what has none.
        changed: set[int] = set()
        changed_inos: set[int] = set()
        batch: list[_Entry] = []
        steps: list[Step | None] = []
        for entry in islice(self._queue, _BATCH):
            op = entry.op
            if self._is_behind(entry):
                break
            if {op.object, op.over_object} & changed or {op.ino, op.over_ino} & changed_inos:
                break
            if op.kind == "content" and (
                entry.is_staging or not (self._is_left(entry) or entry.is_ready)
            ):
                break
            step = self._step(entry)
            if step is not None:
                if op.kind in ("content", "rename", "attr") and op.object:
                    changed.add(op.object)
                elif op.ino and not op.object:
                    changed_inos.add(op.ino)
                if touched.conflicts_with(op) or self._touched.conflicts_with(op):
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
            or entry.is_moot
            or op.object in self._lost
            or (op.object in self._through and not op.through)
            or self._contents.is_dead(op.object)
        )
        return entry.skipped

    def _step(self, entry: _Entry) -> Step | None:
        """How a change is made at the source, by what there is of its file."""
        op, writer = entry.op, self._writer
        absent = bool(op.object) and op.object not in self._present
        expected = self._expected(entry)
        if entry.is_moot and op.kind == "content":
            return partial(_none, writer.discard, op) if entry.was_tried else None
        if entry.is_moot or op.ino in self._given_up or op.object in self._discarded:
            return None
        match op.kind:
            case "create" | "take":
                # Those behind it in the same turn have to know.
                self._note(op, None)
                return None
            case "through" | "gone":
                return None
            case "content" if entry.skipped:
                is_ours = entry.was_tried and not op.through
                return partial(_none, writer.discard, op) if is_ours else None
            case "content" if entry.staged is not None:
                assert entry.place is not None
                return partial(
                    writer.publish,
                    op=_as_staged(self._with_bits_that_stay(entry), entry.staged),
                    staged=entry.staged,
                    place=entry.place,
                    expected=expected,
                )
            case "content":
                if entry.is_grown:
                    tried = entry.was_tried
                    return partial(writer.grown, op=op, expected=expected, tried=tried)
                return partial(writer.look_at_same, op=op, expected=expected)
            case "mkdir":
                return partial(writer.mkdir, op=op, expected=expected)
            case "symlink":
                return partial(writer.symlink, op=op, expected=expected)
            case "mknod":
                return partial(writer.mknod, op=op, expected=expected)
            case "unlink":
                return partial(_none, partial(writer.unlink, expected=expected), op)
            case "rmdir":
                return partial(_none, partial(writer.rmdir, expected=expected), op)
            case "rename" if absent:
                # What is in its new place stays until the content comes, which brings its name.
                if op.object in self._lost:
                    return None
                return partial(_none, partial(writer.unlink, expected=expected), op)
            case "rename":
                ours = self._ours_of(op.over_object)
                over = Expected(over=self._replaced(op), ours=ours)
                return partial(writer.rename, op=op, expected=expected, over=over)
            case "link":
                return None if absent else partial(writer.link, op=op, expected=expected)
            case "attr" | "xattr":
                op = self._with_bits_that_stay(entry)
                # One whose content was left out keeps what its older version has at the source.
                is_older = op.object in self._known and op.object not in self._over
                if absent and not is_older:
                    return None
                will_come = absent and self._later(entry) is not None
                return partial(writer.attr, op=op, expected=expected, will_come=will_come)

    def _with_bits_that_stay(self, entry: _Entry) -> Op:
        """A change without the set-ID bits that a later one of the same file takes away.

        Whoever writes into a program takes them. The bytes that are brought are the newest, so they
        may be at the source before that change is, and must not run with the rights of the owner.
        """
        op = entry.op
        if not op.object or op.mode is None or not op.mode & _SET_ID:
            return op
        mode = op.mode
        if op.kind == "attr" and self._contents.is_written(op.object):
            mode &= ~_SET_ID
        for later in (*self._held, *self._queue):
            is_same = later.op.object == op.object and later.op.kind in ("content", "attr")
            if is_same and later.seq > entry.seq and later.op.mode is not None:
                mode &= later.op.mode | ~_SET_ID
        return replace(op, mode=mode)

    def _expected(self, entry: _Entry) -> Expected:
        """What may stand at the source where a change is to be made."""
        op, number = entry.op, entry.op.object
        if not number:
            return Expected(seq=entry.seq, known=self._made.get(op.ino, op.was))
        return Expected(
            seq=entry.seq,
            known=self._known.get(number),
            as_set=tuple(self._as_set(number)),
            ours=self._ours_of(number),
            over=self._over.get(number, ()),
            is_made=number in self._new,
            # Not if a rename has taken it away there, until its content comes.
            was_there=(number in self._known or number in self._to_take)
            and number not in self._over,
            longest=self._longest.get(number, 0),
            is_file=True,
        )

    def _as_set(self, number: int) -> Iterator[Identity]:
        """What is known of an object's file, with each time that may have been set unmarked."""
        if (known := self._known.get(number)) is not None:
            for mtime_ns in self._set_times.get(number, ()):
                yield replace(known, mtime_ns=mtime_ns)

    def _replaced(self, rename: Op) -> tuple[Identity, ...]:
        """What the source may have of the file that a rename on the mount has replaced."""
        made = self._made.get(rename.over_ino)
        found = [rename.over, self._known.get(rename.over_object), made]
        over = (*self._over.get(rename.over_object, ()), *self._as_set(rename.over_object))
        return (*over, *(each for each in found if each))

    async def _carry_out(self, batch: list[_Entry], steps: list[Step | None]) -> None:
        """Make a batch of changes and mark those that were made. Raises OSError of another."""
        real = [step for step in steps if step is not None]
        outcome = Outcome((), None)
        if real:
            await self._sync(max(entry.record for entry in batch))
            outcome = await self._threads.run(self._writer.carry_out, real)
        made = iter(outcome.made)
        done: dict[int, Identity | None] = {}
        failed: _Entry | None = None
        for entry, step in zip(batch, steps, strict=True):
            if step is None:
                done[entry.seq] = None
                continue
            try:
                done[entry.seq] = next(made)
            except StopIteration:
                failed = entry
                self._unstage(entry)
                break
        for entry, step in zip(batch, steps, strict=True):
            if done.get(entry.seq, _SOME) is None and self._lacks_its_file(entry, step):
                self._bring_back(entry)
        if done:
            await self._mark(done, batch[len(done) :])
            failpoints.failpoint("drain-marked")
        for entry, step in zip(batch[: len(done)], steps, strict=False):
            self._queue.popleft()
            self.pending.remove(entry.op)
            self.waiting_bytes -= entry.op.size
            self._arrived(entry, step is not None, done[entry.seq])
        self._wake()
        if outcome.error is None:
            return
        if failed is not None and failed.op.kind == "content":
            failed.restaged += 1
            again = outcome.error.errno in (errno.EAGAIN, errno.ESTALE)
            if again and failed.restaged <= _RESTAGED:
                return
        if failed is not None and outcome.error.errno in _REFUSALS:
            raise _Refused(failed, outcome.error) from outcome.error
        raise outcome.error

    def _lacks_its_file(self, entry: _Entry, step: Step | None) -> bool:
        """Whether the source has no file to which a rename or link could give its name.

        Others have removed that file, or its directory. Either the change found no file, or an
        earlier mount marked the file's last content as done without one.
        """
        op, number = entry.op, entry.op.object
        if op.kind not in ("rename", "link") or not number:
            return False
        if number in self._present:
            return step is not None
        is_given_up = entry.is_moot or op.ino in self._given_up or number in self._discarded
        return not (
            is_given_up
            or number in self._lost
            or self._later(entry) is not None
            # The close of a file that is being written records a content.
            or self._contents.is_written(number)
        )

    def _bring_back(self, entry: _Entry) -> None:
        """Record a content of a file that the source has lost, unless one waits. Raises OSError."""
        op, number = entry.op, entry.op.object
        self._published.pop(number, None)
        if self._later(entry) is None and not self._record_whole(op):
            return
        # Who waits for the change waits for the content.
        self._gave_way.setdefault(number, []).append(entry.seq)
        self._unmet.add(entry.seq)

    def _record_whole(self, op: Op) -> bool:
        """Record a content of the file of ``op``, if its bytes are here. Raises OSError."""
        content = self._contents.whole(op.object)
        if content is None:
            return False
        content = _with_rights_to_read(replace(content, by=op.by))
        seq = self._journal.append(content)
        self.put(seq, content)
        self._contents.recorded(op.object, seq)
        return True

    async def _mark(self, done: dict[int, Identity | None], left: list[_Entry]) -> None:
        """``left``: what of the same batch was not made."""
        upto = max(done)
        if self._held:
            upto = min(upto, self._held[0].seq - 1)
        while True:
            try:
                self._journal.mark_done(done, upto=upto)
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
        self._settle(entry, identity)
        self._aside.discard(entry.seq)
        first = self._first_seq()
        self._done_beyond.add(entry.seq)
        self._done_upto = max(self._done_upto, first - 1 if first else entry.seq)
        if not self._held:
            self._done_beyond = {seq for seq in self._done_beyond if seq > self._done_upto}
        if was_made:
            self._touched.add(op)
        # What was given up leaves the source with what it has.
        is_given_up = entry.is_moot and op.kind == "content"
        if not (is_given_up or (entry.published and identity is None)):
            self._note(op, identity)
        if identity is None or op.kind != "content":
            self._unstage(entry)
            if identity is not None and (known := self._known.get(op.object)) is not None:
                self._contents.changed(op.object, known)
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
        number = op.object
        match op.kind:
            case "take":
                self._to_take.discard(number)
                self._present.add(number)
                # Attributes may have been changed here since the mount knew it like that.
                known = self._made.get(op.ino, op.was)
                if known is not None and number not in self._known:
                    self._known[number] = known
                    self._base[number] = known.size
            case "content" if identity is not None:
                self._present.add(number)
                self._known[number] = identity
                self._over.pop(number, None)
                self._ours.pop(number, None)
                self._set_times.pop(number, None)
            case "content":
                self._present.discard(number)
                self._published.pop(number, None)
            case "gone":
                for table in (
                    self._published,
                    self._known,
                    self._over,
                    self._ours,
                    self._set_times,
                    self._base,
                    self._intact,
                    self._longest,
                ):
                    table.pop(number, None)
                self._present.discard(number)
                self._new.discard(number)
            case "link" if number and identity is None:
                self._present.discard(number)
            case "rename" if number and (number not in self._present or identity is None):
                self._present.discard(number)
                # It may have another name, at which it has replaced something else.
                over = dict.fromkeys((*self._over.get(number, ()), *self._replaced(op)))
                self._over[number] = tuple(over)
                if ours := self._ours.get(op.over_object):
                    self._ours[number] = self._ours.get(number, frozenset()) | ours
            case "rename" | "link" | "attr" | "xattr" if identity is not None and number:
                identity = _with_bytes_of(self._known.get(number), identity, op)
                self._renew(self._known.get(number), identity)
                self._known[number] = identity
            case "rmdir":
                self._made.pop(op.ino, None)
            case "mkdir" | "symlink" | "mknod" if identity is None and op.strict:
                # The name is another's at the source: what comes behind it is not about that.
                self._given_up.add(op.ino)
            case _ if identity is not None and op.ino:
                before = self._made.get(op.ino, op.was)
                if before is not None and is_shared(before):
                    identity = shared(identity)
                self._renew(before, identity)
                self._made[op.ino] = identity

    def _renew(self, before: Identity | None, now: Identity) -> None:
        """A file was changed here that may wait, under another name, for what replaces it."""
        for number, over in self._over.items():
            if before in over:
                self._over[number] = tuple(now if each == before else each for each in over)

    def _unstage(self, entry: _Entry) -> None:
        if entry.staged is not None:
            self._staged -= 1
        entry.staged = None
        entry.place = None
        entry.published = False

    # -- contents ----------------------------------------------------------------------------

    async def _stage_ahead(self) -> None:
        while True:
            try:
                lot = self._next_to_stage()
            except Refused:
                # Not all names can be read now: the change at the front tells of that.
                lot = []
            if not lot:
                await self._stagers.park()
            elif len(lot) == 1:
                await self._stage(lot[0], in_turn=False)
            else:
                await self._stage_lot(lot)

    def _next_to_stage(self) -> list[_Entry]:
        """What one worker stages next: one content, or a lot of small ones.

        Each may be staged before it is its turn: no earlier content of the same object waits, and
        the directory that it comes into is the one that is there now. Of many that are small each
        worker gets its share.
        """
        if self._trouble is not None or self._staged >= _MOST_STAGED:
            return []
        if self._queue and self._is_held():
            return []
        found: list[_Entry] = []
        objects: set[int] = set()
        changing: set[bytes] = set()
        named: set[bytes] = set()
        for entry in islice(self._queue, _WINDOW):
            op = entry.op
            if op.kind == "content":
                is_idle = not (entry.is_staging or entry.is_left or entry.is_ready)
                if (
                    is_idle
                    and not op.same
                    and op.object not in objects
                    and named.isdisjoint(op.paths)
                    and changing.isdisjoint(above(op.path))
                    and not self._is_behind(entry)
                    and self._later(entry) is None
                    and self._grows_from(entry) is None
                    and not self._is_skipped(entry)
                ):
                    if not self._is_small(entry):
                        return found or [entry]
                    found.append(entry)
                    if len(found) == _LOT * self._workers:
                        break
                objects.add(op.object)
            elif op.kind in ("mkdir", "rmdir", "rename", "symlink"):
                changing.update(op.names())
            if op.object and op.kind in ("attr", "xattr", "link", "rename"):
                # What replaces a file gets the attributes that this has by then.
                objects.add(op.object)
            if op.kind not in ("content", "attr", "xattr", "create", "take"):
                named.update(op.names())
        return found[: -(-len(found) // self._workers)]

    def _is_small(self, entry: _Entry) -> bool:
        """Whether a content may go with others in a lot: a file that is as it was recorded."""
        op = entry.op
        return (
            op.size <= _SMALL_BYTES
            and not op.through
            and op.mtime_ns is not None
            and not self._contents.is_written(op.object)
            and not self._objects.failure(op.object)
        )

    async def _stage_lot(self, lot: list[_Entry]) -> None:
        """As ``_stage``, of many small contents ahead of their turn. What is in any way unusual is
        left to that."""
        for entry in lot:
            entry.is_staging = entry.was_tried = True
        places = {entry: Place() for entry in lot}
        stagings = [
            Staging(
                self._objects,
                entry.op.object,
                open_part=partial(
                    self._writer.open_place,
                    entry.op,
                    place,
                    self._expected(entry),
                    make=False,
                ),
            )
            for entry, place in places.items()
        ]
        try:
            await self._copied_lot([*zip(lot, stagings, strict=True)], places)
        except OSError:
            # Of the journal: whoever's turn it is finds that out.
            pass
        finally:
            self._threads.start(close_all, stagings)
            for entry in lot:
                entry.is_left = True
                entry.is_staging = False
            self._wake()

    async def _copied_lot(
        self, lot: list[tuple[_Entry, Staging]], places: Mapping[_Entry, Place]
    ) -> None:
        """As ``_copied``. Raises OSError of the journal."""
        are_synced = [entry.op.synced for entry, _ in lot]
        found = await self._threads.run(open_all, [it for _, it in lot], are_synced)
        versions: dict[_Entry, Identity] = {}
        for (entry, _), version in zip(lot, found, strict=True):
            op = entry.op
            if isinstance(version, OSError) or self._contents.is_written(op.object):
                continue
            if (version.size, version.mtime_ns) != (op.size, op.mtime_ns):
                continue
            known, _ = self._published.get(op.object, (None, None))
            if known == version:
                entry.published = True
            else:
                versions[entry] = version
        lot = [(entry, it) for entry, it in lot if entry in versions]
        if not lot:
            return
        if unsynced := [entry for entry, _ in lot if not entry.op.synced]:
            # They are on the disk now. Without that a power cut would take here what is there.
            self._journal.mark_durable(*(entry.op.object for entry in unsynced))
            for entry in unsynced:
                entry.record = self._journal.written
        # Nobody would know of a staged file that is there before the records of its object are.
        await self._sync(max(entry.record for entry, _ in lot))
        begun = await self._threads.run(begin_all, [it for _, it in lot])
        lot = [each for each, failure in zip(lot, begun, strict=True) if failure is None]
        if not lot:
            return
        # On the disk before they get their names, with the other records of that turn.
        self._mark_all_staged(
            [(entry, places[entry], versions[entry]) for entry, _ in lot],
        )
        await self._move_lot(lot, places, versions)

    async def _move_lot(
        self,
        lot: list[tuple[_Entry, Staging]],
        places: Mapping[_Entry, Place],
        versions: Mapping[_Entry, Identity],
    ) -> None:
        stagings = [it for _, it in lot]
        applies = []
        for entry, _ in lot:
            staged = Staged(versions[entry].size, versions[entry])
            applies.append(
                partial(
                    self._writer.apply_attributes,
                    op=_as_staged(self._with_bits_that_stay(entry), staged),
                    place=places[entry],
                    expected=self._expected(entry),
                )
            )
        self._moving += stagings
        try:
            await self._courtesy(sum(version.size for version in versions.values()))
            moved = await self._threads.run(
                partial(move_all, stagings, applies, verify=self._verify)
            )
        finally:
            for it in stagings:
                self._moving.remove(it)
        for (entry, _), version in zip(lot, moved, strict=True):
            # What was written meanwhile is staged anew in its turn.
            if version == versions[entry]:
                entry.staged, entry.place = Staged(version.size, version), places[entry]
                self._staged += 1

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
            self._wake()

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
            place, expected = Place(), self._expected(entry)
            staging = Staging(
                self._objects,
                op.object,
                open_part=partial(self._writer.open_place, op, place, expected, make=in_turn),
            )
            entry.place = place
            try:
                staged = await self._copied(entry, staging)
            finally:
                self._threads.start(staging.close)
            if staged is not None or entry.published:
                return staged
            looks += 1
            if not in_turn or looks > _LOOKS:
                raise _Written
            # Of what nobody writes any more no other content need come.
            if self._contents.is_written(op.object) and not await self._is_alone(_LOOK_S):
                raise _Written

    async def _is_alone(self, pause_s: float) -> bool:
        """Whether no other change comes to wait behind the one at the front during a pause."""
        with trio.move_on_after(pause_s):
            while len(self._queue) <= 1:
                await self._changed.park()
            return False
        return True

    async def _there_already(self, entry: _Entry) -> Staged | None:
        """A content that was written at the source, as ``_staged_content``."""
        op = entry.op
        if self._contents.is_written(op.object):
            # It would get its name before it is whole.
            raise _Written
        place = entry.place = Place()
        try:
            size, identity = await self._threads.run(
                self._writer.finish_part, op, place, self._expected(entry)
            )
        except FileNotFoundError as error:
            raise _Missing("others have removed it at the source") from error
        version = Identity(size, op.mtime_ns or 0, 0, 0)
        if identity is None:
            self._mark_staged(entry, place, version)
            await self._sync(entry.record)
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
        # Of a file that is appended to the bytes that were recorded, and no others.
        is_part = not is_recorded and self._is_part(entry, version, written)
        if is_part:
            version = replace(version, size=op.size, mtime_ns=op.mtime_ns or 0)
            staging.limit(op.size)
        elif written:
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
        if not (op.synced or self._objects.failure(op.object)):
            # It is on the disk now. Without that a power cut would take here what is there.
            self._journal.mark_durable(op.object)
            entry.record = self._journal.written
        # Nobody would know of a staged file that is there before the records of its object are.
        await self._sync(entry.record)
        staged, place = Staged(version.size, version), entry.place
        assert place is not None
        await self._threads.run(staging.begin)
        # On the disk before it gets its name, with the other records of that turn.
        self._mark_staged(entry, place, version)
        apply = partial(
            self._writer.apply_attributes,
            op=_as_staged(self._with_bits_that_stay(entry), staged),
            place=place,
            expected=self._expected(entry),
        )
        await self._move(staging, version.size, apply)
        if is_part:
            return staged if self._is_intact(entry) else None
        if await self._threads.run(staging.version) != version:
            return None
        # Whoever has come since then, and is still there, has not left it half written.
        if not is_recorded and self._contents.is_written(op.object):
            return None
        return staged

    def _is_part(self, entry: _Entry, version: Identity, written: bool) -> bool:
        """Whether an object begins with the bytes that were recorded, and has got more since.

        Of one that is neither open nor has a later content it is not known what was changed.
        """
        op = entry.op
        is_known = written or self._later(entry) is not None
        return (
            is_known
            and op.mtime_ns is not None
            and version.size >= op.size > 0
            and self._is_intact(entry)
        )

    def _mark_staged(self, entry: _Entry, place: Place, version: Identity) -> None:
        """Have the journal know the staged file, by which another life finds that it is ours."""
        self._mark_all_staged([(entry, place, version)])

    def _mark_all_staged(self, lot: Iterable[tuple[_Entry, Place, Identity]]) -> None:
        marks = {
            entry: (
                entry.op.object,
                Identity(version.size, version.mtime_ns, 0, place.source_ino),
            )
            for entry, place, version in lot
        }
        self._journal.mark_staged(*marks.values())
        for entry, (number, staged) in marks.items():
            entry.record = self._journal.written
            self._ours[number] = self._ours.get(number, frozenset()) | {staged}

    def _ours_of(self, number: int) -> frozenset[Identity]:
        """What of ours may have the name of an object's file, with each time that may have been set
        unmarked."""
        ours = self._ours.get(number, frozenset())
        times = self._set_times.get(number, ())
        return ours | {replace(each, mtime_ns=time_ns) for each in ours for time_ns in times}

    def _is_short(self, entry: _Entry, version: Identity) -> bool:
        """Whether an object has lost bytes that were synced, and was not made shorter since."""
        op = entry.op
        return (
            op.synced
            and version.size < op.size
            and (op.mtime_ns is None or version.mtime_ns <= op.mtime_ns)
            and not any(
                later.op.object == op.object and later.op.kind in ("content", "attr")
                for later in (*self._held, *self._queue)
                if later.seq > entry.seq
            )
        )

    async def _move(self, staging: Staging, size: int, apply: Callable[[int], None]) -> None:
        """Bring the bytes to the source, in turns; readers of the source go first."""
        self._moving.append(staging)
        try:
            await self._move_in_turns(staging, size, apply)
        finally:
            self._moving.remove(staging)

    async def _move_in_turns(
        self, staging: Staging, size: int, apply: Callable[[int], None]
    ) -> None:
        await self._courtesy(min(size, _TURN_BYTES))
        if size <= _TURN_BYTES:
            await self._threads.run(_move_at_once, staging, apply, self._verify)
            return
        while await self._threads.run(staging.turn, _TURN_BYTES):
            await self._courtesy(_TURN_BYTES)
        await self._threads.run(staging.finish, apply)
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


def _with_bytes_of(known: Identity | None, now: Identity, op: Op) -> Identity:
    """What a file is after a change of it that was none of its bytes. If others have written it in
    place meanwhile its bytes are still the ones that are known: theirs are met as a conflict."""
    if known is None or known.source_ino != now.source_ino:
        return now
    if op.mtime_ns is not None and is_time(now.mtime_ns, op.mtime_ns):
        return now
    return replace(now, size=known.size, mtime_ns=known.mtime_ns)


def _of(table: Mapping[int, T], keys: Container[int]) -> dict[int, T]:
    return {key: value for key, value in table.items() if key in keys}


def _is_as_long(objects: Objects, number: int, fd: int, op: Op) -> bool:
    """Whether an object has the bytes of a content, on the disk if they were not synced before."""
    if not op.synced:
        objects.sync(number, fd)
    return os.fstat(fd).st_size >= op.size


def _with_rights_to_read(content: Op) -> Op:
    """A content that nobody wrote on the mount, by a user to whom its bytes may be given: whoever
    renames a file need not be allowed to read it, and its owner is."""
    by = content.by
    if by is None or by.is_root or by.uid == content.uid:
        return content
    return replace(content, by=Credentials(content.uid or 0, content.gid or 0))


def _user(op: Op) -> int | None:
    """Whose changes stay in their order, whatever the source refuses."""
    return op.by.uid if op.by is not None else None


def _none(change: Callable[[OpenDirectories, T], None], what: T, folders: OpenDirectories) -> None:
    """A step that has no identity to tell."""
    change(folders, what)


def _as_staged(op: Op, staged: Staged) -> Op:
    """What the source is to be told of a file whose bytes may be newer than the record."""
    version = staged.version
    if (version.size, version.mtime_ns) == (op.size, op.mtime_ns):
        return op
    # Others may have written the newer bytes, and these must not run with the rights of the owner.
    # Their own record, or a change of the mode behind them, brings the bits that they keep.
    mode = None if op.mode is None else op.mode & ~_SET_ID
    return replace(op, mtime_ns=version.mtime_ns, mode=mode)


def _move_at_once(staging: Staging, apply: Callable[[int], None], verify: bool) -> None:
    while staging.turn(_TURN_BYTES):
        pass
    staging.finish(apply)
    while verify and staging.verify(_TURN_BYTES):
        pass
