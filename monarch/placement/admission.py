"""Decides by what is recognised of the readers whether copies leave for a file.

Skewed: a copy leaves only for a file that was recently opened more often. Under a policy that
evicts nothing, such a file replaces copies of its own subtree, so no other files lose their places.
A scan is one process that reads files for the first time, in the order of their names: no copy
leaves for it. Everything else is left to the policy. Free space is given to every file that the
policy admits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from monarch.placement.frequency import MOST, Sketch
from monarch.placement.policy import Item, Placement
from monarch.placement.replacement import Replacement
from monarch.types import Ino

# A file that was opened less often replaces no copy.
_LEAST_OPENS = 2


class Recognised(Protocol):
    """What is recognised of the readers of a file."""

    def skewed(self, ino: Ino) -> range | None:
        """The files of the subtree in which some files are opened again and again; None if no job
        reads the file like that."""

    def is_scan(self, ino: Ino) -> bool:
        """Whether all jobs that read the subtree of a file read it for the first time, by one
        process and in the order of the names."""


class Admission:
    """Belongs to the event loop. ``by_frequency`` and ``spares_copies`` switch the two rules, for
    skewed reads and for scans, on and off. ``files``: the number of files."""

    def __init__(
        self, recognised: Recognised, files: int, *, by_frequency: bool, spares_copies: bool
    ) -> None:
        self._recognised = recognised
        self._files = files
        self._by_frequency = by_frequency
        self._spares_copies = spares_copies
        # Made for the first file that is read again and again.
        self._sketch: Sketch | None = None
        # Decisions of each kind.
        self.replaced = self.refused = self.spared = 0

    def opened(self, ino: Ino) -> None:
        """Records an open of a file in a subtree whose reads are skewed."""
        if self._by_frequency:
            if self._sketch is None:
                self._sketch = Sketch(self._files)
            self._sketch.opened(ino)

    def decide(
        self,
        item: Item,
        placement: Placement | None,
        tiers: range,
        replacement: Replacement,
        is_pinned: Callable[[Ino], bool],
    ) -> Placement | None:
        """What happens instead of ``placement``, the choice of the policy. Only copies in ``tiers``
        may leave, and none that is pinned."""
        if placement is not None and not placement.evict:
            return placement
        if self._sketch is not None:
            files = self._recognised.skewed(item.ino)
            if files is not None:
                return self._decide_by_frequency(
                    item, placement, tiers, files, replacement, is_pinned, self._sketch.count
                )
        if placement is not None and self._spares_copies and self._recognised.is_scan(item.ino):
            self.spared += 1
            return None
        return placement

    def _decide_by_frequency(
        self,
        item: Item,
        placement: Placement | None,
        tiers: range,
        files: range,
        replacement: Replacement,
        is_pinned: Callable[[Ino], bool],
        count: Callable[[Ino], int],
    ) -> Placement | None:
        # The open that is being decided is counted after it. A count that has reached its limit
        # stays there, so that two such files do not replace each other.
        opens = min(MOST, count(item.ino) + 1)
        if placement is None:
            if opens < _LEAST_OPENS:
                return None
            placement = replacement.exchange(item, tiers, files, is_pinned, count)
        # Of several copies the sum counts: together they would have had so many hits (Einziger,
        # Eytan, Friedman and Manes, Size Aware Cache Management, ACM Transactions on Storage 18,
        # 2022).
        if placement is None or sum(count(victim.ino) for victim in placement.evict) >= opens:
            self.refused += 1
            return None
        self.replaced += 1
        return placement
