"""The units in which missing granules of one open file are fetched from the source.

A unit begins as small as the read that needs it. A read that continues where an earlier unit ended
is taken for sequential: its unit has twice the size of the one before, up to 32 MiB. A unit ends
before the next granule that is not missing, is not admitted, or is being fetched, so each byte is
fetched once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from monarch.errors import SourceError
from monarch.placement.parts import BLOCK, PartAdmission
from monarch.tiers.partial import ABSENT, GRANULE, PartialFile
from monarch.types import Identity, Ino

# The greatest unit, in granules: 32 MiB.
_MOST = 256
# Sequential readers of one file that are followed at the same time.
_FOLLOWED = 16
_GRANULES_OF_BLOCK = BLOCK // GRANULE


@dataclass(slots=True, eq=False)
class Unit:
    """The granules from ``start`` to before ``stop``, which are being fetched or stored. When it is
    ``done``, it has ``data``, or an ``error``, or neither: then the fetch was given up."""

    start: int
    stop: int
    done: trio.Event = field(default_factory=trio.Event)
    data: bytes | None = None
    error: SourceError | None = None


@dataclass(slots=True, eq=False)
class OpenPart:
    """A partial copy that is open. ``users`` are the bindings that read it, ``storing`` the units
    that wait to be written. ``is_dropped``: it must not be used any more. ``settling`` is set while
    it is being closed or completed, and ends with it. ``digest`` is that of the whole file."""

    ino: Ino
    identity: Identity
    admission: PartAdmission
    file: PartialFile
    unused: Callable[[OpenPart], None]
    users: int = 0
    storing: int = 0
    is_dropped: bool = False
    settling: trio.Event | None = None
    digest: bytes | None = None
    units: dict[int, Unit] = field(default_factory=dict)
    # For each sequential reader the end of its last unit, and the number of its granules.
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

    def begin(self, start: int, stop: int, *, room: int) -> Unit:
        """A new unit that begins with the missing granule ``start``, and has those before ``stop``
        that follow it. It may grow if it has at most ``room`` bytes then."""
        grown = min(2 * self._ends.pop(start, 0), _MOST, room // GRANULE)
        stop = min(max(stop, start + grown), self.file.layout.granules)
        unit = Unit(start, self.missing_until(start, stop))
        self._ends[unit.stop] = unit.stop - start
        if len(self._ends) > _FOLLOWED:
            self._ends.popitem(last=False)
        for granule in range(start, unit.stop):
            self.units[granule] = unit
        return unit

    def end(self, unit: Unit) -> None:
        """The unit is stored, or will not be."""
        for granule in range(unit.start, unit.stop):
            self.units.pop(granule, None)
