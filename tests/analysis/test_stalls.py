"""Stalls and verdicts from runs with known times."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from monarch.analysis.plan import Phase, RunReport
from monarch.analysis.profile import VERSION, Profile, decode, encode, result_of
from monarch.analysis.stalls import (
    Run,
    Stalls,
    agree,
    last_rounds,
    measured,
    rate_of,
    stalls_of,
    stalls_with,
    trouble_in,
    verdict_on,
)
from monarch.placement.policy import assign
from tests.analysis.pipeline import Job, serial_workers

WINDOW = 20
STEADY = (1.0, 1.01, 0.99, 1.02, 0.98)
NOISY = (0.5, 1.5, 0.7, 1.3, 1.0)


def run(
    phase: Phase,
    batch_s: float,
    *,
    share: float = 1.0,
    number: int = 0,
    hits: float | None = None,
    noise: Sequence[float] = STEADY,
    load_s: float | None = None,
) -> Run:
    """A run whose batches take ``batch_s``, and without the training ``load_s``."""
    hits = share if hits is None else hits
    report = RunReport(
        window=WINDOW,
        train_s=[batch_s * WINDOW * factor for factor in noise],
        load_s=[(load_s or batch_s) * WINDOW * factor for factor in STEADY],
        hits=round(1000 * hits),
        misses=round(1000 * (1 - hits)),
        source_bytes=round(1000 * (1 - hits)) * 1000,
        batches=100,
        workers=2,
        in_stages=False,
        epoch_batches=500,
    )
    return Run(phase, share, number, report)


def runs(t1: float, t2: float, t3: float, **real: Any) -> list[Run]:
    return [
        run("synthetic", t1),
        run("cached", t2),
        run("real", (t2 + t3) / 2, share=0.5),
        run("real", t3, share=0.0, **real),
    ]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((1.0, 1.0, 4.0), Stalls(prep=0.0, fetch=0.75)),
        ((1.0, 3.0, 4.0), Stalls(prep=0.5, fetch=0.25)),
        ((1.0, 1.0, 1.0), Stalls(prep=0.0, fetch=0.0)),
        # Noise makes no stall negative, and none longer than the run.
        ((1.0, 0.9, 0.95), Stalls(prep=0.0, fetch=pytest.approx(0.05 / 0.95))),
        ((0.1, 1.2, 1.0), Stalls(prep=0.9, fetch=0.0)),
    ],
)
def test_stalls_are_differences_of_the_three_runs(
    times: tuple[float, float, float], expected: Stalls
) -> None:
    assert stalls_of(*times) == expected


@pytest.mark.promise(291)
@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ((1.0, 1.1, 4.0), "fetch-bound"),
        ((1.0, 4.0, 4.1), "prep-bound"),
        ((1.0, 1.01, 1.02), "gpu-bound"),
    ],
)
def test_the_larger_stall_is_the_verdict(times: tuple[float, float, float], verdict: str) -> None:
    found = measured(runs(*times))
    assert verdict_on(found, found.real[0])[0] == verdict
    # The smallest share is the first.
    assert [each.asked for each in found.real] == [0.0, 0.5]


@pytest.mark.promise(291)
def test_windows_that_differ_give_no_verdict() -> None:
    steady = runs(1.0, 1.1, 4.0)
    for place, phase in ((0, "synthetic"), (1, "cached"), (3, "real")):
        share = 0.0 if phase == "real" else 1.0
        noisy = list(steady)
        noisy[place] = run(phase, 1 / steady[place].report.window, share=share, noise=NOISY)
        found = measured(noisy)
        verdict, why = verdict_on(found, found.real[0])
        assert verdict == "unsure" and "CV" in why


@pytest.mark.promise(291)
def test_a_rate_that_changes_between_the_rounds_gives_no_verdict() -> None:
    first, then = runs(1.0, 1.1, 4.0), runs(1.0, 1.1, 4.0)
    again = [Run(each.phase, each.share, 1, each.report) for each in then]
    found = measured([*first, *again])
    assert verdict_on(found, found.real[0])[0] == "fetch-bound"
    again[0] = run("synthetic", 1.15, number=1)
    drifted = measured([*first, *again])
    verdict, why = verdict_on(drifted, drifted.real[0])
    assert verdict == "unsure" and "between the rounds" in why


def test_a_drift_within_one_round_is_found() -> None:
    rising = [[1.0, 1.0, 1.1, 1.2, 1.2]]
    assert rate_of(rising).drift > 0.10
    assert rate_of([[1.0, 1.2, 1.1, 1.2, 1.0]]).drift < 0.10
    with pytest.raises(ValueError, match="no window"):
        rate_of([[]])


@pytest.mark.promise(291)
def test_a_cached_run_that_tiers_did_not_serve_hides_only_the_prep_stall() -> None:
    """Its time includes fetches, which count as preparation."""
    waiting = [run("synthetic", 1.0), run("cached", 3.0, hits=0.6), run("real", 3.2, share=0.0)]
    found = measured(waiting)
    verdict, why = verdict_on(found, found.real[0])
    assert verdict == "unsure" and "60%" in why
    fetching = [run("synthetic", 1.0), run("cached", 1.2, hits=0.6), run("real", 4.0, share=0.0)]
    found = measured(fetching)
    verdict, why = verdict_on(found, found.real[0])
    assert verdict == "fetch-bound" and "at least" in why


def test_training_on_files_that_is_faster_than_on_memory_gives_no_verdict() -> None:
    found = measured(runs(2.0, 1.0, 4.0))
    assert verdict_on(found, found.real[0])[0] == "unsure"


def test_a_job_without_opens_has_the_share_that_was_asked_for() -> None:
    idle = run("real", 1.0, share=0.25)
    report = RunReport(**{**idle.report.to_dict(), "hits": 0, "misses": 0})
    found = measured([run("synthetic", 1.0), run("cached", 1.0), Run("real", 0.25, 0, report)])
    assert found.real[0].hits == 0.25
    assert stalls_with(found, found.real[0]) == Stalls(0.0, 0.0)


def test_a_phase_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="not all phases"):
        measured(runs(1.0, 1.0, 1.0)[1:])


def profile(measured_runs: list[Run]) -> Profile:
    return Profile(
        monarch_profile=VERSION,
        monarch="0.1.0",
        host="node7",
        cores=2,
        started_ns=1,
        command=["python", "train.py"],
        mountpoint="/mnt/data",
        data_bytes=10**9,
        tier_bytes=10**8,
        source_limit=0,
        iterations=100,
        warmup=5,
        runs=measured_runs,
    )


def test_a_profile_is_written_and_read_with_its_conclusions() -> None:
    # The loader alone is as fast as the job in all runs.
    written = profile(runs(0.1, 0.2, 0.8))
    assert decode(encode(written)) == written
    result = result_of(written)
    assert result.verdict == "fetch-bound"
    # 100 batches have read 1,000 files of 1,000 bytes.
    assert result.batch_bytes == 10_000
    assert result.epoch_bytes == 500 * 10_000
    assert result.model == "serial" and result.model_error == pytest.approx(0.0, abs=1e-6)
    # 1 / rate = 0.2 + 0.6 (1 - x), so a rate of 98 % needs x = 1 - 0.2 (1 / 0.98 - 1) / 0.6.
    assert result.smallest_share == pytest.approx(1 - 0.2 * (1 / 0.98 - 1) / 0.6, abs=1e-6)
    assert result.smallest_tier == round(result.smallest_share * result.epoch_bytes)
    assert result.shares[0].epoch_s == pytest.approx(500 * 0.8, rel=0.01)


def test_without_two_shares_nothing_is_predicted() -> None:
    unserved = [run("synthetic", 1.0), run("cached", 2.0, hits=0.0), run("real", 2.0, share=0.0)]
    result = result_of(profile(unserved))
    assert result.model is None and result.smallest_tier is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "not a profile"),
        ("[]", "not a profile"),
        ('{"monarch_profile": 2}', "version 2"),
        ('{"monarch_profile": 1}', "incomplete"),
        ("{", "Expecting"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        decode(text)


@pytest.mark.promise(291)
def test_the_windows_of_one_run_agree_if_they_differ_by_half_of_the_limits() -> None:
    assert agree(STEADY) and not agree(NOISY)
    # They differ by 7 % (CV), which is too much for one run; then by a drift of 8 %.
    assert not agree([1.0, 1.1, 0.9, 1.05, 0.95])
    assert not agree([1.0, 1.0, 1.04, 1.08, 1.08])
    # Windows too short for a clock.
    assert agree([0.0] * 5)


def test_the_conclusions_are_from_the_last_rounds() -> None:
    noisy = runs(1.0, 1.1, 4.0, noise=NOISY)
    steady = [Run(each.phase, each.share, 1, each.report) for each in runs(1.0, 1.1, 4.0)]
    assert "CV" in trouble_in([*noisy, *steady]) and trouble_in(steady) == ""
    both = profile([*noisy, *steady])
    assert result_of(both).verdict == "unsure" and len(result_of(both).troubles) == 1
    last = dataclasses.replace(both, runs=steady, unused_runs=noisy)
    assert result_of(last).verdict == "fetch-bound" and result_of(last).troubles == []
    assert decode(encode(last)) == last and last_rounds(both.runs, 1) == steady


@pytest.mark.parametrize(
    ("data_bytes", "expected"),
    [
        # A loader that leaves out the rest of each epoch, which is not the same in the next one.
        (5_200_000, 5_200_000),
        # A loader that draws files more than once.
        (4_000_000, 4_000_000),
        # A job that reads a part of the files.
        (10**9, 5_000_000),
    ],
)
def test_an_epoch_of_nearly_all_files_is_one_of_all(data_bytes: int, expected: int) -> None:
    found = dataclasses.replace(profile(runs(0.1, 0.2, 0.8)), data_bytes=data_bytes)
    assert result_of(found).epoch_bytes == expected


class UnequalFiles(Job):
    """A job over files of unequal sizes, of which each epoch leaves out some others. The argument
    of ``fetches`` is the capacity of a tier in bytes; a sample is one file."""

    SIZES: ClassVar[list[int]] = [
        round(1000 * random.Random(number).lognormvariate(0, 0.5)) for number in range(400)
    ]
    EPOCH: ClassVar[int] = 372

    def fetches(self, share: float) -> Iterator[tuple[bool, float]]:
        curve = np.array(self.SIZES, np.uint64)
        (table,) = assign({range(1, 2): curve}, [int(share)]).values()
        mean, draw = sum(self.SIZES) / len(self.SIZES), random.Random(1)
        while True:
            for number in draw.sample(range(len(self.SIZES)), self.EPOCH):
                is_hit = table[number] == 1
                yield is_hit, self.SIZES[number] / mean / (self.tier if is_hit else self.source)


@pytest.mark.promise(291)
@pytest.mark.parametrize("workers", [1, 2])
def test_the_tier_that_is_named_ends_the_fetch_stall_of_unequal_files_in_virtual_time(
    workers: int,
) -> None:
    job = UnequalFiles(
        source=400.0, tier=1e9, prep=1000.0, training=0.75e3 * workers, workers=workers
    )
    alone = dataclasses.replace(job, training=1e9)
    whole = sum(job.SIZES)

    def virtual_run(phase: Phase, share: float) -> Run:
        rate = job.training if phase == "synthetic" else serial_workers(job, share * whole)
        load = serial_workers(alone, share * whole)
        made = run(phase, 1 / rate, share=share, load_s=1 / load)
        nbytes = round(1000 * (1 - share) * whole / len(job.SIZES))
        numbers = {"batches": 1000, "source_bytes": nbytes, "epoch_batches": job.EPOCH}
        return dataclasses.replace(made, report=dataclasses.replace(made.report, **numbers))

    phases: list[tuple[Phase, float]] = [("synthetic", 1.0), ("cached", 1.0), ("real", 0.0)]
    measured_runs = [virtual_run(*phase) for phase in phases]
    found = dataclasses.replace(profile(measured_runs), data_bytes=whole, cores=8)
    found = dataclasses.replace(
        found,
        runs=[
            dataclasses.replace(each, report=dataclasses.replace(each.report, workers=workers))
            for each in found.runs
        ],
    )
    result = result_of(found)
    assert result.verdict == "fetch-bound" and result.smallest_tier is not None

    def stall(tier: float) -> float:
        return 1 - serial_workers(job, tier) / serial_workers(job, whole)

    assert 0.5 * whole < result.smallest_tier < whole and stall(result.smallest_tier) < 0.05
    # The twin: with a tier for the files of one epoch.
    assert stall(result.smallest_tier * job.EPOCH / len(job.SIZES)) > 0.05
