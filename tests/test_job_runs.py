"""The runs of a command: what is left of its processes when a run has ended."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest

from monarch.cli import job_runs
from monarch.cli.job_runs import JobRuns
from monarch.control.registry import process_started, process_stat
from monarch.errors import MonarchError
from tests.equipment.waiting import wait_until


@pytest.mark.promise(293)
def test_processes_that_outlive_the_first_one_and_ignore_signals_end_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_runs, "_GRACE_S", 0.1)
    number = tmp_path / "number"
    script = f"""
        trap '' TERM
        sleep 300 & echo $! > {number}.part && mv {number}.part {number}
    """
    runs = JobRuns(["sh", "-c", script], "/mnt/data", 10, 1, 0)
    with pytest.raises(MonarchError, match="before it was measured"), runs.begun():
        pass
    left = int(number.read_text())
    wait_until(lambda: process_started(left) is None, "the process that ignores SIGTERM has ended")


def test_processes_that_cannot_be_read_are_not_of_the_group(
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
            first.wait()
            assert job_runs._group_runs(first)
        finally:
            os.kill(left, signal.SIGKILL)
        wait_until(lambda: not job_runs._group_runs(first), "the other process has ended")
