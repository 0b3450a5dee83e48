"""Lists the tree that becomes a pack: names, attributes, links and extended attributes.

Up to ``jobs`` threads call the source, since each call may be a round trip to a file server. No
symbolic link is followed, and no file is opened. What cannot be read is collected, not skipped.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from monarch.errors import PackError
from monarch.packs.format import Entry, encode_xattrs, is_kept_xattr, require_sound
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import open_beneath
from monarch.posix.workers import Workers
from monarch.types import kept_ns

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
# Entries read by one task.
_SLICE = 256
_NO_XATTRS = frozenset({errno.ENOTSUP, errno.ENOSYS, errno.ENODATA})


class Identity(NamedTuple):
    """What shows that a file at the source is the one that was listed, unchanged."""

    device: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(
            *(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        )


class Listed(NamedTuple):
    """An entry at the source. ``links`` is its number of names there."""

    entry: Entry
    identity: Identity
    links: int


class Failure(NamedTuple):
    """A path at the source that could not be read, and the reason."""

    path: bytes
    what: str


@dataclass(slots=True)
class Tree:
    """All entries beneath a source, in no order, and those that could not be read."""

    entries: list[Listed] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


@dataclass(slots=True)
class _Piece:
    """The result of one task: entries, directories to be listed, and slices of this one."""

    listed: list[Listed] = field(default_factory=list)
    slices: list[tuple[bytes, list[bytes]]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def list_tree(root: int, *, jobs: int, on_entries: Callable[[int], None]) -> Tree:
    """The tree beneath the open directory ``root``. ``on_entries`` gets their number meanwhile.
    Raises OSError if the root itself cannot be read."""
    tree = Tree()
    tree.entries.append(_entry(root, b"", b"."))
    with Workers[_Piece](jobs) as workers:
        workers.put(_list, root, b"")
        while workers.pending:
            piece = workers.take()
            tree.entries += piece.listed
            tree.failures += piece.failures
            for each in piece.slices:
                workers.put(_slice, root, *each)
            for listed in piece.listed:
                if stat.S_ISDIR(listed.entry.mode):
                    workers.put(_list, root, listed.entry.path)
            on_entries(len(tree.entries))
    return tree


def _list(root: int, path: bytes) -> _Piece:
    """The names in a directory, and the entries if there are few."""
    piece = _Piece()
    try:
        with closing_fd(open_beneath(root, path, _DIRECTORY)) as directory:
            names = [os.fsencode(name) for name in os.listdir(directory)]
            if len(names) <= _SLICE:
                _read(directory, path, names, piece)
                return piece
    except OSError as error:
        piece.failures.append(Failure(path, f"the directory cannot be read: {error.strerror}"))
        return piece
    piece.slices = [(path, names[at : at + _SLICE]) for at in range(0, len(names), _SLICE)]
    return piece


def _slice(root: int, path: bytes, names: list[bytes]) -> _Piece:
    piece = _Piece()
    try:
        with closing_fd(open_beneath(root, path, _DIRECTORY)) as directory:
            _read(directory, path, names, piece)
    except OSError as error:
        piece.failures.append(Failure(path, f"the directory cannot be read: {error.strerror}"))
    return piece


def _read(directory: int, path: bytes, names: Iterable[bytes], piece: _Piece) -> None:
    for name in names:
        below = b"%s/%s" % (path, name) if path else name
        try:
            listed = _entry(directory, below, name)
            # What no reader of a pack accepts is not written.
            require_sound(listed.entry)
            piece.listed.append(listed)
        except OSError as error:
            piece.failures.append(Failure(below, f"it cannot be read: {error.strerror}"))
        except PackError as error:
            piece.failures.append(Failure(below, f"it cannot be packed: {error}"))


def _entry(directory: int, path: bytes, name: bytes) -> Listed:
    """Raises OSError."""
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    kind = stat.S_IFMT(status.st_mode)
    is_file = kind == stat.S_IFREG
    is_device = kind in (stat.S_IFCHR, stat.S_IFBLK)
    entry = Entry(
        path=path,
        mode=status.st_mode,
        uid=status.st_uid,
        gid=status.st_gid,
        size=status.st_size if is_file else 0,
        mtime_ns=kept_ns(status.st_mtime_ns),
        offset=status.st_rdev if is_device else 0,
        target=os.readlink(name, dir_fd=directory) if kind == stat.S_IFLNK else b"",
        xattrs=_xattrs(directory, name) if is_file or kind == stat.S_IFDIR else b"",
    )
    return Listed(entry, Identity.of(status), status.st_nlink if is_file else 1)


def _xattrs(directory: int, name: bytes) -> bytes:
    """Raises OSError."""
    path = b"/proc/self/fd/%d/%s" % (directory, name)
    try:
        names = map(os.fsencode, os.listxattr(path, follow_symlinks=False))
    except OSError as error:
        if error.errno in _NO_XATTRS:
            return b""
        raise
    return encode_xattrs(
        (each, os.getxattr(path, each, follow_symlinks=False))
        for each in names
        if is_kept_xattr(each)
    )
