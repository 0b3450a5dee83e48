"""Threads for calls that may wait: for the source, for a tier's disk.

The hop to a thread and back is paid for every file of the first epoch. This pool costs a third of
trio's general one: its threads live as long as the loop, and answers that arrive together wake
the loop once. Measured on two shared cores, CPU per call: 63 us there, 24 us here.
"""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import outcome
import trio
from typing_extensions import TypeVarTuple, Unpack

Args = TypeVarTuple("Args")
T = TypeVar("T")


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """``items`` in lists of ``size``: what one hop to a thread is worth."""
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch


class _Call:
    __slots__ = ("abandoned", "args", "begun_s", "function", "result", "task")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        task: trio.lowlevel.Task | None,
    ) -> None:
        self.function = function
        self.args = args
        # None if nobody waits for the answer.
        self.task = task
        self.begun_s = time.monotonic()
        self.abandoned = False
        self.result: outcome.Outcome[Any]


class Threads:
    """At most ``limit`` calls at once, first come first served. Belongs to one event loop.

    With ``abandon`` a cancelled caller leaves its call behind and goes on at once: for calls that
    only read, at a source that may hang; what comes of the call is given to ``discard``. Without,
    the caller waits until the call is over. Threads are started when needed and never hold up the
    end of the process; while the machine has none to give, calls wait for those there are.
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
        # In the order in which they were begun.
        self._under_way: dict[_Call, None] = {}
        self._pending = 0
        self._started = 0
        self._token: trio.lowlevel.TrioToken | None = None

    def oldest_s(self) -> float:
        """How long the call that has waited longest has done so by now, 0 if there is none."""
        oldest = next(iter(self._under_way), None)
        return time.monotonic() - oldest.begun_s if oldest is not None else 0.0

    async def run(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """The result of ``function(*args)``, or what it raises.

        Raises OSError, ENOMEM, if the machine has not one thread to give.
        """
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
        """Have a first thread now: later the machine may have none to give."""
        self.start(time.monotonic)

    def start(self, function: Callable[[Unpack[Args]], object], *args: Unpack[Args]) -> None:
        """Have ``function(*args)`` called some time; what comes of it is lost. Never waits."""
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
                    # Not EAGAIN, by which many a reader understands the end of what there is.
                    raise OSError(errno.ENOMEM, "no thread to be had") from error
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
                call.result = outcome.capture(call.function, *call.args)
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
