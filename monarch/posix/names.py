"""Names in directories: renames that replace nothing, and directories made durable."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from monarch.posix.descriptors import closing_fd

_LIBC = ctypes.CDLL(None, use_errno=True)
_RENAME_NOREPLACE = 1
_NO_NOREPLACE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
# The errors of a file system without hard links, or with a limit for one file.
NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})


def status_at(directory_fd: int, name: bytes) -> os.stat_result | None:
    """``lstat`` of a name in an open directory, None if it is missing. Raises OSError."""
    try:
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def rename_new(directory_fd: int, name: bytes, to_name: bytes) -> None:
    """Renames within a directory and never replaces an entry. Raises OSError, EEXIST if
    ``to_name`` exists."""
    if _LIBC.renameat2(directory_fd, name, directory_fd, to_name, _RENAME_NOREPLACE) == 0:
        return
    number = ctypes.get_errno()
    if number not in _NO_NOREPLACE:
        raise OSError(number, os.strerror(number))
    # The file system does not support the flag. A link replaces nothing either.
    at = {"src_dir_fd": directory_fd, "dst_dir_fd": directory_fd}
    try:
        os.link(name, to_name, follow_symlinks=False, **at)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if status_at(directory_fd, to_name) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        os.rename(name, to_name, **at)
    else:
        os.unlink(name, dir_fd=directory_fd)


def sync_path(path: bytes | Path) -> None:
    """Makes the bytes of a file, or the names in a directory, durable. Raises OSError."""
    with closing_fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)
