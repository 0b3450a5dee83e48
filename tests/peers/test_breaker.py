"""How long a member is waited for, and when it is left out, in virtual time."""

from __future__ import annotations

import pytest

from monarch.peers.breaker import Breaker


def test_the_limit_follows_the_latencies_and_has_a_least_and_a_greatest_value() -> None:
    breaker = Breaker(0.05)
    assert breaker.limit_s == 1.0, "nothing is known yet"
    for _ in range(64):
        breaker.answered(0.001)
    assert breaker.limit_s == 0.05
    for _ in range(256):
        breaker.answered(0.1)
    assert breaker.limit_s == 0.4
    for _ in range(256):
        breaker.answered(30.0)
    assert breaker.limit_s == 1.0


def test_a_member_is_left_out_after_three_failures_in_a_row() -> None:
    breaker = Breaker(0.05)
    breaker.failed(0.0)
    breaker.failed(0.0)
    breaker.answered(0.01)
    breaker.failed(1.0)
    breaker.failed(1.0)
    assert breaker.admits(1.0) and not breaker.is_out(1.0)
    breaker.failed(1.0)
    assert not breaker.admits(5.9)
    assert breaker.is_out(5.9)


def test_after_the_pause_one_call_tries_the_member_and_its_result_counts() -> None:
    breaker = Breaker(0.05)
    for _ in range(3):
        breaker.failed(0.0)
    assert breaker.admits(5.0)
    assert not breaker.admits(5.0), "the others wait for the result"
    assert breaker.is_failing
    breaker.failed(5.2)
    assert not breaker.admits(15.1), "the pause has doubled"
    assert breaker.admits(15.3)
    breaker.answered(0.01)
    assert not breaker.is_failing
    assert breaker.admits(15.4)
    for _ in range(3):
        breaker.failed(16.0)
    assert breaker.admits(21.0), "the first pause again"


def test_answers_forgive_wrong_bytes_only_if_their_bytes_are_right() -> None:
    breaker = Breaker(0.05)
    for _ in range(3):
        assert breaker.admits(0.0)
        breaker.answered(0.01)
        breaker.damaged(0.0)
    assert breaker.admits(5.0)
    breaker.answered(0.01)
    assert breaker.is_out(5.0), "its bytes are not known yet"
    breaker.damaged(5.0)
    assert not breaker.admits(14.9), "the pause has doubled"
    assert breaker.admits(15.0)
    breaker.answered(0.01)
    breaker.right()
    assert breaker.admits(15.0) and not breaker.is_failing
    for _ in range(2):
        breaker.failed(16.0)
    breaker.answered(0.01)
    assert breaker.admits(16.0)


def test_the_pause_has_a_limit() -> None:
    breaker, now = Breaker(0.05), 0.0
    for _ in range(30):
        breaker.failed(now)
        now += 400.0
        assert breaker.admits(now)


@pytest.mark.promise(341)
def test_the_time_that_a_member_answers_late_is_limited() -> None:
    breaker, now, late_s = Breaker(0.05), 0.0, 0.0
    breaker.source.seconds = 0.02
    assert breaker.fair_s == 0.05
    while now < 100_000.0:
        if breaker.admits(now):
            # One second later than it should, again and again, and never a failure.
            now += 1.05
            late_s += 1.0
            breaker.late(now, 1.0)
            breaker.answered(1.05)
        else:
            now += 1.0
    assert 10.0 < late_s <= 10.0 + 0.01 * now + 1.0


def test_late_answers_at_the_same_time_count_once() -> None:
    breaker = Breaker(0.05)
    for _ in range(64):
        breaker.late(5.0, 1.0)
    breaker.late(5.5, 1.0)
    assert breaker.admits(5.5)
    for second in range(6, 15):
        breaker.late(float(second), 1.0)
        assert breaker.admits(second)
    breaker.late(15.0, 1.0)
    assert breaker.is_out(15.0)
    breaker.answered(0.01)
    assert breaker.is_out(15.0), "one good answer is not enough"


@pytest.mark.fault("M9")
def test_the_time_in_which_this_node_was_stopped_leaves_out_no_member() -> None:
    breaker = Breaker(0.05)
    breaker.late(3600.0, 3500.0)
    assert not breaker.is_failing and breaker.admits(3600.0)
    # Where a wait may be that long it counts.
    breaker = Breaker(1.0)
    breaker.late(3600.0, 100.0)
    assert breaker.is_failing and not breaker.admits(12_000.0)


def test_a_member_that_used_up_its_time_gets_some_back() -> None:
    breaker = Breaker(0.05)
    for now in (94.0, 100.0):
        breaker.late(now, 5.53)
    assert not breaker.admits(299.0)
    assert breaker.admits(301.0)
    breaker.answered(0.01)
    assert not breaker.is_failing and breaker.admits(301.0)
    breaker.late(303.0, 2.0)
    assert breaker.is_out(303.0)


def test_an_answer_that_is_not_slower_than_the_source_is_not_late() -> None:
    breaker = Breaker(0.05)
    breaker.source.seconds = 8.0
    assert breaker.fair_s == 8.0
    for second in range(1000):
        breaker.late(float(second), -0.1)
    assert breaker.admits(1000.0)


@pytest.mark.promise(352)
def test_a_hello_ends_a_pause_but_only_a_request_shortens_the_next_one() -> None:
    breaker = Breaker(0.05)
    for _ in range(3):
        breaker.failed(0.0)
    assert breaker.admits(5.0), "for the hello"
    breaker.greeted(5.1)
    assert not breaker.is_failing and not breaker.is_out(5.1)
    assert breaker.admits(6.0)
    assert not breaker.admits(6.0), "the others wait for the result"
    breaker.failed(6.1)
    assert breaker.is_failing and not breaker.admits(16.0), "the pause has doubled"
    assert breaker.admits(16.2)
    breaker.greeted(16.3)
    assert breaker.admits(16.3)
    breaker.answered(0.01)
    for _ in range(3):
        breaker.failed(17.0)
    assert breaker.is_failing and breaker.admits(22.0), "the first pause again"


def test_a_hello_does_not_end_a_pause_for_damage_or_late_answers() -> None:
    breaker = Breaker(0.05)
    for _ in range(3):
        breaker.damaged(0.0)
    assert breaker.admits(5.0)
    breaker.greeted(5.1)
    assert breaker.is_failing and breaker.is_damaged
    assert breaker.admits(5.1), "a request shows whether its bytes are right"
    breaker = Breaker(0.05)
    for _ in range(3):
        breaker.failed(0.0)
    assert breaker.admits(5.0)
    for now in (94.0, 100.0):
        breaker.late(now, 5.53)
    breaker.greeted(100.0)
    assert breaker.is_failing and not breaker.admits(250.0)
