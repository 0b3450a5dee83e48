"""The token bucket that keeps copies within a bandwidth. Pure: time is an argument."""

from __future__ import annotations


class TokenBucket:
    """``rate`` in bytes per second, 0 for no limit; ``burst`` in bytes may go at once."""

    def __init__(self, rate: int, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._level = float(burst)
        self._then = 0.0

    def take(self, count: int, now: float) -> float:
        """Take ``count`` bytes at ``now`` (seconds, monotonic); the seconds to wait before use.

        The bucket may go into debt, so a request larger than the burst is served late, not never.
        """
        if self._rate == 0:
            return 0.0
        self._level = min(self._burst, self._level + max(0.0, now - self._then) * self._rate)
        self._then = now
        self._level -= count
        return max(0.0, -self._level / self._rate)
