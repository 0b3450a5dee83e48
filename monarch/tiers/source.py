"""The source: opens and reads its files. Every call may wait as long as the source likes.

Call nothing here on the event loop. A file is opened beneath the root's descriptor, never
through a symbolic link, and only regular files are opened: a fifo that took a file's place
must not hang a reader.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass

from monarch.beneath import lstat_beneath, open_beneath
from monarch.errors import SourceChanged, SourceError
from monarch.types import Identity

# O_NONBLOCK so that opening a fifo returns at once; regular files do not know it.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY

# What reading answers of a directory, and of a fifo.
_NOT_READ_LIKE_A_FILE = (errno.EISDIR, errno.ESPIPE)

_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENXIO)

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_EMPTY_PATH = 0x1000
# STATX_MTIME | STATX_CTIME | STATX_INO | STATX_SIZE of linux/stat.h
_STATX_IDENTITY = 0x40 | 0x80 | 0x100 | 0x200


@dataclass(frozen=True, slots=True)
class Fetched:
    """A whole small file. ``reads`` is how many read calls the source has seen for it."""

    data: bytes
    reads: int


class SourceFile:
    """An open source file, shared by a reader's binding and the copy that follows it.

    The last ``release`` hands the descriptor to ``close``; ``read_up_to`` is where a reader that
    goes through the file from its start has got to, in bytes. It belongs to the event loop, only
    reads of ``fd`` may run in any thread.
    """

    __slots__ = ("_close", "_users", "fd", "read_up_to", "status")

    def __init__(self, fd: int, status: os.stat_result, close: Callable[[int], None]) -> None:
        self._close = close
        self.fd = fd
        self.status = status
        self.read_up_to = 0
        self._users = 1

    def retain(self) -> SourceFile:
        self._users += 1
        return self

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._close(self.fd)
            self.fd = -1


def identity_now(fd: int) -> Identity:
    """The identity of an open file as the source's client knows it now. Raises OSError.

    Unlike ``fstat`` it does not ask for the time of access, which a read has just made stale: a
    FUSE client would go to its server for that, once for every file of the first epoch.
    """
    buffer = ctypes.create_string_buffer(256)
    if _LIBC.statx(fd, b"", _AT_EMPTY_PATH, _STATX_IDENTITY, buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    source_ino, size = struct.unpack_from("=QQ", buffer, 32)
    ctime_s, ctime_ns = struct.unpack_from("=qI", buffer, 96)
    mtime_s, mtime_ns = struct.unpack_from("=qI", buffer, 112)
    return Identity(size, mtime_s * 10**9 + mtime_ns, ctime_s * 10**9 + ctime_ns, source_ino)


def identity_of(status: os.stat_result) -> Identity:
    return Identity(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


class Source:
    """The directory being mounted. Raises SourceError if it is missing or no directory.

    ``close`` is how a file is closed that was kept open: even that may ask the source's server.
    """

    def __init__(self, path: bytes, close: Callable[[int], None] = os.close) -> None:
        self.path = path
        self._close = close
        try:
            self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(
                f"source {os.fsdecode(path)!r}: {error.strerror}",
                errno=error.errno or errno.EIO,
                hint="check that the directory exists and that its file system is mounted",
            ) from error

    def close(self) -> None:
        os.close(self._root)

    @property
    def directory(self) -> int:
        """The descriptor of the root."""
        return self._root

    def status(self, path: bytes) -> os.stat_result:
        return lstat_beneath(self._root, path)

    def open(self, path: bytes) -> SourceFile:
        """One open and one fstat. Raises OSError, or SourceChanged if it is no regular file."""
        fd = self._opened(path)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise SourceChanged(f"{os.fsdecode(path)!r} is no longer a file")
        except BaseException:
            os.close(fd)
            raise
        return SourceFile(fd, status, self._close)

    def fetch(self, path: bytes, identity: Identity) -> Fetched:
        """Open a small file, take it whole and close it again.

        It is compared with that version when its bytes are here: then it has been that version
        all the while. Raises OSError, and SourceChanged if it is another or no file any more.
        """
        fd = self._opened(path)
        try:
            return read_whole(fd, identity)
        except OSError as error:
            if error.errno in _NOT_READ_LIKE_A_FILE:
                raise SourceChanged(f"{os.fsdecode(path)!r} is no longer a file") from error
            raise
        finally:
            os.close(fd)

    def _opened(self, path: bytes) -> int:
        try:
            return open_beneath(self._root, path, _FLAGS)
        except OSError as error:
            # A link in the place of a file or of one of its directories is another thing.
            if error.errno in _NO_SUCH_FILE:
                raise SourceChanged(f"{os.fsdecode(path)!r} is no longer a file") from error
            raise


def read_whole(fd: int, identity: Identity) -> Fetched:
    """A whole file in as few reads as the source allows, one where it returns all.

    Raises OSError, and SourceChanged if it is not, or no longer, the version given.
    """
    parts: list[bytes] = []
    offset = reads = 0
    while offset < identity.size:
        part = os.pread(fd, identity.size - offset, offset)
        reads += 1
        if not part:
            break
        parts.append(part)
        offset += len(part)
    if offset != identity.size or identity_now(fd) != identity:
        raise SourceChanged("the file changed while it was read")
    return Fetched(parts[0] if len(parts) == 1 else b"".join(parts), reads)
