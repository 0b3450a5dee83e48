"""The source: opens and reads its files. Every call may wait as long as the source likes.

Call nothing here on the event loop. A file is opened beneath the root's descriptor, never
through a symbolic link, and only regular files are opened: a fifo that took a file's place
must not hang a reader.

A source whose client dies is mounted anew at its path, and all descriptors that lead to it answer
ENOTCONN or ESTALE from then on. The root is then opened again by its path, if that leads to the
same directory, and so is a file that readers hold open, if it is the same version.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import os
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from typing_extensions import TypeVarTuple, Unpack

from monarch import acl
from monarch.acl import Acls
from monarch.beneath import lstat_beneath, open_beneath
from monarch.credentials import Credentials, acting_as
from monarch.errors import SourceChanged, SourceError, source_remedy
from monarch.types import Identity, kept_ns
from monarch.units import MiB

log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")
T = TypeVar("T")

# O_NONBLOCK so that opening a fifo returns at once; regular files do not know it.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY

# What reading answers of a directory, and of a fifo.
_NOT_READ_LIKE_A_FILE = (errno.EISDIR, errno.ESPIPE)

_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENXIO)

# What a descriptor answers whose file system was taken away under it.
_LEFT_BEHIND = frozenset(
    {errno.ENOTCONN, errno.ESTALE, errno.ESHUTDOWN, errno.ECONNABORTED, errno.ENODEV}
)
# How often it is tried to open such a source anew. Seconds.
_RETRY_S = 1.0
# So many names of the root, with their inode numbers, are what it is known by.
_KNOWN_BY = 16

# A read so far behind the last one still belongs to a reader that goes through a file from its
# start: what the kernel reads ahead does not come in order. Bytes, as in fuse/_requests.c.
REACH_GAP = 2 * MiB

_ROOT_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

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

    def note_read(self, offset: int, end: int) -> None:
        """A reader has read this far from ``offset`` on."""
        if offset <= self.read_up_to + REACH_GAP:
            self.read_up_to = max(self.read_up_to, end)

    def retain(self) -> SourceFile:
        self._users += 1
        return self

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._close(self.fd)
            self.fd = -1


def let_go(result: object) -> None:
    """Close what a call has opened for somebody who does not wait for it any more."""
    if isinstance(result, SourceFile):
        result.release()


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
    mtime_ns, ctime_ns = mtime_s * 10**9 + mtime_ns, ctime_s * 10**9 + ctime_ns
    return Identity(size, kept_ns(mtime_ns), kept_ns(ctime_ns), source_ino)


def identity_of(status: os.stat_result) -> Identity:
    mtime_ns, ctime_ns = kept_ns(status.st_mtime_ns), kept_ns(status.st_ctime_ns)
    return Identity(status.st_size, mtime_ns, ctime_ns, status.st_ino)


class Source:
    """The directory being mounted. Raises SourceError if it is missing or no directory.

    ``close`` is how a file is closed that was kept open: even that may ask the source's server.
    """

    def __init__(self, path: bytes, close: Callable[[int], None] = os.close) -> None:
        self.path = path
        self._close = close
        self._reopening = threading.Lock()
        self._reopened = 0
        # ``who``: with whose rights this thread opens.
        self._acting = threading.local()
        self._tried_s = -math.inf
        try:
            self._root = os.open(path, _ROOT_FLAGS)
            self._root_ino = os.fstat(self._root).st_ino
            with os.scandir(self._root) as entries:
                self._known = {(entry.name, entry.inode()) for entry in islice(entries, _KNOWN_BY)}
        except OSError as error:
            raise SourceError(
                f"source {os.fsdecode(path)!r}: {error.strerror}",
                errno=error.errno or errno.EIO,
                hint=source_remedy(error.errno, os.fsdecode(path)),
            ) from error

    def close(self) -> None:
        os.close(self._root)

    @property
    def directory(self) -> int:
        """The descriptor of the root: one number for good, whatever has been opened under it."""
        return self._root

    def status(self, path: bytes) -> os.stat_result:
        return self.at_root(self._with_rights, lstat_beneath, path)

    def acting(self, who: Credentials, call: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """``call(*args)``; whatever it opens here by name it opens with the rights of ``who``."""
        self._acting.who = who
        try:
            return call(*args)
        finally:
            self._acting.who = None

    def _with_rights(
        self, root: int, call: Callable[[int, Unpack[Args]], T], *args: Unpack[Args]
    ) -> T:
        with acting_as(getattr(self._acting, "who", None)):
            return call(root, *args)

    def acls(self, path: bytes) -> Acls:
        """The access control lists of an entry, none if its file system has no such thing."""
        return self.at_root(acl.read_beneath, path)

    def xattrs(self, path: bytes) -> dict[bytes, bytes]:
        """The extended attributes of a file or directory that anybody may set. Raises OSError."""
        return self.at_root(self._with_rights, _xattrs_beneath, path)

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
            return self.at_root(self._with_rights, open_beneath, path, _FLAGS)
        except OSError as error:
            # A link in the place of a file or of one of its directories is another thing.
            if error.errno in _NO_SUCH_FILE:
                raise SourceChanged(f"{os.fsdecode(path)!r} is no longer a file") from error
            raise

    def on(
        self,
        file: SourceFile,
        path: bytes,
        call: Callable[[int, Unpack[Args]], T],
        *args: Unpack[Args],
    ) -> T:
        """``call(fd, *args)`` of an open file. Raises what it raises."""
        try:
            return call(file.fd, *args)
        except OSError as error:
            if error.errno not in _LEFT_BEHIND or not self._is_renewed(file, path):
                raise
        return call(file.fd, *args)

    def _is_renewed(self, file: SourceFile, path: bytes) -> bool:
        """Open a file anew under its old descriptor's number, if it still is that version."""
        try:
            fresh = self.open(path)
        except (OSError, SourceChanged):
            return False
        try:
            if identity_of(fresh.status) != identity_of(file.status):
                return False
            os.dup2(fresh.fd, file.fd, inheritable=False)
        finally:
            fresh.release()
        return True

    def at_root(self, call: Callable[[int, Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """``call(root, *args)``; once more if the root had to be opened anew for it.

        So ``call`` must be one that may be made twice. Raises what it raises.
        """
        seen = self._reopened
        try:
            return call(self._root, *args)
        except OSError as error:
            if error.errno not in _LEFT_BEHIND:
                raise
            if self._reopened == seen and not self._is_reopened():
                raise
        return call(self._root, *args)

    def _is_reopened(self) -> bool:
        """Open the root anew, under the number that others know, if its path leads to it again."""
        if not self._reopening.acquire(blocking=False):
            return False
        try:
            now = time.monotonic()
            if now - self._tried_s < _RETRY_S:
                return False
            self._tried_s = now
            fd = os.open(self.path, _ROOT_FLAGS)
            try:
                if not self._is_known(fd):
                    return False
                os.dup2(fd, self._root, inheritable=False)
            finally:
                os.close(fd)
            self._reopened += 1
        except OSError:
            return False
        finally:
            self._reopening.release()
        log.info("the source was lost and is opened anew at %r", os.fsdecode(self.path))
        return True

    def _is_known(self, fd: int) -> bool:
        """Whether a directory is the root: not what is below a mount point without its mount."""
        if os.fstat(fd).st_ino != self._root_ino:
            return False
        with os.scandir(fd) as entries:
            return not self._known or any((e.name, e.inode()) in self._known for e in entries)


def _xattrs_beneath(root: int, path: bytes) -> dict[bytes, bytes]:
    fd = open_beneath(root, path, os.O_PATH | os.O_CLOEXEC)
    found: dict[bytes, bytes] = {}
    try:
        # A descriptor of this kind has attributes only by its path.
        where = b"/proc/self/fd/%d" % fd
        with suppress(OSError):
            for name in os.listxattr(where):
                if name.startswith("user."):
                    found[os.fsencode(name)] = os.getxattr(where, name)
    finally:
        os.close(fd)
    return found


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
