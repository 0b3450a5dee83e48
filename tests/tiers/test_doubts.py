"""Which files are young by the source's own clock, and when they are checked again."""

from __future__ import annotations

import pytest

from monarch.tiers.doubts import WINDOW_NS, Doubts, SourceClock
from monarch.types import Identity, Ino

S = 1_000_000_000
INO = Ino(7)


def version(ctime_ns: int, mtime_ns: int | None = None) -> Identity:
    return Identity(100, ctime_ns if mtime_ns is None else mtime_ns, ctime_ns, 1)


@pytest.mark.fault("S14")
@pytest.mark.promise(29)
@pytest.mark.finding("D4")
@pytest.mark.parametrize("clock_s", [0, 1_700_000_000, 10**10], ids=["1970", "ours", "ahead"])
def test_a_version_that_has_rested_by_the_clock_of_the_source_is_not_young(clock_s: int) -> None:
    newest = clock_s * S + 12_345
    doubts = Doubts(SourceClock(newest, 50 * S))
    doubts.fetched(INO, version(newest - WINDOW_NS), since_ns=50 * S)
    assert doubts.due(10**20) == []
    doubts.fetched(INO, version(newest - WINDOW_NS + S // 10), since_ns=50 * S)
    assert doubts.due(50 * S + WINDOW_NS) == []
    ((ino, doubt),) = doubts.due(50 * S + WINDOW_NS + S // 100)
    # Distinguished by its times, for they are finer than seconds.
    assert (ino, doubt.by_bytes) == (INO, False)
    doubts.settle(INO, doubt)
    # The source's clock continues, whether it is read or not.
    doubts.fetched(INO, version(newest), since_ns=53 * S)
    assert doubts.due(10**20) == []
    # What is changed is at least as new as the clock.
    doubts.fetched(INO, version(newest + 100 * S), since_ns=60 * S)
    assert [ino for ino, _ in doubts.due(10**20)] == [INO]


@pytest.mark.finding("D4")
def test_times_in_whole_seconds_tell_nothing_until_they_have_rested() -> None:
    now = 1_700_000_000 * S
    doubts = Doubts(SourceClock(now + S, 0))
    doubts.fetched(INO, version(now), since_ns=0)
    assert doubts.by_bytes(INO, version(now))
    assert not doubts.by_bytes(INO, version(now - S))
    # A time that was set by hand is in whole seconds, the other tells that the clock is finer.
    doubts.fetched(Ino(8), version(now + 5, mtime_ns=now - 10**6 * S), since_ns=0)
    assert not doubts.by_bytes(Ino(8), version(now + 5, mtime_ns=now - 10**6 * S))
    # One set to a day to come tells nothing of when it was.
    doubts.fetched(Ino(9), version(now - 100 * S, mtime_ns=now + 10**6 * S), since_ns=0)
    assert [ino for ino, _ in doubts.due(10**20)] == [INO, Ino(8)]


@pytest.mark.finding("D4")
def test_a_doubt_is_put_off_and_one_of_a_newer_version_is_not_settled_with_it() -> None:
    doubts = Doubts(SourceClock(0, 0))
    doubts.fetched(INO, version(0), since_ns=0)
    ((_, first),) = doubts.due(10**20)
    doubts.put_off(INO, first, until_ns=9 * S)
    assert doubts.due(8 * S) == []
    ((_, again),) = doubts.due(9 * S)
    doubts.fetched(INO, version(20 * S), since_ns=10 * S)
    doubts.settle(INO, again)
    assert doubts.by_bytes(INO, version(20 * S))


@pytest.mark.finding("D4")
def test_a_clock_that_runs_faster_than_the_sources_is_allowed_for() -> None:
    day = 86_400 * S
    doubts = Doubts(SourceClock(0, 0))
    # Ours has gained some seconds in ten days, so the source is not where it seems to be.
    doubts.fetched(INO, version(10 * day - 5 * S), since_ns=10 * day)
    assert len(doubts.due(10**20)) == 1


def test_a_version_that_is_renewed_while_it_is_checked_is_checked_once_more() -> None:
    doubts = Doubts(SourceClock(100 * S, 0))
    doubts.fetched(INO, version(100 * S), since_ns=0)
    ((_, doubt),) = doubts.due(10**20)
    doubts.renew(INO, doubt.identity, version(101 * S, 100 * S))
    doubts.settle(INO, doubt)
    ((ino, renewed),) = doubts.due(10**20)
    assert (ino, renewed.identity) == (INO, version(101 * S, 100 * S))
    doubts.settle(ino, renewed)
    assert doubts.is_empty()
