"""The table of the metrics that Prometheus scrapes, and the page of their values."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from monarch.telemetry.health import KINDS, STATES
from monarch.telemetry.metrics import (
    BUCKETS_S,
    MAX_KINDS,
    OTHER_KINDS,
    SOURCE,
    Histogram,
    Metrics,
)
from monarch.telemetry.report import StatusReport, TierReport, WritingReport

# The values of the labels, in their order, and the value of one sample.
Sample = tuple[tuple[str, ...], float | Histogram]


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a family, computed by ``of``, and the names of their labels."""

    of: Callable[[Metrics, StatusReport], Iterable[Sample]]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``name`` is the full name that a query uses."""

    name: str
    help: str
    samples: Samples
    is_histogram: bool = False

    @property
    def type(self) -> str:
        if self.is_histogram:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


def _by_tier(choose: Callable[[Metrics], Sequence[int]]) -> Samples:
    """One sample per tier, without the source."""

    def of(metrics: Metrics, _: StatusReport) -> Iterator[Sample]:
        for name, value in list(zip(metrics.names, choose(metrics), strict=True))[1:]:
            yield (name,), value

    return Samples(of, ("tier",))


def _of_opens(choose: Callable[[Metrics], Sequence[int | Histogram]]) -> Samples:
    """One sample per tier and source; nothing where the kernel sends no opens."""

    def of(metrics: Metrics, status: StatusReport) -> Iterator[Sample]:
        if status.mode.counts_opens:
            for name, value in zip(metrics.names, choose(metrics), strict=True):
                yield (name,), value

    return Samples(of, ("tier",))


def _of_reads(choose: Callable[[Metrics], Sequence[int | Histogram]]) -> Samples:
    """As ``_of_opens``; only the source in a mode in which the kernel reads copies itself."""

    def of(metrics: Metrics, status: StatusReport) -> Iterator[Sample]:
        for name, value in zip(metrics.names, choose(metrics), strict=True):
            if status.mode.counts_tier_reads or name == SOURCE:
                yield (name,), value

    return Samples(of, ("tier",))


def _by_kind(choose: Callable[[Metrics], Mapping[str, int]]) -> Samples:
    def of(metrics: Metrics, _: StatusReport) -> Iterator[Sample]:
        # dict() copies without running Python code: the event loop may add a kind meanwhile.
        for kind, count in dict(choose(metrics)).items():
            yield (kind,), count

    return Samples(of, ("kind",))


def _by_cause(choose: Callable[[Metrics], Sequence[int]]) -> Samples:
    def of(metrics: Metrics, _: StatusReport) -> Iterator[Sample]:
        for cause, count in zip(("reader", "copy"), choose(metrics), strict=True):
            yield (cause,), count

    return Samples(of, ("by",))


def _one(value: Callable[[StatusReport], float | None]) -> Samples:
    def of(_: Metrics, status: StatusReport) -> Iterator[Sample]:
        number = value(status)
        if number is not None:
            yield (), number

    return Samples(of)


def _tier_bytes(_: Metrics, status: StatusReport) -> Iterator[Sample]:
    for tier in status.tiers:
        yield (tier.name, "used"), tier.used
        yield (tier.name, "reserved"), tier.reserved
        yield (tier.name, "capacity"), tier.capacity


def _of_tiers(value: Callable[[TierReport], float]) -> Samples:
    return Samples(lambda _, status: [((t.name,), value(t)) for t in status.tiers], ("tier",))


def _of_writing(value: Callable[[WritingReport], float]) -> Samples:
    """One sample; none if the mount does not take writes."""
    return _one(lambda status: None if status.writing is None else value(status.writing))


def _oldest_s(writing: WritingReport) -> float:
    return max(0.0, (time.time_ns() - writing.oldest_ns) / 1e9) if writing.oldest_ns else 0.0


def _health(_: Metrics, status: StatusReport) -> Iterator[Sample]:
    for state in STATES:
        yield (state,), status.health.state == state


def _problems(_: Metrics, status: StatusReport) -> Iterator[Sample]:
    found = Counter(problem.kind for problem in status.health.problems)
    for kind in KINDS:
        yield (kind,), found[kind]


_NO_OPENS = "Missing with `open: none`: the kernel sends no opens."

FAMILIES: tuple[Family, ...] = (
    Family(
        "monarch_opens_total",
        f"Files opened through the mount, by the tier that served the open. {_NO_OPENS}",
        _of_opens(lambda m: m.opens),
    ),
    Family(
        "monarch_reads_total",
        "Read requests that the daemon answered, by the tier that served them. Requests that the"
        " kernel answers from its page cache are not counted. With `datapath: passthrough` only"
        " the source's: the kernel reads the copies.",
        _of_reads(lambda m: m.reads),
    ),
    Family(
        "monarch_read_bytes_total",
        "Bytes that the daemon returned to readers, by the tier that served them. Bytes that the"
        " kernel returns from its page cache are not counted. With `datapath: passthrough` only"
        " the source's: the kernel reads the copies.",
        _of_reads(lambda m: m.read_bytes),
    ),
    Family(
        "monarch_source_opens_total",
        "Opens that reached the source, for a reader or for a copy.",
        _by_cause(lambda m: m.source_opens),
    ),
    Family(
        "monarch_source_reads_total",
        "Read calls that reached the source, for a reader or for a copy.",
        _by_cause(lambda m: m.source_reads),
    ),
    Family(
        "monarch_source_bytes_total",
        "Bytes read from the source, for a reader or for a copy.",
        _by_cause(lambda m: m.source_bytes),
    ),
    Family(
        "monarch_source_changes_total",
        "Source files that were found to differ from their entry in the snapshot.",
        Samples(lambda m, _: [((), m.changes)]),
    ),
    Family(
        "monarch_promotions_total",
        "Copies committed, by the tier that holds them.",
        _by_tier(lambda m: m.promotions),
    ),
    Family(
        "monarch_promoted_bytes_total",
        "Bytes of the copies committed, by the tier that holds them.",
        _by_tier(lambda m: m.promoted_bytes),
    ),
    Family(
        "monarch_promotion_failures_total",
        "Copies that were given up, by the kind of error.",
        _by_kind(lambda m: m.promotion_failures),
    ),
    Family(
        "monarch_evictions_total", "Copies removed from a tier.", _by_tier(lambda m: m.evictions)
    ),
    Family(
        "monarch_evicted_bytes_total",
        "Bytes of the copies removed from a tier.",
        _by_tier(lambda m: m.evicted_bytes),
    ),
    Family(
        "monarch_errors_total",
        f"Errors by kind; beyond {MAX_KINDS} kinds they count as {OTHER_KINDS!r}.",
        _by_kind(lambda m: m.errors),
    ),
    Family(
        "monarch_scrubbed_bytes_total",
        "Bytes of copies that the scrub read and compared with their recorded digests.",
        _one(lambda s: s.scrub.bytes),
    ),
    Family(
        "monarch_scrub_found_total",
        "Copies that the scrub found damaged and removed.",
        _one(lambda s: s.scrub.found),
    ),
    Family(
        "monarch_promotions_running",
        "Copies from the source to a tier that are running now.",
        _one(lambda s: s.copies.running),
    ),
    Family(
        "monarch_promotions_queued",
        "Copies that wait for a worker.",
        _one(lambda s: s.copies.queued),
    ),
    Family(
        "monarch_wanted_files",
        "Files that were admitted to a tier and have no committed copy yet.",
        _one(lambda s: s.residency.wanted),
    ),
    Family(
        "monarch_resident_files",
        "Files with a committed copy in the tier.",
        _of_tiers(lambda t: t.files),
    ),
    Family(
        "monarch_resident_ratio",
        "Share of the snapshot's files that have a committed copy, 0 to 1.",
        _one(lambda s: s.residency.fraction_files),
    ),
    Family(
        "monarch_tier_bytes",
        "Space of the tier: used by copies, reserved for copies under way, and its capacity.",
        Samples(_tier_bytes, ("tier", "kind")),
    ),
    Family(
        "monarch_tier_in_service",
        "1 while the tier stores and serves copies, 0 while it is out of service.",
        _of_tiers(lambda t: t.in_service),
    ),
    Family(
        "monarch_writeback_backlog_files",
        "Files written through the mount that have not been written to the source yet.",
        _of_writing(lambda w: w.files),
    ),
    Family(
        "monarch_writeback_backlog_bytes",
        "Bytes of the files written through the mount that are not yet at the source.",
        _of_writing(lambda w: w.bytes),
    ),
    Family(
        "monarch_writeback_oldest_seconds",
        "Time that the oldest change has waited to be written to the source; 0 if none waits.",
        _of_writing(_oldest_s),
    ),
    Family(
        "monarch_writeback_drained_files_total",
        "Files written through the mount that were drained to the source.",
        _of_writing(lambda w: w.drained_files),
    ),
    Family(
        "monarch_writeback_drained_bytes_total",
        "Bytes of the files written through the mount that were drained to the source.",
        _of_writing(lambda w: w.drained_bytes),
    ),
    Family(
        "monarch_writeback_errors_total",
        "Attempts to drain a written file that the source refused.",
        _of_writing(lambda w: w.errors),
    ),
    Family(
        "monarch_writeback_held_bytes",
        "Bytes of the tier that written files occupy, including files that were drained and are"
        " kept there.",
        _of_writing(lambda w: w.held),
    ),
    Family(
        "monarch_writeback_reserve_bytes",
        "Bytes of the tier that are reserved for writing.",
        _of_writing(lambda w: w.reserve),
    ),
    Family(
        "monarch_writeback_names",
        "File names created or changed through the mount since the snapshot; memory holds them.",
        _of_writing(lambda w: w.names),
    ),
    Family(
        "monarch_writeback_names_max",
        "Limit of monarch_writeback_names; at the limit a new name fails with ENOSPC.",
        _of_writing(lambda w: w.names_max),
    ),
    Family(
        "monarch_writeback_lost_files",
        "Written files whose bytes are lost, until the loss is acknowledged.",
        _of_writing(lambda w: len(w.lost)),
    ),
    Family(
        "monarch_hit_ratio",
        f"Share of the current epoch's opens that a tier served, 0 to 1. {_NO_OPENS}",
        _one(lambda s: s.epochs[-1].hit_ratio if s.epochs else None),
    ),
    Family(
        "monarch_epoch",
        f"Number of the current epoch. {_NO_OPENS}",
        _one(lambda s: s.epochs[-1].number if s.epochs else None),
    ),
    Family(
        "monarch_open_files",
        f"Files that are open for reading. {_NO_OPENS}",
        _one(lambda s: s.handles.open_files),
    ),
    Family(
        "monarch_requests_waiting",
        "Kernel requests that wait for an answer of the daemon.",
        _one(lambda s: s.requests.waiting),
    ),
    Family(
        "monarch_oldest_request_seconds",
        "Time that the oldest kernel request has waited for an answer.",
        _one(lambda s: s.requests.oldest_s),
    ),
    Family(
        "monarch_health",
        "1 for the current state of the mount (`ok`, `degraded` or `failing`), 0 for the others.",
        Samples(_health, ("state",)),
    ),
    Family(
        "monarch_health_problems",
        "Problems that the mount has now, by kind (docs/operations.md).",
        Samples(_problems, ("kind",)),
    ),
    Family(
        "monarch_snapshot_entries",
        "Files, directories and links in the snapshot.",
        _one(lambda s: s.snapshot.entries),
    ),
    Family(
        "monarch_snapshot_age_seconds",
        "Seconds since the snapshot was made.",
        _one(lambda s: s.snapshot.age_s),
    ),
    Family(
        "monarch_memory_bytes", "Resident memory of the daemon.", _one(lambda s: s.memory.rss_bytes)
    ),
    Family(
        "monarch_open_seconds",
        f"Time that the daemon took to answer an open, by the tier that served it. {_NO_OPENS}",
        _of_opens(lambda m: m.open_latency),
        is_histogram=True,
    ),
    Family(
        "monarch_read_seconds",
        "Time that the daemon took to answer a read request, by the tier that served it. With"
        " `datapath: passthrough` only the source's: the kernel reads the copies.",
        _of_reads(lambda m: m.read_latency),
        is_histogram=True,
    ),
)


@dataclass(frozen=True, eq=False)
class PrometheusCollector(Collector):
    """The counters, and a status report, as families of the client library."""

    metrics: Metrics
    status: StatusReport

    def collect(self) -> Iterator[Metric]:
        for family in FAMILIES:
            samples = family.samples.of(self.metrics, self.status)
            about = family.name, family.help
            if family.is_histogram:
                histogram = HistogramMetricFamily(*about, labels=family.samples.labels)
                for labels, value in samples:
                    assert isinstance(value, Histogram)
                    bounds = [*map(str, BUCKETS_S), "+Inf"]
                    buckets = [*zip(bounds, map(float, accumulate(value.counts)), strict=True)]
                    histogram.add_metric(labels, buckets, sum_value=value.total_s)
                yield histogram
                continue
            kind = CounterMetricFamily if family.type == "counter" else GaugeMetricFamily
            metric = kind(*about, labels=family.samples.labels)
            for labels, value in samples:
                assert not isinstance(value, Histogram)
                metric.add_metric(labels, float(value))
            yield metric


def exposition(metrics: Metrics, report: StatusReport, accept: str) -> tuple[bytes, str]:
    """The page and its content type, in the format that ``accept`` requests; thread-safe."""
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(metrics, report))
    encode, kind = choose_encoder(accept)
    return encode(registry), kind
