"""Sets of sequence numbers and of object numbers, which are dense: one bit for each number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

# Numbers in a page. The numbers that are still in use may lie far apart.
_PAGE = 512


@dataclass(slots=True)
class Numbers:
    """A set of integers that are not negative, which only grows. Dense numbers take half a byte
    each, where a set takes sixty."""

    _pages: dict[int, bytearray] = field(default_factory=dict)

    def add(self, number: int) -> None:
        page, at = divmod(number, _PAGE)
        bits = self._pages.get(page)
        if bits is None:
            bits = self._pages[page] = bytearray(_PAGE // 8)
        bits[at >> 3] |= 1 << (at & 7)

    def update(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.add(number)

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        page, at = divmod(number, _PAGE)
        bits = self._pages.get(page)
        return bits is not None and bool(bits[at >> 3] >> (at & 7) & 1)

    def __iter__(self) -> Iterator[int]:
        """The numbers, the smallest first."""
        for page in sorted(self._pages):
            bits = self._pages[page]
            for at in range(_PAGE):
                if bits[at >> 3] >> (at & 7) & 1:
                    yield page * _PAGE + at
