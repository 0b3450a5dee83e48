"""Calls of the source for a process that reads: in a thread, with Monarch's errors.

A failed call is reported here in three places: a line in the log, limited to one a minute for each
errno; a counter; and the trouble that ``status`` shows.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import Refused, SourceChanged, SourceError
from monarch.namespace.listing import Named
from monarch.namespace.namespace import Namespace
from monarch.posix.acl import Acls
from monarch.posix.credentials import Credentials, credentials_of
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.telemetry.metrics import Metrics
from monarch.text import errno_words
from monarch.tiers.source import NOT_THERE, Source, at_one_of
from monarch.transfer.source_load import DatapathView
from monarch.types import Ino

log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")
T = TypeVar("T")

# How long an error of the source counts as present trouble, in seconds.
_TROUBLE_S = 60.0
# The number of checks that a call outlasts before it is given up.
_CHECKS = 8
# How long a call may last before the source is reported as hanging, in seconds.
_HANGS_S = 5.0
# The errors for a process that may not read a file. They are expected and raise no alarm.
_REFUSED = frozenset({errno.EACCES, errno.EPERM})


@dataclass(frozen=True, slots=True)
class Caller:
    """The process whose call is answered: the numbers in the kernel's request."""

    pid: int
    uid: int
    gid: int


