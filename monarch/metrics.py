"""Counting what happens, cheaply, and showing it to Prometheus.

Counters are plain integers in lists, changed by the event loop's thread only; an open or a read
costs three additions and one bisection. Other threads (the scrape) read whole integers and may see
an open counted whose latency is not yet. Index 0 of every per-tier list is the source, k is tier k.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from monarch.health import KINDS, STATES
from monarch.report import (
    Latency,
    Quantiles,
    SourceTotals,
    StatusReport,
    Traffic,
    WritingReport,
)

SOURCE = "source"

# 1-2-5 steps from 10 us, a warm open, to 10 s, a source in trouble.
BUCKETS_S = (
    *(float(f"{digit}e{power}") for power in range(-5, 1) for digit in (1, 2, 5)),
    10.0,
)

# Kinds come from exception names and the like. A bug that makes them up must not eat the memory.
MAX_KINDS = 64
OTHER_KINDS = "other"


class Histogram:
    """How often something took how long; ``counts`` has one more place than BUCKETS_S."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def add(self, counts: Sequence[int], total_ns: int) -> None:
        """What was observed elsewhere, by the same buckets."""
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


# So many files that are closed to the daemon are told apart.
MOST_CLOSED = 100_000


class Metrics:
    """The counters of one mount. ``tier_names`` are the tiers' own, fastest first."""

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
        # Of the source, place 0 by readers and 1 by copies.
        self.source_opens = [0, 0]
        self.source_reads = [0, 0]
        self.source_bytes = [0, 0]
        self.promotion_failures: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.changes = 0
        # Inode numbers of files that the source did not let the daemon open; not all of very many.
        self.closed_files: set[int] = set()

    def opened(self, tier: int, seconds: float) -> None:
        self.opens[tier] += 1
        self.open_latency[tier].observe(seconds)

    def read(self, tier: int, nbytes: int, seconds: float) -> None:
        self.reads[tier] += 1
        self.read_bytes[tier] += nbytes
        self.read_latency[tier].observe(seconds)

    def given(self, tier: int, nbytes: int) -> None:
        """Bytes went to the kernel's pages with the open: a read that took no time of its own."""
        self.reads[tier] += 1
        self.read_bytes[tier] += nbytes

    def served(self, tier: int, *, opens: int, reads: int, nbytes: int) -> None:
        """What was served beside the interpreter."""
        self.opens[tier] += opens
        self.reads[tier] += reads
        self.read_bytes[tier] += nbytes

    def source_refused(self, ino: int) -> None:
        """The source does not let the daemon open a file."""
        if len(self.closed_files) < MOST_CLOSED:
            self.closed_files.add(ino)

    def source_opened(self, n: int = 1, *, copy: bool = False) -> None:
        """``n`` opens really reached the source, for a reader or for a copy."""
        self.source_opens[copy] += n

    def source_read(self, nbytes: int, *, copy: bool = False) -> None:
        """One read call really reached the source, for a reader or for a copy."""
        self.source_reads[copy] += 1
        self.source_bytes[copy] += nbytes

    def promoted(self, tier: int, nbytes: int) -> None:
        self.promotions[tier] += 1
        self.promoted_bytes[tier] += nbytes

    def promotion_failed(self, kind: str) -> None:
        _count(self.promotion_failures, kind)

    def evicted(self, tier: int, nbytes: int) -> None:
        self.evictions[tier] += 1
        self.evicted_bytes[tier] += nbytes

    def error(self, kind: str) -> None:
        _count(self.errors, kind)

    def changed(self) -> None:
        """A source file was found not to be the one that the snapshot describes."""
        self.changes += 1

    def hits(self) -> int:
        """Opens that a tier served."""
        return sum(self.opens) - self.opens[0]

    def hit_ratio(self) -> float | None:
        opens = sum(self.opens)
        return self.hits() / opens if opens else None

    def source_totals(self) -> SourceTotals:
        reader, copy = (
            Traffic(self.source_opens[who], self.source_reads[who], self.source_bytes[who])
            for who in (0, 1)
        )
        return SourceTotals(
            opens=reader.opens + copy.opens,
            reads=reader.reads + copy.reads,
            bytes=reader.bytes + copy.bytes,
            reader=reader,
            copy=copy,
        )

    def latency(self) -> Latency:
        def by_tier(histograms: list[Histogram]) -> dict[str, Quantiles]:
            return {n: h.quantiles() for n, h in zip(self.names, histograms, strict=True)}

        return Latency(open=by_tier(self.open_latency), read=by_tier(self.read_latency))


def _count(kinds: Counter[str], kind: str) -> None:
    # The last place is for what there is no place for.
    kinds[kind if kind in kinds or len(kinds) < MAX_KINDS - 1 else OTHER_KINDS] += 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a family; ``labels`` in the order of the family's."""

    labels: tuple[str, ...]
    value: float | Histogram


