"""The number of pieces that are read at once, for sources of different kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from monarch.transfer.depth import Depth

PIECE = 1 << 20


def after(pieces: int, depth: Depth, rate: Callable[[int], float]) -> list[int]:
    """The limits after each piece, if so many pieces at once bring ``rate`` bytes a second."""
    now, limits = 0.0, []
    for _ in range(pieces):
        now += PIECE / rate(depth.limit)
        depth.ended(PIECE, now)
        limits.append(depth.limit)
    return limits


@pytest.mark.parametrize("fitting", [2, 3, 7])
def test_as_many_pieces_are_read_as_bring_more_bytes(fitting: int) -> None:
    depth = Depth(2, 16)
    limits = after(5000, depth, lambda count: 1e8 * min(count, fitting))
    # One more is tried from time to time.
    settled = limits[1000:]
    assert set(settled) == {fitting, fitting + 1}
    assert settled.count(fitting) > 0.9 * len(settled)


def test_no_more_pieces_are_read_than_the_most() -> None:
    depth = Depth(2, 5)
    assert max(after(2000, depth, lambda count: 1e8 * count)) == depth.limit == 5
    assert max(after(2000, Depth(2, 1), lambda count: 1e8 * count)) == 2


@pytest.mark.parametrize("fitting", [20, 32])
def test_many_pieces_are_read_if_they_bring_more_bytes(fitting: int) -> None:
    limits = after(5000, Depth(3, 32), lambda count: 1e8 * min(count, fitting))
    assert min(limits[2500:]) >= 0.9 * fitting


def test_a_pause_is_no_part_of_a_measurement() -> None:
    depth = Depth(2, 16)
    now = 0.0
    for _ in range(1000):
        for _ in range(8 * depth.limit + 1):
            now += PIECE / (1e8 * depth.limit)
            depth.ended(PIECE, now)
        depth.idle()
        now += 1000.0
    # Each of these brings a tenth more.
    assert depth.limit >= 10


def test_pieces_that_end_at_once_are_counted_later() -> None:
    depth = Depth(2, 16)
    for _ in range(100):
        depth.ended(PIECE, 1.0)
    assert depth.limit == 2
