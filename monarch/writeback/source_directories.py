"""Directories of the source that are open while changes are made in them and synced after, and the
temporary names in them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection
from contextlib import closing, suppress

from monarch.posix.credentials import (
    Credentials,
    acting_as,
    can_act_as_others,
    is_another_user,
    least_of,
)
from monarch.posix.files import NO_LINKS, closing_fd, copy_data, status_at
from monarch.posix.openat2 import open_beneath
from monarch.tiers.source import Source
from monarch.writeback.expected import SourceLog
from monarch.writeback.op import Op
from monarch.writeback.source_attributes import (
    ITSELF,
    SPECIAL_BITS,
    SourceAttributes,
    path_of,
    sync_directory_at,
)

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TO_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class OpenDirectories:
    """Belongs to one thread, which calls ``close`` at the end.

    If others have removed a directory at the source, it is made again for the entries that were
    written in it.
    """

    def __init__(self, source: Source, attributes: SourceAttributes, log: SourceLog) -> None:
        self._source = source
        self._attributes = attributes
        self._log = log
        self._open: dict[tuple[bytes, Credentials | None], int] = {}

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def of(self, path: bytes, by: Credentials | None, *, make: bool = False) -> tuple[int, bytes]:
        """A descriptor of the directory that ``path`` is in, opened with the rights of ``by``, and
        the name of ``path`` there.

        The owner of a directory may use it in any mode. Raises OSError, ENOENT if the directory is
        missing; with ``make`` it is made.
        """
        parent, _, name = path.rpartition(b"/")
        fd = self._open.get((parent, by))
        if fd is None:
            try:
                with acting_as(by):
                    fd = self._source.at_root(self._opened, parent, by, make)
            except PermissionError as error:
                try:
                    fd = self._source.at_root(self._opened, parent, None, False)
                except FileNotFoundError:
                    if make:
                        # This user may not make it; others may.
                        raise error from None
                    raise
                if not is_owner(fd, by):
                    os.close(fd)
                    raise
            self._open[parent, by] = fd
        # The root has no name, and is in itself.
        return fd, name or b"."

    def user_of(self, op: Op) -> Credentials | None:
        """The user with whose rights an entry is changed; None for the daemon's own. A change whose
        record names no user is made with the rights of the entry's owner."""
        if op.by is not None or op.strict or not can_act_as_others():
            return op.by
        there = status_at(*self.of(op.path, None))
        return Credentials(there.st_uid, there.st_gid) if there is not None else None

    def sync(self) -> None:
        """Makes the names in all open directories durable. Raises OSError."""
        for fd in self._open.values():
            sync_directory_at(fd)

    def _opened(self, root: int, path: bytes, by: Credentials | None, make: bool) -> int:
        """Opens a directory with the rights of the thread, which are those of ``by``."""
        try:
            return _directory_at(root, path)
        except FileNotFoundError:
            if not make:
                raise
        fd = os.dup(root)
        try:
            for name in path.split(b"/"):
                try:
                    below = _directory_at(fd, name)
                except FileNotFoundError:
                    self._make(fd, name, path, by)
                    below = _directory_at(fd, name)
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _make(self, above_fd: int, name: bytes, path: bytes, by: Credentials | None) -> None:
        """Makes a directory that others have removed, with no more rights than the one above it."""
        above = os.fstat(above_fd)
        try:
            os.mkdir(name, 0o700, dir_fd=above_fd)
        except FileExistsError:
            return
        # Others may have renamed it, with what was drained into it.
        self._log.note_conflict(
            path,
            "was removed by others, or renamed; it was made again for what was written here, with"
            " the mode of the directory that it is in",
        )
        with closing_fd(os.open(name, ITSELF, dir_fd=above_fd)) as fd:
            uid, gid = above.st_uid, above.st_gid
            if is_another_user(by):
                # A user keeps what the user makes, and may give it only to the user's own groups.
                uid = by.uid
                gid = gid if gid in (by.gid, *by.groups) else os.fstat(fd).st_gid
            mode = above.st_mode & 0o777
            self._attributes.set(fd, Op(kind="attr", path=path, uid=uid, gid=gid, mode=mode))
        sync_directory_at(above_fd)


# Opens no directory yet.
Directories = Callable[[], closing[OpenDirectories]]


