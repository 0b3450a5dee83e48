"""The queue of all changes that are not at the source yet, in the order in which they were made.

If the source refuses a change, because of its path or its user, the change is *held*. Later changes
of the same user, of the same files and of the same paths are held with it. All others are made.
Held changes are tried again, in their order, after a pause. A change that is refused repeatedly is
*set aside*: then only changes of the same files and paths wait for it, and the other changes of its
user are made.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter

import trio

from monarch.telemetry.log import Limiter
from monarch.text import errno_words
from monarch.types import Identity
from monarch.writeback.conflicts import PendingNames, Subjects
from monarch.writeback.expected import Conflict
from monarch.writeback.op import Op, above
from monarch.writeback.source_contents import Place
from monarch.writeback.tier_objects import FULL
from monarch.writeback.wakeups import BACKOFF_S, Cause, Wakeups

log = logging.getLogger(__name__)

# A change is set aside after this number of refusals, over at least this time in seconds.
_TRIES = 8
_ASIDE_S = 600.0
# What gives room at the source.
_REMOVALS = frozenset({"unlink", "rmdir"})
# The errors of a source without symbolic links: it will never accept one.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})

Paths = tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class Entry:
    """A change that waits for its turn: ``op`` with its number ``seq`` in the journal.

    ``record`` is the number of its journal record, ``recorded_ns`` the time of that record.

    Of contents: ``was_tried`` says that a staged file of it may exist. ``is_staging``: a task
    stages it at this moment. ``was_ahead``: it was staged ahead of its turn, or that has failed.
    ``staged``: the version of its object whose bytes are in a staged file, which goes to ``place``.
    ``marked``: the last staged file of it in the journal.
    ``published``: the source has these bytes already, with ``is_grown`` because they were appended
    in place. ``skipped``: its bytes are not brought. ``restaged`` counts how often it was staged
    again because the source has changed.

    ``withheld`` are the set-ID bits in the mode of the change that the file does not get yet.

    Of changes that the source refuses: ``is_held`` says that other changes go first. ``refusal``
    and ``why`` are the reason as text, empty for a change that only depends on a refused one;
    ``answer`` is the errno. ``tries`` counts the refusals since ``refused_s`` (event loop clock).
    ``is_aside``: later changes of the same user do not wait for it any more. ``is_moot``: the
    change is not needed any more, or was given up.
    """

    seq: int
    op: Op
    recorded_ns: int
    record: int
    was_tried: bool
    is_staging: bool = False
    was_ahead: bool = False
    staged: Identity | None = None
    published: bool = False
    skipped: bool = False
    place: Place | None = None
    marked: Identity | None = None
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
    withheld: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether the change can be made at the source in its turn."""
        return self.staged is not None or self.published or self.skipped


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused change. ``is_aside``: the other changes of its user do not wait for it."""

    seq: int
    kind: str
    path: bytes
    why: str
    tries: int
    is_aside: bool


@dataclass(frozen=True, slots=True)
class Backlog:
    """The changes that are not at the source yet, and what was drained since the start.

    ``ops`` counts all changes; ``files`` counts the files with contents among them, and ``bytes``
    is the size of these files. ``oldest_ns`` is the time of the oldest change, in ns since the
    epoch; 0 if there is none. ``failures`` counts failed tries, and ``trouble`` describes the
    present failure, whose ``cause`` is as in ``Trouble``. ``lost``: the paths of files whose bytes
    the tier has lost. ``moving_bytes`` of the files under way have reached the source.
    ``conflicts`` counts the conflicts with changes of others, and ``conflict`` is the last one.
    ``aside`` are the changes that are set aside; ``aside_ops`` counts these and the changes that
    wait for them. ``only_aside``: ``trouble`` is about a change that is set aside.
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
    cause: Cause = "source"


