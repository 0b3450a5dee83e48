"""What the benchmark concludes from its numbers, and when it says that it cannot."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.equipment import slowfs

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import _bench

    module: ModuleType = _bench
    return module


def verdict(
    bench: ModuleType,
    values: Sequence[float],
    against: Sequence[float],
    *,
    bar: float | None = 1.1,
    more_is_better: bool = False,
) -> str:
    row = bench.Row("row", float, against=float, bar=bar, more_is_better=more_is_better)
    result: str = bench.Result(row, list(values), list(against)).verdict
    return result


def test_a_ratio_within_the_bar_is_good_and_one_beyond_it_is_missed(bench: ModuleType) -> None:
    assert verdict(bench, [1.05, 1.06, 1.04], [1, 1, 1]) == "good"
    assert verdict(bench, [1.15, 1.16, 1.14], [1, 1, 1]) == "missed"
    assert verdict(bench, [1.05, 1.06, 1.04], [1, 1, 1], more_is_better=True) == "missed"


def test_the_ratios_count_within_their_rounds_so_a_slow_round_proves_nothing(
    bench: ModuleType,
) -> None:
    assert verdict(bench, [1.05, 3.15, 2.1], [1, 3, 2]) == "good"


def test_ratios_that_scatter_by_more_than_a_tenth_give_no_verdict(bench: ModuleType) -> None:
    assert verdict(bench, [0.7, 1.0, 1.3], [1, 1, 1]) == "no verdict: CV 30%"


def test_fewer_than_three_rounds_give_no_verdict(bench: ModuleType) -> None:
    assert verdict(bench, [1.0, 1.0], [1, 1]) == "no verdict: fewer than 3 rounds"


def test_a_row_without_a_bar_is_told_and_not_judged(bench: ModuleType) -> None:
    assert verdict(bench, [9, 9, 9], [1, 1, 1], bar=None) == ""


def test_the_two_sides_of_a_row_take_turns_in_being_first(bench: ModuleType) -> None:
    order: list[str] = []

    def ours(lab: None) -> float:
        order.append("ours")
        return 2.0

    def theirs(lab: None) -> float:
        order.append("theirs")
        return 1.0

    row = bench.Row("row", ours, against=theirs)
    (result,) = bench.measure([row], lambda: None, 2)
    assert order == ["theirs", "ours", "ours", "theirs"]
    assert (result.values, result.against, result.ratios) == ([2, 2], [1, 1], [2, 2])


def test_a_round_of_slices_takes_them_in_turns_and_counts_their_medians(bench: ModuleType) -> None:
    ours, theirs = iter([5.0, 90.0, 7.0]), iter([1.0, 3.0, 2.0])
    order: list[str] = []

    def one(lab: None) -> float:
        order.append("ours")
        return next(ours)

    def other(lab: None) -> float:
        order.append("theirs")
        return next(theirs)

    result = bench.Result(bench.Row("row", one, against=other, slices=3))
    bench.measure_once(result, None, 0)
    assert order == ["theirs", "ours"] * 3
    assert (result.values, result.against) == ([7.0], [2.0])


@pytest.mark.parametrize(
    ("value", "words"), [(0.01234, "0.0123"), (4.567, "4.57"), (1234.5, "1,234"), (14e4, "140k")]
)
def test_numbers_have_three_digits(bench: ModuleType, value: float, words: str) -> None:
    assert bench.number(value) == words


def test_a_value_with_a_bar_of_its_own_is_judged_by_itself(bench: ModuleType) -> None:
    def judged(*values: float) -> str:
        row = bench.Row("row", float, bar=0.15)
        said: str = bench.Result(row, list(values)).verdict
        return said

    assert judged(0.10, 0.11, 0.10) == "good"
    # However it scatters, it is far below in every round.
    assert judged(0.001, 0.002, 0.009) == "good"
    assert judged(0.30, 0.20, 0.50) == "missed"
    assert judged(0.10, 0.20, 0.10) == "no verdict: CV 43%"


@pytest.mark.parametrize(
    "arguments", [[], ["--quick"], ["--peers", "none"], ["datapath", "--peers", "none"]]
)
def test_without_a_subject_the_datapath_is_measured(
    bench: ModuleType, arguments: list[str]
) -> None:
    options = bench._parsed(arguments)
    assert (options.subject, options.files) == ("datapath", 500 if options.quick else 5000)
    assert options.peers in (None, [])


# -- the datapath ----------------------------------------------------------------------------------


def result(bench: ModuleType, line: str, who: str, ratios: Sequence[float]) -> Any:
    row = bench.Row(line, float, "files/s", float, "native", None, True, who=who)
    return bench.Result(row, [100 * ratio for ratio in ratios], [100.0 for _ in ratios])


def verdicts(bench: ModuleType, results: Sequence[Any], *fillers: str) -> dict[str, str]:
    import _bench_datapath  # type: ignore[import-not-found]

    found = _bench_datapath.derived(results, fillers=fillers)
    return {f"{each.row.name}: {each.row.who}": each.verdict for each in found}


def test_the_best_mode_has_the_bars_and_auto_must_be_near_it(bench: ModuleType) -> None:
    line = "files warm, 1 reader"
    results = [
        result(bench, line, "python", [0.2, 0.2, 0.2]),
        result(bench, line, "relay", [0.5, 0.5, 0.5]),
        result(bench, line, "no_open", [0.8, 0.8, 0.8]),
        result(bench, line, "auto", [0.6, 0.6, 0.6]),
        result(bench, line, "rclone", [0.9, 0.9, 0.9]),
    ]
    assert verdicts(bench, results) == {
        f"{line}: best: no_open": "good",
        f"{line}: auto against no_open": "missed",
    }
    results[3] = result(bench, line, "auto", [0.75, 0.75, 0.75])
    assert verdicts(bench, results)[f"{line}: auto against no_open"] == "good"


def test_a_first_epoch_needs_no_more_than_half_of_native_and_less_where_native_is_fast(
    bench: ModuleType,
) -> None:
    def said(native: float, ours: float) -> dict[str, str]:
        auto = result(bench, "epoch 1, 1 reader", "auto", [ours / native] * 3)
        auto.values, auto.against = [ours] * 3, [native] * 3
        python = result(bench, "epoch 1, 1 reader", "python", [0.1] * 3)
        rclone = result(bench, "epoch 1, 1 reader", "rclone", [0.3] * 3)
        return verdicts(bench, [auto, python, rclone], "rclone")

    enough = "epoch 1, 1 reader: auto, 2,500 files/s or half of native"
    assert said(2000, 1100)[enough] == "good"
    assert said(2000, 900)[enough] == "missed"
    assert said(50_000, 2600)[enough] == "good"
    ahead = "epoch 1, 1 reader: auto against rclone"
    assert said(2000, 700)[ahead] == "good"
    assert said(2000, 500)[ahead] == "missed"


def test_readers_read_every_byte_once_and_tell_what_fails(
    bench: ModuleType, tmp_path: Path
) -> None:
    import _readers  # type: ignore[import-not-found]

    paths = [str(tmp_path / f"{number}") for number in range(7)]
    for number, path in enumerate(paths):
        Path(path).write_bytes(bytes(1000 + number))
    for readers in (1, 4):
        reading = _readers.read_files(paths, readers)
        assert (reading.count, reading.bytes) == (7, 7021)
    again = _readers.read_files(paths, 2, seconds=0.05, again=True)
    assert again.count > 7 and 0.05 <= again.seconds < 5
    assert _readers.list_and_stat([str(tmp_path)])[0].count == 7
    assert _readers.scan_mapped(tmp_path / "0", seconds=0.01).bytes % 1000 == 0
    with pytest.raises(bench.BenchError, match=r"a reader failed: .*missing"):
        _readers.read_files([*paths, str(tmp_path / "missing")], 4)


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """A run that is over in seconds, and drops no other one's page cache."""
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    sizes = ["--files", "40", "--size-mb", "4", "--entries", "1000", "--rounds", "1"]
    who = ["--modes", "python", "--peers", "none"]
    where = ["--directory", str(tmp_path), "--json", str(tmp_path / "report.json")]
    command = [sys.executable, str(SCRIPTS / "bench"), "--quick", "--no-drop"]
    return [*command, *sizes, *who, *where]


