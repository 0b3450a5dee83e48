"""The verdicts that the benchmark derives from its numbers, and when it gives none."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmark import datapath, hang, month, quantities, readers, small, write, writers
from scripts.benchmark.options import parsed
from scripts.benchmark.rows import BenchError, Result, Row, measure, measure_once
from scripts.tools.launch import ROOT
from tests.equipment import slowfs
from tests.equipment.mounts import mounts_below

BENCH = str(ROOT / "scripts/bench")


def verdict(
    values: Sequence[float],
    against: Sequence[float],
    *,
    bar: float | None = 1.1,
    more_is_better: bool = False,
) -> str:
    row = Row("row", float, against=float, bar=bar, more_is_better=more_is_better)
    result: str = Result(row, list(values), list(against)).verdict
    return result


def test_a_ratio_within_the_bar_is_good_and_one_beyond_it_is_missed() -> None:
    assert verdict([1.05, 1.06, 1.04], [1, 1, 1]) == "good"
    assert verdict([1.15, 1.16, 1.14], [1, 1, 1]) == "missed"
    assert verdict([1.05, 1.06, 1.04], [1, 1, 1], more_is_better=True) == "missed"


def test_the_ratios_count_within_their_rounds_so_a_slow_round_proves_nothing() -> None:
    assert verdict([1.05, 3.15, 2.1], [1, 3, 2]) == "good"


def test_ratios_that_scatter_by_more_than_a_tenth_give_no_verdict() -> None:
    assert verdict([0.7, 1.0, 1.3], [1, 1, 1]) == "no verdict: CV 30%"


def test_fewer_than_three_rounds_give_no_verdict() -> None:
    assert verdict([1.0, 1.0], [1, 1]) == "no verdict: fewer than 3 rounds"


def test_a_row_without_a_bar_is_shown_and_not_judged() -> None:
    assert verdict([9, 9, 9], [1, 1, 1], bar=None) == ""


def test_the_two_sides_of_a_row_take_turns_in_being_first() -> None:
    order: list[str] = []

    def ours(lab: None) -> float:
        order.append("ours")
        return 2.0

    def theirs(lab: None) -> float:
        order.append("theirs")
        return 1.0

    row = Row("row", ours, against=theirs)
    (result,) = measure([row], lambda: None, 2)
    assert order == ["theirs", "ours", "ours", "theirs"]
    assert (result.values, result.against, result.ratios) == ([2, 2], [1, 1], [2, 2])


def test_a_round_of_slices_takes_them_in_turns_and_counts_their_medians() -> None:
    ours, theirs = iter([5.0, 90.0, 7.0]), iter([1.0, 3.0, 2.0])
    order: list[str] = []

    def one(lab: None) -> float:
        order.append("ours")
        return next(ours)

    def other(lab: None) -> float:
        order.append("theirs")
        return next(theirs)

    result = Result(Row("row", one, against=other, slices=3))
    measure_once(result, None, 0)
    assert order == ["theirs", "ours"] * 3
    assert (result.values, result.against) == ([7.0], [2.0])


@pytest.mark.parametrize(
    ("value", "words"), [(0.01234, "0.0123"), (4.567, "4.57"), (1234.5, "1,234"), (14e4, "140k")]
)
def test_numbers_have_three_digits(value: float, words: str) -> None:
    assert quantities.number(value) == words


def test_a_value_with_a_bar_of_its_own_is_judged_by_itself() -> None:
    def judged(*values: float) -> str:
        row = Row("row", float, bar=0.15)
        said: str = Result(row, list(values)).verdict
        return said

    assert judged(0.10, 0.11, 0.10) == "good"
    # However it scatters, it is far below in every round.
    assert judged(0.001, 0.002, 0.009) == "good"
    assert judged(0.30, 0.20, 0.50) == "missed"
    assert judged(0.10, 0.20, 0.10) == "no verdict: CV 43%"


@pytest.mark.parametrize(
    "arguments", [[], ["--quick"], ["--peers", "none"], ["datapath", "--peers", "none"]]
)
def test_without_a_subject_the_datapath_is_measured(arguments: list[str]) -> None:
    options = parsed(arguments)
    assert (options.subject, options.files) == ("datapath", 500 if options.quick else 5000)
    assert options.peers in (None, [])


# -- the datapath ----------------------------------------------------------------------------------


def result(line: str, contender: str, ratios: Sequence[float]) -> Any:
    row = Row(line, float, "files/s", float, "native", None, True, contender=contender)
    return Result(row, [100 * ratio for ratio in ratios], [100.0 for _ in ratios])


def verdicts(results: Sequence[Any], *fillers: str) -> dict[str, str]:
    found = datapath.derived(results, fillers=fillers)
    return {f"{each.row.name}: {each.row.contender}": each.verdict for each in found}


def test_the_best_mode_has_the_bars_and_auto_must_be_near_it() -> None:
    line = "files warm, 1 reader"
    results = [
        result(line, "python", [0.2, 0.2, 0.2]),
        result(line, "relay", [0.5, 0.5, 0.5]),
        result(line, "no_open", [0.8, 0.8, 0.8]),
        result(line, "auto", [0.6, 0.6, 0.6]),
        result(line, "rclone", [0.9, 0.9, 0.9]),
    ]
    assert verdicts(results) == {
        f"{line}: best: no_open": "good",
        f"{line}: auto against no_open": "missed",
    }
    results[3] = result(line, "auto", [0.75, 0.75, 0.75])
    assert verdicts(results)[f"{line}: auto against no_open"] == "good"


def test_a_first_epoch_needs_no_more_than_half_of_native_and_less_where_native_is_fast() -> None:
    def said(native: float, ours: float) -> dict[str, str]:
        auto = result("epoch 1, 1 reader", "auto", [ours / native] * 3)
        auto.values, auto.against = [ours] * 3, [native] * 3
        python = result("epoch 1, 1 reader", "python", [0.1] * 3)
        rclone = result("epoch 1, 1 reader", "rclone", [0.3] * 3)
        return verdicts([auto, python, rclone], "rclone")

    enough = "epoch 1, 1 reader: auto, 2,500 files/s or half of native"
    assert said(2000, 1100)[enough] == "good"
    assert said(2000, 900)[enough] == "missed"
    assert said(50_000, 2600)[enough] == "good"
    ahead = "epoch 1, 1 reader: auto against rclone"
    assert said(2000, 700)[ahead] == "good"
    assert said(2000, 500)[ahead] == "missed"


def test_readers_read_every_byte_once_and_report_what_fails(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}") for number in range(7)]
    for number, path in enumerate(paths):
        Path(path).write_bytes(bytes(1000 + number))
    for count in (1, 4):
        reading = readers.read_files(paths, count)
        assert (reading.count, reading.bytes) == (7, 7021)
    again = readers.read_files(paths, 2, seconds=0.05, again=True)
    assert again.count > 7 and again.seconds >= 0.05
    assert readers.list_and_stat([str(tmp_path)])[0].count == 7
    assert readers.scan_mapped(tmp_path / "0", seconds=0.01).bytes % 1000 == 0
    with pytest.raises(BenchError, match=r"a reader failed: .*missing"):
        readers.read_files([*paths, str(tmp_path / "missing")], 4)


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """A run that takes seconds and does not drop the page cache of this machine."""
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    sizes = ["--files", "40", "--size-mb", "4", "--entries", "1000", "--rounds", "1"]
    contenders = ["--modes", "python", "--peers", "none"]
    where = ["--directory", str(tmp_path), "--json", str(tmp_path / "report.json")]
    command = [sys.executable, BENCH, "--quick", "--no-drop"]
    return [*command, *sizes, *contenders, *where]


def test_a_run_reports_every_number_and_leaves_nothing_behind(
    tiny: list[str], tmp_path: Path
) -> None:
    done = subprocess.run(tiny, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    rows = {(row["name"], row["who"]): row for row in report["rows"]}
    for line in ("files warm, 4 readers", "large file warm", "list and stat, again"):
        for contender in ("python", "pyfuse3"):
            assert rows[line, contender]["median"] > 0 and rows[line, contender]["ratio"] > 0
    assert rows["epoch 1, slow source, 4 readers", "cp -r, native"]["median"] > 0
    assert not any("dropped" in line for line, _ in rows)
    assert report["conditions"]["notes"] == ["--no-drop: the rows that need it are left out"]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_unmounts_everything(
    tiny: list[str], tmp_path: Path, number: int
) -> None:
    process = subprocess.Popen(tiny, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    while "images, python" not in process.stderr.readline():
        assert process.poll() is None
    while len(mounts_below(tmp_path)) < 2:  # the slow source, and the contender
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert mounts_below(tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_the_cost_of_an_open_is_measured_without_a_mount(tmp_path: Path) -> None:
    command = [sys.executable, BENCH, "foresight", "--only", "opens", "--rounds", "3"]
    where = ["--directory", str(tmp_path), "--json", str(tmp_path / "report.json")]
    done = subprocess.run([*command, *where], capture_output=True, text=True)
    # 1: the bar was missed, as it may be beside other programs.
    assert done.returncode in (0, 1), done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "report.json").read_text())["rows"]}
    assert rows["an open without foresight"]["median"] > 0
    assert rows["an open, added by foresight"]["median"] > 0
    assert rows["an open in a recognised order, added by foresight"]["median"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


# -- writing ---------------------------------------------------------------------------------------


def test_a_job_must_wait_five_times_less_for_monarch_than_for_the_slow_source() -> None:
    def said(slow: float, ours: float) -> str:
        rows = [
            Result(write.SAVE.row(contender, "auto"), [seconds] * 3, [1.0] * 3)
            for contender, seconds in (("slow source", slow), ("auto", ours))
        ]
        assert rows[0].verdict == ""
        (waits,) = write.derived(rows, "auto")
        return f"{rows[1].verdict}, {waits.verdict}"

    assert said(10, 1.1) == "good, good"
    assert said(10, 1.3) == "missed, good"
    assert said(5, 1.1) == "good, missed"


@pytest.mark.parametrize("is_mounted", [True, False])
def test_in_mode_python_few_requests_wait_where_the_kernel_lets_few(
    is_mounted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: is_mounted)
    options = parsed(["hang"])
    few = [600, 2000] if is_mounted else [8]
    assert hang.waiters_in("relay", options) == [600, 2000]
    assert hang.waiters_in("python", options) == few
    assert hang.waiters_in("python", parsed(["hang", "--waiters", "4"])) == [4]


def test_written_files_are_whole(tmp_path: Path) -> None:
    assert writers.write_through(tmp_path / "large", 2_500_000) > 0
    assert (tmp_path / "large").stat().st_size == 2_500_000
    assert writers.create_files(tmp_path, 5, sync=True) > 0
    assert {(tmp_path / f"{number}").stat().st_size for number in range(5)} == {10_000}
    assert writers.replace_file(tmp_path, 7) > 0
    assert (tmp_path / "target").stat().st_size == 10_006 and not (tmp_path / "staged").exists()
    seconds = writers.append_and_sync(tmp_path / "log", 9)
    assert seconds == sorted(seconds) and (tmp_path / "log").stat().st_size == 9 * 4096


def test_writing_is_measured_on_every_side_until_it_is_at_the_source(tmp_path: Path) -> None:
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    sizes = ["--files", "10", "--size-mb", "2", "--rounds", "1", "--modes", "python"]
    where = ["--directory", str(tmp_path), "--json", str(tmp_path / "report.json")]
    command = [sys.executable, BENCH, "write", "--peers", "none", *sizes, *where]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    rows = {(row["name"], row["who"]): row for row in report["rows"]}
    for contender in ("slow source", "python"):
        for name in ("checkpoint: 1 MiB writes and fsync", "fsync of 4 KiB: 99 of 100"):
            assert rows[name, contender]["median"] > 0 and rows[name, contender]["ratio"] > 0
    for name in ("names: create, write 10 KB, close", "trees: tar x", "trees: git clone", "drain"):
        assert rows[name, "python"]["median"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_line_of_small_files_has_a_bar_of_its_own_beside_that_against_native() -> None:
    line = small.LINES[0]
    result = Result(line.row("auto", "auto"), [240.0, 245.0, 241.0], [50.0, 50.0, 50.0])
    (own,) = small.derived([result], "auto")
    assert result.verdict == "missed", "4.8 times native"
    assert own.verdict == "good", "below 250 us"
    assert small.derived([result], "relay") == []


def test_a_short_month_can_be_played_and_mounted_again(tmp_path: Path) -> None:
    # Between the last removal of a checkpoint and the kill the drain has time for 50 calls.
    lived = month.Month(tmp_path, lines=550, checkpoints=5)
    with month.calls_made_at_once(1.0):
        lived.live()
    assert len(lived.largest) == len(lived.memory) == month.PARTS
    # The first lines come as a whole file, perhaps more than once.
    assert lived.cost[1:] and all(0 < cost <= 1.1 for cost in lived.cost[1:])
    assert len(lived.below) == month.MOUNTS
    # The last lines are missing: the daemon was killed before they came.
    there = (tmp_path / "source" / "train.log").stat().st_size
    assert 0 < there < lived.logged
    assert len([*(tmp_path / "source").glob("ckpt-*")]) == month.KEPT
