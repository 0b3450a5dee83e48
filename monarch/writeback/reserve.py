"""Room on the absorbing tier's disk for what must go on when that is full: a file that is given up.

    DIRECTORY/reserve        no bytes, but blocks of the disk

A mount needs a few directories, and the journal its marks and removals, to drain what fills the
disk. When there is room again the file is made again.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from monarch.posix.names import sync_path
from monarch.posix.private_directory import private_opener
from monarch.units import KiB, MiB

NAME = "reserve"
_LIBC = ctypes.CDLL(None, use_errno=True)
_LEAST_BYTES = 256 * KiB
_MOST_BYTES = 8 * MiB
# Of the disk.
_SHARE = 64
# It is made where it takes no more than such a part of what is free.
_LEFT = 4


class Reserve:
    """That of a directory. Short file operations; nothing is raised."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME

    def make(self) -> None:
        """If there is none, and the disk has room."""
        with suppress(OSError):
            disk = os.statvfs(self._path.parent)
            size = min(max(disk.f_blocks * disk.f_frsize // _SHARE, _LEAST_BYTES), _MOST_BYTES)
            if disk.f_bavail * disk.f_frsize < _LEFT * size or self._path.exists():
                return
            with open(self._path, "xb", opener=private_opener) as file:
                failed = _LIBC.fallocate(
                    file.fileno(), 0, ctypes.c_longlong(0), ctypes.c_longlong(size)
                )
            if failed:
                # Others were faster, or this file system cannot.
                self._path.unlink()

    def give_up(self) -> bool:
        """Leave its blocks to others; whether there was any."""
        try:
            self._path.unlink()
            # Some file systems have the blocks again only then.
            sync_path(self._path.parent)
        except OSError:
            return False
        return True

    def give_up_if_full(self) -> bool:
        """The same where less is free than it holds."""
        try:
            held = self._path.lstat().st_size
            disk = os.statvfs(self._path.parent)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize < held and self.give_up()
