"""The exit code of `monarch analyze run`, and what it leaves if the disk of its profile is full."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import BinaryIO

import pytest
from click.testing import CliRunner, Result

from monarch.analysis.profile import decode, result_of
from monarch.analysis.stalls import Run
from monarch.cli import analyze, output, written_files
from monarch.cli.measured_mount import MeasuredMount
from tests.analysis.test_stalls import NOISY, STEADY, runs


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose runs are measured already, and its mount."""

    class Measured:
        def __init__(self, *_: object) -> None:
            pass

        def all(self, *_: object) -> list[Run]:
            return runs(0.1, 0.2, 0.8)

    monkeypatch.setattr(analyze, "JobRuns", Measured)
    mount = MeasuredMount("/mnt/data", data_bytes=10**9, tier_bytes=10**8)
    monkeypatch.setattr(analyze, "measured_mount", lambda place: mount)


def run(out: Path) -> Result:
    return CliRunner().invoke(analyze.analyze, ["run", "--out", str(out), "--", "train"])


def test_the_result_is_shown_although_the_disk_is_full() -> None:
    done = run(Path("/dev/full"))
    assert isinstance(done.exception, OSError)
    assert done.exception.errno == errno.ENOSPC
    assert "fetch-bound" in done.output


def test_the_profile_is_written_although_nothing_reads_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(line: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(output, "say", closed)
    done = run(tmp_path / "profile.json")
    assert isinstance(done.exception, BrokenPipeError)
    assert len(decode((tmp_path / "profile.json").read_text()).runs) == 4


def test_a_profile_that_cannot_be_written_as_a_whole_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "profile.json"
    out.write_text("the profile before")
    out.chmod(0o640)
    write_new = written_files._write_new

    def half(file: BinaryIO, content: bytes, mode: int | None) -> None:
        write_new(file, content[: len(content) // 2], mode)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(written_files, "_write_new", half)
        done = run(out)
    assert isinstance(done.exception, OSError)
    assert "fetch-bound" in done.output
    assert out.read_text() == "the profile before"
    assert list(tmp_path.iterdir()) == [out]
    assert run(out).exception is None
    assert len(decode(out.read_text()).runs) == 4
    assert out.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.promise(291)
@pytest.mark.parametrize(
    ("noise", "code", "verdict"), [(NOISY, 15, "unsure"), (STEADY, 0, "fetch-bound")]
)
def test_a_run_with_noise_gives_no_verdict_and_an_exit_code_of_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    noise: tuple[float, ...],
    code: int,
    verdict: str,
) -> None:
    found = runs(0.1, 0.2, 0.8, noise=noise)
    monkeypatch.setattr(analyze.JobRuns, "all", lambda *_: found, raising=False)
    out = str(tmp_path / "profile.json")
    for arguments in (["run", "--out", out, "--", "train"], ["report", out]):
        done = CliRunner().invoke(analyze.analyze, arguments, standalone_mode=False)
        assert done.return_value == code, done.output
        assert done.output.startswith(f"{verdict}: ")


def test_rounds_that_differed_too_much_are_kept_apart_in_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that does not know ``unused_runs`` has the same conclusions."""
    noisy, steady = runs(0.1, 0.2, 0.8, noise=NOISY), runs(0.1, 0.2, 0.8)
    steady = [Run(each.phase, each.share, 1, each.report) for each in steady]
    monkeypatch.setattr(analyze.JobRuns, "all", lambda *_: [*noisy, *steady], raising=False)
    out = tmp_path / "profile.json"
    arguments = ["run", "--repeat", "1", "--out", str(out), "--", "train"]
    done = CliRunner().invoke(analyze.analyze, arguments, standalone_mode=False)
    assert done.return_value == 0 and "the last 1 of 2 rounds" in done.output
    raw = json.loads(out.read_text())
    assert decode(json.dumps(raw)).unused_runs == noisy
    del raw["unused_runs"]
    assert decode(json.dumps(raw)).runs == steady
    assert raw["result"] == result_of(decode(json.dumps(raw))).to_dict()
