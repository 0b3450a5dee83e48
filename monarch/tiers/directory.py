"""One tier: a private directory on a local file system that holds whole, verified copies.

    PATH/monarch/                    0700, owned by the daemon's user
        lock                         held while a daemon uses the tier: pid and mount point
        tier.json                    the tier's own id
        stage/INO.part               copies being written, swept at start
        copies-GENERATION/XX/INO     committed copies; XX is the low byte of INO in hex

A generation is one snapshot: inode numbers mean something only within it. Copies of another
generation are adopted by rename or removed, never served. Calls here may wait for the local
disk. A file's content is read through the descriptor that ``open`` returns, so removing a copy
never disturbs who reads it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import struct
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from monarch.errors import TierError
from monarch.tiers.lock import Lock
from monarch.types import Ino
from monarch.units import MiB

PRIVATE = "monarch"
_PREFIX = "copies-"
_CHUNK = 1 * MiB
_ZEROS = bytes(_CHUNK)
_LIBC = ctypes.CDLL(None, use_errno=True)
# TMPFS_MAGIC and RAMFS_MAGIC of linux/magic.h
_MEMORY = frozenset({0x01021994, 0x858458F6})


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of the tier's file system: all of it, and what an ordinary user may still write."""

    total: int
    available: int


def copy_name(ino: Ino) -> str:
    """Where a generation's directory holds the copy of ``ino``; the datapath knows this too."""
    return f"{ino & 0xFF:02x}/{ino}"


