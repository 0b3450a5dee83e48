"""Nodes that share their tiers, in virtual time, against the closed forms of CoorDL and HVAC."""

from __future__ import annotations

import math

import numpy as np
import pytest

from monarch.analysis.formulas import partitioned
from monarch.analysis.nodes import NodesEpoch, Rates, expected, simulate_nodes
from monarch.analysis.replay import Files
from monarch.peers.ownership import Member

RATES = Rates(source=5e9, network=12e9, tier=6e9)


def files_of(count: int, size: int = 100_000) -> Files:
    return Files(np.full(count, size, np.int64), np.arange(1, count + 1).astype(np.uint64))


def play(
    files: Files,
    nodes: int,
    share: float,
    *,
    rates: Rates = RATES,
    epochs: int = 3,
    lost: dict[int, int] | None = None,
) -> list[NodesEpoch]:
    members = [Member(f"node{number}") for number in range(nodes)]
    capacity = int(share * files.bytes)
    return list(simulate_nodes(files, members, capacity, rates, epochs=epochs, seed=1, lost=lost))


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 64, 1024])
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_the_bytes_are_those_of_the_closed_forms(nodes: int, share: float) -> None:
    files = files_of(20_000)
    total = files.bytes
    first, second, third = play(files, nodes, share)
    # Once for all nodes, whichever of them reads a file.
    assert (first.source_opens, first.source_bytes) == (20_000, total)
    shares = partitioned(share, nodes)
    three_sigma = 3 / math.sqrt(20_000)
    for each in (second, third):
        assert each.source_bytes + each.local_bytes + each.remote_bytes == total
        # What nodes with more files than their share cannot keep is read again.
        assert each.source_bytes / total == pytest.approx(shares.source, abs=0.01)
        assert each.remote_bytes / total == pytest.approx(shares.remote, abs=three_sigma)
        assert each.local_bytes / total == pytest.approx(shares.local, abs=three_sigma)
    assert second.source_bytes == third.source_bytes, "the residents do not change"
    assert first.remote_bytes / total == pytest.approx(shares.remote, abs=three_sigma)


def test_the_traffic_of_a_node_is_that_of_coordl() -> None:
    """(D/n) X (n-1)/n bytes come into a node in an epoch."""
    files = files_of(40_000)
    last = play(files, 4, 0.2)[-1]
    formula = files.bytes / 4 * 0.8 * 3 / 4
    assert last.remote_bytes / 4 == pytest.approx(formula, rel=0.02)
    assert last.most_remote_bytes == pytest.approx(formula, rel=0.05)


def test_the_times_have_the_shape_of_the_figure_of_hvac() -> None:
    """With a fixed source, the time without a cache stays; with shared tiers it falls with the
    number of nodes, close to that of local copies of all files (Khan et al., CLUSTER 2022)."""
    files = files_of(60_000)
    capacity = files.bytes // 20
    rates = Rates(source=5e9, network=12e9, tier=6e9, ahead=128)
    last_s = {}
    for nodes in (1, 4, 16, 64, 256):
        epochs = play(files, nodes, 0.05, rates=rates)
        closed = expected(files.bytes, nodes, capacity, rates)
        last_s[nodes] = epochs[-1].seconds
        assert closed.source_s == pytest.approx(files.bytes / 5e9)
        assert epochs[0].seconds == pytest.approx(closed.source_s, rel=0.05)
        # All nodes wait for the busiest one of each step.
        assert closed.seconds <= epochs[-1].seconds * 1.001 < closed.seconds * 1.4
        assert closed.local_s == pytest.approx(files.bytes / nodes / 6e9) or nodes == 1
    assert sorted(last_s.values(), reverse=True) == list(last_s.values())
    assert last_s[1] / last_s[256] > 150
    # Below one cache for all the gain is that of the bytes; then that of the nodes.
    assert last_s[4] == pytest.approx(0.8 * files.bytes / 5e9, rel=0.02)
    assert last_s[64] / last_s[256] == pytest.approx(4, rel=0.15)


