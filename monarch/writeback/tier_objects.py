"""The objects of the absorbing tier for the event loop: what waits for the disk runs in threads."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import Refused
from monarch.posix.thread_pool import ThreadPool
from monarch.text import errno_words
from monarch.writeback.objects import Objects

Args = TypeVarTuple("Args")
T = TypeVar("T")

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# How many objects are closed in one hop to a thread; fewer when that is next due.
_CLOSED_AT_ONCE = 16
# The most spares.
MOST = 32
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
        self.threads = threads
        # As many fsyncs as there are threads would hold up every open of a file.
        self.sync_threads = sync_threads
        self.spares = Spares(on_disk, threads, next_object)
        self._closing: list[int] = []

    async def run(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        with self.refusing():
            return await self.threads.run(function, *args)

    async def run_sync(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """The same for a call that waits until bytes are on the disk."""
        with self.refusing():
            return await self.sync_threads.run(function, *args)

    async def create(self) -> tuple[int, int]:
        """The number and the descriptor of a new object."""
        with self.refusing():
            return await self.spares.take()

    def close_soon(self, fd: int) -> None:
        """Close it together with others."""
        self._closing.append(fd)
        if len(self._closing) >= _CLOSED_AT_ONCE:
            self.close_pending()

    def close_pending(self) -> None:
        if self._closing:
            self.threads.start(_close_all, self._closing)
            self._closing = []

    def close(self) -> None:
        self.close_pending()
        self.spares.close()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Turns an error of the tier's disk into the answer to a caller."""
        try:
            yield
        except OSError as error:
            number = error.errno or errno.EIO
            # A full tier is no failure before the source is full as well.
            if number in _OF_THE_DISK:
                self.count_failure(number)
            raise Refused(number) from error

    def count_failure(self, number: int) -> None:
        self.failures += 1
        self.failure = errno_words(number)


class Spares:
    """Objects made ahead, so that a file can be created without waiting for the tier's disk.

    The number of spares follows the rate at which files are created: none before the first file,
    then twice as many at each filling, up to ``MOST``. They are empty and in no record of the
    journal. After a kill the next mount removes them.

    Belongs to the event loop; objects are made in ``threads``, numbered from ``first`` on.
    Numbers go up in the order in which objects are taken, and none is ever used again.
    """

    def __init__(self, objects: Objects, threads: ThreadPool, first: int) -> None:
        self._objects = objects
        self._threads = threads
        self._next = first
        self._ready: deque[tuple[int, int]] = deque()
        self._wanted = 1
        self._filling: trio.Event | None = None
        self._error: OSError | None = None
        self._is_closed = False

    async def take(self) -> tuple[int, int]:
        """Takes a new, empty object: its number, and a descriptor to read and write it. Waits if no
        spare is ready. Raises OSError."""
        while not self._ready:
            filling = self._fill() if self._filling is None else self._filling
            await filling.wait()
            if not self._ready and self._error is not None:
                raise self._error
        taken = self._ready.popleft()
        if self._filling is None and len(self._ready) <= self._wanted // 2:
            # Without a free thread no spares are made ahead.
            with suppress(OSError):
                self._fill()
        return taken

    async def number(self) -> int:
        """Takes a number without an object."""
        while self._filling is not None:
            await self._filling.wait()
        self._next += 1
        return self._next - 1

    def _fill(self) -> trio.Event:
        """Starts making spares in a thread; the event is set when they are ready. Raises OSError,
        ENOMEM, if no thread can be started."""
        token = trio.lowlevel.current_trio_token()
        self._threads.start(self._make, self._wanted, token)
        self._wanted = min(2 * self._wanted, MOST)
        self._filling = trio.Event()
        return self._filling

    def _make(self, count: int, token: trio.lowlevel.TrioToken) -> None:
        """Makes spares, in a thread; the event loop starts no other filling before ``_filled``."""
        made: list[tuple[int, int]] = []
        error: OSError | None = None
        try:
            for number in range(self._next, self._next + count):
                made.append((number, self._objects.create(number)))
        except OSError as failure:
            error = failure
        try:
            token.run_sync_soon(self._filled, made, error)
        except trio.RunFinishedError:
            self._discard(made)

    def _filled(self, made: list[tuple[int, int]], error: OSError | None) -> None:
        filling, self._filling, self._error = self._filling, None, error
        if made:
            self._next = made[-1][0] + 1
        elif error is not None:
            self._wanted = 1
        self._ready += made
        if self._is_closed:
            self.close()
        assert filling is not None
        filling.set()

    def close(self) -> None:
        """Removes all spares, also those that a thread is making. May wait for the tier's disk."""
        self._is_closed = True
        self._discard(self._ready)
        self._ready.clear()

    def _discard(self, spares: deque[tuple[int, int]] | list[tuple[int, int]]) -> None:
        for number, fd in spares:
            os.close(fd)
            with suppress(OSError):
                self._objects.remove(number)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
