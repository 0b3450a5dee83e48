"""A file that reserves blocks of the absorbing tier's disk and is removed when the disk is full.

    DIRECTORY/reserve        allocated blocks without data

To drain the files that fill the disk, a mount needs room for a few directories and for records of
the journal. When the disk has room again, the file is made again.
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
# The reserve is the disk's size divided by this, within the limits above.
_SHARE = 64
# The reserve is made only if the free room is at least this many times its size.
_LEFT = 4


class Reserve:
    """The reserve in a directory. All calls are short file operations and raise nothing."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME

    def make(self) -> None:
        """Makes the reserve if it does not exist and the disk has room."""
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
                # The room was taken meanwhile, or the file system does not support fallocate.
                self._path.unlink()

    def give_up(self) -> bool:
        """Frees the blocks of the reserve; returns whether it existed."""
        try:
            self._path.unlink()
            # Some file systems free the blocks only at the next sync.
            sync_path(self._path.parent)
        except OSError:
            return False
        return True

    def give_up_if_full(self) -> bool:
        """Frees the reserve if less room is free than it holds; returns whether it was freed."""
        try:
            held = self._path.lstat().st_size
            disk = os.statvfs(self._path.parent)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize < held and self.give_up()
