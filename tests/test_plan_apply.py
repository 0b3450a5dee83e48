"""`monarch plan apply`: the files and quotas of a plan, and what is refused."""

from __future__ import annotations

import errno
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from monarch.cli import plan_apply
from monarch.cli.main import cli
from monarch.cli.plan_file import GrantReport, PlanReport
from monarch.config.quotas import QuotaSettings
from monarch.errors import UsageError
from monarch.telemetry.quota_changes import QuotaChange, QuotaChanges


def grant(job: str, node: str, tier: int, limit: float | None = None) -> GrantReport:
    limited = "" if limit is None else f" -o limits.source_bandwidth={int(limit)}"
    return GrantReport(
        job=job,
        gpus={node: 1},
        cores=6,
        tier_bytes={node: tier},
        rate=2.0,
        fair_rate=1.0,
        speedup=2.0,
        source=1e6,
        source_limit=limit,
        sbatch=f"--gpus=1 --cpus-per-gpu=6 --nodes=1 --nodelist={node}",
        mount={node: f"--tier PATH:{tier}{limited}"} if tier else {},
    )


JOBS = [grant("resnet", "n01", 3000, 2e6), grant("bert", "n01", 0), grant("gpt", "n02", 500)]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write(tmp_path, JOBS)


def write(tmp_path: Path, jobs: list[GrantReport]) -> Path:
    made = PlanReport(1, "tune", 2, 4, jobs, [], 1.5, 1.6)
    (tmp_path / "plan.json").write_text(json.dumps(made.to_dict()))
    return tmp_path / "plan.json"


def run(plan: Path, *options: object) -> Result:
    words = ["plan", "apply", str(plan), *map(str, options)]
    return CliRunner().invoke(cli, words, standalone_mode=False)


