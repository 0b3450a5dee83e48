"""Processes that get no pipe of the kind that does not wait, and their tries (``pipes.c``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_CODE = Path(__file__).with_name("pipes.c")
_NUMBER_BYTES = 8


class RefusedPipes:
    """``by`` is what to put before a command line. ``directory`` is the test's own."""

    def __init__(self, directory: Path) -> None:
        library = directory / "pipes.so"
        subprocess.run(
            [
                *("gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
                *(str(_CODE), "-o", str(library)),
            ],
            check=True,
        )
        self._file = directory / "pipes"
        self._file.write_bytes(bytes(_NUMBER_BYTES))
        self.by = ("env", f"LD_PRELOAD={library}", f"TEST_PIPES={self._file}")

    @property
    def tries(self) -> int:
        return int.from_bytes(self._file.read_bytes(), sys.byteorder)
