"""The counters of one mount.

They are plain integers in lists, and only the thread of the event loop changes them. The thread of
a scrape may see an open counted before its latency is. Index 0 of a per-tier list is the source, k
is tier k.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from monarch.telemetry.report import Latency, Quantiles, SourceTotals, Traffic

SOURCE = "source"

# Seconds, in steps of 1-2-5, from 10 us (a warm open) to 10 s (a source in trouble).
BUCKETS_S = (*(float(f"{digit}e{power}") for power in range(-5, 1) for digit in (1, 2, 5)), 10.0)

# Kinds are names of exceptions and similar. A bug that invents kinds must not exhaust the memory.
MAX_KINDS = 64
OTHER_KINDS = "other"


class Histogram:
    """Counts of durations by bucket; the last place is for durations above BUCKETS_S."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def add(self, counts: Sequence[int], total_ns: int) -> None:
        """Adds the counts of another histogram with the same buckets."""
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]
        self.total_s += total_ns / 1e9

    def quantiles(self) -> Quantiles:
        count = sum(self.counts)
        return Quantiles(count, self._quantile(0.5, count), self._quantile(0.99, count))

    def _quantile(self, q: float, count: int) -> float | None:
        if not count:
            return None
        place = bisect_left(list(accumulate(self.counts)), q * count)
        return BUCKETS_S[place] if place < len(BUCKETS_S) else None


# The most files closed to the daemon whose inode numbers are kept; bounds the memory.
MOST_CLOSED = 100_000


class Metrics:
    """The counters of one mount. ``tier_names`` are in the order of the tiers, fastest first."""

    def __init__(self, tier_names: Sequence[str]) -> None:
        self.names = (SOURCE, *tier_names)
        n = len(self.names)
        self.opens = [0] * n
        self.reads = [0] * n
        self.read_bytes = [0] * n
        self.promotions = [0] * n
        self.promoted_bytes = [0] * n
        self.evictions = [0] * n
        self.evicted_bytes = [0] * n
        self.open_latency = [Histogram() for _ in self.names]
        self.read_latency = [Histogram() for _ in self.names]
        # Calls to the source: index 0 for readers, index 1 for copies.
        self.source_opens = [0, 0]
        self.source_reads = [0, 0]
        self.source_bytes = [0, 0]
        self.promotion_failures: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.changes = 0
        # Inode numbers of files that the source refused to open, at most MOST_CLOSED.
        self.closed_files: set[int] = set()

    def opened(self, tier: int, seconds: float) -> None:
        self.opens[tier] += 1
        self.open_latency[tier].observe(seconds)

    def read(self, tier: int, nbytes: int, seconds: float) -> None:
        self.reads[tier] += 1
        self.read_bytes[tier] += nbytes
        self.read_latency[tier].observe(seconds)

    def given(self, tier: int, nbytes: int) -> None:
        """Counts bytes stored in the kernel's page cache during an open as a read."""
        self.reads[tier] += 1
        self.read_bytes[tier] += nbytes

    def served(self, tier: int, *, opens: int, reads: int, nbytes: int) -> None:
        """Adds opens and reads that the C datapath answered without Python."""
        self.opens[tier] += opens
        self.reads[tier] += reads
        self.read_bytes[tier] += nbytes

    def source_refused(self, ino: int) -> None:
        """Counts a file that the source refused to open for the daemon."""
        if len(self.closed_files) < MOST_CLOSED:
            self.closed_files.add(ino)

    def source_opened(self, n: int = 1, *, copy: bool = False) -> None:
        """Counts ``n`` opens that reached the source, for a copy or for a reader."""
        self.source_opens[copy] += n

    def source_read(self, nbytes: int, *, copy: bool = False) -> None:
        """Counts one read call that reached the source, for a copy or for a reader."""
        self.source_reads[copy] += 1
        self.source_bytes[copy] += nbytes

    def promoted(self, tier: int, nbytes: int) -> None:
        self.promotions[tier] += 1
        self.promoted_bytes[tier] += nbytes

    def part_stored(self, tier: int, nbytes: int) -> None:
        """Counts granules that were written to a partial copy."""
        self.promoted_bytes[tier] += nbytes

    def promotion_failed(self, kind: str) -> None:
        _count(self.promotion_failures, kind)

    def evicted(self, tier: int, nbytes: int) -> None:
        self.evictions[tier] += 1
        self.evicted_bytes[tier] += nbytes

    def error(self, kind: str) -> None:
        _count(self.errors, kind)

    def changed(self) -> None:
        """Counts a source file that differs from its entry in the snapshot."""
        self.changes += 1

    def hits(self) -> int:
        """The number of opens that a tier served."""
        return sum(self.opens) - self.opens[0]

    def copied_per_wanted(self) -> float | None:
        """Bytes read from the source for each byte that readers got; None before the first."""
        wanted = sum(self.read_bytes)
        return sum(self.source_bytes) / wanted if wanted else None

    def hit_ratio(self) -> float | None:
        opens = sum(self.opens)
        return self.hits() / opens if opens else None

    def source_totals(self) -> SourceTotals:
        calls = self.source_opens, self.source_reads, self.source_bytes
        reader, copy = (Traffic(*figures) for figures in zip(*calls, strict=True))
        opens, reads, nbytes = map(sum, calls)
        return SourceTotals(opens, reads, nbytes, reader, copy)

    def latency(self) -> Latency:
        def by_tier(histograms: list[Histogram]) -> dict[str, Quantiles]:
            return {n: h.quantiles() for n, h in zip(self.names, histograms, strict=True)}

        return Latency(open=by_tier(self.open_latency), read=by_tier(self.read_latency))


def _count(kinds: Counter[str], kind: str) -> None:
    # The last of the MAX_KINDS places is reserved for OTHER_KINDS.
    kinds[kind if kind in kinds or len(kinds) < MAX_KINDS - 1 else OTHER_KINDS] += 1
