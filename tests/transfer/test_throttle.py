"""Bandwidth and courtesy in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.transfer.pace import TokenBucket
from monarch.transfer.source_load import NoDatapath, SourceLoad


def test_without_a_rate_nothing_waits() -> None:
    bucket = TokenBucket(0, 10)
    assert [bucket.take(10**12, float(now)) for now in range(3)] == [0.0, 0.0, 0.0]


def test_a_burst_goes_at_once_and_the_rest_at_the_rate() -> None:
    bucket = TokenBucket(100, 50)
    assert bucket.take(50, 0.0) == 0.0
    assert bucket.take(100, 0.0) == pytest.approx(1.0)
    # What was promised for later counts: two takers do not share one second.
    assert bucket.take(100, 0.0) == pytest.approx(2.0)


def test_more_than_the_burst_is_served_late_not_never() -> None:
    bucket = TokenBucket(100, 50)
    assert bucket.take(1050, 0.0) == pytest.approx(10.0)


def test_a_pause_earns_no_more_than_the_burst() -> None:
    bucket = TokenBucket(100, 50)
    bucket.take(50, 0.0)
    assert bucket.take(50, 3600.0) == 0.0
    assert bucket.take(100, 3600.0) == pytest.approx(1.0)


def test_a_clock_that_jumps_back_earns_nothing() -> None:
    bucket = TokenBucket(100, 50)
    bucket.take(50, 100.0)
    assert bucket.take(50, 10.0) == pytest.approx(0.5)


@given(
    rate=st.integers(1, 10**9),
    burst=st.integers(1, 10**8),
    turns=st.lists(st.tuples(st.integers(0, 10**8), st.floats(0, 5)), max_size=50),
)
def test_over_any_time_no_more_goes_than_burst_and_rate_allow(
    rate: int, burst: int, turns: list[tuple[int, float]]
) -> None:
    bucket = TokenBucket(rate, burst)
    now = 0.0
    moved = 0
    for count, pause in turns:
        now += pause + bucket.take(count, now)
        moved += count
        # The last piece is taken, and used when its wait is over.
        assert moved <= burst + rate * now * (1 + 1e-6) + 1


def test_a_reader_in_flight_or_just_gone_is_busy() -> None:
    source_load = SourceLoad(NoDatapath())
    assert not source_load.busy(0.0)
    source_load.begin(1000.0)
    source_load.begin(1000.0)
    assert source_load.busy(1000.0)
    source_load.end(1000.0)
    assert source_load.busy(2000.0)
    source_load.end(2000.0)
    assert source_load.busy(2000.01)
    assert not source_load.busy(2000.1)
