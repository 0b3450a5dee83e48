"""The table of the metrics that Prometheus scrapes, and the page of their values."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, core
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
from monarch.telemetry.peers_report import PeersReport
from monarch.telemetry.report import StatusReport, TierReport, WritingReport

# The values of the labels, in their order, and the value of one sample.
Sample = tuple[tuple[str, ...], float | Histogram]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``name`` is the full name that a query uses; ``of`` computes the samples, and
    ``labels`` are the names of their labels."""

    name: str
    help: str
    of: Callable[[Metrics, StatusReport], Iterable[Sample]]
    labels: tuple[str, ...] = ()

    @property
    def type(self) -> str:
        if self.name in _HISTOGRAMS:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


_HISTOGRAMS = frozenset({"monarch_open_seconds", "monarch_read_seconds"})

# The functions below return a family that lacks its name.
_Nameless = Callable[[str], Family]


def _by_tier(help: str, choose: Callable[[Metrics], Sequence[int]]) -> _Nameless:
    """One sample per tier, without the source."""

    def of(metrics: Metrics, _: StatusReport) -> Iterator[Sample]:
        for name, value in list(zip(metrics.names, choose(metrics), strict=True))[1:]:
            yield (name,), value

    return partial(Family, help=help, of=of, labels=("tier",))


def _of_opens(help: str, choose: Callable[[Metrics], Sequence[int | Histogram]]) -> _Nameless:
    """One sample per tier and source; nothing where the kernel sends no opens."""

    def of(metrics: Metrics, status: StatusReport) -> Iterator[Sample]:
        if status.mode.counts_opens:
            for name, value in zip(metrics.names, choose(metrics), strict=True):
                yield (name,), value

    return partial(Family, help=help, of=of, labels=("tier",))


def _of_reads(help: str, choose: Callable[[Metrics], Sequence[int | Histogram]]) -> _Nameless:
    """As ``_of_opens``; only the source in a mode in which the kernel reads copies itself."""

    def of(metrics: Metrics, status: StatusReport) -> Iterator[Sample]:
        for name, value in zip(metrics.names, choose(metrics), strict=True):
            if status.mode.counts_tier_reads or name == SOURCE:
                yield (name,), value

    return partial(Family, help=help, of=of, labels=("tier",))


def _by_kind(help: str, choose: Callable[[Metrics], Mapping[str, int]]) -> _Nameless:
    def of(metrics: Metrics, _: StatusReport) -> Iterator[Sample]:
        # dict() copies without running Python code: the event loop may add a kind meanwhile.
        for kind, count in dict(choose(metrics)).items():
            yield (kind,), count

    return partial(Family, help=help, of=of, labels=("kind",))


def _by_cause(help: str, choose: Callable[[Metrics], Sequence[int]]) -> _Nameless:
    def of(metrics: Metrics, _: StatusReport) -> Iterator[Sample]:
        for cause, count in zip(("reader", "copy"), choose(metrics), strict=True):
            yield (cause,), count

    return partial(Family, help=help, of=of, labels=("by",))


def _one(help: str, value: Callable[[StatusReport], float | None]) -> _Nameless:
    def of(_: Metrics, status: StatusReport) -> Iterator[Sample]:
        number = value(status)
        if number is not None:
            yield (), number

    return partial(Family, help=help, of=of)


def _tier_bytes(_: Metrics, status: StatusReport) -> Iterator[Sample]:
    for tier in status.tiers:
        yield (tier.name, "used"), tier.used
        yield (tier.name, "reserved"), tier.reserved
        yield (tier.name, "capacity"), tier.capacity


def _of_tiers(help: str, value: Callable[[TierReport], float]) -> _Nameless:
    def of(_: Metrics, status: StatusReport) -> Iterator[Sample]:
        return (((tier.name,), value(tier)) for tier in status.tiers)

    return partial(Family, help=help, of=of, labels=("tier",))


def _of_writing(help: str, value: Callable[[WritingReport], float]) -> _Nameless:
    """One sample; none if the mount does not take writes."""
    return _one(help, lambda status: None if status.writing is None else value(status.writing))


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
_IF_COUNTED = "Missing if opens are not counted (`open: none`)."


