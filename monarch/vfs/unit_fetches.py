"""Fetches of the missing granules of partial copies from the source, for readers and ahead of them.

A reader waits only for the unit with the bytes that it needs. The other units of its range
(units.py) are fetched meanwhile, several at once. If the fetch of a unit fails, each reader asks
the source for its own bytes alone, so it gets no error of other bytes. If the fetch is late, each
granule that a reader needs is fetched alone, once: the source may hang at other bytes of the unit.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from monarch.errors import SourceError
from monarch.placement.parts import BLOCK, Parts
from monarch.tiers.doubts import Doubts
from monarch.tiers.partial import GRANULE
from monarch.tiers.source import SourceFile
from monarch.vfs.binding import Binding
from monarch.vfs.source_files import SourceFiles
from monarch.vfs.source_limit import Payment
from monarch.vfs.units import OpenPart, Unit

# The units of one range that are fetched ahead at the same time.
_AT_ONCE = 8
# The time after which the fetch of a unit is late, in seconds.
_LATE_S = 1.0


@dataclass(eq=False, repr=False)
class UnitFetches:
    """Belongs to the event loop. At most ``most_held`` bytes are fetched or wait to be stored, and
    at most as many again of units that are late, whose granules are fetched alone.

    ``arrived`` is called with each unit that was fetched. It must lead to ``ended``. ``changed`` is
    called if the source has another version of the file. ``wake`` is called when ``take_ahead`` has
    calls.
    """

    _source_files: SourceFiles
    _doubts: Doubts
    _accounts: Parts
    _most_held: int
    arrived: Callable[[OpenPart, Unit], None]
    changed: Callable[[OpenPart], None]
    wake: Callable[[], None]

    def __post_init__(self) -> None:
        self._held = 0
        self._ahead: list[Callable[[], Awaitable[None]]] = []

    def take_ahead(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """The calls that fetch units ahead of readers. Each must be made, as a task."""
        calls, self._ahead = self._ahead, []
        return calls

    async def join(
        self, binding: Binding, part: OpenPart, unit: Unit, offset: int, end: int
    ) -> bytes | None:
        """Bytes of a unit that is being fetched or stored; None if it was given up. Raises
        SourceError."""
        if unit.stop - unit.start > 1:
            with trio.move_on_after(_LATE_S):
                await unit.done.wait()
            if not unit.done.is_set():
                return await self._join_apart(binding, part, unit, offset, end)
        await unit.done.wait()
        if unit.error is None:
            return None if unit.data is None else _part_of(unit, offset, end)
        size = min(end, unit.stop * GRANULE) - offset
        if unit.error.errno == errno.ETIMEDOUT or size == part.size_of(unit):
            raise SourceError(str(unit.error), errno=unit.error.errno)
        return await self._fetched(binding, part, offset, size)

    async def _join_apart(
        self, binding: Binding, part: OpenPart, unit: Unit, offset: int, end: int
    ) -> bytes | None:
        """As ``join``, of the first granule only, which is fetched alone. It is not stored: the
        unit will be."""
        granule = offset // GRANULE
        apart = unit.apart.get(granule)
        if apart is not None:
            return await self.join(binding, part, apart, offset, end)
        apart = unit.apart[granule] = Unit(granule, granule + 1)
        try:
            await self._read_unit(binding, part, apart)
        finally:
            apart.done.set()
            if apart.data is None:
                del unit.apart[granule]
        return await self.join(binding, part, apart, offset, end)

    async def read(
        self, binding: Binding, part: OpenPart, offset: int, end: int, payment: Payment
    ) -> bytes | None:
        """Bytes from a missing granule on; None if the source has another version. No other bytes
        are read if they cannot be stored, or as many bytes as allowed wait for a slow tier. The
        reader pays for those that are fetched ahead of it, too. Raises SourceError."""
        granule, stop = offset // GRANULE, -(-end // GRANULE)
        room = min(self._most_held - self._held, self._accounts.room(part.ino))
        is_young = self._doubts.by_bytes(part.ino, part.identity)
        if room < GRANULE or is_young or not part.admits(granule):
            end = min(end, part.missing_until(granule, stop) * GRANULE)
            if binding.is_shared:
                # Another node has each block.
                end = min(end, (offset // BLOCK + 1) * BLOCK)
            payment.read(end - offset)
            return await self._fetched(binding, part, offset, end - offset)
        unit, *others = part.begin(granule, stop, room=room if binding.file is not None else 0)
        fetched = sum(part.size_of(each) for each in (unit, *others))
        payment.read(fetched)
        self._held += fetched
        part.storing += 1 + len(others)
        if unit.stop > stop and binding.file is not None:
            # The reader does not need all of it, and must not wait for it for long.
            self._fetch_ahead(part, [unit], binding, binding.file)
        else:
            if others and binding.file is not None:
                self._fetch_ahead(part, others, binding, binding.file)
            await self._fetch(binding, part, unit)
        return await self.join(binding, part, unit, offset, end)

    def ended(self, part: OpenPart, unit: Unit) -> None:
        """A unit is stored, or will not be."""
        self._held -= part.size_of(unit)
        part.end(unit)
        part.storing -= 1
        if not part.is_used:
            part.unused(part)

    def _fetch_ahead(
        self, part: OpenPart, units: Sequence[Unit], reader: Binding, file: SourceFile
    ) -> None:
        waiting = iter(units)
        for _ in range(min(_AT_ONCE, len(units))):
            binding = Binding(part.ino, part.identity.size, file=file.retain(), users=1)
            binding.is_shared = reader.is_shared
            self._ahead.append(partial(self._fetch_waiting, part, waiting, binding))
        self.wake()

    async def _fetch_waiting(
        self, part: OpenPart, waiting: Iterator[Unit], binding: Binding
    ) -> None:
        """Fetches units, each once. They are given up if no process has the file open."""
        try:
            for unit in waiting:
                if part.users and not part.is_dropped:
                    await self._fetch(binding, part, unit)
                else:
                    self._end_fetch(part, unit)
        finally:
            for unit in waiting:
                self._end_fetch(part, unit)
            binding.close()

    async def _fetch(self, binding: Binding, part: OpenPart, unit: Unit) -> None:
        """Reads a unit from the source. It has its bytes then, or an error, or neither if the
        source has another version."""
        try:
            await self._read_unit(binding, part, unit)
        finally:
            self._end_fetch(part, unit)

    async def _read_unit(self, binding: Binding, part: OpenPart, unit: Unit) -> None:
        try:
            unit.data = await self._fetched(binding, part, unit.start * GRANULE, part.size_of(unit))
        except SourceError as error:
            unit.error = error

    def _end_fetch(self, part: OpenPart, unit: Unit) -> None:
        unit.done.set()
        if unit.data is None:
            self.ended(part, unit)
        else:
            self.arrived(part, unit)

    async def _fetched(
        self, binding: Binding, part: OpenPart, offset: int, size: int
    ) -> bytes | None:
        """``size`` bytes of the source; None if it has another version. Raises SourceError."""
        data = await self._source_files.read_version(
            binding, part.identity, offset, size, alone=part.is_held_behind(offset, size)
        )
        if data is None:
            self.changed(part)
        return data


def _part_of(unit: Unit, offset: int, end: int) -> bytes:
    start = unit.start * GRANULE
    return (unit.data or b"")[offset - start : end - start]
