"""Small files of a source that have no path of their own there: extents of larger files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Lender(Protocol):
    """Has the larger files open, and lends their descriptors from now on: ``lend`` is called with
    the number of a file and its descriptor, ``take_back`` with the number before that is closed."""

    def lend_to(
        self, lend: Callable[[int, int], None], take_back: Callable[[int], None]
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Extents:
    """Arrays by the inode number at the source, which support the buffer protocol: the number of
    the larger file (u32; at least ``files`` for a file that is in none), the offset in it in bytes
    (u64), and the XXH3 of the bytes (u64)."""

    file: object
    offset: object
    digest: object
    files: int
    lender: Lender
