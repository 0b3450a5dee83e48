"""How long a member is waited for, and when it is left out, in virtual time."""

from __future__ import annotations

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


def test_the_pause_has_a_limit() -> None:
    breaker, now = Breaker(0.05), 0.0
    for _ in range(30):
        breaker.failed(now)
        now += 400.0
        assert breaker.admits(now)
