"""Random sequences of calls, played in two directories in lockstep.

A sequence depends on its seed and on the state of the first directory. Each call must have the same
outcome in both directories: its result, the attributes, the bytes read, the listing, or its errno.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import random
import stat
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.posix.calls import (
    KEEP_SIZE,
    PUNCH_HOLE,
    RENAME_NOREPLACE,
    USER,
    ZERO_RANGE,
    as_user,
    fallocate,
    renameat2,
)
from tests.posix.trees import Tree, differences, tree

Call = tuple[Any, ...]

SLOTS = 6
LARGEST = 200_000
# Times that calls set lie before this, times of the clock after it. Nanoseconds.
SET_BEFORE_NS = 1_100_000_000_000_000_000
SET_NS = 1_000_000_000_000_000_000

_NAMES = ("a", "b", "c", "d", "e", "f", "longer name", "\udcff")
_DEPTH = 3
_OPEN_FLAGS = (
    os.O_RDONLY,
    os.O_RDWR,
    os.O_RDWR | os.O_CREAT,
    os.O_RDWR | os.O_CREAT,
    os.O_RDWR | os.O_CREAT | os.O_EXCL,
    os.O_RDWR | os.O_TRUNC,
    os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    os.O_RDWR | os.O_APPEND,
    os.O_WRONLY | os.O_NOFOLLOW,
    os.O_RDONLY | os.O_DIRECTORY,
)
# Calls that change nothing.
_LOOKS = frozenset(
    ("read", "fstat", "stat", "lstat", "access", "readlink", "list", "getxattr", "listxattr")
)
_MODES = (0o644, 0o600, 0o755, 0o444, 0o000, 0o4755, 0o2755, 0o1777, 0o640)


class Differs(Exception):
    """The two directories are not alike; the message tells the call and both outcomes."""


def make_tree(root: Path) -> None:
    """What a sequence begins with: files with bytes, two names of one, links and directories."""
    root.mkdir()
    for name in ("a", "b", "a/b", "a/b/c"):
        (root / name).mkdir()
    for number, name in enumerate(("c", "a/a", "a/c", "b/a", "a/b/a", "a/b/c/a")):
        (root / name).write_bytes(content(number, 3000 * number))
        (root / name).chmod(0o644)
    os.link(root / "a/a", root / "b/b")
    (root / "d").symlink_to("a/b")
    (root / "e").symlink_to("nothing")
    for directory, below, files in os.walk(root, topdown=False):
        for name in (*below, *files):
            path = os.path.join(directory, name)
            os.utime(path, ns=(SET_NS, SET_NS), follow_symlinks=False)


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


class Subject:
    """One of the two directories, and what is open in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self._open: dict[int, int] = {}
        directories, others = self.paths()
        self._first = {os.lstat(root / path).st_ino for path in (*directories, *others)}

    def close(self) -> None:
        for fd in (*self._open.values(), self.fd):
            os.close(fd)

    def paths(self) -> tuple[list[str], list[str]]:
        """The directories and everything else, in an order that is the same each time."""
        directories, others = [""], []
        for directory in directories:
            try:
                fd = os.open(directory or ".", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self.fd)
            except OSError:
                continue
            with os.scandir(fd) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    path = f"{directory}/{entry.name}".lstrip("/")
                    is_directory = entry.is_dir(follow_symlinks=False)
                    (directories if is_directory else others).append(path)
            os.close(fd)
        return directories[1:], others

    def do(self, call: Call) -> object:
        """What the call returns, or the name of its errno."""
        kind, *arguments = call
        try:
            # The user may have closed the directory itself, by a link to ``.``.
            os.fchdir(self.fd)
            return getattr(self, f"_{kind}")(*arguments)
        except OSError as error:
            return errno.errorcode[error.errno or 0]

    def may_be_refused(self, call: Call, outcome: object) -> bool:
        """Whether a mount may answer so to what a disk would do, if this subject is the disk's: a
        directory of the source is not renamed, and who reads a file there is not disturbed.
        """
        kind, *arguments = call
        try:
            if outcome == "EXDEV" and kind in ("rename", "noreplace"):
                status = os.lstat(arguments[0], dir_fd=self.fd)
                return stat.S_ISDIR(status.st_mode) and status.st_ino in self._first
            if outcome == "ETXTBSY" and kind in ("open_", "truncate"):
                if kind == "open_" and not arguments[2] & (os.O_ACCMODE | os.O_TRUNC):
                    return False
                path = arguments[1] if kind == "open_" else arguments[0]
                number = os.stat(path, dir_fd=self.fd).st_ino
                read = {os.fstat(fd).st_ino for fd in self._open.values()}
                return number in read and number in self._first
        except OSError:
            pass
        return False

    def _slot(self, slot: int) -> int:
        if slot not in self._open:
            raise OSError(errno.EBADF, "nothing is open there")
        return self._open[slot]

    # -- calls by name -----------------------------------------------------------------------------

    def _open_(self, slot: int, path: str, flags: int, mode: int) -> object:
        fd = os.open(path, flags | os.O_NONBLOCK, mode)
        self._close(slot)
        self._open[slot] = fd
        return self._described(os.fstat(fd))

    def _close(self, slot: int) -> None:
        if (fd := self._open.pop(slot, None)) is not None:
            os.close(fd)

    def _mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)

    def _mkfifo(self, path: str, mode: int) -> None:
        os.mkfifo(path, mode)

    def _rmdir(self, path: str) -> None:
        os.rmdir(path)

    def _unlink(self, path: str) -> None:
        os.unlink(path)

    def _symlink(self, target: str, path: str) -> None:
        os.symlink(target, path)

    def _link(self, path: str, to: str) -> None:
        os.link(path, to, follow_symlinks=False)

    def _rename(self, path: str, to: str) -> None:
        os.rename(path, to)

    def _noreplace(self, path: str, to: str) -> None:
        renameat2(path, to, RENAME_NOREPLACE)

    def _chmod(self, path: str, mode: int) -> None:
        os.chmod(path, mode)

    def _chown(self, path: str, uid: int, gid: int) -> None:
        os.chown(path, uid, gid, follow_symlinks=False)

    def _utime(self, path: str, atime_ns: int, mtime_ns: int) -> object:
        os.utime(path, ns=(atime_ns, mtime_ns))
        status = os.stat(path)
        return status.st_atime_ns, status.st_mtime_ns

    def _truncate(self, path: str, size: int) -> None:
        os.truncate(path, size)

    def _stat(self, path: str) -> object:
        return self._described(os.stat(path))

    def _lstat(self, path: str) -> object:
        return self._described(os.lstat(path))

    def _access(self, path: str, how: int) -> bool:
        return os.access(path, how, effective_ids=True)

    def _readlink(self, path: str) -> str:
        return os.readlink(path)

    def _list(self, path: str) -> object:
        with os.scandir(path or ".") as entries:
            return sorted(
                (entry.name, entry.is_dir(follow_symlinks=False), entry.is_symlink())
                for entry in entries
            )

    def _setxattr(self, path: str, name: str, value: bytes, flags: int) -> None:
        os.setxattr(path, name, value, flags)

    def _getxattr(self, path: str, name: str) -> bytes:
        return os.getxattr(path, name)

    def _removexattr(self, path: str, name: str) -> None:
        os.removexattr(path, name)

    def _listxattr(self, path: str) -> list[str]:
        return sorted(name for name in os.listxattr(path) if name.startswith("user."))

    # -- calls by descriptor -----------------------------------------------------------------------

    def _write(self, slot: int, offset: int, seed: int, size: int) -> object:
        return os.pwrite(self._slot(slot), content(seed, size), offset)

    def _append(self, slot: int, seed: int, size: int) -> object:
        fd = self._slot(slot)
        os.lseek(fd, 0, os.SEEK_END)
        return os.write(fd, content(seed, size)), os.lseek(fd, 0, os.SEEK_CUR)

    def _read(self, slot: int, offset: int, size: int) -> object:
        return _digest(os.pread(self._slot(slot), size, offset))

    def _ftruncate(self, slot: int, size: int) -> None:
        os.ftruncate(self._slot(slot), size)

    def _fstat(self, slot: int) -> object:
        return self._described(os.fstat(self._slot(slot)))

    def _fchmod(self, slot: int, mode: int) -> None:
        os.fchmod(self._slot(slot), mode)

    def _fsync(self, slot: int) -> None:
        os.fsync(self._slot(slot))

    def _fallocate(self, slot: int, mode: int, offset: int, size: int) -> None:
        fallocate(self._slot(slot), mode, offset, size)

    def _map(self, slot: int, offset: int, seed: int, size: int) -> object:
        """Write through a mapping, if that many bytes are there."""
        fd = self._slot(slot)
        length = os.fstat(fd).st_size
        if not stat.S_ISREG(os.fstat(fd).st_mode) or offset + size > length or size == 0:
            return None
        with mmap.mmap(fd, length) as pages:
            before = _digest(pages[offset : offset + size])
            pages[offset : offset + size] = content(seed, size)
        return before

    def _copy(self, slot: int, other: int, offset: int, to: int, size: int) -> object:
        source, target, done = self._slot(slot), self._slot(other), 0
        if source == target:
            return None
        # How much is copied at once is the kernel's choice.
        while done < size:
            count = os.copy_file_range(source, target, size - done, offset + done, to + done)
            if count == 0:
                break
            done += count
        return done

    def _described(self, status: os.stat_result) -> object:
        directory = stat.S_ISDIR(status.st_mode)
        changed = status.st_mtime_ns if status.st_mtime_ns < SET_BEFORE_NS else "now"
        return (
            oct(status.st_mode),
            status.st_nlink,
            (status.st_uid, status.st_gid),
            None if directory else status.st_size,
            changed,
        )


