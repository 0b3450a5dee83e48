"""What is known of other processes, also of those that have ended."""

from __future__ import annotations

import os
import signal
import subprocess

from monarch.posix.processes import Sessions
from tests.equipment.waiting import wait_until


def test_the_session_of_a_process_is_known_after_its_end() -> None:
    """The daemon learns of an open up to a tenth of a second later."""
    sessions = Sessions()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        try:
            assert sessions.of(process.pid) == process.pid
        finally:
            process.kill()
    assert sessions.of(process.pid) == process.pid
    assert Sessions().of(process.pid) == 0


def test_a_process_is_known_once_and_unknown_numbers_have_no_session() -> None:
    sessions = Sessions()
    assert sessions.of(os.getpid()) == os.getsid(0)
    assert sessions.of(0) == sessions.of(-1) == 0
    assert len(sessions._known) == 1


def test_a_session_is_over_when_all_its_processes_have_ended() -> None:
    """The first one may end long before the others, and a zombie does not run."""
    sessions = Sessions()
    command = ["sh", "-c", "sleep 60 & echo $!"]
    first = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    left = int(first.stdout.readline())
    try:
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
        assert not sessions.is_over(first.pid), "found among all processes"
        assert sessions.of(left) == first.pid and not sessions.is_over(first.pid)
    finally:
        os.kill(left, signal.SIGKILL)
    wait_until(lambda: sessions.is_over(first.pid), "a zombie is left, and perhaps two")
    first.communicate()
    assert sessions.is_over(first.pid)
    assert not sessions.is_over(os.getsid(0))
