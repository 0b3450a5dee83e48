"""A token bucket that limits a bandwidth. Pure: time is an argument."""

from __future__ import annotations


class TokenBucket:
    """``rate`` in bytes per second, 0 for no limit; ``burst`` in bytes may pass at once."""

    def __init__(self, rate: int, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._level = float(burst)
        self._then = 0.0

    def take(self, count: int, now: float) -> float:
        """Takes ``count`` bytes at ``now`` (seconds, monotonic); returns the seconds to wait.

        The bucket may go into debt, so a request larger than the burst is delayed, not refused.
        """
        if self._rate == 0:
            return 0.0
        self._level = min(self._burst, self._level + max(0.0, now - self._then) * self._rate)
        self._then = now
        self._level -= count
        return max(0.0, -self._level / self._rate)