def content(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_each_job_gets_files_with_its_flags_and_options(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    named = ("--job", "resnet=slurm:4711", "--job", "bert=user:0")
    options = ("-o", out, "--tier-path", "/nvme/a", *named)
    dry = run(plan, *options, "--dry-run")
    assert dry.exception is None and not out.exists()
    assert f"would write {out}/resnet.sbatch:" in dry.output
    done = run(plan, *options)
    assert done.exception is None and f"wrote {out}/gpt.n02.mount:" in done.output
    found = content(out)
    assert sorted(found) == sorted(
        ["resnet.sbatch", "bert.sbatch", "gpt.sbatch", "resnet.n01.mount", "gpt.n02.mount"]
        + ["n01.quotas.yaml"]
    )
    assert found["resnet.sbatch"] == f"{JOBS[0].sbatch}\n"
    assert found["resnet.n01.mount"] == ("--tier /nvme/a:3000 -o limits.source_bandwidth=2000000\n")
    # A shell divides the flags as sbatch wants them.
    words = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' $(cat {out}/gpt.sbatch)"], capture_output=True, text=True
    )
    assert words.stdout.split("\n")[:-1] == JOBS[2].sbatch.split()
    quotas = yaml.safe_load(found["n01.quotas.yaml"])["quotas"]
    resnet, bert = map(QuotaSettings.model_validate, quotas)
    assert str(resnet.cgroup) == "/system.slice/slurmstepd.scope/job_4711"
    assert (resnet.tier_within(1), resnet.source_bandwidth) == (3000, 2_000_000)
    assert (bert.user, bert.tier_within(1), bert.source_bandwidth) == ("0", 0, 0)
    assert run(plan, *options).exception is None and content(out) == found


def test_a_full_disk_leaves_no_empty_directory(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def replace_whole(path: Path, text: str) -> None:
        if len(written) == full_at:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        written.append(path.name)
        path.write_text(text)

    monkeypatch.setattr(plan_apply, "replace_whole", replace_whole)
    full_at = 0
    out = tmp_path / "new" / "out"
    assert isinstance(run(plan, "-o", out).exception, OSError)
    assert not out.parent.exists()
    # One that was there before stays, and so does one with a file.
    out.mkdir(parents=True)
    assert isinstance(run(plan, "-o", out).exception, OSError)
    assert out.is_dir()
    out.rmdir()
    full_at = 1
    assert isinstance(run(plan, "-o", out).exception, OSError)
    assert [*content(out)] == written


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requests to a daemon that changes all quotas."""
    requests: list[dict[str, Any]] = []

    class Record:
        mountpoint = "/mnt/data"

    def ask(record: Any, verb: str, params: dict[str, Any], *, answer: Any) -> QuotaChanges:
        requests.append(params)
        changes = [
            QuotaChange(str(each), False, 900, each["tier"], each["source_bandwidth"], None, 0)
            for each in params["quotas"]
        ]
        return QuotaChanges(changes)

    monkeypatch.setattr(plan_apply, "mount_of", lambda place: Record)
    monkeypatch.setattr(plan_apply, "ask", ask)
    return requests


def test_the_quotas_of_a_mount_are_those_of_its_node(
    plan: Path, asked: list[dict[str, Any]]
) -> None:
    named = ("--job", "resnet=cgroup:/a", "--job", "gpt=user:0", "--job", "bert=user:1")
    for options, dry in (((), False), (("--dry-run",), True)):
        done = run(plan, "--mount", "/mnt/data", "--node", "n01", *named, *options)
        assert done.exception is None, done.output
        assert asked.pop() == {
            "quotas": [
                {"cgroup": "/a", "tier": 3000, "source_bandwidth": 2_000_000},
                {"user": "1", "tier": 0, "source_bandwidth": 0},
            ],
            "dry": dry,
        }
        assert "gpt has no GPUs on n01: no quota" in done.output
        assert ("would set in /mnt/data" if dry else "set in /mnt/data") in done.output
        assert "(before: any copies, any source)" in done.output
        assert "its copies of 900 B stay" in done.output
    shown = json.loads(
        run(plan, "--mount", "/mnt", "--node", "n02", "--job", "gpt=user:0", "--json").stdout
    )
    assert (shown["node"], shown["mountpoint"], shown["skipped"]) == ("n02", "/mnt/data", [])
    assert shown["quotas"][0]["tier"] == 500 and shown["dry_run"] is False


@pytest.mark.parametrize(
    ("name", "found"), [("GPU-1", "GPU-1"), ("gpu-1", "gpu-1"), ("Gpu-2.x.org", "GPU-2")]
)
def test_the_node_of_a_mount_may_have_other_capital_letters_in_the_plan(
    tmp_path: Path,
    asked: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    found: str,
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", name)
    plan = write(tmp_path, [grant(f"j-{each}", each, 7) for each in ("GPU-1", "gpu-1", "GPU-2")])
    done = run(plan, "--mount", "/mnt", "--job", f"j-{found}=user:0", "--json")
    assert done.exception is None, done.output
    assert json.loads(done.stdout)["node"] == found
    # The mount is first asked whether it accepts the quotas.
    assert [each["dry"] for each in asked] == [True, False]


def test_a_mount_that_refuses_leaves_no_files(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UsageError("this mount has no quotas")

    monkeypatch.setattr(plan_apply, "mount_of", lambda place: None)
    monkeypatch.setattr(plan_apply, "ask", refuse)
    monkeypatch.setattr(plan_apply, "mount_of", lambda place: type("R", (), {"mountpoint": "/m"}))
    options = ("--mount", "/m", "--node", "n01", "--job", "resnet=user:0", "-o", tmp_path / "out")
    assert "no quotas" in str(run(plan, *options).exception)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_refuses_the_files_leaves_the_quotas(
    plan: Path, tmp_path: Path, asked: list[dict[str, Any]]
) -> None:
    (tmp_path / "out").write_text("a file, no directory")
    options = ("--mount", "/m", "--node", "n01", "--job", "resnet=user:0")
    failed = run(plan, *options, "-o", tmp_path / "out" / "new").exception
    assert isinstance(failed, OSError)
    assert [each["dry"] for each in asked] == [True]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "nothing is to be done"),
        (("--mount", "/m", "--node", "n01"), "name the processes of a job with --job"),
        (
            ("--mount", "/m", "--node", "n9", "--job", "gpt=user:0"),
            "no job on n9; its nodes are n01",
        ),
        (("-o", "out", "--job", "other=user:0"), "the plan has no job other"),
        (("-o", "out", "--tier-path", "/a b"), "a shell divides this path"),
        (("-o", "out", "--tier-path", "/a*"), "a shell divides this path"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    plan: Path, options: tuple[str, ...], complaint: str
) -> None:
    error = run(plan, *options).exception
    assert isinstance(error, UsageError) and complaint in str(error)


@pytest.mark.parametrize(
    "text",
    ["gpt", "=user:0", "gpt=", "gpt=group:a", "gpt=user:", "gpt=slurm:x"]
    + ["gpt=cgroup:relative", "gpt=cgroup:/a/../b"],
)
def test_a_job_with_a_mistake_is_refused(plan: Path, text: str) -> None:
    assert isinstance(run(plan, "-o", "out", "--job", text).exception, click.BadParameter)


def test_a_job_whose_name_is_no_file_name_is_refused(tmp_path: Path) -> None:
    for name in ("../gpt", "a b", ".", "-x", ""):
        plan = write(tmp_path, [grant(name, "n01", 1)])
        error = run(plan, "-o", tmp_path / "out").exception
        assert isinstance(error, UsageError) and "is not the name of a file" in str(error)
    assert not (tmp_path / "out").exists()


def test_files_of_a_plan_have_different_names(tmp_path: Path) -> None:
    plan = write(tmp_path, [grant("a", "b.c", 1), grant("a.b", "c", 1)])
    error = run(plan, "-o", tmp_path / "out").exception
    assert isinstance(error, UsageError) and "the same name" in str(error)
    jobs = [replace(grant("a", "n01", 1), mount={"/n01": "--tier PATH:1"})]
    error = run(write(tmp_path, jobs), "-o", tmp_path / "out").exception
    assert isinstance(error, UsageError) and "is not the name of a file" in str(error)
    assert not (tmp_path / "out").exists()


def test_a_part_of_a_byte_a_second_is_not_taken_for_no_limit(tmp_path: Path) -> None:
    plan = write(tmp_path, [grant("a", "n01", 1, 0.5), grant("b", "n01", 1)])
    done = run(plan, "-o", tmp_path / "out", "--job", "a=user:0", "--job", "b=user:1")
    assert done.exception is None
    quotas = yaml.safe_load(content(tmp_path / "out")["n01.quotas.yaml"])["quotas"]
    assert [each["source_bandwidth"] for each in quotas] == [1, 0]


def test_a_byte_of_a_path_that_is_no_text_is_written_as_it_is(plan: Path, tmp_path: Path) -> None:
    done = run(plan, "-o", tmp_path / "out", "--tier-path", "/nvme/\udcff")
    assert done.exception is None
    found = (tmp_path / "out" / "gpt.n02.mount").read_bytes()
    assert found == b"--tier /nvme/\xff:500\n"


@pytest.mark.parametrize(
    "processes",
    ["user:no", "user:on", "user:true", "user:null", "user:0", "user:alice", "user:a'b"]
    + ["cgroup:/a, b: c/#d", "cgroup:/job's"],
)
def test_users_and_groups_are_text_in_the_quotas(
    plan: Path, tmp_path: Path, processes: str
) -> None:
    done = run(plan, "-o", tmp_path / "out", "--job", f"resnet={processes}")
    assert done.exception is None
    kind, _, name = processes.partition(":")
    [found] = yaml.safe_load(content(tmp_path / "out")["n01.quotas.yaml"])["quotas"]
    assert found == {kind: name, "tier": 3000, "source_bandwidth": 2_000_000}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"monarch_plan": 2}', '{"monarch_plan": 1}', "[" * 100_000, "\0"]
)
def test_a_file_that_is_no_plan_is_refused(plan: Path, tmp_path: Path, text: str) -> None:
    plan.write_text(text)
    error = run(plan, "-o", tmp_path / "out").exception
    assert isinstance(error, UsageError) and "plan.json" in str(error)
    if "2" in text:
        assert "version 2, not 1" in str(error)
    raw = PlanReport(1, "tune", 1, 1, [grant("a", "n", -1)], [], 1, 1).to_dict()
    plan.write_text(json.dumps(raw))
    assert "out of its range" in str(run(plan, "-o", tmp_path / "out").exception)
