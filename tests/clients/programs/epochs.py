"""Reads all files of a mount in epochs, and compares each with its digest.

    python epochs.py MOUNT DIGESTS DIRECTORY EPOCHS

DIGESTS is a file with the digest of each name, JSON. In the middle of each epoch the program makes
the file ``half-NODE-EPOCH`` in DIRECTORY and waits for the file ``half-EPOCH``; at the end of the
epoch it makes ``whole-NODE-EPOCH`` and waits for ``whole-EPOCH``. At last it makes ``end-NODE``
with the names of all files that had other bytes. NODE is the name of the host.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path


def main(mount: Path, digests: Path, directory: Path, epochs: int) -> None:
    expected: dict[str, str] = json.loads(digests.read_text())
    node = socket.gethostname()
    # Each node has an order of its own.
    names = sorted(expected, key=lambda name: hashlib.sha256((node + name).encode()).digest())
    wrong: list[str] = []
    for epoch in range(1, epochs + 1):
        for number, name in enumerate(names):
            if number == len(names) // 2:
                meet(directory, "half", node, epoch)
            if hashlib.sha256((mount / name).read_bytes()).hexdigest() != expected[name]:
                wrong.append(name)
        meet(directory, "whole", node, epoch)
    staged = directory / f".end-{node}-{os.getpid()}"
    staged.write_text(json.dumps(wrong))
    staged.rename(directory / f"end-{node}")


def meet(directory: Path, moment: str, node: str, epoch: int) -> None:
    (directory / f"{moment}-{node}-{epoch}").touch()
    while not (directory / f"{moment}-{epoch}").exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
