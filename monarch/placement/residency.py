"""The location and state of every inode's bytes: two bytes per inode, all operations O(1).

The first byte is the tier (0 the source only, k tier k), the second has the marks below. The C
datapath reads both tables while they change.

    WANTED      admitted, not resident yet
    FORCED      wanted at the user's request, so the admission rule of the policy does not apply
    COPYING     a copy is queued or running, and the ledger has a reservation for it; or the bytes
                are in memory for readers to come
    UNVERIFIED  the copy must be verified before its first use
    CHANGED     the kernel may have pages of an older content: the next open must not keep them
    DIFFERS     the mount does not show what the snapshot has: the entry was refreshed or removed
    SERVED      bytes of it were returned to reads without an open
    SPOILED     the kernel may have pages of a damaged copy: the next open must not keep them
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from monarch.types import Ino

SOURCE = 0
MAX_TIER = 255

_WANTED = 1
FORCED = 2
COPYING = 4
_UNVERIFIED = 8
_CHANGED = 16
DIFFERS = 32
_SERVED = 64
_SPOILED = 128

# A copy with one of these marks must be checked before it is used.
UNUSABLE = _UNVERIFIED | _CHANGED | DIFFERS | _SPOILED

# Large enough that numpy's cost per call is negligible, small enough to find a near mark fast.
_SCAN_INODES = 1 << 16


class Residency:
    """The table for the inodes 1 to ``entries``; a larger number raises IndexError."""

    def __init__(self, entries: int) -> None:
        self._tiers = bytearray(entries + 1)
        self._flags = bytearray(entries + 1)
        self._tiers_array: npt.NDArray[np.uint8] = np.frombuffer(self._tiers, dtype=np.uint8)
        self._flags_array: npt.NDArray[np.uint8] = np.frombuffer(self._flags, dtype=np.uint8)
        # Live views of the tier and the marks of each inode; index 0 is not used.
        self.tiers_table = memoryview(self._tiers).toreadonly()
        self.marks_table = memoryview(self._flags).toreadonly()
        self._files = [0] * (MAX_TIER + 1)
        # The number of wanted inodes, including those being copied.
        self.wanted = 0

    @property
    def entries(self) -> int:
        return len(self._flags) - 1

    def resident_files(self, tier: int) -> int:
        return self._files[tier]

    def tier_of(self, ino: Ino) -> int:
        return self._tiers[ino]

    def have_copies(self, inos: range) -> bool:
        """Whether each of ``inos``, consecutive numbers, is in a tier."""
        return bool(self._tiers_array[inos.start : inos.stop].all())

    def place(self, ino: Ino, tier: int) -> None:
        """Records a verified copy in ``tier``."""
        if not 1 <= tier <= MAX_TIER:
            raise ValueError(f"no tier {tier}")
        before = self._tiers[ino]
        if before != SOURCE:
            self._files[before] -= 1
        self._tiers[ino] = tier
        self._files[tier] += 1
        self._flags[ino] &= ~_UNVERIFIED

    def clear(self, ino: Ino) -> int:
        """Records that only the source has the file; returns its former tier (0: none)."""
        before = self._tiers[ino]
        if before != SOURCE:
            self._tiers[ino] = SOURCE
            self._files[before] -= 1
            self._flags[ino] &= ~_UNVERIFIED
        return before

    def load(self, inos: npt.NDArray[np.integer], tier: int) -> None:
        """Records many copies at once, at start. None of them may be resident yet."""
        if not 1 <= tier <= MAX_TIER:
            raise ValueError(f"no tier {tier}")
        if not inos.size:
            return
        if inos.min() < 1 or inos.max() > self.entries:
            raise ValueError(f"an inode number outside 1..{self.entries}")
        if self._tiers_array[inos].any():
            raise ValueError("an inode is resident already")
        self._tiers_array[inos] = tier
        self._files[tier] = int(np.count_nonzero(self._tiers_array == tier))

    def resident_in(self, tier: int, inos: range | None = None) -> Iterator[Ino]:
        """The inodes in ``tier``, ascending, all of them or those among ``inos``. The table may
        change meanwhile."""
        first, end = (0, len(self._tiers)) if inos is None else (inos.start, inos.stop)
        for start in range(first, end, _SCAN_INODES):
            part = self._tiers_array[start : min(end, start + _SCAN_INODES)]
            for offset in np.flatnonzero(part == tier).tolist():
                if self._tiers[start + offset] == tier:
                    yield Ino(start + offset)

    def want(self, ino: Ino, *, forced: bool = False) -> None:
        if not self._flags[ino] & _WANTED:
            self.wanted += 1
        self._flags[ino] |= _WANTED | FORCED if forced else _WANTED

    def unwant(self, ino: Ino) -> None:
        if self._flags[ino] & _WANTED:
            self.wanted -= 1
            self._flags[ino] &= ~(_WANTED | FORCED)

    def is_wanted(self, ino: Ino) -> bool:
        return bool(self._flags[ino] & _WANTED)

    def is_forced(self, ino: Ino) -> bool:
        return bool(self._flags[ino] & FORCED)

    def wanted_from(self, start: Ino) -> Iterator[Ino]:
        """The wanted inodes from ``start`` on, ascending. The table may change meanwhile."""
        first: int = start
        while first < len(self._flags) and self.wanted:
            part = self._flags_array[first : first + _SCAN_INODES]
            for offset in np.flatnonzero(part & _WANTED).tolist():
                if self._flags[first + offset] & _WANTED:
                    yield Ino(first + offset)
            first += _SCAN_INODES

    def start_copy(self, ino: Ino) -> None:
        self._flags[ino] |= COPYING

    def end_copy(self, ino: Ino) -> None:
        self._flags[ino] &= ~COPYING

    def is_copying(self, ino: Ino) -> bool:
        return bool(self._flags[ino] & COPYING)

    def mark_unverified(self, inos: npt.NDArray[np.integer]) -> None:
        """Marks that the copies of ``inos``, if any, must be verified before their first use."""
        self._flags_array[inos[self._tiers_array[inos] != SOURCE]] |= _UNVERIFIED

    def mark_verified(self, ino: Ino) -> None:
        self._flags[ino] &= ~_UNVERIFIED

    def unverified_files(self) -> int:
        return int(np.count_nonzero(self._flags_array & _UNVERIFIED))

    def is_unverified(self, ino: Ino) -> bool:
        return bool(self._flags[ino] & _UNVERIFIED)

    def mark_changed(self, ino: Ino) -> None:
        self._flags[ino] |= _CHANGED

    def unmark_changed(self, ino: Ino) -> None:
        self._flags[ino] &= ~_CHANGED

    def is_changed(self, ino: Ino) -> bool:
        return bool(self._flags[ino] & _CHANGED)

    def mark_spoiled(self, ino: Ino) -> None:
        self._flags[ino] |= _SPOILED

    def unmark_spoiled(self, ino: Ino) -> None:
        self._flags[ino] &= ~_SPOILED

    def is_spoiled(self, ino: Ino) -> bool:
        return bool(self._flags[ino] & _SPOILED)

    def mark_differing(self, ino: Ino) -> None:
        self._flags[ino] |= DIFFERS

    def mark_served(self, ino: Ino) -> None:
        self._flags[ino] |= _SERVED

    def is_served(self, ino: Ino) -> bool:
        return bool(self._flags[ino] & _SERVED)


def differing(residency: Residency) -> list[Ino]:
    """The inodes with the mark DIFFERS."""
    marks = np.frombuffer(residency.marks_table, np.uint8)
    return [Ino(ino) for ino in np.flatnonzero(marks & DIFFERS).tolist()]
