"""Keeps the daemon's own tasks running: a task that fails is logged, counted and restarted.

A nursery ends when one of its tasks fails, and the nursery of the daemon is the mount: a bug in
the sweep must not end the reads of running jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from monarch.posix import failpoints

log = logging.getLogger(__name__)

# The pause before a restart, in seconds: doubles from the first value up to the second.
_PAUSES_S = (1.0, 60.0)


class Supervisor:
    """``count_error`` is called with the kind of each failure, ``task-NAME``."""

    def __init__(self, count_error: Callable[[str], None]) -> None:
        self._count_error = count_error

    async def keep(self, name: str, task: Callable[[], Awaitable[None]]) -> None:
        """Runs ``task`` until it returns; restarts it, after a pause, whenever it fails."""
        pause_s, longest_s = _PAUSES_S
        while True:
            began = trio.current_time()
            if await self.attempt(name, partial(_passing, f"task-{name}", task)):
                return
            if trio.current_time() - began > longest_s:
                pause_s = _PAUSES_S[0]
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def attempt(self, name: str, task: Callable[[], Awaitable[None]]) -> bool:
        """Runs ``task`` once; returns False if it failed. Its exception is logged, not raised."""
        try:
            await task()
        except Exception:
            self._count_error(f"task-{name}")
            log.exception("the task %s failed, the mount continues; please report it", name)
            return False
        return True


async def _passing(point: str, task: Callable[[], Awaitable[None]]) -> None:
    failpoints.failpoint(point)
    await task()
