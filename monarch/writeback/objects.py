"""The bytes of absorbed files: one file each in the absorbing tier, named by a number.

    DIRECTORY/XX/NUMBER      XX is the low byte of NUMBER in hex; mode 0600, the daemon's user

Size, time of modification and holes are the file's own; all else is in the journal. A number is
never used again. Calls may wait for the tier's disk.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import threading
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from monarch.posix.names import sync_path
from monarch.units import MiB

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_BUCKET = re.compile(rb"[0-9a-f]{2}")
_LIBC = ctypes.CDLL(None, use_errno=True)


def object_path(directory: Path, number: int) -> Path:
    return directory / f"{number & 0xFF:02x}" / str(number)


class Objects:
    """Those beneath ``directory``, which exists.

    ``unsynced``: objects of earlier lives whose names may not be on the disk.
    """

    def __init__(self, directory: Path, *, unsynced: Iterable[int] = ()) -> None:
        self._directory = os.fsencode(directory)
        # Their names are not known to be on the disk.
        self._new: set[int] = set(unsynced)
        self._new_buckets = {os.path.dirname(self._path(number)) for number in self._new}
        self._lock = threading.Lock()
        # Those whose bytes the disk did not take, and the errno; those that are being synced.
        self._failed: dict[int, int] = {}
        self._syncing: set[int] = set()
        self._turn = threading.Condition()

    def create(self, number: int) -> int:
        """A descriptor of a new, empty object, to read and write. Raises OSError."""
        path = self._path(number)
        flags = _FLAGS | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError:
            bucket = os.path.dirname(path)
            # In one step: who finds the bucket there finds it among the new ones, too.
            with self._lock, suppress(FileExistsError):
                os.mkdir(bucket, 0o700)
                self._new_buckets.add(bucket)
            fd = os.open(path, flags, 0o600)
        # Not before there is something that a sync can find.
        with self._lock:
            self._new.add(number)
        return fd

    def open(self, number: int) -> int:
        """A descriptor to read and write. Raises OSError, ENOENT if there is none."""
        return os.open(self._path(number), _FLAGS)

    def status(self, number: int) -> os.stat_result:
        """Raises OSError, ENOENT if there is none."""
        return os.lstat(self._path(number))

    def sync(self, number: int, fd: int) -> None:
        """Until the bytes of an open object are on the disk, and its name.

        Raises OSError. Once that was so it is so again until the object is ``rewrite``-n or emptied
        (``forget_failure``): the kernel tells once what it could not write, and forgets it.
        """
        self._sync_bytes(number, fd)
        with self._lock:
            if number not in self._new:
                return
            bucket = os.path.dirname(self._path(number))
            is_new = bucket in self._new_buckets
        sync_path(bucket)
        if is_new:
            sync_path(self._directory)
        with self._lock:
            self._new_buckets.discard(bucket)
            self._new.discard(number)

    def _sync_bytes(self, number: int, fd: int) -> None:
        # One after the other: of two at once only one is told of the failure.
        with self._turn:
            while number in self._syncing:
                self._turn.wait()
            self._syncing.add(number)
        try:
            if failure := self.failure(number):
                raise OSError(failure, os.strerror(failure))
            try:
                os.fdatasync(fd)
            except OSError as error:
                self.note_failure(number, error.errno or errno.EIO)
                raise
        finally:
            with self._turn:
                self._syncing.discard(number)
                self._turn.notify_all()

    def failure(self, number: int) -> int:
        """With which errno a sync of the object has failed; 0 if none has."""
        return self._failed.get(number, 0)

    @property
    def failed(self) -> frozenset[int]:
        """Objects of which a sync has failed."""
        with self._lock:
            return frozenset(self._failed)

    def note_failure(self, number: int, failure: int) -> None:
        with self._lock:
            self._failed[number] = failure

    def forget_failure(self, number: int) -> None:
        """All bytes that the object has are written since then."""
        with self._lock:
            self._failed.pop(number, None)

    def rewrite(self, number: int) -> None:
        """Write the bytes of an object once more, as they are read, and sync them.

        Nobody may write it meanwhile. Raises OSError.
        """
        fd = self.open(number)
        try:
            status = os.fstat(fd)
            offset = 0
            while offset < status.st_size:
                try:
                    offset = os.lseek(fd, offset, os.SEEK_DATA)
                except OSError as error:
                    if error.errno != errno.ENXIO:
                        raise
                    break
                piece = os.pread(fd, min(MiB, os.lseek(fd, offset, os.SEEK_HOLE) - offset), offset)
                offset += os.pwrite(fd, piece, offset)
            os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fdatasync(fd)
        finally:
            os.close(fd)
        self.forget_failure(number)

    def sync_all(self, fd: int) -> None:
        """Until all objects are on the disk as they are when this begins, with their names.

        ``fd`` is of the directory and has been open since before they were written. Raises OSError
        if a write to the tier has failed meanwhile: the kernel tells so once, and not of what.
        """
        with self._lock:
            new, new_buckets = set(self._new), set(self._new_buckets)
        if _LIBC.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fsdecode(self._directory))
        with self._lock:
            self._new -= new
            self._new_buckets -= new_buckets

    def remove(self, number: int) -> None:
        """Who has it open goes on. That there is none is fine. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(self._path(number))
        with self._lock:
            self._new.discard(number)
            self._failed.pop(number, None)

    def numbers(self) -> set[int]:
        """Of all objects that there are. Raises OSError."""
        return {int(os.path.basename(path)) for path in self._paths()}

    def sweep(self, known: Container[int]) -> int:
        """Remove those whose number is not in ``known``; how many. Raises OSError."""
        removed = 0
        for path in list(self._paths()):
            if int(os.path.basename(path)) not in known:
                os.unlink(path)
                removed += 1
        return removed

    def _path(self, number: int) -> bytes:
        return b"%s/%02x/%d" % (self._directory, number & 0xFF, number)

    def _paths(self) -> Iterator[bytes]:
        with os.scandir(self._directory) as entries:
            buckets = [e.path for e in entries if _BUCKET.fullmatch(e.name)]
        for bucket in buckets:
            with suppress(NotADirectoryError), os.scandir(bucket) as entries:
                yield from [e.path for e in entries if e.name.isdigit()]
