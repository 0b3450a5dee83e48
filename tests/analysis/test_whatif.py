"""Predictions for other tiers, sources, nodes and packs, and what is unknown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.analysis.loader_model import JobModel
from monarch.analysis.whatif import (
    NO_BYTES,
    NO_CHUNKS,
    NO_NETWORK,
    NO_SOURCE,
    Change,
    Measured,
    Row,
    assumptions,
    changes,
    predicted,
)

# A batch has 1 MB. Two workers need 20 ms for it, and 80 ms more if it comes from the source, which
# gives both together 25 MB/s. The training takes 10 ms.
MODEL = JobModel("serial", 2, 2, 0.010, 0.020, 0.080, batch_bytes=1e6)
JOB = Measured(MODEL, epoch_bytes=1e9, epoch_batches=1000)


def row(**change: Any) -> Row:
    return predicted(JOB, Change(**{"tier": 0, "cores": 2, **change}))


def test_one_node_has_the_rate_of_the_model() -> None:
    assert row().rate == pytest.approx(20) and row().epoch_s == pytest.approx(50)
    assert row(tier=10**9).rate == pytest.approx(100)
    assert row(tier=5 * 10**8).fetch_stall == pytest.approx(1 - (2 / 0.060) / 100)
    assert row(cores=4).rate == MODEL.with_cores(4).rate(0.0)
    assert row(source=100e6).rate == MODEL.with_source(100e6).rate(0.0)


def test_nodes_that_share_their_tiers_need_the_source_less_and_the_network_more() -> None:
    # Four tiers of a quarter hold all: nothing comes from the source, three quarters from nodes.
    found = row(tier=25 * 10**7, nodes=4, network=1e9)
    assert (found.share, found.rate) == (1.0, pytest.approx(400))
    assert found.epoch_s == pytest.approx(2.5)
    # Other nodes give 0.75 MB for a batch, so 15 MB/s are 20 batches.
    slow = row(tier=25 * 10**7, nodes=4, network=15e6)
    assert slow.rate == pytest.approx(80) and slow.fetch_stall == pytest.approx(0.8)
    # Two nodes without a tier share the source: each gets half, as many as one has asked for.
    assert row(nodes=2, source=50e6).rate == pytest.approx(40)
    assert row(nodes=2, source=25e6).rate == pytest.approx(25)


def test_a_pack_is_read_at_the_rate_of_its_chunks() -> None:
    assert row(pack=True, chunks=100e6).rate == MODEL.with_source(100e6).rate(0.0)
    # The tier holds chunks, too.
    assert row(tier=10**9, pack=True, chunks=100e6).rate == row(tier=10**9).rate
    both = row(pack=True, chunks=100e6, nodes=2)
    assert both.rate == pytest.approx(2 * (MODEL.with_source(50e6).rate(0.0) or 0))


def test_a_slow_pack_limits_a_job_that_has_not_waited_for_its_source() -> None:
    job = Measured(JobModel("serial", 2, 2, 0.01, 0.02, 0.0, batch_bytes=1e6), 1e9, 1000)
    assert predicted(job, Change(0, 2)).rate == pytest.approx(100)
    slow = predicted(job, Change(0, 2, pack=True, chunks=5e6))
    assert slow.rate == pytest.approx(5) and slow.fetch_stall == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"nodes": 2}, NO_SOURCE),
        ({"nodes": 2, "tier": 5 * 10**8}, NO_NETWORK),
        ({"nodes": 2, "source": 1e9, "tier": 10**8}, NO_NETWORK),
        ({"pack": True}, NO_CHUNKS),
        ({"pack": True, "nodes": 2, "source": 1e9}, NO_CHUNKS),
    ],
)
def test_a_rate_that_needs_an_unknown_figure_is_unknown(change: dict[str, Any], why: str) -> None:
    found = row(**change)
    assert (found.rate, found.epoch_s, found.fetch_stall, found.unknown) == (None, None, None, why)
    assert f"unknown: {why}" in assumptions(MODEL, [found], 2)
    # One node with all files in its tier needs neither.
    assert row(**{**change, "nodes": 1, "tier": 10**9}).unknown == ""


def test_without_the_bytes_of_a_batch_only_one_node_is_predicted() -> None:
    job = Measured(JobModel("serial", 2, 2, 0.01, 0.02, 0.0), 1e9, 1000)
    for change in (Change(0, 2, nodes=2, source=1e9), Change(0, 2, pack=True, chunks=1e9)):
        assert predicted(job, change).unknown == NO_BYTES
    assert predicted(job, Change(0, 2)).rate == pytest.approx(100)


def test_every_combination_is_asked_for_and_its_assumptions_are_named() -> None:
    asked = [
        *changes(
            MODEL, tiers=[0, 10**9], cores=[2, 4], sources=[1e9], nodes=[1, 2], packs=[None, 1e8]
        )
    ]
    assert len(asked) == 2 * 2 * 2 * 3 and [each.pack for each in asked[:3]] == [False, True, True]
    rows = [predicted(JOB, each) for each in asked]
    words = " ".join(assumptions(MODEL, rows, 2))
    for word in ("no_evict", "more cores than the 2", "several nodes", "pack:", "unknown: "):
        assert word in words
    alone = [*changes(MODEL, tiers=[0])]
    assert alone == [Change(0, 2)]
    assert len([*assumptions(MODEL, [predicted(JOB, alone[0])], 2)]) == 1


@given(
    tier=st.integers(0, 2 * 10**9),
    nodes=st.integers(1, 64),
    source=st.floats(1e6, 1e12),
    network=st.floats(1e6, 1e12),
)
def test_more_of_anything_never_slows_a_job_down(
    tier: int, nodes: int, source: float, network: float
) -> None:
    def rate(**change: Any) -> float:
        found = row(
            **{"tier": tier, "nodes": nodes, "source": source, "network": network, **change}
        )
        assert found.rate is not None and 0 <= found.share <= 1
        assert 0 <= (found.fetch_stall or 0) <= 1 and 0 <= (found.prep_stall or 0) <= 1
        return found.rate

    slack = 1 + 1e-9
    before = rate()
    assert before <= rate(source=2 * source) * slack
    assert before <= rate(network=2 * network) * slack
    assert before <= nodes / MODEL.training_s * slack
