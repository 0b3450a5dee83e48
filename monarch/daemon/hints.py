"""Receives hints: checks what their processes may announce, and ends the orders of processes that
have ended.

A descriptor of the mount has no end that the daemon sees: the kernel opens directories, and files
with ``open: none``, without a request. So /proc is read once a second.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import trio

from monarch.control.registry import process_started
from monarch.daemon.measuring import Measuring
from monarch.errors import MonarchError, Refused
from monarch.foresight.announced import Announcements, Announcer, OrderKey
from monarch.foresight.messages import (
    NO_DESCRIPTOR,
    Begin,
    Count,
    Limit,
    Piece,
    Progress,
    decode,
)
from monarch.namespace.access import ReadAccess
from monarch.namespace.snapshot import Snapshot
from monarch.posix.credentials import Credentials, credentials_of
from monarch.posix.processes import link_of, process_of
from monarch.telemetry.log import Limiter
from monarch.text import counted, errno_words
from monarch.transfer.source_calls import Caller

log = logging.getLogger(__name__)

_LOOK_S = 1.0
# Pieces of orders that are handled between two looks, for one user and for all. A piece takes about
# a millisecond, in which no other request is answered.
_MOST_PIECES, _MOST_PIECES_OF_ALL = 128, 256
# The processor time of all messages between two looks, in seconds. A ``begin`` reads the groups of
# its process: 65,536 groups, as in a user namespace, take tens of milliseconds.
_MOST_S, _MOST_S_OF_ALL = 0.2, 0.4
# What a user may read is kept for so many sets of groups of one user, and of all: up to 4 MB each.
_MOST_ACCESS, _MOST_ACCESS_OF_ALL = 8, 64
# After this time without a message or an open, an order of a process that cannot be seen ends.
_IDLE_S = 600.0
# The users whose refusals have lines of their own in the log: one person may have 65,536 in a user
# namespace.
_LOG_KEYS = 64
# The key of the line about messages that were refused by the datapath.
_WAITED = "waited"
# After this time without an open of the order, its files in the window make room for others.
_PAUSED_S = 60.0


@dataclass(eq=False)
class _Watched:
    """An order whose end must be noticed. ``path`` is that of the descriptor, ``reports`` the
    messages about the position of the reader."""

    access: ReadAccess
    descriptor: int
    path: str
    reports: int = 0
    activity: int = -1
    since_s: float = field(default_factory=trio.current_time)
    reads: int = -1
    read_s: float = field(default_factory=trio.current_time)


class Hints:
    """Belongs to the event loop. ``wake`` is called after each message that was accepted: there
    may be further files to fetch. ``catch_up`` is called before each message: opens that precede it
    may not be counted yet. ``refused`` as ``Datapath.refused_hints``."""

    def __init__(
        self,
        snapshot: Snapshot,
        announcements: Announcements,
        measuring: Measuring,
        wake: Callable[[], None] = lambda: None,
        catch_up: Callable[[], None] = lambda: None,
        refused: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
    ) -> None:
        self.measuring = measuring
        self._snapshot = snapshot
        self._announcements = announcements
        self._wake = wake
        self._catch_up = catch_up
        self._refused = refused
        self._watched: dict[OrderKey, _Watched] = {}
        # What the users of orders may read, one for all orders of a user: it keeps the answers for
        # many directories.
        self._access: WeakValueDictionary[Credentials, ReadAccess] = WeakValueDictionary()
        self._limiter = Limiter(log)
        self._pieces: Counter[int] = Counter()
        # The processor time of the messages of each user, and of all, since the last look.
        self._spent_s: dict[int, float] = {}
        self._all_spent_s = 0.0

    def receive(self, message: bytes, caller: Caller) -> int:
        """Answers a message: of a piece of an order, the number of entries that were kept; of a
        request for a count, that; else 0. Raises Refused: EBUSY for too many pieces or too much
        processor time, ESRCH if the process has ended, and as ``Measuring.receive``."""
        began_s = time.thread_time()
        try:
            if self._spent_s.get(caller.uid, 0) >= _MOST_S or self._all_spent_s >= _MOST_S_OF_ALL:
                raise Refused(errno.EBUSY)
            return self._receive(message, caller)
        except MonarchError as error:
            self._announcements.refused(1)
            # A process that was killed needs no line.
            if error.errno != errno.ESRCH:
                self._limiter.warning(
                    (caller.uid % _LOG_KEYS, error.errno),
                    "a hint of user %d, process %d, was refused: %s",
                    caller.uid,
                    caller.pid,
                    errno_words(error.errno),
                )
            raise
        finally:
            spent_s = time.thread_time() - began_s
            self._all_spent_s += spent_s
            self._spent_s[caller.uid] = self._spent_s.get(caller.uid, 0) + spent_s

    def _receive(self, message: bytes, caller: Caller) -> int:
        said = decode(message)
        self._catch_up()
        try:
            process = process_of(caller.pid)
        except ProcessLookupError:
            # It was killed while the message waited.
            raise Refused(errno.ESRCH) from None
        if isinstance(said, Limit | Count):
            return self.measuring.receive(said, caller, process)
        try:
            started = process_started(process) if process else 0
        except OSError:
            # The daemon has no free descriptor.
            raise Refused(errno.EBUSY) from None
        if started is None:
            raise Refused(errno.ESRCH)
        announcer = Announcer(caller.uid, process, started)
        announcements, kept = self._announcements, 0
        if isinstance(said, Begin):
            self._begin(announcer, said, caller)
        elif isinstance(said, Piece):
            watched = self._watched[announcements.key_of(announcer, said.order)]
            pieces = self._pieces
            if pieces[caller.uid] >= _MOST_PIECES or sum(pieces.values()) >= _MOST_PIECES_OF_ALL:
                raise Refused(errno.EBUSY)
            pieces[caller.uid] += 1
            kept = announcements.extend(
                announcer, Piece(said.order, said.position, watched.access.readable(said.inos))
            )
        elif isinstance(said, Progress):
            announcements.progress(announcer, said.order, said.position)
            self._watched[announcements.key_of(announcer, said.order)].reports += 1
        else:
            self._end(announcements.key_of(announcer, said.order))
        self._wake()
        return kept

    def _begin(self, announcer: Announcer, begin: Begin, caller: Caller) -> None:
        descriptor, path = begin.descriptor, ""
        if descriptor != NO_DESCRIPTOR and announcer.pid:
            try:
                path = link_of(announcer.pid, descriptor)
            except FileNotFoundError:
                raise Refused(errno.EINVAL) from None
            except OSError:
                descriptor = NO_DESCRIPTOR
        by = credentials_of(caller.pid, caller.uid, caller.gid)
        access = self._access.get(by)
        if access is None and (
            len(self._access) >= _MOST_ACCESS_OF_ALL
            or sum(each.uid == by.uid for each in self._access) >= _MOST_ACCESS
        ):
            raise Refused(errno.ENOSPC)
        key = self._announcements.begin(announcer, begin.order, begin.entries)
        access = access or ReadAccess(self._snapshot, by)
        self._access[by] = access
        self._watched[key] = _Watched(access, descriptor, path)

    def _end(self, key: OrderKey) -> None:
        self._announcements.end(key)
        self._watched.pop(key, None)

    async def run(self) -> None:
        """Ends orders once a second: see the module's description."""
        while True:
            await trio.sleep(_LOOK_S)
            self._pieces.clear()
            self._spent_s.clear()
            self._all_spent_s = 0.0
            self._note_refused()
            for key, watched in list(self._watched.items()):
                if key not in self._announcements or self._is_over(key, watched):
                    self._end(key)
                else:
                    self._mark(key, watched)

    def _note_refused(self) -> None:
        """Counts the messages that have not come here, since too many waited."""
        count, uid, pid = self._refused()
        if count:
            self._announcements.refused(count)
            words = "a hint of user %d, process %d, was refused, as %s: too many waited"
            others = counted(count - 1, "other was", "others were")
            self._limiter.warning(_WAITED, words, uid, pid, others)

    def _mark(self, key: OrderKey, watched: _Watched) -> None:
        is_reporting = watched.reports and not key.pid
        reads = watched.reports if is_reporting else self._announcements.reads(key)
        now = trio.current_time()
        if reads != watched.reads:
            watched.reads, watched.read_s = reads, now
        self._announcements.mark(key, is_idle=now - watched.read_s > _PAUSED_S)

    def _is_over(self, key: OrderKey, watched: _Watched) -> bool:
        if not key.pid:
            return self._is_idle(key, watched)
        try:
            if process_started(key.pid) != key.started:
                return True
            is_watched = watched.descriptor != NO_DESCRIPTOR
            return is_watched and link_of(key.pid, watched.descriptor) != watched.path
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def _is_idle(self, key: OrderKey, watched: _Watched) -> bool:
        # Opens may be those of another job, which has the same files: the next run of the same one.
        activity = watched.reports or self._announcements.activity(key)
        now = trio.current_time()
        if activity != watched.activity:
            watched.activity, watched.since_s = activity, now
        return now - watched.since_s > _IDLE_S
