"""Syncs of written files that fail or hang, in the processes started by it (``syncs.c``)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_CODE = Path(__file__).with_name("syncs.c")


class Syncs:
    """``by`` is what to put before a command line. ``directory`` is the test's own."""

    def __init__(self, directory: Path) -> None:
        library = directory / "syncs.so"
        subprocess.run(
            [
                *("gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
                *(str(_CODE), "-o", str(library)),
            ],
            check=True,
        )
        self._file = directory / "syncs"
        self._file.write_bytes(b" ")
        self.by = ("env", f"LD_PRELOAD={library}", f"TEST_SYNCS={self._file}")

    def fail_once(self) -> None:
        self._set(b"f")

    def hang(self) -> None:
        """Until ``go_on``."""
        self._set(b"s")

    def go_on(self) -> None:
        self._set(b" ")

    def _set(self, mode: bytes) -> None:
        fd = os.open(self._file, os.O_WRONLY)
        try:
            os.pwrite(fd, mode, 0)
        finally:
            os.close(fd)
