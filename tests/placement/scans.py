"""Which opens are part of a scan: by the definition alone, without windows and tests of hypotheses.

A scan is one process that reads the files of a directory for the first time, in the order of the
names, as ``cp -r``, ``grep -r`` and a backup do. The definition holds for all opens of a job in the
directory until now, so it is true of the first open of any job: ``is_settled`` says since how many
opens the answer is the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

Open = tuple[int, int]


@dataclass
class ScanByDefinition:
    """The opens of one job in one directory."""

    seen: set[int] = field(default_factory=set)
    processes: set[int] = field(default_factory=set)
    last: int = 0
    is_scan: bool = True
    same_for: int = 0

    def add(self, process: int, ino: int) -> None:
        self.processes.add(process)
        is_scan = (
            self.is_scan and ino > self.last and ino not in self.seen and len(self.processes) == 1
        )
        self.seen.add(ino)
        self.last = ino
        self.same_for = self.same_for + 1 if is_scan == self.is_scan else 1
        self.is_scan = is_scan

    def is_settled(self, opens: int) -> bool:
        return self.same_for > opens


def histories(files: range, rng: random.Random) -> Iterator[tuple[str, list[Open]]]:
    """Opens of one job, as pairs of a process and a file."""
    whole, n = list(files), len(files)
    end = rng.randrange(n // 2, n)
    mixed = rng.sample(files, n)
    yield "cp -r", [(1, ino) for ino in whole]
    yield "cp -r that is interrupted", [(1, ino) for ino in whole[:end]]
    yield "cp -r of files that are missing", [(1, ino) for ino in whole if rng.random() < 0.8]
    yield "cp -r, and once more", [(1, ino) for ino in (*whole, *whole)]
    yield (
        "cp -r, and a program that reads on",
        [
            *((1, ino) for ino in whole[:end]),
            *((1, ino) for ino in rng.sample(whole[end:], n - end)),
            *((1, ino) for ino in rng.sample(whole, n)),
        ],
    )
    yield (
        "two epochs, then cp -r",
        [
            *((1, ino) for ino in (*mixed, *rng.sample(files, n))),
            *((2, ino) for ino in whole),
        ],
    )
    yield "in order by two processes", [(1 + number % 2, ino) for number, ino in enumerate(whole)]
    yield "in order by many processes", [(rng.randrange(1, 9), ino) for ino in whole]
    yield "shuffled", [(1, ino) for ino in mixed]
    yield "against the order", [(1, ino) for ino in reversed(whole)]
    yield "again and again", [(1, files[int(n * rng.random() ** 4)]) for _ in range(2 * n)]
