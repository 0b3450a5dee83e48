"""`monarch simulate`: what it reads, prints and refuses."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from monarch.cli.main import cli
from monarch.cli.recorded import read, sampled
from monarch.errors import MonarchError, UsageError
from monarch.namespace.build import build
from monarch.telemetry.trace import (
    VERSION,
    TraceEnd,
    TraceHeader,
    file_line,
    lost_line,
    object_line,
    open_line,
    open_text,
)
from monarch.text import format_bytes

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def _run(*arguments: object) -> str:
        capsys.readouterr()
        cli.main(["simulate", *map(str, arguments)], standalone_mode=False)
        return capsys.readouterr().out

    return _run


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 400 files of 1,000 to 1,399 bytes."""
    directory = tmp_path_factory.mktemp("simulate")
    (directory / "source").mkdir()
    for number in range(400):
        path = directory / f"source/{number:03}.jpg"
        path.touch()
        os.truncate(path, 1000 + number)
    build(directory / "source", directory / "it.snapshot")
    return directory / "it.snapshot"


def trace_of(
    path: Path,
    epochs: Sequence[Sequence[int]],
    *,
    numbered: bool = True,
    tier: str = '"fast"',
    end: bool = True,
    lost: int = 0,
) -> Path:
    """A trace of files of 100 bytes; in the first epoch the source serves them."""
    header = TraceHeader(VERSION, "/mnt/x", "/pfs/x", "abc", 17, ["source", "fast"], "open")
    seen: set[int] = set()
    opens = 0
    with open_text(path, "w") as file:
        file.write(object_line(header.to_dict()))
        for number, order in enumerate(epochs, 5):
            for name in order:
                if name not in seen:
                    file.write(file_line(name, f"train/{name}", 100))
                seen.add(name)
                opens += 1
                served = '"source"' if number == 5 and tier != "null" else tier
                file.write(
                    open_line(opens / 10, name, number if numbered else None, served, None, 7)
                )
        if lost:
            file.write(lost_line(lost))
        if end:
            file.write(object_line(TraceEnd("epochs", opens, lost).to_dict()))
    return path


def shuffled(epochs: int, files: int = 50) -> list[list[int]]:
    return [[(each * 7 + 3 * number) % files for each in range(files)] for number in range(epochs)]


def test_the_epochs_of_a_snapshot_are_replayed_under_each_policy(run: Run, snapshot: Path) -> None:
    outcome = json.loads(run(snapshot, "--capacity", "35%", "--epochs", 5, "--json"))
    assert (outcome["files"], outcome["bytes"]) == (400, sum(range(1000, 1400)))
    assert outcome["capacity_bytes"] == outcome["bytes"] * 35 // 100
    by_name = {each["policy"]: each for each in outcome["policies"]}
    assert list(by_name) == ["no_evict", "lru", "fifo", "random", "belady"]
    hits = [epoch["hits"] for epoch in by_name["no_evict"]["epochs"]]
    assert hits[0] == 0 and hits[1:] == [hits[1]] * 4 and abs(hits[1] - 140) < 8
    assert by_name["lru"]["formula"] == pytest.approx(0.07, abs=0.001)
    assert by_name["fifo"]["formula"] is None
    assert by_name["lru"]["steady"] < by_name["random"]["steady"] < by_name["no_evict"]["steady"]
    assert outcome["recorded_hits"] is None
    text = run(snapshot, "--capacity", outcome["capacity_bytes"], "--policies", "lru,no_evict")
    assert "400 files, 469 KiB" in text and "35.0% of the bytes" in text
    names = [line.split()[:1] for line in text.splitlines()]
    assert names.count(["lru"]) == names.count(["no_evict"]) == 1 and ["fifo"] not in names
    raw = json.loads(run(snapshot, "--capacity", "35%", "--policies", "lru", "--json"))
    later = raw["policies"][0]["epochs"][2:]
    source = sum(each["bytes"] - each["hit_bytes"] for each in later) / len(later)
    assert f"  {format_bytes(source)}  " in text


@pytest.mark.promise(286)
def test_the_same_options_give_the_same_numbers(run: Run, snapshot: Path) -> None:
    before = snapshot.read_bytes()
    once = run(snapshot, "--capacity", "20%", "--seed", 5, "--json")
    assert run("policies", snapshot, "--capacity", "20%", "--seed", 5, "--json") == once
    assert run(snapshot, "--capacity", "20%", "--seed", 6, "--json") != once
    nodes = ("nodes", snapshot, "--capacity", "20%", "--nodes", "1,2,4", "--json")
    assert run(*nodes) == run(*nodes)
    assert snapshot.read_bytes() == before


