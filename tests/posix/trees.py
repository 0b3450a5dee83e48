"""Reads a tree from a file system, and describes the differences of two trees in words."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.conftest import LEASES

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Entry:
    """What an entry is and holds. ``first_name`` is the first path of the same regular file, so
    that names of one file are distinguished from files that are alike. Directories have no size or
    time: those are their file system's.
    """

    mode: str
    owner: tuple[int, int]
    size: int = 0
    mtime_ns: int = 0
    target: bytes = b""
    first_name: bytes = b""
    names: int = 0
    xattrs: tuple[tuple[str, bytes], ...] = ()
    digest: str = ""


Tree = dict[bytes, Entry]


def tree(root: Path | str | bytes, *, names_only: Collection[bytes] = ()) -> Tree:
    """Everything below ``root`` by its path; of directories in ``names_only`` the names alone."""
    found: Tree = {}
    fd = os.open(root, _DIRECTORY)
    try:
        found[b"."] = _entry(fd, b".", b".", {})
        _walk(fd, b"", found, {}, names_only)
    finally:
        os.close(fd)
    return found


def _walk(
    parent: int,
    above: bytes,
    found: Tree,
    files: dict[int, bytes],
    names_only: Collection[bytes],
) -> None:
    for name in sorted(map(os.fsencode, os.listdir(parent))):
        path = above + name
        if path == os.fsencode(LEASES):
            continue
        if above[:-1] in names_only:
            found[path] = Entry("", (0, 0))
            continue
        entry = found[path] = _entry(parent, name, path, files)
        if entry.mode.startswith("0o4"):
            fd = os.open(name, _DIRECTORY, dir_fd=parent)
            try:
                _walk(fd, path + b"/", found, files, names_only)
            finally:
                os.close(fd)


def _entry(parent: int, name: bytes, path: bytes, files: dict[int, bytes]) -> Entry:
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    mode, owner = oct(status.st_mode), (status.st_uid, status.st_gid)
    if stat.S_ISLNK(status.st_mode):
        return Entry(mode, owner, target=os.readlink(name, dir_fd=parent))
    if stat.S_ISDIR(status.st_mode):
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
        try:
            return Entry(mode, owner, xattrs=_xattrs(fd))
        finally:
            os.close(fd)
    if not stat.S_ISREG(status.st_mode):
        return Entry(mode, owner)
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
    with open(fd, "rb") as file:
        return Entry(
            mode,
            owner,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            first_name=files.setdefault(status.st_ino, path),
            names=status.st_nlink,
            xattrs=_xattrs(fd),
            digest=hashlib.sha256(file.read()).hexdigest()[:16],
        )


def _xattrs(fd: int) -> tuple[tuple[str, bytes], ...]:
    return tuple(
        (name, os.getxattr(fd, name))
        for name in sorted(os.listxattr(fd))
        if name.startswith("user.") and not name.startswith("user.monarch.")
    )


def differences(expected: Tree, found: Tree) -> list[str]:
    """Each path that differs and in what, sorted."""
    found_differences = [
        f"{os.fsdecode(path)!r} is missing" for path in expected.keys() - found.keys()
    ]
    found_differences += [
        f"{os.fsdecode(path)!r} is there" for path in found.keys() - expected.keys()
    ]
    for path in expected.keys() & found.keys():
        wanted, here = asdict(expected[path]), asdict(found[path])
        for field, value in wanted.items():
            if here[field] != value:
                found_differences.append(
                    f"{os.fsdecode(path)!r}: {field} {here[field]!r}, not {value!r}"
                )
    return sorted(found_differences)
