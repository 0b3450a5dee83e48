"""The order of samples never changes, and each sample is used once, even after crashes."""

from __future__ import annotations

import importlib.util
import json
import tracemalloc
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from monarch.errors import CheckpointError
from monarch.frameworks.sampler import OrderState, ResumableSampler, epoch_permutation, fingerprint

MASK = (1 << 64) - 1


def mix(z: int) -> int:
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def by_definition(seed: int, epoch: int, count: int, algorithm: int) -> list[int]:
    """With splitmix64, one number after the other."""
    golden = 0x9E3779B97F4A7C15
    key = mix(mix(seed + golden) + (epoch + 1) * golden)
    if algorithm == 2:
        # Sorted by the draws' upper bits, then by number.
        bits = max(0, count - 1).bit_length()
        return sorted(range(count), key=lambda i: (mix(key + (i + 1) * golden) >> bits, i))
    # Fisher and Yates.
    order = list(range(count))
    for i in range(count - 1, 0, -1):
        j = mix(key + (i + 1) * golden) * (i + 1) >> 64
        order[i], order[j] = order[j], order[i]
    return order


@pytest.mark.parametrize(
    ("algorithm", "seed", "epoch", "expected"),
    [
        (1, 0, 0, [2, 5, 0, 4, 3, 7, 9, 8, 1, 6]),
        (1, 0, 1, [0, 5, 8, 3, 9, 2, 1, 4, 7, 6]),
        (1, 1, 0, [9, 7, 4, 3, 8, 6, 5, 2, 1, 0]),
        (2, 0, 0, [0, 7, 8, 2, 5, 9, 4, 6, 3, 1]),
        (2, 0, 1, [6, 0, 4, 5, 2, 7, 9, 1, 8, 3]),
        (2, 1, 0, [9, 8, 7, 4, 2, 0, 3, 6, 5, 1]),
    ],
)
def test_an_order_never_changes(algorithm: int, seed: int, epoch: int, expected: list[int]) -> None:
    assert epoch_permutation(seed, epoch, 10, algorithm=algorithm).tolist() == expected


@pytest.mark.parametrize(
    ("algorithm", "digest"), [(1, "464e08617babd750"), (2, "7d4fb7c74e142e30")]
)
def test_the_order_of_a_million_never_changes(algorithm: int, digest: str) -> None:
    order = epoch_permutation(7, 3, 1_000_000, algorithm=algorithm)
    assert xxhash.xxh3_64_hexdigest(order.astype("<i8").tobytes()) == digest


@given(
    st.integers(-(1 << 70), 1 << 70),
    st.integers(0, 1 << 40),
    st.integers(0, 300),
    st.integers(1, 2),
)
def test_the_fast_way_is_the_definition(seed: int, epoch: int, count: int, algorithm: int) -> None:
    order = epoch_permutation(seed, epoch, count, algorithm=algorithm).tolist()
    assert order == by_definition(seed, epoch, count, algorithm)
    assert sorted(order) == list(range(count))


@pytest.mark.finding("W22")
def test_ten_million_samples_take_100_mb_and_each_is_there_once() -> None:
    count = 10_000_000
    tracemalloc.start()
    try:
        shares = [
            ResumableSampler(count, seed=1, rank=r, world_size=w) for r, w in ((0, 1), (3, 4))
        ]
        for sampler in shares:
            tracemalloc.reset_peak()
            indices = iter(sampler)
            first = list(islice(indices, 100_000))
            assert len(set(first)) == len(first)
            assert tracemalloc.get_traced_memory()[1] < 100e6
            del indices
    finally:
        tracemalloc.stop()
    order = epoch_permutation(1, 0, count)
    seen = np.zeros(count, np.bool_)
    seen[order] = True
    assert seen.all()


@pytest.mark.parametrize("algorithm", [1, 2])
def test_every_sample_comes_to_every_place_equally_often(algorithm: int) -> None:
    places = Counter(
        (i, j)
        for e in range(4000)
        for i, j in enumerate(epoch_permutation(1, e, 5, algorithm=algorithm).tolist())
    )
    # 800 expected; five standard deviations are 127.
    assert len(places) == 25 and all(673 < count < 927 for count in places.values())


