"""Who reads the source right now, so that copies can stand aside. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from monarch.types import Ino

# A reader that asks for the next block comes back within this time; a pause is longer. Seconds.
_BREATH = 0.02


@dataclass(frozen=True, slots=True)
class SourceTraffic:
    """Calls that reached the source so far, the bytes they brought, and reads under way now.

    ``waited_ns`` is how long those that are over have waited, one after the other.
    """

    opens: int
    reads: int
    bytes: int
    waiting: int
    waited_ns: int


class Elsewhere(Protocol):
    """A datapath that reads the source beside the event loop."""

    def source_traffic(self) -> SourceTraffic: ...
    def reached(self, ino: Ino) -> int: ...


class Readers:
    """Reads of the source for applications: how many are in flight, when the last ended."""

    def __init__(self, elsewhere: Elsewhere | None = None) -> None:
        self._elsewhere = elsewhere
        self._reads_elsewhere = 0
        self._in_flight = 0
        self._last = float("-inf")
        # How long at least one read was in flight, and since when one is.
        self._waited = 0.0
        self._since = 0.0
        # The same of reads elsewhere, when it was asked for, and what was told then.
        self._waited_elsewhere = 0.0
        self._asked = 0.0
        self._told_ns = 0

    def reached(self, ino: Ino) -> int:
        """How far somebody has read a file of the source from its start on, elsewhere. Bytes."""
        return self._elsewhere.reached(ino) if self._elsewhere is not None else 0

    def begin(self, now: float) -> None:
        if self._in_flight == 0:
            self._since = now
        self._in_flight += 1

    def end(self, now: float) -> None:
        self._in_flight -= 1
        self._last = now
        if self._in_flight == 0:
            self._waited += now - self._since

    def waited(self, now: float) -> float:
        """How long readers have waited for the source so far, in seconds; together count once.

        Of reads elsewhere it is an estimate: those at the same time are taken to have waited one
        after the other, for no longer than the time that has passed.
        """
        waited = self._waited + (now - self._since if self._in_flight else 0.0)
        if self._elsewhere is not None:
            traffic = self._elsewhere.source_traffic()
            elapsed, self._asked = max(0.0, now - self._asked), now
            added, self._told_ns = (traffic.waited_ns - self._told_ns) / 1e9, traffic.waited_ns
            if added or traffic.waiting:
                # One that has not ended yet has not been counted.
                self._waited_elsewhere += min(elapsed, added or elapsed)
        return waited + self._waited_elsewhere

    def busy(self, now: float) -> bool:
        """Whether a copy would compete with a reader at ``now`` (seconds, monotonic)."""
        if self._elsewhere is not None:
            traffic = self._elsewhere.source_traffic()
            if traffic.waiting or traffic.reads != self._reads_elsewhere:
                self._reads_elsewhere, self._last = traffic.reads, now
        return self._in_flight > 0 or now - self._last < _BREATH
