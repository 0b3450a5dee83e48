"""How many fetches ahead run at the same time as readers, in virtual time, with models of sources.

Numbers are of files with 110 KB on average. The source of the promise is 50 MB/s with 1 ms a call,
or 10 ms a call without another limit.
"""

from __future__ import annotations

import math
import random

import pytest

from monarch.transfer.concurrency import Concurrency
from tests.transfer.sources import (
    MB,
    Bandwidth,
    Changing,
    Fixed,
    Hanging,
    Latency,
    Model,
    Run,
    Servers,
)

MOST = 128


def sizes(count: int, *, seed: int = 1) -> list[int]:
    choice = random.Random(seed)
    return [max(1, int(110_000 * choice.lognormvariate(-0.18, 0.6))) for _ in range(count)]


def narrow(seed: int = 1, deviation: float = 0.0) -> Model:
    return Bandwidth(50 * MB, Latency(0.001, deviation, seed))


def beside(model: Model, *, readers: int = 4, others: int = 0, seconds: float = math.inf) -> Run:
    """Fetches ahead beside ``readers`` of the same files, and ``others``."""
    count = 6000 if seconds == math.inf else 100_000
    run = Run(model, sizes(count), readers, Concurrency(MOST), others=others)
    return run.until(seconds)


def alone(model: Model, *, readers: int = 4, others: int = 0, seconds: float = math.inf) -> Run:
    count = 6000 if seconds == math.inf else 100_000
    return Run(model, sizes(count), readers, None, others=others).until(seconds)


@pytest.mark.parametrize("deviation", [0.0, 0.3, 1.0])
def test_tens_run_within_a_second_where_calls_only_take_long(deviation: float) -> None:
    run = beside(Latency(0.01, deviation), readers=0, seconds=6)
    assert run.limit_at(1.0, 1.2)[0] >= 30
    least, mean, most = run.limit_at(2.0)
    assert least >= 30 and mean >= 80
    assert most <= MOST * 3 // 4


def test_of_a_source_with_a_latency_readers_get_many_times_the_files() -> None:
    run = beside(Latency(0.01))
    assert run.files_per_s >= 10 * alone(Latency(0.01)).files_per_s
    assert set(run.fetches.values()) == {1}


@pytest.mark.parametrize("deviation", [0.0, 0.5])
def test_few_run_where_the_bandwidth_is_the_limit(deviation: float) -> None:
    run = beside(narrow(deviation=deviation), readers=0, seconds=30)
    assert run.limit_at(1.0)[1] <= 5 and run.limit_at(1.0)[2] <= 8


def test_readers_of_a_narrow_source_are_as_fast_as_without() -> None:
    run = beside(narrow())
    assert run.files_per_s >= 0.98 * alone(narrow()).files_per_s
    assert set(run.fetches.values()) == {1}


