"""Files of objects as processes use them, for parts of the drain that ask about that."""

from __future__ import annotations

from monarch.writeback.fast_writes import UNTOUCHED


class FilesInUse:
    """``dead`` objects have no name, ``written`` ones are open for writing, and ``lowest_of`` tells
    the lowest offset that was changed since the last content. ``skipped`` are those left out."""

    def __init__(self) -> None:
        self.dead: set[int] = set()
        self.written: set[int] = set()
        self.lowest_of: dict[int, int] = {}
        self.skipped: list[int] = []

    def is_dead(self, object: int) -> bool:
        return object in self.dead

    def is_written(self, object: int) -> bool:
        return object in self.written

    def lowest(self, object: int) -> int:
        return self.lowest_of.get(object, UNTOUCHED)

    def left_out(self, object: int) -> None:
        self.skipped.append(object)
