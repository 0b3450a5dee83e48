"""Checks what the daemon's process needs of its machine: memory, descriptors, its log."""

from __future__ import annotations

import errno
import math
import os
import re
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from monarch.posix.cgroups import memory_groups
from monarch.telemetry.health import Problem, Spell
from monarch.telemetry.log import Logbook
from monarch.text import counted
from monarch.units import GiB, format_bytes

# An internal error leaves no trace: it is reported for this long after its last occurrence.
_INTERNAL_S = 3600.0
# Descriptors, or the memory of a control group, are reported as scarce above this share in use.
_SCARCE_SHARE = 0.9
# Greatest age of the kernel's figures of the memory: reading them takes a third of the time of
# a status report.
_MEMORY_S = 1.0
# Memory is scarce if less than this share, and less than this size, is available.
_LEAST_AVAILABLE_SHARE = 0.02
_LEAST_AVAILABLE = GiB
# Memory that a control group cannot reclaim by dropping pages: the keys of versions 2 and 1.
_PINNED = r"^(anon|shmem|total_rss|total_shmem) (\d+)$"


class ProcessCheck:
    """``clock`` is monotonic; /proc and /sys are below ``root``."""

    def __init__(
        self,
        logbook: Logbook,
        *,
        clock: Callable[[], float] = time.monotonic,
        root: Path = Path("/"),
    ) -> None:
        self._logbook = logbook
        self._clock = clock
        self._root = root
        self._internal = Spell(_INTERNAL_S)
        # The result of the last check of the memory, and its time.
        self._memory: Sequence[Problem] = ()
        self._memory_seen_s = -math.inf

    def problems(self) -> Iterator[Problem]:
        spell, path = self._internal, self._logbook.path
        if spell.goes_on(self._logbook.exceptions, now_s=self._clock(), wall_ns=time.time_ns()):
            times = counted(spell.number, "time", "times")
            yield Problem(
                "internal-error",
                f"internal error, {times}; the calls concerned failed with EIO",
                spell.since_ns,
                f"this is a bug, please report it with the traceback in {path}; the mount"
                " continues",
            )
        trouble = self._logbook.trouble()
        if trouble is not None:
            yield Problem(
                "log-unwritable",
                f"the log {path} cannot be written: {trouble.what}",
                trouble.since_ns,
                f"free space or repair the disk: `df {path}`; reads are served",
            )
        yield from self._of_memory()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY and _descriptors() > limit * _SCARCE_SHARE:
            yield Problem(
                "descriptors-scarce",
                f"more than {_SCARCE_SHARE:.0%} of {limit} file descriptors are in use",
                remedy=f"as root `prlimit --pid {os.getpid()} --nofile=1048576` raises the limit"
                " now; LimitNOFILE= of the unit, or limits.conf, for the next mount",
            )

    def _of_memory(self) -> Sequence[Problem]:
        now = self._clock()
        if now - self._memory_seen_s > _MEMORY_S:
            what = self._full_group() or self._full_machine()
            remedy = (
                "the kernel may kill the daemon, then reads fail: end processes that use memory,"
                " raise the limit, or give a tier in memory less capacity"
            )
            self._memory_seen_s = now
            self._memory = [Problem("memory-scarce", what, 0, remedy)] if what else ()
        return self._memory

    def _full_machine(self) -> str:
        """A sentence about the machine if it is short of memory, or empty."""
        told = _numbers(self._root / "proc/meminfo", r"^(MemTotal|MemAvailable):\s+(\d+) kB$")
        total, available = (told.get(f"Mem{name}", 0) * 1024 for name in ("Total", "Available"))
        if total and available < min(total * _LEAST_AVAILABLE_SHARE, _LEAST_AVAILABLE):
            shown = f"{format_bytes(available)} of {format_bytes(total)} are available"
            return f"the machine is short of memory: {shown}"
        return ""

    def _full_group(self) -> str:
        """A sentence about a control group that has nearly used up its memory, or empty."""
        for directory, limit in memory_groups(self._root):
            pinned = sum(_numbers(directory / "memory.stat", _PINNED).values())
            if limit and pinned > limit * _SCARCE_SHARE:
                shown = f"{format_bytes(pinned)} of {format_bytes(limit)}"
                return f"the control group {directory} is short of memory: {shown} are in use"
        return ""


def _numbers(path: Path, pattern: str) -> dict[str, int]:
    """The names and numbers that ``pattern`` finds in ``path``; empty if it cannot be read."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    return {name: int(number) for name, number in re.findall(pattern, text, re.MULTILINE)}


def _descriptors() -> int:
    """The number of open descriptors; the limit if none is free for the listing."""
    try:
        # Linux 6.2 and later report the number as st_size; listing a million takes a second.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return 0
