"""The seal of a copy: a modification time computed from its inode number and its version.

A program that writes into a copy, replaces it or restores an old one breaks the seal. The check
needs no memory per file and no read: an open reads the attributes of the copy anyway. A broken seal
proves nothing; the copy is then compared with its digest. The datapath computes the same seal
(fuse/native/_requests.c).
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress

from monarch.types import Identity, Ino

_MASK = (1 << 64) - 1
_SECOND_NS = 1_000_000_000
# The seconds have 30 bits: a time (before 2004) that every file system can store.
_SECONDS_SHIFT = 34


class BrokenSeal(OSError):
    """A copy that another program may have changed: it must be compared with its digest."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, "the copy's seal is broken")


def seal(ino: Ino, identity: Identity) -> int:
    """The ``st_mtime_ns`` of the copy of ``ino`` in the version ``identity``."""
    x = int(ino)
    for value in (identity.size, identity.mtime_ns, identity.ctime_ns, identity.source_ino):
        x = _mix(x ^ (value & _MASK))
    seconds = x >> _SECONDS_SHIFT
    return seconds * _SECOND_NS + (x & ((1 << _SECONDS_SHIFT) - 1)) % _SECOND_NS


def _mix(z: int) -> int:
    """splitmix64."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return z ^ z >> 31


def put_seal(fd: int, ino: Ino, identity: Identity) -> None:
    # The access time is now: programs that purge a scratch disk by age use that time.
    os.utime(fd, ns=(time.time_ns(), seal(ino, identity)))


def keeps_seals(root: int) -> bool:
    """Whether a file in a tier may have any time of modification, to the nanosecond.

    ``root`` is a descriptor of the tier's own directory. Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open("stage/probe", flags, 0o600, dir_fd=root)
    try:
        wanted = seal(Ino(1), Identity(0, 0, 0, 0))
        with suppress(OSError):
            os.utime(fd, ns=(wanted, wanted))
        return os.fstat(fd).st_mtime_ns == wanted
    finally:
        os.close(fd)
        os.unlink("stage/probe", dir_fd=root)
