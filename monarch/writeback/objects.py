"""The bytes of absorbed files: one file each in the absorbing tier, named by a number.

    DIRECTORY/XX/NUMBER      XX is the low byte of NUMBER in hex; mode 0600, the daemon's user

Size, time of modification and holes are the file's own; all else is in the journal. A number is
never used again. Calls may wait for the tier's disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def object_path(directory: Path, number: int) -> Path:
    return directory / f"{number & 0xFF:02x}" / str(number)


class Objects:
    """Those beneath ``directory``, which exists."""

    def __init__(self, directory: Path) -> None:
        self._directory = os.fsencode(directory)
        # Made since the start, their names not yet known to be on the disk.
        self._new: set[int] = set()
        self._new_buckets: set[bytes] = set()
        self._lock = threading.Lock()

    def create(self, number: int) -> int:
        """A descriptor of a new, empty object, to read and write. Raises OSError."""
        path = self._path(number)
        flags = _FLAGS | os.O_CREAT | os.O_EXCL
        with self._lock:
            self._new.add(number)
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            bucket = os.path.dirname(path)
            with self._lock:
                self._new_buckets.add(bucket)
            with suppress(FileExistsError):
                os.mkdir(bucket, 0o700)
            return os.open(path, flags, 0o600)

    def open(self, number: int) -> int:
        """A descriptor to read and write. Raises OSError, ENOENT if there is none."""
        return os.open(self._path(number), _FLAGS)

    def status(self, number: int) -> os.stat_result:
        """Raises OSError, ENOENT if there is none."""
        return os.lstat(self._path(number))

    def sync(self, number: int, fd: int) -> None:
        """Until the bytes of an open object are on the disk, and its name. Raises OSError."""
        os.fdatasync(fd)
        with self._lock:
            if number not in self._new:
                return
            bucket = os.path.dirname(self._path(number))
            is_new = bucket in self._new_buckets
        _sync_directory(bucket)
        if is_new:
            _sync_directory(self._directory)
        with self._lock:
            self._new_buckets.discard(bucket)
            self._new.discard(number)

    def remove(self, number: int) -> None:
        """Who has it open goes on. That there is none is fine. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(self._path(number))
        with self._lock:
            self._new.discard(number)

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
            buckets = [e.path for e in entries if e.is_dir(follow_symlinks=False)]
        for bucket in buckets:
            with os.scandir(bucket) as entries:
                yield from [e.path for e in entries if e.name.isdigit()]


def _sync_directory(path: bytes) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
