"""A file system below the kernel with one large file, for tests of partial copies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import trio
import trio.testing

from monarch.text import MiB
from monarch.tiers.partial import GRANULE, PRESENT
from monarch.types import Ino
from monarch.vfs.binding import WATCHED_FROM
from tests.vfs.rig import Rig

COUNT = 20 * MiB // GRANULE
SIZE = 20 * MiB - 1000
CONTENT = np.random.default_rng(3).bytes(SIZE)
# Behind the part of the file that is relayed until it is decided.
FIRST = WATCHED_FROM // GRANULE


class PartRig(Rig):
    """A rig over one large file, ``big``."""

    def source_bytes(self) -> int:
        return self.metrics.source_bytes[0]

    def source_reads(self) -> int:
        return self.metrics.source_reads[0]

    async def at(self, ino: Ino, offset: int, size: int = 4096) -> None:
        """Reads a part of the file, and compares it."""
        assert await self.read(ino, offset, size) == CONTENT[offset : offset + size]

    async def stored(self) -> None:
        """Waits until all fetched granules are stored, and unused copies are closed."""
        await trio.testing.wait_all_tasks_blocked()
        await self.read_side.parts.finish()

    def present(self, ino: Ino) -> set[int]:
        binding = self.read_side.bindings.get(ino)
        assert binding is not None and binding.part is not None
        states = binding.part.file.map
        return {index for index, state in enumerate(states) if state == PRESENT}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.read_side.parts.run)
            yield
            nursery.cancel_scope.cancel()


Makes = Callable[..., PartRig]
