"""An LMDB file that is open for reading, without a lock and without a map of its bytes."""

from __future__ import annotations

import copy
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from monarch.datasets.lmdb_pages import (
    META_BYTES,
    TRANSACTION_AT,
    Meta,
    page_bytes_of,
    parse_meta,
)
from monarch.datasets.range_reads import RangeReads
from monarch.datasets.ranges import Range
from monarch.errors import LmdbError
from monarch.posix.files import SharedFd
from monarch.text import KiB, escape_text

AnyPath: TypeAlias = str | os.PathLike[str]

# The file of an environment that is a directory.
_IN_DIRECTORY = "data.mdb"
# For one advice the kernel reads no more than its readahead, which has 128 KiB by default.
_READAHEAD_BYTES = 128 * KiB
# The limit of the kernel for one call.
_MOST_BYTES = 0x7FFF_F000
# The interval in which a file is opened again, in seconds.
_OPEN_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Version:
    """What changes when a transaction is committed, or the file is replaced."""

    size: int
    mtime_ns: int
    transaction: int
    page_bytes: int


class LmdbFile:
    """The file ``path``, open, with its valid meta page. Any thread, and a process that was forked,
    may read it. Calls wait for the storage, and raise OSError if it fails, and ValueError when
    the file is closed."""

    def __init__(self, path: Path, fd: int, meta: Meta, version: Version) -> None:
        self.path = path
        self.meta = meta
        self.version = version
        self._shared = SharedFd(fd, escape_text(os.fspath(path)))
        self._reads = RangeReads()
        # When it was last opened. A list: the objects that share the file share it.
        self._opened_s = [time.monotonic()]

    @classmethod
    def open(cls, path: AnyPath) -> LmdbFile:
        """Opens a file, or ``data.mdb`` in a directory. Raises LmdbError if it is not a file of
        LMDB 0.9, and OSError."""
        found = Path(path)
        if found.is_dir():
            found = found / _IN_DIRECTORY
        # A pipe would wait for a writer.
        fd = os.open(found, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            with naming(found):
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise LmdbError("is not a regular file")
                first = os.pread(fd, META_BYTES, 0)
                second = os.pread(fd, META_BYTES, page_bytes_of(first))
                # A writer first makes the file longer, and then refers to the new pages.
                status = os.fstat(fd)
                meta = parse_meta(first, second, status.st_size)
            # Records are read in ranges that were computed: more bytes would be read in vain.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        except BaseException:
            os.close(fd)
            raise
        version = Version(status.st_size, status.st_mtime_ns, meta.transaction, meta.page_bytes)
        return cls(found, fd, meta, version)

    def share(self) -> LmdbFile:
        """Another object of the open file, which is closed with the last of them."""
        shared = copy.copy(self)
        shared._shared = self._shared.share()
        return shared

    def read_into(self, into: memoryview, offset: int) -> None:
        """Fills ``into`` with the bytes from ``offset`` on. Raises LmdbError if the file ends."""
        with self._shared.using() as fd:
            while into:
                count = os.preadv(fd, [into[:_MOST_BYTES]], offset)
                if not count:
                    raise LmdbError(f"ends at byte {offset}; it was changed")
                into, offset = into[count:], offset + count

    def read_ranges(self, into: memoryview, ranges: Sequence[Range]) -> None:
        """Fills ``into`` with the bytes of ranges, one behind the other. Several are read at the
        same time (``RangeReads``). Raises LmdbError if the file ends."""
        with self._shared.using() as fd:
            counts = self._reads.read(fd, ranges, into)
        for count, found in zip(counts, ranges, strict=True):
            if count < found.length:
                raise LmdbError(f"ends at byte {found.offset + count}; it was changed")

    def fetch(self, offset: int, length: int) -> None:
        """Has the kernel read these bytes into the page cache in large parts, in the background;
        those that are there already are not read. Nothing happens if it cannot."""
        with self._shared.using() as fd, suppress(OSError):
            for begin in range(offset, offset + length, _READAHEAD_BYTES):
                os.posix_fadvise(fd, begin, _READAHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    def require_unchanged(self, *, at_once: bool = False) -> None:
        """Raises LmdbError if the file was written since it was opened. On a mount, or a network
        file system, a write is seen within ``_OPEN_AGAIN_S``, or ``at_once``."""
        with self._shared.using() as fd:
            if at_once or time.monotonic() - self._opened_s[0] >= _OPEN_AGAIN_S:
                self._open_again(fd)
            status, transaction = os.fstat(fd), self._transaction(fd)
        found = status.st_size, status.st_mtime_ns, transaction
        if found != (self.version.size, self.version.mtime_ns, self.version.transaction):
            raise LmdbError("was changed while it was read", hint="open it again")

    def _open_again(self, fd: int) -> None:
        """A network file system, or a mount of Monarch, may show an earlier version until a process
        opens the file."""
        with suppress(OSError):
            os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
        self._opened_s[0] = time.monotonic()

    def _transaction(self, fd: int) -> int:
        """The last transaction now. A writer that maps the file changes pages that are not on the
        disk yet without a new modification time."""
        numbers = [
            os.pread(fd, 8, page * self.version.page_bytes + TRANSACTION_AT) for page in (0, 1)
        ]
        return max(int.from_bytes(number, "little") for number in numbers)

    def close(self) -> None:
        """The file is closed as soon as no call reads from it."""
        self._shared.close()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the name of the file before the message of an LmdbError."""
    try:
        yield
    except LmdbError as error:
        message = f"{escape_text(os.fspath(path))} {error.args[0]}"
        raise LmdbError(message, hint=error.hint) from None
