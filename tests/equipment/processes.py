"""Memory, threads and processor time of processes, as the kernel reports them."""

from __future__ import annotations

import os
import time
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process does anything more. A zombie does not, unless it has other threads."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state not in ("Z", "X") or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


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
