"""The profile of a job, as ``monarch analyze run`` writes it, and the conclusions from it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final

from monarch.analysis.loader_model import JobModel, Kind, Point, fitted
from monarch.analysis.stalls import (
    Measured,
    Run,
    Verdict,
    measured,
    stalls_with,
    troubles_of,
    verdict_on,
)
from monarch.telemetry.report import Report
from monarch.text import MOST_BYTES

# The version of the format; it changes if a reader of the earlier version would misread a profile.
VERSION: Final = 1
# The share of the bytes of a mount from which on an epoch is taken for one of all files.
_NEARLY_ALL: Final = 0.9


@dataclass(frozen=True, slots=True)
class Profile(Report):
    """All measured runs of a job, and where they ran.

    ``data_bytes`` are those of all files of the mount, ``tier_bytes`` the capacity of its tiers.
    ``source_limit`` in bytes/s was in force in all runs, 0: none. ``cores`` were usable. A run had
    ``iterations`` batches, or up to ``most_iterations`` if its windows differed. The conclusions
    are from ``runs``; ``unused_runs`` are those of earlier rounds, which differed too much.
    """

    monarch_profile: int
    monarch: str
    host: str
    cores: int
    started_ns: int
    command: list[str]
    mountpoint: str
    data_bytes: int
    tier_bytes: int
    source_limit: int
    iterations: int
    warmup: int
    runs: list[Run]
    most_iterations: int = 0
    unused_runs: list[Run] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ShareResult:
    """The job with ``share`` of its files in the tiers: rates in batches/s with the training
    (``rate``) and without it (``load_rate``), and the stalls as shares of its time. ``hits`` of its
    opens were served by tiers. ``epoch_s`` is None if the length of the loader is not known."""

    share: float
    hits: float
    rate: float
    load_rate: float
    prep_stall: float
    fetch_stall: float
    epoch_s: float | None
    cv: float
    drift: float


@dataclass(frozen=True, slots=True)
class Result(Report):
    """The conclusions from a profile.

    The verdict is on the job with the smallest share of its files in the tiers. ``troubles`` says
    which rates are not to be used, and why. ``batch_bytes`` are those of the files of a batch, 0 if
    no file was read from the source. ``epoch_bytes`` are those of the files that epochs read,
    at least 1. ``smallest_share`` of them must be in a tier, of ``smallest_tier`` bytes, for the
    fetch stall to end. ``model`` describes the job with an error of at most ``model_error`` of each
    measured rate; it is None if the measured shares do not differ.
    """

    verdict: Verdict
    why: str
    troubles: list[str]
    training_rate: float
    training_cv: float
    training_drift: float
    shares: list[ShareResult]
    workers: int | None
    cores: int
    batch_bytes: float
    epoch_batches: int | None
    epoch_bytes: float
    model: Kind | None
    model_error: float | None
    smallest_share: float | None
    smallest_tier: int | None


def encode(profile: Profile) -> str:
    """The profile and the conclusions from it as JSON. A reader of the file must ignore keys that
    it does not know."""
    return (
        json.dumps({**profile.to_dict(), "result": result_of(profile).to_dict()}, indent=1) + "\n"
    )


def decode(text: str) -> Profile:
    """Raises ValueError if ``text`` is not a profile of this version."""
    return profile_of(json.loads(text))


def profile_of(raw: object) -> Profile:
    """Raises ValueError if ``raw`` is not the JSON value of a profile of this version."""
    if not isinstance(raw, dict) or "monarch_profile" not in raw:
        raise ValueError("it is not a profile of monarch analyze")
    if raw["monarch_profile"] != VERSION:
        raise ValueError(f"its format has version {raw['monarch_profile']!r}, not {VERSION}")
    profile = Profile.from_dict(raw)
    sizes = (profile.data_bytes, profile.tier_bytes, profile.source_limit)
    if not 1 <= profile.cores < 1 << 20 or not all(0 <= each <= MOST_BYTES for each in sizes):
        raise ValueError("it has a number out of its range")
    measured(profile.runs)
    if profile.unused_runs:
        measured(profile.unused_runs)
    return profile


def result_of(profile: Profile) -> Result:
    """Raises ValueError if a phase was not measured."""
    found = measured(profile.runs)
    verdict, why = verdict_on(found, found.real[0])
    last = profile.runs[-1].report
    batch_bytes, epoch_bytes = _bytes(profile, found)
    model, error = model_of(profile)
    smallest = None if model is None else model.smallest_share()
    return Result(
        verdict=verdict,
        why=why,
        troubles=[*troubles_of(found, found.real)],
        training_rate=found.synthetic.per_s,
        training_cv=found.synthetic.cv,
        training_drift=found.synthetic.drift,
        shares=_share_results(found, last.epoch_batches),
        workers=last.workers,
        cores=profile.cores,
        batch_bytes=batch_bytes,
        epoch_batches=last.epoch_batches,
        epoch_bytes=epoch_bytes,
        model=None if model is None else model.kind,
        model_error=error,
        smallest_share=smallest,
        smallest_tier=None if smallest is None else round(smallest * epoch_bytes),
    )


def model_of(profile: Profile) -> tuple[JobModel | None, float | None]:
    """The model that describes the job best, and its error; None if the measured shares do not
    differ."""
    found = measured(profile.runs)
    last = profile.runs[-1].report
    shares = [*found.real, found.cached]
    points = [Point(each.hits, each.load.per_s, each.train.per_s) for each in shares]
    try:
        model, error = fitted(
            points,
            training_s=found.synthetic.batch_s,
            workers=last.workers,
            in_stages=last.in_stages,
            cores=profile.cores,
            batch_bytes=_bytes(profile, found)[0],
            source_limit=profile.source_limit,
        )
    except ValueError:
        return None, None
    return model, error


def _share_results(found: Measured, epoch_batches: int | None) -> list[ShareResult]:
    results = []
    for each in [*found.real, found.cached]:
        stalls = stalls_with(found, each)
        results.append(
            ShareResult(
                share=each.asked,
                hits=each.hits,
                rate=each.train.per_s,
                load_rate=each.load.per_s,
                prep_stall=stalls.prep,
                fetch_stall=stalls.fetch,
                epoch_s=None if epoch_batches is None else epoch_batches / each.train.per_s,
                cv=each.train.cv,
                drift=each.train.drift,
            )
        )
    return results


def _bytes(profile: Profile, found: Measured) -> tuple[float, float]:
    """The bytes of the files of a batch, 0 if that is not known, and those of the files that epochs
    read.

    Those of an epoch are measured to some percent, and a loader may leave out other files at the
    end of each one (``drop_last``). So an epoch of nearly all bytes of the mount counts as one of
    all its files.
    """
    least = found.real[0]
    runs = [run.report for run in profile.runs if run.phase == "real" and run.share == least.asked]
    batches = sum(run.batches for run in runs) * (1 - least.hits)
    batch_bytes = sum(run.source_bytes for run in runs) / batches if batches else 0.0
    length = profile.runs[-1].report.epoch_batches
    epoch_bytes = batch_bytes * (length or 0)
    if not epoch_bytes or epoch_bytes > profile.data_bytes * _NEARLY_ALL:
        epoch_bytes = profile.data_bytes
    # The bytes are a divisor.
    return batch_bytes, max(1.0, epoch_bytes)
