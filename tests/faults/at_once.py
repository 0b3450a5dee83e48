"""``python -m tests.faults.at_once DIRECTORY READERS [HOW] < TREE``: reads all files at once.

TREE is a JSON object from names below DIRECTORY to sizes; ``contents`` computes the bytes of a file
from its name. Writes a JSON object with the number of files that were "right", "wrong", or failed
with an error. HOW is ``--until-gone``: list and read until a result is wrong, and print it; or
``--amid-kills``: read half of the files while other processes that read all files are killed.

It is a process of its own, so that a test can kill it at any time.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conftest import contents
from tests.mount.observe import read_through

_KILLED = 5


def outcome(path: Path, expected: bytes) -> str:
    """Read a file whole: "right", "wrong", or the name of the error."""
    try:
        return "right" if read_through(path) == expected else "wrong"
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def main(directory: Path, readers: int, sizes: dict[str, int]) -> None:
    def read(name: str) -> str:
        return outcome(directory / name, contents(name, sizes[name]))

    with ThreadPoolExecutor(readers) as pool:
        print(json.dumps(Counter(pool.map(read, sizes))))


def amid_kills(directory: Path, readers: int, sizes: dict[str, int]) -> None:
    """As ``main``, while processes that do the same are killed amid it."""
    others = []
    for _ in range(_KILLED):
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            main(directory, readers, sizes)
            signal.pause()
        others.append(pid)
    half = dict(list(sizes.items())[: len(sizes) // 2])
    main(directory, readers, half)
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    for pid in others:
        os.waitpid(pid, 0)


def until_gone(directory: Path, readers: int, sizes: dict[str, int]) -> None:
    expected = {name: contents(name, size) for name, size in sizes.items()}
    above = sorted({os.path.dirname(name) for name in sizes})

    def read_on(seed: int) -> str:
        dice = random.Random(seed)
        while True:
            name = dice.choice(list(expected))
            came = outcome(directory / name, expected[name])
            if came != "right":
                return came
            try:
                if not os.listdir(directory / dice.choice(above)):
                    return "an empty directory"
            except OSError as error:
                return errno.errorcode[error.errno or 0]

    with ThreadPoolExecutor(readers) as pool:
        print(json.dumps(Counter(pool.map(read_on, range(readers)))))


if __name__ == "__main__":
    runs = {"--until-gone": until_gone, "--amid-kills": amid_kills}
    run = runs[sys.argv[3]] if sys.argv[3:] else main
    run(Path(sys.argv[1]), int(sys.argv[2]), json.load(sys.stdin))
