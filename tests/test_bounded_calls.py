"""A process waits for the threads of its calls with a time limit before it forks."""

from __future__ import annotations

import subprocess
import sys
import threading

from monarch.posix.bounded_calls import wait_for_threads

# In a process of its own: pytest may have threads.
_AFTER_CALLS = """
import os
from monarch.posix.bounded_calls import call_within, wait_for_threads

for _ in range(300):
    assert call_within(5.0, abs, -3) == 3
    assert wait_for_threads(5.0)
    assert len(os.listdir("/proc/self/task")) == 1
"""


def test_no_thread_is_left_beside_a_fork_after_a_call_that_ended() -> None:
    subprocess.run([sys.executable, "-c", _AFTER_CALLS], check=True, timeout=60)


def test_a_thread_that_hangs_is_not_waited_for_without_end() -> None:
    released = threading.Event()
    thread = threading.Thread(target=released.wait)
    thread.start()
    try:
        assert not wait_for_threads(0.01)
    finally:
        released.set()
        thread.join()


def test_a_mount_waits_for_threads_before_its_daemon_is_forked() -> None:
    """The daemon starts threads: after a fork beside another thread, this is not safe."""
    work = """
import os, sys, threading, time
from monarch.cli import mount
from pathlib import Path

threading.Thread(target=time.sleep, args=(0.1,)).start()
fork = os.fork
def counted():
    print(len(os.listdir("/proc/self/task")), flush=True)
    raise SystemExit
os.fork = counted
mount._start(None, None, None)
"""
    done = subprocess.run(
        [sys.executable, "-c", work], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout == "1\n"
