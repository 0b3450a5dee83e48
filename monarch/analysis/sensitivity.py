"""How the rate of a job depends on its cores and on the size of its tier, as a file.

Either only the axis of the cores is measured, with all files in the tier. The axis of the tier then
follows from the arithmetic of a fixed share of residents: of each file a share 1 - x comes from the
source (the optimistic profile of Synergy, OSDI 2022, section 4.1). Or all rates are those of the
model that describes a measured job best (profile.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monarch.analysis.loader_model import JobModel
from monarch.telemetry.report import Report

VERSION = 1

_MOST_OPTIONS = 10_000
_MOST_GPUS = 1_000_000


@dataclass(frozen=True, slots=True)
class Option:
    """An amount of resources for a job, and what it gives: ``rate`` in files or batches a second,
    for which ``source`` bytes a second come from the source."""

    cores: int
    tier_bytes: int
    rate: float
    source: float


@dataclass(frozen=True, slots=True)
class Job:
    """A job that needs ``gpus``, and its options."""

    name: str
    gpus: int
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Sensitivity(Report):
    """The file of a job. ``rates`` has the files or batches a second for each number of cores, and
    in it for each size of the tier; ``source`` the bytes a second from the source. ``measured``:
    whether the rate was measured, or computed from one that was."""

    monarch_sensitivity: int
    job: str
    gpus: int
    cores: list[int]
    tier_bytes: list[int]
    rates: list[list[float]]
    source: list[list[float]]
    measured: list[list[bool]]


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
        source=[
            [
                rate * (1 - share) * model.batch_bytes
                for rate, share in zip(row, shares, strict=True)
            ]
            for row in rates
        ],
        measured=[[False] * len(sizes) for _ in numbers],
    )


def job_of(found: Sensitivity) -> Job:
    """The options of a job. Raises ValueError if the matrix is not one of rates."""
    if found.monarch_sensitivity != VERSION:
        raise ValueError(f"version {found.monarch_sensitivity} is not {VERSION}")
    if not 1 <= found.gpus <= _MOST_GPUS:
        raise ValueError(f"gpus is {found.gpus}")
    if not found.job.isprintable() or not 1 <= len(found.job) <= 200:
        raise ValueError("job is not a short name")
    for name, axis, least in (("cores", found.cores, 1), ("tier_bytes", found.tier_bytes, 0)):
        if (
            not axis
            or axis[0] < least
            or any(low >= high for low, high in itertools.pairwise(axis))
        ):
            raise ValueError(f"{name} does not rise from {least}")
    if len(found.cores) * len(found.tier_bytes) > _MOST_OPTIONS:
        raise ValueError(f"there are more than {_MOST_OPTIONS:,} rates")
    for name, matrix in (("rates", found.rates), ("source", found.source)):
        if [len(row) for row in matrix] != [len(found.tier_bytes)] * len(found.cores):
            raise ValueError(f"{name} has not a row for each of cores, with each of tier_bytes")
        if not all(0 <= value < math.inf for row in matrix for value in row):
            raise ValueError(f"{name} has a value that is no rate")
    if not all(value > 0 for row in found.rates for value in row):
        raise ValueError("a rate is 0")
    options = (
        Option(cores, tier, found.rates[row][column], found.source[row][column])
        for row, cores in enumerate(found.cores)
        for column, tier in enumerate(found.tier_bytes)
    )
    return Job(found.job, found.gpus, tuple(options))
