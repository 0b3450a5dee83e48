"""How many pieces of chunks are read at the same time.

Pure: time is an argument, in seconds of a monotonic clock.

Pieces follow each other without a pause, so that the bandwidth of the source is used. More of them
at the same time only make the reads of readers wait longer. So one more, or a quarter more, is
tried from time to time, and is kept if the bytes a second rise with it.
"""

from __future__ import annotations

import math

# Pieces in a measurement, and the rise of the rate by which more pieces are kept.
_PIECES = 8
_RISE = 1.1
# The share of the pieces that is tried in addition. With one more of ten no rate would rise enough.
_MORE = 1 / 4
# Measurements between two trials: the interval doubles up to the second value.
_INTERVAL = (2, 32)


class Depth:
    """``limit`` is the number of pieces to be read now; from ``least`` to ``most``."""

    def __init__(self, least: int, most: int) -> None:
        self.limit = self._least = least
        self._most = max(least, most)
        self._began_s = math.inf
        self._pieces = self._bytes = 0
        self._rate = 0.0
        # The limit before the trial that is under way; 0: there is none.
        self._before = 0
        self._interval = self._left = _INTERVAL[0]

    def idle(self) -> None:
        """No piece is being read: a measurement with a pause in it says nothing."""
        self._began_s = math.inf

    def ended(self, nbytes: int, now: float) -> None:
        """Reports a piece of ``nbytes`` that was read."""
        if self._began_s == math.inf:
            self._began_s, self._pieces, self._bytes = now, 0, 0
            return
        self._pieces += 1
        self._bytes += nbytes
        if self._pieces < _PIECES * self.limit or now <= self._began_s:
            return
        rate = self._bytes / (now - self._began_s)
        self._began_s, self._pieces, self._bytes = now, 0, 0
        if self._before:
            self._judge(rate)
            return
        self._rate = rate
        self._left -= 1
        if self._left <= 0 and self.limit < self._most:
            self._before = self.limit
            self.limit = min(self._most, self.limit + max(1, int(self.limit * _MORE)))

    def _judge(self, rate: float) -> None:
        before, self._before = self._before, 0
        if rate > self._rate * _RISE:
            self._rate, self._interval = rate, _INTERVAL[0]
            # At once more, as long as it helps.
            self._left = 0
        else:
            self.limit = before
            self._interval = min(2 * self._interval, _INTERVAL[1])
            self._left = self._interval
