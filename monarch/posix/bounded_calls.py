"""Calls that may hang, made in a thread with a time limit where no other task can run meanwhile."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import outcome
from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import Unanswered

Args = TypeVarTuple("Args")
T = TypeVar("T")

# A call is waited for in so many parts. The time in which this process was stopped, and with it the
# thread of the call, counts as one part.
_PARTS = 8
# The interval in which it is looked whether threads have ended.
_LOOK_S = 0.001
# A file system that does not answer for a path in this time counts as hung, in seconds.
PATIENCE_S = 2.0


class BoundedCalls:
    """One thread that makes the calls of one caller at a time.

    A call takes about 20 us longer than a direct one. A call that takes longer than ``wait_s``
    seconds raises Unanswered and continues in the thread. Until it ends, all further calls raise
    Unanswered at once.
    """

    def __init__(self, name: str, *, wait_s: float) -> None:
        self._name = name
        self._wait_s = wait_s
        # The process that has the thread: a fork does not copy it.
        self._pid = 0

    def _begin(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Held while a call is under way.
        self._turn = threading.Lock()
        work = self._calls, self._turn
        threading.Thread(target=_work, args=work, name=self._name, daemon=True).start()
        self._pid = os.getpid()

    @property
    def is_stuck(self) -> bool:
        """Whether a call that was given up still runs."""
        return self._pid == os.getpid() and self._turn.locked()

    def call(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """Returns ``function(*args)``, or raises its exception. Raises Unanswered."""
        if self._pid != os.getpid():
            self._begin()
        turn = self._turn
        if not turn.acquire(blocking=False):
            raise Unanswered
        results: list[outcome.Outcome[T]] = []
        self._calls.put(lambda: results.append(outcome.capture(function, *args)))
        for _ in range(_PARTS):
            if turn.acquire(timeout=self._wait_s / _PARTS):
                break
        else:
            raise Unanswered
        turn.release()
        return results[0].unwrap()

    def close(self) -> None:
        """Ends the thread after the running call."""
        if self._pid == os.getpid():
            self._calls.put(None)


def call_within(seconds: float, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
    """Returns ``function(*args)``, or raises its exception. Raises Unanswered after ``seconds``:
    the call then continues in its thread."""
    calls = BoundedCalls("bounded", wait_s=seconds)
    try:
        return calls.call(function, *args)
    finally:
        calls.close()


def wait_for_threads(seconds: float) -> bool:
    """Waits at most ``seconds`` until this process has one thread; returns whether it has.

    A process that is forked beside another thread, even one that is about to end, inherits the
    locks that this thread holds. A thread whose call hangs does not end. The time in which this
    process was stopped does not count.
    """
    for _ in range(round(seconds / _LOOK_S)):
        if _is_alone():
            return True
        time.sleep(_LOOK_S)
    return _is_alone()


def _is_alone() -> bool:
    return len(os.listdir("/proc/self/task")) == 1


def _work(calls: queue.SimpleQueue[Callable[[], None] | None], turn: threading.Lock) -> None:
    while (make := calls.get()) is not None:
        make()
        turn.release()
        del make