@pytest.mark.parametrize("name", ["opens.jsonl", "opens.jsonl.gz"])
@pytest.mark.parametrize("numbered", [True, False])
def test_a_trace_is_replayed_as_it_was_recorded(
    run: Run, tmp_path: Path, name: str, numbered: bool
) -> None:
    file = trace_of(tmp_path / name, shuffled(3), numbered=numbered)
    outcome = json.loads(run(file, "--capacity", "50%", "--json"))
    assert (outcome["files"], outcome["order"]) == (50, "trace")
    for policy in outcome["policies"]:
        assert [epoch["opens"] for epoch in policy["epochs"]] == [50, 50, 50]
    assert [epoch["hits"] for epoch in outcome["policies"][0]["epochs"]] == [0, 25, 25]
    assert outcome["recorded_hits"] == [0, 50, 50]
    text = run(file, "--capacity", "50%", "--epochs", 2)
    assert "in the order of the trace" in text
    assert [line.split() for line in text.splitlines() if "(recorded)" in line] == [
        ["(recorded)", "0.0%", "100.0%"]
    ]
    mixed = json.loads(run(file, "--capacity", "50%", "--order", "shuffled", "--json"))
    assert len(mixed["policies"][0]["epochs"]) == 4 and mixed["recorded_hits"] is None


def test_a_trace_without_tiers_has_no_recorded_hits(run: Run, tmp_path: Path) -> None:
    file = trace_of(tmp_path / "opens.jsonl", shuffled(2), tier="null")
    assert json.loads(run(file, "--capacity", "50%", "--json"))["recorded_hits"] is None


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (True, "3 opens were lost when it was recorded\n"),
        (False, "3 opens were lost when it was recorded; the trace was cut off\n"),
    ],
)
def test_opens_that_a_trace_lacks_are_reported(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], end: bool, said: str
) -> None:
    """Also those after the last open, as of a trace that was written too slowly until its end."""
    file = trace_of(tmp_path / "opens.jsonl", shuffled(1), end=end, lost=3)
    cli.main(["simulate", str(file), "--capacity", "50%"], standalone_mode=False)
    assert f"monarch: {file}: {said}" in capsys.readouterr().err


def test_a_sample_has_about_the_hits_of_all_files(run: Run, snapshot: Path) -> None:
    options = (snapshot, "--capacity", "50%", "--policies", "no_evict", "--json")
    whole = json.loads(run(*options))
    some = json.loads(run(*options, "--sample", 200))
    assert (some["files"], some["simulated_files"]) == (400, 200)
    assert some["capacity_bytes"] == whole["capacity_bytes"]
    assert some["simulated_capacity_bytes"] == pytest.approx(some["simulated_bytes"] / 2, abs=2)
    assert some["policies"][0]["steady"] == pytest.approx(0.5, abs=0.02)
    text = run(*options[:-1], "--sample", 200)
    assert "a random sample of 200 files" in text
    # Half of all files, not of the sample.
    cells = text.splitlines()[-3].split()
    assert cells[0] == "no_evict" and cells[-3] == "KiB"
    assert float(cells[-4]) == pytest.approx(234, abs=10)


def test_a_sample_without_bytes_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for number in range(30):
        (tmp_path / f"source/{number}").touch()
    (tmp_path / "source/x").write_bytes(b"x")
    build(tmp_path / "source", tmp_path / "it.snapshot")
    options = (tmp_path / "it.snapshot", "--capacity", "50%", "--seed", "1")
    with pytest.raises(UsageError, match="none of the 1 files of the sample has bytes"):
        run(*options, "--sample", 1)
    assert "31 files" in run(*options, "--sample", 31)


def test_files_of_impossible_sizes_are_refused(run: Run) -> None:
    options = ("--capacity", "5%", "--nodes", 1)
    with pytest.raises(UsageError, match="--files and --size are of at most"):
        run("nodes", "--files", 20_000_000, "--size", "1TB", *options)


def test_a_sample_of_a_trace_keeps_the_order_of_its_opens(tmp_path: Path) -> None:
    found = read(trace_of(tmp_path / "opens.jsonl", shuffled(2)), lambda *_: None)
    some = sampled(found, 10, seed=1)
    assert found.orders is not None and some.orders is not None
    kept = set(some.files.keys.tolist())
    for before, after in zip(found.orders, some.orders, strict=True):
        names = [key for key in found.files.keys[before].tolist() if key in kept]
        assert some.files.keys[after].tolist() == names and len(names) == 10


