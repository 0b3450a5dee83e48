"""Makes the original tree again from a pack.

The tree is made beneath a temporary name and gets its own with the last call, so that a part of a
tree is never taken for the whole. Every file is compared with its digest while it is copied.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from monarch.errors import PackError, UsageError
from monarch.packs.format import LARGE
from monarch.packs.pack import Pack, Record
from monarch.packs.reading import PIECE, copy_with_holes
from monarch.posix.acl import NAMES as ACL_NAMES
from monarch.posix.files import closing_fd, empty_directory, sync_file_system
from monarch.posix.openat2 import open_beneath
from monarch.text import escape_text
from monarch.types import Progress

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SET_ID = stat.S_ISUID | stat.S_ISGID
_DEVICES = (stat.S_IFCHR, stat.S_IFBLK)
# The number of no user and of no group: chown leaves the present one.
_NO_ONE = (1 << 32) - 1
# Bytes of the name of the tree in that of the unfinished tree. A name has at most 255 bytes.
_MOST_PREFIX = 200
# The root of the tree has this number. Directories that are kept open.
_ROOT = 1
_MOST_OPEN = 64
# The most entries without an attribute, or left out, that are listed.
_MOST_LISTED = 20


class LeftOut(NamedTuple):
    """An entry that lacks something, and what."""

    path: bytes
    what: str


@dataclass(frozen=True, slots=True)
class UnpackReport:
    """``files`` counts names, ``bytes`` is what was read. ``left_out`` has the first of
    ``incomplete`` entries."""

    files: int
    bytes: int
    incomplete: int
    left_out: list[LeftOut]


def unpack(path: Path, directory: Path, *, set_id: bool, progress: Progress) -> UnpackReport:
    """Writes the tree of the pack ``path`` to ``directory``, which must be new or empty.

    Owners are set by root only. Set-user-ID and set-group-ID bits are set with ``set_id``, and only
    on files of the user of this process; not on those whose owner root may not set. Device files
    are left out. Raises PackError if the pack is damaged or the tree cannot be written, and
    UsageError for a directory in use.
    """
    directory = Path(os.path.abspath(directory))
    name = escape_text(os.fspath(directory))
    _require_free(directory, path, name)
    with Pack.open(os.fsencode(path)) as pack:
        pack.require_sound()
        try:
            staged = tempfile.mkdtemp(
                prefix=f".{_shortened(directory.name)}.", suffix=".part", dir=directory.parent
            )
        except OSError as error:
            raise PackError(
                f"{name}: {error.strerror}", hint="name a directory that can be made"
            ) from error
        try:
            with closing_fd(os.open(staged, _DIRECTORY)) as root, _emptied_on_failure(root):
                _remove_acls(root)
                report = _Unpacking(pack, root, progress, set_id=set_id).run()
                sync_file_system(root)
                os.rename(staged, directory)
            return report
        except OSError as error:
            raise PackError(
                f"{name}: the tree cannot be written: {error.strerror}; nothing is kept of it",
                hint="mend that, and run the same command again",
            ) from error
        finally:
            # After a success the name does not exist.
            with suppress(OSError):
                os.rmdir(staged)


def _remove_acls(root: int) -> None:
    """Removes the access control lists that an empty directory has inherited, and with them those
    that all in it would inherit."""
    for name in ACL_NAMES:
        with suppress(OSError):
            os.removexattr(root, name)


@contextmanager
def _emptied_on_failure(root: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            empty_directory(root)
        raise


def _shortened(name: str) -> str:
    """The beginning of a name, so that the name of the unfinished tree is not too long."""
    return os.fsdecode(os.fsencode(name)[:_MOST_PREFIX])


def _require_free(directory: Path, pack: Path, name: str) -> None:
    """Raises UsageError if the tree cannot be written there without changing something else."""
    real = Path(os.path.realpath(directory))
    if Path(os.path.realpath(pack)) in (real, *real.parents):
        raise UsageError(f"{name} lies in the pack", hint="name a directory outside of it")
    try:
        is_free = not os.path.islink(directory) and not os.listdir(directory)
    except FileNotFoundError:
        is_free = True
    except OSError:
        is_free = False
    if not is_free:
        raise UsageError(
            f"{name} exists and is not an empty directory",
            hint="name another directory; nothing was changed",
        )


class _Unpacking:
    def __init__(self, pack: Pack, root: int, progress: Progress, *, set_id: bool) -> None:
        self._pack = pack
        self._root = root
        self._progress = progress
        self._set_id = set_id
        self._is_root = os.geteuid() == 0
        # Descriptors of directories by their numbers, the one that was used last at the end.
        self._directories: OrderedDict[int, int] = OrderedDict()
        self._files = 0
        self._bytes = 0
        self._incomplete = 0
        self._left_out: list[LeftOut] = []

    def run(self) -> UnpackReport:
        """Makes all entries. Raises OSError, PackError."""
        try:
            directories = self._make_directories()
            for chunk in range(self._pack.info.chunks):
                numbers = self._pack.chunk_numbers(chunk)
                if len(numbers):
                    self._unpack_chunk(chunk, numbers.tolist())
            for record in self._others():
                self._make(record)
            for number in reversed(directories):
                self._finish_directory(self._pack.record(number))
        finally:
            for fd in self._directories.values():
                os.close(fd)
            self._directories.clear()
        return UnpackReport(self._files, self._bytes, self._incomplete, self._left_out)

    def _make_directories(self) -> list[int]:
        """Makes all directories, each closed to others until it is complete."""
        kinds = self._pack.records["mode"] & 0o170000
        numbers: list[int] = (kinds == stat.S_IFDIR).nonzero()[0].tolist()
        for number in numbers[1:]:
            record = self._pack.record(number)
            os.mkdir(record.name, 0o700, dir_fd=self._parent(record))
        return numbers

    def _unpack_chunk(self, chunk: int, numbers: list[int]) -> None:
        with closing_fd(self._pack.open_chunk(chunk)) as fd:
            for number in numbers:
                record = self._pack.record(number)
                with closing_fd(self._new(record)) as to_fd:
                    digest = xxhash.xxh3_64()
                    position, end = record.offset, record.offset + record.size
                    while position < end:
                        piece = os.pread(fd, min(PIECE, end - position), position)
                        if not piece:
                            raise self._damaged(record)
                        digest.update(piece)
                        _write(to_fd, piece)
                        position += len(piece)
                    self._finish_file(record, to_fd, digest.intdigest())
                self._count(record.size)

    def _others(self) -> Iterator[Record]:
        """The entries that are no directories and have no bytes in a chunk, further names last."""
        records = self._pack.records
        numbers = np.arange(len(records))
        is_further = (records["link"] != 0) & (records["link"] != numbers)
        is_other = (records["mode"] & 0o170000 != stat.S_IFDIR) & (records["chunk"] >= LARGE)
        is_other[0] = False
        for number in [*numbers[is_other & ~is_further], *numbers[is_further]]:
            yield self._pack.record(int(number))

    def _make(self, record: Record) -> None:
        kind = stat.S_IFMT(record.mode)
        name = record.name
        if kind == stat.S_IFREG and record.link != record.number:
            first = self._pack.record(record.link)
            # One of the two may close the descriptors that are kept open.
            with closing_fd(os.dup(self._parent(first))) as from_fd:
                parent = self._parent(record)
                os.link(
                    *(first.name, name),
                    src_dir_fd=from_fd,
                    dst_dir_fd=parent,
                    follow_symlinks=False,
                )
            self._files += 1
        elif kind == stat.S_IFREG:
            self._make_file(record)
        elif kind in _DEVICES:
            self._leave_out(record, "a device file is not made")
        elif kind == stat.S_IFLNK:
            os.symlink(record.target, name, dir_fd=self._parent(record))
            self._finish_entry(record)
        else:
            os.mknod(name, kind | 0o600, dir_fd=self._parent(record))
            self._finish_entry(record)

    def _make_file(self, record: Record) -> None:
        """A large file, or one of 0 bytes."""
        with closing_fd(self._new(record)) as to_fd:
            digest = record.digest
            if record.chunk == -2:
                with closing_fd(self._pack.open_large(record.number)) as fd:

                    def read(count: int, position: int) -> bytes:
                        piece = os.pread(fd, count, position)
                        if not piece:
                            raise self._damaged(record)
                        return piece

                    digest = copy_with_holes(fd, read, to_fd, record.size, self._count_bytes)
            self._finish_file(record, to_fd, digest)
        self._count(0)

    # -- attributes --------------------------------------------------------------------------------

    def _finish_file(self, record: Record, fd: int, digest: int) -> None:
        if digest != record.digest:
            raise self._damaged(record)
        self._set_attributes(record, fd)

    def _finish_directory(self, record: Record) -> None:
        above = self._root if record.number == _ROOT else self._parent(record)
        with closing_fd(open_beneath(above, record.name, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            self._set_attributes(record, fd)

    def _finish_entry(self, record: Record) -> None:
        """The attributes of an entry that cannot be opened: a symbolic link, a fifo, a socket."""
        name, parent = record.name, self._parent(record)
        chown = partial(os.chown, name, dir_fd=parent, follow_symlinks=False)
        is_owner_set = self._set_owner(record, chown)
        if not stat.S_ISLNK(record.mode):
            # Not through a link: the name was made in a directory that is closed to others.
            os.chmod(name, self._mode(record, is_owner_set=is_owner_set), dir_fd=parent)
        times = (record.mtime_ns, record.mtime_ns)
        os.utime(name, ns=times, dir_fd=parent, follow_symlinks=False)

    def _mode(self, record: Record, *, is_owner_set: bool) -> int:
        mode = stat.S_IMODE(record.mode)
        if not is_owner_set:
            # The entry belongs to another user or group, whose rights a program must not get.
            return mode & ~_SET_ID
        if mode & _SET_ID and not (self._set_id and record.uid == os.geteuid()):
            if self._set_id:
                self._leave_out(record, "set-ID bits are set only on your own files")
            return mode & ~_SET_ID
        return mode

    def _set_attributes(self, record: Record, fd: int) -> None:
        # User attributes need the permission to write, which the mode may not give. A change of
        # the owner removes set-ID bits, and a mode changes the mask of an ACL.
        self._set_xattrs(record, fd, b"user.")
        is_owner_set = self._set_owner(record, partial(os.fchown, fd))
        os.fchmod(fd, self._mode(record, is_owner_set=is_owner_set))
        self._set_xattrs(record, fd, b"system.")
        os.utime(fd, ns=(record.mtime_ns, record.mtime_ns))

    def _set_owner(self, record: Record, chown: Callable[..., None]) -> bool:
        """False if root may not set the owner. Other users set none."""
        if not self._is_root:
            return True
        try:
            if _NO_ONE in (record.uid, record.gid):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            chown(uid=record.uid, gid=record.gid)
        except OSError as error:
            # In a user namespace root may only set the users that are mapped there.
            if error.errno not in (errno.EPERM, errno.EINVAL):
                raise
            self._leave_out(record, f"its owner {record.uid}:{record.gid} cannot be set")
            return False
        return True

    def _set_xattrs(self, record: Record, fd: int, prefix: bytes) -> None:
        for name, value in record.xattrs:
            if not name.startswith(prefix):
                continue
            try:
                os.setxattr(fd, name, value)
            except OSError as error:
                self._leave_out(record, f"{os.fsdecode(name)} is not set: {error.strerror}")

    # -- parts -------------------------------------------------------------------------------------

    def _new(self, record: Record) -> int:
        return os.open(record.name, _NEW, 0o600, dir_fd=self._parent(record))

    def _parent(self, record: Record) -> int:
        """A descriptor of the directory of an entry; some are kept open. A directory is opened from
        the one above it: the time for a deep tree does not grow with the square of its depth."""
        number, below = record.parent, []
        while number != _ROOT and number not in self._directories:
            below.append(number)
            number = int(self._pack.records["parent"][number])
        fd = self._root
        if number != _ROOT:
            self._directories.move_to_end(number)
            fd = self._directories[number]
        for each in reversed(below):
            fd = open_beneath(fd, self._pack.name(each), os.O_PATH | os.O_DIRECTORY)
            self._directories[each] = fd
            if len(self._directories) > _MOST_OPEN:
                _, oldest = self._directories.popitem(last=False)
                os.close(oldest)
        return fd

    def _count(self, count: int) -> None:
        self._files += 1
        self._count_bytes(count)

    def _count_bytes(self, count: int) -> None:
        self._bytes += count
        self._progress(self._bytes, self._pack.info.bytes, "unpacking")

    def _leave_out(self, record: Record, what: str) -> None:
        self._incomplete += 1
        if len(self._left_out) < _MOST_LISTED:
            self._left_out.append(LeftOut(record.path, what))

    def _damaged(self, record: Record) -> PackError:
        pack = escape_text(os.fsdecode(self._pack.path))
        return PackError(
            f"{pack}: {escape_text(os.fsdecode(record.path))} is damaged",
            hint=f"`monarch pack verify {pack}` lists all damage",
        )


def _write(fd: int, piece: bytes) -> None:
    raw = memoryview(piece)
    while raw:
        raw = raw[os.write(fd, raw) :]
