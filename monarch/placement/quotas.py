"""The bytes of copies that each job may have, and what they are charged for. Pure.

A copy is charged to the job that has opened its file, and in equal parts to all jobs that have
opened it since. A job gets no more copies, and shares none, beyond its quota. When a job has ended,
its parts are charged to the others. Copies of no job are charged to none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from monarch.types import Ino

# A bit for each job in the table of sharers, of two bytes a file.
MOST_JOBS = 16


class Quotas:
    """Belongs to the event loop. ``limits``: the bytes of each job, None: no limit. ``entries``:
    the highest inode number of a file that may have a copy."""

    def __init__(self, limits: Sequence[int | None], entries: int) -> None:
        self._limits = list(limits)
        # The jobs that share each copy. Pages of zeros that are not written take no memory.
        self._sharers = np.zeros(entries + 1, np.uint16)
        # The bytes of the copies that each set of jobs shares.
        self._bytes: Counter[int] = Counter()

    def change(self, job: int, limit: int | None) -> None:
        """Sets the quota of a job, which may be a new one with the next number. Copies that it is
        charged for beyond its quota stay."""
        self._limits[job : job + 1] = [limit]

    def charged(self, job: int) -> Fraction:
        """The bytes that a job is charged for."""
        shares = (
            Fraction(nbytes, sharers.bit_count())
            for sharers, nbytes in self._bytes.items()
            if sharers >> job & 1
        )
        return sum(shares, Fraction(0))

    def fits(self, job: int, size: int) -> bool:
        """Whether a job may have another copy of ``size`` bytes for itself."""
        return self._allows(job, Fraction(size))

    def is_charged(self, ino: Ino) -> bool:
        """Whether a copy is charged to any job."""
        return bool(self._sharers[ino])

    def opened(self, ino: Ino, size: int, job: int) -> None:
        """Charges a job for its part of a copy that it has opened, or that is made for it. It does
        not share the copy if its part exceeds the quota."""
        before = int(self._sharers[ino])
        sharers = before | 1 << job
        if sharers == before or not self._allows(job, Fraction(size, sharers.bit_count())):
            return
        self._move(size, before, sharers)
        self._sharers[ino] = sharers

    def removed(self, ino: Ino, size: int) -> None:
        """Charges no job for a copy of ``size`` bytes any more."""
        self._move(size, int(self._sharers[ino]), 0)
        self._sharers[ino] = 0

    def ended(self, job: int) -> None:
        """Charges a job for nothing. The others that share its copies get its parts."""
        bit = 1 << job
        for sharers in [each for each in self._bytes if each & bit]:
            self._move(self._bytes[sharers], sharers, sharers & ~bit)
        self._sharers &= np.uint16(~bit & 0xFFFF)

    def _allows(self, job: int, more: Fraction) -> bool:
        limit = self._limits[job]
        return limit is None or self.charged(job) + more <= limit

    def _move(self, size: int, before: int, after: int) -> None:
        """The jobs in ``after`` share ``size`` bytes that those in ``before`` have shared."""
        if before:
            self._bytes[before] -= size
            if not self._bytes[before]:
                del self._bytes[before]
        if after:
            self._bytes[after] += size
