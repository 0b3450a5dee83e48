"""The table of the metrics that Prometheus scrapes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from monarch.telemetry.health import KINDS, STATES
from monarch.telemetry.metrics import MAX_KINDS, OTHER_KINDS, SOURCE, Histogram, Metrics
from monarch.telemetry.report import StatusReport, TierReport, WritingReport


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a family; ``labels`` has the values of the family's labels, in their order."""

    labels: tuple[str, ...]
    value: float | Histogram


Samples = Callable[[Metrics, StatusReport], Iterable[Sample]]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``name`` is the full name that a query uses."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    samples: Samples


def _counter(name: str, meaning: str, samples: Samples, *labels: str) -> Family:
    return Family(name, "counter", meaning, labels, samples)


def _gauge(name: str, meaning: str, samples: Samples, *labels: str) -> Family:
    return Family(name, "gauge", meaning, labels, samples)


def _histogram(name: str, meaning: str, samples: Samples, *labels: str) -> Family:
    return Family(name, "histogram", meaning, labels, samples)


def _by_tier(choose: Callable[[Metrics], Sequence[int | Histogram]], first: int = 0) -> Samples:
    def samples(metrics: Metrics, _: StatusReport) -> Iterator[Sample]:
        for name, value in list(zip(metrics.names, choose(metrics), strict=True))[first:]:
            yield Sample((name,), value)

    return samples


def _of_opens(choose: Callable[[Metrics], Sequence[int | Histogram]]) -> Samples:
    """By tier; nothing where the kernel sends no opens."""

    def samples(metrics: Metrics, status: StatusReport) -> Iterator[Sample]:
        if status.mode.counts_opens:
            yield from _by_tier(choose)(metrics, status)

    return samples


def _of_reads(choose: Callable[[Metrics], Sequence[int | Histogram]]) -> Samples:
    """One sample per tier; only the source in a mode in which the kernel reads copies itself."""

    def samples(metrics: Metrics, status: StatusReport) -> Iterator[Sample]:
        for sample in _by_tier(choose)(metrics, status):
            if status.mode.counts_tier_reads or sample.labels == (SOURCE,):
                yield sample

    return samples


def _by_kind(choose: Callable[[Metrics], Mapping[str, int]]) -> Samples:
    def samples(metrics: Metrics, _: StatusReport) -> Iterator[Sample]:
        # dict() copies without running Python code: the event loop may add a kind meanwhile.
        for kind, count in dict(choose(metrics)).items():
            yield Sample((kind,), count)

    return samples


def _by_who(choose: Callable[[Metrics], Sequence[int]]) -> Samples:
    def samples(metrics: Metrics, _: StatusReport) -> Iterator[Sample]:
        for who, count in zip(("reader", "copy"), choose(metrics), strict=True):
            yield Sample((who,), count)

    return samples


def _one(value: Callable[[StatusReport], float | None]) -> Samples:
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


def _of_tiers(value: Callable[[TierReport], float]) -> Samples:
    return lambda _, status: [Sample((tier.name,), value(tier)) for tier in status.tiers]


