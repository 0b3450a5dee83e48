"""The file of the journal: records appended, synced, and replaced by fewer.

A record that was appended outlives the daemon; one that was synced outlives the machine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from monarch.posix import failpoints
from monarch.posix.files import sync_path, write_in_place
from monarch.posix.private_directory import open_private
from monarch.text import KiB, MiB, errno_words
from monarch.writeback.journal_records import Record, decoded, encoded
from monarch.writeback.reserve import Reserve, reserve_bytes, share_of

_STAGED = "journal.part"
_BLOCK = 512
_FLAGS = os.O_RDWR | os.O_CREAT

_LIBC = ctypes.CDLL(None, use_errno=True)
_FALLOC_FL_KEEP_SIZE = 1
# The file has room on its disk before it needs it. The room for marks and removals, which must be
# recorded when the disk is full, is a 256th of the disk, within these bounds. More is allocated
# when less is left.
_SCARCE_BYTES = (64 * KiB, 1 * MiB)
_SCARCE_SHARE = 256
_AHEAD_BYTES = 4 * MiB
# The share of the disk's free room that is allocated ahead.
_AHEAD_SHARE = 4
# How much of the file is read at once.
_PIECE_BYTES = 64 * KiB
# The number of lines between two pauses. They take about half a millisecond.
_STRIDE = 16
# Records that come while the file is replaced are copied before appends and syncs have to wait,
# until at most so many bytes of them are left, and at most so often.
_LAST_BYTES, _MOST_CATCHING_UP = 32 * KiB, 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def nothing() -> None: ...


class JournalFile:
    """The journal's file; ``open`` makes one. ``append`` is quick; ``sync`` and ``replace`` wait
    for the disk. All methods may be called from any thread.

    ``position`` is the offset of the next record in bytes; the first ``synced_bytes`` are on the
    disk. Of the ``written`` records the first ``synced`` are on the disk; the records that the file
    had when it was opened count as one.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        # ``synced_bytes`` as the last record has it, and the end of the allocated room. The lock is
        # held for no longer than a write to the page cache.
        self._lock = threading.Lock()
        self.position = os.fstat(fd).st_size
        self.synced_bytes = 0
        self._said = 0
        self._room = 0
        # Whether a quota was reached when room was allocated last: ``statvfs`` does not show it.
        self._is_at_quota = False
        # Whether a record did not fit into allocated room: btrfs counts it for a quota once more.
        self._is_unusable = self._has_part = False
        disk = os.fstatvfs(fd)
        self._scarce = share_of(disk, _SCARCE_SHARE, _SCARCE_BYTES)
        self._reserve_bytes = reserve_bytes(disk)
        self._reserve = Reserve(path.parent)
        self.written, self.synced = 1, 0
        # One sync at a time; threads that come meanwhile share the next.
        self._turn = threading.Condition()
        self._syncing = False
        self._failed: OSError | None = None

    @classmethod
    def open(cls, path: Path) -> JournalFile:
        """Opens the file; creates an empty one if there is none. Raises OSError."""
        fd = open_private(path, _FLAGS)
        write_in_place(fd)
        try:
            return cls(path, fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def kept(self) -> int:
        """The room in bytes that is kept for a full disk: allocated ahead, and in the reserve."""
        return self._scarce + self._reserve_bytes

    @property
    def failed(self) -> str:
        """Why syncs fail, until the file is replaced; empty while syncs succeed."""
        return errno_words(self._failed.errno) if self._failed is not None else ""

    def begin(self, record: Record) -> None:
        """Writes the first record of a new journal. Raises OSError."""
        line = encoded(record)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, line, 0)
        os.fsync(self.fd)
        # The directories above may be new as well.
        for directory in list(self.path.parents)[:3]:
            sync_path(directory)
        self.position = len(line)

    def cut(self, end: int) -> None:
        """Cuts off the bytes after the last complete record. Raises OSError."""
        os.ftruncate(self.fd, end)
        os.fsync(self.fd)
        self.position = end

    def remove_staged(self) -> None:
        """Removes the temporary file of an interrupted ``replace``. Raises OSError."""
        self.path.with_name(_STAGED).unlink(missing_ok=True)

    def append(self, *records: Record, keep: int = 0) -> int:
        """Appends records, which then survive a kill of the daemon; returns their length in bytes.
        ``keep``: ENOSPC if less than this number of bytes would be left on a full disk. Raises
        OSError, and then no part of them is in the file."""
        with self._lock:
            if self.synced_bytes > self._said:
                records[0]["upto"] = self.synced_bytes
            lines = b"".join(map(encoded, records))
            if not self._want_room(len(lines)) and keep and self._left() < len(lines) + keep:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self.path))
            try:
                self._put_at_last(lines)
            except OSError:
                self._is_unusable = self._allocated_bytes() >= len(lines)
                raise
            self._is_unusable = False
            self.position += len(lines)
            self.written += len(records)
            self._said = self.synced_bytes
        return len(lines)

    def _put_at_last(self, lines: bytes) -> None:
        try:
            self._put(lines)
        except OSError as error:
            if error.errno not in _FULL or not self._reserve.give_up():
                raise
            self._put(lines)

    def _put(self, lines: bytes) -> None:
        if self._has_part:
            os.ftruncate(self.fd, self.position)
        self._has_part = os.pwrite(self.fd, lines, self.position) < len(lines)
        if self._has_part:
            self._room = 0  # The disk is full. If the part stays now, the next call removes it.
            os.ftruncate(self.fd, self.position)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self.path))

    def has_room(self, count: int) -> bool:
        """Whether ``count`` bytes may be appended without using the room for marks."""
        with self._lock:
            return self._want_room(count)

    def has_left(self, count: int) -> bool:
        """Whether ``count`` bytes may be appended, with the room for marks and the reserve."""
        with self._lock:
            return self._want_room(count) or self._left() >= count

    def _left(self) -> int:
        """The number of bytes that may still be appended, after ``_want_room`` has refused."""
        if self._is_unusable:
            return self._reserve.held
        with suppress(OSError):
            disk, allocated = os.fstatvfs(self.fd), self._allocated_bytes()
            available = 0 if self._is_at_quota else disk.f_bavail * disk.f_frsize
            return allocated + available + self._reserve.held
        return 0

    def _allocated_bytes(self) -> int:
        # An earlier mount may have allocated room as well.
        return max(0, os.fstat(self.fd).st_blocks * _BLOCK - self.position)

    def _want_room(self, count: int) -> bool:
        wanted = count + self._scarce
        self._is_unusable = self._is_unusable and not self._reserve.can_allocate(wanted)
        if self._is_unusable or self.position + wanted <= self._room:
            return not self._is_unusable
        try:
            disk, is_there = os.fstatvfs(self.fd), self._allocated_bytes()
        except OSError:
            return True
        available = disk.f_bavail * disk.f_frsize
        length = max(2 * wanted, min(_AHEAD_BYTES, available // _AHEAD_SHARE))
        for size in (length, wanted):
            if size - is_there <= available and self._allocated(size):
                self._room = self.position + size
                return True
        return False

    def _allocated(self, size: int) -> bool:
        offset, length = ctypes.c_longlong(self.position), ctypes.c_longlong(size)
        failed = _LIBC.fallocate(self.fd, _FALLOC_FL_KEEP_SIZE, offset, length)
        number = ctypes.get_errno() if failed else 0
        self._is_at_quota = number == errno.EDQUOT
        # Not every file system supports it.
        return number not in _FULL

    def free_ahead(self) -> None:
        """Frees the room that is allocated ahead, for a file that replaces this one. Raises
        OSError."""
        with self._lock:
            os.ftruncate(self.fd, self.position)
            self._room = 0

    def sync(self) -> None:
        """Waits until everything appended so far is on the disk; callers share the wait.

        Raises OSError. After a failure it fails again until ``replace`` has written another file:
        the kernel reports a failed write once only.
        """
        wanted = self.written
        with self._turn:
            while self._syncing and self.synced < wanted:
                self._turn.wait()
            if self.synced >= wanted:
                return
            self._syncing = True
        try:
            if self._failed is not None:
                raise OSError(self._failed.errno, self._failed.strerror)
            with self._lock:
                end, written = self.position, self.written
            try:
                os.fdatasync(self.fd)
            except OSError as error:
                self._failed = error
                raise
            self.synced_bytes, self.synced = end, written
        finally:
            self._end_turn()
        failpoints.failpoint("journal-synced")

    def _end_turn(self) -> None:
        with self._turn:
            self._syncing = False
            self._turn.notify_all()

    def read(self, position: int) -> bytes:
        """Everything before ``position``. Raises OSError."""
        with self._lock:
            return os.pread(self.fd, position, 0)

    def lines(self, start: int, end: int) -> Iterator[bytes]:
        """The lines between two offsets, with their newlines; a piece of the file is held at once.
        Raises OSError."""
        rest = b""
        while start < end:
            piece = os.pread(self.fd, min(_PIECE_BYTES, end - start), start)
            if not piece:
                break
            start += len(piece)
            *lines, rest = (rest + piece).splitlines(keepends=True)
            yield from lines
            if rest.endswith(b"\n"):
                yield rest
                rest = b""
        if rest:
            yield rest

    def records(self, start: int, end: int) -> Iterator[Record]:
        """The records between two offsets, without what they say of positions; one is held at once.
        Raises OSError."""
        return map(self.record, self.lines(start, end))

    def paced(self, start: int, end: int, pause: Callable[[], object]) -> Iterator[bytes]:
        """As ``lines``, with a ``pause`` after a few of them for other threads."""
        for count, line in enumerate(self.lines(start, end), 1):
            yield line
            if count % _STRIDE == 0:
                pause()

    def record(self, line: bytes) -> Record:
        """The record of a line of the file. Raises OSError if it is damaged."""
        record = decoded(line.removesuffix(b"\n"))
        if record is None:
            raise OSError(errno.EIO, "the journal has changed on its disk", os.fspath(self.path))
        record.pop("upto", None)
        return record

    def replace(
        self,
        first: Callable[[], Iterable[Record | bytes]],
        end: int,
        pause: Callable[[], object] = nothing,
    ) -> None:
        """Replaces all records before the offset ``end`` by those, or those lines, that ``first``
        returns.

        Appends continue meanwhile. Syncs and appends wait for no more than a rename and a few
        records: those that come meanwhile are copied before, with a ``pause`` after each few.
        Raises OSError. The file is then unchanged, or its name may not be durable: then syncs fail.
        """
        try:
            self._replace(first(), end, pause)
        except OSError as error:
            if error.errno not in _FULL or not self._reserve.give_up():
                raise
            self._replace(first(), end, pause)

    def _replace(
        self, first: Iterable[Record | bytes], end: int, pause: Callable[[], object]
    ) -> None:
        staged = self.path.with_name(_STAGED)
        fd = open_private(staged, _FLAGS | os.O_TRUNC)
        write_in_place(fd)
        try:
            _write(fd, first)
            os.fdatasync(fd)
            failpoints.failpoint("journal-staged")
            end = self._catch_up(fd, end, pause)
            with self._turn:
                while self._syncing:
                    self._turn.wait()
                self._syncing = True
            try:
                fd, synced = self._take_over(fd, staged, end)
                self._sync_name()
                # Not before: callers of ``sync`` rely on it.
                self.synced, self._failed = synced, None
            finally:
                self._end_turn()
        except OSError:
            with suppress(OSError):
                staged.unlink()
            raise
        finally:
            os.close(fd)

    def _catch_up(self, fd: int, end: int, pause: Callable[[], object]) -> int:
        """Copies records from ``end`` on until few are left; returns their offset."""
        for _ in range(_MOST_CATCHING_UP):
            later = self.position
            if later - end <= _LAST_BYTES:
                break
            _write(fd, map(self.record, self.paced(end, later, pause)))
            os.fdatasync(fd)
            end = later
        return end

    def _take_over(self, fd: int, staged: Path, end: int) -> tuple[int, int]:
        """Continues in another file, which replaces all records before ``end``; returns the
        descriptor of the old file, and how many records are on the disk once the name is."""
        with self._lock:
            later = self.position
        if _write(fd, self.records(end, later)):
            os.fdatasync(fd)
        with self._lock:
            if self.fd < 0:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            # Records that came meanwhile are not synced, and no caller relies on them yet.
            synced = os.fstat(fd).st_size
            late = _write(fd, self.records(later, self.position))
            staged.rename(self.path)
            fd, self.fd = self.fd, fd
            self.position = os.fstat(self.fd).st_size
            self.synced_bytes, self._said, self._room = synced, 0, 0
            return fd, self.written - late

    def _sync_name(self) -> None:
        """Makes the name of another file durable. If that fails, a power cut may bring the old file
        back, and so syncs fail until the next file. Raises OSError, EIO."""
        try:
            sync_path(self.path.parent)
        except OSError as error:
            self._failed = error
            raise OSError(errno.EIO, error.strerror, os.fspath(self.path)) from error

    def close(self) -> None:
        # A thread in ``replace`` may still run: it must not replace the file of another daemon.
        with self._lock:
            fd, self.fd = self.fd, -1
            os.close(fd)
            # It writes to its temporary file for nothing.
            with suppress(OSError):
                self.remove_staged()


def _write(fd: int, records: Iterable[Record | bytes]) -> int:
    """Appends records, or their lines, to a file; returns their number."""
    written = 0
    with open(fd, "ab", closefd=False) as file:
        for record in records:
            file.write(record if isinstance(record, bytes) else encoded(record))
            written += 1
    return written
