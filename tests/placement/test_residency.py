"""The table of residency: its counters, its flags, its size."""

from __future__ import annotations

import sys
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.placement.residency import DIFFERS, Residency
from monarch.types import Ino

A, B, C = Ino(2), Ino(3), Ino(70_000)


def test_two_bytes_for_each_inode_and_no_more() -> None:
    residency = Residency(1_000_000)
    held = sum(sys.getsizeof(part) for part in (residency._tiers, residency._flags))
    assert held <= 2 * 1_000_000 + 200


def test_the_counters_follow_every_move() -> None:
    residency = Residency(100_000)
    residency.place(A, 1)
    residency.place(B, 2)
    residency.place(B, 1)
    assert (residency.resident_files(1), residency.resident_files(2)) == (2, 0)
    assert residency.clear(A) == 1
    assert residency.clear(A) == 0
    assert residency.resident_files(1) == 1
    assert (residency.tier_of(A), residency.tier_of(B)) == (0, 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3), st.booleans())))
def test_counters_and_iteration_agree_with_the_table(
    moves: list[tuple[int, int, bool]],
) -> None:
    residency = Residency(30)
    tiers: dict[int, int] = {}
    wanted: set[int] = set()
    for ino, tier, want in moves:
        if tier:
            residency.place(Ino(ino), tier)
            tiers[ino] = tier
        else:
            assert residency.clear(Ino(ino)) == tiers.pop(ino, 0)
        (residency.want if want else residency.unwant)(Ino(ino))
        (wanted.add if want else wanted.discard)(ino)
    for tier in (1, 2, 3):
        expected = sorted(ino for ino, held in tiers.items() if held == tier)
        assert list(residency.resident_in(tier)) == expected
        assert residency.resident_files(tier) == len(expected)
    assert list(residency.wanted_from(Ino(1))) == sorted(wanted)
    assert residency.wanted == len(wanted)


def test_flags_do_not_disturb_each_other() -> None:
    residency = Residency(10)
    residency.place(A, 1)
    residency.mark_unverified(np.array([A]))
    residency.want(A, forced=True)
    residency.start_copy(A)
    residency.mark_changed(A)
    residency.unwant(A)
    assert not residency.is_wanted(A) and not residency.is_forced(A)
    assert residency.is_copying(A) and residency.is_unverified(A) and residency.is_changed(A)
    residency.end_copy(A)
    residency.mark_verified(A)
    assert residency.is_changed(A)
    residency.unmark_changed(A)
    assert not residency.is_copying(A)
    assert not residency.is_unverified(A) and not residency.is_changed(A)


def test_wanting_twice_counts_once_and_a_force_is_kept() -> None:
    residency = Residency(10)
    residency.want(A, forced=True)
    residency.want(A)
    assert residency.wanted == 1
    assert residency.is_forced(A)


def test_a_fresh_copy_and_a_dropped_one_need_no_verification() -> None:
    residency = Residency(10)
    residency.place(A, 1)
    residency.place(B, 1)
    residency.mark_unverified(np.array([A, B, 4]))
    assert residency.is_unverified(A) and not residency.is_unverified(Ino(4))
    residency.place(A, 2)
    residency.clear(B)
    assert not residency.is_unverified(A) and not residency.is_unverified(B)


def test_wanted_inodes_are_found_far_away_and_while_marks_change() -> None:
    residency = Residency(200_000)
    for ino in (A, B, C, Ino(200_000)):
        residency.want(ino)
    walk = residency.wanted_from(B)
    assert next(walk) == B
    residency.unwant(C)
    assert list(walk) == [200_000]
    assert list(residency.wanted_from(Ino(200_001))) == []
    assert list(islice(residency.wanted_from(Ino(1)), 1)) == [A]


def test_loading_many_counts_them() -> None:
    residency = Residency(100_000)
    residency.place(C, 2)
    residency.load(np.arange(2, 50_002), 1)
    residency.load(np.array([], dtype=np.int64), 3)
    assert [residency.resident_files(tier) for tier in (1, 2, 3)] == [50_000, 1, 0]
    with pytest.raises(ValueError, match="resident already"):
        residency.load(np.array([60_000, 70_000]), 1)
    with pytest.raises(ValueError, match="outside"):
        residency.load(np.array([100_001]), 1)
    with pytest.raises(ValueError, match="outside"):
        residency.load(np.array([0]), 1)


def test_readers_of_the_tables_see_every_change_and_cannot_make_one() -> None:
    residency = Residency(10)
    tiers, marks = residency.tiers_table, residency.marks_table
    residency.place(A, 1)
    residency.mark_differing(A)
    assert tiers.tolist() == [int(ino == A) for ino in range(11)]
    assert marks[A] == DIFFERS
    with pytest.raises(TypeError):
        tiers[A] = 0


@pytest.mark.parametrize("tier", [0, -1, 256])
def test_a_copy_cannot_be_in_a_tier_that_is_none(tier: int) -> None:
    residency = Residency(10)
    with pytest.raises(ValueError, match="no tier"):
        residency.place(A, tier)
    with pytest.raises(ValueError, match="no tier"):
        residency.load(np.array([2]), tier)


def test_an_inode_beyond_the_table_is_refused() -> None:
    with pytest.raises(IndexError):
        Residency(10).tier_of(Ino(11))
