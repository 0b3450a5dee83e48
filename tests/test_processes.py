"""What is known of other processes, also of those that have ended."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from monarch.posix.cgroups import group_of, group_runs
from monarch.posix.processes import Sessions, runs_any_of, user_of
from tests.equipment.waiting import wait_until


def test_a_process_is_known_once_and_one_that_has_ended_has_no_session() -> None:
    sessions = Sessions()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        try:
            assert sessions.of(process.pid) == sessions.of(process.pid) == process.pid
        finally:
            process.kill()
    assert sessions.of(process.pid) == sessions.of(0) == sessions.of(-1) == 0
    assert sessions.of(os.getpid()) == os.getsid(0)
    sessions.saw(process.pid, 0)
    assert len(sessions._known) == 1 + bool(os.getsid(0))


def test_the_latest_processes_of_sessions_are_known() -> None:
    sessions = Sessions()
    for pid in range(1, 5000):
        sessions.saw(pid, 7)
    assert list(sessions._known) == list(range(5000 - len(sessions._known), 5000))
    assert len(sessions._known) < 2000


def test_a_session_is_over_when_all_its_processes_have_ended() -> None:
    """The first one may end long before the others, and a zombie does not run."""
    sessions = Sessions()
    command = ["sh", "-c", "sleep 60 & echo $!"]
    first = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    left = int(first.stdout.readline())
    try:
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
        assert not sessions.over([first.pid]), "found among all processes"
        assert sessions.of(left) == first.pid and not sessions.over([first.pid])
    finally:
        os.kill(left, signal.SIGKILL)
    wait_until(lambda: sessions.over([first.pid]), "a zombie is left, and perhaps two")
    first.communicate()
    assert sessions.over([first.pid]) == {first.pid}


def test_all_processes_are_read_once_for_all_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    listdir = os.listdir

    def listing(path: str) -> list[str]:
        listed.append(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", listing)
    # No process has these numbers.
    ended = range(1 << 30, (1 << 30) + 60)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        try:
            assert Sessions().over([*ended, process.pid]) == {*ended}
            assert Sessions().over([process.pid]) == set()
        finally:
            process.kill()
    assert listed == ["/proc"]


def test_the_user_of_a_process_is_known_until_it_ends() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert user_of(process.pid) == os.geteuid() and runs_any_of(os.geteuid())
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        # A zombie opens nothing.
        assert user_of(process.pid) is None
    assert user_of(process.pid) is None
    assert not runs_any_of(987_654_321)


def test_a_control_group_runs_while_it_or_one_beneath_has_a_process(tmp_path: Path) -> None:
    job = PurePosixPath("/slurm/job_7")
    # Without version 2 it cannot be seen.
    assert group_runs(job, tmp_path)
    (tmp_path / "cgroup.controllers").touch()
    assert group_runs(PurePosixPath("/"), tmp_path)
    assert not group_runs(job, tmp_path)
    events = tmp_path / "slurm/job_7/cgroup.events"
    events.parent.mkdir(parents=True)
    for populated in (1, 0):
        events.write_text(f"populated {populated}\nfrozen 0\n")
        assert group_runs(job, tmp_path) == bool(populated)
    own = group_of(os.getpid())
    assert own is None or own.is_absolute()


@pytest.mark.parametrize("before", ["", "4:memory:/user/x\x0b0::/slurm/job_7\n"])
def test_the_name_of_a_control_group_may_have_any_bytes(tmp_path: Path, before: str) -> None:
    """A user who makes a group neither stops the daemon nor gets into the group of another job."""
    name = "/user/\udcff\u2028\r0::/slurm/job_7"
    (tmp_path / "9").mkdir()
    (tmp_path / "9/cgroup").write_bytes(os.fsencode(f"{before}0::{name}\n"))
    assert group_of(9, tmp_path) == PurePosixPath(name)
    assert group_of(8, tmp_path) is None
