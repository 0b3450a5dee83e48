"""The source: opens and reads its files. Every call may wait without a limit.

Call nothing here on the event loop. A file is opened relative to the descriptor of the root, never
through a symbolic link, and only regular files are opened: a fifo in the place of a file must not
block a reader.

If the client of the source dies, it is mounted again at its path, and all old descriptors fail with
ENOTCONN or ESTALE. Then the root is opened again by its path, if that leads to the same directory,
and so is a file that readers have open, if it is the same version.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import SourceChanged, SourceError, source_remedy
from monarch.posix import acl
from monarch.posix.acl import Acls
from monarch.posix.credentials import Credentials, acting_as
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import lstat_beneath, open_beneath
from monarch.text import MiB
from monarch.tiers.extents import Extents
from monarch.types import Identity, Ino, kept_ns

log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")
T = TypeVar("T")

# O_NONBLOCK lets the open of a fifo return at once; regular files ignore it.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
# The errors of reading a directory, and a fifo.
_NOT_READ_LIKE_A_FILE = (errno.EISDIR, errno.ESPIPE)
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENXIO)
# The errors for a file that was removed or replaced.
NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})

# The errors of a descriptor whose file system was unmounted.
LEFT_BEHIND = frozenset(
    {errno.ENOTCONN, errno.ESTALE, errno.ESHUTDOWN, errno.ECONNABORTED, errno.ENODEV}
)
# The interval of attempts to open such a source again.
_RETRY_S = 1.0
# The root is recognised by at most this many names in it, with their inode numbers.
_KNOWN_BY = 16

# A read that begins at most this far from the end of the last one continues a sequential read:
# readahead of the kernel arrives out of order. In bytes, as in fuse/native/_requests.c.
REACH_GAP = 2 * MiB

_ROOT_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_EMPTY_PATH = 0x1000
# STATX_MTIME | STATX_CTIME | STATX_INO | STATX_SIZE of linux/stat.h
_STATX_IDENTITY = 0x40 | 0x80 | 0x100 | 0x200


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bytes of a small file. ``reads`` and ``opens`` are the numbers of calls at the source, 0
    if another node has given the bytes."""

    data: bytes
    reads: int
    opens: int = 1

    @property
    def read_bytes(self) -> int:
        """The bytes that were read from the source."""
        return len(self.data) if self.reads else 0


@dataclass(slots=True, eq=False)
class SourceFile:
    """An open source file, shared by a reader's binding and the copy that follows the reader.

    The last ``release`` passes the descriptor to ``close``. ``read_up_to`` is the position, in
    bytes, of a reader that reads the file from its start. ``is_fixed``: the file never has another
    version than at its open, and ``status`` alone tells which. ``is_right`` returns whether the
    file has the XXH3 (64 bits) of all bytes that were read; None if that is not known. The object
    belongs to the event loop; only reads of ``fd`` may run in any thread.
    """

    fd: int
    status: os.stat_result
    close: Callable[[int], None]
    read_up_to: int = 0
    is_fixed: bool = False
    is_right: Callable[[int], bool] | None = None
    _users: int = 1

    def identity_now(self) -> Identity:
        """The version that the file has now. May wait for the source. Raises OSError."""
        return identity_of(self.status) if self.is_fixed else identity_now(self.fd)

    def note_read(self, offset: int, end: int) -> None:
        """Records that a reader has read from ``offset`` to ``end``."""
        if offset <= self.read_up_to + REACH_GAP:
            self.read_up_to = max(self.read_up_to, end)

    def retain(self) -> SourceFile:
        self._users += 1
        return self

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self.close(self.fd)
            self.fd = -1


def close_result(result: object) -> None:
    """Closes the file that an abandoned call has opened."""
    if isinstance(result, SourceFile):
        result.release()


