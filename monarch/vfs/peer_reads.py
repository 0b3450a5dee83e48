"""Reads of the files of this node for the other nodes of its job."""

from __future__ import annotations

from dataclasses import dataclass

from monarch.placement.parts import BLOCK
from monarch.tiers.partial import GRANULE, PRESENT
from monarch.types import Ino
from monarch.vfs.binding import Binding
from monarch.vfs.interfaces import TierCalls
from monarch.vfs.read_side import ReadSide
from monarch.vfs.readers import Readers
from monarch.vfs.source_limit import free_of_charge
from monarch.vfs.units import OpenPart


@dataclass(frozen=True, slots=True)
class Granules:
    """Granules that a partial copy in ``tier`` has, by their digests, one after the other."""

    tier: int
    digests: bytes


@dataclass(eq=False, repr=False)
class PeerReads:
    """Belongs to the event loop. What is read is fetched and kept as for a reader of this node."""

    _readers: Readers
    _read: ReadSide
    _tier_calls: TierCalls

    async def whole(self, ino: Ino) -> bytes | memoryview | None:
        """The bytes of a small file; None if it has a copy by now. Raises SourceError."""
        async with self._readers.bound(ino, stays=False) as binding:
            return binding.content

    async def span(self, ino: Ino, offset: int, size: int) -> bytes | Granules | None:
        """Bytes of one block of a large file, or the granules that have them; None if this node
        does not keep them. Raises SourceError."""
        async with self._readers.bound(ino, stays=True) as binding:
            if binding.fd >= 0:
                data = await self._read.copies.read(binding, offset, size)
                return None if data is None else bytes(data)
            return await self._of_part(binding, offset, size)

    async def _of_part(self, binding: Binding, offset: int, size: int) -> bytes | Granules | None:
        part, first, stop = binding.part, offset // GRANULE, -(-(offset + size) // GRANULE)
        if part is None or not self._admits(part, offset // BLOCK):
            return None
        if part.file.map[first] == PRESENT and part.file.run(first, stop) == stop:
            try:
                digests = await self._tier_calls.ask(part.tier, part.file.digests, first, stop)
            except OSError:
                return None
            return Granules(part.tier, digests)
        found = await self._read.parts.read(binding, offset, size, free_of_charge())
        return None if found is None else found[0]

    def _admits(self, part: OpenPart, block: int) -> bool:
        """Whether a block is kept here: this node owns it, or there is room for it, since its owner
        does not answer."""
        accounts, blocks = self._read.parts.accounts, part.admission.blocks
        if part.is_dropped or blocks is None or blocks[block] == 1:
            return not part.is_dropped
        if accounts.owns_block(part.ino, block) or accounts.room(part.ino) < BLOCK:
            return False
        blocks[block] = 1
        return True
