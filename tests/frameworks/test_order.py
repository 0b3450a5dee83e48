"""The order of samples is the same for ever, and each sample is used once, whatever crashes."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from itertools import islice

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from monarch.errors import CheckpointError
from monarch.order import OrderState, ResumableSampler, epoch_permutation, fingerprint

MASK = (1 << 64) - 1


def mix(z: int) -> int:
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def by_definition(seed: int, epoch: int, count: int) -> list[int]:
    """Fisher and Yates with splitmix64, one number after the other."""
    golden = 0x9E3779B97F4A7C15
    key = mix(mix(seed + golden) + (epoch + 1) * golden)
    order = list(range(count))
    for i in range(count - 1, 0, -1):
        j = mix(key + (i + 1) * golden) * (i + 1) >> 64
        order[i], order[j] = order[j], order[i]
    return order


@pytest.mark.parametrize(
    ("seed", "epoch", "expected"),
    [
        (0, 0, [2, 5, 0, 4, 3, 7, 9, 8, 1, 6]),
        (0, 1, [0, 5, 8, 3, 9, 2, 1, 4, 7, 6]),
        (1, 0, [9, 7, 4, 3, 8, 6, 5, 2, 1, 0]),
    ],
)
def test_an_order_never_changes(seed: int, epoch: int, expected: list[int]) -> None:
    assert epoch_permutation(seed, epoch, 10).tolist() == expected


def test_the_order_of_a_million_never_changes() -> None:
    order = epoch_permutation(7, 3, 1_000_000)
    assert xxhash.xxh3_64_hexdigest(order.astype("<i8").tobytes()) == "464e08617babd750"


@given(st.integers(-(1 << 70), 1 << 70), st.integers(0, 1 << 40), st.integers(0, 300))
def test_the_fast_way_is_the_definition(seed: int, epoch: int, count: int) -> None:
    order = epoch_permutation(seed, epoch, count).tolist()
    assert order == by_definition(seed, epoch, count)
    assert sorted(order) == list(range(count))


def test_every_sample_comes_to_every_place_equally_often() -> None:
    places = Counter((i, j) for e in range(4000) for i, j in enumerate(epoch_permutation(1, e, 5)))
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
def test_a_run_goes_on_with_other_numbers_of_ranks(batch: int) -> None:
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
        assert Counter(used) == Counter(range(count)), crash


def test_what_workers_fetch_ahead_is_not_consumed() -> None:
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


def test_epochs_go_on_where_the_run_was() -> None:
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
        (ResumableSampler(10, seed=2, fingerprint=fingerprint(["b", "a"])), "begun with the data"),
    ):
        before = sampler.state
        with pytest.raises(CheckpointError, match=complaint) as refused:
            sampler.load_state_dict(state)
        assert "\n" not in str(refused.value)
        assert sampler.state == before


def test_a_state_of_a_newer_monarch_or_of_something_else_is_refused() -> None:
    state = ResumableSampler(10, seed=1).state_dict()
    assert OrderState.from_json(state).to_json() == state
    with pytest.raises(CheckpointError, match="version 2"):
        OrderState.from_json({**state, "version": 2})
    for change in ({"epoch": -1}, {"consumed": 11}, {"seed": "1"}, {"N": None}, {"version": "1"}):
        with pytest.raises(CheckpointError, match="not the state"):
            OrderState.from_json({**state, **change})


def test_names_that_run_into_each_other_have_another_fingerprint() -> None:
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"]) != fingerprint([b"a", b"b", b"c"])
    assert fingerprint(["a"]) == fingerprint([b"a"])