def _digest(part: bytes) -> tuple[int, str]:
    return len(part), hashlib.sha256(part).hexdigest()[:12]


class Sequence:
    """The calls of a seed, for a directory that looks like ``first`` does."""

    def __init__(self, seed: int, first: Subject, *, native_datapath: bool) -> None:
        self._dice = random.Random(seed)
        self._first = first
        makers: list[tuple[int, Callable[[], Call]]] = [
            (8, lambda: ("open_", self._at(), self._some(), self._flags(), self._mode())),
            (3, lambda: ("close", self._at())),
            (10, lambda: ("write", self._at(), self._offset(), self._seed(), self._size())),
            (3, lambda: ("append", self._at(), self._seed(), self._size())),
            (5, lambda: ("read", self._at(), self._offset(), self._size())),
            (3, lambda: ("map", self._at(), self._offset(), self._seed(), self._size())),
            (2, lambda: ("copy", *self._copied())),
            (3, lambda: ("ftruncate", self._at(), self._offset())),
            (2, lambda: ("truncate", self._some(), self._offset())),
            (2, lambda: ("fstat", self._at())),
            (1, lambda: ("fchmod", self._at(), self._mode())),
            (1, lambda: ("fsync", self._at())),
            (3, lambda: ("mkdir", self._new(), self._mode() | 0o700)),
            (1, lambda: ("mkfifo", self._new(), self._mode())),
            (2, lambda: ("symlink", self._target(), self._new())),
            (3, lambda: ("link", self._some(), self._new())),
            (6, lambda: ("rename", self._some(), self._new())),
            (1, lambda: ("noreplace", self._some(), self._new())),
            (3, lambda: ("unlink", self._some())),
            (2, lambda: ("rmdir", self._some())),
            (3, lambda: ("chmod", self._some(), self._mode())),
            (2, lambda: ("chown", self._some(), *self._owner())),
            (3, lambda: ("utime", self._some(), self._ns(), self._ns())),
            (3, lambda: ("stat", self._some())),
            (2, lambda: ("lstat", self._some())),
            (1, lambda: ("access", self._some(), self._dice.randrange(8))),
            (1, lambda: ("readlink", self._some())),
            (3, lambda: ("list", self._some())),
            (3, lambda: ("setxattr", self._some(), self._xattr(), *self._value())),
            (1, lambda: ("getxattr", self._some(), self._xattr())),
            (1, lambda: ("removexattr", self._some(), self._xattr())),
            (1, lambda: ("listxattr", self._some())),
        ]
        # Without it nothing is allocated, and a program that root writes is no longer set-uid: the
        # kernel does not tell who writes.
        self._modes = _MODES if native_datapath else [mode for mode in _MODES if mode < 0o2000]
        if native_datapath:
            makers.append((3, lambda: ("fallocate", self._at(), *self._allocated())))
        self._makers = [maker for _, maker in makers]
        self._weights = [weight for weight, _ in makers]

    def next(self) -> Call:
        self._directories, self._others = self._first.paths()
        (maker,) = self._dice.choices(self._makers, self._weights)
        return maker()

    def _some(self) -> str:
        """A name that is there, mostly."""
        dice = self._dice.random()
        if dice < 0.55 and self._others:
            return self._dice.choice(self._others)
        if dice < 0.85 and self._directories:
            return self._dice.choice(self._directories)
        return self._new()

    def _new(self) -> str:
        """A name that is not there, perhaps."""
        shallow = [path for path in self._directories if path.count("/") < _DEPTH - 1]
        where = self._dice.choice(["", *shallow])
        return f"{where}/{self._dice.choice(_NAMES)}".lstrip("/")

    def _target(self) -> str:
        return self._dice.choice([*_NAMES, "../a", "a/b", ".", "nothing", "x" * 300])

    def _at(self) -> int:
        return self._dice.randrange(SLOTS)

    def _flags(self) -> int:
        return self._dice.choice(_OPEN_FLAGS)

    def _mode(self) -> int:
        return self._dice.choice(self._modes)

    def _seed(self) -> int:
        return self._dice.randrange(1 << 30)

    def _size(self) -> int:
        return self._dice.choice((0, 1, 100, 4096, self._dice.randrange(60_000)))

    def _offset(self) -> int:
        return self._dice.choice((0, 1, 4096, 5000, self._dice.randrange(LARGEST)))

    def _copied(self) -> tuple[int, int, int, int, int]:
        return self._at(), self._at(), self._offset(), self._offset(), self._size()

    def _allocated(self) -> tuple[int, int, int]:
        modes = (0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE)
        return self._dice.choice(modes), self._offset(), self._size()

    def _owner(self) -> tuple[int, int]:
        return self._dice.choice(((-1, 1234), (USER, USER), (0, -1), (USER, -1), (0, 0)))

    def _ns(self) -> int:
        return SET_NS + self._dice.randrange(10**15)

    def _xattr(self) -> str:
        return self._dice.choice(("user.a", "user.b", "user.c"))

    def _value(self) -> tuple[bytes, int]:
        value = b"v" * self._dice.choice((0, 1, 30, 500))
        return value, self._dice.choice((0, 0, os.XATTR_CREATE, os.XATTR_REPLACE))


