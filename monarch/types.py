"""The vocabulary that every layer shares: inode numbers, attributes and the identity of a file.

Inode numbers are dense and come from the snapshot: 1 is the root, n the last entry. What is made
through the mount has a number from ``WRITTEN_INO`` on. What crosses a module border is one of these
frozen values, never a tuple of five or a dict.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType

Ino = NewType("Ino", int)

ROOT_INO = Ino(1)
# Above every number of a snapshot, whose table has 32 bits for it.
WRITTEN_INO = Ino(1 << 32)

# Snapshots and records keep times as 64 bits of ns, which end in the year 2262.
_LEAST_NS, _MOST_NS = -(1 << 63), (1 << 63) - 1

# How long work reports that it is going on: (done, total or None while unknown, words).
Progress = Callable[[int, int | None, str], None]


# clock_gettime(2): the clock of the last tick, which file systems stamp their files with.
_CLOCK_REALTIME_COARSE = 5


def file_now_ns() -> int:
    """The time now in ns since the epoch, by the clock that local file systems take for files.

    It is up to one tick (4 ms) behind ``time.time_ns``, whose time could be later than the time
    that the tier's file system gives to a file that is written just after it.
    """
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def kept_ns(time_ns: int) -> int:
    """A time as it is kept and compared: what is beyond the end of 64 bits is told as that end."""
    return max(_LEAST_NS, min(time_ns, _MOST_NS))


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a source file the same file with the same bytes (faults S4).

    ``size`` in bytes, times in ns since the epoch (``kept_ns``), ``source_ino`` as the source
    numbers it.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    source_ino: int


# The size in an identity of which the inode number alone is known.
ANY_SIZE = -1


@dataclass(frozen=True, slots=True)
class Attributes:
    """What ``stat`` tells of one entry. ``blocks`` are 512-byte units, as in ``st_blocks``.

    ``atime_ns`` is None where access times are not kept: it is then shown as ``mtime_ns``.
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
