"""The models of a job, compared with jobs in virtual time, and their properties."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.analysis.loader_model import (
    JobModel,
    Kind,
    Point,
    fitted,
    serial_rate,
    source_rate,
)
from tests.analysis import pipeline
from tests.analysis.pipeline import Job, serial_workers, stages

CORES = 8
# Rates in samples/s: the job waits for fetches, for preparation, and for both.
REGIMES = {
    "fetch": {"source": 500.0, "tier": 20000.0, "prep": 2000.0, "training": 600.0},
    "prep": {"source": 4000.0, "tier": 20000.0, "prep": 1000.0, "training": 10000.0},
    "crossover": {"source": 2000.0, "tier": 20000.0, "prep": 500.0, "training": 6000.0},
}
SHARES = (0.0, 0.5, 0.75, 0.9)


def smallest_share_in_closed_form(
    *, prep: float, training: float, source: float, tier: float
) -> float:
    """The smallest share without a fetch stall in the plain model, from the rates P, G, S and C.

    It solves ``F = min(P, G)``. It is 1 if not even the tier is fast enough.
    """
    wanted = min(prep, training)
    if source >= wanted:
        return 0.0
    if tier <= wanted:
        return 1.0
    return (1 / source - 1 / wanted) / (1 / source - 1 / tier)


def plain(job: Job, share: float) -> float:
    """``min(F, P, G)``, with the preparation of all cores, as the paper's recipe measures it."""
    fetch = source_rate(share, hit_s=1 / job.tier, miss_s=1 / job.source)
    return min(fetch, job.cores * job.prep, job.training)


def serial(job: Job, share: float) -> float:
    rate = serial_rate(
        share,
        workers=job.workers,
        cores=job.cores,
        hit_s=1 / job.tier,
        miss_s=1 / job.source,
        prep_s=1 / job.prep,
    )
    fetch = source_rate(share, hit_s=0.0, miss_s=1 / job.source)
    return min(fetch, rate, job.training)


def largest_error(
    model: Callable[[Job, float], float],
    rates: dict[str, float],
    workers: int,
    truth: Callable[[Job, float], float] = serial_workers,
) -> float:
    job = Job(workers=workers, cores=CORES, **rates)
    return max(abs(model(job, x) - truth(job, x)) / model(job, x) for x in SHARES)


@pytest.mark.promise(290)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("regime", list(REGIMES))
def test_the_serial_model_describes_workers_that_fetch_and_then_prepare(
    regime: str, workers: int
) -> None:
    assert largest_error(serial, REGIMES[regime], workers) < 0.05


Errors: TypeAlias = tuple[float, ...]
# The largest errors in percent with 1, 2, 4, 8 and 16 workers (seeds 3.1), of min(F, P, G) and of
# the serial model. The table has no rates; with these, in samples/s, both models have its errors.
TABLE: dict[str, tuple[dict[str, float], Errors, Errors]] = {
    "fetch": (
        {"source": 200.0, "tier": 20000.0, "prep": 2000.0, "training": 1000.0},
        (28.1, 0.8, 2.2, 2.5, 2.8),
        (0.1, 0.8, 2.2, 2.5, 2.8),
    ),
    "prep": (
        {"source": 4000.0, "tier": 40000.0, "prep": 1000.0, "training": 3300.0},
        (75.7, 51.4, 2.7, 0.6, 0.6),
        (0.1, 0.2, 0.3, 0.6, 0.6),
    ),
    "crossover": (
        {"source": 2000.0, "tier": 100000.0, "prep": 600.0, "training": 4000.0},
        (86.8, 73.8, 48.7, 8.8, 0.6),
        (0.1, 0.5, 2.5, 8.8, 0.6),
    ),
}


