"""Brings what was appended to a file behind the bytes that the source has of it, in place.

The calls of ``Growth`` may wait for the source for any time: they run in worker threads, one at a
time. ``Grower`` belongs to the event loop.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from dataclasses import dataclass

from monarch.posix import failpoints
from monarch.posix.credentials import Credentials, acting_as
from monarch.posix.files import data_at
from monarch.posix.thread_pool import ThreadPool
from monarch.tiers.source import identity_of
from monarch.types import Identity
from monarch.writeback.content_order import ContentOrder
from monarch.writeback.expected import grown_to, with_known_time
from monarch.writeback.mover import TURN_BYTES, Courtesy
from monarch.writeback.objects import Objects, of_tier
from monarch.writeback.op import Op
from monarch.writeback.progress import Marks
from monarch.writeback.queue_entry import Entry
from monarch.writeback.source_contents import Place
from monarch.writeback.source_state import SourceState
from monarch.writeback.steps import Steps

_SET_ID = stat.S_ISUID | stat.S_ISGID


class OthersWroteError(Exception):
    """Others have changed the file at the source meanwhile."""


class Growth:
    """Closes ``object_fd`` and ``file_fd``, the file at the source. ``by`` is the user who writes
    there. The first ``base`` bytes there are those of the object. ``found`` is what the file was at
    the beginning."""

    def __init__(self, object_fd: int, file_fd: int, *, by: Credentials | None, base: int) -> None:
        self._fds = [object_fd, file_fd]
        self._by = by
        self._offset = base
        # Bytes behind the base were left there by a turn that failed.
        self.found = os.fstat(file_fd)
        self._size = self.found.st_size
        self._piece = b""

    def missing(self, size: int) -> int:
        """The number of bytes that the source's file lacks, of ``size``."""
        return size - self._offset

    def read(self, count: int, end: int) -> int:
        """Read up to ``count`` of the next bytes of the object, before ``end``; their number, with
        the bytes of a hole, which are not read. Raises OSError."""
        begins, ends = data_at(self._fds[0], self._offset, end)
        skipped, self._offset = begins - self._offset, begins
        with of_tier():
            self._piece = os.pread(self._fds[0], min(count, ends - begins), begins)
        return skipped + len(self._piece)

    def write(self) -> Identity:
        """Appends the bytes that were read last to the file at the source; its identity then.
        Raises OSError, OthersWroteError if others have changed the file since the last call."""
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
        """Make the file durable, with the time of its bytes; its identity. Raises as ``write``."""
        fd = self._fds[1]
        if os.fstat(fd).st_size != self._size or self._size > size:
            raise OthersWroteError
        if self._size < size:
            # The object ends in a hole.
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


@dataclass(eq=False, repr=False)
class Grower:
    """Appends the end of a content to the file at the source, if that has its beginning."""

    _objects: Objects
    _threads: ThreadPool
    _state: SourceState
    _order: ContentOrder
    _steps: Steps
    _marks: Marks
    _courtesy: Courtesy
    # Files and bytes that were brought in this way since the start.
    files: int = 0
    bytes: int = 0

    async def grow(self, entry: Entry) -> bool:
        """Appends to the file at the source what was appended on the mount. Returns False if the
        object lost the recorded bytes, or others have changed the file. Raises OSError."""
        op, number = entry.op, entry.op.object
        base = self._state.grows_from(op)
        if base is None or not self._order.is_intact(entry):
            return False
        if self._marks.unsynced.conflicts_with(op):
            await self._marks.sync_done()
        object_fd = -1
        try:
            with of_tier():
                object_fd = await self._threads.run(self._objects.open, number)
                if not await self._threads.run(_is_as_long, self._objects, number, object_fd, op):
                    return False
            opened = await self._threads.run(self._steps.opening_to_grow(entry, base))
            if opened is None:
                return False
            growth = Growth(object_fd, opened[0], by=opened[1], base=base)
            object_fd = -1
        except FileNotFoundError:
            return False
        finally:
            if object_fd >= 0:
                self._threads.start(os.close, object_fd)
        try:
            return await self._grown(entry, growth, base)
        except OthersWroteError:
            self._state.stop_growth(number)
            return False
        finally:
            self._threads.start(growth.close)

    async def _grown(self, entry: Entry, growth: Growth, base: int) -> bool:
        op, number = entry.op, entry.op.object
        known = self._state.identity(number)
        assert known is not None
        if not op.synced:
            self._marks.durable(entry)
        # By this mark the next mount knows that bytes behind the known ones are of this journal.
        entry.place = Place(source_ino=known.source_ino)
        self._marks.staged({entry: grown_to(op.size)})
        await self._marks.sync(entry.record)
        while missing := growth.missing(op.size):
            count = min(missing, TURN_BYTES)
            await self._courtesy.wait(count)
            if not await self._threads.run(growth.read, count, op.size):
                return False
            if not self._order.is_intact(entry):
                return False
            self._state.note_grown(number, await self._threads.run(growth.write))
        identity = await self._threads.run(growth.finish, op.size, op.mtime_ns)
        self._state.note_grown(number, with_known_time(known, growth.found, identity))
        self._state.note_version(number, Identity(op.size, op.mtime_ns or 0, 0, 0))
        self.files += op.size > base
        self.bytes += op.size - base
        entry.published = entry.is_grown = True
        return True


def _is_as_long(objects: Objects, number: int, fd: int, op: Op) -> bool:
    """Whether an object has the bytes of a content, which are on the disk then."""
    if not op.synced:
        objects.sync(number, fd)
    return os.fstat(fd).st_size >= op.size


def _has(fd: int, piece: bytes, offset: int) -> bool:
    view, at = memoryview(piece), 0
    while at < len(piece):
        found = os.pread(fd, len(piece) - at, offset + at)
        if not found or view[at : at + len(found)] != found:
            return False
        at += len(found)
    return True
