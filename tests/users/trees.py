"""The contents of a directory: owners, modes and bytes by path; and a copy with all of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from tests.users.lists import lists_at, set_lists, text_of

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Entry:
    """What a name leads to. ``data``: the bytes of a file, the target of a link, else empty.

    ``lists``: its access control lists, the one for itself and the default of a directory, each
    empty if there is none. Two entries are equal if a user sees no difference; the inode number
    ``ino`` is beside that.
    """

    kind: str
    uid: int
    gid: int
    mode: int
    data: str
    lists: tuple[bytes, bytes] = (b"", b"")

    def __str__(self) -> str:
        lists = " ".join(map(text_of, self.lists)) if any(self.lists) else ""
        return f"{self.kind} {self.mode:04o} {self.uid}:{self.gid} {self.data!r} {lists}".strip()


@dataclass(frozen=True, slots=True)
class Tree:
    """All entries below a directory by path, and the inode number of each; "" is itself."""

    entries: Mapping[str, Entry]
    inodes: Mapping[str, int]


_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFREG: "file",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
}


def look(at: int, below: str) -> Tree:
    """What is in the directory ``below`` beneath the descriptor ``at``, as root sees it."""
    entries: dict[str, Entry] = {}
    inodes: dict[str, int] = {}
    root = os.open(below, _DIRECTORY, dir_fd=at)
    try:
        _note(root, ".", "", entries, inodes)
        _walk(root, "", entries, inodes)
    finally:
        os.close(root)
    return Tree(entries, inodes)


def entry(at: int, path: str) -> Entry | None:
    """The entry with a path beneath the descriptor ``at``, None if there is none."""
    entries: dict[str, Entry] = {}
    try:
        _note(at, path, path, entries, {})
    except (FileNotFoundError, NotADirectoryError):
        return None
    return entries[path]


def _walk(fd: int, above: str, entries: dict[str, Entry], inodes: dict[str, int]) -> None:
    for name in sorted(os.listdir(fd)):
        path = f"{above}{name}"
        try:
            kind = _note(fd, name, path, entries, inodes)
        except FileNotFoundError:
            # A mount learns that others removed a file when it opens the file (promise 26).
            assert name not in os.listdir(fd), f"{path} is listed, and there is no such file"
            continue
        if kind == "directory":
            below = os.open(name, _DIRECTORY, dir_fd=fd)
            try:
                _walk(below, f"{path}/", entries, inodes)
            finally:
                os.close(below)


def _note(fd: int, name: str, path: str, entries: dict[str, Entry], inodes: dict[str, int]) -> str:
    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    kind = _KINDS[stat.S_IFMT(status.st_mode)]
    data = ""
    if kind == "link":
        data = os.readlink(name, dir_fd=fd)
    elif kind == "file":
        data = _content(fd, name)
    mode = stat.S_IMODE(status.st_mode)
    lists = (b"", b"") if kind == "link" else lists_at(fd, name)
    entries[path] = Entry(kind, status.st_uid, status.st_gid, mode, data, lists)
    inodes[path] = status.st_ino
    return kind


def _content(fd: int, name: str) -> str:
    file = os.open(name, _FILE, dir_fd=fd)
    try:
        return os.read(file, 1 << 16).decode(errors="replace")
    finally:
        os.close(file)


def build(at: int, below: str, tree: Tree) -> dict[int, int]:
    """Make ``below``, with all that ``tree`` tells; the new inode numbers, by those of ``tree``."""
    made: dict[int, str] = {}
    numbers: dict[int, int] = {}
    for path, entry in tree.entries.items():
        name = f"{below}/{path}" if path else below
        ino = tree.inodes[path]
        if ino in made:
            os.link(made[ino], name, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
            continue
        made[ino] = name
        if entry.kind == "directory":
            os.mkdir(name, dir_fd=at)
        elif entry.kind == "link":
            os.symlink(entry.data, name, dir_fd=at)
        elif entry.kind == "fifo":
            os.mkfifo(name, dir_fd=at)
        else:
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=at)
            try:
                os.write(file, entry.data.encode())
            finally:
                os.close(file)
        os.chown(name, entry.uid, entry.gid, dir_fd=at, follow_symlinks=False)
        if entry.kind != "link":
            os.chmod(name, entry.mode, dir_fd=at)
        numbers[ino] = os.stat(name, dir_fd=at, follow_symlinks=False).st_ino
    # At the end: what is made in a directory with a default list inherits it.
    for path, entry in tree.entries.items():
        set_lists(at, f"{below}/{path}" if path else below, entry.lists)
    return numbers
