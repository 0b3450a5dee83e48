"""The runs of a command: what is left of its processes when a run has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch.cli import job_runs
from monarch.cli.job_runs import JobRuns
from monarch.control.registry import process_started
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
