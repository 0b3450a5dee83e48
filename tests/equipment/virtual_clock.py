"""A clock of trio that jumps to the next deadline as soon as all tasks wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import trio
from trio.testing import MockClock

from monarch.posix.thread_pool import ThreadPool


@contextmanager
def virtual_clock(*, patience_s: float = 0.004) -> Iterator[MockClock]:
    """A clock that gives the threads of each ``ThreadPool`` time to answer before it jumps.

    While a thread is at work, the clock jumps after ``patience_s`` real seconds without an event:
    the thread may wait for what a task does at the next deadline. A jump waits for no other thread
    and for no other process.
    """
    clock = MockClock(autojump_threshold=0)
    at_work: set[ThreadPool] = set()
    put, deliver = ThreadPool._put, ThreadPool._deliver

    def put_and_wait(pool: ThreadPool, call: Any) -> None:
        put(pool, call)
        at_work.add(pool)
        clock.autojump_threshold = patience_s

    def deliver_and_jump(pool: ThreadPool) -> None:
        deliver(pool)
        if not pool.oldest_s():
            at_work.discard(pool)
        if not at_work:
            clock.autojump_threshold = 0

    with (
        mock.patch.object(ThreadPool, "_put", put_and_wait),
        mock.patch.object(ThreadPool, "_deliver", deliver_and_jump),
    ):
        yield clock


async def until(holds: Callable[[], bool], *, virtual_s: float = 10_000.0) -> None:
    """Waits for a condition that threads bring about: the clock may be far ahead when they have
    done their work. Raises trio.TooSlowError."""
    with trio.fail_after(virtual_s):
        while not holds():
            await trio.sleep(1)
