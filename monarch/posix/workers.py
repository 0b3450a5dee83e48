"""Threads that work for a thread in which a signal handler may raise in any line.

The locks of ``threading`` and ``concurrent.futures`` have methods in Python. An exception inside
one of them leaves the lock taken for ever: the threads never end, and what waits for them hangs.
What the threads here share with the thread that they work for is changed by one call of C each.
"""

from __future__ import annotations

import _thread
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import outcome
from typing_extensions import TypeVarTuple, Unpack

Args = TypeVarTuple("Args")
Item = TypeVar("Item")
T = TypeVar("T")


# The message of the RuntimeError of a thread that cannot be started.
_REFUSAL = "can't start new thread"


class Threads:
    """Threads that each call a function once. They do not delay the end of the process.

    ``count`` is the number of those that were started, or more if one could not be started.
    """

    def __init__(self) -> None:
        self.count = 0
        self._begun: deque[None] = deque()
        self._over: deque[None] = deque()
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self, function: Callable[[], None]) -> None:
        """Raises RuntimeError if the machine refuses a thread."""
        self.count += 1
        _thread.start_new_thread(self._run, (function,))

    def _run(self, function: Callable[[], None]) -> None:
        self._begun.append(None)
        try:
            function()
        finally:
            self._over.append(None)
            self._ends.put(None)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the threads have ended, at most ``seconds``; returns whether they have. A
        thread that begins later is not waited for: it must find nothing to do."""
        until = None if seconds is None else time.monotonic() + seconds
        while len(self._over) < len(self._begun):
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                self._ends.get(timeout=left)
            except queue.Empty:
                return False
        return True


class Workers(Generic[T]):
    """Makes calls in up to ``limit`` threads, in the order in which they are put.

    As a context: calls that have not begun at its end are dropped, and the others are waited for,
    at most ``wait_s`` seconds, or until another exception of a signal handler.
    """

    def __init__(self, limit: int, *, wait_s: float | None = None) -> None:
        self._limit = limit
        self._wait_s = wait_s
        self._threads = Threads()
        self._calls: queue.SimpleQueue[tuple[int, Callable[[], T]] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[int, outcome.Outcome[T]]] = queue.SimpleQueue()
        self._is_over = False
        self._put = 0
        # The number of calls whose results were not taken.
        self.pending = 0

    def put(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> int:
        """Never waits. Returns the number of the call. Raises RuntimeError if the machine refuses
        the first thread; if it refuses another one, there are fewer."""
        if self.pending >= self._threads.count < self._limit:
            try:
                self._threads.start(self._work)
            except RuntimeError as error:
                # Not one of a signal handler.
                if self._threads.count == 1 or str(error) != _REFUSAL:
                    raise
                self._limit = self._threads.count
        self.pending += 1
        self._put += 1
        self._calls.put((self._put, lambda: function(*args)))
        return self._put

    def take(self, wait_s: float | None = None) -> T:
        """The result of a call that has ended, or its exception. Raises queue.Empty if none ends in
        ``wait_s`` seconds."""
        return self._take(wait_s)[1].unwrap()

    def map(self, function: Callable[[Item], T], items: Iterable[Item]) -> Iterator[T]:
        """``function(item)`` of each item, in their order. No other call may be pending."""
        found: dict[int, outcome.Outcome[T]] = {}
        for number in [self.put(function, item) for item in items]:
            while number not in found:
                found.update([self._take(None)])
            yield found.pop(number).unwrap()

    def _take(self, wait_s: float | None) -> tuple[int, outcome.Outcome[T]]:
        taken = self._outcomes.get(timeout=wait_s)
        self.pending -= 1
        return taken

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self._is_over:
            number, function = call
            self._outcomes.put((number, outcome.capture(function)))
            del call, function
        # For the next thread.
        self._calls.put(None)

    def __enter__(self) -> Workers[T]:
        return self

    def __exit__(self, *_exc: object) -> None:
        # First: an exception may come after each line, and then no further call may begin.
        self._is_over = True
        self._calls.put(None)
        self._threads.wait(self._wait_s)