def test_a_node_alone_has_the_times_of_one_cache() -> None:
    closed = expected(10**12, 8, 10**11, RATES)
    assert closed.alone_s == pytest.approx(0.9 * 200)
    assert closed.seconds == pytest.approx(0.2 * 200)
    assert closed.cached == pytest.approx(0.8)
    slow_job = Rates(5e9, 12e9, 6e9, job=1e9)
    assert expected(10**12, 8, 10**12, slow_job).seconds == pytest.approx(125)
    slow_network = Rates(5e9, 1e9, 6e9)
    assert expected(10**12, 8, 10**12, slow_network).seconds == pytest.approx(125 * 7 / 8)


def test_each_resource_can_be_the_slowest() -> None:
    files = files_of(50_000)
    for slow in (
        Rates(1e8, 1e10, 1e10),
        Rates(1e10, 1e8, 1e10),
        Rates(1e10, 1e10, 1e8),
        Rates(1e10, 1e10, 1e10, job=1e8),
    ):
        closed = expected(files.bytes, 4, files.bytes // 5, slow)
        assert play(files, 4, 0.2, rates=slow)[-1].seconds == pytest.approx(
            closed.seconds, rel=0.08
        )


def test_the_owner_of_a_file_fetches_it_for_its_reader() -> None:
    """One file, which the first node reads: two networks carry it, and none of them twice."""
    slow_network = Rates(1e12, 1e6, 1e12)
    for nodes in (8, 16, 32):
        (first,) = play(files_of(1), nodes, 1.0, rates=slow_network, epochs=1)
        assert first.remote_bytes == 100_000, "the node that reads it is not the owner"
        assert first.seconds == pytest.approx(0.1)


@pytest.mark.promise(288)
def test_after_the_loss_of_a_node_each_of_its_files_is_opened_once_more() -> None:
    files = files_of(20_000)
    whole = play(files, 4, 0.5, epochs=4)
    assert [each.source_opens for each in whole] == [20_000, 0, 0, 0]
    epochs = play(files, 4, 0.5, epochs=5, lost={2: 1})
    again = [each.source_opens for each in epochs[1:]]
    assert [each.nodes for each in epochs] == [4, 3, 3, 3, 3]
    # Half of them in the rest of the epoch, half in the next one.
    assert sum(again) == pytest.approx(5000, abs=200)
    assert again[0] == pytest.approx(2500, abs=200)
    assert again[2:] == [0, 0]


def test_without_room_the_files_of_a_lost_node_are_read_from_the_source_in_each_epoch() -> None:
    files = files_of(20_000)
    epochs = play(files, 4, 0.25, epochs=5, lost={2: 1})
    opens = [each.source_opens for each in epochs]
    assert opens[3] == opens[4] == pytest.approx(5000, abs=400)
    # The copies of the others stay.
    assert epochs[4].local_bytes + epochs[4].remote_bytes == files.bytes - opens[4] * 100_000


def test_several_nodes_may_be_lost_at_several_times() -> None:
    files = files_of(2000)
    epochs = play(files, 8, 1.0, epochs=5, lost={1: 2, 3: 5})
    assert [each.nodes for each in epochs] == [6, 6, 1, 1, 1]
    assert epochs[-1].source_opens == epochs[-1].remote_bytes == 0


def test_larger_files_and_empty_ones_are_kept_by_their_owners() -> None:
    rng = np.random.default_rng(3)
    sizes = rng.lognormal(11, 1.5, 5000).astype(np.int64)
    sizes[:10] = 0
    files = Files(sizes, np.arange(1, 5001).astype(np.uint64))
    last = play(files, 4, 0.2)[-1]
    # The nodes own 28, 28, 22 and 22 % of the bytes, and each of them fills its room for 20 %.
    assert last.source_bytes / files.bytes == pytest.approx(0.2, abs=0.001)
    assert play(files, 4, 0.0)[-1].source_opens == 4990
    assert play(files, 4, 2.0)[-1].source_opens == 0
