"""The chunk-wise order visits each chunk once, mixes samples as well as the packing allows, and is
resumed like every other order."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.errors import CheckpointError
from monarch.frameworks.sampler import ResumableSampler, epoch_permutation
from monarch.order import ChunkwiseSampler, chunk_numbers, chunkwise_order, distinct_labels

Order = Callable[[int, int], Sequence[int]]

# 400 chunks of 50 samples, in 100 classes of 200 samples, read in batches of 128.
SAMPLES, CHUNKS, CLASSES, BATCH = 20_000, 400, 100, 128
LABELS = np.arange(SAMPLES) * CLASSES // SAMPLES
BY_CLASS = np.arange(SAMPLES) * CHUNKS // SAMPLES
AT_RANDOM = BY_CLASS[np.argsort(epoch_permutation(7, 0, SAMPLES))]


def chunks_read(order: Sequence[int], chunk_of: npt.NDArray[np.int64], window: int) -> int:
    """The chunks that a reader reads which keeps the ``window`` chunks that it used last."""
    kept: dict[int, None] = {}
    read = 0
    for chunk in chunk_of[np.asarray(order)].tolist():
        read += chunk not in kept
        kept.pop(chunk, None)
        kept[chunk] = None
        while len(kept) > window:
            del kept[next(iter(kept))]
    return read


def chi_square_of_first_positions(order: Order, samples: int, epochs: int) -> float:
    """How far the first samples of the epochs are from uniform: mean samples - 1 if they are."""
    first = Counter(int(order(3, epoch)[0]) for epoch in range(epochs))
    expected = epochs / samples
    return sum((first[sample] - expected) ** 2 / expected for sample in range(samples))


@pytest.mark.promise(240)
@given(
    st.integers(-(1 << 65), 1 << 65),
    st.integers(0, 1 << 40),
    st.lists(st.integers(0, 20), max_size=200),
    st.integers(1, 30),
)
def test_an_epoch_has_every_sample_once_and_a_group_after_the_other(
    seed: int, epoch: int, chunk_of: list[int], group: int
) -> None:
    order = chunkwise_order(seed, epoch, chunk_of, group).tolist()
    assert sorted(order) == list(range(len(chunk_of)))
    # Between two samples of a chunk come samples of its group only.
    for place in range(len(order)):
        chunk = chunk_of[order[place]]
        last = max(i for i in range(len(order)) if chunk_of[order[i]] == chunk)
        assert len({chunk_of[sample] for sample in order[place : last + 1]}) <= group


def test_the_chunk_wise_order_never_changes() -> None:
    chunk_of = [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert chunkwise_order(0, 0, chunk_of, 2).tolist() == [0, 7, 2, 6, 1, 8, 5, 9, 4, 3]
    assert chunkwise_order(1, 5, chunk_of, 1).tolist() == [1, 2, 0, 8, 9, 7, 6, 4, 3, 5]
    assert chunkwise_order(0, 0, chunk_of, 4).tolist() == epoch_permutation(0, 0, 10).tolist()


def test_two_processes_compute_the_same_order() -> None:
    program = (
        "from monarch.order import chunkwise_order\n"
        "print(chunkwise_order(5, 9, [i * i % 13 for i in range(999)], 4).tolist())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    chunk_of = [i * i % 13 for i in range(999)]
    assert json.loads(printed) == chunkwise_order(5, 9, chunk_of, 4).tolist()


@pytest.mark.parametrize("group", [1, 3, 20])
def test_every_sample_is_equally_often_the_first(group: int) -> None:
    chunk_of = np.arange(60) // 3
    found = chi_square_of_first_positions(
        lambda seed, epoch: chunkwise_order(seed, epoch, chunk_of, group), 60, 2000
    )
    # 59 degrees of freedom: above 98.3 with a probability of 0.001, below 30 with one of 0.0005.
    assert 30 < found < 98.3


def test_an_order_whose_chunks_are_not_shuffled_fails_the_test_of_first_positions() -> None:
    chunk_of = np.arange(60) // 3

    def unshuffled(seed: int, epoch: int) -> Sequence[int]:
        order = epoch_permutation(seed, epoch, 60)
        chunks: list[int] = order[np.argsort(chunk_of[order], kind="stable")].tolist()
        return chunks

    assert chi_square_of_first_positions(unshuffled, 60, 2000) > 1000


@pytest.mark.parametrize("group", [1, 8, 40])
def test_each_chunk_is_read_once_with_room_for_one_chunk_more_than_a_group(group: int) -> None:
    order = chunkwise_order(1, 0, AT_RANDOM, group).tolist()
    assert chunks_read(order, AT_RANDOM, group + 1) == CHUNKS
    # Not because there are so few chunks: the order of files reads one for nearly each sample.
    by_sample = epoch_permutation(1, 0, SAMPLES).tolist()
    assert chunks_read(by_sample, AT_RANDOM, group + 1) > 0.8 * SAMPLES


@pytest.mark.parametrize("group", [1, 8, 40, 100])
def test_samples_that_are_packed_at_random_are_mixed_at_any_size_of_a_group(group: int) -> None:
    by_sample = distinct_labels(epoch_permutation(1, 0, SAMPLES), LABELS, BATCH)
    assert 72 < by_sample < 73.5
    mixed = distinct_labels(chunkwise_order(1, 0, AT_RANDOM, group), LABELS, BATCH)
    assert mixed > 0.98 * by_sample
    # Packed by class, the same order does not mix them.
    assert distinct_labels(chunkwise_order(1, 0, BY_CLASS, group), LABELS, BATCH) < 0.8 * by_sample


def test_samples_that_are_packed_by_class_are_not_mixed_in_groups_of_one() -> None:
    assert distinct_labels(chunkwise_order(1, 0, BY_CLASS, 1), LABELS, BATCH) < 4


def test_distinct_labels_are_those_of_full_batches() -> None:
    assert distinct_labels([0, 1, 2, 3, 4], [5, 5, 7, 8, 9], 2) == 1.5
    assert math.isnan(distinct_labels([0], [5], 2))
    with pytest.raises(ValueError, match="batches"):
        distinct_labels([0], [5], 0)


def test_lists_of_samples_give_the_chunk_of_each() -> None:
    assert chunk_numbers([[3, 0], [], [1], [2, 4]]).tolist() == [0, 2, 3, 0, 3]
    assert chunk_numbers([]).tolist() == []
    for wrong in ([[0, 1], [1]], [[0, 2]], [[-1, 0]]):
        with pytest.raises(ValueError, match="sample"):
            chunk_numbers(wrong)


@pytest.mark.parametrize("chunk_of", [[0, -1], [0.5, 1], [[0], [1]], [1 << 32]])
def test_chunks_that_are_no_numbers_are_refused(chunk_of: list[int]) -> None:
    with pytest.raises(ValueError, match="chunk"):
        ChunkwiseSampler(chunk_of, group=1, seed=1)
    with pytest.raises(ValueError, match="group"):
        ChunkwiseSampler([0], group=0, seed=1)
    with pytest.raises(ValueError, match="group"):
        chunkwise_order(1, 0, [0], 0)


def test_integers_of_numpy_give_the_chunk_wise_order_of_pythons_own() -> None:
    expected = ChunkwiseSampler([0, 0, 1, 2], group=2, seed=3)
    sampler = ChunkwiseSampler([0, 0, 1, 2], group=np.int64(2), seed=np.int64(3))
    assert list(sampler) == list(expected) == chunkwise_order(3, 0, [0, 0, 1, 2], 2).tolist()
    assert json.dumps(sampler.state_dict()) == json.dumps(expected.state_dict())
    with pytest.raises(TypeError):
        ChunkwiseSampler([0], group=1.5, seed=1)  # type: ignore[arg-type]


@pytest.mark.promise(241)
def test_a_chunk_wise_run_continues_with_other_numbers_of_ranks() -> None:
    chunk_of = np.arange(1000) // 10
    used: list[int] = []
    state = ChunkwiseSampler(chunk_of, group=4, seed=5).state_dict()
    for world_size, steps in ((1, 77), (2, 51), (3, 1000)):
        ranks = [
            ChunkwiseSampler(chunk_of, group=4, seed=0, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.load_state_dict(json.loads(json.dumps(state)))
        for step in zip(*ranks, strict=True):
            if not steps:
                break
            used += step
            steps -= 1
            for rank in ranks:
                rank.consumed(1)
        state = ranks[0].state_dict()
    # The last round of three ranks is filled with the first samples of the order.
    whole = chunkwise_order(5, 0, chunk_of, 4).tolist()
    assert used[:1000] == whole and used[1000:] == whole[: len(used) - 1000]


@pytest.mark.promise(241)
def test_a_state_of_other_chunks_or_of_another_group_is_refused() -> None:
    chunk_of = np.arange(100) // 10
    saved = ChunkwiseSampler(chunk_of, group=4, seed=5, fingerprint="data").state_dict()
    others = [
        ChunkwiseSampler(chunk_of, group=5, seed=5, fingerprint="data"),
        ChunkwiseSampler(chunk_of // 2, group=4, seed=5, fingerprint="data"),
        ChunkwiseSampler(chunk_of, group=4, seed=5, fingerprint="other data"),
        ResumableSampler(100, seed=5, fingerprint="data"),
    ]
    for other in others:
        before = other.state
        with pytest.raises(CheckpointError, match="began with the data 'data chunk-wise:1:4:"):
            other.load_state_dict(saved)
        assert other.state == before
    same = ChunkwiseSampler(chunk_of.astype(np.int8), group=4, seed=6, fingerprint="data")
    same.load_state_dict(saved)
    assert same.state.seed == 5
