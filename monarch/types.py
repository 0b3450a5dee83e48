"""Types that every layer shares: inode numbers, attributes and the identity of a file.

Inode numbers are dense and come from the snapshot: 1 is the root, n the last entry. Files created
through the mount have numbers from ``WRITTEN_INO`` on. Values between modules are of these frozen
types, never a tuple of five or a dict.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType, Protocol

Ino = NewType("Ino", int)

ROOT_INO = Ino(1)
# Above every number of a snapshot, whose table has 32 bits for it.
WRITTEN_INO = Ino(1 << 32)

# Snapshots and records store times as signed 64-bit ns, which end in the year 2262.
_LEAST_NS, _MOST_NS = -(1 << 63), (1 << 63) - 1

# The extended attributes that a mount gives; their names begin with the first of these. ``copies``
# and ``status`` are JSON: where the copies are, and what every user may know of the mount. Only its
# root has the latter.
XATTR_PREFIX = b"user.monarch."
XATTR_TIER = XATTR_PREFIX + b"tier"
XATTR_STATE = XATTR_PREFIX + b"state"
XATTR_DIGEST = XATTR_PREFIX + b"digest"
XATTR_DURABLE = XATTR_PREFIX + b"durable"
XATTR_COPIES = XATTR_PREFIX + b"copies"
XATTR_STATUS = XATTR_PREFIX + b"status"

# A callback for the progress of long work: (done, total or None if unknown, words).
Progress = Callable[[int, int | None, str], None]
# The words of progress that is no part of a scan.
READING_CHANGES = "reading changes of earlier mounts"
SHOWING_CHANGES = "showing changes of earlier mounts"


# clock_gettime(2): the clock of the last tick, which file systems use for times of files.
_CLOCK_REALTIME_COARSE = 5


def file_now_ns() -> int:
    """The current time in ns since the epoch, by the clock that local file systems use.

    It is up to one tick (4 ms) behind ``time.time_ns``, which could return a later time than a
    tier's file system gives to a file that is written just after it.
    """
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def kept_ns(time_ns: int) -> int:
    """A time as it is stored and compared: limited to the range of 64 bits."""
    return max(_LEAST_NS, min(time_ns, _MOST_NS))


@dataclass(frozen=True, slots=True)
class Identity:
    """The properties that tell whether a source file is the same file with the same bytes (S4).

    ``size`` in bytes, times in ns since the epoch (``kept_ns``), ``source_ino`` is the inode number
    at the source.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    source_ino: int


# The size in an identity that has only an inode number.
ANY_SIZE = -1


@dataclass(frozen=True, slots=True)
class Attributes:
    """The attributes of ``stat`` of one entry. ``blocks`` are 512-byte units, as in ``st_blocks``.

    ``atime_ns`` is None if access times are not kept: it is then shown as ``mtime_ns``.
    """

    ino: Ino
    parent: Ino
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    ctime_ns: int
    source_ino: int
    blocks: int
    rdev: int
    atime_ns: int | None = None

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def identity(self) -> Identity:
        return Identity(self.size, self.mtime_ns, self.ctime_ns, self.source_ino)


def attributes_of(status: os.stat_result, ino: Ino, parent: Ino, mode: int) -> Attributes:
    """Attributes of an entry by its status at the source; ``mode`` as the mount shows it."""
    return Attributes(
        ino=ino,
        parent=parent,
        mode=mode,
        nlink=status.st_nlink,
        uid=status.st_uid,
        gid=status.st_gid,
        size=status.st_size,
        mtime_ns=kept_ns(status.st_mtime_ns),
        ctime_ns=kept_ns(status.st_ctime_ns),
        source_ino=status.st_ino,
        blocks=status.st_blocks,
        rdev=status.st_rdev,
    )


class KernelCaches(Protocol):
    """What the kernel caches of a mount. Only ``store`` may be called in another thread than that
    of the event loop.

    ``store``: the whole content of a file that is being opened. ``drop`` removes the pages of a
    file in the background, for a kernel that sends no opens.
    """

    def invalidate_attributes(self, ino: Ino) -> None: ...
    def invalidate_listing(self, directory: Ino) -> None: ...
    def store(self, ino: Ino, content: bytes) -> None: ...
    def drop(self, ino: Ino) -> None: ...
