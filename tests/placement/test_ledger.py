"""The accounts of the tiers."""

from __future__ import annotations

import pytest

from monarch.placement.ledger import Ledger


def test_a_reservation_takes_room_until_it_is_settled() -> None:
    ledger = Ledger([100])
    assert ledger.reserve(1, 60)
    assert not ledger.reserve(1, 41)
    assert ledger.reserve(1, 40)
    ledger.commit(1, 60)
    ledger.cancel(1, 40)
    assert (ledger.used(1), ledger.reserved(1), ledger.free(1)) == (60, 0, 40)
    ledger.release(1, 60)
    assert ledger.free(1) == 100


def test_the_fastest_tier_with_room_is_found() -> None:
    ledger = Ledger([10, 100])
    assert [ledger.fastest_with_room(size) for size in (10, 11, 101)] == [1, 2, None]
    ledger.load(1, 1)
    assert ledger.fastest_with_room(10) == 2


def test_a_closed_tier_admits_nothing_and_settles_what_runs() -> None:
    ledger = Ledger([100])
    assert ledger.reserve(1, 10)
    ledger.close(1)
    assert not ledger.reserve(1, 0)
    assert not ledger.is_open(1)
    ledger.commit(1, 10)
    ledger.open(1)
    assert ledger.reserve(1, 90)


def test_a_tier_smaller_than_what_it_holds_has_no_room() -> None:
    ledger = Ledger([50])
    ledger.load(1, 80)
    assert ledger.free(1) == 0
    assert not ledger.reserve(1, 1)
    ledger.release(1, 40)
    assert ledger.free(1) == 10


@pytest.mark.parametrize("move", ["commit", "cancel", "release"])
def test_an_account_cannot_become_negative(move: str) -> None:
    ledger = Ledger([100])
    with pytest.raises(ValueError, match="1 bytes of 0"):
        getattr(ledger, move)(1, 1)


@pytest.mark.parametrize("move", ["reserve", "commit", "cancel", "release", "load"])
def test_a_negative_size_is_refused(move: str) -> None:
    with pytest.raises(ValueError, match="negative"):
        getattr(Ledger([100]), move)(1, -1)


@pytest.mark.parametrize("tier", [0, 3, -1])
def test_a_tier_that_is_none_is_refused(tier: int) -> None:
    ledger = Ledger([100, 100])
    for ask in (ledger.used, ledger.reserved, ledger.free, ledger.capacity, ledger.close):
        with pytest.raises(ValueError, match="no tier"):
            ask(tier)
    with pytest.raises(ValueError, match="no tier"):
        ledger.reserve(tier, 0)


def test_a_disk_that_others_fill_has_less_room_than_its_capacity() -> None:
    ledger = Ledger([100])
    assert ledger.reserve(1, 20)
    # Of these, 20 are for the copy under way.
    ledger.see_room(1, 50)
    assert (ledger.room(1), ledger.free(1)) == (30, 80)
    assert not ledger.reserve(1, 31)
    assert ledger.reserve(1, 10)
    ledger.commit(1, 20)
    assert ledger.room(1) == 20
    ledger.cancel(1, 10)
    assert ledger.room(1) == 30
    ledger.release(1, 20)
    assert ledger.room(1) == 50
    ledger.see_room(1, -5)
    assert ledger.room(1) == -5
    assert ledger.fits(1, 0) and not ledger.fits(1, 1)
    ledger.see_room(1, 10**6)
    assert ledger.room(1) == 100
