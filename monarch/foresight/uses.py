"""The next uses of files, for placement: from announced orders, and from learned ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

from monarch.foresight.foresight import Foresight
from monarch.types import Ino


@dataclass(eq=False, slots=True)
class KnownUses:
    """``with_learned``: orders that are the same in each epoch count, too, while none is announced.
    Times are numbers of opens, infinite if they are not known."""

    _foresight: Foresight
    with_learned: bool

    def next_use(self, ino: Ino) -> float:
        """The time of the next open of a file, or of the one that is being answered."""
        found = self._foresight.announced.next_use(ino)
        return self._learned(ino)[0] if found == math.inf else found

    def use_after(self, ino: Ino) -> float:
        """The time of the open after ``next_use``."""
        found = self._foresight.announced.use_after(ino)
        return self._learned(ino)[1] if found == math.inf else found

    def repeats_within(self, begin: float, end: float) -> bool:
        """Whether a file is known to be opened twice from ``begin`` to ``end``."""
        return self._foresight.announced.repeats_within(begin, end)

    @property
    def ended(self) -> int:
        """How many announced orders have ended."""
        return self._foresight.announced.ended

    def _learned(self, ino: Ino) -> tuple[float, float]:
        """The next open of a file whose order was learned, and the one after it."""
        foresight = self._foresight
        if self.with_learned and foresight.has_learned and not foresight.announced.has_orders:
            for stream in foresight.streams_with(ino):
                found = stream.uses(ino)
                if found[0] < math.inf:
                    return found
        return math.inf, math.inf
