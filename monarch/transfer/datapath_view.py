"""The datapath as the copies see it: it opens and reads files without Python, or it is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from monarch.tiers.tier import Tier
from monarch.transfer.source_load import Elsewhere, SourceTraffic
from monarch.types import Ino


@dataclass(frozen=True, slots=True)
class CallTotals:
    """The number and duration of opens and reads of a tier so far."""

    calls: int
    seconds: float


class DatapathView(Elsewhere, Protocol):
    """``bypass`` sends opens of copies in a tier to Python, or ends that. ``move`` is called in a
    thread when the descriptors of a tier lead elsewhere. ``oldest_wait_s`` is the age of the oldest
    running call to the source, 0 if there is none."""

    def bypass(self, tier: int, bypassed: bool) -> None: ...
    def move(self, tier: Tier) -> None: ...
    def totals(self, tier: int) -> CallTotals: ...
    def oldest_wait_s(self) -> float: ...


class NoDatapath:
    """The view without the C extension: Python serves everything."""

    def bypass(self, tier: int, bypassed: bool) -> None: ...

    def move(self, tier: Tier) -> None: ...

    def totals(self, tier: int) -> CallTotals:
        return CallTotals(0, 0.0)

    def oldest_wait_s(self) -> float:
        return 0.0

    def source_traffic(self) -> SourceTraffic:
        return SourceTraffic(0, 0, 0, 0, 0)

    def reached(self, ino: Ino) -> int:
        return 0
