"""A clock of trio that jumps to the next deadline as soon as all tasks wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import trio
from trio.testing import MockClock

from monarch.posix.thread_pool import ThreadPool


@contextmanager
def virtual_clock(*, patience_s: float = 0.004) -> Iterator[MockClock]:
    """A clock that gives the threads of each ``ThreadPool`` time to answer before it jumps.

    While a call is under way, the clock jumps after ``patience_s`` real seconds without an event in
    which all threads wait: they may wait for what a task does at the next deadline. A thread that
    runs, wants a processor or waits for a disk is awaited, however long that takes. A jump waits
    for no other process.
    """
    clock = MockClock(autojump_threshold=0)
    jump = clock._autojump
    at_work: set[ThreadPool] = set()
    quiet = 0

    def jump_if_all_wait() -> None:
        nonlocal quiet
        quiet = 0 if at_work and _others_run() else quiet + 1
        # A thread that is about to run Python again waits too, for this one.
        if not at_work or quiet >= 2:
            quiet = 0
            jump()

    put, deliver = ThreadPool._put, ThreadPool._deliver

    def put_and_wait(pool: ThreadPool, call: Any) -> None:
        put(pool, call)
        at_work.add(pool)
        clock.autojump_threshold = patience_s / 2

    def deliver_and_jump(pool: ThreadPool) -> None:
        deliver(pool)
        if not pool.oldest_s():
            at_work.discard(pool)
        if not at_work:
            clock.autojump_threshold = 0

    with (
        mock.patch.object(clock, "_autojump", jump_if_all_wait),
        mock.patch.object(ThreadPool, "_put", put_and_wait),
        mock.patch.object(ThreadPool, "_deliver", deliver_and_jump),
    ):
        yield clock


def _others_run() -> bool:
    """Whether another thread of this process runs, wants a processor or waits for a disk."""
    own = str(threading.get_native_id())
    return any(_state(number) in b"RD" for number in os.listdir("/proc/self/task") if number != own)


def _state(number: str) -> bytes:
    try:
        stat = Path(f"/proc/self/task/{number}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        # It has ended.
        return b"X"
    return stat.rpartition(b") ")[2][:1]


async def until(holds: Callable[[], bool], *, virtual_s: float = 10_000.0) -> None:
    """Waits for a condition that threads bring about: the clock may be far ahead when they have
    done their work. Raises trio.TooSlowError."""
    with trio.fail_after(virtual_s):
        while not holds():
            await trio.sleep(1)
