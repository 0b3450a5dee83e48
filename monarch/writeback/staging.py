"""One content on its way: an object's bytes into a staged file beside their name at the source.

The calls wait for the source as long as it likes: they run in worker threads, one at a time. Who
does not wait any more calls ``close``, which leaves to a call that hangs what it still uses.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import xxhash

from monarch import points
from monarch.tiers.source import identity_now
from monarch.types import Identity
from monarch.units import MiB
from monarch.writeback.objects import Objects

_PIECE_BYTES = 1 * MiB
_HOLE = bytes(_PIECE_BYTES)
_SYNC_BYTES = 64 * MiB


@dataclass(frozen=True, slots=True)
class Staged:
    """Whole bytes under a temporary name: ``size`` of them, of the object as ``version`` says."""

    size: int
    version: Identity


class Staging:
    """``open_part`` opens the staged file, empty, to read and write.

    ``open``, ``begin``, ``turn`` until it moves nothing, ``finish``; then perhaps ``verify`` until
    it reads nothing. Each raises OSError.
    """

    def __init__(self, objects: Objects, number: int, *, open_part: Callable[[], int]) -> None:
        self._objects = objects
        self._number = number
        self._open_part = open_part
        self._fds: list[int] = []
        self._digest = xxhash.xxh3_128()
        self._offset = 0
        self._limit: int | None = None
        self._synced_bytes = 0
        self._read_back = xxhash.xxh3_128()
        self._read_bytes = 0
        self._lock = threading.Lock()
        self._busy = False
        self._closed = threading.Event()

    def open(self, *, sync: bool) -> Identity:
        """The object as it is, with ``sync`` when its bytes are on the disk.

        One whose sync has failed before is taken as it is read. Raises FileNotFoundError if there
        is none.
        """
        with self._using():
            fd = self._objects.open(self._number)
            self._fds.append(fd)
            if sync and not self._objects.failure(self._number):
                self._objects.sync(self._number, fd)
            return identity_now(fd)

    @property
    def moved(self) -> int:
        """Bytes that the staged file has so far."""
        return self._offset

    def version(self) -> Identity:
        """The object as it is now."""
        with self._using():
            return identity_now(self._fds[0])

    def limit(self, size: int) -> None:
        """Move no more than the first ``size`` bytes. Before the first turn."""
        self._limit = size

    def begin(self) -> None:
        """Have an empty staged file."""
        with self._using():
            self._fds.append(self._open_part())

    def turn(self, count: int) -> int:
        """Move up to ``count`` bytes; how many, 0 at the end. Holes stay holes."""
        with self._using():
            object_fd, part_fd = self._fds
            moved = 0
            if self._limit is not None:
                count = min(count, self._limit - self._offset)
            while moved < count:
                hole = _hole_at(object_fd, self._offset, count - moved)
                if hole:
                    for start in range(0, hole, _PIECE_BYTES):
                        self._digest.update(_HOLE[: hole - start])
                    size = hole
                else:
                    wanted = min(_PIECE_BYTES, count - moved)
                    piece = os.pread(object_fd, wanted, self._offset)
                    if not piece:
                        break
                    self._digest.update(piece)
                    _write(part_fd, piece, self._offset)
                    size = len(piece)
                moved += size
                self._offset += size
            if self._offset - self._synced_bytes >= _SYNC_BYTES:
                # Not all at the end, in one call that lasts for minutes.
                os.fdatasync(part_fd)
                self._synced_bytes = self._offset
            return moved

    def finish(self, dress: Callable[[int], None]) -> None:
        """Make the staged file whole, dressed by ``dress`` and durable."""
        with self._using():
            _, part_fd = self._fds
            if os.fstat(part_fd).st_size != self._offset:
                os.ftruncate(part_fd, self._offset)
            points.reached("drain-staged")
            dress(part_fd)
            os.fsync(part_fd)
            points.reached("drain-synced")
            with suppress(OSError):
                os.posix_fadvise(part_fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def verify(self, count: int) -> int:
        """Read back up to ``count`` bytes; how many, 0 at the end. EIO if they are others."""
        with self._using():
            _, part_fd = self._fds
            end = self._read_bytes + count
            while self._read_bytes < end:
                piece = os.pread(part_fd, _PIECE_BYTES, self._read_bytes)
                if not piece:
                    break
                self._read_back.update(piece)
                self._read_bytes += len(piece)
            if self._read_bytes < end and self._read_back.digest() != self._digest.digest():
                raise OSError(errno.EIO, "the source gives other bytes than were written")
            return count if self._read_bytes >= end else 0

    def close(self) -> None:
        """May wait for the source like any other call, but not for one that hangs."""
        with self._lock:
            self._closed.set()
            if self._busy:
                return
        self._let_go()

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._lock:
            if self._closed.is_set():
                raise OSError(errno.ECANCELED, "it was given up")
            self._busy = True
        try:
            yield
        finally:
            with self._lock:
                self._busy = False
                left = self._closed.is_set()
            if left:
                self._let_go()

    def _let_go(self) -> None:
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)
        self._fds.clear()


def _hole_at(fd: int, offset: int, count: int) -> int:
    """So many bytes from ``offset`` on, at most ``count``, are a hole."""
    status = os.fstat(fd)
    if status.st_blocks * 512 >= status.st_size:
        return 0
    try:
        begins = os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            return 0
        begins = status.st_size
    return max(0, min(begins - offset, count))


def _write(fd: int, piece: bytes, offset: int) -> None:
    view = memoryview(piece)
    while view:
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]
