"""A wall clock that a test can make jump, for the processes that it starts (``clock.c``)."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

_CODE = Path(__file__).with_name("clock.c")
DAY_S = 86_400


class Clock:
    """``by`` is what to put before a command line. ``directory`` is the test's own."""

    def __init__(self, directory: Path) -> None:
        library = directory / "clock.so"
        subprocess.run(
            [
                *("gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
                *(str(_CODE), "-o", str(library)),
            ],
            check=True,
        )
        self._file = directory / "clock"
        self._file.write_bytes(bytes(8))
        self.by = ("env", f"LD_PRELOAD={library}", f"TEST_CLOCK={self._file}")

    def move(self, seconds: int) -> None:
        """From now on the clock is so far from the true one, also for those who run already."""
        fd = os.open(self._file, os.O_WRONLY)
        try:
            os.pwrite(fd, struct.pack("=q", seconds), 0)
        finally:
            os.close(fd)
