"""Where a data set is made: a new place with room for it, and progress on the terminal."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from monarch.text import format_bytes

# Data sets have no time of their own, so that the same arguments give the same bytes.
ARCHIVE_MTIME = 1_600_000_000


class DatasetError(Exception):
    """A data set that cannot be made: what, where and what to do, in one line."""


class Meter:
    """Progress on standard error: one line that is updated on a terminal, and a summary."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._done = self._bytes = 0
        self._begin = self._shown = time.monotonic()
        self._on_terminal = sys.stderr.isatty()

    def add(self, count: int, size: int = 0) -> None:
        self._done += count
        self._bytes += size
        now = time.monotonic()
        if self._on_terminal and now - self._shown > 0.1:
            self._shown = now
            percent = 100 * self._done // max(self._total, 1)
            line = f"{self._what}: {self._done:,} of {self._total:,} ({percent} %)"
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    def finish(self, where: Path) -> None:
        seconds = time.monotonic() - self._begin
        start = "\r\x1b[K" if self._on_terminal else ""
        size = f", {format_bytes(self._bytes)}" if self._bytes else ""
        sys.stderr.write(f"{start}{where}: {self._done:,} {self._what}{size} in {seconds:.1f} s\n")


def new_directory(path: Path, *, needs: int) -> Path:
    """Make an empty directory, where there is room for ``needs`` bytes."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DatasetError(f"{path} exists and is not empty; remove it or name another one")
    path.mkdir(parents=True, exist_ok=True)
    _check_room(path, needs)
    return path


def new_file(path: Path, *, needs: int) -> Path:
    """Check that there is no such file, and that there is room for one of ``needs`` bytes."""
    if path.exists():
        raise DatasetError(f"{path} exists; remove it or name another one")
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_room(path.parent, needs)
    return path


def _check_room(path: Path, needs: int) -> None:
    free = shutil.disk_usage(path).free
    if needs > free:
        raise DatasetError(
            f"{path} has {format_bytes(free)} free and this needs {format_bytes(needs)}; "
            "ask for less or name another place"
        )


def shares(total: int, parts: int) -> list[int]:
    """``total`` in as many equal parts, of which the first may be larger by one."""
    return [total // parts + (part < total % parts) for part in range(parts)]
