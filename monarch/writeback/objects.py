"""Objects: files in the absorbing tier that hold the bytes of written files, named by a number.

    DIRECTORY/XX/NUMBER      XX is the low byte of NUMBER in hex; mode 0600, the daemon's user

Size, time of modification and holes of an object are those of the written file; all else is in the
journal. A number is never used again. Calls may wait for the tier's disk.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import weakref
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from monarch.posix.files import closing_fd, sync_file_system, sync_path
from monarch.text import MiB

# O_NONBLOCK: another program may have put a fifo in the place of an object.
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# The errors of an open in whose place is no regular file.
_NO_FILE = frozenset({errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENOTDIR})
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
}
# What the daemon or the machine lacks. The disk is not the cause.
SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_BUCKET = re.compile(rb"[0-9a-f]{2}")


def object_path(directory: Path, number: int) -> Path:
    return directory / f"{number & 0xFF:02x}" / str(number)


class NotAnObjectError(FileNotFoundError):
    """Something else is in the place of an object."""


class TierCallError(OSError):
    """A call to the tier's disk has failed."""


@contextmanager
def of_tier() -> Iterator[None]:
    """Makes the error of a call to the tier's disk a TierCallError. A missing object stays
    FileNotFoundError, and an error of ``SCARCE`` stays OSError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in SCARCE:
            raise
        raise TierCallError(error.errno, error.strerror, error.filename) from error


class Objects:
    """The objects in ``directory``, which must exist.

    ``unsynced`` are objects of earlier daemons whose names may not be on the disk. The directory
    is kept open: objects are found there also when its path leads elsewhere, as after a lazy
    unmount of the tier's disk. Raises OSError.
    """

    def __init__(self, directory: Path, *, unsynced: Iterable[int] = ()) -> None:
        self._shown = directory
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        self._directory = b"/proc/self/fd/%d/." % fd
        # Objects, and directories of objects, whose names may not be on the disk.
        self._new: set[int] = set(unsynced)
        self._new_buckets = {os.path.dirname(self._path(number)) for number in self._new}
        self._lock = threading.Lock()
        # The errno of objects whose sync has failed; the objects with a sync under way.
        self._failed: dict[int, int] = {}
        self._syncing: set[int] = set()
        self._turn = threading.Condition()

    def create(self, number: int) -> int:
        """Creates an empty object; returns a descriptor to read and write. Raises OSError."""
        path = self._path(number)
        flags = _FLAGS | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError:
            bucket = os.path.dirname(path)
            # Both under the lock: a thread that finds the bucket also finds it in the set.
            with self._lock, suppress(FileExistsError):
                os.mkdir(bucket, 0o700)
                self._new_buckets.add(bucket)
            fd = os.open(path, flags, 0o600)
        # Only now: ``sync_all`` may clear the number if the object is created after its sync.
        with self._lock:
            self._new.add(number)
        return fd

    def open(self, number: int) -> int:
        """A descriptor to read and write. Raises OSError, FileNotFoundError if the object does not
        exist, and NotAnObjectError if something else is in its place."""
        path = self._path(number)
        try:
            fd = os.open(path, _FLAGS)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise self._replaced(number) from error
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise self._replaced(number)
        return fd

    def status(self, number: int) -> os.stat_result:
        """The object's status. Raises as ``open``."""
        status = os.lstat(self._path(number))
        if not stat.S_ISREG(status.st_mode):
            raise self._replaced(number)
        return status

    def _replaced(self, number: int) -> NotAnObjectError:
        kind = "something else"
        with suppress(OSError):
            kind = _KINDS.get(stat.S_IFMT(os.lstat(self._path(number)).st_mode), kind)
        shown = os.fspath(object_path(self._shown, number))
        return NotAnObjectError(errno.ENOENT, f"{kind} is in the place of its object", shown)

    def sync(self, number: int, fd: int) -> None:
        """Waits until the bytes and the name of an open object are on the disk.

        Raises OSError. After a failure it fails again until ``rewrite`` or ``forget_failure`` is
        called: the kernel reports a failed write once only.
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
        # One sync at a time: of two, the kernel would report the failed write to one only.
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
        """The errno of the failed sync of an object; 0 if none has failed."""
        return self._failed.get(number, 0)

    @property
    def failed(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._failed)

    def note_failure(self, number: int, failure: int) -> None:
        with self._lock:
            self._failed[number] = failure

    def forget_failure(self, number: int) -> None:
        """Call this when all bytes of the object were written after the failed sync."""
        with self._lock:
            self._failed.pop(number, None)

    def rewrite(self, number: int) -> None:
        """Reads the bytes of an object, writes them to their places again and syncs them.

        The object must not be written meanwhile. Raises OSError.
        """
        with closing_fd(self.open(number)) as fd:
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
        self.forget_failure(number)

    def sync_all(self, fd: int) -> None:
        """Waits until the present bytes and names of all objects are on the disk.

        ``fd`` is a descriptor of the directory that was opened before the objects were written.
        Raises OSError if any write to the tier's file system has failed since the last call: the
        kernel reports that once, without the file.
        """
        with self._lock:
            new, new_buckets = set(self._new), set(self._new_buckets)
        try:
            sync_file_system(fd)
        except OSError as error:
            error.filename = os.fspath(self._shown)
            raise
        with self._lock:
            self._new -= new
            self._new_buckets -= new_buckets

    def remove(self, number: int) -> None:
        """Removes the object, if it exists; open descriptors stay valid. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(self._path(number))
        with self._lock:
            self._new.discard(number)
            self._failed.pop(number, None)

    def numbers(self) -> set[int]:
        """The numbers of all objects. Raises OSError."""
        found: set[int] = set()
        with os.scandir(self._directory) as entries:
            buckets = [e.path for e in entries if _BUCKET.fullmatch(e.name)]
        for bucket in buckets:
            with suppress(NotADirectoryError), os.scandir(bucket) as entries:
                found.update(
                    int(e.name)
                    for e in entries
                    if e.name.isdigit() and not e.is_dir(follow_symlinks=False)
                )
        return found

    def sweep(self, known: Set[int]) -> None:
        """Removes the objects that are not in ``known``. Raises OSError."""
        for number in self.numbers() - known:
            os.unlink(self._path(number))

    def _path(self, number: int) -> bytes:
        return b"%s/%02x/%d" % (self._directory, number & 0xFF, number)
