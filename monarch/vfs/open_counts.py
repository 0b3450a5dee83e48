"""The opens of a mount, counted in their order: those answered here, and those of the datapath.

The datapath answers opens and reads of copies outside the interpreter, and fetches small files.
Policies, epochs and metrics receive each of them: opens one by one, reads as totals. Placement
decides here whether fetched files become copies.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from monarch.placement.epochs import Epochs
from monarch.placement.residency import SOURCE
from monarch.telemetry.metrics import Metrics
from monarch.vfs.binding import Binding
from monarch.vfs.interfaces import ABANDONED, RELEASED, FastPath
from monarch.vfs.opens import Opens
from monarch.vfs.promotions import Promotions


@dataclass(eq=False, repr=False)
class OpenCounts:
    """Belongs to the event loop. ``fast`` is the datapath, None if there is none."""

    _fast: FastPath | None
    _opens: Opens
    _promotions: Promotions
    _epochs: Epochs
    _metrics: Metrics

    def __post_init__(self) -> None:
        self._noted_ns = time.monotonic_ns()
        if self._fast is not None:
            self._tallies = self._fast.tallies()
            self._traffic = self._fast.source_traffic()

    def add(self, binding: Binding, started: float) -> None:
        """Counts an open that was answered here; ``started`` is of ``time.perf_counter``."""
        self._metrics.opened(binding.tier, time.perf_counter() - started)
        self._epochs.opened(binding.ino, binding.tier != SOURCE)

    def catch_up(self) -> None:
        """Handles the events of the datapath. Called before an open is decided here, so that all
        opens are counted in their order."""
        if self._fast is None:
            return
        # The events happened since the last call.
        since_ns, self._noted_ns = self._noted_ns, time.monotonic_ns()
        for ino, what, content in self._fast.served():
            if what == RELEASED:
                self._opens.old_version_released(ino)
            elif what == ABANDONED:
                self._opens.release(ino)
            elif content is not None:
                self._promotions.keep_fetched(ino, content, since_ns)
                self._fast.taken(ino)
                self._epochs.opened(ino, False)
            else:
                self._promotions.accessed(ino, what)
                self._epochs.opened(ino, what != SOURCE)

    def catch_up_all(self) -> None:
        """Handles the events and adds up the totals of the datapath. Called before the metrics are
        read, and from time to time."""
        if self._fast is None:
            return
        self.catch_up()
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
