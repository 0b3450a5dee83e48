"""The order in which an epoch has opened files, and the place of each file in it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Places that are found at once: a millisecond.
_SLICE = 1 << 16


class PastOrder:
    """The order of an epoch. ``positions`` is never empty.

    The place of each position in it is found in slices, since ten million of them take a tenth of a
    second: ``extend`` makes the next slice known. The readers of a same order begin with the first.
    """

    def __init__(self, positions: array[int], n: int) -> None:
        self.positions: npt.NDArray[np.uint32] = np.frombuffer(positions, np.uint32)
        # Not filled, since that takes as long: a place counts only if it has the position.
        self._places = np.empty(n, np.uint32)
        # The same, of which single numbers are read faster.
        self.order, self._place_of = self.positions.data, self._places.data
        self._known = 0
        self.extend()

    def extend(self) -> bool:
        """Makes the next slice known; whether there was one."""
        if self._known == len(self.positions):
            return False
        end = min(self._known + _SLICE, len(self.positions))
        self._places[self.positions[self._known : end]] = np.arange(self._known, end)
        self._known = end
        return True

    def place(self, position: int) -> int | None:
        """The place of a position; None if the epoch did not read it, or it is not known yet."""
        found = self.places((position,))
        return found[0] if found else None

    def places(self, positions: Sequence[int]) -> list[int]:
        """The places of the positions that have one."""
        order, place_of, known = self.order, self._place_of, self._known
        return [
            place
            for position in positions
            if (place := place_of[position]) < known and order[place] == position
        ]
