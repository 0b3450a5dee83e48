"""What was appended to a file that the source has: brought behind its bytes there, in place.

The calls wait for the source as long as it likes: they run in worker threads, one at a time.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from monarch.posix import failpoints
from monarch.posix.credentials import Credentials, acting_as
from monarch.posix.sparse import data_at
from monarch.tiers.source import identity_of
from monarch.types import Identity

_SET_ID = stat.S_ISUID | stat.S_ISGID


class OthersWroteError(Exception):
    """Somebody else has changed the file at the source meanwhile."""


class Growth:
    """``object_fd`` and ``file_fd``, the file at the source, are its own from then on; ``by`` is
    who writes there. ``base``: so many bytes there are as in the object."""

    def __init__(self, object_fd: int, file_fd: int, *, by: Credentials | None, base: int) -> None:
        self._fds = [object_fd, file_fd]
        self._by = by
        self._offset = base
        # What a turn that failed has left behind the base is ours.
        self._size = os.fstat(file_fd).st_size
        self._piece = b""

    def left(self, size: int) -> int:
        """Bytes that are missing of ``size``."""
        return size - self._offset

    def read(self, count: int, end: int) -> int:
        """Take up to ``count`` of the next bytes of the object, before ``end``; how many, with
        those of a hole, which are not read. Raises OSError."""
        begins, ends = data_at(self._fds[0], self._offset, end)
        skipped, self._offset = begins - self._offset, begins
        self._piece = os.pread(self._fds[0], min(count, ends - begins), begins)
        return skipped + len(self._piece)

    def write(self) -> Identity:
        """Put the bytes that were read last behind those at the source; what the file is then.

        Raises OSError, OthersWroteError if it is not as it was left.
        """
        fd, view = self._fds[1], memoryview(self._piece)
        status = os.fstat(fd)
        if status.st_size != self._size or status.st_mode & _SET_ID:
            raise OthersWroteError
        try:
            with acting_as(self._by):
                while view:
                    written = os.pwrite(fd, view, self._offset)
                    self._offset += written
                    view = view[written:]
        finally:
            if self._piece:
                self._size = max(self._size, self._offset)
        failpoints.failpoint("drain-staged")
        if not _has(fd, self._piece, self._offset - len(self._piece)):
            raise OSError(errno.EIO, "the source gives other bytes than were written")
        return identity_of(os.fstat(fd))

    def finish(self, size: int, mtime_ns: int | None) -> Identity:
        """Make it durable, with the time of the bytes; what it is. Raises as ``write``."""
        fd = self._fds[1]
        if os.fstat(fd).st_size != self._size or self._size > size:
            raise OthersWroteError
        if self._size < size:
            # It ends in a hole.
            with acting_as(self._by):
                os.ftruncate(fd, size)
        os.fsync(fd)
        if mtime_ns is not None:
            with suppress(PermissionError):
                os.utime(fd, ns=(os.fstat(fd).st_atime_ns, mtime_ns))
            os.fsync(fd)
        failpoints.failpoint("drain-synced")
        return identity_of(os.fstat(fd))

    def close(self) -> None:
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)
        self._fds.clear()


def _has(fd: int, piece: bytes, offset: int) -> bool:
    view, at = memoryview(piece), 0
    while at < len(piece):
        found = os.pread(fd, len(piece) - at, offset + at)
        if not found or view[at : at + len(found)] != found:
            return False
        at += len(found)
    return True
