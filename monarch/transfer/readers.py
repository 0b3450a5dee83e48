"""Who reads the source right now, so that copies can stand aside. Pure: time is an argument."""

from __future__ import annotations

# A reader that asks for the next block comes back within this time; a pause is longer. Seconds.
_BREATH = 0.02


class Readers:
    """Reads of the source for applications: how many are in flight, when the last ended."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._last = float("-inf")

    def begin(self) -> None:
        self._in_flight += 1

    def end(self, now: float) -> None:
        self._in_flight -= 1
        self._last = now

    def busy(self, now: float) -> bool:
        """Whether a copy would compete with a reader at ``now`` (seconds, monotonic)."""
        return self._in_flight > 0 or now - self._last < _BREATH
