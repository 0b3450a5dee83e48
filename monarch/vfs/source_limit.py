"""The bytes that a job reads from the source, and the limit of their rate."""

from __future__ import annotations

import trio

from monarch.transfer.pace import TokenBucket

# What a job may read at once although its source is limited, in seconds of the limit.
_BURST_S = 0.05
# The calls of a job that may wait for its limit: the requests of other jobs need tasks, too.
_MOST_WAITING = 256


class SourceLimit:
    """Belongs to the event loop. ``rate`` in bytes/s, 0: no limit. ``nbytes`` are those that were
    read so far."""

    def __init__(self, rate: int = 0) -> None:
        self.nbytes = 0
        self._waiting = 0
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

    async def wait(self) -> None:
        """Waits as long as the limit demands for the bytes that were counted."""
        wait_s = self._bucket.take(0, trio.current_time())
        if not wait_s or self._waiting >= _MOST_WAITING:
            return
        self._waiting += 1
        try:
            with trio.move_on_after(wait_s):
                await self._changed.wait()
        finally:
            self._waiting -= 1
