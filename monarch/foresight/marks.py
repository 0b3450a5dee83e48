"""What is known of each file: whether it was opened, given out or fetched. One byte for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from monarch.errors import SnapshotError
from monarch.types import ROOT_INO, Ino

if TYPE_CHECKING:
    import numpy.typing as npt

# It was opened since the mount began. It was given out, or fetched ahead, and not opened since.
# The source does not have it any more as the mount shows it: it was removed, or written.
READ, GIVEN, FETCHED, GONE = 1, 2, 4, 8
AHEAD = GIVEN | FETCHED
# Entries of the snapshot whose kind is read at once.
_SLICE = 1 << 15


class Names(Protocol):
    """What is needed of the snapshot. ``files_in``: the numbers, and more, of the regular files
    among consecutive entries."""

    @property
    def entries(self) -> int: ...
    def files_in(self, slots: range) -> tuple[npt.NDArray[np.int64], Any, Any]: ...


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

    def leave(self, names: Names, inos: Sequence[Ino]) -> None:
        """Marks the files among ``inos``, maybe millions, as gone."""
        are_gone = np.zeros(names.entries + 1, np.bool_)
        are_gone[inos] = True
        for start in range(ROOT_INO, len(are_gone), _SLICE):
            slots = range(start, min(start + _SLICE, len(are_gone)))
            if not are_gone[start : slots.stop].any():
                continue
            try:
                files = names.files_in(slots)[0]
            except SnapshotError:
                continue
            for ino in files[are_gone[files]].tolist():
                self.set(ino, GONE)

    def add(self, part: Part) -> None:
        """Counts the files of a part from now on."""
        marks = np.frombuffer(self.of, np.uint8)[part.files.start : part.files.stop]
        part.read = int(np.count_nonzero(marks & READ))
        part.ahead = int(np.count_nonzero(marks & AHEAD))
        part.gone = int(np.count_nonzero(marks & GONE))
        self._parts.append(part)

    def remove(self, part: Part) -> None:
        self._parts.remove(part)