def test_an_epoch_without_samples_is_empty_and_a_negative_one_refused() -> None:
    assert epoch_permutation(1, 0, 0).tolist() == []
    assert list(ResumableSampler(0, seed=1)) == []
    for count in (-1, 1 << 32):
        with pytest.raises(ValueError, match="samples"):
            epoch_permutation(1, 0, count)
        with pytest.raises(ValueError, match="samples"):
            ResumableSampler(count, seed=1)


def test_a_run_that_crashes_at_any_index_uses_every_sample_once() -> None:
    count = 1000
    whole = epoch_permutation(3, 0, count).tolist()
    for index in range(count + 1):
        first = ResumableSampler(count, seed=3)
        used = []
        for sample in first:
            if len(used) == index:
                break
            used.append(sample)
            first.consumed(1)
        saved = json.loads(json.dumps(first.state_dict()))
        second = ResumableSampler(count, seed=99)
        second.load_state_dict(saved)
        assert len(second) == count - index
        assert used + list(second) == whole


@pytest.mark.parametrize("batch", [1, 7])
def test_a_run_continues_with_other_numbers_of_ranks(batch: int) -> None:
    count = 1000
    for crash in range(0, count, 3 * batch):
        used: list[int] = []
        state = ResumableSampler(count, seed=5).state_dict()
        for world_size, steps in ((1, crash // batch // 3), (2, crash // batch // 3), (3, count)):
            ranks = [
                ResumableSampler(count, seed=5, rank=r, world_size=world_size)
                for r in range(world_size)
            ]
            for rank in ranks:
                rank.load_state_dict(state)
            shares = [iter(list(rank)) for rank in ranks]
            for _ in range(steps):
                batches = [list(islice(share, batch)) for share in shares]
                for rank, samples in zip(ranks, batches, strict=True):
                    used += samples
                    rank.consumed(len(samples))
                if not batches[0]:
                    break
            state = ranks[0].state_dict()
        # Each once, but for those that fill up the last round of three.
        again = Counter(used) - Counter(range(count))
        assert set(used) == set(range(count)) and again.total() <= 2, crash


def test_samples_that_workers_prefetch_are_not_consumed() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    from torch.utils.data import DataLoader

    count, used = 100, []
    sampler = ResumableSampler(count, seed=1)
    for stop in (3, 100):
        taken_up = ResumableSampler(count, seed=1)
        taken_up.load_state_dict(sampler.state_dict())
        sampler = taken_up
        loader = DataLoader(
            range(count),
            batch_size=8,
            sampler=sampler,
            num_workers=2,
            multiprocessing_context="fork",
        )
        for step, batch in enumerate(loader):
            used += batch.tolist()
            sampler.consumed(len(batch))
            if step == stop:
                break
    assert used == epoch_permutation(1, 0, count).tolist()


def test_epochs_continue_where_the_run_was() -> None:
    sampler = ResumableSampler(4, seed=1)
    seen = []
    for epoch in sampler.epochs(3):
        seen.append((epoch, list(sampler)))
        sampler.consumed(len(sampler))
    assert [epoch for epoch, _ in seen] == [0, 1, 2]
    assert seen[1][1] == epoch_permutation(1, 1, 4).tolist()
    again = ResumableSampler(4, seed=1)
    again.load_state_dict({**sampler.state_dict(), "epoch": 1, "consumed": 4})
    # The second epoch was over, but not left: it has no sample more.
    assert [(epoch, len(again)) for epoch in again.epochs(3)] == [(1, 0), (2, 4)]


def test_more_than_an_epoch_has_cannot_be_consumed() -> None:
    sampler = ResumableSampler(5, seed=1, world_size=2)
    sampler.consumed(3)
    assert sampler.state.consumed == 5
    with pytest.raises(ValueError, match="the epoch has 0 left"):
        sampler.consumed(1)
    with pytest.raises(ValueError, match="-1 samples"):
        sampler.consumed(-1)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        ResumableSampler(5, seed=1, rank=2, world_size=2)


def test_other_data_are_refused_in_one_line_and_nothing_changes() -> None:
    state = ResumableSampler(10, seed=1, fingerprint=fingerprint(["a", "b"])).state_dict()
    for sampler, complaint in (
        (ResumableSampler(11, seed=2, fingerprint=fingerprint(["a", "b"])), "10 samples, now"),
        (ResumableSampler(10, seed=2, fingerprint=fingerprint(["b", "a"])), "began with the data"),
    ):
        before = sampler.state
        with pytest.raises(CheckpointError, match=complaint) as refused:
            sampler.load_state_dict(state)
        assert "\n" not in str(refused.value)
        assert sampler.state == before


def test_a_state_of_a_newer_monarch_or_of_something_else_is_refused() -> None:
    state = ResumableSampler(10, seed=1).state_dict()
    assert OrderState.from_json(state).to_json() == state
    with pytest.raises(CheckpointError, match="version 3"):
        OrderState.from_json({**state, "version": 3})
    for change in (
        *({"epoch": -1}, {"consumed": 11}, {"seed": "1"}, {"N": None}, {"version": "1"}),
        *({"algorithm": 3}, {"algorithm": None}),
    ):
        with pytest.raises(CheckpointError, match="not the state"):
            OrderState.from_json({**state, **change})


def test_names_that_run_into_each_other_have_another_fingerprint() -> None:
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"]) != fingerprint([b"a", b"b", b"c"])
    assert fingerprint(["a"]) == fingerprint([b"a"])


@pytest.mark.finding("W22")
@pytest.mark.promise(166)
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_rank_has_as_many_batches_as_torchs_own_sampler_gives_it(drop_last: bool) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    from torch.utils.data import BatchSampler, DistributedSampler

    for count, world_size in ((1001, 2), (1000, 3), (1000, 4), (5, 8), (3, 8), (0, 2), (7, 7)):
        used: list[int] = []
        batches = set()
        for rank in range(world_size):
            own = ResumableSampler(
                count, seed=1, rank=rank, world_size=world_size, drop_last=drop_last
            )
            torchs = DistributedSampler(
                range(count), world_size, rank, shuffle=False, drop_last=drop_last
            )
            share = list(own)
            assert len(own) == len(share) == len(torchs)
            if count:
                # The same samples of the order are given, and given again.
                order = epoch_permutation(1, 0, count)
                assert share == [order[place] for place in torchs]
            batches.add(len(list(BatchSampler(own, 16, drop_last=False))))
            used += share
        assert len(batches) == 1
        again = Counter(used) - Counter(range(count))
        if drop_last:
            assert not again and count - len(used) < world_size
        elif count:
            assert set(used) == set(range(count))
            assert len(used) - count < world_size


@pytest.mark.finding("W22")
@pytest.mark.promise(166)
def test_frameworks_may_set_the_epoch_and_a_continued_run_keeps_its_place() -> None:
    sampler = ResumableSampler(10, seed=1)
    sampler.set_epoch(2)
    assert list(sampler) == epoch_permutation(1, 2, 10).tolist()
    sampler.consumed(4)
    again = ResumableSampler(10, seed=1)
    again.load_state_dict(sampler.state_dict())
    again.set_epoch(2)
    assert list(again) == epoch_permutation(1, 2, 10).tolist()[4:]
    again.set_epoch(3)
    assert (again.epoch, again.state.consumed, len(again)) == (3, 0, 10)
    with pytest.raises(ValueError, match="epoch -1"):
        again.set_epoch(-1)


def test_integers_of_numpy_give_the_order_and_the_state_of_pythons_own() -> None:
    for number in (int, np.int64, np.uint8, np.array):
        sampler = ResumableSampler(number(10), seed=number(3), rank=number(1), world_size=number(2))
        sampler.set_epoch(number(4))
        sampler.consumed(number(2))
        assert list(sampler) == epoch_permutation(3, 4, 10).tolist()[5::2]
        assert epoch_permutation(number(3), number(4), number(10)).tolist()[5::2] == list(sampler)
        saved = json.loads(json.dumps(sampler.state_dict()))
        assert OrderState.from_json(saved).consumed == 4


@pytest.mark.promise(166)
def test_a_run_begun_with_an_earlier_algorithm_keeps_its_orders() -> None:
    state = {
        **{"version": 1, "seed": 5, "epoch": 3, "consumed": 4, "N": 10, "world_size": 2},
        "fingerprint": "",
    }
    sampler = ResumableSampler(10, seed=1)
    sampler.load_state_dict(state)
    assert list(sampler) == epoch_permutation(5, 3, 10, algorithm=1).tolist()[4:]
    # Also when it is saved and restored once more, and in the epochs that follow.
    again = ResumableSampler(10, seed=1)
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    again.next_epoch()
    assert list(again) == epoch_permutation(5, 4, 10, algorithm=1).tolist()
    with pytest.raises(ValueError, match="not 3"):
        epoch_permutation(1, 0, 10, algorithm=3)
