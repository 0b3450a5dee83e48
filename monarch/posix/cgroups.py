"""What the control groups of this process allow it: memory and tasks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def memory_bytes(root: Path) -> int:
    """Bytes of memory that this process may use: the machine's, or the limit of a control group. 0
    if the memory of the machine is unknown."""
    total, _ = machine_memory(root)
    return min([total, *(limit for _, limit in memory_groups(root))]) if total else 0


def machine_memory(root: Path) -> tuple[int, int]:
    """Bytes of memory of the machine: in total, and available. 0 where it is unknown."""
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return 0, 0
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    return int(found.get("MemTotal", 0)) * 1024, int(found.get("MemAvailable", 0)) * 1024


def memory_groups(root: Path) -> Iterator[tuple[Path, int]]:
    """The control groups that limit the memory of this process: the directory and the bytes."""
    return _groups(root, "memory", new="memory.max", old="memory.limit_in_bytes")


def pids_groups(root: Path) -> Iterator[tuple[Path, int]]:
    """The control groups that limit processes and threads: the directory and the limit."""
    return _groups(root, "pids", new="pids.max", old="pids.max")


def _groups(root: Path, controller: str, *, new: str, old: str) -> Iterator[tuple[Path, int]]:
    """Limits of control groups, from the files ``new`` of version 2 and ``old`` of version 1."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for group in groups:
        number, controllers, path = group.split(":", 2)
        if number == "0":
            tops, name = [mounted, mounted / "unified"], new
        elif controller in controllers.split(","):
            tops, name = [mounted / controller], old
        else:
            continue
        # A limit of a parent group holds as well. In a container the path may be that of the host;
        # what is mounted is then our own group, the last one visited.
        for top in tops:
            for below in (Path(path), *Path(path).parents):
                directory = top / below.relative_to("/")
                try:
                    text = (directory / name).read_text()
                except OSError:
                    continue
                # Without a limit version 2 has "max", version 1 a number beyond all memory.
                if text.strip().isdigit():
                    yield directory, int(text)


def group_of(pid: int, processes: Path = Path("/proc")) -> PurePosixPath | None:
    """The control group of a process, of version 2; None if it is in none, or has ended. A user may
    have made the group: its name may have any bytes but a line feed."""
    try:
        lines = (processes / str(pid) / "cgroup").read_bytes().split(b"\n")
    except OSError:
        return None
    found = (line.removeprefix(b"0::") for line in lines if line.startswith(b"0::"))
    return next((PurePosixPath(os.fsdecode(group)) for group in found), None)


def group_runs(group: PurePosixPath, mounted: Path = Path("/sys/fs/cgroup")) -> bool:
    """Whether a control group of version 2, or one beneath it, has a process. True if that cannot
    be seen."""
    if not (mounted / "cgroup.controllers").exists():
        return True
    directory = mounted / group.relative_to("/")
    try:
        return "populated 0" not in (directory / "cgroup.events").read_text().splitlines()
    except OSError:
        # The first group of all has no such file.
        return directory.exists()