@pytest.mark.promise(290)
@pytest.mark.parametrize("regime", TABLE)
def test_the_errors_of_both_models_are_those_of_the_table(
    regime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain model is wrong where workers prepare, so the serial one is needed. Both miss the
    queueing of eight workers at the crossover."""
    # Half as many samples as for the table: fewer ones have fewer misses than their share.
    monkeypatch.setattr(pipeline, "_MEASURED", 9000)
    rates, of_plain, of_serial = TABLE[regime]
    for model, expected in ((plain, of_plain), (serial, of_serial)):
        found = [100 * largest_error(model, rates, workers) for workers in (1, 2, 4, 8, 16)]
        assert found == pytest.approx(expected, abs=2.5), model.__name__


def test_the_plain_model_describes_stages_and_the_serial_one_does_not() -> None:
    assert largest_error(plain, REGIMES["prep"], CORES, stages) < 0.05
    assert largest_error(serial, REGIMES["crossover"], 1, stages) > 0.15


def points_of(job: Job, truth: Callable[[Job, float], float]) -> list[Point]:
    """What an analysis measures: the job, and its loader with a training that takes no time."""
    alone = Job(**{**vars(job), "training": 1e9})
    return [Point(x, truth(alone, x), truth(job, x)) for x in (0.0, 0.5, 1.0)]


@pytest.mark.promise(290)
@pytest.mark.parametrize(
    ("truth", "workers", "regime", "kind"),
    [
        (serial_workers, 2, "prep", "serial"),
        (serial_workers, 2, "crossover", "serial"),
        (stages, 1, "fetch", "pipelined"),
    ],
)
def test_the_model_that_fits_is_chosen_and_predicts_other_shares_and_cores(
    truth: Callable[[Job, float], float], workers: int, regime: str, kind: Kind
) -> None:
    job = Job(workers=workers, cores=workers, **REGIMES[regime])
    model, error = fitted(
        points_of(job, truth),
        training_s=1 / job.training,
        workers=workers,
        in_stages=False,
        cores=workers,
    )
    assert model.kind == kind and error < 0.07
    for share in (0.25, 0.9):
        assert model.rate(share) == pytest.approx(truth(job, share), rel=0.07)
    more = Job(**{**vars(job), "workers": 2 * workers, "cores": 2 * workers})
    assert model.with_cores(2 * workers).rate(1.0) == pytest.approx(truth(more, 1.0), rel=0.05)


def test_a_loader_within_the_training_process_is_recognised_and_gets_workers() -> None:
    prep_s, miss_s, training_s = 0.010, 0.020, 0.030
    loads = {x: 1 / (prep_s + (1 - x) * miss_s) for x in (0.0, 0.5, 1.0)}
    points = [Point(x, load, 1 / (1 / load + training_s)) for x, load in loads.items()]
    found = [
        fitted(points, training_s=training_s, workers=workers, in_stages=False, cores=4)
        for workers in (0, None)
    ]
    for model, error in found:
        assert model.kind == "inline" and error < 1e-9
    # With workers the training hides the loader.
    assert found[0][0].with_cores(4).rate(0.0) == pytest.approx(1 / training_s)


def test_the_same_share_in_all_runs_gives_no_model() -> None:
    points = [Point(0.5, 10.0, 9.0), Point(0.505, 10.0, 9.0)]
    with pytest.raises(ValueError, match="same share"):
        fitted(points, training_s=0.1, workers=2, in_stages=False, cores=2)


def test_a_slower_source_limits_the_rate_to_its_bytes() -> None:
    model = JobModel("serial", 4, 4, 0.001, 0.010, 0.040, batch_bytes=1e6)
    # Each of four workers reads 1 MB in 40 ms.
    assert model.source_bytes_s == pytest.approx(100e6)
    assert model.with_source(20_000_000).rate(0.0) == pytest.approx(20.0)
    assert model.with_source(20_000_000).rate(0.5) == pytest.approx(40.0)
    # A fetch takes half the time.
    assert model.with_source(200_000_000).rate(0.0) == pytest.approx(4 / 0.030)


def test_more_cores_do_not_exceed_a_limit_that_was_in_force() -> None:
    """As with `--source`: two workers draw all that the source gives."""
    points = [Point(0.0, 20.0, 20.0), Point(0.5, 40.0, 40.0), Point(1.0, 200.0, 100.0)]
    model, error = fitted(
        points,
        training_s=0.01,
        workers=2,
        in_stages=False,
        cores=2,
        batch_bytes=1e6,
        source_limit=20e6,
    )
    assert error < 0.1
    assert model.with_cores(8).rate(0.0) == pytest.approx(20.0)
    assert model.with_source(40_000_000).with_cores(8).rate(0.0) == pytest.approx(40.0)


rates = st.floats(1.0, 1e5)


@given(source=rates, prep=rates, training=rates, tier=rates)
def test_the_smallest_share_makes_the_fetch_as_fast_as_the_rest(
    source: float, prep: float, training: float, tier: float
) -> None:
    share = smallest_share_in_closed_form(prep=prep, training=training, source=source, tier=tier)
    wanted = min(prep, training)
    fetch = source_rate(share, hit_s=1 / tier, miss_s=1 / source)
    if 0 < share < 1:
        assert fetch == pytest.approx(wanted, rel=1e-9)
    elif share == 0:
        assert fetch >= wanted * (1 - 1e-9)
    else:
        assert fetch <= wanted * (1 + 1e-9)


seconds = st.floats(1e-5, 1.0)
models = st.builds(
    JobModel,
    kind=st.sampled_from(["serial", "pipelined", "inline"]),
    workers=st.integers(1, 16),
    cores=st.integers(1, 16),
    training_s=seconds,
    prep_s=seconds,
    miss_s=st.floats(0.0, 1.0),
    batch_bytes=st.just(1e6),
)


@given(model=models, less=st.floats(0.0, 1.0), more=st.floats(0.0, 1.0))
def test_a_larger_share_more_cores_and_a_faster_source_never_slow_a_job_down(
    model: JobModel, less: float, more: float
) -> None:
    less, more = sorted((less, more))
    slack = 1 + 1e-9
    assert model.rate(less) <= model.rate(more) * slack
    few, many = model.with_cores(2), model.with_cores(4)
    assert few.rate(less) <= many.rate(less) * slack
    if model.source_bytes_s:
        slow, fast = model.with_source(1_000_000), model.with_source(50_000_000)
        assert slow.rate(less) <= fast.rate(less) * slack


def test_a_tier_that_is_slower_than_the_source_slows_a_job_down() -> None:
    def rate(share: float) -> float:
        return source_rate(share, hit_s=0.2, miss_s=0.1)

    def of_workers(share: float) -> float:
        return serial_rate(share, workers=2, cores=2, hit_s=0.2, miss_s=0.1, prep_s=0.01)

    assert rate(1.0) < rate(0.5) < rate(0.0)
    assert of_workers(1.0) < of_workers(0.5) < of_workers(0.0)


@given(model=models)
def test_a_tier_of_the_smallest_share_ends_the_fetch_stall_and_a_smaller_one_does_not(
    model: JobModel,
) -> None:
    share = model.smallest_share(tolerance=0.02)
    wanted = model.rate(1.0) * 0.98
    assert model.rate(share) >= wanted * (1 - 1e-6)
    if share > 0.01:
        assert model.rate(share - 0.01) <= wanted * (1 + 1e-6)


def test_the_smallest_share_of_stages_is_that_of_the_closed_form() -> None:
    model = JobModel("pipelined", 4, 4, 1 / 300, 4 / 1000, 1 / 100)
    expected = smallest_share_in_closed_form(prep=1000.0, training=300.0, source=100.0, tier=1e12)
    assert model.smallest_share(tolerance=0.0) == pytest.approx(expected, abs=1e-9)
