"""Ranges of a file that are read at once for pieces of it that lie near each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from monarch.text import KiB

# Between two pieces of a range so many bytes are read in vain rather than with another call.
GAP_BYTES = 64 * KiB


@dataclass(frozen=True, slots=True)
class Range:
    """``length`` bytes from ``offset`` on, with the indices of the pieces inside, by offset."""

    offset: int
    length: int
    members: npt.NDArray[np.int64]


def merged(
    offsets: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint32] | npt.NDArray[np.uint64],
    *,
    gap_bytes: int = GAP_BYTES,
    most_bytes: int | None = None,
) -> Iterator[Range]:
    """The ranges that cover all pieces, in the order of the file. Two pieces are in one range if at
    most ``gap_bytes`` lie between them. Pieces may overlap. With ``most_bytes`` a range ends before
    the piece that would make it longer.
    """
    by_offset = np.argsort(offsets, kind="stable")
    first, begin, end = 0, 0, 0
    for place, index in enumerate(by_offset.tolist()):
        offset, ends = int(offsets[index]), int(offsets[index]) + int(lengths[index])
        is_too_long = most_bytes is not None and max(end, ends) - begin > most_bytes
        if place and (offset - end > gap_bytes or is_too_long):
            yield Range(begin, end - begin, by_offset[first:place])
            first, begin, end = place, offset, ends
        elif not place:
            begin, end = offset, ends
        end = max(end, ends)
    if len(by_offset):
        yield Range(begin, end - begin, by_offset[first:])
