"""`monarch plan`: the files that it reads and writes, its output, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from monarch.analysis.profile import encode, model_of
from monarch.cli.main import cli
from monarch.errors import ConfigError, MonarchError, UsageError
from monarch.namespace.build import build
from tests.analysis.test_stalls import profile, runs

Run = Callable[..., str]

NODES = """\
source: 1MB
nodes:
  - {names: "n[01-02]", gpus: 2, cores: 12, tier: 100KB}
  - {names: big, gpus: 4, cores: 32, tier: 400KB}
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def _run(*arguments: object) -> str:
        capsys.readouterr()
        cli.main(["plan", *map(str, arguments)], standalone_mode=False)
        return capsys.readouterr().out

    return _run


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Of 100 files of 1,000 bytes."""
    (tmp_path / "source").mkdir()
    for number in range(100):
        path = tmp_path / f"source/{number:03}.jpg"
        path.touch()
        os.truncate(path, 1000)
    build(tmp_path / "source", tmp_path / "it.snapshot")
    return tmp_path / "it.snapshot"


@pytest.fixture
def jobs(run: Run, snapshot: Path, tmp_path: Path) -> dict[str, Path]:
    """A job that uses many cores, and one that uses few."""
    made = {}
    for name, rates in (("image", ("2:100", "6:200", "12:400")), ("text", ("1:50",))):
        options = [word for each in rates for word in ("--rate", each)]
        made[name] = tmp_path / f"{name}.json"
        data = ("--data", snapshot, "--source-bandwidth", "50KB")
        run("sensitivity", name, *data, *options, "-o", made[name])
    return made


def nodes_file(tmp_path: Path, text: str = NODES) -> Path:
    (tmp_path / "nodes.yaml").write_text(text)
    return tmp_path / "nodes.yaml"


def test_the_file_of_a_job_has_a_rate_for_each_amount_of_cores_and_tier(
    run: Run, snapshot: Path, tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    text = run(
        *("sensitivity", "a", "--data", snapshot, "--rate", "2:100", "--rate", "4:150.5"),
        *("--source-bandwidth", "50KB", "--tiers", "0%,50KB,100%", "-o", file),
    )
    raw = json.loads(file.read_text())
    assert raw["tier_bytes"] == [0, 50_000, 100_000]
    assert raw["rates"] == [[50, 100, 100], [50, 100, 150.5]]
    assert raw["measured"] == [[False, False, True]] * 2
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["2", "50", "100", "100"],
        ["4", "50", "100", "150"],
    ]


def test_the_rates_of_a_profile_are_those_of_its_model(run: Run, tmp_path: Path) -> None:
    measured = profile(runs(0.1, 0.2, 0.8))
    (tmp_path / "profile.json").write_text(encode(measured))
    model, _ = model_of(measured)
    assert model is not None and model.kind == "serial"
    options = ("sensitivity", "a", "--profile", tmp_path / "profile.json", "-o", tmp_path / "a")
    run(*options, "--tiers", "0%,50%,100%")
    raw = json.loads((tmp_path / "a").read_text())
    # 500 batches of 10,000 bytes are read in an epoch, and the profile has two cores.
    assert (raw["cores"], raw["tier_bytes"]) == ([1, 2], [0, 2_500_000, 5_000_000])
    assert raw["rates"][1] == pytest.approx([1 / 0.8, 1 / 0.5, 1 / 0.2])
    assert raw["rates"][0] == [model.with_cores(1).rate(share) for share in (0, 0.5, 1)]
    assert raw["source"][1] == pytest.approx([1.25 * 10_000, 2 * 5000, 0])
    text = run(*options, "--cores", "2,8", "--tiers", "0%", "--source-bandwidth", "5KB")
    assert "batches a second" in text and [line.split()[0] for line in text.splitlines()[2:]] == [
        *("2", "8")
    ]
    # The source gives half a batch in a second.
    assert json.loads((tmp_path / "a").read_text())["rates"] == [[0.5], [0.5]]


def test_a_job_is_described_in_one_way(run: Run, snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(encode(profile(runs(0.1, 0.2, 0.2))))
    (tmp_path / "other.json").write_text("{}")
    sources = {
        "--data DATA --rate 2:1": "either --profile is needed",
        "--data DATA --source-bandwidth 1MB": "either --profile is needed",
        "--profile PROFILE --data DATA": "either --profile is needed",
        "--data DATA --rate 2:1 --source-bandwidth 1MB --cores 2": "either --profile is needed",
        "--profile OTHER": "other.json cannot be used",
        "--profile PROFILE --source-bandwidth 1MB": "did not read faster",
    }
    files = {
        "DATA": snapshot,
        "PROFILE": tmp_path / "profile.json",
        "OTHER": tmp_path / "other.json",
    }
    for text, complaint in sources.items():
        words = [files.get(word, word) for word in text.split()]
        with pytest.raises(UsageError, match=complaint):
            run("sensitivity", "a", "-o", tmp_path / "a.json", *words)
    for cores in ("0", "1,", "-1", "9" * 8, "9" * 5000):
        with pytest.raises(click.BadParameter, match="is no list like 1,2,4"):
            run("sensitivity", "a", "-o", tmp_path / "a.json", "--cores", cores)
    assert not (tmp_path / "a.json").exists()


@pytest.mark.promise(289)
def test_the_same_input_gives_the_same_plan_byte_for_byte(
    jobs: dict[str, Path], tmp_path: Path
) -> None:
    nodes = str(nodes_file(tmp_path))
    files = [str(jobs["image"]), str(jobs["text"])]
    plans = []
    for seed, given in (("1", files), ("2", files), ("2", files[::-1])):
        command = [sys.executable, "-m", "monarch", "plan", "allocate", nodes, *given, "--json"]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, check=True
        )
        plans.append(done.stdout)
    assert plans[0] == plans[1] and json.loads(plans[0])["jobs"]
    first, other = (sorted(json.loads(plan)["jobs"], key=str) for plan in plans[1:])
    assert first == other, "the order of the jobs changes nothing"


def test_another_rate_of_a_job_gives_another_plan(
    run: Run, snapshot: Path, jobs: dict[str, Path], tmp_path: Path
) -> None:
    def plan() -> str:
        return run("allocate", nodes_file(tmp_path), *jobs.values(), "--json")

    before = plan()
    data = ("--data", snapshot, "--source-bandwidth", "50KB")
    rates = ("--rate", "2:100", "--rate", "6:200", "--rate", "12:200")
    run("sensitivity", "image", *data, *rates, "-o", jobs["image"])
    assert before != plan()


@pytest.mark.promise(289)
def test_each_job_gets_a_node_cores_and_a_tier(
    run: Run, jobs: dict[str, Path], tmp_path: Path
) -> None:
    answer = json.loads(run("allocate", nodes_file(tmp_path), *jobs.values(), "--json"))
    assert (answer["nodes"], answer["gpus"], answer["waiting"]) == (3, 8, [])
    by_name: dict[str, Any] = {each["job"]: each for each in answer["jobs"]}
    image, text = by_name["image"], by_name["text"]
    # Its fair share has six cores.
    assert (image["cores"], image["fair_rate"]) == (12, 100)
    assert image["rate"] == 400 and image["speedup"] == 4
    assert (text["cores"], text["rate"], text["speedup"]) == (1, 50, 1)
    assert answer["speedup"] == pytest.approx(2.5) and answer["bound"] >= answer["speedup"]
    (node,) = image["gpus"]
    assert image["sbatch"] == f"--gpus=1 --cpus-per-gpu=12 --nodes=1 --nodelist={node}"
    assert image["mount"] == {node: f"--tier PATH:{image['tier_bytes'][node]}"}
    shown = run("allocate", nodes_file(tmp_path), *jobs.values())
    assert f"image: sbatch {image['sbatch']}" in shown
    assert "mean speed-up 2.50 over fair shares" in shown
    assert (
        run("allocate", nodes_file(tmp_path), *jobs.values(), "--json")
        == json.dumps(answer, indent=2) + "\n"
    )


def test_a_source_that_is_too_slow_for_all_is_divided(
    run: Run, jobs: dict[str, Path], tmp_path: Path
) -> None:
    raw = json.loads(jobs["text"].read_text())
    for name in ("b", "c"):
        jobs[name] = tmp_path / f"{name}.json"
        jobs[name].write_text(json.dumps({**raw, "job": name}))
    text = NODES.replace("1MB", "90KB").replace("100KB", "1KB").replace("400KB", "1KB")
    answer = json.loads(run("allocate", nodes_file(tmp_path, text), *jobs.values(), "--json"))
    needs = [each["source"] for each in answer["jobs"]]
    limits = [each["source_limit"] for each in answer["jobs"]]
    assert needs == pytest.approx([50_000] * 4)
    assert limits == pytest.approx([22_500] * 4)
    for each in answer["jobs"]:
        assert each["rate"] == pytest.approx(50 * 22.5 / 50)
        assert all("limits.source_bandwidth=22500" in text for text in each["mount"].values())


def test_fair_shares_are_divided_by_the_same_source(
    run: Run, jobs: dict[str, Path], tmp_path: Path
) -> None:
    text = "source: 30KB\nnodes: [{names: a, gpus: 2, cores: 14, tier: 120KB}]"
    answer = json.loads(run("allocate", nodes_file(tmp_path, text), *jobs.values(), "--json"))
    image, other = answer["jobs"]
    # Fair shares have half of the data: the two jobs need 50 and 25 KB/s, and get 15 each.
    assert (image["fair_rate"], other["fair_rate"]) == (30, 30)
    assert (image["cores"], image["rate"], image["source_limit"]) == (12, 400, None)
    assert other["tier_bytes"] == {"a": 10_000}
    assert other["rate"] == pytest.approx(50 * 30 / 45)
    assert answer["bound"] >= answer["speedup"]


def test_jobs_without_a_place_are_named(
    run: Run, jobs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = nodes_file(tmp_path, "nodes: [{names: n1, gpus: 1, cores: 12, tier: 1MB}]")
    cli.main(["plan", "allocate", str(nodes), *map(str, jobs.values())], standalone_mode=False)
    assert "there is no place for text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: 1", "there is no list 'nodes'"),
        ("nodes: []", "there is no list 'nodes'"),
        ("nodes: [a]", "each of nodes has names"),
        ("nodes: [{names: a, gpus: 1, cores: 1}]", "each of nodes has names"),
        ("nodes: [{names: a, gpus: 0, cores: 1, tier: 1GB}]", "gpus of a is 0"),
        ("nodes: [{names: a, gpus: 1, cores: x, tier: 1GB}]", "cores of a is 'x'"),
        ("nodes: [{names: a, gpus: 1, cores: 1, tier: big}]", "'big' is not a size"),
        # YAML has another value for each of these than the name of a host.
        ("nodes: [{names: , gpus: 1, cores: 1, tier: 1GB}]", "names is None; write one text"),
        ("nodes: [{names: yes, gpus: 1, cores: 1, tier: 1GB}]", "names is True; write one text"),
        ("nodes: [{names: [a, b], gpus: 1, cores: 1, tier: 1GB}]", "names is ['a', 'b']; write"),
        ("source: 9000PB\nnodes: [{names: a, gpus: 1, cores: 1, tier: 9999PB}]", "more bytes than"),
        ("nodes: [{names: 'a[', gpus: 1, cores: 1, tier: 1GB}]", "no host name"),
        ("nodes: [{names: 'a,a', gpus: 1, cores: 1, tier: 1GB}]", "listed twice"),
        ("nodes: [{names: '', gpus: 1, cores: 1, tier: 1GB}]", "no node is named"),
        ("source: 0\nnodes: [{names: a, gpus: 1, cores: 1, tier: 1GB}]", "source is 0; leave it"),
        ("x: 1\nnodes: [{names: a, gpus: 1, cores: 1, tier: 1GB}]", "unknown key 'x'"),
        ("nodes: [", "not YAML"),
    ],
)
def test_nodes_with_a_mistake_are_refused_with_the_name_of_the_file(
    run: Run, jobs: dict[str, Path], tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        run("allocate", nodes_file(tmp_path, text), jobs["text"])
    (problem,) = raised.value.problems
    assert complaint in problem and problem.startswith(f"{tmp_path}/nodes.yaml:")


GOOD = "{names: a, gpus: 1, cores: 1, tier: 1GB}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nodes:\n- names: a\n  gpus: 1\n  cores: 0\n  tier: 1GB", 4),
        (f"nodes:\n- {GOOD}\n- names: b\n  gpus: 1\n  cores: 1\n  tier: big", 6),
        ("nodes:\n- gpus: 1\n  cores: 1\n  tier: 1GB\n  names: 'a['", 5),
        (f"nodes:\n- {GOOD}\n- b", 3),
        (f"nodes:\n- {GOOD}\n- {GOOD}", 3),
        (f"nodes:\n- {GOOD}\nsource: fast", 3),
        (f"nodes:\n- {GOOD}\nmore: 1", 3),
        ("\nsource: 1MB\nnodes: []", 3),
    ],
)
def test_a_mistake_in_the_nodes_is_named_with_its_line(
    run: Run, jobs: dict[str, Path], tmp_path: Path, text: str, line: int
) -> None:
    with pytest.raises(ConfigError) as raised:
        run("allocate", nodes_file(tmp_path, text), jobs["text"])
    (problem,) = raised.value.problems
    assert problem.startswith(f"{tmp_path}/nodes.yaml:{line}: ")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "{", "\xff", "[" * 100_000, '{"monarch_sensitivity": 1}'),
        f'{{"monarch_sensitivity": 1, "rates": [[{10**400}]]}}',
    ],
)
def test_a_file_that_is_not_of_a_job_is_refused(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(MonarchError, match=r"a\.json (is not a file of a job|cannot be used)"):
        run("allocate", nodes_file(tmp_path), tmp_path / "a.json")
    # A file of a newer Monarch, whose fields may differ, is refused by its version.
    (tmp_path / "a.json").write_text('{"monarch_sensitivity": 2}')
    with pytest.raises(UsageError, match=r"a\.json is not a file of a job: .* version 2, not 1"):
        run("allocate", nodes_file(tmp_path), tmp_path / "a.json")


def test_jobs_that_cannot_run_together_are_refused(
    run: Run, jobs: dict[str, Path], tmp_path: Path
) -> None:
    nodes = nodes_file(tmp_path)
    with pytest.raises(UsageError, match="two files have the job text"):
        run("allocate", nodes, jobs["text"], jobs["text"])
    raw = json.loads(jobs["text"].read_text())
    jobs["text"].write_text(json.dumps({**raw, "gpus": 9}))
    with pytest.raises(UsageError, match="text needs 9 GPUs"):
        run("allocate", nodes, jobs["text"])


@pytest.mark.parametrize("rate", ["3", "0:5", "3:0", "3:x", "3:nan", "-1:5"])
def test_a_rate_with_a_mistake_is_refused(run: Run, snapshot: Path, rate: str) -> None:
    options = ("--data", snapshot, "--source-bandwidth", "1MB", "-o", snapshot.parent / "a.json")
    with pytest.raises(click.BadParameter, match="is not CORES:RATE"):
        run("sensitivity", "a", *options, "--rate", rate)
    with pytest.raises(click.BadParameter, match="is not CORES:RATE"):
        run("sensitivity", "a", *options, "--rate", "3:1", "--rate", "3:2")
    assert not (snapshot.parent / "a.json").exists()