# The caller of the request that this task answers. None if the task answers no request, or if the
# request does not name its caller.
CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault of the source and its begin; ``hangs``: the source does not answer at all."""

    what: str
    since_ns: int
    hangs: bool


@dataclass(slots=True)
class _Waiting:
    """A call for ``ino``, and the number of checks that it has outlasted."""

    ino: Ino
    checks: int = 0


class SourceCalls:
    """Calls of ``source``; ``names`` returns the path of an inode for messages.

    With ``as_caller`` the source is asked with the rights of the process whose call is answered.
    While ``run`` runs, a call is given up after ``timeout_s``; None: never. ``datapath`` returns
    how long its own calls have waited for the source.
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
        self._waiting: dict[trio.CancelScope, _Waiting] = {}
        self._called = trio.Event()
        self._limiter = Limiter(log)
        # The times of the first and the last of the present errors, by the event loop's clock, and
        # the words of the last.
        self._failing: tuple[float, float, str] | None = None

    def trouble(self) -> Trouble | None:
        """The present fault: the source does not answer now, or has failed within a minute."""
        oldest_s = max(self._threads.oldest_s(), self._datapath.oldest_wait_s())
        if oldest_s > _HANGS_S:
            return Trouble("does not answer", time.time_ns() - int(oldest_s * 1e9), hangs=True)
        now = trio.current_time()
        if self._failing is None or now - self._failing[1] > _TROUBLE_S:
            return None
        began, _, what = self._failing
        return Trouble(what, time.time_ns() - int((now - began) * 1e9), hangs=False)

    def caller(self) -> Credentials | None:
        """The credentials for calls of the source now; None: the daemon's own."""
        caller = CALLER.get() if self._as_caller else None
        # The caller waits for the answer, so its process number was not given to another process.
        return None if caller is None else credentials_of(caller.pid, caller.uid, caller.gid)

    async def call(self, ino: Ino, call: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """Runs a call of the source for ``ino``; returns its result. Raises SourceChanged if the
        file was removed or replaced, SourceError for other errors."""
        scope = trio.CancelScope()
        self._waiting[scope] = _Waiting(ino)
        self._called.set()
        try:
            rights = self.caller()
            with scope:
                if rights is None:
                    return await self._threads.run(call, *args)
                return await self._threads.run(self.source.acting, rights, call, *args)
        except OSError as error:
            number = error.errno or errno.EIO
            asker = CALLER.get()
            if number in _REFUSED and rights is None and asker is not None and asker.uid != 0:
                self._metrics.source_refused(ino)
            if number in NOT_THERE:
                raise SourceChanged(f"{self._names.path_text(ino)}: {error.strerror}") from error
            raise self.failed(ino, number) from error
        finally:
            del self._waiting[scope]
        raise self.failed(ino, errno.ETIMEDOUT)

    async def at(
        self, ino: Ino, call: Callable[[bytes, Unpack[Args]], T], *args: Unpack[Args]
    ) -> T:
        """The same for a call that gets the path of ``ino`` at the source: it is made for each path
        that the file may have there, until it succeeds."""
        paths = self._names.source_paths(ino)
        while True:
            try:
                return await self.call(ino, at_one_of, paths, call, *args)
            except SourceChanged:
                before, paths = paths, self._paths_now(ino, paths)
                if paths == before:
                    raise

    async def wait(self, ino: Ino, done: trio.Event) -> None:
        """Waits for a call for ``ino`` that another task makes, as long as for one of its own.
        Raises SourceError."""
        scope = trio.CancelScope()
        self._waiting[scope] = _Waiting(ino)
        self._called.set()
        try:
            with scope:
                await done.wait()
                return
        finally:
            del self._waiting[scope]
        raise self.failed(ino, errno.ETIMEDOUT)

    async def run(self) -> None:
        """Gives up the calls that have waited longer than the timeout, until cancelled. The time is
        counted in checks: that in which the daemon was stopped does not count, and that in which
        other nodes are asked for a file is no wait for the source."""
        while True:
            if not self._waiting:
                self._called = trio.Event()
                await self._called.wait()
            await trio.sleep(self._timeout_s / _CHECKS)
            for scope, waiting in self._waiting.items():
                waiting.checks += not self.source.asks_others(waiting.ino)
                if waiting.checks > _CHECKS:
                    scope.cancel()

    async def status(self, ino: Ino, path: bytes) -> os.stat_result | None:
        """The status of a path at the source; None if it does not exist. Raises SourceError."""
        try:
            return await self.call(ino, self.source.status, path)
        except SourceChanged as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ESTALE:
                # Each call looks the name up anew, so ESTALE means that the whole source is gone.
                raise self.failed(ino, errno.ESTALE) from error
            return None

    async def status_of(
        self, ino: Ino, source_ino: int, named: Named | None = None
    ) -> os.stat_result | None:
        """The status of an inode, which has the number ``source_ino`` at the source; if the source
        has it at none of its paths, that of another file there, or None. With ``named``, a
        directory and a name in it, only this name of the file counts. Raises SourceError."""
        paths = self._names.source_paths(ino, named)
        while True:
            found = None
            for path in dict.fromkeys(paths):
                status = await self.status(ino, path)
                if status is not None:
                    found = status
                    if status.st_ino == source_ino:
                        return found
            before, paths = paths, self._paths_now(ino, paths, named)
            if paths == before:
                return found

    def _paths_now(self, ino: Ino, paths: list[bytes], named: Named | None = None) -> list[bytes]:
        """The present paths of an inode at the source; ``paths`` if it has no name any more."""
        with suppress(Refused):
            return self._names.source_paths(ino, named)
        return paths

    async def acls(self, ino: Ino) -> Acls:
        """The access control lists of an entry. Raises SourceError, ESTALE if it was removed."""
        try:
            return await self.at(ino, self.source.acls)
        except SourceChanged as error:
            raise SourceError(f"{self._names.path_text(ino)}: gone", errno=errno.ESTALE) from error

    def timed_out_elsewhere(self, callers: int) -> None:
        """Counts and logs that ``callers`` source calls outside the event loop were given up."""
        for _ in range(callers):
            self._note(errno.ETIMEDOUT, "a file")

    def failed(self, ino: Ino, number: int) -> SourceError:
        """Counts and logs that the source answered with errno ``number``; returns the error to
        raise."""
        path_text = self._names.path_text(ino)
        self._note(number, path_text)
        return SourceError(f"{path_text}: {os.strerror(number)}", errno=number)

    def _note(self, number: int, path_text: str) -> None:
        words = errno_words(number)
        self._metrics.error(f"source-{errno.errorcode.get(number, 'error')}")
        if number not in _REFUSED:
            now = trio.current_time()
            is_same = self._failing is not None and now - self._failing[1] <= _TROUBLE_S
            began = self._failing[0] if self._failing is not None and is_same else now
            self._failing = (began, now, words)
        # The daemon compares files with the source by itself, too, and no process waits then.
        message = "source: %s: %s; any caller that waited for it got that error"
        self._limiter.warning(f"source {number}", message, path_text, words)
