"""The matrix that follows from few measurements, compared with all of them in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from monarch.analysis.loader_model import Point, fitted
from monarch.analysis.sensitivity import (
    FullTier,
    Sensitivity,
    WithoutTier,
    job_of,
    next_cores,
    optimistic,
    sensitivity_of,
    verified,
)
from tests.analysis.pipeline import Job, serial_workers, stages

FILES, SIZE = 1000, 100
CORES = (1, 2, 4)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SOURCE = 400.0


def job(cores: int) -> Job:
    return Job(source=SOURCE, tier=20_000.0, prep=300.0, training=1e6, workers=cores, cores=cores)


def errors(
    truth: Callable[[Job, float], float], hits: Callable[[float], float] = lambda share: share
) -> list[float]:
    """The relative error of each rate. ``hits`` are those that a tier with room for a share of the
    files has; the matrix takes them for this share, as with ``no_evict``."""
    found = sensitivity_of(
        "job",
        1,
        {cores: truth(job(cores), 1.0) for cores in CORES},
        files=FILES,
        total=FILES * SIZE,
        source=SOURCE * SIZE,
        tiers=[int(share * FILES * SIZE) for share in SHARES],
    )
    return [
        abs(rate / truth(job(cores), hits(share)) - 1)
        for cores, row in zip(found.cores, found.rates, strict=True)
        for share, rate in zip(SHARES, row, strict=True)
    ]


def test_the_matrix_errs_by_at_most_five_percent_if_stages_fetch_and_prepare() -> None:
    assert max(errors(stages)) < 0.05


@pytest.mark.parametrize(
    ("truth", "hits"),
    [(serial_workers, lambda share: share), (stages, lambda share: share if share == 1 else 0.0)],
)
def test_the_matrix_errs_if_its_assumptions_do_not_hold(
    truth: Callable[[Job, float], float], hits: Callable[[float], float]
) -> None:
    """A worker that fetches does not prepare meanwhile, or the tier evicts what is read next, as
    ``lru`` does for an order that is the same in each epoch."""
    assert max(errors(truth, hits)) > 0.25


Truth = Callable[[Job, float], float]


def profiled(truth: Truth) -> Sensitivity:
    """The matrix of a job that is measured as `monarch plan profile` does: with all files in the
    tier for each number of cores, and without a tier on the most cores."""
    alone = {cores: Job(**{**vars(job(cores)), "training": 1e9}) for cores in CORES}
    most = max(CORES)
    model, _ = fitted(
        [Point(share, truth(alone[most], share), truth(job(most), share)) for share in (0.0, 1.0)],
        training_s=1 / job(most).training,
        workers=most,
        in_stages=truth is stages,
        cores=most,
        batch_bytes=SIZE,
    )
    full = {
        cores: FullTier(truth(job(cores), 1.0), truth(alone[cores], 1.0), cores) for cores in CORES
    }
    empty = {
        cores: WithoutTier(truth(job(cores), 0.0), truth(alone[cores], 0.0)) for cores in (1, most)
    }
    tiers = [int(share * FILES * SIZE) for share in SHARES]
    return optimistic("job", 1, model, full, empty, total=FILES * SIZE, tiers=tiers)


def errors_of(found: Sensitivity, truth: Truth) -> list[float]:
    """The relative error of each rate, the largest first."""
    each = (
        abs(rate / truth(job(cores), share) - 1)
        for cores, row in zip(found.cores, found.rates, strict=True)
        for share, rate in zip(SHARES, row, strict=True)
    )
    return sorted(each, reverse=True)


def test_an_optimistic_matrix_of_workers_errs_only_where_they_wait_for_each_other() -> None:
    """The plain arithmetic is wrong by more than 25 % here. What is left is the queue of four
    workers at a source that is almost as fast as they are."""
    most, *others = errors_of(profiled(serial_workers), serial_workers)
    assert most < 0.15 and max(others) < 0.06


@pytest.mark.promise(320)
def test_an_optimistic_matrix_of_stages_errs_by_at_most_five_percent() -> None:
    found = profiled(stages)
    assert max(errors_of(found, stages)) < 0.05
    ends, full = [True, False, False, False, True], [False] * 4 + [True]
    assert found.measured == [ends, full, ends]
    assert job_of(Sensitivity.from_dict(found.to_dict())).options[-1].rate == found.rates[-1][-1]
    # Of the 100 bytes of a batch half come from the source.
    assert found.source[0][2] == pytest.approx(found.rates[0][2] * 50)


def test_a_verified_rate_shows_that_the_tier_does_not_keep_a_fixed_share() -> None:
    """A tier with `lru` has no hit if each epoch has the same order, unless it holds all files."""
    found = profiled(stages)
    total, cells = FILES * SIZE, [(1, 50_000), (2, 50_000), (4, 75_000)]

    def checked(hits: Callable[[float], float]) -> Sensitivity:
        rates = {(c, size): stages(job(c), hits(size / total)) for c, size in cells}
        return verified(found, rates, total=total, batch_bytes=SIZE)

    lru = checked(lambda share: share if share == 1 else 0.0)
    assert min(each.error for each in lru.verified if each.cores > 1) > 0.25
    fixed = checked(float)
    assert len(fixed.verified) == 3 and max(each.error for each in fixed.verified) < 0.05
    # The measured rates replace the computed ones.
    for each in lru.verified:
        row, column = CORES.index(each.cores), found.tier_bytes.index(each.tier_bytes)
        assert lru.rates[row][column] == each.measured and lru.measured[row][column]
        assert each.computed == found.rates[row][column] and not found.measured[row][column]
        missed = each.measured * (1 - each.tier_bytes / total) * SIZE
        assert lru.source[row][column] == pytest.approx(missed)


@pytest.mark.parametrize(
    ("rates", "gpus", "tried"),
    [
        # Half as many as long as that costs at most a tenth, then one less for each GPU.
        (dict.fromkeys(range(1, 17), 100.0), 1, [16, 8, 4, 2, 1]),
        ({n: 10.0 * n for n in range(1, 9)}, 1, [8, 4, 3, 2, 1]),
        ({16: 100, 8: 95, 4: 50, 3: 40, 2: 26, 1: 13}, 1, [16, 8, 4, 3, 2, 1]),
        ({n: 10.0 * n for n in range(1, 13)}, 2, [12, 6, 4, 2]),
        ({3: 1.0}, 2, [3]),
        ({1: 1.0}, 1, [1]),
    ],
)
def test_the_search_measures_few_numbers_of_cores(
    rates: dict[int, float], gpus: int, tried: list[int]
) -> None:
    measured = {max(rates): rates[max(rates)]}
    while (cores := next_cores(measured, gpus)) is not None:
        assert cores not in measured
        measured[cores] = rates[cores]
    assert list(measured) == tried
