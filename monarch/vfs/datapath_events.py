"""Learning afterwards what the fast path has served, as if every open had come here.

The fast path answers opens and reads of resident files without the interpreter, and fetches small
files. Policies, epochs and metrics see each of them all the same: opens one by one in their order,
reads as numbers. What was fetched is decided upon here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from monarch.placement.controller import Controller
from monarch.placement.epochs import Epochs
from monarch.placement.residency import SOURCE
from monarch.telemetry.metrics import Metrics
from monarch.transfer.source_load import SourceTraffic
from monarch.types import Ino

# An open: the inode and the tier that served it. Or, in the place of a tier, what else happened: it
# was fetched from the source, and then its bytes are there; an open that was answered here did not
# come about; or the last open of an outdated version was released.
Served = tuple[Ino, int, memoryview | None]
ABANDONED = 0xFD
RELEASED = 0xFF


@dataclass(frozen=True, slots=True)
class Tally:
    """What was served from one tier so far. The counts are by bucket of ``metrics.BUCKETS_S``."""

    opens: int
    reads: int
    bytes: int
    open_counts: list[int]
    open_ns: int
    read_counts: list[int]
    read_ns: int


class FastPath(Protocol):
    """What the file system asks of a datapath beside the interpreter.

    Only ``register`` waits, for a disk: call it in a thread.
    """

    def register(self, fd: int, tier: int) -> int: ...
    def unregister(self, backing_id: int) -> None: ...
    def bind(self, ino: Ino, fd: int, *, tier: int, size: int, backing_id: int) -> bool: ...
    def outdate(self, ino: Ino) -> bool: ...
    def served(self) -> list[Served]: ...
    def taken(self, ino: Ino) -> None: ...
    def was_given(self, ino: Ino) -> bool: ...
    def tallies(self) -> list[Tally]: ...
    def source_traffic(self) -> SourceTraffic: ...
    def open_files(self) -> int: ...
    def backing_ids(self) -> int: ...
    def is_open(self, ino: Ino) -> bool: ...
    def is_passed(self, ino: Ino) -> bool: ...


class EventConsumer:
    """Brings what ``fast`` has served into the books. Belongs to the event loop.

    ``keep`` is given the bytes of a file that was fetched, and a moment of the monotonic clock in
    nanoseconds after which that was; ``release`` an inode that nobody has opened after all;
    ``forget_copy`` drops a copy.
    """

    def __init__(
        self,
        fast: FastPath,
        *,
        controller: Controller,
        epochs: Epochs,
        metrics: Metrics,
        keep: Callable[[Ino, memoryview, int], None],
        release: Callable[[Ino], None],
        forget_copy: Callable[[Ino], object],
    ) -> None:
        self._fast = fast
        self._keep = keep
        self._release = release
        self._forget_copy = forget_copy
        self._controller = controller
        self._epochs = epochs
        self._metrics = metrics
        self._noted_ns = time.monotonic_ns()
        self._tallies = fast.tallies()
        self._traffic = fast.source_traffic()

    def note_opens(self) -> None:
        """Call it before an open is decided here, so that all opens are seen in their order."""
        # What is told now has happened since it was asked the last time.
        since_ns, self._noted_ns = self._noted_ns, time.monotonic_ns()
        for ino, what, content in self._fast.served():
            if what == RELEASED:
                self._forget_copy(ino)
            elif what == ABANDONED:
                self._release(ino)
            elif content is not None:
                self._keep(ino, content, since_ns)
                self._fast.taken(ino)
                self._epochs.opened(ino, False)
            else:
                self._controller.accessed(ino, what)
                self._epochs.opened(ino, what != SOURCE)

    def note_all(self) -> None:
        """Call it before somebody looks at the numbers, and now and then."""
        self.note_opens()
        tallies = self._fast.tallies()
        for tier, (now, then) in enumerate(zip(tallies, self._tallies, strict=True)):
            self._metrics.served(
                tier,
                opens=now.opens - then.opens,
                reads=now.reads - then.reads,
                nbytes=now.bytes - then.bytes,
            )
            opens, reads = self._metrics.open_latency[tier], self._metrics.read_latency[tier]
            opens.add(_difference(now.open_counts, then.open_counts), now.open_ns - then.open_ns)
            reads.add(_difference(now.read_counts, then.read_counts), now.read_ns - then.read_ns)
        self._tallies = tallies
        before, self._traffic = self._traffic, self._fast.source_traffic()
        self._metrics.source_opens[0] += self._traffic.opens - before.opens
        self._metrics.source_reads[0] += self._traffic.reads - before.reads
        self._metrics.source_bytes[0] += self._traffic.bytes - before.bytes


def _difference(now: list[int], then: list[int]) -> list[int]:
    return [a - b for a, b in zip(now, then, strict=True)]
