"""Who reads the source right now, so that copies can stand aside. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from monarch.types import Ino

# A reader that asks for the next block comes back within this time; a pause is longer. Seconds.
_BREATH = 0.02


@dataclass(frozen=True, slots=True)
class SourceTraffic:
    """Calls that reached the source so far, the bytes they brought, and reads under way now."""

    opens: int
    reads: int
    bytes: int
    waiting: int


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

    def reached(self, ino: Ino) -> int:
        """How far somebody has read a file of the source from its start on, elsewhere. Bytes."""
        return self._elsewhere.reached(ino) if self._elsewhere is not None else 0

    def begin(self) -> None:
        self._in_flight += 1

    def end(self, now: float) -> None:
        self._in_flight -= 1
        self._last = now

    def busy(self, now: float) -> bool:
        """Whether a copy would compete with a reader at ``now`` (seconds, monotonic)."""
        if self._elsewhere is not None:
            traffic = self._elsewhere.source_traffic()
            if traffic.waiting or traffic.reads != self._reads_elsewhere:
                self._reads_elsewhere, self._last = traffic.reads, now
        return self._in_flight > 0 or now - self._last < _BREATH
