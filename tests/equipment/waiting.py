"""Waiting for a condition, with a limit."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Protocol


def becomes_true(
    holds: Callable[[], bool], *, timeout_s: float = 60.0, step_s: float = 0.01
) -> bool:
    """Ask again and again; False if the condition does not hold within the time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(step_s)
    return True


def wait_until(holds: Callable[[], bool], what: str, *, timeout_s: float = 60.0) -> None:
    """Fail the test if the condition, which ``what`` names, does not come true."""
    assert becomes_true(holds, timeout_s=timeout_s), f"not within {timeout_s:.0f} s: {what}"


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def readable(*files: int | HasDescriptor, within_s: float) -> list[int]:
    """Waits until one of ``files`` can be read or has ended; the descriptors of those. Unlike with
    ``select``, these may be above 1,024, as in a process with many tests."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(max(0.0, within_s) * 1000)]
