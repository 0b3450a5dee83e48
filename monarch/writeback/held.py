"""The changes that the source refuses, and the changes that wait because they depend on them.

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
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

import trio

from monarch.telemetry.log import Limiter
from monarch.text import errno_words
from monarch.writeback.conflicts import PathSet
from monarch.writeback.entry import Entry
from monarch.writeback.op import Op, above
from monarch.writeback.wakeups import BACKOFF_S, Wakeups

log = logging.getLogger(__name__)

# A change is set aside after this number of refusals, over at least this time in seconds.
_TRIES = 8
_ASIDE_S = 600.0
# The errors of a source without symbolic links: it will never accept one.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused change: its ``kind``, its ``path``, and the reason ``why``.

    ``is_aside``: the other changes of its user do not wait for it.
    """

    seq: int
    kind: str
    path: bytes
    why: str
    tries: int
    is_aside: bool


class _Subjects:
    """The files and paths of some changes."""

    def __init__(self) -> None:
        self._objects: set[int] = set()
        self._paths = PathSet()
        self._directories: set[bytes] = set()

    def add(self, op: Op) -> None:
        # The file that a rename replaces must stay known until the rename is done.
        self._objects |= {op.object, op.over_object} - {0}
        if op.names() != (b"",):
            self._paths.add(op)
        if op.kind == "mkdir":
            self._directories.add(op.path)

    def meets(self, op: Op) -> bool:
        """Whether a change has one of these files or paths, or a path above or beneath one."""
        if {op.object, op.over_object} & self._objects:
            return True
        if op.names() == (b"",):
            return False
        return self._paths.conflicts_with(op) or any(
            directory in self._directories for path in op.names() for directory in above(path)
        )


class HeldChanges:
    """Belongs to the event loop. ``entries`` are the held changes in their order. ``retries``
    counts how often all of them were released to be tried again, ``refused`` counts the refusals.
    ``mark_aside`` records in the journal the sequence numbers of the changes that are set aside."""

    def __init__(self, wakeups: Wakeups, mark_aside: Callable[[Collection[int]], object]) -> None:
        self.entries: list[Entry] = []
        self.retries = 0
        self.refused = 0
        self._wakeups = wakeups
        self._mark_aside = mark_aside
        self._users: set[int | None] = set()
        self._subjects = _Subjects()
        # The files and paths of the changes that are set aside.
        self._aside_subjects = _Subjects()
        # The sequence numbers that the journal has as set aside.
        self._aside: set[int] = set()
        self._retry_s = math.inf
        self._retry_pause_s = BACKOFF_S[0]
        self._limiter = Limiter(60.0)

    def load(self, aside: Collection[int]) -> None:
        """Takes over the sequence numbers of changes that an earlier mount has set aside."""
        self._aside = set(aside)

    def forget(self, seq: int) -> None:
        """Removes a change that was made from those that are set aside."""
        self._aside.discard(seq)

    def is_behind(self, entry: Entry) -> bool:
        """Whether a change depends on one that is held."""
        if entry.is_moot or not self.entries:
            return False
        return _user(entry.op) in self._users or self._subjects.meets(entry.op)

    def refuse(self, entry: Entry, error: OSError) -> None:
        """Holds a change that the source has refused."""
        op, now = entry.op, trio.current_time()
        entry.answer = error.errno or errno.EIO
        entry.why = errno_words(error.errno)
        entry.refusal = f"{op.kind} {os.fsdecode(op.path)!r}: {entry.why}"
        self.refused += 1
        self._limiter.warning(
            log,
            f"drain refused {op.kind} {error.errno}",
            "the source refuses %s; it is kept here, with what depends on it, and tried again; the"
            " changes of other users are drained",
            entry.refusal,
        )
        if not self.entries:
            self._retry_s = now + self._wakeups.begin_pause(self._retry_pause_s)
            self._retry_pause_s = min(2 * self._retry_pause_s, BACKOFF_S[1])
        entry.tries += 1
        entry.refused_s = min(entry.refused_s, now)
        is_long = now - entry.refused_s >= _ASIDE_S
        is_never = op.kind == "symlink" and error.errno in _NO_LINKS
        if is_never or (entry.tries >= _TRIES and is_long):
            self.put_aside(entry)
        self.add(entry)

    def put_aside(self, entry: Entry) -> None:
        """Sets a change aside: other changes of the same user go first from the next retry on."""
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

    def add(self, entry: Entry) -> None:
        """Holds a change behind all others that are held."""
        op = entry.op
        entry.is_held = True
        self.entries.append(entry)
        if not entry.is_aside:
            entry.is_aside = _user(op) not in self._users and self._aside_subjects.meets(op)
        if not entry.is_aside:
            self._users.add(_user(op))
        self._subjects.add(op)
        if entry.is_aside:
            self._aside_subjects.add(op)

    def is_due(self) -> bool:
        """Whether the pause before the next retry is over."""
        return trio.current_time() >= self._retry_s or self._wakeups.is_hurried

    def retry_in_s(self) -> float:
        """Seconds until the next retry; infinite if nothing is held."""
        return max(0.0, self._retry_s - trio.current_time()) if self.entries else math.inf

    def release(self) -> list[Entry]:
        """Releases all held changes, to be tried again."""
        released, self.entries = self.entries, []
        for entry in released:
            entry.is_held = False
        self.retries += 1
        self._users.clear()
        self._subjects, self._aside_subjects = _Subjects(), _Subjects()
        return released

    def end_retries(self) -> None:
        """Call this when the source has accepted all changes that it had refused."""
        if self._retry_pause_s != BACKOFF_S[0]:
            log.info("draining to the source continues")
            self._retry_pause_s = BACKOFF_S[0]


def _user(op: Op) -> int | None:
    """The user whose changes keep their order, even if the source refuses one."""
    return op.by.uid if op.by is not None else None
