"""Decides which chunks of a pack are read as a whole, and which of their files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True, slots=True)
class ChunkPlans:
    """The files that wait in memory for their readers have at most ``_window_bytes`` bytes."""

    _chunks: PackChunks
    _controller: Controller
    _uses: Uses
    _window_bytes: int

    def of(self, ino: Ino, chunk: int, *, forced: bool = False) -> Plan | None:
        """What of a chunk to read when one of its files is needed; None: that file alone. The first
        questions are cheap: they are asked at each open of a file that has no copy."""
        member = self._chunks.member(ino)
        if self._controller.admits(Item(ino, member.size, member.number), forced=forced):
            _, total = self._chunks.missing_totals(chunk)
            whole = Item(ino, total, member.number)
            if self._controller.admits(whole, forced=forced):
                return Plan(self._chunks.missing(chunk), True, total)
        if not self._uses.has_orders or self._controller.is_excluded(ino):
            return None
        return self._for_window(ino, chunk)

    def _for_window(self, ino: Ino, chunk: int) -> Plan | None:
        """The files of a chunk that an announced order has close together: before the window would
        be full of the files that are opened meanwhile."""
        first, next_use = self._uses.next_use(ino), self._uses.next_use
        if first == math.inf or not self._window_bytes:
            return None
        sample = self._chunks.sample(chunk)
        files, total = self._chunks.missing_totals(chunk)
        if not total:
            return None
        reach = self._window_bytes * files / total
        close = sum(abs(next_use(each) - first) <= reach for each in sample)
        if close < _TOGETHER * len(sample):
            return None
        members = self._chunks.missing(chunk)
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