def mounts_below(path: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if f" {path}/" in line]


def test_a_run_tells_every_number_and_leaves_nothing_behind(
    tiny: list[str], tmp_path: Path
) -> None:
    done = subprocess.run(tiny, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    rows = {(row["name"], row["who"]): row for row in report["rows"]}
    for line in ("files warm, 4 readers", "large file warm", "list and stat, again"):
        for who in ("python", "pyfuse3"):
            assert rows[line, who]["median"] > 0 and rows[line, who]["ratio"] > 0
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
    while len(mounts_below(tmp_path)) < 2:  # the slow source, and who is measured
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert mounts_below(tmp_path) == [] and list(tmp_path.iterdir()) == []


# -- writing ---------------------------------------------------------------------------------------


def test_a_job_must_wait_five_times_less_for_monarch_than_for_the_slow_source(
    bench: ModuleType,
) -> None:
    import _bench_write  # type: ignore[import-not-found]

    def said(slow: float, ours: float) -> str:
        rows = [
            bench.Result(_bench_write.SAVE.row(who, "auto"), [seconds] * 3, [1.0] * 3)
            for who, seconds in (("slow source", slow), ("auto", ours))
        ]
        assert rows[0].verdict == ""
        (waits,) = _bench_write.derived(rows, "auto")
        return f"{rows[1].verdict}, {waits.verdict}"

    assert said(10, 1.1) == "good, good"
    assert said(10, 1.3) == "missed, good"
    assert said(5, 1.1) == "good, missed"


def test_what_was_written_is_whole(bench: ModuleType, tmp_path: Path) -> None:
    import _writers  # type: ignore[import-not-found]

    assert _writers.write_through(tmp_path / "large", 2_500_000) > 0
    assert (tmp_path / "large").stat().st_size == 2_500_000
    assert _writers.create_files(tmp_path, 5, sync=True) > 0
    assert {(tmp_path / f"{number}").stat().st_size for number in range(5)} == {10_000}
    assert _writers.replace_file(tmp_path, 7) > 0
    assert (tmp_path / "target").stat().st_size == 10_006 and not (tmp_path / "staged").exists()
    seconds = _writers.append_and_sync(tmp_path / "log", 9)
    assert seconds == sorted(seconds) and (tmp_path / "log").stat().st_size == 9 * 4096


def test_writing_is_measured_on_every_side_until_it_is_at_the_source(tmp_path: Path) -> None:
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    sizes = ["--files", "10", "--size-mb", "2", "--rounds", "1", "--modes", "python"]
    where = ["--directory", str(tmp_path), "--json", str(tmp_path / "report.json")]
    command = [sys.executable, str(SCRIPTS / "bench"), "write", "--peers", "none", *sizes, *where]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    rows = {(row["name"], row["who"]): row for row in report["rows"]}
    for who in ("slow source", "python"):
        for name in ("checkpoint: 1 MiB writes and fsync", "fsync of 4 KiB: 99 of 100"):
            assert rows[name, who]["median"] > 0 and rows[name, who]["ratio"] > 0
    for name in ("names: create, write 10 KB, close", "trees: tar x", "trees: git clone", "drain"):
        assert rows[name, "python"]["median"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_line_of_small_files_has_a_bar_of_its_own_beside_that_against_native(
    bench: ModuleType,
) -> None:
    import _bench_small

    line = _bench_small.LINES[0]
    result = bench.Result(line.row("auto", "auto"), [240.0, 245.0, 241.0], [50.0, 50.0, 50.0])
    (own,) = _bench_small.derived([result], "auto")
    assert result.verdict == "missed", "4.8 times native"
    assert own.verdict == "good", "below 250 us"
    assert _bench_small.derived([result], "relay") == []


def test_a_short_month_is_lived_through_and_taken_up_again(
    bench: ModuleType, tmp_path: Path
) -> None:
    import _bench_month

    month = _bench_month.Month(tmp_path, lines=400, checkpoints=5)
    with _bench_month._at_once(1.0):
        month.live()
    assert len(month.largest) == len(month.memory) == _bench_month.PARTS
    # The first lines come as a whole file, perhaps more than once.
    assert month.cost[1:] and all(0 < cost <= 1.1 for cost in month.cost[1:])
    assert len(month.below) == _bench_month.MOUNTS
    # The last lines are not there: it was killed before.
    there = (tmp_path / "source" / "train.log").stat().st_size
    assert 0 < there < month.logged
    assert len([*(tmp_path / "source").glob("ckpt-*")]) == _bench_month.KEPT
