"""Files of objects as processes use them, for parts of the drain that ask about that."""

from __future__ import annotations

from typing import cast

from monarch.namespace.namespace import Namespace
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.open_file import UNTOUCHED


class FilesInUse(ObjectTable):
    """``dead`` objects have no name, ``written`` ones are open for writing, and ``lowest_of`` tells
    the lowest offset that was changed since the last content. ``skipped`` are those left out."""

    def __init__(self) -> None:
        super().__init__(cast(Namespace, None))
        self.dead: set[int] = set()
        self.written: set[int] = set()
        self.lowest_of: dict[int, int] = {}
        self.skipped: list[int] = []

    def is_dead(self, number: int) -> bool:
        return number in self.dead

    def is_written(self, number: int) -> bool:
        return number in self.written

    def lowest(self, number: int) -> int:
        return self.lowest_of.get(number, UNTOUCHED)

    def left_out(self, number: int) -> None:
        self.skipped.append(number)
