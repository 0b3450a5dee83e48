"""Comparing a mount with its source, entry by entry, by directory descriptors."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import Mounted
from tests.mount.observe import settled

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_DIRENT = struct.Struct("=QqHB")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.getdents64.restype = ctypes.c_ssize_t
_libc.getdents64.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)


@contextmanager
def opened(path: Path | bytes, *, beneath: int | None = None) -> Iterator[int]:
    """A descriptor of a directory for the length of a ``with`` block."""
    fd = os.open(path, _DIRECTORY, dir_fd=beneath)
    try:
        yield fd
    finally:
        os.close(fd)


def attributes_of(name: bytes, *, beneath: int) -> tuple[object, ...]:
    """The results of lstat and readlink for an entry, without its number and its access time."""
    status = os.stat(name, dir_fd=beneath, follow_symlinks=False)
    target = os.readlink(name, dir_fd=beneath) if stat.S_ISLNK(status.st_mode) else b""
    regular = stat.S_ISREG(status.st_mode)
    return (
        oct(status.st_mode),
        status.st_nlink,
        (status.st_uid, status.st_gid),
        status.st_size,
        (status.st_mtime_ns, status.st_ctime_ns),
        status.st_rdev,
        status.st_blocks if regular else 0,
        target,
    )


def content(name: bytes, *, beneath: int) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=beneath)
    with open(fd, "rb") as file:
        return file.read()


def differences(source: int, mount: int, *, path: bytes = b".") -> list[str]:
    """What differs between two open directories and all below, in words; bytes are read, too."""
    names = sorted(map(os.fsencode, os.listdir(source)))
    found = []
    if names != sorted(map(os.fsencode, os.listdir(mount))):
        found.append(f"{path!r}: other names")
    for name in names:
        here = path + b"/" + name
        expected, seen = attributes_of(name, beneath=source), attributes_of(name, beneath=mount)
        if expected != seen:
            found.append(f"{here!r}: {seen} instead of {expected}")
        mode = os.stat(name, dir_fd=source, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            with opened(name, beneath=source) as below, opened(name, beneath=mount) as mounted:
                found += differences(below, mounted, path=here)
        elif stat.S_ISREG(mode) and content(name, beneath=source) != content(name, beneath=mount):
            found.append(f"{here!r}: other bytes")
    return found


def assert_equal_trees(source: Path, mount: Path) -> None:
    """The same names, attributes, targets and bytes, the roots' own included."""
    with opened(source) as source_fd, opened(mount) as mount_fd:
        assert attributes_of(b".", beneath=source_fd) == attributes_of(b".", beneath=mount_fd)
        assert differences(source_fd, mount_fd) == []


@dataclass(frozen=True, slots=True)
class Entry:
    """A directory entry as the kernel hands it out. ``offset`` is where the next one begins."""

    name: bytes
    ino: int
    offset: int
    kind: int


def getdents(fd: int, size: int) -> list[Entry]:
    """The next entries of an open directory, as many as fit into ``size`` bytes."""
    buffer = ctypes.create_string_buffer(size)
    count = _libc.getdents64(fd, buffer, size)
    if count < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    entries, position = [], 0
    while position < count:
        ino, offset, length, kind = _DIRENT.unpack_from(buffer.raw, position)
        name = buffer.raw[position + _DIRENT.size : position + length].split(b"\0", 1)[0]
        entries.append(Entry(name, ino, offset, kind))
        position += length
    return entries


def wait_for_copies(mounted: Mounted, files: int) -> None:
    """Wait until nothing is on its way to a tier; exactly ``files`` files are resident then."""
    assert settled(mounted)["residency"]["files"] == files