def test_other_readers_of_a_narrow_source_wait_little_longer() -> None:
    """Four readers of files that are not foreseen: one fetch ahead takes a fifth of the source."""
    without = alone(narrow(), readers=0, others=4, seconds=30)
    run = beside(narrow(), readers=0, others=4, seconds=30)
    assert run.limit_at(10.0)[1] <= 2
    late = run.waits[len(run.waits) // 2 :]
    assert _mean(late) <= 1.27 * _mean(without.waits)


@pytest.mark.parametrize("count", [16, 48])
def test_a_fixed_number_makes_other_readers_of_a_narrow_source_wait(count: int) -> None:
    """The twin of the tests above: what they demand can be missed."""
    without = alone(narrow(), readers=0, others=4, seconds=10)
    fixed = Run(narrow(), sizes(100_000), 0, Fixed(count), others=4).until(10)
    assert _mean(fixed.waits) > 3 * _mean(without.waits)
    assert len(fixed.waits) < 0.3 * len(without.waits)


def test_other_readers_of_a_source_with_a_latency_do_not_wait_longer() -> None:
    run = beside(Latency(0.01), readers=0, others=4, seconds=7)
    assert run.limit_at(2.0)[0] >= 90
    assert _mean(run.waits) <= 1.001 * 0.01


@pytest.mark.parametrize("servers", [8, 32])
def test_the_limit_is_near_the_number_of_servers(servers: int) -> None:
    run = beside(Servers(servers, Latency(0.01, 0.3)), readers=0, seconds=10)
    least, mean, most = run.limit_at(2.0)
    assert 0.8 * servers <= least and most <= 1.8 * servers
    assert servers <= mean <= 1.5 * servers
    # The source is used: 100 files a second for each server.
    assert len(run.fetches) >= 0.93 * 10 * 100 * servers


def test_noise_does_not_make_the_limit_oscillate() -> None:
    run = beside(Servers(32, Latency(0.01, 0.8)), readers=0, seconds=15)
    limits = [limit for at, limit in run.limits if at > 3]
    mean = sum(limits) / len(limits)
    assert math.sqrt(sum((limit - mean) ** 2 for limit in limits) / len(limits)) < 0.2 * mean


def test_a_source_that_becomes_narrow_is_left_to_its_readers() -> None:
    run = beside(Changing(Latency(0.01), narrow(), 3.0), readers=0, seconds=12)
    assert run.limit_at(2.0, 3.0)[0] >= 90
    assert run.limit_at(6.0)[2] <= 8


def test_a_source_that_becomes_wide_is_used() -> None:
    run = beside(Changing(narrow(), Latency(0.003), 5.0), readers=0, seconds=8)
    assert run.limit_at(4.0, 5.0)[2] <= 8
    assert run.limit_at(7.0)[1] >= 70


def test_a_source_whose_calls_take_longer_is_used_after_the_next_measurement() -> None:
    run = beside(Changing(Latency(0.02), Latency(0.06), 5.0), readers=0, seconds=20)
    assert run.limit_at(15.0)[1] >= 80


def test_while_the_source_hangs_nothing_begins_and_readers_keep_their_calls() -> None:
    source = Hanging(Latency(0.01), lambda now: 2.0 <= now < 8.0)
    run = beside(source, readers=0, seconds=12)
    hung = [running for at, running in run.history if 3.5 < at < 8.0]
    assert max(hung) <= MOST * 3 // 4
    assert run.concurrency is not None and run.concurrency.running >= max(hung)
    # Nothing ends any more, so nothing begins.
    assert len(set(hung)) == 1


def test_single_files_that_hang_do_not_stop_the_others() -> None:
    choice = random.Random(1)
    source = Hanging(Latency(0.01), lambda now: choice.random() < 0.0003)
    run = beside(source, readers=0, seconds=8)
    assert run.limit_at(4.0)[0] >= 60
    assert len(run.fetches) > 8 * 5000
    assert max(running for _, running in run.history) <= MOST * 3 // 4


def test_one_slow_call_in_a_measurement_does_not_hide_the_queue() -> None:
    """The first call, of which a thread is started, takes 40 times as long as the next ones."""
    source = Changing(Latency(0.1), narrow(), 0.05)
    run = beside(source, readers=0, seconds=3)
    assert run.limit_at(1.0)[2] <= 8


def test_reads_of_readers_take_places_of_fetches_ahead() -> None:
    concurrency = Concurrency(MOST)
    calls = []
    for now in range(2000):
        concurrency.look(0, 0.0, 40, now / 100)
        while concurrency.may_begin(now / 100):
            calls.append(concurrency.began(now / 100))
        for call in calls:
            concurrency.ended(call, 1000, now / 100 + 0.005)
        calls.clear()
        assert concurrency.limit <= MOST - 2 * 40
    assert concurrency.limit == MOST - 2 * 40


def test_of_two_calls_one_is_left_to_readers_and_a_single_one_is_theirs() -> None:
    assert Concurrency(1).may_begin(0.0) is False
    two = Concurrency(2)
    assert two.may_begin(0.0)
    two.began(0.0)
    assert not two.may_begin(0.0)


def test_a_failed_call_says_nothing_about_the_source() -> None:
    concurrency = Concurrency(MOST)
    for now in range(200):
        call = concurrency.began(float(now))
        concurrency.failed(call, now + 0.0001)
    assert concurrency.limit == 1 and concurrency.running == 0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