class Temporaries:
    """``token`` of the journal is part of all names, so no file of others is mistaken for one."""

    def __init__(self, token: str, log: SourceLog) -> None:
        self._prefix = b".monarch-%s-" % token.encode("ascii")
        self._log = log

    def part(self, number: int, *, through: bool = False) -> bytes:
        """The name of an object's staged file; ``through``: of a file with its bytes only there."""
        return b"%s%d%s.part" % (self._prefix, number, b"-through" if through else b"")

    def link(self, number: int) -> bytes:
        """The name of a second link to the file of an object, which differs from ``part``: another
        content of the object may be staged already."""
        return b"%s%d.link" % (self._prefix, number)

    def link_over(
        self, it: int, to_fd: int, to_name: bytes, number: int, by: Credentials | None
    ) -> None:
        """Links an open entry, the file of an object ``number``, to ``to_name``, with the rights of
        ``by``; replaces an entry there. A source without hard links gets a copy. Raises OSError."""
        try:
            self._link_over(it, to_fd, to_name, number, by)
        except PermissionError:
            # The owner of a directory may have taken away the right to write in it since, and could
            # give it again.
            if by is None or os.fstat(it).st_uid != by.uid or not is_owner(to_fd, by):
                raise
            self._link_over(it, to_fd, to_name, number, None)

    def _link_over(
        self, it: int, to_fd: int, to_name: bytes, number: int, by: Credentials | None
    ) -> None:
        link = self.link(number)
        with acting_as(by):
            # In a directory with the sticky bit only the owner of the file may rename a link to it.
            with suppress(OSError):
                os.link(path_of(it), to_name, dst_dir_fd=to_fd)
                return
            with suppress(FileNotFoundError):
                os.unlink(link, dir_fd=to_fd)
            refusal = _linked(it, to_fd, link)
        # The kernel lets a user link only files that are the user's own, or that the user may write
        # and that are no programs with set-ID bits (fs.protected_hardlinks).
        if refusal is not None and by is not None and self.can_link(it, to_fd, number):
            raise refusal
        with acting_as(by):
            if refusal is not None:
                self._log.note_refused("hard links, and gets copies,", refusal, to_name)
                _copy(it, to_fd, link)
            os.rename(link, to_name, src_dir_fd=to_fd, dst_dir_fd=to_fd)
            # If both names led to one file already, the rename has done nothing.
            with suppress(FileNotFoundError):
                os.unlink(link, dir_fd=to_fd)

    def can_link(self, it: int, fd: int, number: int) -> bool:
        """Whether an open entry, the file of an object ``number``, can have another hard link, in
        the directory ``fd``. Raises OSError."""
        link = self.link(number)
        with suppress(FileNotFoundError):
            os.unlink(link, dir_fd=fd)
        if _linked(it, fd, link) is not None:
            return False
        os.unlink(link, dir_fd=fd)
        return True

    def sweep(self, above_fd: int, name: bytes, keep: Collection[int] = ()) -> bool:
        """Removes a directory's temporary files; returns whether there were any. The staged files
        of the objects ``keep``, which have no bytes in the tier, move to the directory above.
        Raises OSError."""
        found, kept = False, {self.part(number, through=True) for number in keep}
        with suppress(NotADirectoryError):
            with closing_fd(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above_fd)) as fd:
                # Names of a descriptor come as text.
                for each in map(os.fsencode, os.listdir(fd)):
                    if each in kept:
                        os.rename(each, each, src_dir_fd=fd, dst_dir_fd=above_fd)
                        found = True
                    elif each.startswith(self._prefix):
                        os.unlink(each, dir_fd=fd)
                        found = True
        return found


def is_owner(directory_fd: int, by: Credentials | None) -> bool:
    return by is not None and os.fstat(directory_fd).st_uid == by.uid


def creator(op: Op) -> Credentials | None:
    """The user with whose rights an entry is created; None for the daemon's own. A change whose
    record names no user is made with the rights of the entry's future owner."""
    if op.by is not None or op.uid is None or not can_act_as_others():
        return op.by
    return Credentials(op.uid, op.uid if op.gid is None else op.gid)


def writer(op: Op) -> Credentials | None:
    """The user with whose rights the bytes of a content are written; None for the daemon's own."""
    return least_of((creator(op), *op.also))


def _directory_at(root: int, path: bytes) -> int:
    """Raises OSError, ENOTDIR if a file or a symbolic link is in the way."""
    try:
        try:
            return open_beneath(root, path, _DIRECTORY)
        except PermissionError:
            # The user may have the right to write into a directory without the right to list it.
            return open_beneath(root, path, os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        # The kernel reports a link at the end of a path as ENOTDIR, and one before it as ELOOP.
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error


def _linked(it: int, to_fd: int, link: bytes) -> OSError | None:
    """Gives an open file another link; the error with which the source refuses that, also if it has
    no hard links. Raises all others."""
    try:
        os.link(path_of(it), link, dst_dir_fd=to_fd)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return error
    return None


def _copy(it: int, to_fd: int, to_name: bytes) -> None:
    """Makes a copy of an open file instead of a link, with its owner, mode and times. A copy that
    belongs to another user has no set-ID bits."""
    with closing_fd(os.open(path_of(it), _TO_READ)) as source:
        status = os.fstat(source)
        with closing_fd(os.open(to_name, NEW, 0o600, dir_fd=to_fd)) as target:
            copy_data(source, target, status.st_size)
            mode = stat.S_IMODE(status.st_mode)
            try:
                os.fchown(target, status.st_uid, status.st_gid)
            except OSError:
                mode &= ~SPECIAL_BITS
            os.fchmod(target, mode)
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fsync(target)
