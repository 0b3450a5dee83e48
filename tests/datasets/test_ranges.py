"""Pieces that lie near each other are read at once, and few bytes are read in vain."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from monarch.datasets.ranges import merged

Pieces = list[tuple[int, int]]


def by_definition(pieces: Pieces, gap: int) -> Pieces:
    """The begin and the end of each range."""
    ranges: Pieces = []
    for begin, length in sorted(pieces):
        if ranges and begin - ranges[-1][1] <= gap:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], begin + length))
        else:
            ranges.append((begin, begin + length))
    return ranges


def arrays(pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.array([begin for begin, _ in pieces], np.uint64)
    return offsets, np.array([length for _, length in pieces], np.uint32)


PIECES = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 50)), max_size=40)


@given(PIECES, st.integers(0, 100))
def test_the_ranges_are_those_of_the_definition(pieces: Pieces, gap: int) -> None:
    ranges = list(merged(*arrays(pieces), gap_bytes=gap))
    found = [(found.offset, found.offset + found.length) for found in ranges]
    assert found == by_definition(pieces, gap)
    members = [member for found in ranges for member in found.members.tolist()]
    assert sorted(members) == list(range(len(pieces)))
    for found_range in ranges:
        for member in found_range.members.tolist():
            begin, length = pieces[member]
            assert found_range.offset <= begin
            assert begin + length <= found_range.offset + found_range.length


@given(PIECES, st.integers(50, 200))
def test_no_range_is_longer_than_the_limit(pieces: Pieces, most: int) -> None:
    ranges = list(merged(*arrays(pieces), gap_bytes=100, most_bytes=most))
    assert all(found.length <= most for found in ranges)
    assert sum(len(found.members) for found in ranges) == len(pieces)


def test_places_near_the_end_of_numbers_are_merged() -> None:
    pieces = [((1 << 63) + 10, (1 << 32) - 1), (1 << 63, 10)]
    assert [found.length for found in merged(*arrays(pieces))] == [(1 << 32) + 9]
