"""Decides which chunks of a pack are read as a whole, and which of their files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from monarch.packmount.chunks import Member, PackChunks
from monarch.placement.controller import Controller
from monarch.placement.policy import Item
from monarch.types import Ino

# The least share of the missing bytes of a chunk that an order must have close together.
_TOGETHER = 0.5


@dataclass(slots=True, eq=False)
class Plan:
    """The files of a chunk that are read: into a tier if ``is_copied``, else into the window, those
    that are opened up to the time ``end``."""

    members: list[Member]
    is_copied: bool
    nbytes: int
    end: float = math.inf


class Uses(Protocol):
    """The announced orders. Times are numbers of opens. ``following`` returns of each order the
    next files, at most ``most``; 0 is none."""

    @property
    def has_orders(self) -> bool: ...
    def next_use(self, ino: Ino) -> float: ...
    def following(self, most: int) -> Iterator[Sequence[int]]: ...


def _never(ino: Ino) -> bool:
    return False


@dataclass(slots=True)
class ChunkPlans:
    """The files that wait in memory for their readers have at most ``_window_bytes`` bytes.
    ``has_pages`` returns whether the kernel has the pages of a file and asks for no open."""

    _chunks: PackChunks
    _controller: Controller
    _uses: Uses
    _window_bytes: int
    has_pages: Callable[[Ino], bool] = _never

    def of(
        self, ino: Ino, chunk: int, *, is_ahead: bool = False, forced: bool = False
    ) -> Plan | None:
        """What of a chunk to read when one of its files is needed, by a reader unless ``is_ahead``;
        None: that file alone. The first questions are cheap: they are asked at each open of a file
        that has no copy."""
        member = self._chunks.member(ino)
        if self._controller.admits(Item(ino, member.size, member.number), forced=forced):
            _, total = self._chunks.missing_totals(chunk)
            whole = Item(ino, total, member.number)
            if self._controller.admits(whole, forced=forced):
                return Plan(self._chunks.missing(chunk), True, total)
        if not self._uses.has_orders or self._controller.is_excluded(ino):
            return None
        # A reader that needs a file again shows that the kernel has dropped its pages.
        has_pages = self.has_pages if is_ahead or not self.has_pages(ino) else _never
        return self._for_window(ino, chunk, has_pages)

    def _for_window(self, ino: Ino, chunk: int, has_pages: Callable[[Ino], bool]) -> Plan | None:
        """The files of a chunk that an announced order has close together: before the window would
        be full of the files that are opened meanwhile. No reader takes one with pages from it."""
        first, next_use = self._uses.next_use(ino), self._uses.next_use
        if first == math.inf or not self._window_bytes:
            return None
        sample = [each for each in self._chunks.sample(chunk) if not has_pages(each)]
        files, total = self._chunks.missing_totals(chunk)
        if not (sample and total):
            return None
        reach = self._window_bytes * files / total
        close = sum(abs(next_use(each) - first) <= reach for each in sample)
        if close < _TOGETHER * len(sample):
            return None
        members = [each for each in self._chunks.missing(chunk) if not has_pages(each.ino)]
        total = sum(each.size for each in members)
        uses = [next_use(each.ino) for each in members]
        end = min(uses, default=math.inf) + reach
        is_excluded = self._controller.is_excluded
        chosen = [
            member
            for member, use in zip(members, uses, strict=True)
            if use <= end and not is_excluded(member.ino)
        ]
        nbytes = sum(member.size for member in chosen)
        if nbytes < _TOGETHER * total or self._uses.next_use(ino) > end:
            return None
        return Plan(chosen, False, nbytes, end)
