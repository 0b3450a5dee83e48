"""When a tier is out of service, and when it is tried again."""

from __future__ import annotations

import pytest

from monarch.transfer.outages import Outage, Outages

FAILED = Outage("Input/output error", 7, slow=False)


@pytest.fixture
def outages() -> Outages:
    return Outages([1, 2], pause_s=10)


def test_an_outage_is_known_once_and_ends(outages: Outages) -> None:
    assert outages.begin(1, FAILED, now_s=0)
    assert not outages.begin(1, Outage("another", 9, slow=False), now_s=1)
    assert outages.current() == {1: FAILED}
    assert outages.of(2) is None
    outages.end(1)
    assert outages.current() == {}


def test_a_tier_that_fails_and_then_hangs_is_left_alone_and_out_since_it_failed(
    outages: Outages,
) -> None:
    assert FAILED.is_read
    outages.begin(1, FAILED, now_s=0)
    assert outages.begin(1, Outage("no answer", 9, slow=True), now_s=1)
    assert outages.current() == {1: Outage("no answer", 7, slow=True)}
    assert not outages.current()[1].is_read
    assert not outages.begin(1, FAILED, now_s=2)
    assert outages.current()[1].slow


def test_tries_are_ever_rarer_until_a_copy_has_arrived(outages: Outages) -> None:
    now = 0.0
    outages.begin(1, FAILED, now_s=now)
    for pause in (10, 20, 40, 60, 60):
        assert not outages.is_due(1, now_s=now + pause - 1)
        assert outages.is_due(1, now_s=now + pause)
        now += pause
        outages.tried(1, FAILED, now_s=now)
    # Back, but no good: the next outage is as long as the last one.
    outages.end(1)
    outages.begin(1, FAILED, now_s=now)
    assert not outages.is_due(1, now_s=now + 59)
    outages.end(1)
    outages.copy_arrived(1)
    outages.begin(1, FAILED, now_s=now)
    assert outages.is_due(1, now_s=now + 10)


def test_a_pause_that_is_longer_than_a_minute_stays_as_it_is() -> None:
    outages = Outages([1], pause_s=300)
    outages.begin(1, FAILED, now_s=0)
    outages.tried(1, FAILED, now_s=300)
    assert not outages.is_due(1, now_s=599)
    assert outages.is_due(1, now_s=600)


def test_eight_copies_that_cannot_be_read_within_ten_seconds_are_the_disks_fault(
    outages: Outages,
) -> None:
    assert not any(outages.copy_unreadable(1, now_s=2.0 * n) for n in range(50))
    assert [outages.copy_unreadable(2, now_s=n) for n in range(8)] == [False] * 7 + [True]
    # What was counted before an outage counts no more after it.
    outages.begin(2, FAILED, now_s=8)
    outages.end(2)
    assert not outages.copy_unreadable(2, now_s=9)