class DrainQueue:
    """Belongs to the event loop. Changes that are ``held`` are before all others.

    ``waiting_bytes`` is the size of all waiting contents, in bytes; several contents of one file
    are added. ``last_synced`` is the sequence number of the last content that a process has synced.
    ``pending`` has the names of the waiting changes. ``retries`` counts how often all held changes
    were released to be tried again, ``refused`` counts the refusals. ``mark_aside`` records in the
    journal the sequence numbers of the changes that are set aside.
    """

    def __init__(self, wakeups: Wakeups, mark_aside: Callable[[Collection[int]], object]) -> None:
        self.held: list[Entry] = []
        self.waiting_bytes = 0
        self.last_synced = 0
        self.pending = PendingNames()
        self.retries = 0
        self.refused = 0
        self._entries: deque[Entry] = deque()
        # The waiting renames by their new names, each list by sequence numbers.
        self._renames_to: dict[bytes, list[Entry]] = {}
        self._wakeups = wakeups
        self._mark_aside = mark_aside
        # The users of the held changes: whether the source lacks only room for them. The files and
        # paths of the held changes; those of the changes that are set aside.
        self._users: dict[int | None, bool] = {}
        self._subjects = Subjects()
        self._aside_subjects = Subjects()
        # The sequence numbers that the journal has as set aside.
        self._aside: set[int] = set()
        self._retry_s = math.inf
        self._retry_pause_s = BACKOFF_S[0]
        # When the held changes were released last, and how long the try of the first one took then.
        self._released_s = math.inf
        self._try_s = 0.0
        self._limiter = Limiter(log)

    def load(self, aside: Collection[int]) -> None:
        """Takes over the sequence numbers of changes that an earlier mount has set aside."""
        self._aside = set(aside)

    def __len__(self) -> int:
        """The number of changes that are not held."""
        return len(self._entries)

    # -- the front ---------------------------------------------------------------------------

    @property
    def front(self) -> Entry:
        """The next change to be made. Raises IndexError if all waiting changes are held."""
        return self._entries[0]

    def first(self, count: int) -> Iterator[Entry]:
        """The first changes that are not held, up to ``count``."""
        return islice(self._entries, count)

    def append(self, entry: Entry) -> None:
        """Appends a change that was recorded."""
        if entry.op.synced:
            self.last_synced = entry.seq
        self._entries.append(entry)
        if entry.op.kind == "rename":
            self._renames_to.setdefault(entry.op.to, []).append(entry)
        self.waiting_bytes += entry.op.size
        self.pending.add(entry.op)

    def remove_front(self) -> None:
        """Removes the change at the front: it was made, or need not be made."""
        entry = self._entries.popleft()
        self._forget_rename(entry)
        if self._may_make_room(entry.op):
            # Further removals may follow, and a try may copy many bytes: both get their time.
            pause_s = max(BACKOFF_S[0], self._try_s)
            self._retry_s = min(self._retry_s, trio.current_time() + pause_s)
        self.pending.remove(entry.op)
        self.waiting_bytes -= entry.op.size
        self._aside.discard(entry.seq)

    def _forget_rename(self, entry: Entry) -> None:
        renames = self._renames_to.get(entry.op.to) if entry.op.kind == "rename" else None
        if renames is not None:
            renames.remove(entry)
            if not renames:
                del self._renames_to[entry.op.to]

    # -- held changes ------------------------------------------------------------------------

    def is_behind(self, entry: Entry) -> bool:
        """Whether a change depends on one that is held. A removal does not wait only because the
        source lacks room for changes of its user: it may make that room."""
        if entry.is_moot or not self.held:
            return False
        is_late = _user(entry.op) in self._users and (
            not self._may_make_room(entry.op) or self._subjects.may_permit(entry.op)
        )
        return is_late or self._subjects.meets(entry.op)

    def _may_make_room(self, op: Op) -> bool:
        """Whether a change removes something of a user for whose held changes the source lacks
        only room."""
        return op.kind in _REMOVALS and self._users.get(_user(op), False)

    def hold_front(self, error: OSError) -> None:
        """Holds the change at the front, which the source has refused."""
        entry, now = self._entries.popleft(), trio.current_time()
        op = entry.op
        entry.answer = error.errno or errno.EIO
        entry.why = errno_words(error.errno)
        entry.refusal = f"{op.kind} {os.fsdecode(op.path)!r}: {entry.why}"
        self.refused += 1
        self._limiter.warning(
            f"drain refused {op.kind} {error.errno}",
            "the source refuses %s; it is kept here, with what depends on it, and tried again; the"
            " changes of other users are drained",
            entry.refusal,
        )
        if not self.held:
            self._retry_s = now + self._wakeups.begin_pause(self._retry_pause_s)
            self._retry_pause_s = min(2 * self._retry_pause_s, BACKOFF_S[1])
            self._try_s = max(0.0, now - self._released_s)
        entry.tries += 1
        entry.refused_s = min(entry.refused_s, now)
        is_long = now - entry.refused_s >= _ASIDE_S
        is_never = op.kind == "symlink" and error.errno in _NO_LINKS
        if is_never or (entry.tries >= _TRIES and is_long):
            self._put_aside(entry)
        self._hold(entry)

    def _hold(self, entry: Entry) -> None:
        """Holds a change behind all others that are held."""
        op = entry.op
        entry.is_held = True
        self.held.append(entry)
        if not entry.is_aside:
            entry.is_aside = _user(op) not in self._users and self._aside_subjects.meets(op)
        self._subjects.add(op)
        if entry.is_aside:
            self._aside_subjects.add(op)
        else:
            user = _user(op)
            lacks_room = entry.answer in FULL if entry.refusal else self._users.get(user, False)
            self._users[user] = lacks_room and self._users.get(user, True)

    def set_aside(self, seqs: Collection[int]) -> None:
        """Sets refused changes aside: from the next retry on they hold up no user."""
        for entry in self.entries():
            if entry.refusal and entry.seq in seqs:
                self._put_aside(entry)

    def _put_aside(self, entry: Entry) -> None:
        if entry.is_aside:
            return
        entry.is_aside = True
        log.warning(
            "set aside: %s; it is kept here and tried again every minute, and the other changes"
            " of its user are drained",
            entry.refusal,
        )
        self._aside.add(entry.seq)
        # Without this mark the next mount counts the tries anew.
        with suppress(OSError):
            self._mark_aside(self._aside)

    def sift(self) -> None:
        """Holds the changes at the front that depend on a held one. When the pause is over, puts
        the held changes back, to be tried again."""
        if not self.held:
            is_over = self._retry_pause_s != BACKOFF_S[0]
            if is_over and not (self._entries and self.front.refusal):
                log.info("draining to the source continues")
                self._retry_pause_s = BACKOFF_S[0]
        elif trio.current_time() >= self._retry_s or self._wakeups.is_hurried:
            for entry in self.held:
                entry.is_held = False
            self._entries.extendleft(reversed(self.held))
            self.held.clear()
            self.retries += 1
            self._released_s = trio.current_time()
            self._users.clear()
            self._subjects, self._aside_subjects = Subjects(), Subjects()
        else:
            while self._entries and self.is_behind(self.front):
                self._hold(self._entries.popleft())

    def retry_in_s(self) -> float:
        """Seconds until the next retry; infinite if nothing is held."""
        return max(0.0, self._retry_s - trio.current_time()) if self.held else math.inf

    # -- all of them -------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        """All waiting changes, held or not, in their order."""
        return chain(self.held, self._entries)

    @property
    def last_seq(self) -> int:
        """The sequence number of the last change that is not at the source; 0 if there is none."""
        last = self._entries or self.held
        return last[-1].seq if last else 0

    def path_of(self, number: int) -> bytes | None:
        """The path in the first waiting change of an object; None if there is none."""
        return next((entry.op.path for entry in self.entries() if entry.op.object == number), None)

    def source_paths(self, path: bytes) -> list[bytes]:
        """The paths at which the source may have the entry that has ``path`` on the mount: renames
        of it, or of directories above it, may wait. The earliest first, ``path`` last."""
        paths = [path]
        rename = self._last_rename(path, math.inf) if self._renames_to else None
        while rename is not None:
            path = rename.op.path + path[len(rename.op.to) :]
            paths.append(path)
            rename = self._last_rename(path, rename.seq)
        return paths[::-1]

    def _last_rename(self, path: bytes, before: float) -> Entry | None:
        """The last waiting rename to a path, or to a directory above it, with a sequence number
        below ``before``."""
        last: Entry | None = None
        for name in (path, *above(path)):
            renames = self._renames_to.get(name, ())
            at = bisect_left(renames, before, key=attrgetter("seq"))
            while at and renames[at - 1].is_moot:
                at -= 1
            if at and (last is None or renames[at - 1].seq > last.seq):
                last = renames[at - 1]
        return last

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
            for entry in self.entries()
            if entry.refusal and not entry.is_moot
        ]

    def refusal(self, *, is_aside: bool) -> str | None:
        """The first refusal as text: of the changes that are set aside, or of the others."""
        shown = chain(self.held, self.first(1))
        return next((it.refusal for it in shown if it.refusal and it.is_aside is is_aside), None)


def _user(op: Op) -> int | None:
    """The user whose changes keep their order, even if the source refuses one."""
    return op.by.uid if op.by is not None else None
