"""Trains on the files of a directory, a batch each, in the loop that `monarch analyze` measures.

    python measured.py FILES DIRECTORY [HANGS]

With HANGS the training stops for ten minutes at its first batch of the run that reads files from
the source, after it has made the file ``hangs`` in DIRECTORY.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import monarch


class Loader:
    """Yields the content of one file after the other."""

    def __init__(self, files: Path) -> None:
        self._paths = sorted(path for path in files.rglob("*") if path.is_file())

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> Iterator[bytes]:
        for path in self._paths:
            yield path.read_bytes()


def main(files: Path, directory: Path, *, hangs: bool) -> None:
    loader = Loader(files)
    while True:
        for _ in monarch.watch(loader):
            if hangs and os.environ["MONARCH_PHASE"] == "real":
                (directory / "hangs").touch()
                time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), hangs=sys.argv[3:] == ["hangs"])
