"""Files with holes: where their data are, and copies in which holes stay holes."""

from __future__ import annotations

import errno
import os

from monarch.units import MiB

_TURN = 8 * MiB


def data_at(fd: int, offset: int, end: int) -> tuple[int, int]:
    """Where the next data at or behind ``offset`` begin and end, before ``end``; ``(end, end)`` if
    nothing but a hole is left.

    All is data on a file system that does not tell holes. It moves the descriptor's position.
    """
    try:
        begins = os.lseek(fd, offset, os.SEEK_DATA)
        if begins >= end:
            return end, end
        ends = os.lseek(fd, begins, os.SEEK_HOLE)
    except OSError as error:
        return (end, end) if error.errno == errno.ENXIO else (offset, end)
    if begins < offset or ends <= begins:
        # A hole by now, or a file system that tells nonsense.
        return offset, end
    return begins, min(ends, end)


def copy_data(from_fd: int, to_fd: int, size: int) -> int:
    """Copy the first ``size`` bytes of a file to the same place of another, an empty one, which is
    as long then; how far it goes, less than ``size`` if it ends before. Raises OSError."""
    offset = 0
    while offset < size:
        begins, ends = data_at(from_fd, offset, size)
        if begins == size:
            # It may have been cut meanwhile.
            offset = min(size, os.fstat(from_fd).st_size)
            break
        offset = os.lseek(to_fd, begins, os.SEEK_SET)
        while offset < ends and (
            count := os.sendfile(to_fd, from_fd, offset, min(_TURN, ends - offset))
        ):
            offset += count
        if offset < ends:
            break
    os.ftruncate(to_fd, offset)
    return offset
