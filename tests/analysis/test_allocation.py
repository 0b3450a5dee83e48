"""The division of servers among jobs: guarantees, the published figures, and an exact bound."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import pytest

from monarch.analysis.allocation import (
    POLICIES,
    Allocation,
    Needs,
    Server,
    Source,
    allocate,
    bound,
    divided_source,
)
from monarch.analysis.sensitivity import Job, Option, Sensitivity, job_of, sensitivity_of
from tests.equipment.clusters import CORES, GB, SERVERS, mixed, speedups


def require_sound(found: Allocation, servers: list[Server]) -> None:
    """No server gives more than it has, and no job gets less than its fair share gives."""
    for server in servers:
        parts = [
            (grant.job.gpus, grant.option, grant.gpus[server.name])
            for grant in found.grants
            if server.name in grant.gpus
        ]
        assert sum(count for _, _, count in parts) <= server.gpus
        assert sum(option.cores // gpus * count for gpus, option, count in parts) <= server.cores
        assert (
            sum(-(-option.tier_bytes // gpus) * count for gpus, option, count in parts)
            <= server.tier_bytes
        )
    for grant in found.grants:
        assert sum(grant.gpus.values()) == grant.job.gpus
        assert grant.option.rate >= grant.fair.rate


@pytest.mark.parametrize(
    ("weights", "instances", "of_fair", "limit", "of_bound", "least"),
    [
        ((20, 70, 10), 16, 1.16, 1.28, 0.904, 0.87),
        ((33, 33, 33), 17, 1.08, 1.24, 0.875, 0.829),
        ((50, 0, 50), 27, 1.00, 1.00, 1.00, 1.00),
    ],
)
def test_tune_has_at_least_the_figures_of_the_table(
    weights: tuple[int, int, int],
    instances: int,
    of_fair: float,
    limit: float,
    of_bound: float,
    least: float,
) -> None:
    gains, limits, shares = [], [], []
    for seed in range(instances):
        jobs = mixed(weights, seed)
        found = allocate("tune", jobs, SERVERS)
        assert len(found.grants) == 32
        require_sound(found, SERVERS)
        gains.append(mean(speedups(found)))
        limits.append(bound(jobs, SERVERS) / len(jobs))
        shares.append(gains[-1] / limits[-1])
    # The rest of each server is used, too, and the matrices are rough.
    assert of_fair <= mean(gains) <= of_fair + 0.15
    assert mean(limits) == pytest.approx(limit, abs=0.05)
    assert of_bound <= mean(shares) <= of_bound + 0.06
    assert least <= min(shares) <= max(shares) <= 1 + 1e-9


def randomly(seed: int) -> tuple[list[Job], list[Server]]:
    chosen = random.Random(seed)
    servers = [
        Server(
            f"s{n}", chosen.choice([1, 2, 4, 8]), chosen.randint(16, 64), chosen.randint(0, 2000)
        )
        for n in range(chosen.randint(1, 5))
    ]
    left = sum(server.gpus for server in servers)
    jobs = []
    while left and len(jobs) < 12:
        gpus = min(left, chosen.choice([1, 1, 1, 2, 3, 5, 8]))
        left -= gpus
        axis = sorted(chosen.sample(range(2, 30), 4))
        found = [
            Option(cores * gpus, tier * gpus, chosen.uniform(0.5, 1) + cores * chosen.random(), 0)
            for cores in (1, *axis)
            for tier in (0, 20, 100, 400)
        ]
        jobs.append(Job(f"job{len(jobs)}", gpus, tuple(found)))
    return jobs, servers


@pytest.mark.promise(289)
def test_every_job_with_gpus_is_placed_at_its_fair_share_or_above() -> None:
    split = 0
    for seed in range(200):
        jobs, servers = randomly(seed)
        fair = allocate("fair", jobs, servers)
        tuned = allocate("tune", jobs, servers)
        for found in (fair, tuned):
            assert found.waiting == [] and len(found.grants) == len(jobs)
            require_sound(found, servers)
        assert set(speedups(fair)) == {1.0}
        require_sound(allocate("greedy", jobs, servers), servers)
        split += any(len(grant.gpus) > 1 for grant in tuned.grants)
        # The order of the jobs does not matter if all have GPUs.
        mixed_up = random.Random(seed).sample(jobs, len(jobs))
        by_name = {grant.job.name: grant for grant in allocate("tune", mixed_up, servers).grants}
        assert [by_name[grant.job.name] for grant in tuned.grants] == tuned.grants
        assert sum(speedups(tuned)) <= bound(jobs, servers) + 1e-9
    assert split > 20


def test_the_bound_is_that_of_all_combinations() -> None:
    without_fair_shares = 0
    for seed in range(40):
        chosen = random.Random(seed)
        servers = [Server("a", 2, 12, 40), Server("b", 3, 18, 60)]
        jobs = [
            Job(
                f"j{n}",
                1,
                tuple(
                    Option(cores, tier, chosen.uniform(1, 9), 0)
                    for cores in (2, 6, 9)
                    for tier in (0, 20, 30)
                ),
            )
            for n in range(chosen.randint(1, 5))
        ]
        best = best_of_all = 0.0
        fair = {job.name: Needs.of(job, servers).fair.rate for job in jobs}
        for combination in itertools.product(*(job.options for job in jobs)):
            if sum(each.cores for each in combination) > 30:
                continue
            if sum(each.tier_bytes for each in combination) > 100:
                continue
            rates = [
                each.rate / fair[job.name] for job, each in zip(jobs, combination, strict=True)
            ]
            best_of_all = max(best_of_all, sum(rates))
            best = max(best, sum(rates)) if min(rates) >= 1 else best
        assert bound(jobs, servers) == pytest.approx(best)
        without_fair_shares += best_of_all > best * 1.001
    assert without_fair_shares, "in no instance would another bound be higher"


def test_the_bound_of_amounts_without_a_common_unit_is_not_below_the_exact_one() -> None:
    servers = [Server("a", 4, 4, 4_000_000_007)]
    tiers = (0, 999_999_937, 1_000_000_007, 2_000_000_011)
    found = tuple(Option(1, tier, 1.0 + place, 0) for place, tier in enumerate(tiers))
    jobs = [Job(f"j{number}", 1, found) for number in range(4)]
    exact = 4 * 2.0 / Needs.of(jobs[0], servers).fair.rate
    assert exact <= bound(jobs, servers) < exact * 1.6


def test_greedy_passes_over_jobs_that_do_not_fit_and_tune_does_not() -> None:
    wants_all = tuple(Option(c, 0, float(c), 0) for c in CORES)
    jobs = [Job(f"j{number}", 1, wants_all) for number in range(8)]
    greedy = allocate("greedy", jobs, SERVERS[:1])
    assert [grant.option.cores for grant in greedy.grants] == [24]
    assert len(greedy.waiting) == 7
    tuned = allocate("tune", jobs, SERVERS[:1])
    assert [grant.option.cores for grant in tuned.grants] == [3] * 8


def test_a_job_that_needs_little_leaves_its_share_to_others() -> None:
    flat = tuple(Option(c, 0, 1.0, 0) for c in CORES)
    steep = tuple(Option(c, 0, float(min(c, 9)), 0) for c in CORES)
    jobs = [Job("a", 1, steep), Job("b", 1, steep), *(Job(f"f{n}", 1, flat) for n in range(6))]
    found = allocate("tune", jobs, SERVERS[:1])
    assert [grant.option.cores for grant in found.grants] == [9, 9, 1, 1, 1, 1, 1, 1]
    assert bound(jobs, SERVERS[:1]) == pytest.approx(3 + 3 + 6)


@pytest.mark.promise(289)
def test_a_job_that_is_reduced_exceeds_no_other_of_its_servers() -> None:
    servers = [Server("a", 3, 12, 300), Server("b", 3, 12, 300)]
    # It takes few cores and most of both tiers, and its fair share has all of its cores.
    wide = Job("wide", 4, (Option(4, 600, 100.0, 0), Option(16, 0, 50.0, 0)))
    cores = Job("cores", 1, (Option(4, 0, 5.0, 0), Option(10, 0, 10.0, 0)))
    tier = Job("tier", 1, (Option(1, 100, 1.0, 0),))
    found = allocate("tune", [wide, cores, tier], servers)
    require_sound(found, servers)
    assert [grant.option.cores for grant in found.grants] == [16, 4, 1]


def test_jobs_beyond_the_gpus_wait_in_their_order() -> None:
    one = (Option(1, 0, 1.0, 0),)
    two = (Option(2, 0, 1.0, 0),)
    server = [Server("a", 3, 6, 0)]
    jobs = [Job("x", 2, two), Job("y", 2, two), Job("z", 1, one)]
    found = allocate("tune", jobs, server)
    assert [grant.job.name for grant in found.grants] == ["x", "z"]
    assert found.waiting == ["y"]


@pytest.mark.parametrize(
    ("job", "complaint"),
    [
        (Job("big", 40, (Option(40, 0, 1, 0),)), "big needs 40 GPUs"),
        (Job("wide", 1, (Option(4, 0, 1, 0),)), "wide has no option within its fair share of 3"),
        (Job("deep", 1, (Option(1, 63 * GB, 1, 0),)), "deep has no option"),
        (Job("odd", 2, (Option(3, 0, 1, 0),)), "odd has no option"),
    ],
)
def test_a_job_without_a_fair_share_is_refused(job: Job, complaint: str) -> None:
    for policy in POLICIES:
        with pytest.raises(ValueError, match=complaint):
            allocate(policy, [job], SERVERS)
    with pytest.raises(ValueError, match="no policy 'opt'"):
        allocate("opt", [Job("a", 1, (Option(1, 0, 1, 0),))], SERVERS)


def test_the_source_is_divided_by_need_and_then_equally() -> None:
    assert divided_source([10, 50, 40], 1000) == [10, 50, 40]
    assert divided_source([10, 50, 40], 70) == [10, 30, 30]
    assert divided_source([10, 50, 40], 85) == [10, 37.5, 37.5]
    assert divided_source([], 10) == []
    assert sum(divided_source([3, 9, 1, 7, 5], 12)) == pytest.approx(12)


# -- the source as a third resource ----------------------------------------------------------------


def reading(seed: int) -> tuple[list[Job], list[Server], Source]:
    """Jobs as ``randomly``, whose rates are limited by a source that is too slow for all."""
    chosen = random.Random(seed)
    jobs, servers = randomly(seed)
    jobs = [
        replace(
            job,
            options=tuple(
                replace(each, source=each.rate * max(0, 2000 - each.tier_bytes / job.gpus))
                for each in job.options
            ),
        )
        for job in jobs
    ]
    needs = sum(max(option.source for option in job.options) for job in jobs)
    return jobs, servers, Source.of(needs * chosen.uniform(0.01, 0.3), jobs, servers)


@pytest.mark.promise(289)
def test_no_plan_takes_more_from_the_source_than_it_has_and_none_less_than_its_fair_share() -> None:
    gains, limited = [], 0
    for seed in range(100):
        jobs, servers, source = reading(seed)
        fair = allocate("fair", jobs, servers, source)
        tuned = allocate("tune", jobs, servers, source)
        greedy = allocate("greedy", jobs, servers, source)
        for found in (fair, tuned, greedy):
            require_sound(found, servers)
            taken = sum(grant.option.source for grant in found.grants)
            assert taken <= source.budget * (1 + 1e-9)
            assert all(grant.option.source <= grant.need for grant in found.grants)
            limited += any(grant.option.source < grant.need for grant in found.grants)
        assert len(fair.grants) == len(tuned.grants) == len(jobs)
        # The order of the jobs does not matter if all have GPUs.
        mixed_up = random.Random(seed).sample(jobs, len(jobs))
        again = allocate("tune", mixed_up, servers, source).grants
        by_name = {grant.job.name: grant for grant in again}
        assert [by_name[grant.job.name] for grant in tuned.grants] == tuned.grants
        # What is left of the source is not left to waste.
        if any(grant.option.source < grant.need * 0.99 for grant in tuned.grants):
            taken = sum(grant.option.source for grant in tuned.grants)
            assert taken == pytest.approx(source.budget)
        if seed % 5 == 0:
            assert sum(speedups(tuned)) <= bound(jobs, servers, source) + 1e-6
        gains.append(sum(speedups(tuned)) / sum(speedups(fair)))
    assert limited > 60
    # A division that knows the source is better on average than equal parts of all.
    assert mean(gains) > 1.1


def test_the_bound_with_a_source_is_just_above_the_best_division() -> None:
    ratios = []
    for seed in range(25):
        chosen = random.Random(seed)
        servers = [Server("a", 3, 18, 60)]
        jobs = [
            Job(
                f"j{n}",
                1,
                tuple(
                    Option(cores, tier, chosen.uniform(1, 9), chosen.uniform(0, 9) * (20 - tier))
                    for cores in (2, 6)
                    for tier in (0, 10, 20)
                ),
            )
            for n in range(3)
        ]
        source = Source.of(chosen.uniform(20, 200), jobs, servers)
        fair = [Needs.of(job, servers, source).fair.rate for job in jobs]
        best = 0.0
        for options in itertools.product(*(job.options for job in jobs)):
            cores = sum(each.cores for each in options)
            if cores <= 18 and sum(each.tier_bytes for each in options) <= 60:
                best = max(best, best_with(options, fair, source.budget))
        limit = bound(jobs, servers, source)
        assert best - 1e-6 <= limit
        ratios.append(limit / best)
        # Without the source the limit is higher, or the same.
        assert (
            bound(jobs, servers)
            * max(
                Needs.of(job, servers).fair.rate / rate
                for job, rate in zip(jobs, fair, strict=True)
            )
            >= limit - 1e-6
        )
    assert mean(ratios) < 1.1


def best_with(options: Sequence[Option], fair: Sequence[float], budget: float) -> float:
    """The highest sum of speed-ups of these options with the source: each gets what its fair rate
    needs, then those with the highest gain for a byte get more."""
    if any(option.rate < rate for option, rate in zip(options, fair, strict=True)):
        return 0.0
    budget -= sum(o.source * rate / o.rate for o, rate in zip(options, fair, strict=True))
    if budget < -1e-9:
        return 0.0
    total = float(len(options))
    gains = [
        (o.rate / rate - 1, o.source * (1 - rate / o.rate))
        for o, rate in zip(options, fair, strict=True)
    ]
    for gain, cost in sorted(gains, key=lambda each: each[1] / each[0] if each[0] else math.inf):
        part = 1.0 if cost <= max(0.0, budget) else max(0.0, budget) / cost
        total, budget = total + gain * part, budget - cost * part
    return total


def test_a_plan_that_ignores_the_source_is_worse() -> None:
    # The twin of the tests above: the same jobs, divided as if the source had no limit.
    jobs, servers, source = reading(7)
    unaware = [grant.option for grant in allocate("tune", jobs, servers).grants]
    assert sum(option.source for option in unaware) > source.budget
    given = divided_source([option.source for option in unaware], source.budget)
    fair = [Needs.of(job, servers, source).fair.rate for job in jobs]
    reached = [
        option.rate * (have / option.source if option.source else 1.0) / rate
        for option, have, rate in zip(unaware, given, fair, strict=True)
    ]
    aware = speedups(allocate("tune", jobs, servers, source))
    assert min(aware) >= 1 - 1e-9 > min(reached)


def test_the_matrix_of_a_job_follows_from_its_rates_with_all_files_in_the_tier() -> None:
    found = sensitivity_of(
        "a",
        2,
        {4: 100.0, 2: 60.0},
        files=1000,
        total=10**6,
        source=20_000,
        tiers=[10**6, 0, 5 * 10**5],
    )
    assert (found.cores, found.tier_bytes) == ([2, 4], [0, 500_000, 1_000_000])
    # Each file has 1,000 bytes: without a tier the source gives 20 files a second.
    assert found.rates == [[20, 40, 60], [20, 40, 100]]
    assert found.source == [[20_000, 20_000, 0], [20_000, 20_000, 0]]
    assert found.measured == [[False, False, True]] * 2
    job = job_of(Sensitivity.from_dict(found.to_dict()))
    assert (job.name, job.gpus, len(job.options)) == ("a", 2, 6)
    assert job.options[-1] == Option(4, 10**6, 100, 0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"monarch_sensitivity": 2}, "version 2"),
        ({"gpus": 0}, "gpus is 0"),
        ({"job": ""}, "not a short name"),
        ({"job": "a\n"}, "not a short name"),
        ({"cores": [2, 2]}, "cores does not rise"),
        ({"cores": [0, 2]}, "cores does not rise"),
        ({"tier_bytes": []}, "tier_bytes does not rise"),
        ({"rates": [[1.0, 1.0]]}, "rates has not a row"),
        ({"rates": [[1.0], [1.0]]}, "rates has not a row"),
        ({"cores": [1, 10**400]}, "cores is out of its range"),
        ({"cores": [1, 1 << 63]}, "to at most"),
        ({"tier_bytes": [0, 1 << 63]}, "to at most"),
        ({"rates": [[1.0, math.inf]] * 2}, "rates is out of its range"),
        ({"rates": [[1.0, 0.0]] * 2}, "a rate is not within"),
        # Their quotient would be infinite, which JSON has no number for.
        ({"rates": [[1.0, 1e-320]] * 2}, "a rate is not within"),
        ({"rates": [[1.0, 1e16]] * 2}, "a rate is not within"),
        ({"source": [[1e300, 0.0]] * 2}, "source has a value"),
        ({"source": [[-1.0, 0.0]] * 2}, "source has a value"),
    ],
)
def test_a_matrix_with_a_mistake_is_refused(change: dict[str, object], complaint: str) -> None:
    found = sensitivity_of(
        "a", 1, {2: 60.0, 4: 100.0}, files=10, total=100, source=20, tiers=[0, 100]
    )
    with pytest.raises(ValueError, match=complaint):
        job_of(Sensitivity.from_dict({**found.to_dict(), **change}))
