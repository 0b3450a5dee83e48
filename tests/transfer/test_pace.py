"""The share of a source that copies take while readers use it, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from monarch.transfer.pace import Pace
from monarch.transfer.source_load import NoDatapath, ReaderTotals, SourceLoad, SourceTraffic

_STEP_S = 0.001
_PIECE_S = 0.02

Reading = Callable[[float], bool]


def shares(reading: Reading, *, seconds: float) -> tuple[float, float]:
    """The share of time in which copies read, and of that in which a reader waited meanwhile.

    Copies read pieces one after the other; each piece takes ``_PIECE_S``.
    """
    pace, waited, until = Pace(), 0.0, 0.0
    copied = together = 0.0
    began = None
    steps = round(seconds / _STEP_S)
    for step in range(steps):
        now = step * _STEP_S
        pace.look(waited, now)
        if began is not None and now >= until:
            pace.ended(now - began)
            began = None
        if began is None and pace.may_begin():
            pace.began()
            began, until = now, now + _PIECE_S
        copied += _STEP_S if began is not None else 0.0
        if reading(now):
            waited += _STEP_S
            together += _STEP_S if began is not None else 0.0
    return copied / seconds, together / seconds


@pytest.mark.promise(37)
@pytest.mark.finding("C4")
def test_a_reader_that_waits_all_the_time_is_held_up_by_a_twentieth() -> None:
    copied, together = shares(lambda now: True, seconds=60)
    assert 0.03 < copied < 0.06 and together <= 0.06


@pytest.mark.promise(37)
@pytest.mark.finding("C4")
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_a_reader_that_waits_for_a_part_of_its_time_leaves_the_more_the_less_it_waits(
    share: float,
) -> None:
    copied, together = shares(lambda now: now % 0.1 < share * 0.1, seconds=60)
    assert together < 0.06
    assert copied > 0.2 * 0.05 / share


def test_a_reader_alone_is_not_delayed() -> None:
    assert shares(lambda now: False, seconds=5)[0] > 0.95
    # Nor is it long after the last reader has gone.
    copied, _ = shares(lambda now: now < 5, seconds=20)
    assert copied > 0.5


def test_beside_readers_one_copy_reads_at_a_time() -> None:
    pace = Pace()
    pace.look(0.0, 0.0)
    assert pace.may_begin()
    pace.began()
    assert pace.may_begin()
    pace.expect()
    assert not pace.may_begin()
    pace.ended(0.01)
    pace.look(0.0, 0.02)
    pace.look(0.1, 1.0)
    pace.look(0.1, 5.0)
    assert pace.may_begin()


class Elsewhere(NoDatapath):
    """A datapath that reads for readers."""

    traffic = SourceTraffic(0, 0, 0, 0, 0, 0)

    def source_traffic(self) -> SourceTraffic:
        return self.traffic


def test_bytes_of_another_node_count_as_reads_of_readers() -> None:
    """Otherwise their duration would be that of the few reads of the source."""
    elsewhere = Elsewhere()
    load = SourceLoad(elsewhere)
    elsewhere.traffic = SourceTraffic(0, 0, 0, 1, 8, 4_000_000_000)
    load.ended(0.5)
    assert load.totals() == ReaderTotals(9, 4.5, 1)


def test_the_time_that_readers_wait_is_counted_once_wherever_they_read() -> None:
    here = SourceLoad(NoDatapath())
    here.begin(10.0)
    here.begin(11.0)
    assert here.waited(12.0) == 2.0
    here.end(13.0)
    here.end(14.0)
    assert here.waited(20.0) == 4.0
    elsewhere = Elsewhere()
    there = SourceLoad(elsewhere)
    assert there.waited(1.0) == 0.0
    # Eight at the same time for half a second: more than has passed it cannot be.
    elsewhere.traffic = SourceTraffic(0, 8, 0, 0, 8, 4_000_000_000)
    assert there.waited(2.0) == 1.0
    elsewhere.traffic = SourceTraffic(0, 8, 0, 1, 8, 4_000_000_000)
    assert there.waited(5.0) == 4.0
    elsewhere.traffic = SourceTraffic(0, 9, 0, 0, 9, 4_250_000_000)
    assert there.waited(6.0) == 4.25
