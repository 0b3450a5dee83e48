"""``python -m tests.fuse.reading DIRECTORY SECONDS SEED TREE``: reads files in all ways.

TREE is a JSON object from names below DIRECTORY to sizes; ``contents`` computes the bytes of a file
from its name. An error, or a wrong byte, ends it with exit code 1 and one line.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import contents


def whole(fd: int, expected: bytes, dice: random.Random) -> bool:
    os.lseek(fd, 0, os.SEEK_SET)
    return b"".join(iter(lambda: os.read(fd, 1 << 20), b"")) == expected


def pieces(fd: int, expected: bytes, dice: random.Random) -> bool:
    for _ in range(6):
        at, size = dice.randrange(len(expected) + 10), dice.choice((1, 5000, 200_000))
        if os.pread(fd, size, at) != expected[at : at + size]:
            return False
    return True


def mapped(fd: int, expected: bytes, dice: random.Random) -> bool:
    if not expected:
        return True
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as pages:
        at = dice.randrange(len(expected))
        return pages[at : at + 100_000] == expected[at : at + 100_000]


def forgotten(fd: int, expected: bytes, dice: random.Random) -> bool:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return whole(fd, expected, dice)


WAYS: list[Callable[[int, bytes, random.Random], bool]] = [whole, pieces, mapped, forgotten]


def main(directory: Path, seconds: float, seed: int, tree: dict[str, int]) -> str | None:
    dice = random.Random(seed)
    expected = {name: contents(name, size) for name, size in tree.items()}
    kept: list[tuple[str, int]] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        name = dice.choice(list(expected))
        try:
            kept.append((name, os.open(directory / name, os.O_RDONLY)))
            # Some are read again later, while others come and go.
            name, fd = dice.choice(kept)
            if not dice.choice(WAYS)(fd, expected[name], dice):
                return f"wrong bytes in {name}"
        except OSError as error:
            return f"{name}: {error}"
        if len(kept) > 6:
            os.close(kept.pop(dice.randrange(len(kept)))[1])
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])))
