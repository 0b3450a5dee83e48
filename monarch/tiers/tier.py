"""One tier: a private directory on a local file system that holds verified copies.

    PATH/monarch/                    0700, owned by the daemon's user
        absorbed-SOURCE/             data written for a source (writeback/store.py)
        MOUNT/                       the copies of one mount; named after its state directory
            lock                     held while a daemon uses them: pid and mount point
            tier.json                the tier's own id, the version of the format, source and state
            stage/INO.part           copies being written, removed at start
            copies-GENERATION/XX/INO committed copies; XX is the low byte of INO in hex, the
                                     modification time is the seal (contents.py)
            parts/INO                partial copies of large files (partial.py)

Several mounts may share a PATH, one after the other or at the same time; none touches the files of
another. Earlier versions of Monarch kept the contents of MOUNT in PATH/monarch itself: the mount
whose records know that tier's id moves them, all other mounts leave them alone.

A generation is one snapshot: inode numbers are valid only within it. Copies of another generation
are adopted by rename or removed, never served. Calls here may wait for the local disk. A file is
read through the descriptor that ``open`` returns, so that the removal of a copy does not disturb
its readers.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from monarch.errors import TierError
from monarch.posix import failpoints
from monarch.posix.files import closing_fd, keep_no_access_times, sync_file_system
from monarch.posix.openat2 import kind_of_file_system
from monarch.posix.private_directory import Lock
from monarch.text import MiB
from monarch.tiers.contents import (
    DIRECTORY,
    BrokenSeal,
    Contents,
    copy_name,
    keeps_seals,
    opened_in,
    part_name,
    probe_file,
    put_seal,
    seal,
)
from monarch.tiers.ownership import Owner, identify, open_own_directory
from monarch.types import Identity, Ino

log = logging.getLogger(__name__)

_CHUNK = 1 * MiB
_ZEROS = bytes(_CHUNK)
# TMPFS_MAGIC and RAMFS_MAGIC of linux/magic.h
_MEMORY = frozenset({0x01021994, 0x858458F6})


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of the tier's file system: in total, and available to an ordinary user."""

    total: int
    available: int


