"""The positions of the files in an order, compared with lists."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from itertools import pairwise

import pytest

from monarch.foresight import positions as module
from monarch.foresight.positions import Positions


def made(order: list[int], pieces: random.Random) -> Positions:
    found, start = Positions(), 0
    while start < len(order):
        end = start + pieces.randrange(1, 60)
        found.extend(start, array("I", order[start:end]))
        start = end
    return found


@pytest.mark.parametrize("most", [1 << 18, 128])
def test_the_next_position_and_repeats_are_those_of_the_order(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(module, "_MOST", most)
    for seed in range(6):
        rng = random.Random(seed)
        order = [rng.choice((0, 5, 7, 1 << 31, *range(100, 160))) for _ in range(900)]
        found = made(order, rng)
        trimmed = rng.randrange(300)
        found.trim(trimmed)
        for _ in range(300):
            ino, start = rng.choice(order[trimmed:]), rng.randrange(trimmed, 900)
            if ino:
                expected = next((n for n in range(start, 900) if order[n] == ino), None)
                assert found.after(ino, start) == expected
            end = start + rng.randrange(40)
            part = [ino for ino in order[start : end + 1] if ino]
            assert found.repeats_within(start, end) == (len(set(part)) < len(part))
        assert found.after(99, 0) is None


def test_a_shuffled_order_repeats_nothing_within_an_epoch() -> None:
    rng = random.Random(1)
    order = [ino for _ in range(4) for ino in rng.sample(range(2, 502), 500)]
    found = made(order, rng)
    assert not any(found.repeats_within(start, start + 499) for start in range(0, 2000, 500))
    assert all(found.repeats_within(start, start + 500) for start in range(0, 1500, 100))


def test_the_memory_is_counted_and_runs_are_few() -> None:
    rng = random.Random(2)
    order = [ino for _ in range(2) for ino in rng.sample(range(2, 100_002), 100_000)]
    tracemalloc.start()
    try:
        found = Positions()
        for start in range(0, len(order), 4000):
            found.extend(start, array("I", order[start : start + 4000]))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 1.05 * found.bytes < 1.05 * 8.1 * len(order)
    sizes = [len(run.keys) for run in found._runs]
    assert all(2 * after <= before for before, after in pairwise(sizes))
    found.trim(len(order))
    assert found.bytes < 1000
