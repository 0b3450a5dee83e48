"""`monarch plan profile`: which rates it measures, and when they are not to be used."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

from monarch.analysis.loader_model import JobModel
from monarch.analysis.plan import Phase, RunReport
from monarch.analysis.sensitivity import Sensitivity, job_of
from monarch.cli import output, plan_profile
from monarch.cli.main import cli
from monarch.cli.measured_mount import MeasuredMount
from monarch.errors import MonarchError, UsageError

# Four workers: 40 ms of preparation for a batch of 1 MB, and 80 ms more from the source.
MODEL = JobModel("serial", 4, 4, 0.010, 0.040, 0.080, batch_bytes=1e6)
BATCHES = 1000


class VirtualRuns:
    """A job that has the rates of a model, in virtual time. ``hits`` of the opens with a share of
    the files in the tiers are served by them."""

    made: ClassVar[list[tuple[Phase, float, int | None]]] = []
    noise: ClassVar[list[float]] = [1.0]
    served = 1.0

    def __init__(self, *_: object) -> None:
        pass

    @classmethod
    def hits(cls, share: float) -> float:
        return share * cls.served

    @contextmanager
    def begun(self) -> Iterator[Any]:
        yield self.measure

    def measure(self, phase: Phase, share: float, cores: int | None) -> RunReport:
        self.made.append((phase, share, cores))
        assert cores is not None
        here = replace(MODEL, cores=cores)
        hits = self.hits(share)
        train = 1 / MODEL.training_s if phase == "synthetic" else here.rate(hits)
        noise = self.noise[len(self.made) % len(self.noise)]
        return RunReport(
            window=20,
            train_s=[20 / train * noise] * 5,
            load_s=[] if phase == "synthetic" else [20 / here.load_rate(hits)] * 5,
            hits=round(1000 * hits),
            misses=round(1000 * (1 - hits)),
            source_bytes=round(1e6 * (1 - hits) * 100),
            batches=100,
            workers=4,
            in_stages=False,
            epoch_batches=BATCHES,
        )


@pytest.fixture(autouse=True)
def virtual(monkeypatch: pytest.MonkeyPatch) -> type[VirtualRuns]:
    mount = MeasuredMount("/mnt/data", data_bytes=10**12, tier_bytes=10**12)
    monkeypatch.setattr(plan_profile, "JobRuns", VirtualRuns)
    monkeypatch.setattr(plan_profile, "measured_mount", lambda place: mount)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4, 5})
    monkeypatch.setattr(VirtualRuns, "made", [])
    return VirtualRuns


def run(tmp_path: Path, *options: str) -> Result:
    words = ["plan", "profile", "resnet", "-o", str(tmp_path / "job.json"), *options]
    return CliRunner().invoke(cli, [*words, "--", "train"], standalone_mode=False)


def written(tmp_path: Path) -> Sensitivity:
    return Sensitivity.from_dict(json.loads((tmp_path / "job.json").read_text()))


def test_few_rates_are_measured_and_the_others_are_those_of_the_model(
    tmp_path: Path, virtual: type[VirtualRuns]
) -> None:
    done = run(tmp_path, "--tiers", "0%,50%,100%", "--repeat", "1")
    assert done.return_value == 0, done.output
    # Half of the cores cost half of the rate, so one is left out after the other.
    assert virtual.made == [
        *(("cached", 1.0, 4), ("real", 0.0, 4), ("synthetic", 1.0, 4)),
        *(("cached", 1.0, cores) for cores in (2, 1)),
        ("real", 0.0, 1),
    ]
    found = written(tmp_path)
    assert (found.cores, found.tier_bytes) == ([1, 2, 4], [0, 5 * 10**8, 10**9])
    for cores, row in zip(found.cores, found.rates, strict=True):
        here = replace(MODEL, cores=cores)
        assert row == pytest.approx([here.rate(share) for share in (0.0, 0.5, 1.0)], rel=1e-6)
    ends = [True, False, True]
    assert found.measured == [ends, [False, False, True], ends] and found.verified == []
    assert job_of(found).name == "resnet"
    assert "job.json: batches a second by cores" in done.output


def test_the_rates_are_written_although_nothing_reads_the_table_and_shown_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(line: str) -> None:
        raise BrokenPipeError

    with monkeypatch.context() as patched:
        patched.setattr(output, "say", closed)
        assert isinstance(run(tmp_path).exception, BrokenPipeError)
    assert written(tmp_path).cores == [1, 2, 4]
    done = run(tmp_path, "-o", "/dev/full")
    assert isinstance(done.exception, OSError)
    assert "batches a second by cores" in done.output


def test_rates_are_verified_and_a_wrong_one_is_named(
    tmp_path: Path, virtual: type[VirtualRuns], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--cores", "2,4", "--tiers", "25%,50%,100%", "--verify", "3", "--json")
    done = run(tmp_path, *options)
    assert done.return_value == 0
    found = written(tmp_path)
    assert len(found.verified) == 3 and max(each.error for each in found.verified) < 1e-6
    assert sum(sum(row) for row in found.measured) == 2 + 3
    assert json.loads(done.stdout) == found.to_dict()
    # A tier that evicts what is read next has no hits before it holds everything.
    monkeypatch.setattr(VirtualRuns, "hits", classmethod(lambda cls, share: float(share == 1)))
    done = run(tmp_path, *options)
    assert done.return_value == 15
    assert "the computed rates are not to be used: one is wrong by" in done.output
    # All of the computed ones, if there are fewer.
    assert run(tmp_path, *options, "--verify", "1000").return_value == 15
    assert all(map(all, written(tmp_path).measured))


def test_runs_that_differ_and_tiers_that_do_not_hold_the_files_give_an_exit_code(
    tmp_path: Path, virtual: type[VirtualRuns], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual, "noise", [1.0, 1.5])
    done = run(tmp_path, "--repeat", "2")
    # Each rate was measured as often again.
    assert virtual.made[:4] == [("cached", 1.0, 4)] * 4
    assert done.return_value == 15 and "the rates are unsure: the windows of the run" in done.output
    monkeypatch.setattr(virtual, "noise", [1.0])
    monkeypatch.setattr(virtual, "served", 0.5)
    done = run(tmp_path)
    assert done.return_value == 15 and "served only 50% of the opens" in done.output
    monkeypatch.setattr(virtual, "served", 0.0)
    (tmp_path / "job.json").write_text("before")
    done = run(tmp_path)
    assert isinstance(done.exception, MonarchError) and "monarch warm" in str(done.exception)
    assert (tmp_path / "job.json").read_text() == "before"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--cores", "1,5"), "5 cores are not here; this process may use 4"),
        (("--cores", "3", "--gpus", "2"), "3 cores are not as many for each of 2 GPUs"),
        (("--gpus", "5"), "4 cores are not as many for each of 5 GPUs"),
        (("--source", "1KB"), "at least 1MiB/s"),
        (("--source", "2TB/s"), "at most 1TiB/s"),
        (("-o", "/no/such/directory/job.json"), "No such file"),
    ],
)
def test_a_job_that_cannot_be_measured_here_is_refused_before_the_runs(
    tmp_path: Path, virtual: type[VirtualRuns], options: tuple[str, ...], complaint: str
) -> None:
    done = run(tmp_path, *options)
    assert isinstance(done.exception, UsageError | OSError), done.output
    assert complaint in str(done.exception) and virtual.made == []
    assert not (tmp_path / "job.json").exists()