def identity_now(fd: int) -> Identity:
    """The identity of an open file as the source's client knows it now. Raises OSError.

    Unlike ``fstat`` it does not request the access time, which a read has just made stale: a FUSE
    client would ask its server for that, once for every file of the first epoch.
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


def at_one_of(
    paths: Sequence[bytes], call: Callable[[bytes, Unpack[Args]], T], *args: Unpack[Args]
) -> T:
    """The result of ``call`` for the first of ``paths`` at which it finds its file. The file may
    be moved from an earlier path to a later one meanwhile. In a thread. Raises OSError, and
    SourceChanged."""
    *earlier, last = dict.fromkeys(paths)
    for path in earlier:
        try:
            return call(path, *args)
        except SourceChanged:
            continue
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise
    return call(last, *args)


def identity_of(status: os.stat_result) -> Identity:
    mtime_ns, ctime_ns = kept_ns(status.st_mtime_ns), kept_ns(status.st_ctime_ns)
    return Identity(status.st_size, mtime_ns, ctime_ns, status.st_ino)


class Source:
    """The directory being served. Raises SourceError if it is missing or not a directory. ``close``
    is called to close a file that was kept open: even that may wait for a server."""

    # Where the small files are that have no path of their own; None if all have one.
    extents: Extents | None = None

    def __init__(self, path: bytes, close: Callable[[int], None] = os.close) -> None:
        self.path = path
        self._close = close
        self._reopening = threading.Lock()
        self._reopened = 0
        # ``rights``: the credentials with which this thread opens files.
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
        """The descriptor of the directory in which each file has its path; its number stays the
        same when the root is opened again. -1: there is no such directory."""
        return self._root

    def status(self, path: bytes) -> os.stat_result:
        return self.at_root(self._with_rights, lstat_beneath, path)

    def acting(
        self, rights: Credentials, call: Callable[[Unpack[Args]], T], *args: Unpack[Args]
    ) -> T:
        """Returns ``call(*args)``; all files that it opens by name are opened with ``rights``."""
        self._acting.rights = rights
        try:
            return call(*args)
        finally:
            self._acting.rights = None

    def _with_rights(
        self, root: int, call: Callable[[int, Unpack[Args]], T], *args: Unpack[Args]
    ) -> T:
        with acting_as(getattr(self._acting, "rights", None)):
            return call(root, *args)

    def acls(self, path: bytes) -> Acls:
        """The access control lists of an entry, empty if its file system does not support them."""
        return self.at_root(acl.read_beneath, path)

    def xattrs(self, path: bytes, source_ino: int = 0) -> dict[bytes, bytes]:
        """The extended attributes in the namespace "user" of an entry. Raises OSError, and
        SourceChanged if the entry has another number than ``source_ino``, unless that is 0."""
        return self.at_root(self._with_rights, _xattrs_beneath, path, source_ino)

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

    def open_version(self, path: bytes, identity: Identity) -> SourceFile:
        """As ``open``. Raises SourceChanged if the file has another version than ``identity``."""
        file = self.open(path)
        if identity_of(file.status) != identity:
            os.close(file.fd)
            raise SourceChanged(f"{os.fsdecode(path)!r} differs from the snapshot")
        return file

    def open_known(self, path: bytes, source_ino: int) -> SourceFile:
        """As ``open``, with the rights of the daemon, of the file with that number; with those of
        the caller if it is 0."""
        if not source_ino:
            return self.open(path)
        rights, self._acting.rights = getattr(self._acting, "rights", None), None
        try:
            file = self.open(path)
        finally:
            self._acting.rights = rights
        if file.status.st_ino != source_ino:
            file.release()
            raise SourceChanged(f"{os.fsdecode(path)!r} is another file")
        return file

    def fetch_shared(self, path: bytes, identity: Identity, ino: Ino) -> Fetched:
        """As ``fetch``, but another node that has the file may give its bytes. ``ino``: the inode
        number of the file in the snapshot."""
        return self.fetch(path, identity)

    def read_shared(self, ino: Ino, identity: Identity, offset: int, size: int) -> bytes | None:
        """``size`` bytes of a large file that other nodes give, fewer only at its end; None if they
        must be read from the source."""
        return None

    def asks_others(self, ino: Ino) -> bool:
        """Whether a call for a file waits for another node now. Such a wait has its own limit."""
        return False

    def took(self, seconds: float) -> None:
        """Records how long a read of the source has taken."""

    def fetch(self, path: bytes, identity: Identity) -> Fetched:
        """Opens a small file, reads it completely and closes it.

        Its version is compared after the read: if it is ``identity``, it was that version all the
        time. Raises OSError, and SourceChanged if it is another version or not a file.
        """
        with closing_fd(self._opened(path)) as fd:
            try:
                return read_whole(fd, identity)
            except OSError as error:
                if error.errno in _NOT_READ_LIKE_A_FILE:
                    raise SourceChanged(f"{os.fsdecode(path)!r} is no longer a file") from error
                raise

    def _opened(self, path: bytes) -> int:
        try:
            return self.at_root(self._with_rights, open_beneath, path, _FLAGS)
        except OSError as error:
            # A symbolic link in the place of the file or of one of its directories is a change.
            if error.errno in _NO_SUCH_FILE:
                raise SourceChanged(f"{os.fsdecode(path)!r} is no longer a file") from error
            raise

    def on(
        self,
        file: SourceFile,
        paths: Sequence[bytes],
        call: Callable[[int, Unpack[Args]], T],
        *args: Unpack[Args],
    ) -> T:
        """Returns ``call(fd, *args)`` of an open file; a lost file is opened again at the first
        of ``paths`` that has it. Raises its errors."""
        try:
            return call(file.fd, *args)
        except OSError as error:
            if error.errno not in LEFT_BEHIND or not self._is_renewed(file, paths):
                raise
        return call(file.fd, *args)

    def _is_renewed(self, file: SourceFile, paths: Sequence[bytes]) -> bool:
        """Opens a file again, with the same descriptor number, if it is still that version."""
        try:
            fresh = at_one_of(paths, self.open_version, identity_of(file.status))
        except (OSError, SourceChanged):
            return False
        try:
            os.dup2(fresh.fd, file.fd, inheritable=False)
        finally:
            fresh.release()
        return True

    def at_root(self, call: Callable[[int, Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """Returns ``call(root, *args)``; calls again if the root had to be opened again, so
        ``call`` must be repeatable. Raises its errors."""
        seen = self._reopened
        try:
            return call(self._root, *args)
        except OSError as error:
            if error.errno not in LEFT_BEHIND:
                raise
            if self._reopened == seen and not self._is_reopened():
                raise
        return call(self._root, *args)

    def _is_reopened(self) -> bool:
        """Opens the root again, with the same descriptor number, if its path leads to it."""
        if not self._reopening.acquire(blocking=False):
            return False
        try:
            now = time.monotonic()
            if now - self._tried_s < _RETRY_S:
                return False
            self._tried_s = now
            with closing_fd(os.open(self.path, _ROOT_FLAGS)) as fd:
                if not self._is_known(fd):
                    return False
                os.dup2(fd, self._root, inheritable=False)
            self._reopened += 1
        except OSError:
            return False
        finally:
            self._reopening.release()
        log.info("the source was lost and was opened again at %r", os.fsdecode(self.path))
        return True

    def _is_known(self, fd: int) -> bool:
        """Whether a directory is the root, and not the empty mount point below it."""
        if os.fstat(fd).st_ino != self._root_ino:
            return False
        with os.scandir(fd) as entries:
            return not self._known or any((e.name, e.inode()) in self._known for e in entries)


def _xattrs_beneath(root: int, path: bytes, source_ino: int) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    with closing_fd(open_beneath(root, path, os.O_PATH | os.O_CLOEXEC)) as fd:
        if source_ino and os.fstat(fd).st_ino != source_ino:
            raise SourceChanged(f"{os.fsdecode(path)!r} is another entry")
        # An O_PATH descriptor has extended attributes only by its path in /proc.
        where = b"/proc/self/fd/%d" % fd
        with suppress(OSError):
            for name in os.listxattr(where):
                if name.startswith("user."):
                    found[os.fsencode(name)] = os.getxattr(where, name)
    return found


def read_whole(fd: int, identity: Identity) -> Fetched:
    """Reads a whole file by its descriptor. Raises as ``Source.fetch``."""
    return _read_whole(fd, identity, lambda: identity_now(fd))


def read_open(file: SourceFile, identity: Identity) -> Fetched:
    """Reads a whole open file. Raises as ``Source.fetch``."""
    return _read_whole(file.fd, identity, file.identity_now)


def _read_whole(fd: int, identity: Identity, identity_now: Callable[[], Identity]) -> Fetched:
    """Reads a whole file in as few reads as possible. Raises OSError, and SourceChanged if it is
    not, or no longer, the version ``identity``."""
    parts: list[bytes] = []
    offset = reads = 0
    while offset < identity.size:
        part = os.pread(fd, identity.size - offset, offset)
        reads += 1
        if not part:
            break
        parts.append(part)
        offset += len(part)
    if offset != identity.size or identity_now() != identity:
        raise SourceChanged("the file changed while it was read")
    return Fetched(parts[0] if len(parts) == 1 else b"".join(parts), reads)
