"""A bucket depends on the source's inode number alone, and spreads files evenly."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from monarch.posix.buckets import BUCKETS, bucket, buckets


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_one_and_many_agree(inos: list[int]) -> None:
    many = buckets(np.array(inos, dtype=np.uint64))
    assert many.tolist() == [bucket(ino) for ino in inos]
    assert all(0 <= found < BUCKETS for found in many)


def test_the_function_is_the_finaliser_of_splitmix64() -> None:
    # The first outputs of the reference generator with seed 0, whose states are multiples of
    # the golden gamma.
    gamma, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    for step, output in enumerate(expected, 1):
        assert bucket(gamma * step & mask) == output >> 48


def test_consecutive_numbers_spread_evenly() -> None:
    found = buckets(np.arange(1, 1_000_001, dtype=np.uint64))
    below = np.count_nonzero(found < BUCKETS // 4)
    assert abs(below - 250_000) < 2_500