def _opens(metrics: Metrics, status: StatusReport) -> Iterator[Sample]:
    if status.mode.counts_opens:
        yield from (((name,), n) for name, n in zip(metrics.names, metrics.opens, strict=True))
    elif status.opens is not None:
        yield ("unknown",), status.opens


def _of_peers(help: str, value: Callable[[PeersReport], float | None]) -> _Nameless:
    """One sample; none if the mount has no other nodes, or the value is not known."""
    return _one(help, lambda status: None if status.peers is None else value(status.peers))


def _peer_failures(_: Metrics, status: StatusReport) -> Iterator[Sample]:
    if status.peers is not None:
        for kind, count in status.peers.failures.items():
            yield (kind,), count


_TABLE: Mapping[str, _Nameless] = {
    "monarch_opens_total": partial(
        Family,
        help="Files opened through the mount, by the tier that served the open; `unknown` with"
        f" `open: none`. {_IF_COUNTED}",
        of=_opens,
        labels=("tier",),
    ),
    "monarch_reads_total": _of_reads(
        "Read requests that the daemon answered, by the tier that served them. Requests that the"
        " kernel answers from its page cache are not counted. With `datapath: passthrough` only"
        " the source's: the kernel reads the copies.",
        lambda m: m.reads,
    ),
    "monarch_read_bytes_total": _of_reads(
        "Bytes that the daemon returned to readers, by the tier that served them. Bytes that the"
        " kernel returns from its page cache are not counted. With `datapath: passthrough` only"
        " the source's: the kernel reads the copies.",
        lambda m: m.read_bytes,
    ),
    "monarch_source_opens_total": _by_cause(
        "Opens that reached the source, for a reader or for a copy.", lambda m: m.source_opens
    ),
    "monarch_source_reads_total": _by_cause(
        "Read calls that reached the source, for a reader or for a copy.", lambda m: m.source_reads
    ),
    "monarch_source_bytes_total": _by_cause(
        "Bytes read from the source, for a reader or for a copy.", lambda m: m.source_bytes
    ),
    "monarch_source_changes_total": partial(
        Family,
        help="Source files that were found to differ from their entry in the snapshot.",
        of=lambda m, _: [((), m.changes)],
    ),
    "monarch_promotions_total": _by_tier(
        "Copies committed, by the tier that holds them.", lambda m: m.promotions
    ),
    "monarch_promoted_bytes_total": _by_tier(
        "Bytes of the copies committed, by the tier that holds them.", lambda m: m.promoted_bytes
    ),
    "monarch_promotion_failures_total": _by_kind(
        "Copies that were given up, by the kind of error.", lambda m: m.promotion_failures
    ),
    "monarch_evictions_total": _by_tier("Copies removed from a tier.", lambda m: m.evictions),
    "monarch_evicted_bytes_total": _by_tier(
        "Bytes of the copies removed from a tier.", lambda m: m.evicted_bytes
    ),
    "monarch_errors_total": _by_kind(
        f"Errors by kind; beyond {MAX_KINDS} kinds they count as {OTHER_KINDS!r}.",
        lambda m: m.errors,
    ),
    "monarch_scrubbed_bytes_total": _one(
        "Bytes of copies that the scrub read and compared with their recorded digests.",
        lambda s: s.scrub.bytes,
    ),
    "monarch_scrub_found_total": _one(
        "Copies that the scrub found damaged and removed.", lambda s: s.scrub.found
    ),
    "monarch_promotions_running": _one(
        "Copies from the source to a tier that are running now.", lambda s: s.copies.running
    ),
    "monarch_promotions_queued": _one("Copies that wait for a worker.", lambda s: s.copies.queued),
    "monarch_wanted_files": _one(
        "Files that were admitted to a tier and have no committed copy yet.",
        lambda s: s.residency.wanted,
    ),
    "monarch_resident_files": _of_tiers(
        "Files with a committed copy in the tier.", lambda t: t.files
    ),
    "monarch_partial_files": _of_tiers("Files with a partial copy in the tier.", lambda t: t.parts),
    "monarch_partial_bytes": _of_tiers(
        "Bytes of the tier that partial copies use.", lambda t: t.part_bytes
    ),
    "monarch_resident_ratio": _one(
        "Share of the snapshot's files that have a committed copy, 0 to 1.",
        lambda s: s.residency.fraction_files,
    ),
    "monarch_tier_bytes": partial(
        Family,
        help="Space of the tier: used by copies, reserved for copies under way, and its capacity.",
        of=_tier_bytes,
        labels=("tier", "kind"),
    ),
    "monarch_tier_in_service": _of_tiers(
        "1 while the tier stores and serves copies, 0 while it is out of service.",
        lambda t: t.in_service,
    ),
    "monarch_writeback_backlog_files": _of_writing(
        "Files written through the mount that have not been written to the source yet.",
        lambda w: w.files,
    ),
    "monarch_writeback_backlog_bytes": _of_writing(
        "Bytes of the files written through the mount that are not yet at the source.",
        lambda w: w.bytes,
    ),
    "monarch_writeback_oldest_seconds": _of_writing(
        "Time that the oldest change has waited to be written to the source; 0 if none waits.",
        _oldest_s,
    ),
    "monarch_writeback_drained_files_total": _of_writing(
        "Files written through the mount that were drained to the source.",
        lambda w: w.drained_files,
    ),
    "monarch_writeback_drained_bytes_total": _of_writing(
        "Bytes of the files written through the mount that were drained to the source.",
        lambda w: w.drained_bytes,
    ),
    "monarch_writeback_errors_total": _of_writing(
        "Attempts to drain a written file that the source refused.", lambda w: w.errors
    ),
    "monarch_writeback_held_bytes": _of_writing(
        "Bytes of the tier that written files occupy, including files that were drained and are"
        " kept there.",
        lambda w: w.held,
    ),
    "monarch_writeback_reserve_bytes": _of_writing(
        "Bytes of the tier that are reserved for writing.", lambda w: w.reserve
    ),
    "monarch_writeback_names": _of_writing(
        "File names created or changed through the mount since the snapshot.",
        lambda w: w.names,
    ),
    "monarch_writeback_names_max": _of_writing(
        "Limit of monarch_writeback_names; at the limit a new name fails with ENOSPC.",
        lambda w: w.names_max,
    ),
    "monarch_writeback_lost_files": _of_writing(
        "Written files whose bytes are lost, until the loss is acknowledged.",
        lambda w: w.lost_files,
    ),
    "monarch_hit_ratio": _one(
        f"Share of the current epoch's opens that a tier served, 0 to 1. {_NO_OPENS}",
        lambda s: s.epochs[-1].hit_ratio if s.epochs else None,
    ),
    "monarch_epoch": _one(
        f"Number of the current epoch. {_IF_COUNTED}",
        lambda s: s.epochs[-1].number if s.epochs else None,
    ),
    "monarch_ahead_files_total": _one(
        "Files that were fetched before a process opened them.",
        lambda s: s.foresight.fetched_files,
    ),
    "monarch_ahead_bytes_total": _one(
        "Bytes of monarch_ahead_files_total.", lambda s: s.foresight.fetched_bytes
    ),
    "monarch_ahead_unread_bytes": _one(
        "Bytes that were fetched ahead, of files that no process has opened since.",
        lambda s: s.foresight.unread_bytes,
    ),
    "monarch_rule_bytes": partial(
        Family,
        help="Bytes, in the snapshot, of the files that a rule of the configuration is for.",
        of=lambda _, s: [((rule.match,), rule.bytes) for rule in s.rules],
        labels=("rule",),
    ),
    "monarch_rule_resident_bytes": partial(
        Family,
        help="Bytes of the copies of files that a rule of the configuration is for.",
        of=lambda _, s: [((rule.match,), rule.resident_bytes) for rule in s.rules],
        labels=("rule",),
    ),
    "monarch_next_use_replaced_bytes_total": _one(
        "Bytes that were written to tiers for copies in place of others that are read later.",
        lambda s: s.foresight.next_use.replaced_bytes,
    ),
    "monarch_window_bytes": _one(
        "Bytes of files that no tier admits, in memory for the readers to come.",
        lambda s: s.foresight.window.bytes,
    ),
    "monarch_window_read_bytes_total": _one(
        "Bytes of files that were read from that memory.",
        lambda s: s.foresight.window.served_bytes,
    ),
    "monarch_window_unread_bytes_total": _one(
        "Bytes of files that were dropped from that memory and not read.",
        lambda s: s.foresight.window.dropped_bytes,
    ),
    "monarch_peer_files_total": _of_peers(
        "Small files that another node of the job gave, in place of the source.", lambda p: p.files
    ),
    "monarch_peer_bytes_total": _of_peers(
        "Bytes that came from other nodes, also of large files.", lambda p: p.bytes
    ),
    "monarch_peer_failures_total": partial(
        Family,
        help="Requests to other nodes that brought no bytes, by kind (docs/nodes.md); the source"
        " was read.",
        of=_peer_failures,
        labels=("kind",),
    ),
    "monarch_peer_not_kept_total": _of_peers(
        "Requests for files that their owner does not keep; the source was read.",
        lambda p: p.not_kept,
    ),
    "monarch_peer_fetched_files_total": _of_peers(
        "Files that this node read from the source for other nodes.", lambda p: p.fetched_files
    ),
    "monarch_peer_sent_bytes_total": _of_peers(
        "Bytes that the engine of this node has sent for other nodes, with the heads of HTTP.",
        lambda p: p.sent_bytes,
    ),
    "monarch_peers_out": _of_peers(
        "Other nodes that are not asked for a while, since they did not answer.",
        lambda p: p.out,
    ),
    "monarch_open_files": _one(
        f"Files that are open for reading. {_NO_OPENS}", lambda s: s.handles.open_files
    ),
    "monarch_requests_waiting": _one(
        "Kernel requests that wait for an answer of the daemon.", lambda s: s.requests.waiting
    ),
    "monarch_oldest_request_seconds": _one(
        "Time that the oldest kernel request has waited for an answer.",
        lambda s: s.requests.oldest_s,
    ),
    "monarch_health": partial(
        Family,
        help="1 for the current state of the mount (`ok`, `degraded` or `failing`), 0 for the"
        " others.",
        of=_health,
        labels=("state",),
    ),
    "monarch_health_problems": partial(
        Family,
        help="Problems that the mount has now, by kind (docs/operations.md).",
        of=_problems,
        labels=("kind",),
    ),
    "monarch_snapshot_entries": _one(
        "Files, directories and links in the snapshot.", lambda s: s.snapshot.entries
    ),
    "monarch_snapshot_age_seconds": _one(
        "Seconds since the snapshot was made.", lambda s: s.snapshot.age_s
    ),
    "monarch_memory_bytes": _one("Resident memory of the daemon.", lambda s: s.memory.rss_bytes),
    "monarch_open_seconds": _of_opens(
        f"Time that the daemon took to answer an open, by the tier that served it. {_NO_OPENS}",
        lambda m: m.open_latency,
    ),
    "monarch_read_seconds": _of_reads(
        "Time that the daemon took to answer a read request, by the tier that served it. With"
        " `datapath: passthrough` only the source's: the kernel reads the copies.",
        lambda m: m.read_latency,
    ),
}

FAMILIES = tuple(make(name) for name, make in _TABLE.items())


@dataclass(frozen=True, eq=False)
class PrometheusCollector(Collector):
    """The counters, and a status report, as families of the client library."""

    metrics: Metrics
    status: StatusReport

    def collect(self) -> Iterator[core.Metric]:
        for family in FAMILIES:
            samples = family.of(self.metrics, self.status)
            about = family.name, family.help
            if family.type == "histogram":
                histogram = core.HistogramMetricFamily(*about, labels=family.labels)
                for labels, value in samples:
                    assert isinstance(value, Histogram)
                    bounds = [*map(str, BUCKETS_S), "+Inf"]
                    buckets = [*zip(bounds, map(float, accumulate(value.counts)), strict=True)]
                    histogram.add_metric(labels, buckets, sum_value=value.total_s)
                yield histogram
                continue
            kind = core.CounterMetricFamily if family.type == "counter" else core.GaugeMetricFamily
            metric = kind(*about, labels=family.labels)
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