def play(
    seed: int, first: Path, second: Path, *, calls: int, native_datapath: bool, by_user: bool
) -> None:
    """Make calls in both directories, which are alike; raises Differs.

    ``by_user``: everything belongs to the ordinary user that makes the calls.
    """
    subjects = Subject(first), Subject(second)
    before = os.getcwd()
    mask = os.umask(0o022)
    done: list[str] = []
    try:
        if by_user:
            for subject in subjects:
                _give_away(subject.root)
        with as_user() if by_user else nullcontext():
            sequence = Sequence(seed, subjects[0], native_datapath=native_datapath)
            for _ in range(calls):
                call = sequence.next()
                got = subjects[1].do(call)
                if subjects[0].may_be_refused(call, got):
                    continue
                expected = subjects[0].do(call)
                if expected != got:
                    raise Differs(_story(seed, done, f"{call}: expected {expected}, got {got}"))
                if call[0] not in _LOOKS and expected not in errno.errorcode.values():
                    done.append(f"{call} -> {expected}")
        if found := differences(*(lasting(subject.root) for subject in subjects)):
            raise Differs(_story(seed, done, "after all of it:\n" + "\n".join(found[:20])))
    finally:
        for subject in subjects:
            subject.close()
        os.umask(mask)
        os.chdir(before)


def lasting(root: Path) -> Tree:
    """The tree without the times of the clock, which are never the same twice."""
    return {
        path: entry if entry.mtime_ns < SET_BEFORE_NS else replace(entry, mtime_ns=-1)
        for path, entry in tree(root).items()
    }


def _give_away(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for name in (".", *files):
            os.chown(os.path.join(directory, name), USER, USER, follow_symlinks=False)


def _story(seed: int, done: list[str], what: str) -> str:
    """What differs, and what was changed before it."""
    calls_text = "\n".join(done[-60:])
    return f"seed {seed}: {what}\nwhat was done before:\n{calls_text}"
