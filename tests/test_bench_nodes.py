"""The benchmark of several nodes: its bars, and what it needs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch.namespace.build import build
from scripts.benchmark import nodes
from scripts.benchmark.nodes import Bench, Epoch, Lab, Remote
from scripts.benchmark.options import parsed
from scripts.benchmark.readers import Reading
from scripts.benchmark.rows import BenchError, measure

FILES, BYTES = 100, 11_000_000


class FakeLab(Lab):
    """Epochs with these times in s; the source serves ``read_bytes`` in each epoch of a job that
    shares."""

    def __init__(
        self,
        shared_s: float,
        alone_s: float,
        read_bytes: tuple[int, int],
        remote: Remote,
        exchange_s: float = 1.0,
    ) -> None:
        bench: Any = type("Bench", (), {"files_bytes": BYTES, "large_bytes": BYTES})
        bench.names = ["file"] * FILES
        super().__init__(bench)
        exchange = Reading(nodes.NODES * FILES, nodes.NODES * BYTES, exchange_s)
        self._exchanges = {"files": exchange, "large": exchange}
        self._remote = dict.fromkeys(nodes.REMOTE_READERS, remote)
        for place in ("files", "large"):
            for shares, seconds in ((True, shared_s), (False, alone_s)):
                reading = Reading(nodes.NODES * FILES, nodes.NODES * BYTES, seconds)
                served = read_bytes if shares else (4 * BYTES, 3 * BYTES)
                self._epochs[place, shares] = [Epoch(reading, each, 0) for each in served]


def remote_reads(plain_s: float) -> Remote:
    return Remote(Reading(10, 10**6, 1.0), Reading(10, 10**6, plain_s), 0.1, 0.1)


def verdicts(
    shared_s: float,
    alone_s: float,
    read_bytes: tuple[int, int],
    plain_s: float,
    exchange_s: float = 1.0,
) -> list[str]:
    remote = remote_reads(plain_s)
    rows = nodes.rows(is_large=True)
    results = measure(rows, lambda: FakeLab(shared_s, alone_s, read_bytes, remote, exchange_s), 3)
    return [result.verdict for result in results if result.row.bar is not None]


def test_the_source_is_read_once_and_nodes_are_as_fast_as_the_links_allow() -> None:
    assert verdicts(1.0, 1.9, (BYTES, 0), 0.7) == ["good"] * 6
    slow, twice = (1.0, 1.9, (BYTES, 0), 0.7, 0.8), (1.0, 1.9, (2 * BYTES, BYTES), 0.5)
    assert verdicts(*slow) == ["good", "good", "missed", "good", "good", "missed"]
    assert verdicts(*twice) == ["missed", "missed", "good", "missed", "missed", "good"]


def test_the_rows_of_remote_reads_are_measured_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class RemoteLab(FakeLab):
        def __init__(self, bench: object) -> None:
            super().__init__(1.0, 1.0, (0, 0), remote_reads(0.7))

    bench = type("Bench", (), {"large_bytes": 0})
    monkeypatch.setattr(nodes, "require_slow_source", lambda: None)
    monkeypatch.setattr(nodes.hosts, "unavailable", lambda: None)
    monkeypatch.setattr(nodes, "can_drop", lambda: True)
    monkeypatch.setattr(nodes, "Bench", lambda *given: bench)
    monkeypatch.setattr(nodes, "Lab", RemoteLab)
    _, _, results = nodes.run(parsed(["nodes", "--only", "remote", "--rounds", "3"]), tmp_path)
    assert [result.verdict for result in results] == ["", "", "", "good", "", ""]
    assert results[0].ratios == pytest.approx([0.7] * 3)


@pytest.mark.parametrize(
    ("owned", "shared_s"),
    [
        # Each node gets 0.75 of the data over 25 MB/s.
        ([0.25, 0.25, 0.25, 0.25], 0.75 / 25),
        # The first node sends its part to three others.
        ([0.28, 0.24, 0.24, 0.24], 0.84 / 25),
        # The second node gets most.
        ([0.26, 0.22, 0.26, 0.26], 0.78 / 25),
        # Four nodes read from the source, of 50 MB/s, what the first one has no room for.
        ([0.9, 0.04, 0.03, 0.03], 4 * 0.6 / 50),
    ],
)
def test_the_allowed_ratio_follows_from_the_bandwidths_and_the_most_loaded_node(
    owned: list[float], shared_s: float
) -> None:
    bench: Any = SimpleNamespace(_bandwidth=50.0, link_mbit=200, owned=lambda place: owned)
    # Alone each node reads 0.7 of the data over a quarter of 50 MB/s.
    assert Bench.allowed(bench, "files") == pytest.approx(0.7 / 12.5 / shared_s)


def test_the_parts_that_the_nodes_own_are_those_of_the_hash(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(400):
        (tmp_path / "data" / f"{number:03}").write_bytes(bytes(10))
    build(tmp_path / "data", tmp_path / "files.snapshot")
    bench: Any = SimpleNamespace(snapshots={"files": tmp_path / "files.snapshot"})
    bench.owners = partial(Bench.owners, bench)
    owned = Bench.owned(bench, "files")
    assert len(owned) == nodes.NODES and sum(owned) == pytest.approx(1.0)
    assert all(0.1 < part < 0.4 for part in owned)


def test_a_machine_without_namespaces_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nodes, "require_slow_source", lambda: None)
    monkeypatch.setattr(nodes.hosts, "unavailable", lambda: "network namespaces need root")
    with pytest.raises(BenchError, match="need root"):
        nodes.run(parsed(["nodes"]), tmp_path)
