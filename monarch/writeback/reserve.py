"""Room on the tier's disk that is kept for the journal of a full disk."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path

from monarch.posix.files import closing_fd, sync_path
from monarch.posix.private_directory import private_opener
from monarch.text import KiB, MiB

_LIBC = ctypes.CDLL(None, use_errno=True)
_BLOCK = 512
# The reserve is a 64th of the disk, within these bounds. It is made only if the free room is at
# least so many times its size.
_RESERVE_BYTES = (256 * KiB, 8 * MiB)
_RESERVE_SHARE = 64
_RESERVE_LEFT = 4


class Reserve:
    """A file that reserves blocks of the tier's disk and is removed when the disk is full.

        DIRECTORY/reserve        allocated blocks without data

    To drain the files that fill the disk, a mount needs room for a few directories and for records
    of the journal. When the disk has room again, the file is made again. All calls are short file
    operations and raise nothing.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "reserve"

    def make(self) -> None:
        """Makes the reserve if it does not exist and the disk has room."""
        with suppress(OSError):
            disk = os.statvfs(self._path.parent)
            size = reserve_bytes(disk)
            if disk.f_bavail * disk.f_frsize < _RESERVE_LEFT * size or self._path.exists():
                return
            with open(self._path, "xb", opener=private_opener) as file:
                failed = _LIBC.fallocate(
                    file.fileno(), 0, ctypes.c_longlong(0), ctypes.c_longlong(size)
                )
            if failed:
                # The room was taken meanwhile, or the file system does not support fallocate.
                self._path.unlink()

    @property
    def held(self) -> int:
        """The number of bytes that it reserves; 0 if it does not exist."""
        try:
            return self._path.lstat().st_blocks * _BLOCK
        except OSError:
            return 0

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
        is_full = disk.f_bavail * disk.f_frsize < held or not self.can_allocate(held)
        return is_full and self.give_up()

    def can_allocate(self, size: int) -> bool:
        """Whether no quota, which ``statvfs`` need not show, prevents another file of this size."""
        try:
            with closing_fd(os.open(self._path.parent, os.O_RDWR | os.O_TMPFILE, 0o600)) as fd:
                os.posix_fallocate(fd, 0, size)
        except OSError as error:
            # Not every file system supports such files.
            return error.errno not in (errno.ENOSPC, errno.EDQUOT)
        return True


def reserve_bytes(disk: os.statvfs_result) -> int:
    """The size of the reserve of a disk, in bytes."""
    return share_of(disk, _RESERVE_SHARE, _RESERVE_BYTES)


def share_of(disk: os.statvfs_result, share: int, bounds: tuple[int, int]) -> int:
    """The ``share``-th part of a disk's size in bytes, within the least and the most."""
    least, most = bounds
    return min(max(disk.f_blocks * disk.f_frsize // share, least), most)
