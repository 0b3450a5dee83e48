"""What is known of each file: whether it was opened, given out or fetched. One byte for each."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from monarch.types import Ino

# It was opened since the mount began. It was given out, or fetched ahead, and not opened since.
READ, GIVEN, FETCHED = 1, 2, 4
AHEAD = GIVEN | FETCHED


class Part(Protocol):
    """Files that are counted together: those that were read, and those that are ahead of it."""

    files: range
    read: int
    ahead: int


class Marks:
    """The marks of the inodes 0 to ``entries``. ``of`` must be changed by ``set`` only."""

    def __init__(self, entries: int) -> None:
        self.of = bytearray(entries + 1)
        self.fetched = 0
        self._parts: list[Part] = []

    def set(self, ino: Ino, mark: int) -> None:
        before = self.of[ino]
        self.of[ino] = mark
        self.fetched += bool(mark & FETCHED) - bool(before & FETCHED)
        read = bool(mark & READ) - bool(before & READ)
        ahead = bool(mark & AHEAD) - bool(before & AHEAD)
        for part in self._parts:
            if ino in part.files:
                part.read += read
                part.ahead += ahead

    def add(self, part: Part) -> None:
        """Counts the files of a part from now on."""
        marks = np.frombuffer(self.of, np.uint8)[part.files.start : part.files.stop]
        part.read = int(np.count_nonzero(marks & READ))
        part.ahead = int(np.count_nonzero(marks & AHEAD))
        self._parts.append(part)

    def remove(self, part: Part) -> None:
        self._parts.remove(part)
