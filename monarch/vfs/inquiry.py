"""Asking the source on behalf of a reader: in a thread, with its errors turned into ours.

What the source answers badly is told here once: a line in the log that is not repeated for every
read, a counter, and the trouble that ``status`` shows.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Callable
from typing import TypeVar

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import MonarchError, SourceChanged, SourceError
from monarch.log import Limiter
from monarch.metrics import Metrics
from monarch.namespace.overlay import Namespace
from monarch.threads import Threads
from monarch.tiers.source import Source
from monarch.types import Ino

log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")
T = TypeVar("T")

# How long an error of the source counts as trouble that goes on. Seconds.
_TROUBLE_S = 120.0
# What a source says of a file that is not where, or not what, it was.
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})


class Inquiry:
    """Calls of ``source``; ``names`` tells the path of an inode for messages."""

    def __init__(
        self, source: Source, threads: Threads, *, names: Namespace, metrics: Metrics
    ) -> None:
        self.source = source
        self._threads = threads
        self._names = names
        self._metrics = metrics
        self._limiter = Limiter(60.0)
        self._trouble = (-math.inf, "")

    @property
    def trouble(self) -> str:
        """What the source answered if it failed in the last minutes, else empty."""
        when, what = self._trouble
        return what if trio.current_time() - when < _TROUBLE_S else ""

    async def ask(self, ino: Ino, call: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """Run a call that asks the source about ``ino``. Raises SourceChanged, SourceError."""
        try:
            return await self._threads.run(call, *args)
        except OSError as error:
            number = error.errno or errno.EIO
            if number in _NOT_THERE:
                raise SourceChanged(f"{self.told(ino)}: {error.strerror}") from error
            raise self.failed(ino, number) from error

    async def status(self, ino: Ino, path: bytes) -> os.stat_result | None:
        """What the source tells of a path; None if it has no such name. Raises SourceError."""
        try:
            return await self.ask(ino, self.source.status, path)
        except SourceChanged as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ESTALE:
                # A name is looked up anew, so it is the source as a whole that is not there.
                raise self.failed(ino, errno.ESTALE) from error
            return None

    def told(self, ino: Ino) -> str:
        """The path of ``ino`` for a message; a name may hold any byte."""
        try:
            return repr(os.fsdecode(self._names.path(ino)))
        except MonarchError:
            return f"inode {ino}"

    def failed(self, ino: Ino, number: int) -> SourceError:
        """Count and log that the source answered with ``number``; the error to raise."""
        told, words = self.told(ino), os.strerror(number)
        self._metrics.error(f"source-{errno.errorcode.get(number, 'error')}")
        self._trouble = (trio.current_time(), words)
        self._limiter.warning(log, f"source {number}", "source: %s: %s", told, words)
        return SourceError(f"{told}: {words}", errno=number)
