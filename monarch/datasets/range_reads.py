"""Reads many ranges of a file in one call."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from monarch.datasets.ranges import Range

# Ranges of one call that are read at the same time.
MOST_READS = 8

_ReadRanges: TypeAlias = Callable[
    [int, npt.NDArray[np.int64], memoryview, int, int], tuple[bytes, int]
]


def _extension() -> _ReadRanges | None:
    try:
        read_ranges: _ReadRanges = importlib.import_module("monarch.datasets._many").read_ranges
    except ImportError:
        # There was no compiler.
        return None
    return read_ranges


_read_ranges = _extension()


class RangeReads:
    """Reads many ranges of a file, by threads that do not need the interpreter where the C
    extension is installed: then the file system's latency of one read passes beside that of others.

    The first call begins with one thread, and each read that has waited for a server starts one
    more, up to ``MOST_READS``. If most reads of a call have waited, the next begins with all
    threads. Without the extension the ranges are read one after the other.
    """

    def __init__(self) -> None:
        self._is_slow = False

    def read(self, fd: int, ranges: Sequence[Range], buffer: memoryview) -> list[int]:
        """Reads the ranges into ``buffer``, one behind the other. Returns the number of bytes that
        were read of each: fewer than its length at the end of the file. Raises OSError."""
        lengths = np.array([found.length for found in ranges], np.int64)
        places = np.cumsum(lengths) - lengths
        if _read_ranges is None:
            return [
                _read(fd, buffer[place : place + found.length], found.offset)
                for place, found in zip(places.tolist(), ranges, strict=True)
            ]
        table = np.empty((len(ranges), 3), np.int64)
        table[:, 0] = [found.offset for found in ranges]
        table[:, 1], table[:, 2] = lengths, places
        least = MOST_READS if self._is_slow else 1
        raw, late = _read_ranges(fd, table, buffer, least, MOST_READS)
        self._is_slow = 2 * late > len(ranges)
        counts: list[int] = np.frombuffer(raw, np.int64).tolist()
        failed = min(counts, default=0)
        if failed < 0:
            raise OSError(-failed, os.strerror(-failed))
        return counts


def _read(fd: int, into: memoryview, offset: int) -> int:
    """Reads one range in the interpreter; returns the number of bytes. Raises OSError."""
    done = 0
    while done < len(into) and (count := os.preadv(fd, [into[done:]], offset + done)):
        done += count
    return done
