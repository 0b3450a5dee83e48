"""The files in the directory of a tier with the copies of a mount: their names and their seals.

The seal of a copy is its modification time, computed from its inode number and its version. A
program that writes into a copy, replaces it or restores an old one breaks the seal. The check needs
no memory per file and no read: an open reads the attributes of the copy anyway. A broken seal
proves nothing; the copy is then compared with its digest. The datapath computes the same seal
(fuse/native/_copies.c).
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain

from monarch.posix.buckets import mix
from monarch.posix.files import closing_fd
from monarch.posix.private_directory import open_private
from monarch.types import Identity, Ino

# The directories with the copies of one generation.
_GENERATION = re.compile(r"copies-[0-9A-Za-z-]+")
# The names beneath stage/.
_STAGED = re.compile(r"[0-9]+\.part|probe")

_MASK = (1 << 64) - 1
_SECOND_NS = 1_000_000_000
# The seconds have 30 bits: a time (before 2004) that every file system can store.
_SECONDS_SHIFT = 34
# The increment of splitmix64, before ``mix``.
_GAMMA = 0x9E3779B97F4A7C15

# The directory of the partial copies, beneath that of the generation (partial.py).
PARTS = "parts"

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def copy_name(ino: Ino) -> str:
    """The path of the copy of ``ino`` in a generation's directory, as in the C datapath."""
    return f"{ino & 0xFF:02x}/{ino}"


def part_name(ino: Ino) -> str:
    """The path of the partial copy of ``ino`` in a generation's directory."""
    return f"{PARTS}/{ino}"


def part_of(name: str) -> Ino | None:
    """The inode number of a name in the directory of the partial copies, None if it has none."""
    is_number = name.isascii() and name.isdecimal() and len(name) < 20
    return Ino(int(name)) if is_number and name == str(int(name)) and int(name) > 0 else None


def ino_of(path: str) -> Ino | None:
    """The inode number of a path beneath a generation's directory, None if it is not a copy."""
    name = path.partition("/")[2]
    # A name of a copy has ASCII digits only; Python accepts other digits as numbers, too.
    if not (name.isascii() and name.isdecimal() and len(name) < 20):
        return None
    ino = Ino(int(name))
    return ino if ino > 0 and path == copy_name(ino) else None


def opened_in(directory: int, name: str, flags: int) -> int:
    return open_private(name, flags, dir_fd=directory)


