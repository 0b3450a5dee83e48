"""What the figures of a mount mean: epochs with their times, and what the source was spared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from monarch.telemetry.figures import Figures, PlaceFigures
from monarch.telemetry.report import EpochReport, Report
from monarch.telemetry.timeline import Sample

# The version of the JSON of ``monarch report``.
VERSION: Final = 1

# The begin of an epoch is noticed after up to 64 opens (telemetry/passes.py). In an epoch of so
# many opens that is a twentieth.
_LEAST_OPENS = 1280


@dataclass(frozen=True, slots=True)
class EpochSummary:
    """One epoch. ``hits`` of its opens were served by tiers. It began ``begun_s`` after the mount
    and lasted ``seconds``; ``source_opens`` and ``source_bytes`` reached the source meanwhile, also
    for copies. None if that is not known: the begin of an epoch is noticed after up to 64 opens, so
    what the source was asked for is not known of small epochs."""

    number: int
    opens: int
    hits: int | None
    begun_s: float | None
    seconds: float | None
    source_opens: int | None
    source_bytes: int | None


@dataclass(frozen=True, slots=True)
class Spared:
    """What readers asked for, what the source was asked for instead, also for copies, and the
    difference. Bytes are lower limits: reads that the kernel answers from its page cache are not
    counted. ``seconds``: the time that readers, all together, would have waited longer if the
    source had taken as long for each of their opens and reads as for those that it served. None if
    that is not known."""

    asked_opens: int | None
    source_opens: int
    opens: int | None
    asked_bytes: int | None
    source_bytes: int
    bytes: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Place:
    """What the source or a tier has served to readers; None if that is not counted."""

    name: str
    opens: int | None
    reads: int | None
    bytes: int | None
    mean_open_s: float | None


@dataclass(frozen=True, slots=True)
class Pattern:
    """How a job reads a directory: the pattern that was recognised."""

    directory: str
    pattern: str
    files: int


@dataclass(frozen=True, slots=True)
class Summary(Report):
    """The report of one mount, as ``monarch report --json`` prints it. Times in seconds, sizes in
    bytes; None is unknown. ``not_counted`` has the reason why opens are not counted."""

    monarch_report: int
    version: str
    mountpoint: str
    source: str
    job: str
    begun_ns: int
    until_ns: int
    is_ended: bool
    health: str
    problems: list[str]
    files: int
    bytes: int
    resident_files: int
    resident_bytes: int
    opens: int | None
    hit_ratio: float | None
    not_counted: str
    mode: str
    epochs: list[EpochSummary]
    places: list[Place]
    spared: Spared
    patterns: list[Pattern]
    announced_orders: int
    fetched_ahead_bytes: int
    samples: list[Sample]


def summary_of(figures: Figures) -> Summary:
    status = figures.status
    return Summary(
        monarch_report=VERSION,
        version=status.version,
        mountpoint=status.mountpoint,
        source=status.source,
        job=figures.job,
        begun_ns=figures.begun_ns,
        until_ns=figures.until_ns,
        is_ended=figures.is_ended,
        health=status.health.state,
        problems=[problem.what for problem in status.health.problems],
        files=status.snapshot.files,
        bytes=status.snapshot.bytes,
        resident_files=status.residency.files,
        resident_bytes=status.residency.bytes,
        opens=status.opens,
        hit_ratio=status.hit_ratio,
        not_counted=status.opens_not_counted,
        mode=f"datapath {status.mode.datapath}, open {status.mode.open}",
        epochs=_epochs(figures),
        places=[_place(place) for place in figures.places],
        spared=spared_by(figures),
        patterns=[
            Pattern(each.directory, each.pattern, each.files) for each in status.foresight.streams
        ],
        announced_orders=status.foresight.announced.ended + status.foresight.announced.orders,
        fetched_ahead_bytes=status.foresight.fetched_bytes,
        samples=figures.samples,
    )


def _place(place: PlaceFigures) -> Place:
    mean = place.open_s / place.timed if place.opens is not None and place.timed else None
    return Place(place.name, place.opens, place.reads, place.bytes, mean)


def spared_by(figures: Figures) -> Spared:
    status, totals = figures.status, figures.status.source_totals
    nbytes = None if status.bytes is None else status.bytes - totals.bytes
    if nbytes is not None and nbytes < 0 and not status.mode.counts_opens:
        # The kernel serves reads from its page cache, which are not counted.
        nbytes = None
    return Spared(
        asked_opens=status.opens,
        source_opens=totals.opens,
        opens=None if status.opens is None else status.opens - totals.opens,
        asked_bytes=status.bytes,
        source_bytes=totals.bytes,
        bytes=nbytes,
        seconds=_spared_seconds(figures.places),
    )


def _spared_seconds(places: list[PlaceFigures]) -> float | None:
    """The time for the opens and reads of the tiers at the mean times of the source, less the time
    that they took. None if opens are not reported, or the source has served none."""
    if not places or not places[0].timed or any(place.opens is None for place in places):
        return None
    source, tiers = places[0], places[1:]
    open_s = source.open_s / source.timed
    read_s = source.read_s / source.reads if source.reads else 0.0
    spared = 0.0
    for tier in tiers:
        spared += (tier.opens or 0) * open_s - tier.open_s
        # Where the kernel reads copies itself, the source is read by the daemon only.
        if tier.reads is not None:
            spared += tier.reads * read_s - tier.read_s
    # Damaged figures may have any times.
    return max(0.0, spared) if math.isfinite(spared) else None


def _epochs(figures: Figures) -> list[EpochSummary]:
    begins = {each.epoch: each for each in figures.epoch_begins}
    ends = {before.epoch: after for before, after in itertools.pairwise(figures.epoch_begins)}
    if figures.epoch_begins and figures.samples:
        ends[figures.epoch_begins[-1].epoch] = figures.samples[-1]
    return [_epoch(each, begins, ends) for each in figures.status.epochs or []]


def _epoch(
    counted: EpochReport, begins: Mapping[int, Sample], ends: Mapping[int, Sample]
) -> EpochSummary:
    begin, end = begins.get(counted.number), ends.get(counted.number)
    is_large = counted.opens >= _LEAST_OPENS
    return EpochSummary(
        number=counted.number,
        opens=counted.opens,
        hits=counted.hits,
        begun_s=None if begin is None else begin.time_s,
        seconds=end.time_s - begin.time_s if begin and end else None,
        source_opens=end.source_opens - begin.source_opens if begin and end and is_large else None,
        source_bytes=end.source_bytes - begin.source_bytes if begin and end and is_large else None,
    )
