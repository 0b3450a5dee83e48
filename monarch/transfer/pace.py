"""The share of the source that copies may use beside readers, and their bandwidth.

Pure: time is an argument.

A copy that reads the source delays a reader that waits for it. So the product of the share of time
in which copies read and the share in which readers wait is kept at one twentieth: a reader is
delayed by at most that share, however slow the source is. If readers wait less than that share of
the time, copies may use the source freely.
"""

from __future__ import annotations

import math

_DELAY = 0.05
# The readers' share is an average that rises quickly and falls slowly: its time constants, in
# seconds.
_RISE_S = 0.1
_FALL_S = 1.0
# The share that is assumed for a reader that has just opened a file.
_EXPECTED = 0.5
# The shortest interval between two updates of the average.
_STEP_S = 0.01
# The time at the source that copies may save up in a pause.
_SAVED_S = 0.05


class Pace:
    """Belongs to the event loop. ``look`` must be called before the other methods."""

    def __init__(self) -> None:
        self._seen_s = -math.inf
        self._waited_s = 0.0
        self._share = 0.0
        # The time at the source that copies have earned and not used; negative if overdrawn.
        self._earned_s = _SAVED_S
        self._under_way = 0

    @property
    def is_free(self) -> bool:
        """Whether copies may use the source freely."""
        return self._share <= _DELAY

    def expect(self) -> None:
        """Records that a reader has opened a file and is about to read it."""
        self._share = max(self._share, _EXPECTED)
        self._earned_s = min(self._earned_s, 0.0)

    def look(self, waited_s: float, now: float) -> None:
        """Updates the readers' share; ``waited_s`` is the total time in which a reader waited."""
        if now - self._seen_s < _STEP_S:
            return
        elapsed, self._seen_s = now - self._seen_s, now
        waited, self._waited_s = waited_s - self._waited_s, waited_s
        if math.isinf(elapsed):
            return
        share = min(1.0, max(0.0, waited) / elapsed)
        self._share += (share - self._share) * -math.expm1(
            -elapsed / (_RISE_S if share > self._share else _FALL_S)
        )
        if self.is_free:
            self._earned_s = _SAVED_S
        else:
            self._earned_s = min(_SAVED_S, self._earned_s + elapsed * _DELAY / self._share)

    def may_begin(self) -> bool:
        """Whether a copy may read the source now; beside readers, one copy at a time."""
        return self.is_free or (self._under_way == 0 and self._earned_s > 0)

    def began(self) -> None:
        self._under_way += 1

    def ended(self, seconds: float) -> None:
        """Records that a read of a copy took ``seconds``."""
        self._under_way -= 1
        if not self.is_free:
            self._earned_s -= seconds


class TokenBucket:
    """``rate`` in bytes per second, 0 for no limit; ``burst`` in bytes may pass at once."""

    def __init__(self, rate: int, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._level = float(burst)
        self._then = 0.0

    def take(self, count: int, now: float) -> float:
        """Takes ``count`` bytes at ``now`` (seconds, monotonic); returns the seconds to wait. A
        request larger than the burst is delayed, not refused: the bucket goes into debt."""
        if self._rate == 0:
            return 0.0
        self._level = min(self._burst, self._level + max(0.0, now - self._then) * self._rate)
        self._then = now
        self._level -= count
        return max(0.0, -self._level / self._rate)
