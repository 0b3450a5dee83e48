"""Makes a tier and the records of its copies agree: once after a mount, and when a tier returns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from monarch.errors import TierError
from monarch.placement.parts import Parts
from monarch.placement.residency import Residency
from monarch.posix.thread_pool import batches
from monarch.tiers.hierarchy import Hierarchy
from monarch.tiers.tier import Tier
from monarch.transfer.tier_monitor import TierMonitor
from monarch.types import Ino

log = logging.getLogger(__name__)

# Files handled before the event loop runs other tasks.
_STRIDE = 64


@dataclass(eq=False)
class Sweep:
    """Removes files without a record, and drops copies without their file. Make it before copies
    are made. ``evict`` drops a copy, whole or partial. ``doubts``: copies of a tier that returns
    are verified before use."""

    hierarchy: Hierarchy
    residency: Residency
    monitor: TierMonitor
    evict: Callable[[Ino], object]
    parts: Parts
    doubts: bool

    def __post_init__(self) -> None:
        self._started_ns = time.time_ns()

    async def run(self) -> None:
        """Sweeps each tier once. A tier that fails is logged."""
        for tier in self.hierarchy.tiers:
            try:
                await self._sweep(tier, before_ns=self._started_ns)
            except TierError as error:
                log.warning(
                    "tier %s: not swept: %s; files without a record stay until the next mount",
                    tier.name,
                    error,
                )

    async def returned(self, tier: Tier) -> None:
        """Handles the return of a tier, perhaps after its disk lost power. Raises TierError."""
        # They have no records that could be doubted.
        for ino in self.parts.inos(tier.number):
            self.evict(ino)
        files = self.residency.resident_files(tier.number)
        inos = await self.monitor.call(tier, self.hierarchy.doubt, tier, files=files)
        if self.doubts:
            self.residency.mark_unverified(inos)
        await self._sweep(tier, before_ns=time.time_ns())

    async def _sweep(self, tier: Tier, *, before_ns: int) -> None:
        """Raises TierError."""
        files = self.residency.resident_files(tier.number)
        sweep = partial(self.hierarchy.sweep, tier, before_ns=before_ns)
        missing = await self.monitor.call(tier, sweep, files=files)
        # An emptied tier may miss a million copies: readers are served between the batches.
        for batch in batches(missing, _STRIDE):
            # A reader may have missed the copy first, and it may be resident again.
            asked = [ino for ino in batch if self.residency.tier_of(ino) == tier.number]
            for ino in await self.monitor.call(tier, _missing, tier, asked):
                if self.residency.tier_of(ino) == tier.number:
                    self.evict(ino)


def _missing(tier: Tier, inos: list[Ino]) -> list[Ino]:
    return [ino for ino in inos if not tier.has(ino)]
