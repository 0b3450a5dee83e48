"""Spares: objects made ahead, so that a file can be created without waiting for the tier's disk.

The number of spares follows the rate at which files are created: none before the first file, then
twice as many at each filling, up to ``MOST``. They are empty and in no record of the journal. After
a kill the next mount removes them.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress

import trio

from monarch.posix.thread_pool import ThreadPool
from monarch.writeback.objects import Objects

MOST = 32


class Spares:
    """Belongs to the event loop; objects are made in ``threads``, numbered from ``first`` on.

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
        # The number of fillings since the start.
        self.fillings = 0

    @property
    def is_filling(self) -> bool:
        """Whether a thread is making spares."""
        return self._filling is not None

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
        self.fillings += 1
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
