"""Models of a job and its loader: the rate that it would have with other tiers, cores and sources.

The plain model ``min(F, P, G)`` of DS-Analyzer takes fetching and preparing for separate stages.
The workers of a PyTorch loader do one after the other, so their rate is
``min(F, W / (t_fetch + t_prep), min(W, cores) / t_prep, G)``. A loader without workers runs within
the training process, and nothing overlaps. The rates of the loader alone, with several shares of
the files in the tiers, show which model describes a job. All rates are in batches/s, all times in
seconds a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["serial", "pipelined", "inline"]

# A job has no fetch stall if it is slower than without fetches by at most this share.
TOLERANCE = 0.02
# Less time than this is not resolved.
_LEAST_S = 1e-9
_BISECTIONS = 60


def serial_rate(
    share: float, *, workers: int, cores: int, hit_s: float, miss_s: float, prep_s: float
) -> float:
    """The rate of workers that fetch and prepare one batch after the other. ``hit_s`` and
    ``miss_s`` are the times of a fetch as one worker sees it, ``prep_s`` is of one core."""
    fetch_s = share * hit_s + (1 - share) * miss_s
    return min(
        workers / max(fetch_s + prep_s, _LEAST_S),
        min(workers, cores) / max(prep_s, _LEAST_S),
    )


def source_rate(share: float, *, hit_s: float, miss_s: float) -> float:
    """The rate F at which all workers together can fetch; the times are of the tier and the source
    as a whole."""
    return 1 / max(share * hit_s + (1 - share) * miss_s, _LEAST_S)


@dataclass(frozen=True, slots=True)
class Point:
    """A measured rate: ``share`` of the opens were served by tiers; ``load`` is the rate of the
    loader alone, ``train`` that of the job."""

    share: float
    load: float
    train: float


@dataclass(frozen=True, slots=True)
class JobModel:
    """``workers`` of the loader use ``cores``. ``training_s`` is the time of a training step,
    ``prep_s`` of preparing a batch on one core, which includes the fetch from a tier, ``miss_s``
    what a fetch from the source adds: as one worker sees it, and for ``pipelined`` as all together
    see it. ``batch_bytes`` are read for a batch, 0 if it is unknown. The source gives at most
    ``source_limit`` bytes/s, 0 if no limit is known."""

    kind: Kind
    workers: int
    cores: int
    training_s: float
    prep_s: float
    miss_s: float
    batch_bytes: float = 0.0
    source_limit: float = 0.0

    def load_rate(self, share: float) -> float:
        """The rate of the loader alone."""
        if self.kind == "pipelined":
            rate = min(
                source_rate(share, hit_s=0.0, miss_s=self.miss_s),
                min(self.workers, self.cores) / max(self.prep_s, _LEAST_S),
            )
        else:
            rate = serial_rate(
                share,
                workers=self.workers,
                cores=self.cores,
                hit_s=0.0,
                miss_s=self.miss_s,
                prep_s=self.prep_s,
            )
        missed = (1 - share) * self.batch_bytes
        if self.source_limit and missed:
            rate = min(rate, self.source_limit / missed)
        return rate

    def rate(self, share: float) -> float:
        """The rate of the job."""
        load = self.load_rate(share)
        if self.kind == "inline":
            return 1 / (1 / load + self.training_s)
        return min(load, 1 / max(self.training_s, _LEAST_S))

    @property
    def source_bytes_s(self) -> float:
        """The bytes/s that all workers would read if they only fetched from the source; 0 if that
        is unknown."""
        if not self.batch_bytes or self.miss_s <= _LEAST_S:
            return 0.0
        readers = 1 if self.kind == "pipelined" else self.workers
        return self.batch_bytes / self.miss_s * readers

    def with_cores(self, cores: int) -> JobModel:
        """The same job with other cores, and at least as many workers. A loader that ran within
        the training process gets workers with the second core."""
        if self.kind == "inline":
            if cores == 1:
                return self
            return replace(self, kind="serial", workers=cores, cores=cores)
        return replace(self, workers=max(self.workers, cores), cores=cores)

    def with_source(self, bytes_s: float) -> JobModel:
        """The same job with a source of ``bytes_s``. A faster source also shortens each fetch. Not
        for a job whose ``source_bytes_s`` is unknown."""
        shorter = min(1.0, self.source_bytes_s / bytes_s)
        return replace(self, miss_s=self.miss_s * shorter, source_limit=bytes_s)

    def smallest_share(self, tolerance: float = TOLERANCE) -> float:
        """The smallest share of the files in the tiers with which the job is slower than with all
        of them by at most ``tolerance``. The rate never falls with the share, so it is bisected."""
        wanted = self.rate(1.0) * (1 - tolerance)
        if self.rate(0.0) >= wanted:
            return 0.0
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.rate(middle) >= wanted else (middle, high)
        return high

    def error(self, points: Sequence[Point]) -> float:
        """The largest difference between a rate and the model, as a share of the rate."""
        return max(
            abs(predicted - seen) / seen
            for point in points
            for predicted, seen in (
                (self.load_rate(point.share), point.load),
                (self.rate(point.share), point.train),
            )
        )


def fitted(
    points: Sequence[Point],
    *,
    training_s: float,
    workers: int | None,
    in_stages: bool,
    cores: int,
    batch_bytes: float = 0.0,
    source_limit: float = 0.0,
) -> tuple[JobModel, float]:
    """The model that describes the measured ``points`` best, and its error.

    ``workers`` of the loader, 0 if it runs within the training process, None if it is unknown. The
    parameters of each model are taken from the points with the largest and the smallest share; the
    others, and the rates of the job, show its error. ``source_limit`` was in force when they were
    measured. Raises ValueError without two different shares.
    """
    ordered = sorted(points, key=lambda point: point.share)
    least, most = ordered[0], ordered[-1]
    if most.share - least.share < TOLERANCE:
        raise ValueError("the same share of the files was read from the tiers in all runs")
    models = []
    for kind in _kinds(workers, in_stages):
        number = 1 if kind == "inline" else workers or (cores if in_stages else 1)
        model = JobModel(kind, number, cores, training_s, 0.0, 0.0, batch_bytes, source_limit)
        models.append(_with_times(model, least, most))
    best = min(models, key=lambda model: model.error(points))
    return best, best.error(points)


def _kinds(workers: int | None, in_stages: bool) -> Sequence[Kind]:
    if in_stages:
        return ("pipelined", "serial")
    if workers is None:
        return ("serial", "inline", "pipelined")
    return ("serial", "pipelined") if workers else ("inline",)


def _with_times(model: JobModel, least: Point, most: Point) -> JobModel:
    """The model with the times that give the rates of the loader at both shares."""
    used = min(model.workers, model.cores)
    if model.kind == "pipelined":
        # A source that does not slow the loader down might be faster than this.
        miss_s = 1 / (least.load * (1 - least.share))
        return replace(model, prep_s=used / most.load, miss_s=miss_s)
    if used < model.workers:
        # The workers share the cores, so at the larger share the cores determine the rate.
        prep_s = used / most.load
        miss_s = max(0.0, model.workers / least.load - prep_s) / (1 - least.share)
        return replace(model, prep_s=prep_s, miss_s=miss_s)
    added_s = model.workers / least.load - model.workers / most.load
    miss_s = max(0.0, added_s) / (most.share - least.share)
    prep_s = max(model.workers / most.load - (1 - most.share) * miss_s, _LEAST_S)
    return replace(model, prep_s=prep_s, miss_s=miss_s)