class Tier:
    """The tier ``number`` (1 is the fastest) at ``path``. The constructor takes its lock. Raises
    TierError if the directory cannot be created or belongs to another user, LockedError if another
    daemon uses it."""

    def __init__(
        self, number: int, name: str, path: Path, *, owner: Owner, known_as: str | None = None
    ) -> None:
        self.number = number
        self.name = name
        self.path = path
        self._owner = owner
        # The directory with the copies of this mount.
        self.own, self._root = open_own_directory(path, owner)
        with ExitStack() as opened:
            opened.callback(os.close, self._root)
            self._lock = Lock(
                self._root,
                f"tier {os.fspath(path)!r}",
                owner.mountpoint,
                instead="give this mount another tier with --tier PATH",
            )
            opened.callback(self._lock.release)
            self.id = identify(self._root, path, owner, known_as)
            opened.pop_all()
        self._mounted = os.path.ismount(path)
        # A read from memory never waits, but tmpfs does not support RWF_NOWAIT.
        self.in_memory = kind_of_file_system(self._root) in _MEMORY
        self._generation = -1
        self.generation_name = ""
        # Whether the file system keeps a seal exactly; set by ``use``.
        self.seals = False
        # How often its lots were given up (lots.py); the extension reads it while it writes.
        self.terms = array("Q", [0])

    def close(self) -> None:
        if self._generation >= 0:
            os.close(self._generation)
        self._lock.release()
        os.close(self._root)

    # -- generations -----------------------------------------------------------------------

    def use(self, generation: str) -> None:
        """Sets the generation for serving and committing; empties the stage."""
        name = Contents.PREFIX + generation
        for needed in ("stage", name):
            try:
                os.mkdir(needed, 0o700, dir_fd=self._root)
            except FileExistsError:
                pass
            except OSError as error:
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                if not (is_full and needed == name and Contents(self._root).rename_one(name)):
                    raise
            with closing_fd(os.open(needed, DIRECTORY, dir_fd=self._root)) as made:
                keep_no_access_times(made)
        if self._generation >= 0:
            os.close(self._generation)
        self._generation = os.open(name, DIRECTORY, dir_fd=self._root)
        self.generation_name = name
        failpoints.failpoint("tier-generation-made")
        self.sweep_stage()
        self.seals = keeps_seals(self._root)
        if not self.seals:
            log.info("tier %s: its file system rounds times, so copies have no seal", self.name)

    def sweep_stage(self) -> None:
        for name in Contents(self._root).staged_copies():
            with suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(name, dir_fd=self._root)

    def adopt(self, generation: str, old: Ino, new: Ino, identity: Identity) -> bool:
        """Renames a copy of another generation into this one; False if there is none. An unbroken
        seal is renewed. Raises OSError."""
        try:
            self._into_generation(f"{Contents.PREFIX}{generation}/{copy_name(old)}", new)
        except FileNotFoundError:
            # An earlier daemon may have renamed it and died before it was recorded.
            return self.has(new)
        failpoints.failpoint("adopt-renamed")
        with closing_fd(self._opened_copy(new)) as fd:
            if os.fstat(fd).st_mtime_ns == seal(old, identity):
                put_seal(fd, new, identity)
        return True

    def remove_other_generations(self) -> int:
        """Removes the copies that belong to no known snapshot; returns their number. Files of other
        programs stay, and so do their directories."""
        removed = 0
        contents = Contents(self._root)
        for generation in contents.generations():
            name = Contents.PREFIX + generation
            if name != self.generation_name:
                removed += contents.empty(generation)
                with suppress(OSError):
                    os.rmdir(name, dir_fd=self._root)
        return removed

    def count_copies(self) -> int:
        """The number of copies of any snapshot, recorded or not."""
        contents = Contents(self._root)
        return sum(1 for name in contents.generations() for _ in contents.copies(name))

    def copies(self) -> Iterator[list[str]]:
        """The paths, as of ``copy_name``, of all files of this generation, one subdirectory at a
        time. Raises OSError, ENOENT if the directory of the generation is gone."""
        os.stat(self.generation_name, dir_fd=self._root)
        return Contents(self._root).files(self.generation_name.removeprefix(Contents.PREFIX))

    def remove_stranger(self, path: str, *, before_ns: int, unless_size: int | None = None) -> bool:
        """Removes a file without a record, unless it is newer than ``before_ns`` or has the size
        ``unless_size``, which is that of a record."""
        try:
            status = os.stat(path, dir_fd=self._generation, follow_symlinks=False)
            if status.st_ctime_ns >= before_ns:
                return False
            if stat.S_ISREG(status.st_mode) and status.st_size == unless_size:
                return False
            _remove(self._generation, path)
        except FileNotFoundError:
            return False
        return True

    # -- copies ----------------------------------------------------------------------------

    @property
    def directory(self) -> int:
        """The descriptor of the current generation's directory; ``copy_name`` is relative to it."""
        return self._generation

    def open(self, ino: Ino, identity: Identity) -> int:
        """A descriptor of the committed copy. Raises OSError, ESTALE for another size, and
        BrokenSeal."""
        fd = self._opened_copy(ino)
        try:
            status = os.fstat(fd)
            _require_size(status, identity)
            if self.seals and status.st_mtime_ns != seal(ino, identity):
                raise BrokenSeal
        except BaseException:
            os.close(fd)
            raise
        return fd

    def verify(self, ino: Ino, identity: Identity, digest: bytes) -> None:
        """Compares the copy on the disk with its xxh3-128 ``digest``, and seals it. Raises OSError,
        ESTALE if it differs."""
        with closing_fd(self._opened_copy(ino)) as fd:
            before = os.fstat(fd)
            _require_size(before, identity)
            if _digest(fd) != digest:
                raise OSError(errno.ESTALE, "the digest of the copy differs from the record")
            failpoints.failpoint("verify-compared")
            now, sealed = os.fstat(fd), seal(ino, identity)
            # ``renew_seal`` may have sealed it meanwhile, which leaves the bytes as they are.
            is_renewed = self.seals and before.st_mtime_ns != now.st_mtime_ns == sealed
            is_same = (now.st_mtime_ns, now.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
            if not (is_same or is_renewed):
                raise OSError(errno.ESTALE, "the copy was changed while it was read")
            if self.seals and now.st_mtime_ns != sealed:
                put_seal(fd, ino, identity)
            failpoints.failpoint("verify-sealed")

    def renew_seal(self, ino: Ino, before: Identity, now: Identity) -> None:
        """Seals a copy as another version with the same bytes, unless its seal is broken. Raises
        OSError."""
        with closing_fd(self._opened_copy(ino)) as fd:
            if self.seals and os.fstat(fd).st_mtime_ns == seal(ino, before):
                put_seal(fd, ino, now)

    def _opened_copy(self, ino: Ino, access: int = os.O_RDONLY) -> int:
        # O_NONBLOCK: another program may have put a fifo in the place of a copy.
        flags = access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(copy_name(ino), flags, dir_fd=self._generation)

    def has(self, ino: Ino) -> bool:
        """Whether there is a committed copy, recorded or not."""
        return self.has_file(copy_name(ino))

    def has_file(self, path: str) -> bool:
        """Whether there is anything at a path, as of ``copy_name``."""
        try:
            os.stat(path, dir_fd=self._generation, follow_symlinks=False)
        except OSError:
            return False
        return True

    def open_to_empty(self, ino: Ino) -> int:
        """A descriptor with which ``os.ftruncate`` takes the bytes of a damaged copy from processes
        that have it open. Raises OSError."""
        return self._opened_copy(ino, os.O_WRONLY)

    def remove_all(self, inos: Sequence[Ino]) -> None:
        for ino in inos:
            self.remove(ino)

    def remove(self, ino: Ino) -> None:
        """Removes the copy of ``ino``, whole or partial, if there is one. Raises OSError."""
        for name in (copy_name(ino), part_name(ino)):
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(name, dir_fd=self._generation)
        failpoints.failpoint("eviction-removed")

    def stage(self, ino: Ino) -> Staged:
        """A new stage, in which a copy is invisible until it is committed. Raises OSError."""
        name = f"stage/{ino}.part"
        fd = opened_in(self._root, name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        failpoints.failpoint("copy-staged")
        return Staged(self, ino, name, fd)

    def _into_generation(self, name: str, ino: Ino) -> None:
        """Makes a file beneath the tier's own directory the copy of ``ino``. Raises OSError."""
        _move_in(self._root, name, self._generation, copy_name(ino))

    def complete_part(self, ino: Ino) -> None:
        """Makes the partial copy of ``ino`` the copy. Raises OSError."""
        _move_in(self._generation, part_name(ino), self._generation, copy_name(ino))

    def adopt_part(self, generation: str, old: Ino, new: Ino) -> None:
        """Renames a partial copy of another generation into this one. Raises OSError."""
        name = f"{Contents.PREFIX}{generation}/{part_name(old)}"
        _move_in(self._root, name, self._generation, part_name(new))

    @property
    def root(self) -> int:
        """The descriptor of the tier's own directory."""
        return self._root

    # -- the file system below ---------------------------------------------------------------

    def space(self) -> Space:
        found = os.fstatvfs(self._root)
        return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def probe(self) -> None:
        """Write a small stage, read it from the disk, remove it. Raises OSError if that fails."""
        with probe_file(self._root) as fd:
            os.write(fd, b"monarch")
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if os.pread(fd, 8, 0) != b"monarch":
                raise OSError(errno.EIO, "it returns other bytes than were written")

    def is_in_place(self) -> bool:
        """Whether PATH still leads to the opened, readable directory. Raises OSError."""
        try:
            there = os.stat(self.own, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        here = os.fstat(self._root)
        if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            return False
        with suppress(FileNotFoundError):
            with closing_fd(opened_in(self._root, "tier.json", os.O_RDONLY)) as fd:
                os.pread(fd, 1, 0)
        return True

    def detach(self) -> None:
        """Closes the directory: calls fail with ENOTDIR until ``reopen``."""
        self._lock.release()
        nothing = os.open(os.devnull, os.O_PATH | os.O_CLOEXEC)
        for fd in (self._root, self._generation):
            os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)

    def reopen(self) -> None:
        """Opens the directory now at PATH, after ``detach``; the descriptors keep their numbers. It
        must be the same tier, with its copies, or empty. Raises OSError, TierError and
        LockedError."""
        where = os.fspath(self.path)
        os.stat(self.path)
        if self._mounted and not os.path.ismount(self.path):
            raise TierError(f"nothing is mounted at {where!r}")
        there = Tier(self.number, self.name, self.path, owner=self._owner, known_as=self.id)
        try:
            if there.id != self.id:
                raise TierError(
                    f"{where!r} is another tier than before",
                    hint="unmount and mount again to use it",
                )
            there.use(self.generation_name.removeprefix(Contents.PREFIX))
            os.dup2(there._root, self._root, inheritable=False)
            os.dup2(there._generation, self._generation, inheritable=False)
            self.own, self.in_memory, self.seals = there.own, there.in_memory, there.seals
            self._lock, there._lock = there._lock, self._lock
        finally:
            there.close()

    def sync(self) -> None:
        """Waits until the committed copies are on the disk and survive a power cut."""
        sync_file_system(self._root)


class Staged:
    """A copy that is being written. Leaving the ``with`` block without ``commit`` removes it."""

    def __init__(self, tier: Tier, ino: Ino, name: str, fd: int) -> None:
        self._tier = tier
        self._ino = ino
        self._name = name
        self._fd = fd
        self._digest = xxhash.xxh3_128()
        self.size = 0
        self._committed = False

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._close_file()
        finally:
            if not self._committed:
                with suppress(FileNotFoundError):
                    os.unlink(self._name, dir_fd=self._tier._root)

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def append(self, data: bytes | memoryview) -> None:
        """Appends bytes to the copy. Holes stay holes. Raises OSError, also ENOSPC."""
        self._digest.update(data)
        if len(data) == _CHUNK and data == _ZEROS:
            self.size += _CHUNK
            return
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, self.size)
            self.size += written
            view = view[written:]
        failpoints.failpoint("copy-half-written")

    def commit(self, identity: Identity) -> bytes:
        """Makes the copy visible, sealed as this version; returns its xxh3-128."""
        if os.fstat(self._fd).st_size != self.size:
            os.ftruncate(self._fd, self.size)
        failpoints.failpoint("copy-written")
        if self._tier.seals:
            put_seal(self._fd, self._ino, identity)
        failpoints.failpoint("copy-sealed")
        # Some file systems report only here that they have no space for the bytes.
        self._close_file()
        self._tier._into_generation(self._name, self._ino)
        failpoints.failpoint("copy-renamed")
        self._committed = True
        return self._digest.digest()


def _move_in(root: int, name: str, directory: int, target: str) -> None:
    """Renames ``name`` beneath ``root`` to ``target`` beneath ``directory``; makes the directory of
    ``target`` if it is missing. Raises OSError."""
    try:
        os.rename(name, target, src_dir_fd=root, dst_dir_fd=directory)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(os.path.dirname(target), 0o700, dir_fd=directory)
        os.rename(name, target, src_dir_fd=root, dst_dir_fd=directory)


def _require_size(status: os.stat_result, identity: Identity) -> None:
    if status.st_size != identity.size or not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ESTALE, "the size of the copy differs from its record")


def _digest(fd: int) -> bytes:
    digest = xxhash.xxh3_128()
    offset = 0
    while part := os.pread(fd, _CHUNK, offset):
        digest.update(part)
        offset += len(part)
    return digest.digest()


def _remove(directory: int, name: str) -> None:
    """Removes a file, or a directory with its contents."""
    try:
        os.unlink(name, dir_fd=directory)
    except IsADirectoryError:
        for below in Contents(directory).names(name):
            _remove(directory, f"{name}/{below}")
        os.rmdir(name, dir_fd=directory)
