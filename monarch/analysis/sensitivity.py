"""How the rate of a job depends on its cores and on the size of its tier, as a file.

Either only the axis of the cores is measured, with all files in the tier. The axis of the tier then
follows from the arithmetic of a fixed share of residents: of each file a share 1 - x comes from the
source (the optimistic profile of Synergy, OSDI 2022, section 4.1). Synergy takes the larger of the
times for fetching and for preparing, which holds for a loader with stages. ``optimistic`` has the
model of the loader instead, since the workers of PyTorch do one after the other. Or all rates are
those of the model that describes a measured job best (profile.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from monarch.analysis.loader_model import JobModel
from monarch.telemetry.report import Report
from monarch.text import MOST_BYTES

VERSION = 1

_MOST_OPTIONS = 10_000
_MOST_GPUS = 1_000_000
_MOST_CORES = 1 << 40
# The rates, in files or batches a second, with which quotients and sums are numbers.
_LEAST_RATE, _MOST_RATE = 1e-9, 1e15
# Fewer cores are as good if they cost at most this share of the rate.
_SAME = 0.10
# A job is limited by its source if it is slower than its fetches by more than this share.
_LEAST_EXCESS = 0.05


@dataclass(frozen=True, slots=True)
class Option:
    """An amount of resources for a job, and what it gives: ``rate`` in files or batches a second,
    for which ``source`` bytes a second come from the source."""

    cores: int
    tier_bytes: int
    rate: float
    source: float

    def limited(self, source: float) -> Option:
        """The option if the source gives at most ``source`` bytes/s, more than 0: the rate falls in
        proportion."""
        if self.source <= source:
            return self
        return replace(self, rate=self.rate * source / self.source, source=source)


class FullTier(NamedTuple):
    """A job with all files in the tier: its ``rate``, that of its loader alone (``load``), in
    batches a second, and the workers of the loader, at least 1."""

    rate: float
    load: float
    workers: int


class WithoutTier(NamedTuple):
    """A job without a tier: its ``rate``, and that of its loader alone (``load``), in batches a
    second. ``hits`` of its opens were served by a tier all the same, less than 1."""

    rate: float
    load: float
    hits: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """A job that needs ``gpus``, and its options."""

    name: str
    gpus: int
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """A rate that was computed, and then measured; ``error`` is their difference, as a share of the
    measured one."""

    cores: int
    tier_bytes: int
    computed: float
    measured: float
    error: float


@dataclass(frozen=True, slots=True)
class Sensitivity(Report):
    """The file of a job. ``rates`` has the files or batches a second for each number of cores, and
    in it for each size of the tier; ``source`` the bytes a second from the source. ``measured``:
    whether the rate was measured, or computed from one that was. ``verified`` has the rates that
    were measured after they had been computed."""

    monarch_sensitivity: int
    job: str
    gpus: int
    cores: list[int]
    tier_bytes: list[int]
    rates: list[list[float]]
    source: list[list[float]]
    measured: list[list[bool]]
    verified: list[Verified] = field(default_factory=list)


def next_cores(measured: Mapping[int, float], gpus: int) -> int | None:
    """The number of cores to measure next, given the rates of those that were; None if all are.

    The search of Synergy (OSDI 2022): from the most cores on, half as many while that costs at most
    ``_SAME`` of the rate, else one less for each GPU, and at least one for each GPU."""
    few, *more = sorted(measured)
    is_same = not more or measured[few] >= measured[more[0]] * (1 - _SAME)
    cores = few // 2 if is_same else few - gpus
    cores -= cores % gpus
    return cores if gpus <= cores < few else None


def optimistic(
    job: str,
    gpus: int,
    model: JobModel,
    full: Mapping[int, FullTier],
    empty: Mapping[int, WithoutTier],
    *,
    total: float,
    tiers: Sequence[int],
) -> Sensitivity:
    """The matrix of a job from its rates with all files in the tier, in batches a second. ``model``
    describes it on some number of cores, ``empty`` has at least one other measurement; ``total``
    bytes are read in an epoch."""
    cores, sizes = sorted(full), sorted(set(tiers))
    shares = [min(1.0, size / total) for size in sizes]
    models = _fetching(
        {
            each: replace(
                model,
                workers=found.workers,
                cores=each,
                prep_s=min(found.workers, each) / found.load,
            )
            for each, found in full.items()
        },
        empty,
    )
    known = [[_measured(full[each], empty.get(each), share) for share in shares] for each in cores]
    rates = [
        [
            min(full[each].rate, models[each].rate(share)) if rate is None else rate
            for share, rate in zip(shares, row, strict=True)
        ]
        for each, row in zip(cores, known, strict=True)
    ]
    return Sensitivity(
        monarch_sensitivity=VERSION,
        job=job,
        gpus=gpus,
        cores=cores,
        tier_bytes=sizes,
        rates=rates,
        source=_source_of(rates, shares, model.batch_bytes),
        measured=[[rate is not None for rate in row] for row in known],
    )


def _measured(full: FullTier, empty: WithoutTier | None, share: float) -> float | None:
    """The measured rate with this share of the files in the tier, None if it was not measured."""
    if share == 1:
        return full.rate
    if share == 0 and empty is not None and not empty.hits:
        return min(empty.rate, full.rate)
    return None


def _fetching(
    models: Mapping[int, JobModel], empty: Mapping[int, WithoutTier]
) -> dict[int, JobModel]:
    """The models with the time of a fetch, and with what the source gives all workers at most.

    The time that a worker needs beyond its preparation is at least that of a fetch, and more if
    workers wait for each other at the source. So the least one is the time of a fetch; and where
    the job is slower than that, the source limits it."""
    waits = []
    for cores, found in empty.items():
        model = models[cores]
        is_shared = model.kind == "pipelined"
        batch_s = 1 / found.load if is_shared else model.workers / found.load - model.prep_s
        waits.append(max(0.0, batch_s) / (1 - found.hits))
    made = {cores: replace(each, miss_s=min(waits)) for cores, each in models.items()}
    is_limited = any(
        made[cores].load_rate(found.hits) > found.load * (1 + _LEAST_EXCESS)
        for cores, found in empty.items()
    )
    bytes_s = max(
        found.load * (1 - found.hits) * models[cores].batch_bytes for cores, found in empty.items()
    )
    if not is_limited or not bytes_s:
        return made
    return {cores: replace(each, source_limit=bytes_s) for cores, each in made.items()}


def verified(
    found: Sensitivity, rates: Mapping[tuple[int, int], float], *, total: float, batch_bytes: float
) -> Sensitivity:
    """The matrix with measured ``rates`` in place of computed ones, by cores and size of the
    tier."""
    changed = [list(row) for row in found.rates]
    known = [list(row) for row in found.measured]
    checks = []
    for (cores, size), rate in sorted(rates.items()):
        row, column = found.cores.index(cores), found.tier_bytes.index(size)
        computed = changed[row][column]
        checks.append(Verified(cores, size, computed, rate, abs(computed - rate) / rate))
        changed[row][column], known[row][column] = rate, True
    shares = [min(1.0, size / total) for size in found.tier_bytes]
    return replace(
        found,
        rates=changed,
        source=_source_of(changed, shares, batch_bytes),
        measured=known,
        verified=checks,
    )


def _source_of(
    rates: Sequence[Sequence[float]], shares: Sequence[float], batch_bytes: float
) -> list[list[float]]:
    """The bytes a second from the source, of batches of ``batch_bytes``."""
    return [
        [rate * (1 - share) * batch_bytes for rate, share in zip(row, shares, strict=True)]
        for row in rates
    ]


def sensitivity_of(
    job: str,
    gpus: int,
    measured: Mapping[int, float],
    *,
    files: int,
    total: int,
    source: float,
    tiers: Sequence[int],
) -> Sensitivity:
    """The matrix of a job from its rate for each number of cores, in files a second if all files
    are in the tier. ``total`` has the bytes of the data set; ``source`` is what the source can give
    the job, in bytes a second."""
    cores, sizes = sorted(measured), sorted(set(tiers))
    missing = [total / files * (1 - min(1.0, size / total)) for size in sizes]
    rates = [
        [min(measured[each], source / bytes_) if bytes_ else measured[each] for bytes_ in missing]
        for each in cores
    ]
    return Sensitivity(
        monarch_sensitivity=VERSION,
        job=job,
        gpus=gpus,
        cores=cores,
        tier_bytes=sizes,
        rates=rates,
        source=[
            [rate * bytes_ for rate, bytes_ in zip(row, missing, strict=True)] for row in rates
        ],
        measured=[[not bytes_ for bytes_ in missing] for _ in cores],
    )


def modelled(
    job: str,
    gpus: int,
    model: JobModel,
    *,
    total: float,
    cores: Sequence[int],
    tiers: Sequence[int],
) -> Sensitivity:
    """The matrix of a job by its model, in batches a second. ``total`` bytes are read in an
    epoch."""
    numbers, sizes = sorted(set(cores)), sorted(set(tiers))
    shares = [min(1.0, size / total) for size in sizes]
    models = [model if each == model.cores else model.with_cores(each) for each in numbers]
    rates = [[each.rate(share) for share in shares] for each in models]
    return Sensitivity(
        monarch_sensitivity=VERSION,
        job=job,
        gpus=gpus,
        cores=numbers,
        tier_bytes=sizes,
        rates=rates,
        source=_source_of(rates, shares, model.batch_bytes),
        measured=[[False] * len(sizes) for _ in numbers],
    )


def require_version(version: object) -> None:
    """Raises ValueError for another version of the format, whose fields may have other types."""
    if version != VERSION:
        raise ValueError(f"its format has version {version!r}, not {VERSION}")


def job_of(found: Sensitivity) -> Job:
    """The options of a job. Raises ValueError if the matrix is not one of rates."""
    require_version(found.monarch_sensitivity)
    if not 1 <= found.gpus <= _MOST_GPUS:
        raise ValueError(f"gpus is {found.gpus}")
    if not found.job.isprintable() or not 1 <= len(found.job) <= 200:
        raise ValueError("job is not a short name")
    for name, axis, least, most in (
        ("cores", found.cores, 1, _MOST_CORES),
        ("tier_bytes", found.tier_bytes, 0, MOST_BYTES),
    ):
        if (
            not axis
            or axis[0] < least
            or axis[-1] > most
            or any(low >= high for low, high in itertools.pairwise(axis))
        ):
            raise ValueError(f"{name} does not rise from {least}, to at most {most:,}")
    if len(found.cores) * len(found.tier_bytes) > _MOST_OPTIONS:
        raise ValueError(f"there are more than {_MOST_OPTIONS:,} rates")
    for name, matrix in (("rates", found.rates), ("source", found.source)):
        if [len(row) for row in matrix] != [len(found.tier_bytes)] * len(found.cores):
            raise ValueError(f"{name} has not a row for each of cores, with each of tier_bytes")
        if not all(0 <= value <= MOST_BYTES for row in matrix for value in row):
            raise ValueError(f"{name} has a value that is no rate")
    if not all(_LEAST_RATE <= value <= _MOST_RATE for row in found.rates for value in row):
        raise ValueError(f"a rate is not within {_LEAST_RATE:g} and {_MOST_RATE:g}")
    options = (
        Option(cores, tier, found.rates[row][column], found.source[row][column])
        for row, cores in enumerate(found.cores)
        for column, tier in enumerate(found.tier_bytes)
    )
    return Job(found.job, found.gpus, tuple(options))
