"""A process waits for the threads of its calls with a time limit before it forks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from monarch.posix import bounded_calls
from monarch.posix.bounded_calls import call_within, wait_for_threads

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


def test_a_process_that_was_stopped_waits_for_threads_when_it_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal stopped_s
        stopped_s += 3600

    clock = SimpleNamespace(monotonic=lambda: stopped_s, sleep=sleep)
    monkeypatch.setattr(bounded_calls, "time", clock)
    threads = SimpleNamespace(listdir=lambda path: ["1"] if stopped_s > 2 * 3600 else ["1", "2"])
    monkeypatch.setattr(bounded_calls, "os", threads)
    assert wait_for_threads(1.0)


def test_a_process_that_was_stopped_during_a_call_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time is over when it continues, and its thread has not run either."""
    may_end = threading.Event()

    class Stopped:
        def __init__(self) -> None:
            self._turn = threading.Lock()
            self._waits = 0
            self.release = self._turn.release

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            if not blocking:
                return self._turn.acquire(blocking)
            self._waits += 1
            if self._waits == 1:
                return False
            may_end.set()
            return self._turn.acquire(timeout=timeout)

    monkeypatch.setattr(bounded_calls, "threading", SimpleNamespace(Lock=Stopped, Thread=Thread))
    assert call_within(600.0, may_end.wait, 60)


def test_a_mount_waits_for_threads_before_its_daemon_is_forked() -> None:
    """The daemon starts threads: after a fork beside another thread, this is not safe."""
    work = """
import os, sys, threading, time
from monarch.cli import mount
from pathlib import Path

mount._THREADS_END_S = 60.0
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


def test_a_mount_has_no_threads_of_a_library_to_wait_for(tmp_path: Path) -> None:
    """Such threads do not end: each mount waited for them in vain, for a second."""
    work = """
import os, sys
from monarch.cli import main

def counted():
    print("numpy" in sys.modules, len(os.listdir("/proc/self/task")), flush=True)
    print(os.environ["OPENBLAS_NUM_THREADS"], flush=True)
    os._exit(0)

os.fork = counted
sys.argv[:1] = ["monarch", "mount"]
main.main()
"""
    done = _ran(work, tmp_path, threads=2)
    assert done.stdout == "True 1\n2\n"


def test_a_mount_has_no_threads_that_watch_its_source(tmp_path: Path) -> None:
    """They have ended before the daemon is forked, also in the middle of a question."""
    work = """
import os, sys, threading
from monarch.cli import main, mount, source_watch
from monarch.daemon import run

asked, statvfs = threading.Event(), os.statvfs
def asking(path):
    asked.set()
    return statvfs(path)
def waiting(path):
    assert asked.wait(60)
    return False
def counted():
    print(len(os.listdir("/proc/self/task")), flush=True)
    os._exit(0)

os.statvfs, run.is_pack, os.fork = asking, waiting, counted
# A thread may have to wait for a processor.
mount._THREADS_END_S = 60.0
source_watch._STEP_S, source_watch._HUNG_STEPS = 0.01, 10**6
sys.argv[:1] = ["monarch", "mount"]
main.main()
"""
    assert _ran(work, tmp_path, threads=1).stdout == "1\n"


def _ran(work: str, tmp_path: Path, *, threads: int) -> subprocess.CompletedProcess[str]:
    """Runs the program ``work`` with the arguments of a mount, and so many threads of numpy."""
    source, mountpoint = tmp_path / "source", tmp_path / "mnt"
    source.mkdir()
    mountpoint.mkdir()
    options = "--tier", f"{tmp_path}/tier:1MiB", "--state", str(tmp_path / "state")
    return subprocess.run(
        [sys.executable, "-c", work, str(source), str(mountpoint), *options],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": str(threads)},
    )
