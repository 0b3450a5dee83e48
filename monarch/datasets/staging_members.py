"""Which processes belong to a staging area, known without a broker.

Each of them has a lock on one byte of a file beside the socket: the byte of a random number. The
kernel removes the lock when the process ends, in whatever way, and a forked process does not
inherit it. So a new broker knows which processes of the area are still to come.
"""

from __future__ import annotations

import fcntl
import os
import struct

from monarch.errors import MonarchError
from monarch.posix.files import status_at
from monarch.posix.private_directory import open_private

# Locks have offsets up to 2^63.
_NUMBER_BITS = 62
# struct flock: type, whence, begin, length, process.
_FLOCK = struct.Struct("@hhqqi4x")
_MOST_ATTEMPTS = 100


class Membership:
    """The lock of this process. ``number`` identifies the process at every broker."""

    def __init__(self, name: str) -> None:
        self.number = int.from_bytes(os.urandom(8), "little") % (1 << _NUMBER_BITS)
        self._file = f"{name}.jobs"
        self._fd = -1
        self._process = 0

    def enter(self, directory_fd: int) -> None:
        """Takes the lock in the directory of the broker, unless this process has it. Raises OSError
        and MonarchError."""
        for _ in range(_MOST_ATTEMPTS):
            if self._is_current(directory_fd):
                return
            # A broker that ended has removed the file.
            self.leave()
            self._fd = open_private(self._file, os.O_RDWR | os.O_CREAT, dir_fd=directory_fd)
            self._process = os.getpid()
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.number)
        raise MonarchError(f"{self._file} in the staging directory is removed again and again")

    def leave(self) -> None:
        """Gives the lock up. In a forked process this changes nothing for the first one."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _is_current(self, directory_fd: int) -> bool:
        if self._fd < 0 or self._process != os.getpid():
            return False
        named = status_at(directory_fd, self._file)
        return named is not None and named.st_ino == os.fstat(self._fd).st_ino


def living_members(fd: int) -> set[int]:
    """The numbers of the processes that have a lock on the file, without this one. Raises
    OSError."""
    found: set[int] = set()
    to_search = [(0, 0)]
    while to_search:
        begin, length = to_search.pop()
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, length, 0)
        kind, _, at, size, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, query))
        if kind == fcntl.F_UNLCK:
            continue
        found.add(at)
        # The kernel names any lock in the range. A length of 0 is up to the end.
        if at > begin:
            to_search.append((begin, at - begin))
        if size and not length:
            to_search.append((at + size, 0))
        elif size and begin + length > at + size:
            to_search.append((at + size, begin + length - at - size))
    return found
