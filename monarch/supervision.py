"""Keeps the daemon's own tasks going: one that fails is written down, counted and begun again.

A nursery ends when one of its tasks fails, and here the nursery is the mount: a slip in the sweep
must not take their reads from those who train.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from monarch import points

log = logging.getLogger(__name__)

# How long a task that failed rests: doubling from the first to the second. Seconds.
_PAUSES_S = (1.0, 60.0)


class Supervisor:
    """``count_error`` is told the kind of each failure, ``task-NAME``."""

    def __init__(self, count_error: Callable[[str], None]) -> None:
        self._count_error = count_error

    async def keep(self, name: str, task: Callable[[], Awaitable[None]]) -> None:
        """Run ``task`` until it returns; begin it again, after a pause, whenever it fails."""
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
        """Run ``task`` once; False if it failed. Its failure goes no further."""
        try:
            await task()
        except Exception:
            self._count_error(f"task-{name}")
            log.exception("the task %s failed, the mount goes on; please report it", name)
            return False
        return True


async def _passing(point: str, task: Callable[[], Awaitable[None]]) -> None:
    points.reached(point)
    await task()
