"""Asking the source on behalf of a reader: in a thread, with its errors turned into ours.

What the source answers badly, or not at all, is reported here once: a line in the log that is not
repeated for every read, a counter, and the trouble that ``status`` shows.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import SourceChanged, SourceError
from monarch.namespace.namespace import Namespace
from monarch.posix.acl import Acls
from monarch.posix.credentials import Credentials, credentials_of
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.telemetry.metrics import Metrics
from monarch.text import errno_words
from monarch.tiers.source import Source
from monarch.transfer.datapath_view import DatapathView
from monarch.types import Ino

log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")
T = TypeVar("T")

# How long an error of the source counts as present trouble. Seconds.
_TROUBLE_S = 60.0
# How often a call is checked before it is given up.
_LOOKS = 8
# How long a call may last before the source counts as one that hangs. Seconds.
_HANGS_S = 5.0
# What a source says of a file that is not where, or not what, it was.
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})

# What it answers a process that may not read a file: expected, and no cause for an alarm.
_REFUSED = frozenset({errno.EACCES, errno.EPERM})


@dataclass(frozen=True, slots=True)
class Caller:
    """The process whose call is answered, as the kernel tells of it."""

    pid: int
    uid: int
    gid: int


# Of the call that this task answers; None where it answers none, or one of which that is not told.
CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong with the source and since when; ``hangs``: it does not answer at all."""

    what: str
    since_ns: int
    hangs: bool


class SourceCalls:
    """Calls of ``source``; ``names`` tells the path of an inode for messages.

    With ``as_caller`` the source is asked with the rights of the process whose call is answered.
    A call is given up after ``timeout_s``, while ``run`` counts them. ``oldest_elsewhere_s`` tells
    how long a call that was not made here has waited for the source, 0 if there is none.
    """

    def __init__(
        self,
        source: Source,
        threads: ThreadPool,
        *,
        names: Namespace,
        metrics: Metrics,
        timeout_s: float | None,
        datapath: DatapathView,
        as_caller: bool = False,
    ) -> None:
        self.source = source
        self._as_caller = as_caller
        self._threads = threads
        self._names = names
        self._metrics = metrics
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._datapath = datapath
        # How often each call that waits has been checked.
        self._looks: dict[trio.CancelScope, int] = {}
        self._limiter = Limiter(60.0)
        # When the present errors began, when the last came (of the loop's clock), and what it was.
        self._failing: tuple[float, float, str] | None = None

    def trouble(self) -> Trouble | None:
        """That the source does not answer now, or has failed within the last minute."""
        oldest_s = max(self._threads.oldest_s(), self._datapath.oldest_wait_s())
        if oldest_s > _HANGS_S:
            return Trouble("does not answer", time.time_ns() - int(oldest_s * 1e9), hangs=True)
        now = trio.current_time()
        if self._failing is None or now - self._failing[1] > _TROUBLE_S:
            return None
        began, _, what = self._failing
        return Trouble(what, time.time_ns() - int((now - began) * 1e9), hangs=False)

    def caller(self) -> Credentials | None:
        """With whose rights the call that is answered now asks the source; None: the daemon's."""
        caller = CALLER.get() if self._as_caller else None
        # It waits for the answer, so its number is no other process's.
        return None if caller is None else credentials_of(caller.pid, caller.uid, caller.gid)

    async def call(self, ino: Ino, call: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """Run a call that asks the source about ``ino``. Raises SourceChanged, SourceError."""
        scope = trio.CancelScope()
        self._looks[scope] = 0
        try:
            who = self.caller()
            with scope:
                return await self._run(who, call, *args)
        except OSError as error:
            number = error.errno or errno.EIO
            if number in _REFUSED and who is None and _is_for_a_user():
                self._metrics.source_refused(ino)
            if number in _NOT_THERE:
                raise SourceChanged(f"{self._names.path_text(ino)}: {error.strerror}") from error
            raise self.failed(ino, number) from error
        finally:
            del self._looks[scope]
        raise self.failed(ino, errno.ETIMEDOUT)

    async def _run(
        self, who: Credentials | None, call: Callable[[Unpack[Args]], T], *args: Unpack[Args]
    ) -> T:
        if who is None:
            return await self._threads.run(call, *args)
        return await self._threads.run(self.source.acting, who, call, *args)

    async def run(self) -> None:
        """Give up the calls that have waited too long, until cancelled.

        Counted in looks, not on the clock: a daemon that was stopped did not wait meanwhile.
        """
        while True:
            await trio.sleep(self._timeout_s / _LOOKS)
            for scope in self._looks:
                self._looks[scope] += 1
                if self._looks[scope] > _LOOKS:
                    scope.cancel()

    async def status(self, ino: Ino, path: bytes) -> os.stat_result | None:
        """What the source tells of a path; None if it has no such name. Raises SourceError."""
        try:
            return await self.call(ino, self.source.status, path)
        except SourceChanged as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ESTALE:
                # A name is looked up anew, so it is the source as a whole that is not there.
                raise self.failed(ino, errno.ESTALE) from error
            return None

    async def acls(self, ino: Ino, path: bytes) -> Acls:
        """The access control lists of an entry. Raises SourceError, ESTALE if it has gone."""
        try:
            return await self.call(ino, self.source.acls, path)
        except SourceChanged as error:
            raise SourceError(f"{self._names.path_text(ino)}: gone", errno=errno.ESTALE) from error

    def timed_out_elsewhere(self, callers: int) -> None:
        """Count and log that ``callers`` source calls outside the event loop were given up."""
        for _ in range(callers):
            self._note(errno.ETIMEDOUT, "a file")

    def failed(self, ino: Ino, number: int) -> SourceError:
        """Count and log that the source answered with ``number``; the error to raise."""
        told = self._names.path_text(ino)
        self._note(number, told)
        return SourceError(f"{told}: {os.strerror(number)}", errno=number)

    def _note(self, number: int, told: str) -> None:
        words = errno_words(number)
        self._metrics.error(f"source-{errno.errorcode.get(number, 'error')}")
        if number not in _REFUSED:
            now = trio.current_time()
            goes_on = self._failing is not None and now - self._failing[1] <= _TROUBLE_S
            began = self._failing[0] if self._failing is not None and goes_on else now
            self._failing = (began, now, words)
        self._limiter.warning(
            log,
            f"source {number}",
            "source: %s: %s; the caller got that error",
            told,
            words,
        )


def _is_for_a_user() -> bool:
    """Whether the call that is answered is one of a process that does not run as root."""
    caller = CALLER.get()
    return caller is not None and caller.uid != 0
