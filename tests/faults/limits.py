"""Control groups that limit the memory or threads of a process of any user."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

_TOP = Path("/sys/fs/cgroup")
# The file of the limit in version 1 and in version 2.
_LIMITS = {
    "memory": ("memory.limit_in_bytes", "memory.max"),
    "pids": ("pids.max", "pids.max"),
}


@dataclass(frozen=True, slots=True)
class Group:
    """A control group of this test; ``limit`` may be changed at any time."""

    directory: Path
    _limit: str

    def limit(self, number: int | None) -> None:
        unlimited = "-1" if self._limit == "memory.limit_in_bytes" else "max"
        (self.directory / self._limit).write_text(unlimited if number is None else str(number))

    def add(self, pid: int) -> None:
        """All threads of the process, and what it starts from now on."""
        (self.directory / "cgroup.procs").write_text(str(pid))

    def killed(self) -> int:
        """How many processes of it the kernel has killed for want of memory."""
        for name in ("memory.oom_control", "memory.events"):
            path = self.directory / name
            if path.exists():
                words = path.read_text().split()
                return int(words[words.index("oom_kill") + 1])
        return 0


@contextmanager
def control_group(controller: Literal["memory", "pids"]) -> Iterator[Group]:
    """A new group; skips where none can be made. Processes that are still in it at the end are
    moved out."""
    first, second = _LIMITS[controller]
    version_1 = _TOP / controller
    above, name = (version_1, first) if version_1.is_dir() else (_TOP, second)
    directory = above / f"monarch-test-{uuid.uuid4().hex[:8]}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        if not (directory / name).exists():
            pytest.skip(f"this machine's control groups do not limit {controller}")
        yield Group(directory, name)
    finally:
        for pid in (directory / "cgroup.procs").read_text().split():
            (above / "cgroup.procs").write_text(pid)
        os.rmdir(directory)
