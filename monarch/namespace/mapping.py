"""The file of a snapshot, mapped by LMDB or read into memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import ClassVar

import lmdb

from monarch.errors import SnapshotError
from monarch.namespace.trailer import check_opened, check_trailer, opened
from monarch.units import MiB

_READ_BYTES = 4 * MiB


class Mapping:
    """A snapshot file mapped by LMDB, which refuses to map one twice in a process.

    A daemon may refresh the snapshot that it serves, so all users of a file share its mapping.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _open: ClassVar[dict[tuple[int, int], Mapping]] = {}

    def __init__(
        self, identity: tuple[int, int], environment: lmdb.Environment, memory: int = -1
    ) -> None:
        self._identity = identity
        self.environment = environment
        self._memory = memory
        self._users = 0

    @classmethod
    def acquire(cls, path: Path, *, memory_max: int) -> Mapping:
        """The mapping of a snapshot; a file of up to ``memory_max`` bytes is read into memory."""
        with cls._lock:
            memory = _read_into_memory(path, memory_max)
            if memory is not None:
                try:
                    check_opened(memory, path)
                    environment = _map(Path(f"/proc/self/fd/{memory}"))
                except BaseException:
                    os.close(memory)
                    raise
                status = os.fstat(memory)
                identity = status.st_dev, status.st_ino
                made = cls._open[identity] = cls(identity, environment, memory)
                made._users = 1
                return made
            while True:
                identity = check_trailer(path)
                mapping = cls._open.get(identity)
                if mapping is None:
                    environment = _map(path)
                    status = path.stat()
                    if (status.st_dev, status.st_ino) != identity:
                        # Replaced by a newer one between the check and the mapping.
                        environment.close()
                        continue
                    mapping = cls._open[identity] = cls(identity, environment)
                mapping._users += 1
                return mapping

    def size(self) -> int:
        """The size of a page, in bytes."""
        pages: int = self.environment.info()["last_pgno"] + 1
        return pages * int(self.environment.stat()["psize"])

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                del self._open[self._identity]
                self.environment.close()
                if self._memory >= 0:
                    os.close(self._memory)


def _read_into_memory(path: Path, most: int) -> int | None:
    """A descriptor of the content of a file in memory; None if the file is larger than ``most``
    bytes, or if there is no memory for it. Raises SnapshotError if the file cannot be read."""
    if most <= 0:
        return None
    with opened(path) as file:
        size = os.fstat(file).st_size
        if size > most:
            return None
        memory = -1
        try:
            memory = os.memfd_create("monarch-snapshot", os.MFD_CLOEXEC)
            os.posix_fallocate(memory, 0, max(1, size))
            os.ftruncate(memory, size)
        except OSError:
            if memory >= 0:
                os.close(memory)
            return None
        try:
            while data := os.read(file, _READ_BYTES):
                os.write(memory, data)
            # The content is in memory now, so its pages are dropped from the page cache.
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        except BaseException:
            os.close(memory)
            raise
        return memory


def _map(path: Path) -> lmdb.Environment:
    try:
        return lmdb.open(
            str(path),
            subdir=False,
            readonly=True,
            create=False,
            lock=False,
            readahead=False,
            max_spare_txns=0,
        )
    except lmdb.Error as error:
        raise SnapshotError(f"cannot map snapshot {path}: {error}") from error
