"""The bytes that a job reads from the source, and the limit of their rate.

A call pays for its bytes before it reads them: the calls of a job that come at once could otherwise
read all their bytes at once.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import trio

from monarch.errors import Refused
from monarch.transfer.pace import TokenBucket

# What a job may read at once although its source is limited, in seconds of the limit. A job that is
# measured must not save up what it does not read: as from a slow source, it only catches up after
# calls that have waited a little too long.
_BURST_S, MEASURED_BURST_S = 0.05, 0.002
# The calls that may wait for one limit. The requests of other jobs need tasks, too, so of all
# limits together only MOST_SHARED may wait beyond the first OWN of each limit.
MOST_WAITING, OWN, MOST_SHARED = 4096, 256, 8192


class SourceLimit:
    """Belongs to the event loop. ``rate`` in bytes/s, 0: no limit. What it gives in ``burst_s``
    seconds may pass at once. ``nbytes`` are those that were read so far."""

    def __init__(self, rate: int = 0, burst_s: float = _BURST_S) -> None:
        self.nbytes = 0
        self._burst_s = burst_s
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
        self._bucket = TokenBucket(rate, int(rate * self._burst_s))

    def take(self, nbytes: int) -> float:
        """Takes bytes from what may be read; returns how long a call must wait for them."""
        return self._bucket.take(nbytes, trio.current_time())

    async def wait(self, delay_s: float) -> None:
        """Waits so long, or until the limit changes."""
        self.waiting += 1
        try:
            with trio.move_on_after(delay_s):
                await self._changed.wait()
        finally:
            self.waiting -= 1


class Unpaid(Exception):
    """A call is about to read ``nbytes`` for which it has not paid yet."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class LimitedCalls:
    """The calls that wait for the limits of all jobs of a mount. ``notify`` is called with 1 when a
    call begins to wait, and with -1 when it ends: it does not need the source meanwhile."""

    def __init__(self, notify: Callable[[int], None] | None = None) -> None:
        self._notify = notify or (lambda change: None)
        self._shared = 0

    @contextmanager
    def payment(self, limits: Sequence[SourceLimit]) -> Iterator[Payment]:
        """What one call pays. It gets back what it has not read at the end of the block."""
        payment = Payment(self, limits)
        try:
            yield payment
        finally:
            payment.give_back()

    async def wait(self, limit: SourceLimit, until_s: float) -> None:
        """Waits until a time, or until the limit changes; not at all if too many calls of other
        jobs wait. Raises Refused (EAGAIN) if too many calls of this job wait: it would not be
        limited."""
        delay_s = until_s - trio.current_time()
        if delay_s <= 0:
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


class Payment:
    """What one call takes from the limits of its jobs, and reads."""

    def __init__(self, calls: LimitedCalls, limits: Sequence[SourceLimit]) -> None:
        self._calls = calls
        self._limits = limits
        self.has_paid = False
        # The bytes that were paid for and not read yet.
        self._left = 0

    def require(self, nbytes: int) -> None:
        """Raises Unpaid if the call must pay for bytes before it reads them. A file that grows
        after that is read nevertheless."""
        if not self.has_paid and any(limit.rate for limit in self._limits):
            raise Unpaid(nbytes)

    async def pay(self, nbytes: int) -> None:
        """Takes bytes, and waits as long as the limits demand. Raises Refused as ``wait``."""
        self.has_paid = True
        self._left += nbytes
        now = trio.current_time()
        ends = [(limit, now + limit.take(nbytes)) for limit in self._limits]
        for limit, until_s in ends:
            await self._calls.wait(limit, until_s)

    def read(self, nbytes: int) -> None:
        """Counts bytes that were read from the source."""
        for limit in self._limits:
            limit.nbytes += nbytes
        self._left -= nbytes

    def give_back(self) -> None:
        """Gives back what was not read; takes what was read beyond that."""
        for limit in self._limits:
            limit.take(-self._left)
        self._left = 0


def free_of_charge() -> Payment:
    """The payment of a call that belongs to no job of this node."""
    return Payment(LimitedCalls(), ())
