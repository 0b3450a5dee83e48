"""The load that readers put on the source, so that copies can give way. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from monarch.types import Ino

# A reader requests the next block within this time; a longer gap is a pause.
_BREATH = 0.02


@dataclass(frozen=True, slots=True)
class SourceTraffic:
    """Totals of calls to the source and bytes read, and the reads that run now. ``waited_ns`` is
    the sum of the durations of all completed reads."""

    opens: int
    reads: int
    bytes: int
    waiting: int
    waited_ns: int


class Elsewhere(Protocol):
    """A datapath that reads the source outside the event loop."""

    def source_traffic(self) -> SourceTraffic: ...
    def reached(self, ino: Ino) -> int: ...


class SourceLoad:
    """Reads of the source for readers: the number that run, and the end of the last.
    ``elsewhere`` makes the reads of the datapath."""

    def __init__(self, elsewhere: Elsewhere) -> None:
        self._elsewhere = elsewhere
        self._reads_elsewhere = 0
        self._in_flight = 0
        self._last = float("-inf")
        # The time with at least one running read, and the begin of the current such period.
        self._waited = 0.0
        self._since = 0.0
        # The same for the reads of the datapath, the time of the last query, and its result.
        self._waited_elsewhere = 0.0
        self._asked = 0.0
        self._told_ns = 0

    def reached(self, ino: Ino) -> int:
        """The position, in bytes, of a reader of the datapath that reads a file from its start."""
        return self._elsewhere.reached(ino)

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
        """The total time in seconds in which readers have waited for the source; overlaps count
        once.

        For reads of the datapath it is an estimate: their durations are added, up to the elapsed
        time.
        """
        waited = self._waited + (now - self._since if self._in_flight else 0.0)
        traffic = self._elsewhere.source_traffic()
        elapsed, self._asked = max(0.0, now - self._asked), now
        added, self._told_ns = (traffic.waited_ns - self._told_ns) / 1e9, traffic.waited_ns
        if added or traffic.waiting:
            # A read that has not ended is not in the sum yet.
            self._waited_elsewhere += min(elapsed, added or elapsed)
        return waited + self._waited_elsewhere

    def busy(self, now: float) -> bool:
        """Whether a copy would compete with a reader at ``now`` (seconds, monotonic)."""
        traffic = self._elsewhere.source_traffic()
        if traffic.waiting or traffic.reads != self._reads_elsewhere:
            self._reads_elsewhere, self._last = traffic.reads, now
        return self._in_flight > 0 or now - self._last < _BREATH
