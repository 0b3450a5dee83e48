"""What is known of other processes, also of those that have ended."""

from __future__ import annotations

import os
import subprocess

from monarch.posix.processes import Sessions


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
