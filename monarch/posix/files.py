"""Files: their descriptors are closed, new names replace none, and sparse copies keep the holes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import resource
import secrets
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from monarch.text import MiB

_LIBC = ctypes.CDLL(None, use_errno=True)
_RENAME_NOREPLACE = 1
_NO_NOREPLACE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
# The errors of a file system without hard links, or with a limit for one file.
NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_AT_EMPTY_PATH = 0x1000
_AT_SYMLINK_NOFOLLOW = 0x100
_STATX_BTIME = 0x800
# FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_NOATIME_FL and FS_NOCOW_FL of linux/fs.h
_GET_FLAGS, _SET_FLAGS, _NO_ACCESS_TIME, _NO_COPY = 0x80086601, 0x40086602, 0x80, 0x800000
# Bytes copied by one call.
_TURN = 8 * MiB


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Gives ``fd``, and closes it at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def is_scarce(fd: int, last: float) -> bool:
    """Whether a descriptor is one of the last ones that this process may have, which are the part
    ``last`` of them. The kernel gives the lowest free number, so a high number shows that few are
    free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return fd >= 128 and limit != resource.RLIM_INFINITY and fd >= limit * (1 - last)


class SharedFd:
    """A descriptor that several threads use. ``close`` ends no use of it: it is closed when the
    last one is over, so that no thread meets another file at its number."""

    def __init__(self, fd: int, what: str) -> None:
        self._kept: KeptFd | None = KeptFd(fd)
        self._what = what

    @contextmanager
    def using(self) -> Iterator[int]:
        """Gives the descriptor for a block. Raises ValueError after ``close``."""
        kept = self.kept()
        yield kept.fd

    def share(self) -> SharedFd:
        """Another object with the descriptor. It is closed with the last of them. Raises ValueError
        after ``close``."""
        shared = SharedFd.__new__(SharedFd)
        shared._kept, shared._what = self.kept(), self._what
        return shared

    def kept(self) -> KeptFd:
        """The descriptor is open as long as the result exists: as ``using``, in less time. Raises
        ValueError after ``close``."""
        kept = self._kept
        if kept is None:
            raise ValueError(f"{self._what} is closed")
        return kept

    def close(self) -> None:
        self._kept = None


class KeptFd:
    """A descriptor that is closed with the object."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        # A finalizer of the same garbage may still use this object: it must meet no other file.
        fd, self.fd = self.fd, -1
        os.close(fd)


def status_at(directory_fd: int, name: str | bytes) -> os.stat_result | None:
    """``lstat`` of a name in an open directory, None if it is missing. Raises OSError."""
    try:
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def keep_no_access_times(directory_fd: int) -> None:
    """Files that are made in an open directory from now on get no access times, where its file
    system can do that: a read of them neither compares nor writes one."""
    _set_flag(directory_fd, _NO_ACCESS_TIME)


def write_in_place(fd: int) -> None:
    """Has the bytes of an open file, if it is empty, written where room is allocated for it, also
    by a file system that writes them to new blocks otherwise (btrfs, bcachefs)."""
    _set_flag(fd, _NO_COPY)


def _set_flag(fd: int, flag: int) -> None:
    """Sets a flag of an open file or directory, if its file system supports that."""
    with suppress(OSError):
        flags = int.from_bytes(fcntl.ioctl(fd, _GET_FLAGS, bytes(8))[:4], sys.byteorder)
        wanted = (flags | flag).to_bytes(4, sys.byteorder)
        fcntl.ioctl(fd, _SET_FLAGS, wanted + bytes(4))


def born_ns(directory_fd: int, name: bytes = b"") -> int | None:
    """The time at which an entry was created, in ns since the epoch: ``name`` in an open directory,
    or what the descriptor itself has open. None if its file system does not report that. Raises
    OSError."""
    buffer = ctypes.create_string_buffer(256)
    flags = _AT_SYMLINK_NOFOLLOW | (0 if name else _AT_EMPTY_PATH)
    if _LIBC.statx(directory_fd, name, flags, _STATX_BTIME, buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    # The fields stx_mask and stx_btime of statx(2).
    mask: int = struct.unpack_from("=I", buffer)[0]
    if not mask & _STATX_BTIME:
        return None
    seconds: int
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, 80)
    return seconds * 10**9 + int(nanoseconds)


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


def sync_file_system(fd: int) -> None:
    """Makes all bytes and names durable in the file system of ``fd``. Raises OSError, also if a
    write to it has failed since ``fd`` was opened: the kernel reports that once."""
    if _LIBC.syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def empty_directory(fd: int) -> None:
    """Removes all beneath an open directory, however deep it is. No other process may change it
    meanwhile. Raises OSError."""
    # Its directories are moved to the top one after the other: none is opened through another.
    names = (f".{secrets.token_hex(8)}.{number}" for number in itertools.count())
    os.fchmod(fd, 0o700)
    waiting = _without_files(fd, fd, names)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    while waiting:
        name = waiting.pop()
        with closing_fd(os.open(name, flags, dir_fd=fd)) as below:
            waiting += _without_files(below, fd, names)
        os.rmdir(name, dir_fd=fd)


def _without_files(directory: int, top: int, names: Iterator[str]) -> list[str]:
    """Removes the files of a directory, and moves its directories to ``top`` by new ``names``,
    which are returned."""
    with os.scandir(directory) as entries:
        found = list(entries)
    moved = []
    for entry in found:
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.name, dir_fd=directory)
            continue
        # Without the right to write to it, its user cannot move or empty it.
        os.chmod(entry.name, 0o700, dir_fd=directory)
        moved.append(next(names))
        os.rename(entry.name, moved[-1], src_dir_fd=directory, dst_dir_fd=top)
    return moved


def data_at(fd: int, offset: int, end: int) -> tuple[int, int]:
    """The begin and end of the next data at or after ``offset``, before ``end``; ``(end, end)`` if
    only a hole follows.

    On a file system that does not report holes, all is data. Moves the file position of ``fd``.
    """
    try:
        begins = os.lseek(fd, offset, os.SEEK_DATA)
        if begins >= end:
            return end, end
        ends = os.lseek(fd, begins, os.SEEK_HOLE)
    except OSError as error:
        return (end, end) if error.errno == errno.ENXIO else (offset, end)
    if begins < offset or ends <= begins:
        # The data became a hole meanwhile, or the file system returned an invalid position.
        return offset, end
    return begins, min(ends, end)


def copy_data(from_fd: int, to_fd: int, size: int) -> int:
    """Copies the first ``size`` bytes of a file to another, empty one, which gets that length.
    Returns the bytes covered: fewer than ``size`` if the file ends before. Raises OSError."""
    offset = 0
    while offset < size:
        begins, ends = data_at(from_fd, offset, size)
        if begins == size:
            # The file may have been truncated meanwhile.
            offset = min(size, os.fstat(from_fd).st_size)
            break
        offset = os.lseek(to_fd, begins, os.SEEK_SET)
        while offset < ends and (
            count := os.sendfile(to_fd, from_fd, offset, min(_TURN, ends - offset))
        ):
            offset += count
        if offset < ends:
            break
    os.ftruncate(to_fd, offset)
    return offset
