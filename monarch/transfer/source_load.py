"""The load that readers put on the source, so that copies can give way."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol

from monarch.tiers.tier import Tier
from monarch.types import Ino

# A reader requests the next block within this time; a longer gap is a pause.
_BREATH = 0.02


@dataclass(frozen=True, slots=True)
class SourceTraffic:
    """Totals of opens and reads of the source, and of the bytes read, and the calls that run now.
    ``calls`` gave readers bytes: those of a whole file count once, and bytes of another node count,
    too. ``waited_ns`` is the sum of the durations of all completed calls."""

    opens: int
    reads: int
    bytes: int
    waiting: int
    calls: int
    waited_ns: int


@dataclass(frozen=True, slots=True)
class CallTotals:
    """The number and duration of opens and reads of a tier so far."""

    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReaderTotals:
    """The reads of the source by readers so far, the sum of their durations, and the reads that
    run now. A fetch of a whole file is one read, also one from another node."""

    reads: int
    waited_s: float
    running: int


class DatapathView(Protocol):
    """The datapath as the copies see it: it opens and reads files outside the event loop.

    ``bypass`` sends opens of copies in a tier to Python, or ends that. ``move`` is called in a
    thread when the descriptors of a tier lead elsewhere. ``oldest_wait_s`` is the age of the oldest
    running call to the source, 0 if there is none. ``reached`` is the position, in bytes, of a
    reader that reads a file from its start. ``keep`` keeps bytes for readers until ``unkeep``:
    ``files`` has for each file its inode number, and the begin and the number of its bytes in
    ``data``. It returns views of the bytes; None for a file that it does not keep.
    """

    def bypass(self, tier: int, bypassed: bool) -> None: ...
    def move(self, tier: Tier) -> None: ...
    def totals(self, tier: int) -> CallTotals: ...
    def oldest_wait_s(self) -> float: ...
    def source_traffic(self) -> SourceTraffic: ...
    def reached(self, ino: Ino) -> int: ...
    def keep(self, files: array[int], data: bytes | bytearray) -> list[memoryview | None]: ...
    def unkeep(self, ino: Ino) -> None: ...


class NoDatapath:
    """The view without the C extension: Python serves everything."""

    def bypass(self, tier: int, bypassed: bool) -> None: ...

    def move(self, tier: Tier) -> None: ...

    def totals(self, tier: int) -> CallTotals:
        return CallTotals(0, 0.0)

    def oldest_wait_s(self) -> float:
        return 0.0

    def source_traffic(self) -> SourceTraffic:
        return SourceTraffic(0, 0, 0, 0, 0, 0)

    def reached(self, ino: Ino) -> int:
        return 0

    def keep(self, files: array[int], data: bytes | bytearray) -> list[memoryview | None]:
        return [None] * (len(files) // 3)

    def unkeep(self, ino: Ino) -> None: ...


class SourceLoad:
    """Reads of the source for readers: the number that run, and the end of the last.
    The ``datapath`` makes reads of its own."""

    def __init__(self, datapath: DatapathView) -> None:
        self._datapath = datapath
        # The position of a reader of the datapath that reads a file from its start.
        self.reached = datapath.reached
        self.keep, self.unkeep = datapath.keep, datapath.unkeep
        self._reads_elsewhere = 0
        self._in_flight = 0
        self._last = float("-inf")
        # The time with at least one running read, and the begin of the current such period.
        self._waited = 0.0
        self._since = 0.0
        # The same for the reads of the datapath, the time of the last query, and its result.
        self._waited_elsewhere = 0.0
        self._asked = 0.0
        self._counted_ns = 0
        # The reads and fetches of Python that have ended, and the sum of their durations.
        self._ended = 0
        self._ended_s = 0.0

    def ended(self, seconds: float) -> None:
        """Counts a read, or a fetch of a whole file, that took ``seconds``."""
        self._ended += 1
        self._ended_s += seconds

    def totals(self) -> ReaderTotals:
        traffic = self._datapath.source_traffic()
        return ReaderTotals(
            reads=self._ended + traffic.calls,
            waited_s=self._ended_s + traffic.waited_ns / 1e9,
            running=self._in_flight + traffic.waiting,
        )

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
        once. For the datapath it is an estimate: durations are added, up to the elapsed time."""
        waited = self._waited + (now - self._since if self._in_flight else 0.0)
        traffic = self._datapath.source_traffic()
        elapsed, self._asked = max(0.0, now - self._asked), now
        added, self._counted_ns = (traffic.waited_ns - self._counted_ns) / 1e9, traffic.waited_ns
        if added or traffic.waiting:
            # A read that has not ended is not in the sum yet.
            self._waited_elsewhere += min(elapsed, added or elapsed)
        return waited + self._waited_elsewhere

    def busy(self, now: float) -> bool:
        """Whether a copy would compete with a reader at ``now`` (seconds, monotonic)."""
        traffic = self._datapath.source_traffic()
        if traffic.waiting or traffic.reads != self._reads_elsewhere:
            self._reads_elsewhere, self._last = traffic.reads, now
        return self._in_flight > 0 or now - self._last < _BREATH
