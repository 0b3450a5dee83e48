"""How often files were recently opened, in bounded memory: a sketch with ageing.

A count-min sketch (Cormode and Muthukrishnan, Journal of Algorithms 55, 2005) with counters of four
bits. All counters are halved from time to time, so that the frequency of long ago does not count
(Einziger, Friedman and Manes, TinyLFU, ACM Transactions on Storage 13, 2017).
"""

from __future__ import annotations

import numpy as np

from monarch.posix.buckets import mix
from monarch.types import Ino

MOST = 15
_ROWS = 4
_LEAST_WIDTH, _MOST_WIDTH = 1 << 8, 1 << 20
# The counters are halved after so many opens for each column: TinyLFU does it after ten for each
# file that fits, which is this number if a fifth of the files fits.
_OPENS_PER_COLUMN = 2


class Sketch:
    """Estimates for about ``files`` files: never too low since the last halving, and at most
    ``MOST``. Takes two bytes a file, and at most 2 MiB."""

    def __init__(self, files: int) -> None:
        width = 1 << (max(1, files) - 1).bit_length()
        self._width = min(_MOST_WIDTH, max(_LEAST_WIDTH, width))
        # Two counters in a byte.
        self._rows = [bytearray(self._width // 2) for _ in range(_ROWS)]
        self._opens = 0

    def opened(self, ino: Ino) -> None:
        """Counts an open. Only the lowest counters of a file rise: the others are of collisions."""
        places = self._places(ino)
        counters = [self._counter(row, place) for row, place in enumerate(places)]
        lowest = min(counters)
        if lowest < MOST:
            for row, place in enumerate(places):
                if counters[row] == lowest:
                    self._rows[row][place >> 1] += 1 << 4 * (place & 1)
        self._opens += 1
        if self._opens >= _OPENS_PER_COLUMN * self._width:
            self._halve()

    def count(self, ino: Ino) -> int:
        """How often a file was opened, opens of long ago at less than one each."""
        return min(self._counter(row, place) for row, place in enumerate(self._places(ino)))

    def _places(self, ino: Ino) -> list[int]:
        """A column for each row: double hashing (Kirsch and Mitzenmacher, Random Structures and
        Algorithms 33, 2008)."""
        hashed = mix(ino * 0x9E3779B97F4A7C15)
        first, step = hashed & 0xFFFFFFFF, hashed >> 32 | 1
        return [(first + row * step) & (self._width - 1) for row in range(_ROWS)]

    def _counter(self, row: int, place: int) -> int:
        return self._rows[row][place >> 1] >> 4 * (place & 1) & 15

    def _halve(self) -> None:
        for row in self._rows:
            counters = np.frombuffer(row, np.uint8)
            counters >>= 1
            # The lowest bit of the higher counter has moved into the lower one.
            counters &= 0x77
        self._opens //= 2
