"""Pauses after copies that failed."""

from __future__ import annotations

from itertools import count

from monarch.transfer.failures import Failures
from monarch.types import Ino


def test_a_file_that_cannot_be_read_delays_only_its_own_copy() -> None:
    failures = Failures()
    now, pauses = 0.0, []
    for _ in range(8):
        failures.failed(Ino(2), now, is_tier=False)
        assert not failures.rests(now) and not failures.is_resting(Ino(3), now)
        began = now
        while failures.is_resting(Ino(2), now):
            now += 0.5
        pauses.append(now - began)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    failures.succeeded(Ino(2))
    failures.failed(Ino(2), now, is_tier=False)
    assert failures.is_resting(Ino(2), now + 0.5) and not failures.is_resting(Ino(2), now + 1)


def test_all_copies_rest_if_several_files_fail_and_none_succeeds() -> None:
    failures = Failures()
    for ino in (2, 3):
        failures.failed(Ino(ino), 0.0, is_tier=False)
    assert not failures.rests(0.0)
    failures.succeeded(Ino(4))
    for ino in (5, 6):
        failures.failed(Ino(ino), 0.0, is_tier=False)
    assert not failures.rests(0.0), "another file was read meanwhile"
    failures.failed(Ino(7), 0.0, is_tier=False)
    assert failures.rests(0.5) and not failures.rests(1.0)


def test_each_rest_is_twice_as_long_until_a_copy_succeeds() -> None:
    failures, inos = Failures(), map(Ino, count(2))
    now, rests = 0.0, []
    for _ in range(9):
        while not failures.rests(now):
            failures.failed(next(inos), now, is_tier=False)
        # Those that fail at the same time do not prolong it.
        failures.failed(next(inos), now, is_tier=False)
        began = now
        while failures.rests(now):
            now += 0.5
        rests.append(now - began)
    assert rests == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    failures.succeeded(next(inos))
    failures.failed(next(inos), now, is_tier=True)
    assert failures.rests(now + 0.5) and not failures.rests(now + 1), "a tier failed"
