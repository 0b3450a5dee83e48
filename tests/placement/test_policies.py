"""The published oracles of the policies, on the real controller."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from monarch.placement.ledger import Ledger
from monarch.placement.policy import Item, Lru, NoEvict
from monarch.types import Ino
from tests.placement.simulate import Mount, curve_of, epoch_time, items_of, predicted

SHARES = [0.25, 0.35, 0.5, 0.65, 0.8, 0.9]
EQUAL = items_of([1000] * 10_000)


def capacity_for(share: float) -> int:
    return math.floor(share * len(EQUAL)) * 1000


def lognormal_sizes(count: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [int(rng.lognormvariate(11, 1.5)) for _ in range(count)]


@pytest.mark.parametrize("share", SHARES)
def test_no_evict_hits_exactly_the_predicted_files_in_every_epoch(share: float) -> None:
    mount = Mount("no_evict", EQUAL, [capacity_for(share)])
    expected = predicted(EQUAL, [capacity_for(share)])
    hits = [sum(mount.read(mount.shuffled(seed)).hits) for seed in range(4)]
    assert hits == [0] + [len(expected)] * 3
    assert math.floor(share * len(EQUAL)) - 2 <= len(expected) <= math.floor(share * len(EQUAL))
    assert mount.resident() == expected


@pytest.mark.parametrize("share", SHARES)
def test_first_come_hits_exactly_what_fits_in_every_epoch(share: float) -> None:
    mount = Mount("first_come", EQUAL, [capacity_for(share)])
    hits = [sum(mount.read(mount.shuffled(seed)).hits) for seed in range(4)]
    assert hits == [0] + [math.floor(share * len(EQUAL))] * 3


@pytest.mark.parametrize("share", SHARES)
def test_lru_hits_what_its_closed_form_says_and_never_what_no_evict_does(share: float) -> None:
    mount = Mount("lru", EQUAL, [capacity_for(share)])
    for seed in range(2):
        mount.read(mount.shuffled(seed))
    hits = sum(sum(mount.read(mount.shuffled(seed)).hits) for seed in range(2, 5))
    ratio = hits / (3 * len(EQUAL))
    assert ratio == pytest.approx(share + (1 - share) * math.log(1 - share), abs=0.01)
    assert ratio < share - 0.05


def promotions_per_tenth(policy_name: str) -> list[int]:
    mount = Mount(policy_name, EQUAL, [capacity_for(0.5)])
    tenths = [0] * 10
    for position in mount.read(EQUAL).promotions:
        tenths[position * 10 // len(EQUAL)] += 1
    return tenths


def is_uniform(tenths: list[int]) -> bool:
    sigma = math.sqrt(sum(tenths) * 0.1 * 0.9)
    return all(abs(count - sum(tenths) / 10) <= 3 * sigma for count in tenths)


def test_no_evict_spreads_its_promotions_over_the_first_epoch() -> None:
    assert is_uniform(promotions_per_tenth("no_evict"))


def test_first_come_does_not_spread_its_promotions() -> None:
    assert not is_uniform(promotions_per_tenth("first_come"))


def test_with_a_constant_order_no_evict_is_much_faster_than_first_come() -> None:
    seconds = {}
    for name in ("no_evict", "first_come"):
        mount = Mount(name, EQUAL, [capacity_for(0.5)])
        mount.read(EQUAL)
        hits = mount.read(EQUAL).hits
        seconds[name] = epoch_time(hits, miss_s=1.0, step_s=0.5, buffer=64)
    assert seconds["first_come"] == pytest.approx(0.75 * len(EQUAL), rel=0.01)
    assert seconds["first_come"] >= 1.4 * seconds["no_evict"]


def test_with_a_shuffled_order_no_evict_is_as_fast_as_first_come() -> None:
    seconds = {}
    for name in ("no_evict", "first_come"):
        mount = Mount(name, EQUAL, [capacity_for(0.5)])
        mount.read(mount.shuffled(1))
        hits = mount.read(mount.shuffled(2)).hits
        seconds[name] = epoch_time(hits, miss_s=1.0, step_s=0.5, buffer=64)
    assert seconds["first_come"] == pytest.approx(seconds["no_evict"], rel=0.05)


def test_two_tiers_hold_exactly_the_files_assigned_to_them() -> None:
    items = items_of(lognormal_sizes(3000, seed=1))
    total = sum(item.size for item in items)
    capacities = [total // 10, total // 3]
    mount = Mount("no_evict", items, capacities)
    for seed in range(2):
        mount.read(mount.shuffled(seed))
    assert mount.resident() == predicted(items, capacities)
    for tier in (1, 2):
        assert 0 < mount.ledger.used(tier) <= capacities[tier - 1]


@pytest.mark.parametrize("count", [50, 1000, 20_000])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_unequal_files_fill_a_tier_to_within_the_largest_bucket(count: int, share: float) -> None:
    items = items_of(lognormal_sizes(count, seed=count))
    curve = curve_of(items)
    capacity = int(sum(item.size for item in items) * share)
    mount = Mount("no_evict", items, [capacity])
    mount.read(mount.shuffled(0))
    assert capacity - int(curve.max()) <= mount.ledger.used(1) <= capacity


@pytest.mark.parametrize("name", ["no_evict", "first_come", "lru"])
def test_a_file_too_big_for_every_tier_does_not_stop_those_after_it(name: str) -> None:
    items = items_of([10**9] + [1000] * 1000)
    mount = Mount(name, items, [300_000, 200_000])
    mount.read(items)
    assert items[0].ino not in mount.resident()
    assert mount.ledger.used(1) == 300_000
    assert mount.ledger.used(2) == 200_000


@pytest.mark.parametrize("name", ["no_evict", "first_come", "lru"])
def test_when_everything_fits_everything_is_resident_after_one_epoch(name: str) -> None:
    items = items_of([1000] * 100)
    mount = Mount(name, items, [100_000])
    mount.read(mount.shuffled(0))
    assert all(mount.read(mount.shuffled(1)).hits)


@pytest.mark.parametrize("name", ["no_evict", "first_come", "lru"])
def test_empty_files_become_resident_in_a_full_tier(name: str) -> None:
    items = items_of([1000] * 100 + [0] * 100)
    mount = Mount(name, items, [50_000])
    mount.read(items)
    assert all(item.ino in mount.resident() for item in items[100:])


def test_a_larger_tier_drops_no_resident() -> None:
    items = items_of(lognormal_sizes(2000, seed=7))
    total = sum(item.size for item in items)
    small = Mount("no_evict", items, [int(total * 0.4)])
    small.read(items)
    before = small.resident()
    large = Mount("no_evict", items, [int(total * 0.6)])
    sizes = {item.ino: item.size for item in items}
    inos = np.array(list(before))
    large.controller.load(inos, np.array([sizes[ino] for ino in before]), tier=1)
    large.read(large.shuffled(1))
    assert before.items() <= large.resident().items()
    assert len(large.resident()) > len(before)
    assert large.ledger.used(1) <= large.ledger.capacity(1)


def test_no_evict_leaves_at_the_source_what_its_tier_has_no_room_for() -> None:
    items = items_of([1000] * 10)
    policy = NoEvict(curve_of(items), [5000])
    ledger = Ledger([5000])
    admitted = [item for item in items if policy.choose(item, ledger)]
    assert len(admitted) == 5
    ledger.load(1, 4500)
    assert [policy.choose(item, ledger) for item in admitted] == [None] * 5


def test_lru_evicts_from_one_tier_only_and_no_more_than_needed() -> None:
    ledger = Ledger([3000, 3000])
    lru = Lru()
    for n, (size, tier) in enumerate([(1000, 2), (1000, 1), (2000, 2), (2000, 1)], 2):
        assert ledger.reserve(tier, size)
        ledger.commit(tier, size)
        lru.placed(Item(Ino(n), size, n), tier)
    lru.accessed(Ino(2), 2)  # least recent first now: 3 (tier 1), 4 (tier 2), 5 (tier 1), 2
    placement = lru.choose(Item(Ino(9), 2000, 9), ledger)
    assert placement is not None
    assert placement.tier == 2
    assert [victim.ino for victim in placement.evict] == [4]


def test_lru_evicts_nothing_for_what_would_not_fit_an_empty_tier() -> None:
    ledger = Ledger([3000])
    lru = Lru()
    assert ledger.reserve(1, 3000)
    ledger.commit(1, 3000)
    lru.placed(Item(Ino(2), 3000, 2), 1)
    assert lru.choose(Item(Ino(3), 3001, 3), ledger) is None


def test_lru_goes_round_a_tier_that_is_out_of_service() -> None:
    ledger = Ledger([3000, 3000])
    ledger.close(1)
    lru = Lru()
    lru.placed(Item(Ino(2), 3000, 2), 1)
    ledger.load(1, 3000)
    ledger.load(2, 3000)
    lru.loaded(np.array([3]), np.array([3000]), tier=2)
    placement = lru.choose(Item(Ino(4), 1000, 4), ledger)
    assert placement is not None
    assert (placement.tier, [victim.ino for victim in placement.evict]) == (2, [3])
