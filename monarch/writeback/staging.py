"""Copies the bytes of one content from its object to a staged file, beside its name at the source.

The calls may wait for the source without a limit: they run in worker threads, one at a time.
``close`` may be called while a call hangs; the descriptors are then closed when that call returns.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import xxhash

from monarch.posix import failpoints
from monarch.posix.credentials import Credentials, acting_as
from monarch.posix.files import data_at
from monarch.text import MiB
from monarch.tiers.source import identity_now
from monarch.types import Identity
from monarch.writeback.objects import Objects, of_tier

_PIECE_BYTES = 1 * MiB
_HOLE = bytes(_PIECE_BYTES)
_OTHER_BYTES = "the source gives other bytes than were written"
_SYNC_BYTES = 64 * MiB
_SYNC_FILE_RANGE_WRITE = 2

_LIBC = ctypes.CDLL(None, use_errno=True)


class Staging:
    """Stages object ``number``. ``open_part`` opens the staged file, empty, to read and write. It
    returns the descriptor, and the user with whose rights the bytes are written, None for the
    daemon's own.

    The order of calls: ``open``; ``begin``; ``turn`` until it returns 0; ``finish``, or
    ``apply_attributes`` and ``sync``; then optionally ``verify`` until it returns 0. Each raises
    OSError. ``moved`` is the present length of the staged file, with holes, in bytes. The copy is
    limited to the first ``limit`` bytes, if that is set before the first ``turn``.
    """

    def __init__(
        self,
        objects: Objects,
        number: int,
        *,
        open_part: Callable[[], tuple[int, Credentials | None]],
    ) -> None:
        self._objects = objects
        self._number = number
        self._open_part = open_part
        self._fds: list[int] = []
        self._by: Credentials | None = None
        self._digest = xxhash.xxh3_128()
        self.moved = 0
        # The ranges of the copied data: the first offset, and the offset behind the last byte.
        self._data: list[tuple[int, int]] = []
        self.limit: int | None = None
        self._synced_bytes = 0
        self._read_back = xxhash.xxh3_128()
        self._read_bytes = 0
        # The number of ranges of ``_data`` that were read back.
        self._compared = 0
        self._lock = threading.Lock()
        self._busy = False
        self._is_failed = False
        self._closed = threading.Event()

    def open(self, *, sync: bool) -> Identity:
        """Opens the object; returns its identity. With ``sync`` its bytes are on the disk then,
        unless a sync of it has failed before. Raises FileNotFoundError if it does not exist.
        ``sync_object`` and ``turn``, too, raise TierCallError if the tier is the cause."""
        with self._using(), of_tier():
            fd = self._objects.open(self._number)
            self._fds.append(fd)
            if sync and not self._objects.failure(self._number):
                self._objects.sync(self._number, fd)
            return identity_now(fd)

    def start_object_writeback(self) -> None:
        """Starts the writing of the object's bytes to the disk, without waiting for the end."""
        with self._using():
            start_writeback(self._fds[0])

    def sync_object(self) -> Identity:
        """Waits until the object's bytes are on the disk; returns its identity."""
        with self._using(), of_tier():
            self._objects.sync(self._number, self._fds[0])
            return identity_now(self._fds[0])

    def version(self) -> Identity:
        """The present identity of the object."""
        with self._using():
            return identity_now(self._fds[0])

    def begin(self) -> None:
        """Opens the empty staged file."""
        with self._using():
            part_fd, self._by = self._open_part()
            self._fds.append(part_fd)

    def turn(self, count: int) -> int:
        """Copies up to ``count`` bytes, without holes; returns their number, 0 at the end."""
        with self._using():
            object_fd, part_fd = self._fds
            moved = 0
            end = os.fstat(object_fd).st_size if self.limit is None else self.limit
            while moved < count and self.moved < end:
                begins, ends = data_at(object_fd, self.moved, end)
                self.moved = begins
                if begins == end:
                    # Only a hole follows, or the object was truncated; then its identity differs.
                    break
                wanted = min(_PIECE_BYTES, count - moved, ends - begins)
                with of_tier():
                    piece = os.pread(object_fd, wanted, begins)
                if not piece:
                    break
                self._digest.update(piece)
                with acting_as(self._by):
                    _write(part_fd, piece, begins)
                moved += len(piece)
                self.moved += len(piece)
                if self._data and self._data[-1][1] == begins:
                    self._data[-1] = self._data[-1][0], self.moved
                else:
                    self._data.append((begins, self.moved))
            if self.moved - self._synced_bytes >= _SYNC_BYTES:
                # Synced in between, so that the sync at the end does not last for minutes.
                os.fdatasync(part_fd)
                self._synced_bytes = self.moved
            return moved

    def finish(self, apply: Callable[[int], None]) -> None:
        """Completes the staged file with ``apply``, and makes it durable."""
        self.apply_attributes(apply)
        self.sync()

    def apply_attributes(self, apply: Callable[[int], None]) -> None:
        """Sets the length of the staged file, calls ``apply`` with its descriptor, and starts the
        writing of its bytes to the source's disk."""
        with self._using():
            _, part_fd = self._fds
            if os.fstat(part_fd).st_size != self.moved:
                os.ftruncate(part_fd, self.moved)
            failpoints.failpoint("drain-staged")
            apply(part_fd)
            start_writeback(part_fd)

    def sync(self) -> None:
        """Makes the staged file durable. Call it after ``apply_attributes``."""
        with self._using():
            _, part_fd = self._fds
            os.fsync(part_fd)
            failpoints.failpoint("drain-synced")
            with suppress(OSError):
                os.posix_fadvise(part_fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def expect(self) -> None:
        """Starts to read the durable staged file ahead, for ``verify``, without waiting."""
        with self._using(), suppress(OSError):
            os.posix_fadvise(self._fds[1], 0, 0, os.POSIX_FADV_WILLNEED)

    def verify(self, count: int) -> int:
        """Reads back up to ``count`` bytes; returns their number, 0 at the end. Raises EIO if they
        differ from the written bytes."""
        with self._using():
            _, part_fd = self._fds
            read = 0
            while read < count:
                is_hole, end = self._next_to_compare()
                if self._read_bytes == end:
                    break
                # In a hole only the ranges are read that the source reports as data. They must be
                # zeros.
                ends = end
                if is_hole:
                    self._read_bytes, ends = data_at(part_fd, self._read_bytes, end)
                    if self._read_bytes == end:
                        continue
                wanted = min(_PIECE_BYTES, ends - self._read_bytes)
                piece = os.pread(part_fd, wanted, self._read_bytes)
                if not piece or (is_hole and piece != _HOLE[: len(piece)]):
                    raise OSError(errno.EIO, _OTHER_BYTES)
                if not is_hole:
                    self._read_back.update(piece)
                self._read_bytes += len(piece)
                read += len(piece)
            if read < count and (
                self._read_back.digest() != self._digest.digest()
                or os.fstat(part_fd).st_size != self.moved
            ):
                raise OSError(errno.EIO, _OTHER_BYTES)
            return count if read >= count else 0

    def _next_to_compare(self) -> tuple[bool, int]:
        """The next range to be read back: whether it is a hole of the object, and its end."""
        while self._compared < len(self._data):
            begins, ends = self._data[self._compared]
            if self._read_bytes < begins:
                return True, begins
            if self._read_bytes < ends:
                return False, ends
            self._compared += 1
        return True, self.moved

    def close(self) -> None:
        """Closes the descriptors; if a call is under way, they are closed when it returns. If a
        call has failed, the staged file is empty then. May wait for the source."""
        with self._lock:
            self._closed.set()
            if self._busy:
                return
        self._close()

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._lock:
            if self._closed.is_set():
                raise OSError(errno.ECANCELED, "it was given up")
            self._busy = True
        try:
            yield
        except OSError:
            self._is_failed = True
            raise
        finally:
            with self._lock:
                self._busy = False
                must_close = self._closed.is_set()
            if must_close:
                self._close()

    def _close(self) -> None:
        if self._is_failed:
            # Until the next try, its bytes would take the room that other changes need.
            for part_fd in self._fds[1:]:
                with suppress(OSError):
                    os.ftruncate(part_fd, 0)
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)
        self._fds.clear()


def start_writeback(fd: int) -> None:
    """Starts the writing of a file's dirty pages, if its file system supports that."""
    nothing = ctypes.c_longlong(0)
    _LIBC.sync_file_range(fd, nothing, nothing, _SYNC_FILE_RANGE_WRITE)


def _write(fd: int, piece: bytes, offset: int) -> None:
    view = memoryview(piece)
    while view:
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]
