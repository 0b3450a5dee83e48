"""The runs of a command: what is left of its processes when a run has ended."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monarch.analysis.plan import Phase, RunReport, encode
from monarch.cli import job_runs
from monarch.cli.job_runs import JobRuns
from monarch.control.registry import process_started, process_stat
from monarch.errors import MonarchError
from monarch.posix.signals import interruptible_where_heeded
from tests.analysis.test_stalls import NOISY, STEADY, run
from tests.equipment.waiting import wait_until


# `timeout` has a process group of its own, and so have the jobs of an interactive shell.
@pytest.mark.promise(293)
@pytest.mark.parametrize("begin", ["sleep 300", "timeout 600 sleep 300"])
def test_processes_that_outlive_the_first_one_and_ignore_signals_end_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: str
) -> None:
    monkeypatch.setattr(job_runs, "_GRACE_S", 0.1)
    number = tmp_path / "number"
    script = f"""
        trap '' TERM
        {begin} & echo $! > {number}.part && mv {number}.part {number}
    """
    runs = JobRuns(["sh", "-c", script], "/mnt/data", 10, 1, 0)
    with pytest.raises(MonarchError, match="before it was measured"), runs.begun():
        pass
    left = int(number.read_text())
    wait_until(lambda: process_started(left) is None, "the process that ignores SIGTERM has ended")


def test_no_thread_is_left_of_the_runs() -> None:
    runs = JobRuns(["true"], "/mnt/data", 10, 1, 0)
    # The thread that asks whether the mount has ended.
    asking = runs._calls.call(threading.current_thread)
    with pytest.raises(MonarchError, match="before it was measured"), runs.begun():
        pass
    asking.join(60)
    assert not asking.is_alive()


def test_processes_that_cannot_be_read_are_not_of_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stat(pid: int) -> list[bytes] | None:
        if pid == 1:
            # As for a process of another user with hidepid=1.
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return process_stat(pid)

    monkeypatch.setattr(job_runs, "process_stat", stat)
    command = ["sh", "-c", "sleep 60 & echo $!"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        left = int(first.stdout.readline())
        try:
            wait_until(lambda: job_runs._has_ended(first.pid), "the first process has ended")
            assert job_runs._running(first) == {left}
        finally:
            os.kill(left, signal.SIGKILL)
        wait_until(lambda: not job_runs._running(first), "the other process has ended")


@pytest.mark.promise(293)
def test_no_other_session_can_have_the_number_of_a_command_whose_processes_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states: list[bytes] = []
    running = job_runs._running

    def seen(process: subprocess.Popen[bytes]) -> set[int]:
        stat = process_stat(process.pid)
        states.append(b"free" if stat is None else stat[0])
        return running(process)

    monkeypatch.setattr(job_runs, "_running", seen)
    with pytest.raises(MonarchError, match="before it was measured"):
        with JobRuns(["true"], "/mnt/data", 10, 1, 0).begun():
            pass
    assert states == [b"Z"]


def test_the_output_of_a_command_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # More than a pipe holds. It closes its output before it ends.
    script = f"""
        yes 'a line of the output' | head -n 50000
        find {tmp_path} -type f
        head -c 100000 /dev/zero >&2
        echo 'the last line' >&2
        exec >&- 2>&-
        exit 7
    """
    said: list[str] = []
    monkeypatch.setattr(job_runs, "remark", said.append)
    runs = JobRuns(["sh", "-c", script], "/mnt/data", 10, 1, 0)
    with pytest.raises(MonarchError, match="exit code 7"), runs.begun():
        pass
    # A line without an end is shown by its end.
    assert said[-1].endswith("\\x00the last line") and len(said[-1]) < 5000
    assert set(said[:-1]) <= {"  | a line of the output"}


# Reports, and then has no end.
_MEASURED = """
import json, os, pathlib, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
report = json.loads(os.environ["MONARCH_ANALYZE"])["report"]
part = pathlib.Path(report + ".part")
part.write_text(os.environ["REPORT"])
part.rename(report)
while True:
    signal.pause()