@dataclass(frozen=True, slots=True)
class Family:
    """One line of the table of metrics. ``name`` is as a query writes it."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Metrics, StatusReport], Iterable[Sample]]


def _by_tier(
    choose: Callable[[Metrics], Sequence[int | Histogram]], first: int = 0
) -> Callable[[Metrics, StatusReport], Iterator[Sample]]:
    def samples(metrics: Metrics, _: StatusReport) -> Iterator[Sample]:
        for name, value in list(zip(metrics.names, choose(metrics), strict=True))[first:]:
            yield Sample((name,), value)

    return samples


def _of_opens(
    choose: Callable[[Metrics], Sequence[int | Histogram]],
) -> Callable[[Metrics, StatusReport], Iterator[Sample]]:
    """By tier; nothing where the kernel tells no opens."""

    def samples(metrics: Metrics, status: StatusReport) -> Iterator[Sample]:
        if status.mode.counts_opens:
            yield from _by_tier(choose)(metrics, status)

    return samples


def _of_reads(
    choose: Callable[[Metrics], Sequence[int | Histogram]],
) -> Callable[[Metrics, StatusReport], Iterator[Sample]]:
    """By tier; the source alone where the kernel reads copies by itself."""

    def samples(metrics: Metrics, status: StatusReport) -> Iterator[Sample]:
        for sample in _by_tier(choose)(metrics, status):
            if status.mode.counts_tier_reads or sample.labels == (SOURCE,):
                yield sample

    return samples


def _by_kind(
    choose: Callable[[Metrics], Mapping[str, int]],
) -> Callable[[Metrics, StatusReport], Iterator[Sample]]:
    def samples(metrics: Metrics, _: StatusReport) -> Iterator[Sample]:
        # A copy, made without running Python: the loop may add a kind meanwhile.
        for kind, count in dict(choose(metrics)).items():
            yield Sample((kind,), count)

    return samples


def _by_who(
    choose: Callable[[Metrics], Sequence[int]],
) -> Callable[[Metrics, StatusReport], Iterator[Sample]]:
    def samples(metrics: Metrics, _: StatusReport) -> Iterator[Sample]:
        for who, count in zip(("reader", "copy"), choose(metrics), strict=True):
            yield Sample((who,), count)

    return samples


def _one(
    value: Callable[[StatusReport], float | None],
) -> Callable[[Metrics, StatusReport], Iterator[Sample]]:
    def samples(_: Metrics, status: StatusReport) -> Iterator[Sample]:
        number = value(status)
        if number is not None:
            yield Sample((), number)

    return samples


def _tier_bytes(_: Metrics, status: StatusReport) -> Iterator[Sample]:
    for tier in status.tiers:
        yield Sample((tier.name, "used"), tier.used)
        yield Sample((tier.name, "reserved"), tier.reserved)
        yield Sample((tier.name, "capacity"), tier.capacity)


def _resident_files(_: Metrics, status: StatusReport) -> Iterator[Sample]:
    for tier in status.tiers:
        yield Sample((tier.name,), tier.files)


def _tier_in_service(_: Metrics, status: StatusReport) -> Iterator[Sample]:
    for tier in status.tiers:
        yield Sample((tier.name,), tier.in_service)


def _of_writing(
    value: Callable[[WritingReport], float],
) -> Callable[[Metrics, StatusReport], Iterator[Sample]]:
    """Nothing where nothing can be written."""

    def samples(_: Metrics, status: StatusReport) -> Iterator[Sample]:
        if status.writing is not None:
            yield Sample((), value(status.writing))

    return samples


def _oldest_s(writing: WritingReport) -> float:
    return max(0.0, (time.time_ns() - writing.oldest_ns) / 1e9) if writing.oldest_ns else 0.0


def _health(_: Metrics, status: StatusReport) -> Iterator[Sample]:
    for state in STATES:
        yield Sample((state,), status.health.state == state)


def _problems(_: Metrics, status: StatusReport) -> Iterator[Sample]:
    found = Counter(problem.kind for problem in status.health.problems)
    for kind in KINDS:
        yield Sample((kind,), found[kind])


FAMILIES: tuple[Family, ...] = (
    Family(
        "monarch_opens_total",
        "counter",
        "Files opened through the mount, by the tier that served them."
        " Missing with `open: none`: the kernel tells no opens.",
        ("tier",),
        _of_opens(lambda m: m.opens),
    ),
    Family(
        "monarch_reads_total",
        "counter",
        "Read requests that the daemon answered, by the tier that served them; those that the"
        " kernel answers from its page cache are not counted. With `datapath: passthrough` only"
        " the source's: the kernel reads copies by itself.",
        ("tier",),
        _of_reads(lambda m: m.reads),
    ),
    Family(
        "monarch_read_bytes_total",
        "counter",
        "Bytes that the daemon gave to readers, by the tier that served them; those that the"
        " kernel gives from its page cache are not counted. With `datapath: passthrough` only"
        " the source's: the kernel reads copies by itself.",
        ("tier",),
        _of_reads(lambda m: m.read_bytes),
    ),
    Family(
        "monarch_source_opens_total",
        "counter",
        "Opens that reached the source, for a reader or for a copy.",
        ("by",),
        _by_who(lambda m: m.source_opens),
    ),
    Family(
        "monarch_source_reads_total",
        "counter",
        "Read calls that reached the source, for a reader or for a copy.",
        ("by",),
        _by_who(lambda m: m.source_reads),
    ),
    Family(
        "monarch_source_bytes_total",
        "counter",
        "Bytes read from the source, for a reader or for a copy.",
        ("by",),
        _by_who(lambda m: m.source_bytes),
    ),
    Family(
        "monarch_source_changes_total",
        "counter",
        "Source files found not to be the ones that the snapshot describes.",
        (),
        lambda m, _: (Sample((), m.changes),),
    ),
    Family(
        "monarch_promotions_total",
        "counter",
        "Copies committed, by the tier that took them.",
        ("tier",),
        _by_tier(lambda m: m.promotions, first=1),
    ),
    Family(
        "monarch_promoted_bytes_total",
        "counter",
        "Bytes of the copies committed, by the tier that took them.",
        ("tier",),
        _by_tier(lambda m: m.promoted_bytes, first=1),
    ),
    Family(
        "monarch_promotion_failures_total",
        "counter",
        "Copies given up, by what went wrong.",
        ("kind",),
        _by_kind(lambda m: m.promotion_failures),
    ),
    Family(
        "monarch_evictions_total",
        "counter",
        "Copies that left a tier.",
        ("tier",),
        _by_tier(lambda m: m.evictions, first=1),
    ),
    Family(
        "monarch_evicted_bytes_total",
        "counter",
        "Bytes of the copies that left a tier.",
        ("tier",),
        _by_tier(lambda m: m.evicted_bytes, first=1),
    ),
    Family(
        "monarch_errors_total",
        "counter",
        f"Errors by kind; beyond {MAX_KINDS} kinds they count as {OTHER_KINDS!r}.",
        ("kind",),
        _by_kind(lambda m: m.errors),
    ),
    Family(
        "monarch_scrubbed_bytes_total",
        "counter",
        "Bytes of copies read to see whether they are still what was recorded.",
        (),
        _one(lambda s: s.scrub.bytes),
    ),
    Family(
        "monarch_scrub_found_total",
        "counter",
        "Copies that the scrub found damaged, and dropped.",
        (),
        _one(lambda s: s.scrub.found),
    ),
    Family(
        "monarch_promotions_running",
        "gauge",
        "Copies under way.",
        (),
        _one(lambda s: s.copies.running),
    ),
    Family(
        "monarch_promotions_queued",
        "gauge",
        "Copies waiting for a worker.",
        (),
        _one(lambda s: s.copies.queued),
    ),
    Family(
        "monarch_wanted_files",
        "gauge",
        "Files admitted and not yet resident.",
        (),
        _one(lambda s: s.residency.wanted),
    ),
    Family(
        "monarch_resident_files",
        "gauge",
        "Files with a committed copy in the tier.",
        ("tier",),
        _resident_files,
    ),
    Family(
        "monarch_resident_ratio",
        "gauge",
        "Share of the snapshot's files that have a committed copy, 0 to 1.",
        (),
        _one(lambda s: s.residency.fraction_files),
    ),
    Family(
        "monarch_tier_bytes",
        "gauge",
        "Space of the tier: used by copies, reserved for copies under way, and its capacity.",
        ("tier", "kind"),
        _tier_bytes,
    ),
    Family(
        "monarch_tier_in_service",
        "gauge",
        "1 while the tier takes and serves copies, 0 while it is out of service.",
        ("tier",),
        _tier_in_service,
    ),
    Family(
        "monarch_writeback_backlog_files",
        "gauge",
        "Files written through the mount that are not at the source yet.",
        (),
        _of_writing(lambda w: w.files),
    ),
    Family(
        "monarch_writeback_backlog_bytes",
        "gauge",
        "Bytes of the files written through the mount that are not at the source yet.",
        (),
        _of_writing(lambda w: w.bytes),
    ),
    Family(
        "monarch_writeback_oldest_seconds",
        "gauge",
        "How long the oldest change has waited for the source, 0 if none waits.",
        (),
        _of_writing(_oldest_s),
    ),
    Family(
        "monarch_writeback_drained_files_total",
        "counter",
        "Written files that were flushed to the source.",
        (),
        _of_writing(lambda w: w.drained_files),
    ),
    Family(
        "monarch_writeback_drained_bytes_total",
        "counter",
        "Bytes of the written files that were flushed to the source.",
        (),
        _of_writing(lambda w: w.drained_bytes),
    ),
    Family(
        "monarch_writeback_errors_total",
        "counter",
        "Attempts to flush a written file to the source that the source refused.",
        (),
        _of_writing(lambda w: w.errors),
    ),
    Family(
        "monarch_writeback_held_bytes",
        "gauge",
        "Bytes of the tier that written files take, including files that were flushed and are"
        " kept there.",
        (),
        _of_writing(lambda w: w.held),
    ),
    Family(
        "monarch_writeback_reserve_bytes",
        "gauge",
        "Bytes of the tier that are kept for writing.",
        (),
        _of_writing(lambda w: w.reserve),
    ),
    Family(
        "monarch_writeback_names",
        "gauge",
        "Names made or changed through the mount since the snapshot, which are held in memory.",
        (),
        _of_writing(lambda w: w.names),
    ),
    Family(
        "monarch_writeback_names_max",
        "gauge",
        "So many of them there may be: then no more can be made.",
        (),
        _of_writing(lambda w: w.names_max),
    ),
    Family(
        "monarch_writeback_lost_files",
        "gauge",
        "Written files whose bytes are lost, until the loss is acknowledged.",
        (),
        _of_writing(lambda w: len(w.lost)),
    ),
    Family(
        "monarch_hit_ratio",
        "gauge",
        "Share of the current epoch's opens that a tier served, 0 to 1."
        " Missing with `open: none`: the kernel tells no opens.",
        (),
        _one(lambda s: s.epochs[-1].hit_ratio if s.epochs else None),
    ),
    Family(
        "monarch_epoch",
        "gauge",
        "Number of the current epoch. Missing with `open: none`: the kernel tells no opens.",
        (),
        _one(lambda s: s.epochs[-1].number if s.epochs else None),
    ),
    Family(
        "monarch_open_files",
        "gauge",
        "Files that readers hold open. Missing with `open: none`: the kernel tells no opens.",
        (),
        _one(lambda s: s.handles.open_files),
    ),
    Family(
        "monarch_requests_waiting",
        "gauge",
        "Requests of the kernel that wait for an answer.",
        (),
        _one(lambda s: s.requests.waiting),
    ),
    Family(
        "monarch_oldest_request_seconds",
        "gauge",
        "How long the oldest of them has waited.",
        (),
        _one(lambda s: s.requests.oldest_s),
    ),
    Family(
        "monarch_health",
        "gauge",
        "1 for the state that the mount is in (`ok`, `degraded`, `failing`), 0 for the others.",
        ("state",),
        _health,
    ),
    Family(
        "monarch_health_problems",
        "gauge",
        "Problems that the mount has now, by kind (docs/operations.md).",
        ("kind",),
        _problems,
    ),
    Family(
        "monarch_snapshot_entries",
        "gauge",
        "Entries in the snapshot.",
        (),
        _one(lambda s: s.snapshot.entries),
    ),
    Family(
        "monarch_snapshot_age_seconds",
        "gauge",
        "Seconds since the snapshot was made.",
        (),
        _one(lambda s: s.snapshot.age_s),
    ),
    Family(
        "monarch_memory_bytes",
        "gauge",
        "Resident memory of the daemon.",
        (),
        _one(lambda s: s.memory.rss_bytes),
    ),
    Family(
        "monarch_open_seconds",
        "histogram",
        "Time in which the daemon answered an open, by the tier that served it."
        " Missing with `open: none`: the kernel tells no opens.",
        ("tier",),
        _of_opens(lambda m: m.open_latency),
    ),
    Family(
        "monarch_read_seconds",
        "histogram",
        "Time in which the daemon answered a read request, by the tier that served it. With"
        " `datapath: passthrough` only the source's: the kernel reads copies by itself.",
        ("tier",),
        _of_reads(lambda m: m.read_latency),
    ),
)


def document() -> str:
    """The table of metrics as Markdown."""
    lines = [
        "# Metrics",
        "",
        "Made from the table in `monarch/metrics.py` by `scripts/metrics_doc.py`; do not edit.",
        "",
        "With `metrics: {enabled: true}` the daemon shows these at `http://localhost:9464/metrics`",
        "(`metrics.address`). `tier` is a tier's name from the configuration, or `source`.",
        "Histograms have the buckets 10 us to 10 s in steps of 1-2-5.",
        "",
        "| name | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        lines.append(f"| `{family.name}` | {family.type} | {labels} | {family.help} |")
    return "\n".join(lines) + "\n"
