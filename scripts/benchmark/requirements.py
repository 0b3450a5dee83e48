"""What a benchmark needs of the machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from scripts.benchmark.rows import BenchError
from tests.equipment import slowfs

# The kernel keeps the attributes of the slow source for a second. A measurement waits until those
# that the one before it has brought are gone.
ATTRIBUTES_EXPIRE_S = 1.1


def require_slow_source() -> None:
    if reason := slowfs.unavailable():
        raise BenchError(f"there is no slow source: {reason}")


def require_room(directory: Path, size_bytes: float) -> None:
    if size_bytes > shutil.disk_usage(directory).free:
        needed = f"{size_bytes / 1e9:.0f} GB at {directory}"
        raise BenchError(f"this needs {needed}; name another --directory")