def _of_writing(value: Callable[[WritingReport], float]) -> Samples:
    """One sample; none if the mount does not take writes."""
    return _one(lambda status: None if status.writing is None else value(status.writing))


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
    _counter(
        "monarch_opens_total",
        "Files opened through the mount, by the tier that served the open."
        " Missing with `open: none`: the kernel sends no opens.",
        _of_opens(lambda m: m.opens),
        "tier",
    ),
    _counter(
        "monarch_reads_total",
        "Read requests that the daemon answered, by the tier that served them. Requests that the"
        " kernel answers from its page cache are not counted. With `datapath: passthrough` only"
        " the source's: the kernel reads the copies.",
        _of_reads(lambda m: m.reads),
        "tier",
    ),
    _counter(
        "monarch_read_bytes_total",
        "Bytes that the daemon returned to readers, by the tier that served them. Bytes that the"
        " kernel returns from its page cache are not counted. With `datapath: passthrough` only"
        " the source's: the kernel reads the copies.",
        _of_reads(lambda m: m.read_bytes),
        "tier",
    ),
    _counter(
        "monarch_source_opens_total",
        "Opens that reached the source, for a reader or for a copy.",
        _by_who(lambda m: m.source_opens),
        "by",
    ),
    _counter(
        "monarch_source_reads_total",
        "Read calls that reached the source, for a reader or for a copy.",
        _by_who(lambda m: m.source_reads),
        "by",
    ),
    _counter(
        "monarch_source_bytes_total",
        "Bytes read from the source, for a reader or for a copy.",
        _by_who(lambda m: m.source_bytes),
        "by",
    ),
    _counter(
        "monarch_source_changes_total",
        "Source files that were found to differ from their entry in the snapshot.",
        lambda m, _: (Sample((), m.changes),),
    ),
    _counter(
        "monarch_promotions_total",
        "Copies committed, by the tier that holds them.",
        _by_tier(lambda m: m.promotions, first=1),
        "tier",
    ),
    _counter(
        "monarch_promoted_bytes_total",
        "Bytes of the copies committed, by the tier that holds them.",
        _by_tier(lambda m: m.promoted_bytes, first=1),
        "tier",
    ),
    _counter(
        "monarch_promotion_failures_total",
        "Copies that were given up, by the kind of error.",
        _by_kind(lambda m: m.promotion_failures),
        "kind",
    ),
    _counter(
        "monarch_evictions_total",
        "Copies removed from a tier.",
        _by_tier(lambda m: m.evictions, first=1),
        "tier",
    ),
    _counter(
        "monarch_evicted_bytes_total",
        "Bytes of the copies removed from a tier.",
        _by_tier(lambda m: m.evicted_bytes, first=1),
        "tier",
    ),
    _counter(
        "monarch_errors_total",
        f"Errors by kind; beyond {MAX_KINDS} kinds they count as {OTHER_KINDS!r}.",
        _by_kind(lambda m: m.errors),
        "kind",
    ),
    _counter(
        "monarch_scrubbed_bytes_total",
        "Bytes of copies that the scrub read and compared with their recorded digests.",
        _one(lambda s: s.scrub.bytes),
    ),
    _counter(
        "monarch_scrub_found_total",
        "Copies that the scrub found damaged and removed.",
        _one(lambda s: s.scrub.found),
    ),
    _gauge(
        "monarch_promotions_running",
        "Copies from the source to a tier that are running now.",
        _one(lambda s: s.copies.running),
    ),
    _gauge(
        "monarch_promotions_queued",
        "Copies that wait for a worker.",
        _one(lambda s: s.copies.queued),
    ),
    _gauge(
        "monarch_wanted_files",
        "Files that were admitted to a tier and have no committed copy yet.",
        _one(lambda s: s.residency.wanted),
    ),
    _gauge(
        "monarch_resident_files",
        "Files with a committed copy in the tier.",
        _of_tiers(lambda t: t.files),
        "tier",
    ),
    _gauge(
        "monarch_resident_ratio",
        "Share of the snapshot's files that have a committed copy, 0 to 1.",
        _one(lambda s: s.residency.fraction_files),
    ),
    _gauge(
        "monarch_tier_bytes",
        "Space of the tier: used by copies, reserved for copies under way, and its capacity.",
        _tier_bytes,
        "tier",
        "kind",
    ),
    _gauge(
        "monarch_tier_in_service",
        "1 while the tier stores and serves copies, 0 while it is out of service.",
        _of_tiers(lambda t: t.in_service),
        "tier",
    ),
    _gauge(
        "monarch_writeback_backlog_files",
        "Files written through the mount that have not been written to the source yet.",
        _of_writing(lambda w: w.files),
    ),
    _gauge(
        "monarch_writeback_backlog_bytes",
        "Bytes of the files written through the mount that are not yet at the source.",
        _of_writing(lambda w: w.bytes),
    ),
    _gauge(
        "monarch_writeback_oldest_seconds",
        "Time that the oldest change has waited to be written to the source; 0 if none waits.",
        _of_writing(_oldest_s),
    ),
    _counter(
        "monarch_writeback_drained_files_total",
        "Files written through the mount that were drained to the source.",
        _of_writing(lambda w: w.drained_files),
    ),
    _counter(
        "monarch_writeback_drained_bytes_total",
        "Bytes of the files written through the mount that were drained to the source.",
        _of_writing(lambda w: w.drained_bytes),
    ),
    _counter(
        "monarch_writeback_errors_total",
        "Attempts to drain a written file that the source refused.",
        _of_writing(lambda w: w.errors),
    ),
    _gauge(
        "monarch_writeback_held_bytes",
        "Bytes of the tier that written files occupy, including files that were drained and are"
        " kept there.",
        _of_writing(lambda w: w.held),
    ),
    _gauge(
        "monarch_writeback_reserve_bytes",
        "Bytes of the tier that are reserved for writing.",
        _of_writing(lambda w: w.reserve),
    ),
    _gauge(
        "monarch_writeback_names",
        "File names created or changed through the mount since the snapshot; memory holds them.",
        _of_writing(lambda w: w.names),
    ),
    _gauge(
        "monarch_writeback_names_max",
        "Limit of monarch_writeback_names; at the limit a new name fails with ENOSPC.",
        _of_writing(lambda w: w.names_max),
    ),
    _gauge(
        "monarch_writeback_lost_files",
        "Written files whose bytes are lost, until the loss is acknowledged.",
        _of_writing(lambda w: len(w.lost)),
    ),
    _gauge(
        "monarch_hit_ratio",
        "Share of the current epoch's opens that a tier served, 0 to 1."
        " Missing with `open: none`: the kernel sends no opens.",
        _one(lambda s: s.epochs[-1].hit_ratio if s.epochs else None),
    ),
    _gauge(
        "monarch_epoch",
        "Number of the current epoch. Missing with `open: none`: the kernel sends no opens.",
        _one(lambda s: s.epochs[-1].number if s.epochs else None),
    ),
    _gauge(
        "monarch_open_files",
        "Files that are open for reading. Missing with `open: none`: the kernel sends no opens.",
        _one(lambda s: s.handles.open_files),
    ),
    _gauge(
        "monarch_requests_waiting",
        "Kernel requests that wait for an answer of the daemon.",
        _one(lambda s: s.requests.waiting),
    ),
    _gauge(
        "monarch_oldest_request_seconds",
        "Time that the oldest kernel request has waited for an answer.",
        _one(lambda s: s.requests.oldest_s),
    ),
    _gauge(
        "monarch_health",
        "1 for the current state of the mount (`ok`, `degraded` or `failing`), 0 for the others.",
        _health,
        "state",
    ),
    _gauge(
        "monarch_health_problems",
        "Problems that the mount has now, by kind (docs/operations.md).",
        _problems,
        "kind",
    ),
    _gauge(
        "monarch_snapshot_entries",
        "Files, directories and links in the snapshot.",
        _one(lambda s: s.snapshot.entries),
    ),
    _gauge(
        "monarch_snapshot_age_seconds",
        "Seconds since the snapshot was made.",
        _one(lambda s: s.snapshot.age_s),
    ),
    _gauge(
        "monarch_memory_bytes", "Resident memory of the daemon.", _one(lambda s: s.memory.rss_bytes)
    ),
    _histogram(
        "monarch_open_seconds",
        "Time that the daemon took to answer an open, by the tier that served it."
        " Missing with `open: none`: the kernel sends no opens.",
        _of_opens(lambda m: m.open_latency),
        "tier",
    ),
    _histogram(
        "monarch_read_seconds",
        "Time that the daemon took to answer a read request, by the tier that served it. With"
        " `datapath: passthrough` only the source's: the kernel reads the copies.",
        _of_reads(lambda m: m.read_latency),
        "tier",
    ),
)
