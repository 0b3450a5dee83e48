"""The queue of all changes that are not at the source yet, in the order in which they were made.

If the source refuses a change, because of its path or its user, the change is *held*. Later changes
of the same user, of the same files and of the same paths are held with it. All others are made.
Held changes are tried again, in their order, after a pause. A change that is refused repeatedly is
*set aside*: then only changes of the same files and paths wait for it, and the other changes of its
user are made.

If the source has no room for a change, and so for no user, the change is held with all later ones,
and is no refused change. Removals go ahead of changes that lack only room, refused or not.
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
from itertools import chain, islice
from operator import attrgetter

import trio

from monarch.telemetry.log import Limiter
from monarch.text import errno_words
from monarch.writeback.conflicts import PendingNames, Subjects
from monarch.writeback.op import Op, above
from monarch.writeback.queue_entry import Entry, Refusal
from monarch.writeback.tier_objects import FULL
from monarch.writeback.wakeups import BACKOFF_S, Wakeups

log = logging.getLogger(__name__)

# A change is set aside after this number of refusals, over at least this time in seconds.
_TRIES = 8
_ASIDE_S = 600.0
# The most changes that are held in one step of the event loop.
_SIFTED = 1024
# What gives room at the source.
REMOVALS = frozenset({"unlink", "rmdir"})
# The errors of a source without symbolic links: it will never accept one.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})


class DrainQueue:
    """Belongs to the event loop. Changes that are ``held`` are before all others.

    ``waiting_bytes`` is the size of all waiting contents, in bytes; several contents of one file
    are added. ``last_synced`` is the sequence number of the last content that a process has synced.
    ``pending`` has the names of the waiting changes. ``retries`` counts how often all held changes
    were released to be tried again, ``refused`` counts the refusals. ``is_full``: the source has no
    room for a held change, and so for no user. ``lacking`` are the objects of the changes for which
    there is no room. ``mark_aside`` records in the journal the sequence numbers of the changes that
    are set aside; ``is_skipped`` returns whether a content needs nothing of the source.
    """

    def __init__(
        self,
        wakeups: Wakeups,
        mark_aside: Callable[[Collection[int]], object],
        is_skipped: Callable[[Entry], bool],
    ) -> None:
        self.held: list[Entry] = []
        self.waiting_bytes = 0
        self.last_synced = 0
        self.pending = PendingNames()
        self.retries = 0
        self.refused = 0
        self.is_full = False
        self.lacking: set[int] = set()
        self._entries: deque[Entry] = deque()
        # The waiting renames by their new names, each list by sequence numbers.
        self._renames_to: dict[bytes, list[Entry]] = {}
        self._wakeups = wakeups
        self._mark_aside = mark_aside
        self._is_skipped = is_skipped
        # The users of the held changes: whether the source lacks only room for them. The files and
        # paths of the held changes; those of the changes that are set aside.
        self._users: dict[int | None, bool] = {}
        self._subjects = Subjects()
        self._aside_subjects = Subjects()
        # The paths that changes were to remove which were held before the last retry, and the
        # directories above them.
        self._removing: set[bytes] = set()
        # Whether the source has had no room even for a removal.
        self._takes_nothing = False
        # The sequence numbers that the journal has as set aside.
        self._aside: set[int] = set()
        self._retry_s = math.inf
        self._retry_pause_s = BACKOFF_S[0]
        # When the held changes were released last, when the first one was held again, and how long
        # it took then until all were (``_is_sifted``).
        self._released_s = math.inf
        self._held_s = -math.inf
        self._try_s = 0.0
        self._is_sifted = True
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
        source lacks room for changes of its user, or of all: it may make that room."""
        if entry.is_moot or not self.held:
            return False
        is_late = _user(entry.op) in self._users or self.is_full
        if is_late and self._lacks_only_room(entry.op):
            is_late = not self._goes_ahead(entry)
        return is_late or self._subjects.meets(entry.op)

    def _lacks_only_room(self, op: Op) -> bool:
        """Whether the held changes of a user lack only room at the source."""
        return self._users.get(_user(op), self.is_full) and not self._takes_nothing

    def _goes_ahead(self, entry: Entry) -> bool:
        """Whether a change may give room, or must be made before one that may."""
        op = entry.op
        match op.kind:
            case "unlink" | "rmdir":
                return not self._subjects.may_permit(op)
            case "gone":
                return True
            case "content":
                return self._is_skipped(entry)
            case "create" | "take" | "through":
                return op.path in self._removing
            case "attr" | "xattr":
                return op.path in self._removing and not (
                    self._subjects.may_permit(op) or self._subjects.are_beneath(op.path)
                )
        return False

    def retry_soon(self, op: Op) -> None:
        """A removal may have made room, or changed what waits: tries the held changes soon."""
        if self._lacks_only_room(op):
            # Further removals may follow, and a try may copy many bytes: both get their time.
            pause_s = max(BACKOFF_S[0], self._try_s)
            self._retry_s = min(self._retry_s, trio.current_time() + pause_s)

    def hold_front(self, error: OSError, *, is_full: bool = False) -> None:
        """Holds the change at the front, which the source has refused. ``is_full``: it has no room
        for any user."""
        entry = self._entries.popleft()
        entry.answer, entry.has_no_room = error.errno or errno.EIO, is_full
        if not self.held:
            self._held_s = now = trio.current_time()
            self._is_sifted = False
            self._retry_s = now + self._wakeups.begin_pause(self._retry_pause_s)
            self._retry_pause_s = min(2 * self._retry_pause_s, BACKOFF_S[1])
        if is_full:
            self.is_full = True
            self._takes_nothing |= entry.op.kind in REMOVALS
            if not entry.is_aside:
                # An earlier refusal is over: the source has got as far as to look for room.
                entry.refusal = entry.why = ""
        else:
            self._note_refusal(entry, error)
        if entry.answer in FULL:
            self.lacking.add(entry.op.object)
        self._hold(entry)

    def _note_refusal(self, entry: Entry, error: OSError) -> None:
        op, now = entry.op, trio.current_time()
        entry.why = errno_words(error.errno)
        entry.refusal = f"{op.kind} {os.fsdecode(op.path)!r}: {entry.why}"
        self.refused += 1
        self._limiter.warning(
            f"drain refused {op.kind} {error.errno}",
            "the source refuses %s; it is kept here, with what depends on it, and tried again; the"
            " changes of other users are drained",
            entry.refusal,
        )
        entry.tries += 1
        entry.refused_s = min(entry.refused_s, now)
        is_long = now - entry.refused_s >= _ASIDE_S
        is_never = op.kind == "symlink" and error.errno in _NO_LINKS
        if is_never or (entry.tries >= _TRIES and is_long):
            self._put_aside(entry)

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
            lacks_room = entry.answer in FULL if entry.refusal else self._lacks_only_room(op)
            self._users[user] = lacks_room and self._users.get(user, True)
        entry.waits_for_room = self.is_full and not (entry.refusal or entry.is_aside)

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

    def sift(self) -> bool:
        """Holds the changes at the front that depend on a held one, a limited number of them;
        returns whether there may be more. When the pause is over, puts the held changes back, to be
        tried again."""
        if not self.held:
            is_over = self._retry_pause_s != BACKOFF_S[0]
            if is_over and not (self._entries and (self.front.refusal or self.front.has_no_room)):
                log.info("draining to the source continues")
                self._retry_pause_s = BACKOFF_S[0]
        elif self.retry_in_s() <= 0:
            self._release()
        else:
            for _ in range(_SIFTED):
                if not (self._entries and self.is_behind(self.front)):
                    if not self._is_sifted:
                        self._is_sifted = True
                        self._try_s = max(0.0, trio.current_time() - self._released_s)
                    return False
                self._hold(self._entries.popleft())
            return True
        return False

    def _release(self) -> None:
        self._removing.clear()
        for entry in self.held:
            entry.is_held = entry.waits_for_room = False
            if entry.op.kind in REMOVALS:
                self._removing.update((entry.op.path, *above(entry.op.path)))
        self._entries.extendleft(reversed(self.held))
        self.held.clear()
        self.retries += 1
        self._released_s = trio.current_time()
        self._users.clear()
        self._subjects, self._aside_subjects = Subjects(), Subjects()
        self.is_full = self._takes_nothing = False
        self.lacking.clear()

    def retry_in_s(self) -> float:
        """Seconds until the next retry; infinite if nothing is held. Callers that wait bring it
        forward; at a full source, where many may come, to one second after the last try."""
        if not self.held:
            return math.inf
        retry_s = self._retry_s
        if self._wakeups.is_hurried:
            retry_s = min(retry_s, self._held_s + self.is_full * BACKOFF_S[0])
        return max(0.0, retry_s - trio.current_time())

    # -- all of them -------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        """All waiting changes, held or not, in their order."""
        return chain(self.held, self._entries)

    def not_refused(self) -> Iterator[Entry]:
        """The waiting changes but for those that the source refuses, and that depend on these."""
        return chain((it for it in self.held if it.waits_for_room), self._entries)

    def held_entry(self, seq: int) -> Entry | None:
        """The held change with a sequence number; None if that is not held."""
        at = bisect_left(self.held, seq, key=attrgetter("seq"))
        return self.held[at] if at < len(self.held) and self.held[at].seq == seq else None

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