"""


@pytest.mark.promise(293)
def test_a_command_that_is_measured_and_does_not_end_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_runs, "_GRACE_S", 0.1)
    monkeypatch.setattr(job_runs, "_LOOK_MOUNT_S", 0.1)
    report = run("cached", 1.0).report
    monkeypatch.setenv("REPORT", encode(report))
    runs = JobRuns([sys.executable, "-c", _MEASURED], "/mnt/data", 10, 1, 0)
    with runs.begun() as measure:
        assert measure("cached", 1.0, None) == report


class Clock:
    """In place of the module `time`: an hour passes between two looks while ``path`` exists."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._now_s = 0.0
        self.hours = 0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        if self._path.exists():
            self._now_s += 3600
            self.hours += 1
        return self._now_s


@pytest.mark.parametrize("begin", ["env -i", "env"])
def test_a_command_that_does_not_see_the_analysis_is_waited_for_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: str
) -> None:
    begun, end = tmp_path / "begun", tmp_path / "end"
    clock = Clock(begun)
    said: list[str] = []
    monkeypatch.setattr(job_runs, "time", clock)
    monkeypatch.setattr(job_runs, "remark", said.append)
    # It ends some hours after its call, or when the command has said what it waits for.
    script = f"""
import pathlib, sys, time
sys.path[:0] = {sys.path!r}
import monarch
monarch.watch([])
pathlib.Path({str(begun)!r}).touch()
while not pathlib.Path({str(end)!r}).exists():
    time.sleep(0.01)
"""

    def look(self: JobRuns) -> None:
        if clock.hours > 20:
            end.touch()

    monkeypatch.setattr(JobRuns, "_require_mount", look)
    runs = JobRuns([*begin.split(), sys.executable, "-c", script], "/mnt/data", 10, 1, 0)
    with pytest.raises(MonarchError, match="before it was measured") as failed, runs.begun():
        pass
    reasons = [line for line in said if "MONARCH_ANALYZE" in line]
    is_seen = begin == "env"
    assert len(reasons) == (0 if is_seen else 1)
    assert is_seen or ("in 60 s" in reasons[0] and "--export=NONE" in reasons[0])
    assert ("11 batches" in str(failed.value)) == is_seen
    assert ("--export=NONE" in str(failed.value)) == (not is_seen)
    assert failed.value.exit_code == 1


def test_a_report_with_an_impossible_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runs, "_GRACE_S", 0.1)
    monkeypatch.setattr(job_runs, "_LOOK_MOUNT_S", 0.1)
    report = run("cached", 1.0).report
    # Of a loader that says so.
    monkeypatch.setenv("REPORT", encode(replace(report, workers=-3)))
    runs = JobRuns([sys.executable, "-c", _MEASURED], "/mnt/data", 10, 1, 0)
    with pytest.raises(MonarchError, match="cannot be read: it has a number out of"), runs.begun():
        pass


def test_a_daemon_that_a_command_has_left_has_no_output(tmp_path: Path) -> None:
    number = tmp_path / "number"
    # It has a session of its own, so it does not end with the run.
    daemon = f"echo $$ > {number}.part && mv {number}.part {number}; while echo on; do :; done"
    script = f"""
        setsid sh -c '{daemon}' &
        while [ ! -e {number} ]; do sleep 0.01; done
    """
    with pytest.raises(MonarchError, match="before it was measured"):
        with JobRuns(["sh", "-c", script], "/mnt/data", 10, 1, 0).begun():
            pass
    left = int(number.read_text())
    wait_until(lambda: process_started(left) is None, "the daemon cannot write any more")


