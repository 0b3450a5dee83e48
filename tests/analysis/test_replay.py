"""The replay of epochs under the policies: published figures, closed forms, and an exact oracle."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from monarch.analysis.formulas import HITS, lru_hits, no_evict_hits, random_hits
from monarch.analysis.replay import POLICIES, Epoch, Files, Order, Rates, replay, shuffled
from monarch.types import Ino
from tests.placement.simulate import belady_hits

# As a parallel file system numbers its files.
FIRST_KEY = 144_115_205_255_725_056

# Hit ratios of epochs 3 to 6 with 20,000 files (seeds 4.2): LRU, FIFO, random, MinIO.
TABLE = {
    0.25: (0.034, 0.037, 0.071, 0.250),
    0.35: (0.069, 0.082, 0.139, 0.350),
    0.50: (0.153, 0.193, 0.281, 0.500),
    0.65: (0.281, 0.398, 0.463, 0.650),
    0.80: (0.480, 0.653, 0.676, 0.800),
    0.90: (0.670, 0.829, 0.833, 0.900),
}


def files_of(sizes: list[int]) -> Files:
    keys = np.arange(FIRST_KEY, FIRST_KEY + len(sizes)).astype(np.uint64)
    return Files(np.array(sizes, np.int64), keys)


def played(
    name: str, files: Files, orders: list[Order], capacity: int, **more: Rates
) -> list[Epoch]:
    return list(replay(name, files, orders, capacity, **more))


def steady(epochs: list[Epoch]) -> float:
    return sum(each.hits for each in epochs[2:]) / sum(each.opens for each in epochs[2:])


@pytest.mark.parametrize("share", TABLE)
def test_the_policies_have_the_hit_ratios_of_the_table(share: float) -> None:
    files = files_of([1000] * 2500)
    orders = shuffled(2500, 6, seed=1)
    capacity = int(share * 2500) * 1000
    for name, expected in zip(("lru", "fifo", "random"), TABLE[share], strict=False):
        assert steady(played(name, files, orders, capacity)) == pytest.approx(expected, abs=0.015)
    for name in ("no_evict", "first_come", "belady"):
        hits = [each.hits for each in played(name, files, orders[:3], capacity)]
        # A bucket of two files may leave the room of one.
        assert hits[0] == 0 and hits[1] == hits[2]
        assert int(share * 2500) - 1 <= hits[1] <= int(share * 2500)


def test_twenty_thousand_files_have_exactly_the_hits_that_the_proof_allows() -> None:
    files = files_of([1000] * 20_000)
    orders = shuffled(20_000, 3, seed=2)
    capacity = 7000 * 1000
    for name in ("no_evict", "belady"):
        epochs = played(name, files, orders, capacity)
        assert [each.hits for each in epochs] == [0, 7000, 7000], name
        assert [each.copies for each in epochs] == [7000, 0, 0], name
    lru = played("lru", files, orders, capacity)
    assert lru[2].hits / 20_000 == pytest.approx(lru_hits(0.35), abs=0.01)


def test_the_closed_forms_have_their_values() -> None:
    assert [round(lru_hits(share), 3) for share in TABLE] == [
        *(0.034, 0.070, 0.153, 0.283, 0.478, 0.670)
    ]
    for share, (_, _, of_random, of_minio) in TABLE.items():
        assert random_hits(share) == pytest.approx(of_random, abs=0.003)
        assert no_evict_hits(share) == of_minio
    for formula in HITS.values():
        assert formula(0) == 0
        assert formula(1) == formula(2) == 1
        assert formula(1 - 1e-6) == pytest.approx(1, abs=0.01)


def test_the_simulation_of_belady_is_exact_for_files_of_one_size() -> None:
    rng = random.Random(3)
    # Files that are opened more or less often: other policies do not reach the optimum.
    order = [min(99, int(rng.expovariate(0.04))) for _ in range(3000)]
    files = files_of([10] * 100)
    (epoch,) = played("belady", files, [np.array(order)], 250)
    expected = sum(belady_hits([Ino(each) for each in order], 25))
    assert epoch.hits == pytest.approx(expected, rel=0.02)
    assert epoch.hits <= expected
    for name in ("lru", "fifo", "random", "no_evict"):
        assert played(name, files, [np.array(order)], 250)[0].hits < epoch.hits


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_keeps_more_bytes_than_the_tier_has(name: str) -> None:
    rng = random.Random(4)
    sizes = [int(rng.lognormvariate(6, 1.5)) for _ in range(400)] + [0, 10**9]
    files = files_of(sizes)
    capacity = sum(sizes[:400]) // 3
    epochs = played(name, files, shuffled(len(sizes), 4, seed=5), capacity)
    for number, each in enumerate(epochs):
        assert each.opens == len(sizes) and each.bytes == sum(sizes)
        # The argument of the proof, in bytes, holds for every policy.
        assert each.hit_bytes <= capacity
        assert each.hits <= each.opens - 1
        assert (number > 0) or each.hits == 0
    if name in ("no_evict", "first_come"):
        assert [each.copies for each in epochs[1:]] == [0, 0, 0]
        assert epochs[1].hits == epochs[3].hits == epochs[0].copies
    if name in ("lru", "fifo", "random"):
        assert epochs[3].copies == len(sizes) - epochs[3].hits - 1


def test_a_larger_tier_only_adds_hits() -> None:
    files = files_of([100] * 1000)
    orders = shuffled(1000, 3, seed=6)
    for name in ("no_evict", "lru"):
        hits = [played(name, files, orders, share * 1000)[2].hits for share in range(5, 105, 10)]
        assert hits == sorted(hits)
        assert played(name, files, orders, 100_000)[2].hits == 1000
        assert played(name, files, orders, 0)[2].hits == 0


def test_the_same_seed_gives_the_same_epochs_and_another_seed_others() -> None:
    files = files_of([100] * 300)
    one = list(replay("random", files, shuffled(300, 3, 7), 9000, seed=7))
    assert list(replay("random", files, shuffled(300, 3, 7), 9000, seed=7)) == one
    assert list(replay("random", files, shuffled(300, 3, 8), 9000, seed=8)) != one


def test_every_open_is_reported() -> None:
    counts: list[int] = []
    files = files_of([1] * 15_000)
    list(replay("no_evict", files, shuffled(15_000, 2, 1), 100, on_opens=counts.append))
    assert sum(counts) == 30_000 and len(counts) == 4


@pytest.mark.parametrize("slower", [1.5, 2.0, 3.0])
def test_with_a_constant_order_a_spread_of_hits_saves_time(slower: float) -> None:
    """Of the order of seeds 4.3: hits that are spread over an epoch overlap with misses."""
    files = files_of([1000] * 4000)
    orders = [np.arange(4000)] * 2
    rates = Rates(source=1e6, job=1e6 * slower)
    seconds = {
        name: played(name, files, orders, 2000 * 1000, rates=rates)[1].seconds
        for name in ("no_evict", "first_come")
    }
    first_come, spread = 4 * (0.5 / slower + 0.5), 4 * max(1 / slower, 0.5)
    assert seconds["first_come"] == pytest.approx(first_come, rel=0.05)
    assert seconds["no_evict"] == pytest.approx(spread, rel=0.08)


def test_an_epoch_of_misses_takes_the_time_of_the_source_and_one_of_hits_that_of_the_job() -> None:
    files = files_of([1000] * 500)
    orders = shuffled(500, 2, 1)
    first, second = played("no_evict", files, orders, 10**6, rates=Rates(source=1e5, job=1e6))
    assert first.seconds == pytest.approx(500 * 1000 / 1e5, rel=0.01)
    assert second.seconds == pytest.approx(500 * 1000 / 1e6)
    assert math.isclose(first.bytes, 500_000) and first.hits == 0 and second.hits == 500
