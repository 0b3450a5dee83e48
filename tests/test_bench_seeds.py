"""The figures of papers in virtual time, the table of the benchmark, and its rows."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts.benchmark import (
    seeds,
    seeds_lmdbio,
    seeds_mounts,
    seeds_packs,
    seeds_prep,
    seeds_simulated,
)
from scripts.benchmark.options import PAPERS, parsed
from scripts.benchmark.packs_readers import Epoch
from scripts.benchmark.packs_trees import Contender, Measured
from scripts.benchmark.rows import Result, Row, measure
from scripts.benchmark.seeds_mounts import BUSY, FREE, Training
from scripts.benchmark.seeds_prep import ALONE, TOGETHER, Search
from scripts.benchmark.table import published_table
from scripts.tools.launch import ROOT

BENCH = [sys.executable, str(ROOT / "scripts/bench"), "seeds"]
QUICK = argparse.Namespace(quick=True, rounds=1)


def values(results: list[Result[Any]]) -> dict[str, float]:
    assert all(len(result.values) == 1 and result.row.published for result in results)
    return {result.row.name: result.values[0] for result in results}


def test_every_paper_has_its_parts() -> None:
    assert tuple(seeds.PARTS) == PAPERS
    assert parsed(["seeds", "--only", "coordl"]).only == "coordl"


def test_a_fixed_set_misses_least_and_lru_most(tmp_path: Path) -> None:
    found = values(seeds_simulated.of_coordl(QUICK, tmp_path))
    for share, expected in (("35%", (65, 93, 86)), ("65%", (35, 71.7, 53.7))):
        names = [f"misses, {share} cached, {name}" for name in ("MinIO", "LRU", "random eviction")]
        for name, misses in zip(names, expected, strict=True):
            assert found[name] == pytest.approx(misses, abs=1.5)


def test_chunks_are_loaded_once_if_the_order_is_theirs_and_labels_need_a_random_pack(
    tmp_path: Path,
) -> None:
    found = [*values(seeds_simulated.of_diesel(QUICK, tmp_path)).values()]
    assert found[0] == pytest.approx(49, abs=1) and found[1] == pytest.approx(37.5, abs=1)
    assert max(found[2:4]) <= 1
    at_random, by_class, of_files = found[4:]
    assert at_random == pytest.approx(of_files, abs=2) and by_class < 5


def test_the_interval_of_the_checkpointer_costs_little_and_a_fixed_one_much(
    tmp_path: Path,
) -> None:
    fixed, growing, waiting, postponing = values(
        seeds_simulated.of_checkfreq(QUICK, tmp_path)
    ).values()
    assert fixed > 100 and growing > 10
    assert waiting <= 3 and postponing == 0


def test_tune_is_near_the_bound_and_greedy_leaves_jobs_out(tmp_path: Path) -> None:
    found = values(seeds_simulated.of_synergy(QUICK, tmp_path))
    for name, value in found.items():
        if name.endswith("of the bound"):
            assert 0.85 <= value <= 1 + 1e-9
    assert found["greedy: jobs of 32 without a place"] >= 1


class FakeMounts:
    def __init__(self, mounted: Training, alone: Training) -> None:
        self._of = {True: mounted, False: alone}
        self.asked: list[tuple[float, bool]] = []

    def trained(self, *, step: float, mounted: bool) -> Training:
        self.asked.append((step, mounted))
        return self._of[mounted]


def mount_verdicts(mounted: Training) -> list[str]:
    bench: Any = FakeMounts(mounted, Training(10.0, 300, 1000, 900))
    results = measure(seeds_mounts.monarch_rows(), lambda: seeds_mounts.Lab(bench), 3)
    each = [(step, is_mounted) for step in (FREE, BUSY) for is_mounted in (True, False)]
    assert sorted(bench.asked) == sorted(each * 3), "each training once a round"
    return [result.verdict for result in results]


def test_a_tier_for_half_of_the_data_must_spare_the_source_a_third() -> None:
    assert mount_verdicts(Training(7.9, 190, 450, 570)) == ["good"] * 5
    missed = ["missed"] * 4 + ["good"]
    assert mount_verdicts(Training(10.1, 290, 900, 800)) == missed
    assert mount_verdicts(Training(11.0, 190, 450, 570))[-1] == "missed"


class FakeSearches:
    batches = 40

    def __init__(self, together: Search) -> None:
        self._of = {TOGETHER: together, ALONE: Search(8.0, 8000, 320)}

    def searched(self, how: str) -> Search:
        return self._of[how]


def test_jobs_that_prepare_together_read_and_prepare_once() -> None:
    def verdicts(together: Search) -> list[str]:
        bench: Any = FakeSearches(together)
        results = measure(seeds_prep.rows(), lambda: seeds_prep.Lab(bench), 3)
        return [result.verdict for result in results]

    assert verdicts(Search(1.5, 1000, 40)) == ["good"] * 3
    assert verdicts(Search(5.0, 4000, 41)) == ["missed"] * 3


class FakePacks:
    def __init__(self) -> None:
        self.measured_names: list[str] = []

    def measured(self, contender: Contender) -> Measured:
        self.measured_names.append(contender.name)
        calls = {"pack, chunk-wise": 70, "tree at the source": 1000}[contender.name]
        return Measured(Epoch(0, 0, 0.0, 0.0), calls, 0, 0.0)


def test_a_pack_that_is_read_by_chunks_is_compared_with_its_tree() -> None:
    bench: Any = FakePacks()
    lab = seeds_packs.Lab(bench)
    assert lab.ratio(lambda found: found.calls) == 0.07
    assert bench.measured_names == ["pack, chunk-wise", "tree at the source"]


def test_cursors_walk_over_the_records_of_other_readers(tmp_path: Path) -> None:
    import lmdb

    from scripts.tools.mount import monarch

    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "train.mdb"
    with lmdb.open(str(file), subdir=False, map_size=1 << 24, lock=False) as made:
        with made.begin(write=True) as transaction:
            for number in range(400):
                transaction.put(b"%04d" % number, bytes(9000), append=True)
    monarch("lmdb", "index", file, "-o", tmp_path / "train.mlx", "-q")
    lab = seeds_lmdbio.Lab.__new__(seeds_lmdbio.Lab)
    lab._file, lab._index = file, tmp_path / "train.mlx"
    assert lab.walked() == 4.5
    assert 1.2 < lab.read_mb() < 2.6, "256 and 144 records of 9 KB, in pages of 4 KiB"


def test_the_table_has_the_published_figure_beside_the_measured_one() -> None:
    row = Row(
        "misses", float, "%", bar=40.0, contender="CoorDL", published="35 (MinIO)", how="simulated"
    )
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(published_table("title", [Result(row, [35.0, 35.0, 36.0])]))
    text = console.export_text()
    for word in ("CoorDL", "misses", "35 (MinIO)", "35 %", "simulated", "≤ 40", "good"):
        assert word in text


def test_one_command_repeats_the_figures_of_one_paper(tmp_path: Path) -> None:
    where = ["--directory", str(tmp_path), "--json", str(tmp_path / "report.json")]
    done = subprocess.run(
        [*BENCH, "--only", "synergy", "--quick", "--rounds", "1", *where],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "0.9 or more" in done.stdout and "simulated" in done.stdout
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert {row["who"] for row in rows} == {"Synergy"}
    assert all(row["published"] and row["how"] == "simulated" for row in rows)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
