"""The source's side of the drain: every change that is made there, once or once more.

Each call may wait as long as the source likes: none belongs on the event loop. Names are hostile:
all is done beneath the descriptor of the source's root and never through a symbolic link. Each
change may have been made before by somebody who died before he could say so: what is so already is
no error. What a source cannot do with attributes is told once and left out; every other failure is
raised, and nothing behind it is done.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from monarch import points
from monarch.beneath import open_beneath
from monarch.text import errno_words
from monarch.tiers.source import Source, identity_of
from monarch.types import Identity
from monarch.units import MiB
from monarch.writeback.ops import Op
from monarch.writeback.staging import Staged

log = logging.getLogger(__name__)

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ITSELF = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_TO_SYNC = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# What a source answers that does not know such an attribute, or does not let us set it.
_NOT_TAKEN = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
    | {errno.E2BIG, errno.ERANGE, errno.EACCES}
)
# What one answers that has no hard links, or not so many.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_SPECIAL_BITS = stat.S_ISUID | stat.S_ISGID


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a list of steps came: what each that was made answered, and what ended it."""

    made: tuple[Identity | None, ...]
    error: OSError | None


class Folders:
    """Directories of the source that are open while some steps are made, and synced after them."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._open: dict[bytes, int] = {}

    def of(self, path: bytes, *, make: bool = False) -> tuple[int, bytes]:
        """A descriptor of the directory that ``path`` is in, and its name there.

        Raises OSError, ENOENT if it is missing; with ``make`` it is made.
        """
        parent, _, name = path.rpartition(b"/")
        fd = self._open.get(parent)
        if fd is None:
            fd = self._open[parent] = self._home.directory(parent, make=make)
        # The root has no name, and is in itself.
        return fd, name or b"."

    def sync(self) -> None:
        """Raises OSError."""
        for fd in self._open.values():
            _sync(fd)

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


Step = Callable[[Folders], "Identity | None"]


class Home:
    """``token`` is in the names of files that are staged, so that nobody's are taken for ours."""

    def __init__(self, source: Source, token: str) -> None:
        self._source = source
        self._prefix = b".monarch-%s-" % token.encode("ascii")
        self._told: set[tuple[str, int]] = set()

    def carry_out(self, steps: Sequence[Step]) -> Outcome:
        """Make the steps in order until one fails; those that are told to be made are durable."""
        folders = Folders(self)
        made: list[Identity | None] = []
        failure: OSError | None = None
        try:
            for step in steps:
                try:
                    made.append(self._source.at_root(_step_at, step, folders))
                except OSError as error:
                    failure = error
                    break
                points.reached("drain-published")
            try:
                folders.sync()
            except OSError as error:
                return Outcome((), error)
        finally:
            folders.close()
        return Outcome(tuple(made), failure)

    def directory(self, path: bytes, *, make: bool) -> int:
        """A descriptor of a directory. Raises OSError; with ``make`` it is made if it is missing,
        like the one that it is in."""
        return self._source.at_root(self._directory, path, make)

    def _directory(self, root: int, path: bytes, make: bool) -> int:
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
                    self._make_missing(fd, name, path)
                    below = _directory_at(fd, name)
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _make_missing(self, above_fd: int, name: bytes, path: bytes) -> None:
        """Somebody has removed it at the source. Nobody shall see more in it than above it."""
        above = os.fstat(above_fd)
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=above_fd)
        log.warning(
            "source: %r was removed by others; %r was made again, with the mode of the directory"
            " that it is in",
            os.fsdecode(path),
            os.fsdecode(name),
        )
        fd = os.open(name, _ITSELF, dir_fd=above_fd)
        try:
            like = Op(kind="attr", uid=above.st_uid, gid=above.st_gid, mode=above.st_mode & 0o777)
            self._dress(fd, like)
        finally:
            os.close(fd)
        os.fsync(above_fd)

    # -- contents ----------------------------------------------------------------------------

    def part_name(self, number: int, *, through: bool = False) -> bytes:
        """What the staged file of an object is called; ``through``: of one whose bytes are there
        alone."""
        return b"%s%d%s.part" % (self._prefix, number, b"-through" if through else b"")

    def _link_name(self, number: int) -> bytes:
        # Not that of the staged file: another content may have been staged already.
        return b"%s%d.link" % (self._prefix, number)

    def open_part(self, path: bytes, number: int, *, make: bool, through: bool = False) -> int:
        """A descriptor of the empty staged file of an object, beside ``path``. Raises OSError."""
        folders = Folders(self)
        try:
            fd, _ = folders.of(path, make=make)
            part = self.part_name(number, through=through)
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=fd)
            return os.open(part, _NEW, 0o600, dir_fd=fd)
        finally:
            folders.close()

    def finish_part(self, op: Op) -> tuple[int, Identity | None]:
        """Make durable what was written at the source directly, dressed as ``op`` says.

        Its size, and what it is if it has its names already, None if it is still staged. Raises
        OSError, ENOENT if there is neither.
        """
        folders = Folders(self)
        try:
            directory_fd, name = folders.of(op.paths[0])
            part = self.part_name(op.object, through=True)
            is_staged = _status(directory_fd, part) is not None
            fd = os.open(part if is_staged else name, _TO_SYNC, dir_fd=directory_fd)
            try:
                self._dress(fd, op)
                os.fsync(fd)
                status = os.fstat(fd)
            finally:
                os.close(fd)
            return status.st_size, None if is_staged else identity_of(status)
        finally:
            folders.close()

    def discard_part(self, path: bytes, number: int) -> None:
        """Remove the staged file of an object without bytes in the tier, if it is there."""
        folders = Folders(self)
        try:
            with suppress(OSError):
                fd, _ = folders.of(path)
                os.unlink(self.part_name(number, through=True), dir_fd=fd)
        finally:
            folders.close()

    def dress(self, fd: int, op: Op) -> None:
        """Give an open file what ``op`` says of it but its bytes. Raises OSError."""
        self._dress(fd, op)

    def publish(self, folders: Folders, op: Op, staged: Staged) -> Identity:
        """Put the staged file in the place of all names of a content; what it is there.

        Raises OSError, ESTALE if what was staged is not there any more.
        """
        fd, name = folders.of(op.paths[0], make=True)
        part = self.part_name(op.object, through=op.through)
        found = _status(fd, part)
        if found is None or found.st_size != staged.size:
            raise OSError(errno.ESTALE, "what was staged at the source is gone")
        os.rename(part, name, src_dir_fd=fd, dst_dir_fd=fd)
        points.reached("drain-renamed")
        for other in op.paths[1:]:
            self._link_over(fd, name, *folders.of(other, make=True), op.object)
            points.reached("drain-linked")
        return identity_of(os.stat(name, dir_fd=fd, follow_symlinks=False))

    def renew(self, folders: Folders, op: Op, known: Identity) -> Identity:
        """Dress what was published with the same bytes as another content says of it.

        Raises OSError, ESTALE if the names do not lead to what was published.
        """
        for path in op.paths:
            found = _status(*folders.of(path))
            if found is None or (found.st_ino, found.st_size) != (known.source_ino, known.size):
                raise OSError(errno.ESTALE, "what was published at the source is not there")
        fd, name = folders.of(op.paths[0])
        self._dress_name(fd, name, op)
        return identity_of(os.stat(name, dir_fd=fd, follow_symlinks=False))

    def discard(self, folders: Folders, op: Op) -> None:
        """Remove what may have been staged for a content that is not to be published."""
        for path in op.paths:
            with suppress(FileNotFoundError, NotADirectoryError):
                fd, _ = folders.of(path)
                for name in (self.part_name(op.object), self._link_name(op.object)):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=fd)

    # -- all else ----------------------------------------------------------------------------

    def mkdir(self, folders: Folders, op: Op) -> None:
        fd, name = folders.of(op.path, make=True)
        try:
            os.mkdir(name, 0o700, dir_fd=fd)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                raise
        self._dress_name(fd, name, op)

    def symlink(self, folders: Folders, op: Op) -> None:
        fd, name = folders.of(op.path, make=True)
        try:
            os.symlink(op.to, name, dir_fd=fd)
        except FileExistsError:
            with suppress(OSError):
                if os.readlink(name, dir_fd=fd) == op.to:
                    self._dress_name(fd, name, op)
                    return
            self._replace(fd, name, lambda part: os.symlink(op.to, part, dir_fd=fd))
        self._dress_name(fd, name, op)

    def mknod(self, folders: Folders, op: Op) -> None:
        fd, name = folders.of(op.path, make=True)
        kind = stat.S_IFMT(op.mode or 0)
        try:
            os.mknod(name, kind | 0o600, op.rdev, dir_fd=fd)
        except FileExistsError:
            there = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if (stat.S_IFMT(there.st_mode), there.st_rdev) != (kind, op.rdev):
                self._replace(
                    fd, name, lambda part: os.mknod(part, kind | 0o600, op.rdev, dir_fd=fd)
                )
        except OSError as error:
            if error.errno not in _NOT_TAKEN:
                raise
            self._tell("special files", error, op.path)
            return
        self._dress_name(fd, name, op)

    def link(self, folders: Folders, op: Op) -> None:
        try:
            fd, name = folders.of(op.path)
            there = _status(fd, name)
        except FileNotFoundError:
            there = None
        to_fd, to_name = folders.of(op.to, make=True)
        now = _status(to_fd, to_name)
        if there is None:
            if now is None:
                log.warning("source: %r is not there to be linked", os.fsdecode(op.path))
            return
        if now is None or now.st_ino != there.st_ino:
            self._link_over(fd, name, to_fd, to_name, op.object)

    def unlink(self, folders: Folders, path: bytes) -> None:
        """That there is nothing is fine; a directory that others have put there stays."""
        try:
            fd, name = folders.of(path)
            os.unlink(name, dir_fd=fd)
        except (FileNotFoundError, NotADirectoryError):
            return
        except IsADirectoryError:
            log.warning(
                "source: %r is to be removed, but others have put a directory in its place: it"
                " stays",
                os.fsdecode(path),
            )

    def rmdir(self, folders: Folders, path: bytes) -> None:
        """That there is nothing is fine; what others have put into it stays, and it with it."""
        try:
            fd, name = folders.of(path)
            try:
                os.rmdir(name, dir_fd=fd)
            except OSError as error:
                if error.errno not in _NOT_EMPTY or not self._swept(fd, name):
                    raise
                os.rmdir(name, dir_fd=fd)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (*_NOT_EMPTY, errno.ENOTDIR):
                raise
            log.warning(
                "source: directory %r is to be removed, but others have put something there: it"
                " stays (%s)",
                os.fsdecode(path),
                errno_words(error.errno),
            )

    def rename(self, folders: Folders, op: Op) -> None:
        to_fd, to_name = folders.of(op.to, make=True)
        try:
            fd, name = folders.of(op.path)
            try:
                os.rename(name, to_name, src_dir_fd=fd, dst_dir_fd=to_fd)
            except OSError as error:
                if error.errno not in _NOT_EMPTY or not self._swept(to_fd, to_name):
                    raise
                os.rename(name, to_name, src_dir_fd=fd, dst_dir_fd=to_fd)
        except FileNotFoundError:
            if _status(to_fd, to_name) is None:
                log.warning("source: %r is not there to be renamed", os.fsdecode(op.path))

    def attr(self, folders: Folders, op: Op) -> None:
        """Attributes and extended attributes of what ``op.path`` names."""
        try:
            self._dress_name(*folders.of(op.path), op)
        except FileNotFoundError:
            log.warning("source: %r is not there to be changed", os.fsdecode(op.path))

    # -- how ---------------------------------------------------------------------------------

    def _dress_name(self, directory_fd: int, name: bytes, op: Op) -> None:
        fd = os.open(name, _ITSELF, dir_fd=directory_fd)
        try:
            self._dress(fd, op)
            kind = stat.S_IFMT(os.fstat(fd).st_mode)
        finally:
            os.close(fd)
        if kind in (stat.S_IFREG, stat.S_IFDIR):
            # One that may not be read is left to the source to keep.
            with suppress(PermissionError):
                fd = os.open(name, _TO_SYNC, dir_fd=directory_fd)
                try:
                    _sync(fd)
                finally:
                    os.close(fd)

    def _dress(self, fd: int, op: Op) -> None:
        # This way leads to what the descriptor is of, and ends there, even if it is a link.
        where = b"/proc/self/fd/%d" % fd
        owned = self._own(fd, where, op)
        if op.mode is not None and not stat.S_ISLNK(os.fstat(fd).st_mode):
            mode = stat.S_IMODE(op.mode)
            if not owned:
                # Whoever it belongs to now is not who was to have those rights.
                mode &= ~_SPECIAL_BITS
            try:
                os.chmod(where, mode)
            except OSError as error:
                self._raise_if_not_refused("modes", error, op)
        for name, value in op.xattrs.items():
            try:
                if value is not None:
                    os.setxattr(where, name, value)
                else:
                    os.removexattr(where, name)
            except OSError as error:
                if error.errno == errno.ENODATA:
                    continue
                if error.errno == errno.ENOSPC and os.fstatvfs(fd).f_bavail:
                    # Not the disk is full, but what it has for one file's attributes.
                    error = OSError(errno.E2BIG, os.strerror(errno.E2BIG))
                self._raise_if_not_refused("extended attributes", error, op)
        if op.mtime_ns is not None or op.atime_ns is not None:
            now = os.fstat(fd)
            atime_ns = now.st_atime_ns if op.atime_ns is None else op.atime_ns
            mtime_ns = now.st_mtime_ns if op.mtime_ns is None else op.mtime_ns
            try:
                os.utime(where, ns=(atime_ns, mtime_ns))
            except OSError as error:
                self._raise_if_not_refused("times", error, op)

    def _own(self, fd: int, where: bytes, op: Op) -> bool:
        """Set owner and group; whether they are as they should be."""
        now = os.fstat(fd)
        uid = now.st_uid if op.uid is None else op.uid
        gid = now.st_gid if op.gid is None else op.gid
        if (uid, gid) == (now.st_uid, now.st_gid):
            return True
        try:
            os.chown(where, uid, gid)
        except OSError as error:
            self._raise_if_not_refused("owners", error, op)
            # A group that we are in may be given all the same.
            with suppress(OSError):
                os.chown(where, -1, gid)
            return False
        return True

    def _raise_if_not_refused(self, what: str, error: OSError, op: Op) -> None:
        if error.errno not in _NOT_TAKEN:
            raise error
        self._tell(what, error, op.path)

    def _tell(self, what: str, error: OSError, path: bytes) -> None:
        number = error.errno or errno.EIO
        if (what, number) not in self._told:
            self._told.add((what, number))
            log.warning(
                "source: it does not take %s as they are here: %r: %s; told once",
                what,
                os.fsdecode(path),
                errno_words(number),
            )

    def _replace(self, fd: int, name: bytes, make: Callable[[bytes], None]) -> None:
        """Put what ``make`` makes under a name in the place of what others have put there."""
        part = self._link_name(0)
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=fd)
        make(part)
        os.rename(part, name, src_dir_fd=fd, dst_dir_fd=fd)

    def _link_over(self, fd: int, name: bytes, to_fd: int, to_name: bytes, number: int) -> None:
        part = self._link_name(number)
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=to_fd)
        try:
            os.link(name, part, src_dir_fd=fd, dst_dir_fd=to_fd, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._tell("hard links, and gets copies,", error, name)
            _duplicate(fd, name, to_fd, part)
        os.rename(part, to_name, src_dir_fd=to_fd, dst_dir_fd=to_fd)
        # Where both names were of one file already, that did nothing.
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=to_fd)

    def _swept(self, above_fd: int, name: bytes) -> bool:
        """Remove what we have staged in a directory; whether there was any."""
        found = False
        with suppress(NotADirectoryError):
            fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above_fd)
            try:
                for part in list(_listed(fd)):
                    if part.startswith(self._prefix):
                        os.unlink(part, dir_fd=fd)
                        found = True
            finally:
                os.close(fd)
        return found


