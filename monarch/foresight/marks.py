"""What is known of each file: whether it was opened, given out or fetched. One byte for each."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from monarch.types import Ino

# It was opened since the mount began. It was given out, or fetched ahead, and not opened since.
# The source does not have it any more as the mount shows it: it was removed, or written.
READ, GIVEN, FETCHED, GONE = 1, 2, 4, 8
AHEAD = GIVEN | FETCHED


class Part(Protocol):
    """Files that are counted together: those that were read, those that are ahead of it, and those
    that are gone."""

    files: range
    read: int
    ahead: int
    gone: int


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
        gone = bool(mark & GONE) - bool(before & GONE)
        for part in self._parts:
            if ino in part.files:
                part.read += read
                part.ahead += ahead
                part.gone += gone

    def add(self, part: Part) -> None:
        """Counts the files of a part from now on."""
        marks = np.frombuffer(self.of, np.uint8)[part.files.start : part.files.stop]
        part.read = int(np.count_nonzero(marks & READ))
        part.ahead = int(np.count_nonzero(marks & AHEAD))
        part.gone = int(np.count_nonzero(marks & GONE))
        self._parts.append(part)

    def remove(self, part: Part) -> None:
        self._parts.remove(part)