class Contents:
    """The files beneath ``root``, a descriptor of the tier's own directory. Raises OSError; a
    directory that is missing counts as empty."""

    PREFIX = "copies-"
    _KNOWN = frozenset({"lock", "tier.json", "tier.part", "stage"})

    def __init__(self, root: int) -> None:
        self._root = root

    def generations(self) -> list[str]:
        """The ids of the snapshots that have copies there."""
        return [
            name.removeprefix(self.PREFIX)
            for name in self.names(".")
            if _GENERATION.fullmatch(name)
        ]

    def strangers(self) -> list[str]:
        """Files that Monarch did not make."""
        return [
            name
            for name in self.names(".")
            if name not in self._KNOWN and not _GENERATION.fullmatch(name)
        ]

    def stages(self) -> list[str]:
        """Stages: copies that are being written, or were when a daemon was killed."""
        unnamed = [name for name in self.names(".") if name == "tier.part"]
        return unnamed + [f"stage/{name}" for name in self.names("stage")]

    def staged_copies(self) -> list[str]:
        """The stages that have the form of a name that Monarch gives."""
        return [f"stage/{name}" for name in self.names("stage") if _STAGED.fullmatch(name)]

    def files(self, generation: str) -> Iterator[list[str]]:
        """The paths beneath a generation's directory, one subdirectory at a time, without those of
        partial copies."""
        top = self.PREFIX + generation
        loose: list[str] = []
        buckets: list[str] = []
        for name in self.names(top):
            if name == PARTS:
                continue
            mode = os.stat(f"{top}/{name}", dir_fd=self._root, follow_symlinks=False).st_mode
            (buckets if stat.S_ISDIR(mode) else loose).append(name)
        yield loose
        for bucket in buckets:
            yield [f"{bucket}/{name}" for name in self.names(f"{top}/{bucket}")]

    def copies(self, generation: str) -> Iterator[str]:
        """The paths beneath the directory of the tier, of all copies of a generation."""
        # A file of another program may have the name of a generation.
        with suppress(NotADirectoryError):
            for paths in self.files(generation):
                for path in paths:
                    if ino_of(path) is not None:
                        yield f"{self.PREFIX}{generation}/{path}"

    def parts(self, generation: str) -> list[str]:
        """The names in the directory of the partial copies of a generation."""
        with suppress(NotADirectoryError):
            return self.names(f"{self.PREFIX}{generation}/{PARTS}")
        return []

    def empty(self, generation: str) -> int:
        """Removes all copies of a generation, and the directories in its own; returns how many
        copies. Raises OSError."""
        removed, name = 0, self.PREFIX + generation
        named = filter(part_of, self.parts(generation))
        parts = (f"{name}/{PARTS}/{part}" for part in named)
        for path in chain(self.copies(generation), parts):
            with suppress(IsADirectoryError):
                os.unlink(path, dir_fd=self._root)
                removed += 1
        buckets = (f"{name}/{bucket:02x}" for bucket in range(256))
        for below in [*buckets, f"{name}/{PARTS}"]:
            with suppress(OSError):
                os.rmdir(below, dir_fd=self._root)
        return removed

    def rename_one(self, name: str) -> bool:
        """Makes the directory of a generation that of another one, without its copies: a full disk,
        or quota, has no room for one more. Returns False if there is none. Raises OSError."""

        def copies(generation: str) -> int:
            return sum(1 for _ in self.copies(generation))

        for earlier in sorted(self.generations(), key=copies):
            before = self.PREFIX + earlier
            # A file of another program may have such a name.
            if stat.S_ISDIR(os.lstat(before, dir_fd=self._root).st_mode):
                self.empty(earlier)
                os.rename(before, name, src_dir_fd=self._root, dst_dir_fd=self._root)
                return True
        return False

    def names(self, name: str) -> list[str]:
        """The sorted names in a directory."""
        try:
            with closing_fd(os.open(name, DIRECTORY, dir_fd=self._root)) as fd:
                return sorted(os.listdir(fd))
        except FileNotFoundError:
            return []


class BrokenSeal(OSError):
    """A copy that another program may have changed: it must be compared with its digest."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, "the copy's seal is broken")


def seal(ino: Ino, identity: Identity) -> int:
    """The ``st_mtime_ns`` of the copy of ``ino`` in the version ``identity``."""
    x = int(ino)
    for value in (identity.size, identity.mtime_ns, identity.ctime_ns, identity.source_ino):
        x = mix((x ^ (value & _MASK)) + _GAMMA)
    seconds = x >> _SECONDS_SHIFT
    return seconds * _SECOND_NS + (x & ((1 << _SECONDS_SHIFT) - 1)) % _SECOND_NS


def put_seal(fd: int, ino: Ino, identity: Identity) -> None:
    # The access time is now: programs that purge a scratch disk by age use that time.
    os.utime(fd, ns=(time.time_ns(), seal(ino, identity)))


@contextmanager
def probe_file(root: int) -> Iterator[int]:
    """A new file in the stage of a tier's own directory, removed at the end. Raises OSError."""
    with closing_fd(opened_in(root, "stage/probe", os.O_RDWR | os.O_CREAT | os.O_TRUNC)) as fd:
        try:
            yield fd
        finally:
            os.unlink("stage/probe", dir_fd=root)


def keeps_seals(root: int) -> bool:
    """Whether the files of a tier, whose own directory is ``root``, may have any modification time
    to the nanosecond. Its lock is tried: a full disk has no room for another file. Raises
    OSError."""
    with closing_fd(opened_in(root, "lock", os.O_RDWR)) as fd:
        wanted = seal(Ino(1), Identity(0, 0, 0, 0))
        with suppress(OSError):
            os.utime(fd, ns=(wanted, wanted))
        return os.fstat(fd).st_mtime_ns == wanted
