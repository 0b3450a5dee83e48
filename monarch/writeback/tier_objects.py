"""The objects of the absorbing tier for the event loop: what waits for the disk runs in threads."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import Refused
from monarch.posix.thread_pool import ThreadPool
from monarch.text import errno_words
from monarch.writeback.objects import Objects
from monarch.writeback.spares import Spares

Args = TypeVarTuple("Args")
T = TypeVar("T")

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# How many objects are closed in one hop to a thread; fewer when that is next due.
_CLOSED_AT_ONCE = 16
# Errors that are the disk's fault and not the caller's.
_OF_THE_DISK = frozenset({errno.EIO, errno.EROFS, errno.EUCLEAN})


class TierObjects:
    """``on_disk`` are the objects. ``failures`` counts the calls and changes that the disk refused;
    ``failure`` says why the last one was.

    All calls raise Refused with the errno of the disk.
    """

    def __init__(
        self, on_disk: Objects, threads: ThreadPool, sync_threads: ThreadPool, next_object: int
    ) -> None:
        self.on_disk = on_disk
        self.failures = 0
        self.failure = ""
        self._threads = threads
        # As many fsyncs as there are threads would hold up every open of a file.
        self._sync_threads = sync_threads
        self._spares = Spares(on_disk, threads, next_object)
        self._closing: list[int] = []

    async def run(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        try:
            return await self._threads.run(function, *args)
        except OSError as error:
            raise self._refused(error) from error

    async def run_sync(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """The same for a call that waits until bytes are on the disk."""
        try:
            return await self._sync_threads.run(function, *args)
        except OSError as error:
            raise self._refused(error) from error

    def start(self, function: Callable[[Unpack[Args]], object], *args: Unpack[Args]) -> None:
        """Have a call made that no caller waits for."""
        self._threads.start(function, *args)

    def start_sync(self, function: Callable[[Unpack[Args]], object], *args: Unpack[Args]) -> None:
        """The same for a call that waits until bytes are on the disk."""
        self._sync_threads.start(function, *args)

    async def create(self) -> tuple[int, int]:
        """The number and the descriptor of a new object."""
        try:
            return await self._spares.take()
        except OSError as error:
            raise self._refused(error) from error

    async def number(self) -> int:
        """The number of an object for which the tier has no room."""
        return await self._spares.number()

    async def sync(self, number: int, fd: int) -> None:
        """Wait until the bytes of an object are safe."""
        await self.run_sync(self.on_disk.sync, number, fd)

    def close_later(self, fd: int) -> None:
        """Close a file of the tier or of the source in a thread: even that may wait for either."""
        self._threads.start(os.close, fd)

    def close_soon(self, fd: int) -> None:
        """Close it together with others."""
        self._closing.append(fd)
        if len(self._closing) >= _CLOSED_AT_ONCE:
            self.close_pending()

    def close_pending(self) -> None:
        if self._closing:
            self._threads.start(_close_all, self._closing)
            self._closing = []

    def close(self) -> None:
        self.close_pending()
        self._spares.close()

    def _refused(self, error: OSError) -> Refused:
        number = error.errno or errno.EIO
        # A full tier is no failure before the source is full as well.
        if number in _OF_THE_DISK:
            self.count_failure(number)
        return Refused(number)

    def count_failure(self, number: int) -> None:
        self.failures += 1
        self.failure = errno_words(number)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