class Tier:
    """The tier ``number`` (1 is the fastest) at ``path``. Opening it takes its lock.

    Raises TierError if the directory cannot be made or is not ours, LockedError if another
    daemon uses it.
    """

    def __init__(self, number: int, name: str, path: Path, *, owner: str) -> None:
        self.number = number
        self.name = name
        self.path = path
        self._root = _open_private(path)
        try:
            self._lock = Lock(self._root, f"tier {os.fspath(path)!r}", owner)
        except BaseException:
            os.close(self._root)
            raise
        self.id = self._own_id()
        # A read of memory never waits, and tmpfs cannot say so through RWF_NOWAIT.
        self.in_memory = _kind_of_file_system(self._root) in _MEMORY
        self._generation = -1
        self._generation_name = ""

    def close(self) -> None:
        if self._generation >= 0:
            os.close(self._generation)
        self._lock.release()
        os.close(self._root)

    def _own_id(self) -> str:
        with suppress(OSError, ValueError, KeyError, TypeError):
            with open(self._opened("tier.json", os.O_RDONLY), "rb") as file:
                return str(json.load(file)["id"])
        identity = uuid.uuid4().hex
        with open(self._opened("tier.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            json.dump({"id": identity}, file)
        return identity

    def _opened(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._root)

    # -- generations -----------------------------------------------------------------------

    def use(self, generation: str) -> None:
        """Serve and commit in this generation from now on; empty the stage."""
        name = _PREFIX + generation
        for needed in ("stage", name):
            with suppress(FileExistsError):
                os.mkdir(needed, 0o700, dir_fd=self._root)
        if self._generation >= 0:
            os.close(self._generation)
        self._generation = os.open(
            name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._root
        )
        self._generation_name = name
        self.sweep_stage()

    def sweep_stage(self) -> None:
        with self._listing("stage") as entries:
            names = [entry.name for entry in entries]
        for name in names:
            _remove(self._root, f"stage/{name}")

    def adopt(self, generation: str, old: Ino, new: Ino) -> bool:
        """Rename a copy of another generation into this one; False if it is not there."""
        try:
            self._into_generation(f"{_PREFIX}{generation}/{copy_name(old)}", new)
        except FileNotFoundError:
            return False
        return True

    def remove_other_generations(self) -> int:
        """Remove the copies that belong to no known snapshot; how many there were."""
        with self._listing(".") as entries:
            names = [e.name for e in entries if e.name.startswith(_PREFIX)]
        return sum(_remove(self._root, name) for name in names if name != self._generation_name)

    def copies(self) -> Iterator[list[str]]:
        """The paths, like ``copy_name``, of all that is there, one subdirectory at a time."""
        with self._listing(self._generation_name) as entries:
            buckets = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        yield [name for name, is_directory in buckets.items() if not is_directory]
        for bucket in [name for name, is_directory in buckets.items() if is_directory]:
            with self._listing(f"{self._generation_name}/{bucket}") as entries:
                names = [f"{bucket}/{entry.name}" for entry in entries]
            yield names

    def remove_stranger(self, path: str, *, before_ns: int) -> bool:
        """Remove what no record knows from this generation, unless it came after that time."""
        try:
            status = os.stat(path, dir_fd=self._generation, follow_symlinks=False)
            if status.st_ctime_ns >= before_ns:
                return False
            _remove(self._generation, path)
        except FileNotFoundError:
            return False
        return True

    # -- copies ----------------------------------------------------------------------------

    @property
    def directory(self) -> int:
        """The descriptor of the generation in use: what ``copy_name`` names is beneath it."""
        return self._generation

    def open(self, ino: Ino, size: int) -> int:
        """A descriptor of the committed copy. Raises OSError, ESTALE if it has another size."""
        fd = os.open(
            copy_name(ino), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._generation
        )
        if os.fstat(fd).st_size != size:
            os.close(fd)
            raise OSError(errno.ESTALE, "the copy has another size than its record says")
        return fd

    def has(self, ino: Ino) -> bool:
        """Whether a committed copy lies there, whatever the records say."""
        try:
            os.stat(copy_name(ino), dir_fd=self._generation, follow_symlinks=False)
        except OSError:
            return False
        return True

    def remove(self, ino: Ino) -> None:
        with suppress(FileNotFoundError):
            os.unlink(copy_name(ino), dir_fd=self._generation)

    def digest(self, ino: Ino, size: int) -> bytes:
        """The xxh3-128 of the copy as the disk has it. Raises OSError as ``open`` does."""
        fd = self.open(ino, size)
        try:
            digest = xxhash.xxh3_128()
            offset = 0
            while part := os.pread(fd, _CHUNK, offset):
                digest.update(part)
                offset += len(part)
            return digest.digest()
        finally:
            os.close(fd)

    def stage(self, ino: Ino) -> Staged:
        """A place to write a copy that nobody sees until it is committed. Raises OSError."""
        return Staged(self, ino, self._stage_fd(ino))

    def _stage_fd(self, ino: Ino) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(f"stage/{ino}.part", flags, 0o600, dir_fd=self._root)

    def _commit(self, ino: Ino) -> None:
        self._into_generation(f"stage/{ino}.part", ino)

    def _discard(self, ino: Ino) -> None:
        with suppress(FileNotFoundError):
            os.unlink(f"stage/{ino}.part", dir_fd=self._root)

    def _into_generation(self, name: str, ino: Ino) -> None:
        target = copy_name(ino)
        try:
            os.rename(name, target, src_dir_fd=self._root, dst_dir_fd=self._generation)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(target[:2], 0o700, dir_fd=self._generation)
            os.rename(name, target, src_dir_fd=self._root, dst_dir_fd=self._generation)

    # -- the file system below ---------------------------------------------------------------

    def space(self) -> Space:
        told = os.fstatvfs(self._root)
        return Space(told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize)

    def probe(self) -> None:
        """Write and remove a small stage; raises OSError while the tier cannot be written."""
        fd = self._opened("stage/probe", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            os.write(fd, b"monarch")
        finally:
            os.close(fd)
            os.unlink("stage/probe", dir_fd=self._root)

    def sync(self) -> None:
        """Wait until the committed copies are on the disk, so that a power cut keeps them."""
        if _LIBC.syncfs(self._root) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def _listing(self, name: str) -> _Listing:
        return _Listing(self._root, name)


def _kind_of_file_system(fd: int) -> int:
    """``f_type`` of statfs(2), 0 if it cannot be had."""
    buffer = ctypes.create_string_buffer(256)
    if _LIBC.fstatfs(fd, buffer) != 0:
        return 0
    kind: int = struct.unpack_from("=q", buffer)[0]
    return kind & 0xFFFFFFFF


class _Listing:
    """``os.scandir`` beneath a descriptor, which it opens and closes."""

    def __init__(self, root: int, name: str) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(name, flags, dir_fd=root)

    def __enter__(self) -> Iterator[os.DirEntry[str]]:
        self._entries = os.scandir(self._fd)
        return self._entries

    def __exit__(self, *_exc: object) -> None:
        self._entries.close()
        os.close(self._fd)


class Staged:
    """A copy under way. Leaving the ``with`` block without ``commit`` removes it."""

    def __init__(self, tier: Tier, ino: Ino, fd: int) -> None:
        self._tier = tier
        self._ino = ino
        self._fd = fd
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self._committed = False

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_exc: object) -> None:
        os.close(self._fd)
        if not self._committed:
            self._tier._discard(self._ino)

    @property
    def size(self) -> int:
        return self._size

    def append(self, data: bytes | memoryview) -> None:
        """The next bytes of the copy. Holes stay holes. Raises OSError, also ENOSPC."""
        self._digest.update(data)
        if len(data) == _CHUNK and data == _ZEROS:
            self._size += _CHUNK
            return
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, self._size)
            self._size += written
            view = view[written:]

    def commit(self) -> bytes:
        """Make the copy visible under its name; its xxh3-128."""
        if os.fstat(self._fd).st_size != self._size:
            os.ftruncate(self._fd, self._size)
        self._tier._commit(self._ino)
        self._committed = True
        return self._digest.digest()


def _remove(directory: int, name: str) -> int:
    """Remove a file, or a directory with all that it holds; how many files that were."""
    try:
        os.unlink(name, dir_fd=directory)
        return 1
    except IsADirectoryError:
        with _Listing(directory, name) as entries:
            names = [entry.name for entry in entries]
        removed = sum(_remove(directory, f"{name}/{below}") for below in names)
        os.rmdir(name, dir_fd=directory)
        return removed


def _open_private(path: Path) -> int:
    """A descriptor of PATH/monarch, made 0700 and proved to be ours. Raises TierError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        parent = os.open(path, flags)
        try:
            # A directory made for this tier alone may be closed to others altogether.
            if os.fstat(parent).st_uid == os.geteuid() and not os.listdir(parent):
                os.fchmod(parent, 0o700)
            with suppress(FileExistsError):
                os.mkdir(PRIVATE, 0o700, dir_fd=parent)
            fd = os.open(PRIVATE, flags | os.O_NOFOLLOW, dir_fd=parent)
        finally:
            os.close(parent)
    except OSError as error:
        raise TierError(
            f"tier {os.fspath(path)!r}: {error.strerror}",
            hint="name a directory on a local disk that you may write",
        ) from error
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        os.close(fd)
        raise TierError(
            f"tier {os.fspath(path)!r}: its directory {PRIVATE!r} belongs to uid {status.st_uid}",
            hint="choose another directory",
        )
    os.fchmod(fd, 0o700)
    return fd
