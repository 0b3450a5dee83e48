"""Memory, threads and processor time of processes, as the kernel reports them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.equipment.waiting import wait_until


def is_running(pid: int) -> bool:
    """Whether a process does anything more. A zombie does not, unless it has other threads."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state not in ("Z", "X") or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def stop(pid: int) -> None:
    """Stops a process with all its threads. Until a thread gets the signal it may take a request
    of the kernel that it does not answer, and who waits for that answer cannot be killed."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")

    def is_stopped() -> bool:
        states = [(task / "stat").read_text().rpartition(")")[2] for task in tasks.iterdir()]
        return all(state.split()[0] == "T" for state in states)

    wait_until(is_stopped, f"process {pid} stops")


def waits_in(pid: int) -> str:
    """Where the threads of a process wait in the kernel, for a report; empty without the right."""
    lines = []
    for stack in Path(f"/proc/{pid}/task").glob("*/stack"):
        with suppress(OSError):
            lines.append(f"{stack.parent.name}: {' '.join(stack.read_text().split())}")
    return "; ".join(lines)


def status_field(pid: int, name: str) -> int:
    """A number of /proc/PID/status: ``ThreadPool``, or ``RssAnon`` in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[name].split()[0])


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += family(int(child))
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its descendants, to the microsecond."""
    # The clock of another process, as clock_getcpuclockid(3) makes it.
    return sum(time.clock_gettime(~member << 3 | 2) for member in family(pid))


def anonymous_bytes(pid: int) -> int:
    """Memory that maps no file (RssAnon), of a process and its descendants."""
    return sum(status_field(member, "RssAnon") for member in family(pid)) * 1024
