"""Sparse files: the positions of their data, and copies that keep the holes."""

from __future__ import annotations

import errno
import os

from monarch.units import MiB

_TURN = 8 * MiB


def data_at(fd: int, offset: int, end: int) -> tuple[int, int]:
    """The begin and end of the next data at or after ``offset``, before ``end``; ``(end, end)`` if
    only a hole follows.

    On a file system that does not report holes, all is data. Moves the file position of ``fd``.
    """
    try:
        begins = os.lseek(fd, offset, os.SEEK_DATA)
        if begins >= end:
            return end, end
        ends = os.lseek(fd, begins, os.SEEK_HOLE)
    except OSError as error:
        return (end, end) if error.errno == errno.ENXIO else (offset, end)
    if begins < offset or ends <= begins:
        # The data became a hole meanwhile, or the file system returned an invalid position.
        return offset, end
    return begins, min(ends, end)


def copy_data(from_fd: int, to_fd: int, size: int) -> int:
    """Copies the first ``size`` bytes of a file to another, empty one, which gets that length.
    Returns the bytes covered: fewer than ``size`` if the file ends before. Raises OSError."""
    offset = 0
    while offset < size:
        begins, ends = data_at(from_fd, offset, size)
        if begins == size:
            # The file may have been truncated meanwhile.
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
