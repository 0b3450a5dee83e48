"""The benchmark of packs: its formats have all files, its bars are those of the documents."""

from __future__ import annotations

import json
import multiprocessing
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.benchmark import packs_many, packs_readers, packs_trees, packs_writers
from scripts.benchmark.packs_readers import Epoch, Place
from scripts.benchmark.packs_trees import (
    PACKS,
    SOURCE,
    SOURCE_TOGETHER,
    TREE,
    Contender,
    Measured,
)
from scripts.benchmark.rows import BenchError, Result, measure
from scripts.tools.launch import ROOT
from tests.equipment import slowfs

BENCH = [sys.executable, str(ROOT / "scripts/bench"), "packs"]
TARS = Contender("tars", packs_readers.by_webdataset, "tars")
RECORDS = Contender("records", packs_readers.by_tfrecord, "records")


class FakeBench:
    """Each contender reads 100 files in as many seconds as ``seconds`` has."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self.names = [""] * 100
        self.size, self.bytes = 10_000, 10**6

    def in_turn(self) -> Sequence[Contender]:
        return (SOURCE, SOURCE_TOGETHER, TREE, *PACKS, TARS, RECORDS)

    def measured(self, contender: Contender) -> Measured:
        seconds = self._seconds.get(contender.name, self._seconds["pack"])
        return Measured(Epoch(100, 10**6, seconds, 0.1), 300, 2 * 10**6, 0.004)


def results(kilobytes: int, **seconds: float) -> dict[tuple[str, str], Result[Any]]:
    bench: Any = FakeBench(seconds)
    rows = list(packs_trees.rows_of(kilobytes, (TARS, RECORDS)))
    measured = measure(rows, lambda: packs_trees.Lab(bench), 3)
    return {(result.row.name, result.row.against_name): result for result in measured}


def verdicts(kilobytes: int, ours: float, tree: float, tars: float) -> list[str]:
    times = {
        "pack": ours,
        "tree at the source": tree,
        "tree at the source, get_many": tree,
        "tree, mounted": tree,
        "tars": tars,
    }
    found = results(kilobytes, **times, records=5.0)
    return [result.verdict for result in found.values() if result.row.bar is not None]


def test_a_pack_of_small_files_is_three_times_as_fast_as_the_tree_and_level_with_the_best() -> None:
    assert verdicts(10, 1.0, 3.1, 1.1) == ["good"] * 15
    # Compared with the tree at the source, the mounted tree, and the best format.
    assert verdicts(10, 1.0, 2.9, 1.1) == ["missed", "good", "good"] * 5
    assert verdicts(10, 1.0, 0.97, 1.1) == ["missed", "missed", "good"] * 5
    assert verdicts(10, 1.0, 3.1, 0.9) == ["good", "good", "missed"] * 5


def test_a_pack_of_larger_files_is_never_slower_than_the_tree() -> None:
    assert verdicts(110, 1.0, 0.99, 1.0) == ["good"] * 15
    assert verdicts(110, 1.0, 0.97, 1.0) == ["missed", "missed", "good"] * 5


def test_calls_and_bytes_are_those_of_a_file() -> None:
    found = results(10, pack=1.0, tars=1.0, records=1.0)
    assert found["10 KB, calls at the source, tars", ""].values == [3.0] * 3
    assert found["10 KB, read at the source, records", ""].values == [2.0] * 3
    by_name = found["10 KB, by name after the epoch, pack, file-wise", SOURCE.name]
    assert by_name.values == [4.0] * 3 and by_name.ratios == [1.0] * 3


def test_each_round_begins_with_another_contender() -> None:
    bench: Any = SimpleNamespace(_turn=0, peers=(TARS, RECORDS))
    orders = [packs_trees.Bench.in_turn(bench) for _ in range(10)]
    assert len({order[0].name for order in orders}) == 10
    assert all(len(set(order)) == 10 for order in orders)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(BenchError, match="there is no zip; webdataset, tfrecord, litdata"):
        packs_readers.available(["zip"])
    assert packs_readers.available([]) == []


def test_shards_are_as_large_as_their_documents_say_and_each_reader_has_as_many(
    tmp_path: Path,
) -> None:
    names = packs_writers.tree(tmp_path / "tree", 24, 100)
    assert len({(tmp_path / "tree" / name).read_bytes() for name in names}) == 24
    (tmp_path / "tars").mkdir()
    paths = [tmp_path / "tree" / name for name in names]
    packs_writers.tars(paths, tmp_path / "tars", 7_400_000_000)
    assert len([*(tmp_path / "tars").iterdir()]) == 8, "7.4 shards of 1 GB for 4 readers"


# -- with the libraries ----------------------------------------------------------------------------


def written_and_read(peer: packs_readers.Peer, paths: Sequence[Path], place: Place) -> Epoch:
    packs_writers.WRITERS[peer.name](paths, place.root, 40_000)
    return packs_readers.epoch_of(peer.read, place)


@pytest.mark.frameworks
@pytest.mark.parametrize("peer", packs_readers.available(None), ids=lambda peer: peer.name)
def test_an_epoch_of_every_format_reads_every_file(
    peer: packs_readers.Peer, tmp_path: Path
) -> None:
    names = packs_writers.tree(tmp_path / "tree", 40, 1000)
    paths = [tmp_path / "tree" / name for name in names]
    random.Random(1).shuffle(paths)
    (tmp_path / "shards").mkdir()
    place = Place(tmp_path / "shards", (), 1, tmp_path / "cache")
    # A forked process would stop at the first lock that a thread of TensorFlow holds here.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        epoch = pool.submit(written_and_read, peer, paths, place).result()
    assert (epoch.files, epoch.bytes) == (40, 40_000)
    assert 0 < epoch.first_batch_s <= epoch.seconds


@pytest.mark.frameworks
def test_a_run_measures_the_tree_and_the_pack_and_leaves_nothing_behind(tmp_path: Path) -> None:
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    sizes = ["--only", "trees", "--files", "24", "--file-kb", "10", "--rounds", "1"]
    where = ["--directory", str(tmp_path), "--json", str(tmp_path / "report.json")]
    done = subprocess.run(
        [*BENCH, *sizes, "--peers", "none", "--latency", "0", *where],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    rows = {(row["name"], row["against_name"]): row for row in report["rows"]}
    for name in ("10 KB, pack, file-wise", "10 KB, pack, chunk-wise"):
        assert rows[name, "tree at the source"]["ratio"] > 0
        assert rows[name, "tree, mounted"]["ratio"] > 0
    # An open and a read for each file of the tree, at least.
    assert rows["10 KB, calls at the source, tree at the source", ""]["median"] >= 2
    assert rows["10 KB, read at the source, pack, file-wise", ""]["median"] >= 1
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


# -- many files in one call ------------------------------------------------------------------------


def test_many_files_are_read_through_a_mount_and_beside_it(tmp_path: Path) -> None:
    sizes = ["--only", "many", "--files", "20", "--modes", "python", "--rounds", "1"]
    where = ["--directory", str(tmp_path), "--json", str(tmp_path / "report.json")]
    done = subprocess.run([*BENCH, *sizes, *where], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "report.json").read_text())["rows"]}
    assert rows["get_many, python"]["median"] > 0 and rows["get_many, python"]["bar"] == 2.0
    assert rows[packs_many.DIRECTORY]["ratio"] > 0 and rows[packs_many.DIRECTORY]["bar"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
