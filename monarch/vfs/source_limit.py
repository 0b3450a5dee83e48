"""The bytes that a job reads from the source, and the limit of their rate."""

from __future__ import annotations

import errno
from collections.abc import Callable

import trio

from monarch.errors import Refused
from monarch.transfer.pace import TokenBucket

# What a job may read at once although its source is limited, in seconds of the limit.
_BURST_S = 0.05
# The calls that may wait for one limit. The requests of other jobs need tasks, too, so of all
# limits together only MOST_SHARED may wait beyond the first OWN of each limit.
MOST_WAITING, OWN, MOST_SHARED = 4096, 256, 8192


class SourceLimit:
    """Belongs to the event loop. ``rate`` in bytes/s, 0: no limit. ``nbytes`` are those that were
    read so far."""

    def __init__(self, rate: int = 0) -> None:
        self.nbytes = 0
        # The calls that wait.
        self.waiting = 0
        # Is set when the limit changes: calls that wait for it continue.
        self._changed = trio.Event()
        self._set(rate)

    def change(self, rate: int) -> None:
        """Sets another limit. Calls that wait for the former one continue."""
        self._set(rate)
        self._changed.set()
        self._changed = trio.Event()

    def _set(self, rate: int) -> None:
        self.rate = rate
        self._bucket = TokenBucket(rate, int(rate * _BURST_S))

    def count(self, nbytes: int) -> None:
        """Counts bytes that were read from the source."""
        self.nbytes += nbytes
        self._bucket.take(nbytes, trio.current_time())

    def delay_s(self) -> float:
        """How long a call must wait for the bytes that were counted."""
        return self._bucket.take(0, trio.current_time())

    async def wait(self, delay_s: float) -> None:
        """Waits so long, or until the limit changes."""
        self.waiting += 1
        try:
            with trio.move_on_after(delay_s):
                await self._changed.wait()
        finally:
            self.waiting -= 1


class LimitedCalls:
    """The calls that wait for the limits of all jobs of a mount. ``notify`` is called with 1 when a
    call begins to wait, and with -1 when it ends: it does not need the source meanwhile."""

    def __init__(self, notify: Callable[[int], None] | None = None) -> None:
        self._notify = notify or (lambda change: None)
        self._shared = 0

    async def wait(self, limit: SourceLimit) -> None:
        """Waits as long as the limit demands; not at all if too many calls of other jobs wait.
        Raises Refused (EAGAIN) if too many calls of this job wait: it would not be limited."""
        delay_s = limit.delay_s()
        if not delay_s:
            return
        if limit.waiting >= MOST_WAITING:
            raise Refused(errno.EAGAIN)
        is_shared = limit.waiting >= OWN
        if is_shared and self._shared >= MOST_SHARED:
            return
        self._shared += is_shared
        self._notify(1)
        try:
            await limit.wait(delay_s)
        finally:
            self._notify(-1)
            self._shared -= is_shared