def test_a_constant_order_shows_the_time_that_a_spread_of_copies_saves(
    run: Run, snapshot: Path
) -> None:
    text = run(
        *(snapshot, "--capacity", "50%", "--order", "same", "--policies", "no_evict,first_come"),
        *("--source-bandwidth", "10KB", "--job-bandwidth", "20KB/s", "--json"),
    )
    spread, first_come = (each["epochs"][1]["seconds"] for each in json.loads(text)["policies"])
    assert first_come / spread > 1.2
    assert json.loads(text)["policies"][0]["formula"] is None


def test_the_nodes_of_a_job_are_simulated(run: Run, snapshot: Path) -> None:
    outcome = json.loads(run("nodes", snapshot, "--capacity", "30%", "--nodes", "1,2,4", "--json"))
    runs = outcome["runs"]
    assert [len(each["members"]) for each in runs] == [1, 2, 4]
    cached = [each["expected"]["cached"] for each in runs]
    assert cached == pytest.approx([0.3, 0.6, 1.0], abs=1e-5)
    assert all(each["epochs"][0]["source_opens"] == 400 for each in runs)
    assert runs[2]["epochs"][-1]["source_bytes"] < outcome["bytes"] * 0.05
    text = run("nodes", snapshot, "--capacity", "30%", "--nodes", "1,2,...,8")
    assert [line.split()[0] for line in text.splitlines()[5:9]] == ["1", "2", "4", "8"]


