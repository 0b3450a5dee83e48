"""The units in which missing granules of one open file are fetched from the source.

A unit begins as small as the read that needs it. A read that continues where an earlier range ended
is taken for sequential: its range has twice the size of the one before, up to 32 MiB. A range ends
before the next granule that is not missing, is not admitted, or is being fetched, so each byte is
fetched once. A range of more than 1 MiB has several units: the first is what the reader needs, and
the others are fetched ahead of it. So bytes that the source does not deliver delay no reader of
bytes that are farther away, and those that are nearer for a short time only (unit_fetches.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import trio

from monarch.errors import SourceError
from monarch.placement.parts import BLOCK, PartAdmission
from monarch.text import KiB
from monarch.tiers.partial import ABSENT, GRANULE, PartialFile
from monarch.types import Identity, Ino

# The greatest range, in granules: 32 MiB.
_MOST = 256
# The granules of a unit that is fetched ahead, and of a range that is one unit: 1 MiB.
_PIECE = 8
# The bytes that a client of the source reads ahead: Linux reads up to 128 KiB by default, or as
# much as was requested, and as much again when a reader comes to these.
_READ_AHEAD = 256 * KiB
# Sequential readers of one file that are followed at the same time.
_FOLLOWED = 16
_GRANULES_OF_BLOCK = BLOCK // GRANULE


@dataclass(slots=True, eq=False)
class Unit:
    """The granules from ``start`` to before ``stop``, which are being fetched or stored. When it is
    ``done``, it has ``data``, or an ``error``, or neither: then the fetch was given up. ``apart``
    has granules of it that are fetched alone, since the unit is late."""

    start: int
    stop: int
    done: trio.Event = field(default_factory=trio.Event)
    data: bytes | None = None
    error: SourceError | None = None
    apart: dict[int, Unit] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class OpenPart:
    """A partial copy that is open. ``users`` are the bindings that read it, ``storing`` the units
    that wait to be written. ``is_dropped``: it must not be used any more. ``settling`` is set while
    it is being closed or completed, and ends with it. ``created``: if its file did not exist, set
    when it was created, or could not be. ``digest`` is that of the whole file."""

    ino: Ino
    identity: Identity
    admission: PartAdmission
    file: PartialFile
    unused: Callable[[OpenPart], None]
    users: int = 0
    storing: int = 0
    is_dropped: bool = False
    settling: trio.Event | None = None
    created: trio.Event | None = None
    digest: bytes | None = None
    units: dict[int, Unit] = field(default_factory=dict)
    # For each sequential reader the end of its last range, and the number of its granules.
    _ends: OrderedDict[int, int] = field(default_factory=OrderedDict)

    @property
    def tier(self) -> int:
        return self.admission.tier

    @property
    def is_used(self) -> bool:
        return bool(self.users or self.storing)

    def can_settle(self) -> bool:
        """Whether it is open and not used, and is not being settled."""
        return not self.is_used and self.settling is None and self.file.fd >= 0

    def leave(self) -> None:
        """Removes one user."""
        self.users -= 1
        if not self.is_used:
            self.unused(self)

    def admits(self, granule: int) -> bool:
        blocks = self.admission.blocks
        return blocks is None or blocks[granule // _GRANULES_OF_BLOCK] == 1

    def is_missing(self, granule: int) -> bool:
        """Whether a granule must be read from the source."""
        return self.file.map[granule] == ABSENT and granule not in self.units

    def missing_until(self, start: int, stop: int) -> int:
        """The end of the granules from ``start`` on, before ``stop``, that are missing, and are
        admitted if that one is."""
        end, admitted = start + 1, self.admits(start)
        while end < stop and self.is_missing(end) and self.admits(end) == admitted:
            end += 1
        return end

    def is_held_behind(self, offset: int, size: int) -> bool:
        """Whether the tier has bytes that the client of the source may read ahead of a read; False
        if all granules are admitted."""
        if self.admission.blocks is None:
            return False
        first, end = (offset + size) // GRANULE, offset + size + max(_READ_AHEAD, 2 * size)
        return any(state != ABSENT for state in self.file.map[first : -(-end // GRANULE)])

    def begin(self, start: int, stop: int, *, room: int) -> list[Unit]:
        """New units, one behind the other, from the missing granule ``start`` on. The first has
        those before ``stop`` that follow it; the others are not needed yet. There may be others if
        all units have at most ``room`` bytes."""
        grown = min(2 * self._ends.pop(start, 0), _MOST, room // GRANULE)
        end = min(max(stop, start + grown), self.file.layout.granules)
        end = self.missing_until(start, end)
        self._ends[end] = end - start
        if len(self._ends) > _FOLLOWED:
            self._ends.popitem(last=False)
        edges = [start, end]
        if end - start > _PIECE and stop < end:
            edges = [start, *range(stop, end, _PIECE), end]
        units = [Unit(*edge) for edge in pairwise(edges)]
        for unit in units:
            for granule in range(unit.start, unit.stop):
                self.units[granule] = unit
        return units

    def size_of(self, unit: Unit) -> int:
        """The bytes of a unit."""
        return self.file.layout.length(unit.start, unit.stop)

    def end(self, unit: Unit) -> None:
        """The unit is stored, or will not be."""
        for granule in range(unit.start, unit.stop):
            self.units.pop(granule, None)
