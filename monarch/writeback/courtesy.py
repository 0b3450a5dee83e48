"""Delays the drain for readers of the source and for processes that write."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import trio

from monarch.transfer.pace import TokenBucket
from monarch.writeback.drain_queue import DrainQueue
from monarch.writeback.wakeups import Wakeups

# A process that writes many files has paused after this time without a change, in seconds.
_QUIET_S = 0.3
# How long a turn waits for a pause of the source's readers before it continues, in seconds.
_PATIENCE_S = 1.0
_STEP_S = 0.005


@dataclass(eq=False, repr=False)
class Courtesy:
    """``bucket`` limits the bandwidth. ``busy`` returns whether a reader uses the source at a time
    of the event loop's clock. Readers go first, unless a caller waits for the drain, or ``demand``
    returns that the backlog must shrink.

    While a process makes one change after the other, the drain waits, for up to ``hold_s`` seconds
    from the oldest change on: it would compete for the disk of the tier.
    """

    _wakeups: Wakeups
    _bucket: TokenBucket
    _busy: Callable[[float], bool]
    _demand: Callable[[], bool]
    _hold_s: float
    _last_change_s: float = -math.inf

    def note_change(self) -> None:
        """Call this when a change was recorded."""
        if self._hold_s:
            self._last_change_s = trio.current_time()

    def lets_write(self, queue: DrainQueue) -> bool:
        """Whether the changes of the queue wait for a process that is writing files.

        Changes do not wait if a process has synced one of them: it needs the file to be safe.
        """
        if not (queue and self._hold_s) or self._wakeups.waiters:
            return False
        if trio.current_time() - self._last_change_s > _QUIET_S:
            return False
        age_s = (time.time_ns() - queue.front.recorded_ns) / 1e9
        if not 0 <= age_s < self._hold_s or self._demand():
            return False
        return queue.last_synced < queue.front.seq

    async def wait(self, count: int) -> None:
        """Waits until ``count`` bytes may be brought to the source."""
        await trio.sleep(self._bucket.take(count, trio.current_time()))
        patience = trio.current_time() + _PATIENCE_S
        while (
            self._busy(trio.current_time())
            and not (self._wakeups.waiters or self._demand())
            and trio.current_time() < patience
        ):
            await trio.sleep(_STEP_S)