def test_nodes_can_be_those_of_a_list_or_of_the_job(
    run: Run, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def members(nodes: str) -> Any:
        options = ("nodes", snapshot, "--capacity", "30%", "--json", "--nodes", nodes)
        (only,) = json.loads(run(*options))["runs"]
        return only["members"]

    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[07-08]")
    assert members("slurm") == ["gpu07", "gpu08"]
    assert members("n[1-2],login") == ["login", "n1", "n2"]
    assert members("3") == ["node0", "node1", "node2"]


def test_the_loss_of_a_node_is_shown_epoch_by_epoch(run: Run) -> None:
    files = ("nodes", "--files", 2000, "--size", "100KB", "--capacity", "50%", "--nodes", "4")
    text = run(*files, "--lose", "1@2", "--epochs", 3)
    rows = [line.split() for line in text.splitlines()[5:]]
    assert rows[0][:3] == ["1", "4", "2,000"]
    assert [row[1] for row in rows] == ["4", "3", "3"]
    again = [int(row[2].replace(",", "")) for row in rows]
    assert 0 < again[1] < 500 and 0 < again[2] < 500


@pytest.mark.parametrize("kind", ["policies", "nodes"])
def test_a_figure_is_drawn(run: Run, snapshot: Path, tmp_path: Path, kind: str) -> None:
    for suffix in ("png", "svg"):
        run(kind, snapshot, "--capacity", "30%", "-o", tmp_path / f"it.{suffix}")
    assert (tmp_path / "it.png").read_bytes()[1:4] == b"PNG"
    assert "<svg" in (tmp_path / "it.svg").read_text()


def test_a_figure_that_cannot_be_written_is_refused_before_the_simulation(
    run: Run, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch.cli.simulate.read", lambda *_: pytest.fail("it is simulated"))
    with pytest.raises(FileNotFoundError):
        run(snapshot, "--capacity", "30%", "-o", tmp_path / "missing/it.png")


@pytest.mark.parametrize("kind", ["policies", "nodes"])
def test_the_numbers_are_shown_although_the_disk_of_the_figure_is_full(
    snapshot: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    def full(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"monarch.cli.simulate{'_nodes' * (kind == 'nodes')}.draw", full)
    words = ["simulate", kind, str(snapshot), "--capacity", "30%", "-o", str(tmp_path / "it.png")]
    with pytest.raises(OSError, match="No space"):
        cli.main(words, standalone_mode=False)
    assert "400 files" in capsys.readouterr().out


def test_without_matplotlib_the_command_says_what_to_install(
    run: Run, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MonarchError, match="pip install matplotlib"):
        run(snapshot, "--capacity", "30%", "-o", tmp_path / "it.png")
    assert not (tmp_path / "it.png").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("SNAPSHOT --capacity 3% --order trace", "is a snapshot, which has no order of opens"),
        ("SNAPSHOT --capacity 3% -o it.gif", "a figure is a file of .png"),
        ("SNAPSHOT --capacity 3% --job-bandwidth 1MB", "are needed together"),
        ("TRACE --capacity 3% --epochs 4", "has 2 epochs, not 4"),
        ("OTHER --capacity 3%", "neither a snapshot nor a trace"),
        ("EMPTY --capacity 3%", "no file with bytes"),
        ("PIPE --capacity 3%", "is not a regular file"),
        ("nodes --capacity 3%", "either FILE or --files"),
        ("nodes SNAPSHOT --files 3 --size 1MB --capacity 3%", "either FILE or --files"),
        ("nodes --files 3 --capacity 3%", "--files and --size are needed together"),
        ("nodes --files 3 --size 0 --capacity 3%", "the size must not be 0"),
        ("nodes SNAPSHOT --capacity 3% --nodes 1,2 --lose 1@1", "no node of 1 would be left"),
        ("nodes SNAPSHOT --capacity 3% --lose 1@9", "names epoch 9, and there are 4"),
        ("nodes SNAPSHOT --capacity 3% --nodes slurm", "this is no job of Slurm"),
        ("nodes SNAPSHOT --capacity 3% --nodes n[1-3", "is no host name"),
    ],
)
def test_a_simulation_that_is_impossible_is_refused_in_one_line(
    run: Run, snapshot: Path, tmp_path: Path, arguments: str, complaint: str
) -> None:
    (tmp_path / "other").write_text("other")
    (tmp_path / "empty").mkdir()
    build(tmp_path / "empty", tmp_path / "empty.snapshot")
    os.mkfifo(tmp_path / "pipe")
    files = {
        "SNAPSHOT": snapshot,
        "PIPE": tmp_path / "pipe",
        "TRACE": trace_of(tmp_path / "opens.jsonl", shuffled(2)),
        "OTHER": tmp_path / "other",
        "EMPTY": tmp_path / "empty.snapshot",
    }
    with pytest.raises(UsageError) as raised:
        run(*(files.get(word, word) for word in arguments.split()))
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("tiers", "sizes", "complaint"),
    [
        (["source"], [1 << 63], "line 2, is not of a trace"),
        (["source"], [-1], "line 2, is not of a trace"),
        (["source"], [1 << 62], "files of impossible sizes"),
        ([], [5], "line 1, is not of a trace"),
        (["source"], [0], "no file with bytes"),
        (["source"], [], "no file with bytes"),
    ],
)
def test_a_trace_with_impossible_values_is_refused_in_one_line(
    run: Run, tmp_path: Path, tiers: list[str], sizes: list[int], complaint: str
) -> None:
    header = TraceHeader(VERSION, "/mnt/x", "/pfs/x", "abc", 17, tiers, "open")
    lines = [object_line(header.to_dict())]
    for number, size in enumerate(sizes):
        lines += [file_line(number, f"{number}", size)]
        lines += [open_line(number / 10, number, 1, '"source"', None, 7)]
    (tmp_path / "opens.jsonl").write_text("".join(lines))
    with pytest.raises(MonarchError, match=complaint) as raised:
        run(tmp_path / "opens.jsonl", "--capacity", "30%")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        (["--capacity", "x"], "or like 35%"),
        (["--policies", "lru,fo"], "no policy 'fo'; there are no_evict"),
        (["--policies", ","], "no policy is named"),
        (["--source-bandwidth", "0"], "the rate must be above 0"),
        (["--nodes", "1,2,...,x"], "no host name"),
        (["--nodes", "1,...,8"], "'...' is no number"),
        (["--nodes", "4,2,...,9"], "must rise"),
        (["--nodes", "1,2,..."], "no number of nodes comes after"),
        (["--nodes", "0"], "'0' is no number of nodes"),
        (["--nodes", "20000"], "from 1 to 16,384"),
        (["--lose", "1"], "NODES@EPOCH"),
        (["--lose", "0@1"], "NODES@EPOCH"),
        (["--ahead", "99999999999999999999"], "not in the range"),
    ],
)
def test_an_option_with_a_mistake_is_refused(
    run: Run, snapshot: Path, option: list[str], complaint: str
) -> None:
    kind = "nodes" if option[0] in ("--nodes", "--lose", "--ahead") else "policies"
    capacity = [] if option[0] == "--capacity" else ["--capacity", "3%"]
    with pytest.raises((click.BadParameter, UsageError)) as raised:
        run(kind, snapshot, *capacity, *option)
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,2,4,...,16", [1, 2, 4, 8, 16]),
        ("1,2,...,8", [1, 2, 4, 8]),
        ("2,3,...,6", [2, 3, 4, 5, 6]),
        ("1,3,...,30", [1, 3, 9, 27, 30]),
        ("8, 1", [8, 1]),
    ],
)
def test_dots_continue_the_numbers_before_them(run: Run, text: str, expected: list[int]) -> None:
    files = ("nodes", "--files", 10, "--size", 10, "--capacity", "1%", "--epochs", 1)
    runs = json.loads(run(*files, "--nodes", text, "--json"))["runs"]
    assert [len(each["members"]) for each in runs] == expected