_ANALYSIS = """
import sys
from monarch.cli import job_runs
from monarch.posix.signals import heed_all
job_runs._GRACE_S = 0.1
heed_all()
try:
    with job_runs.JobRuns(["sh", "-c", sys.argv[1]], "/mnt/data", 10, 1, 0).begun():
        pass
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.promise(293)
@pytest.mark.parametrize("number", ["TERM", "HUP", "INT"])
def test_a_signal_ends_the_command_and_leaves_no_files(tmp_path: Path, number: str) -> None:
    (tmp_path / "tmp").mkdir()
    # The command sends the signal itself, and another one while it is ended.
    script = f"""
        trap 'kill -HUP $PPID' TERM
        echo $$ > {tmp_path}/number
        kill -{number} $PPID
        while kill -0 $PPID; do sleep 0.01; done
    """
    done = subprocess.run(
        [sys.executable, "-c", _ANALYSIS, script],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (130, "")
    assert list((tmp_path / "tmp").iterdir()) == []
    left = int((tmp_path / "number").read_text())
    wait_until(lambda: process_started(left) is None, "the command has ended")


def test_the_next_command_removes_what_a_killed_one_has_left_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = "echo $$; kill -KILL $PPID"

    def begin() -> None:
        with suppress(MonarchError), JobRuns(["true"], "/mnt/data", 10, 1, 0).begun():
            pass

    killed = subprocess.run(
        [sys.executable, "-c", _ANALYSIS, script],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with job_runs._own_directory() as directory:
        assert list(tmp_path.iterdir()) == [directory] != [left]
        begin()
        assert list(tmp_path.iterdir()) == [directory]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_another_command_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mkdtemp, made = tempfile.mkdtemp, []

    def removed(prefix: str) -> str:
        made.append(Path(mkdtemp(prefix=prefix)))
        if len(made) == 1:
            job_runs.remove_if_left(made[0], job_runs._OPEN, shutil.rmtree)
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", removed)
    with job_runs._own_directory() as directory:
        assert [directory] == list(tmp_path.iterdir()) == made[1:]


def test_a_signal_that_comes_while_the_command_is_started_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    runs = JobRuns(["sleep", "300"], "/mnt/data", 10, 1, 0)
    with pytest.raises(KeyboardInterrupt), runs.begun():
        pass
    assert [process.returncode for process in started] == [-signal.SIGTERM]
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_after_the_last_run_ends_the_command() -> None:
    steps: list[str] = []

    def work() -> None:
        with interruptible_where_heeded() as interruption:
            with interruption.heeded():
                steps.append("runs")
            os.kill(os.getpid(), signal.SIGTERM)
            steps.append("all measured")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["runs", "all measured"]


@pytest.mark.promise(291)
def test_rounds_follow_while_the_last_ones_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, float]] = []
    noisy = 1

    @contextmanager
    def begun(self: JobRuns) -> Iterator[job_runs.Measure]:
        def measure(phase: Phase, share: float, cores: int | None) -> RunReport:
            made.append((phase, share))
            noise = NOISY if len(made) <= 3 * noisy else STEADY
            return run(phase, 1.0, share=share, noise=noise).report

        yield measure

    monkeypatch.setattr(JobRuns, "begun", begun)
    phases: list[tuple[Phase, float]] = [("synthetic", 1.0), ("cached", 1.0), ("real", 0.0)]
    words: list[str] = []

    def all_of(rounds: int, most: int) -> int:
        made.clear()
        words.clear()
        runs = JobRuns(["true"], "/mnt/data", 10, 1, 0)
        found = runs.all(phases, rounds, most, lambda done, total, said: words.append(said))
        assert [(each.phase, each.share) for each in found] == made
        return found[-1].round + 1

    assert all_of(2, 4) == 3
    assert made == [*phases, *reversed(phases), *phases]
    assert "differ by" in words[-2] and "differ by" not in words[3]
    noisy = 100
    assert all_of(2, 4) == 4
    assert all_of(1, 1) == 1
