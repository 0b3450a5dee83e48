"""The brokers of staging areas, as processes."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from tests.equipment.waiting import wait_until


def brokers(directory: Path) -> list[int]:
    """The processes that have the directory of an area in their command, without its jobs."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if os.fsencode(directory) in command and b"-I" in command:
                found.append(int(entry.name))
    return found


def kill_brokers(directory: Path) -> None:
    """The jobs may start another one meanwhile."""
    killed = set(brokers(directory))
    for pid in killed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not killed & set(brokers(directory)), "the broker ends")
