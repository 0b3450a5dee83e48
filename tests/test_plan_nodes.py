"""`monarch plan nodes`: the nodes of Slurm, as recorded from ``sinfo``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from monarch.cli.main import cli
from monarch.cli.plan_nodes import Group, Left, folded, groups_of, read_nodes
from monarch.errors import MonarchError
from monarch.peers.members import expand_as_written
from monarch.text import MiB

# sinfo --noheader --format='%N|%c|%d|%G|%t', Slurm 22.05, one with two partitions.
RECORDED = """\
n[01-02,05]|64|900000|gpu:a100:4(S:0-1)|idle
n03|64|900000|gpu:a100:4(S:0-1)|mix
n04|64|900000|gpu:a100:4(S:0-1)|drain*
big1|128|0|gpu:h100:8(S:0-3),mps:800|alloc
big1|128|0|gpu:h100:8(S:0-3),mps:800|alloc
mixed|32+|900000+|gpu:a:1(S:0),gpu:b:2,shard:6|idle~
cpu[1-3]|96|400000|(null)|idle
"""


def test_nodes_that_are_alike_are_one_group_and_each_counts_once() -> None:
    groups, left = groups_of(RECORDED.splitlines(), tier=None, gpus=None)
    assert groups == [
        Group("n[01-03,05]", 4, 64, 900_000 * MiB),
        Group("mixed", 3, 32, 900_000 * MiB),
    ]
    assert left == [
        Left("n04", "its state is drain*"),
        Left("big1", "Slurm knows no disk for a tier; name its size with --tier"),
        Left("cpu[1-3]", "it has no GPUs; --gpus N counts them"),
    ]
    groups, left = groups_of(RECORDED.splitlines(), tier=7 * MiB, gpus=2)
    assert [(each.names, each.gpus, each.tier) for each in groups] == [
        ("n[01-03,05]", 4, 7 * MiB),
        ("big1", 8, 7 * MiB),
        ("mixed", 3, 7 * MiB),
        ("cpu[1-3]", 2, 7 * MiB),
    ]
    assert [each.names for each in left] == ["n04"]


@pytest.mark.parametrize(
    "line",
    [
        *("n1|8|0|(null)", "n[1|8|0|(null)|idle", "n1|many|0|(null)|idle", "slurm_load: error"),
        # `monarch plan allocate` would refuse the file.
        *("n1|0|9|gpu:1|idle", "n1|-4|9|gpu:1|idle", "n1|4|-9|gpu:1|idle", "n1|4444444|9|gpu:1|a"),
        "x" * 10_000,
    ],
)
def test_a_line_that_is_not_known_is_named(line: str) -> None:
    with pytest.raises(MonarchError, match="a line that is not known") as raised:
        groups_of([line], tier=1, gpus=1)
    assert len(str(raised.value)) < 300


@given(st.sets(st.from_regex(r"[a-cA-C]{1,2}[0-9]{0,4}", fullmatch=True), max_size=40))
def test_a_folded_list_has_the_same_names(names: set[str]) -> None:
    assert sorted(expand_as_written(folded(names))) == sorted(names)


def sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = tmp_path / "bin/sinfo"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")


def run(*options: str) -> Result:
    return CliRunner().invoke(cli, ["plan", "nodes", *options], standalone_mode=False)


def test_the_file_is_one_that_allocate_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recorded").write_text(RECORDED)
    sinfo(tmp_path, monkeypatch, f'echo "$@" >{tmp_path}/asked; cat {tmp_path}/recorded')
    file = tmp_path / "nodes.yaml"
    done = run("--source", "5GB/s", "-o", str(file), "--partition", "gpu")
    assert done.exception is None, done.output
    budget, servers = read_nodes(file)
    assert budget == 5e9 and [each.name for each in servers] == [
        "n01",
        "n02",
        "n03",
        "n05",
        "mixed",
    ]
    assert (servers[0].gpus, servers[0].cores, servers[0].tier_bytes) == (4, 64, 900_000 * MiB)
    assert (
        "nodes.yaml: 5 nodes" in done.output and "n04 left out: its state is drain" in done.output
    )
    assert "--partition=gpu" in (tmp_path / "asked").read_text()
    shown = json.loads(run("--json").stdout)
    assert [each["names"] for each in shown["nodes"]] == ["n[01-03,05]", "mixed"]
    assert [each["names"] for each in shown["left"]] == ["n04", "big1", "cpu[1-3]"]
    assert run("--source", "5GB/s").stdout == file.read_text()


def test_nodes_keep_their_capital_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # sbatch refuses `--nodelist=gpu-n01` if Slurm's configuration has GPU-N01.
    sinfo(tmp_path, monkeypatch, "echo 'GPU-N[01-02],Big|8|1000|gpu:2|idle'")
    file = tmp_path / "nodes.yaml"
    done = run("-o", str(file))
    assert done.exception is None, done.output
    _, servers = read_nodes(file)
    assert [each.name for each in servers] == ["Big", "GPU-N01", "GPU-N02"]


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("echo 'slurm_load_partitions: Unable to contact' >&2; exit 1", "Unable to contact"),
        ("exit 7", "exit code 7"),
        ("exit 0", "no node that a plan could divide"),
        ("echo 'n1|8|0|(null)|down'", "no node that a plan could divide"),
        ("echo nonsense", "a line that is not known: nonsense"),
    ],
)
def test_a_slurm_that_does_not_answer_leaves_the_file_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, complaint: str
) -> None:
    sinfo(tmp_path, monkeypatch, script)
    file = tmp_path / "nodes.yaml"
    file.write_text("before")
    done = run("-o", str(file))
    assert isinstance(done.exception, MonarchError) and complaint in str(done.exception)
    assert file.read_text() == "before"


def test_without_slurm_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run()
    assert isinstance(done.exception, MonarchError) and "no Slurm here" in str(done.exception)