def _step_at(_root: int, step: Step, folders: Folders) -> Identity | None:
    return step(folders)


def _directory_at(root: int, path: bytes) -> int:
    try:
        return open_beneath(root, path, _DIRECTORY)
    except PermissionError:
        # One that we may not list, but may perhaps write into.
        return open_beneath(root, path, os.O_PATH | os.O_DIRECTORY)


def _listed(fd: int) -> Iterator[bytes]:
    # Of a descriptor only text is to be had.
    with os.scandir(fd) as entries:
        for entry in entries:
            yield os.fsencode(entry.name)


def _status(fd: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        # A file system that has nothing to say to it, and a directory that may not be read.
        if error.errno not in (*_NO_SYNC, errno.EBADF):
            raise


def _duplicate(fd: int, name: bytes, to_fd: int, part: bytes) -> None:
    """A copy of a file in the place of a link to it, with its mode and times."""
    source = os.open(name, _TO_SYNC, dir_fd=fd)
    try:
        status = os.fstat(source)
        target = os.open(part, _NEW, 0o600, dir_fd=to_fd)
        try:
            offset = 0
            while piece := os.pread(source, MiB, offset):
                offset += os.pwrite(target, piece, offset)
            with suppress(OSError):
                os.fchown(target, status.st_uid, status.st_gid)
            os.fchmod(target, stat.S_IMODE(status.st_mode))
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fsync(target)
        finally:
            os.close(target)
    finally:
        os.close(source)
