"""Threads for calls that may wait for the source or for a disk of a tier.

Every file of the first epoch needs a hop to a thread and back. This pool costs a third of trio's:
its threads live as long as the loop, and answers that arrive together wake the loop once. CPU time
per call, measured on two shared cores: 63 us with trio, 24 us here.
"""

from __future__ import annotations

import errno
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import outcome
import trio
from typing_extensions import TypeVarTuple, Unpack

Args = TypeVarTuple("Args")
T = TypeVar("T")


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """``items`` in lists of up to ``size``, one for each hop to a thread."""
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch


@dataclass(slots=True, eq=False)
class _Call:
    """``task`` is None if no task waits for the result."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    task: trio.lowlevel.Task | None
    begun_s: float = field(default_factory=time.monotonic)
    abandoned: bool = False
    result: outcome.Outcome[Any] = field(init=False)


# The ``call`` that a thread runs.
_running = threading.local()


@contextmanager
def waiting_elsewhere() -> Iterator[None]:
    """Surrounds a wait in a call of a pool that is none for what the pool calls: ``oldest_s``
    counts the call from the end of the wait."""
    call: _Call | None = getattr(_running, "call", None)
    if call is None:
        yield
        return
    call.begun_s = math.inf
    try:
        yield
    finally:
        call.begun_s = time.monotonic()


class ThreadPool:
    """Runs at most ``limit`` calls at once, in the order of arrival. Belongs to one event loop.

    With ``abandon`` a cancelled caller leaves its call running and continues at once: for calls
    that only read, at a source that may hang; the late result is passed to ``discard``. Without it,
    the caller waits for the end of the call. Threads are started when needed and do not delay the
    end of the process; while no new thread can be started, calls wait for the existing ones.
    """

    def __init__(
        self,
        limit: int,
        name: str,
        *,
        abandon: bool,
        discard: Callable[[object], None] = lambda result: None,
    ) -> None:
        self._limit = limit
        self._name = name
        self._abandon = abandon
        self._discard = discard
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._answers: deque[_Call] = deque()
        # The calls that have no result yet.
        self._under_way: dict[_Call, None] = {}
        self._pending = 0
        self._started = 0
        self._token: trio.lowlevel.TrioToken | None = None

    def oldest_s(self) -> float:
        """The age of the oldest running call, in seconds; 0 if there is none."""
        begun_s = min((call.begun_s for call in self._under_way), default=math.inf)
        return max(0.0, time.monotonic() - begun_s)

    async def run(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """Returns ``function(*args)``, or raises its exception; OSError (ENOMEM) if no thread can
        start."""
        await trio.lowlevel.checkpoint_if_cancelled()
        call = _Call(function, args, trio.lowlevel.current_task())
        self._put(call)

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            if not self._abandon:
                return trio.lowlevel.Abort.FAILED
            call.task = None
            call.abandoned = True
            return trio.lowlevel.Abort.SUCCEEDED

        result: T = await trio.lowlevel.wait_task_rescheduled(abort)
        return result

    def prepare(self) -> None:
        """Starts a first thread now: later the machine may refuse one."""
        self.start(time.monotonic)

    def start(self, function: Callable[[Unpack[Args]], object], *args: Unpack[Args]) -> None:
        """Queues ``function(*args)``; its result is dropped. Never waits."""
        self._put(_Call(function, args, None))

    def _put(self, call: _Call) -> None:
        if self._token is None:
            self._token = trio.lowlevel.current_trio_token()
        if self._pending >= self._started < self._limit:
            name = f"{self._name}-{self._started + 1}"
            thread = threading.Thread(
                target=self._work, args=(self._token,), name=name, daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                if not self._started:
                    # Not EAGAIN, which many programs take for "no data now".
                    raise OSError(errno.ENOMEM, "no thread can be started") from error
            else:
                self._started += 1
        self._pending += 1
        self._under_way[call] = None
        self._calls.put(call)

    def _work(self, token: trio.lowlevel.TrioToken) -> None:
        while True:
            call = self._calls.get()
            if call.abandoned:
                call.result = outcome.Value(None)
            else:
                _running.call = call
                call.result = outcome.capture(call.function, *call.args)
                _running.call = None
            self._answers.append(call)
            try:
                token.run_sync_soon(self._deliver, idempotent=True)
            except trio.RunFinishedError:
                return
            del call

    def _deliver(self) -> None:
        while self._answers:
            call = self._answers.popleft()
            self._pending -= 1
            del self._under_way[call]
            if call.task is not None:
                trio.lowlevel.reschedule(call.task, call.result)
            elif call.abandoned and isinstance(call.result, outcome.Value):
                self._discard(call.result.value)
