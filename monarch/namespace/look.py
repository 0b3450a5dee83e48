"""Reads the attributes and access control lists of the entries of a directory."""

from __future__ import annotations

import errno
import importlib
import os
import stat
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from monarch.namespace.schema import RECORD_BYTES, RECORD_STRUCT
from monarch.posix import acl
from monarch.types import Ino, kept_ns


class Seen(NamedTuple):
    """An entry with more than a record.

    ``place`` is the index of its name. ``error`` is why it has no record, ``closed`` why its access
    control list cannot be read; each is an errno or 0. ``access`` and ``inherited`` are its lists
    as the source has them; the second is the default list of a directory.
    """

    place: int
    error: int
    device: int = 0
    closed: int = 0
    access: bytes = b""
    inherited: bytes = b""


Look = Callable[
    [int, tuple[bytes, ...], int, int],
    tuple[bytearray, Sequence[tuple[int, int, int, int, bytes, bytes]]],
]


def look(
    directory_fd: int, names: tuple[bytes, ...], parent: Ino, without: int
) -> tuple[bytearray, list[Seen]]:
    """A record of each name in an open directory, and the values that a record does not have.

    A record is packed as RECORD_STRUCT; it is zeros for an entry that could not be read. Lists are
    not read on the device ``without``, which does not support them.
    """
    records, others = _look(directory_fd, names, parent, without)
    return records, [Seen(*seen) for seen in others]


def pack_record(status: os.stat_result, parent: Ino) -> bytes:
    """The record of a result of ``lstat``."""
    mode = status.st_mode
    extra = 0
    if stat.S_ISREG(mode):
        extra = status.st_blocks
    elif stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        extra = status.st_rdev
    return RECORD_STRUCT.pack(
        parent,
        mode,
        status.st_uid,
        status.st_gid,
        status.st_nlink,
        0,
        status.st_size,
        kept_ns(status.st_mtime_ns),
        kept_ns(status.st_ctime_ns),
        status.st_ino,
        extra,
    )


def _look_slowly(
    directory_fd: int, names: tuple[bytes, ...], parent: int, without: int
) -> tuple[bytearray, list[Seen]]:
    """The same as ``look`` of the extension, some microseconds slower for each name."""
    records, others = bytearray(), []
    for place, name in enumerate(names):
        try:
            status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
        except OSError as error:
            records += bytes(RECORD_BYTES)
            others.append(Seen(place, error.errno or errno.EIO))
            continue
        records += pack_record(status, Ino(parent))
        mode = status.st_mode
        closed, access, inherited = 0, b"", b""
        if status.st_dev != without and not stat.S_ISLNK(mode):
            try:
                access = acl.read(directory_fd, name, acl.ACCESS)
            except OSError as error:
                closed = error.errno or errno.EIO
            if stat.S_ISDIR(mode):
                inherited = acl.read(directory_fd, name, acl.DEFAULT)
        if closed or access or not stat.S_ISREG(mode) or status.st_nlink > 1:
            others.append(Seen(place, 0, status.st_dev, closed, access, inherited))
    return records, others


def _loaded() -> Look:
    try:
        extension = importlib.import_module("monarch.fuse._datapath")
    except ImportError:
        return _look_slowly
    fast: Look = extension.look
    return fast


# Loaded with this module: Python ignores an exception of a signal handler, such as Ctrl-C, in the
# part of an import that releases its lock.
_look: Final = _loaded()
