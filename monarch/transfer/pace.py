"""How much of the source copies may take beside its readers. Pure: time is an argument.

A reader that waits for the source is held up while a copy reads there as well. So the share of time
in which copies read, times the share of time in which readers wait, is kept at one twentieth: what
a reader does takes at most that much longer, however little the source has to give. Readers that
wait for the source less than that leave it to the copies.
"""

from __future__ import annotations

import math

_DELAY = 0.05
# The readers' share is an average that rises quickly and falls slowly. Seconds.
_RISE_S = 0.1
_FALL_S = 1.0
# What is assumed of who has just opened a file.
_EXPECTED = 0.5
# It is taken anew no more often than this. Seconds.
_STEP_S = 0.01
# What copies may use at once after a pause, of their own time at the source. Seconds.
_SAVED_S = 0.05


class Pace:
    """Belongs to the event loop. ``look`` comes before what depends on the readers' share."""

    def __init__(self) -> None:
        self._seen_s = -math.inf
        self._waited_s = 0.0
        self._share = 0.0
        # The time at the source that copies have earned and not used; less than nothing if owed.
        self._earned_s = _SAVED_S
        self._under_way = 0

    @property
    def is_free(self) -> bool:
        """Whether readers leave the source to the copies."""
        return self._share <= _DELAY

    def expect(self) -> None:
        """Somebody has opened a file and is about to read it."""
        self._share = max(self._share, _EXPECTED)
        self._earned_s = min(self._earned_s, 0.0)

    def look(self, waited_s: float, now: float) -> None:
        """Readers have waited for the source for so long altogether, at least one at a time."""
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
        """Whether a copy may read the source now; one at a time, beside readers."""
        return self.is_free or (self._under_way == 0 and self._earned_s > 0)

    def began(self) -> None:
        self._under_way += 1

    def ended(self, seconds: float) -> None:
        """What had begun has read for so long."""
        self._under_way -= 1
        if not self.is_free:
            self._earned_s -= seconds
