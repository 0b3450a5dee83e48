"""The tests of recognition against their distributions, and their error rate over 1,000 seeds."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from monarch.config.settings import ForesightSettings
from monarch.foresight import past_order, recognition
from monarch.foresight.foresight import Foresight
from monarch.foresight.marks import Marks
from monarch.foresight.past_order import PastOrder
from monarch.foresight.recognition import binomial_tail, poisson_tail
from monarch.foresight.stream import Stream, Subtree
from monarch.order import epoch_permutation
from monarch.types import ROOT_INO, Ino
from tests.foresight.streams import Tree, with_noise, workers

FIRST, N = 100, 20_000
FILES = range(FIRST, FIRST + N)
SEEDS = 1_000
# The stated share of streams that may be recognised as something else than they are.
ERROR_RATE = 0.01
# Opens before the verdict: three windows.
OPENS = 3 * recognition.WINDOW

Order = Callable[[random.Random], list[int]]


def _sequential(rng: random.Random) -> list[int]:
    start = rng.randrange(N - 4 * OPENS)
    return list(FILES[start : start + 2 * OPENS])


def _strided(rng: random.Random) -> list[int]:
    step = rng.randrange(2, 9)
    start = rng.randrange(N - 2 * step * OPENS)
    return list(FILES[start : start + 2 * step * OPENS : step])


def _shuffled(rng: random.Random) -> list[int]:
    return rng.sample(FILES, 2 * OPENS)


def _skewed(rng: random.Random) -> list[int]:
    """Weights as of Zipf: a few hundred files get most of the opens."""
    return [FILES[int(N * rng.random() ** 6)] for _ in range(5 * OPENS)]


KINDS: dict[str, Order] = {
    "sequential": _sequential,
    "strided": _strided,
    "shuffled": _shuffled,
    "skewed": _skewed,
}


@pytest.mark.promise(182)
@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_each_order_is_recognised_within_the_error_rate(kind: str, readers: int) -> None:
    """Workers of a DataLoader open the files in turn, and a twentieth of all opens is noise."""
    found: Counter[str] = Counter()
    for seed in range(SEEDS):
        rng = random.Random(seed)
        opened = with_noise(workers(KINDS[kind](rng), readers, 16, rng), 0.05, FILES, rng)
        stream = Stream(Subtree(ROOT_INO, 1, FILES, Marks(FILES.stop)), keeps_order=False)
        for ino in opened[: OPENS if kind != "skewed" else None]:
            stream.opened(Ino(ino))
        found[stream.pattern] += 1
    wrong = sum(count for pattern, count in found.items() if pattern not in (kind, "unknown"))
    assert wrong <= ERROR_RATE * SEEDS, found
    assert found[kind] >= 0.97 * SEEDS, found


@pytest.mark.promise(182)
@pytest.mark.parametrize("readers", [1, 4])
def test_the_order_of_the_last_epoch_is_recognised_within_the_error_rate(readers: int) -> None:
    """The workers interleave anew in each epoch, and a twentieth of the opens is noise."""
    found: Counter[str] = Counter()
    for seed in range(SEEDS // 8):
        rng, files = random.Random(seed), FILES[: 10 * recognition.WINDOW]
        order = rng.sample(files, len(files))
        marks = Marks(FILES.stop)
        stream = Stream(Subtree(ROOT_INO, 1, files, marks), keeps_order=True)
        for opens in (len(order), 2 * OPENS):
            for ino in with_noise(workers(order[:opens], readers, 16, rng), 0.05, files, rng):
                stream.opened(Ino(ino))
        found[stream.pattern] += 1
    wrong = found.total() - found["same order"] - found["unknown"]
    assert wrong <= ERROR_RATE * found.total(), found
    assert found["same order"] >= 0.97 * found.total(), found


@pytest.mark.promise(182)
@pytest.mark.parametrize("files", [64, 80, 100])
@pytest.mark.parametrize("readers", [2, 4])
def test_an_order_of_few_files_is_not_shuffled(files: int, readers: int) -> None:
    """The batches of the workers are in all parts of the directory, so no window is local."""
    shown: Counter[str] = Counter()
    for seed in range(SEEDS // 10):
        rng, part = random.Random(seed), FILES[:files]
        for order in (list(part), rng.sample(part, files)):
            stream = Stream(Subtree(ROOT_INO, 1, part, Marks(part.stop)), keeps_order=True)
            for _ in range(3):
                for ino in workers(order, readers, 16, rng):
                    stream.opened(Ino(ino))
            shown[stream.pattern] += 1
    assert shown["shuffled"] <= 0.05 * shown.total(), shown


@pytest.mark.promise(182)
def test_two_jobs_that_alternate_are_recognised_within_the_error_rate() -> None:
    """In one directory, with opens by neither; each order with each other one."""
    kinds: dict[str, Callable[[range, random.Random], list[int]]] = {
        "sequential": lambda files, rng: list(files),
        "strided": lambda files, rng: list(files[rng.randrange(3) :: 3]),
        "shuffled": lambda files, rng: rng.sample(files, len(files)),
    }
    tree, jobs = Tree((1, 4 * OPENS)), (10, 20)
    (files,) = tree.files
    found: Counter[bool] = Counter()
    for seed, (one, other) in enumerate(20 * list(product(kinds, kinds))):
        rng, foresight = random.Random(seed), Foresight(tree, ForesightSettings())
        orders = [
            workers(kinds[kind](files, rng)[: OPENS + 64], 4, 16, rng) for kind in (one, other)
        ]
        for inos in zip(*(with_noise(order, 0.05, files, rng) for order in orders), strict=False):
            for job, ino in zip(jobs, inos, strict=True):
                foresight.opened(Ino(ino), job)
        shown = [stream.pattern for job in jobs for stream in foresight.jobs[job].streams]
        for pattern, kind in zip(shown, (one, other), strict=True):
            found[pattern == kind] += pattern != "unknown"
    assert found[False] <= ERROR_RATE * found.total(), found
    assert found.total() > 300


@pytest.mark.parametrize("readers", [16, 64])
def test_many_readers_of_one_order_are_sequential(readers: int) -> None:
    """With one file each they permute a window as if it were random."""
    for seed in range(20):
        rng = random.Random(seed)
        opened = workers(FILES[500:3_000], readers, 1, rng)
        stream = Stream(Subtree(ROOT_INO, 1, FILES, Marks(FILES.stop)), keeps_order=False)
        for ino in opened[: 10 * recognition.WINDOW]:
            stream.opened(Ino(ino))
        assert stream.pattern == "sequential"


def test_opens_without_an_order_stay_unknown() -> None:
    """Half of the opens are of one directory, the other half of all: none of the patterns."""
    for seed in range(100):
        rng = random.Random(seed)
        stream = Stream(Subtree(ROOT_INO, 1, FILES, Marks(FILES.stop)), keeps_order=False)
        for _ in range(OPENS):
            part = FILES[:2000] if rng.random() < 0.5 else FILES
            stream.opened(Ino(rng.choice(part)))
        assert stream.pattern == "unknown"


@pytest.mark.promise(182)
@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_a_random_order_of_the_first_files_is_not_sequential(share: float, readers: int) -> None:
    """As of a job that trains with the first files of a directory, and validates with the rest."""
    found: Counter[str] = Counter()
    for seed in range(SEEDS // 10):
        rng = random.Random(seed)
        part = FILES[: int(share * N)]
        opened = workers(rng.sample(part, 20 * recognition.WINDOW), readers, 16, rng)
        stream = Stream(Subtree(ROOT_INO, 1, FILES, Marks(FILES.stop)), keeps_order=False)
        for ino in opened:
            stream.opened(Ino(ino))
        found[stream.pattern] += 1
    assert found["unknown"] >= (1 - ERROR_RATE) * found.total(), found


def test_the_tails_of_the_distributions_are_right() -> None:
    assert binomial_tail(3, 2, 0.5) == pytest.approx(0.5)
    assert binomial_tail(64, 64, 0.5) == pytest.approx(0.5**64)
    assert (binomial_tail(5, 0, 0.1), binomial_tail(5, 6, 0.1)) == (1.0, 0.0)
    assert poisson_tail(2.0, 3) == pytest.approx(0.3233, abs=1e-4)
    assert poisson_tail(5000.0, 5000) == pytest.approx(0.5, abs=0.01)


def test_a_node_reads_a_sample_as_often_as_nopfs_computes() -> None:
    """Dryden et al., SC 2021: of ImageNet-1k, on 16 nodes and in 90 epochs, a node reads 31,635
    samples more than ten times."""
    files, nodes, epochs = 1_281_167, 16, 90
    more = binomial_tail(epochs, 11, 1 / nodes)
    assert files * more == pytest.approx(31_634.7, abs=0.1)
    # The same of orders that Monarch draws: each node reads every 16th sample of them.
    count = 20_000
    reads = np.zeros(count, np.int64)
    for epoch in range(epochs):
        reads[epoch_permutation(7, epoch, count)[3::nodes]] += 1
    deviation = math.sqrt(count * more * (1 - more))
    assert abs(np.count_nonzero(reads > 10) - count * more) < 4 * deviation


@pytest.mark.parametrize("m", [16, 64])
def test_random_windows_are_uniform_at_the_stated_rate(m: int) -> None:
    """The rate is that of both tests together, a thousandth each."""
    rng = random.Random(5)
    refused = sum(
        not recognition.is_uniform([rng.randrange(N) for _ in range(m)], N) for _ in range(10_000)
    )
    assert 1 <= refused <= 40


def test_a_window_is_local_at_the_stated_rate() -> None:
    """The share of an order that random windows stay within at 1e-9 cannot be counted; at the
    median it can: the distance of the order statistics is Beta distributed."""
    rng = random.Random(6)
    share = 0.8
    within = 0
    for _ in range(4_000):
        ordered = sorted(rng.random() for _ in range(64))
        within += ordered[57] - ordered[6] <= share
    assert within / 4_000 == pytest.approx(binomial_tail(64, 51, share), abs=0.03)


def test_the_stride_of_a_window_needs_equal_gaps_and_one_remainder() -> None:
    rng = random.Random(7)
    assert recognition.stride(list(range(5, 320, 5))) == (5, 0)
    assert recognition.stride(list(range(7, 300, 5))) == (5, 2)
    assert recognition.stride(list(range(64))) == (1, 0)
    assert recognition.stride([3, 3, 3]) == (1, 0)
    assert recognition.stride(rng.sample(range(10_000), 64)) == (1, 0)


def test_an_order_is_known_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place that is known is the right one, and none is made up for other positions."""
    monkeypatch.setattr(past_order, "_SLICE", 100)
    rng = random.Random(8)
    read = rng.sample(range(1000), 450)
    order = PastOrder(array("I", read), 1000)
    for known in (100, 200, 300, 400, 450, 450):
        expected = {position: place for place, position in enumerate(read[:known])}
        assert {position: order.place(position) for position in read[:known]} == expected
        assert {order.place(position) for position in range(1000)} == {None, *range(known)}
        asked = rng.sample(range(1000), 64)
        places = [expected[position] for position in asked if position in expected]
        assert order.places(asked) == places
        order.extend()
