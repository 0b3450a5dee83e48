"""When the drain waits so that others go first: readers of the source, processes that write."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import trio

from monarch.transfer.throttle import TokenBucket
from monarch.writeback.drain_queue import DrainQueue
from monarch.writeback.wakeups import Wakeups

# A process that writes many files has paused when it was quiet for this long. Seconds.
_QUIET_S = 0.3
# How long a turn waits for readers of the source to pause before it takes its share. Seconds.
_PATIENCE_S = 1.0
_STEP_S = 0.005


class Courtesy:
    """``bucket`` limits the bandwidth. ``busy`` says whether a reader uses the source at a time of
    the event loop's clock. It goes first, unless a caller waits for the drain or ``demand`` says
    that the backlog must shrink.

    While changes come one after the other the drain waits, for up to ``hold_s`` from the oldest
    change on: it would keep the disk busy to which they are written.
    """

    def __init__(
        self,
        wakeups: Wakeups,
        *,
        bucket: TokenBucket,
        busy: Callable[[float], bool],
        demand: Callable[[], bool],
        hold_s: float,
    ) -> None:
        self._wakeups = wakeups
        self._bucket = bucket
        self._busy = busy
        self._demand = demand
        self._hold_s = hold_s
        self._last_change_s = -math.inf

    def note_change(self) -> None:
        """A change was recorded on the mount."""
        if self._hold_s:
            self._last_change_s = trio.current_time()

    def lets_write(self, queue: DrainQueue) -> bool:
        """Whether the changes of the queue wait for a process that is writing files.

        If a process has synced one of them, it wants the file to be safe: that does not wait.
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
        """Wait before ``count`` bytes are brought to the source."""
        await trio.sleep(self._bucket.take(count, trio.current_time()))
        patience = trio.current_time() + _PATIENCE_S
        while (
            self._busy(trio.current_time())
            and not (self._wakeups.waiters or self._demand())
            and trio.current_time() < patience
        ):
            await trio.sleep(_STEP_S)
