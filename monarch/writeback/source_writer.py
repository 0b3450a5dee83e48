"""The source's side of the drain: every change that is made there, once or once more.

Each call may wait as long as the source likes: none belongs on the event loop. Names are hostile:
all is done beneath the descriptor of the source's root and never through a symbolic link. A daemon
of root makes each change as the user who made it on the mount (``Op.by``), so that the source's own
kernel decides what that user may do there. A change of a journal that does not say by whom it was
made is made as the owner of what it is about.

What stands at the source is compared with what the mount knew of it (``Expected``) before it is
replaced, removed or changed. What differs is a *conflict*: the source's stays, and bytes that were
written are kept beside it, under a name of their own.

Every change is idempotent: after a crash it is made again, so "already done" is success. What a
source cannot do with attributes is told once and left out; every other failure is raised.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from monarch.posix import failpoints
from monarch.posix.credentials import Credentials, acting_as, can_act_as_others
from monarch.posix.openat2 import open_beneath
from monarch.posix.sparse import copy_data
from monarch.text import errno_words
from monarch.tiers.source import Source, SourceFile, identity_of
from monarch.types import ANY_SIZE, Identity
from monarch.writeback.op import Op
from monarch.writeback.staging import Staged

log = logging.getLogger(__name__)

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ITSELF = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_TO_SYNC = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
# Of what a descriptor leads to, by its way in /proc.
_TO_WRITE = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_TO_GROW = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_SYNC_AGAIN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# What a source answers that does not know such an attribute, or does not let us set it.
_NOT_TAKEN = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
    | {errno.E2BIG, errno.ERANGE, errno.EACCES}
)
# Others have changed at the source what a file was staged for. Not ESTALE, by which a source says
# that it is lost and has to be opened anew.
_CHANGED_MEANWHILE = errno.EAGAIN
# What one answers that has no hard links, or not so many.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_SPECIAL_BITS = stat.S_ISUID | stat.S_ISGID
# What one answers whose user may not do that.
_FORBIDDEN = (errno.EPERM, errno.EACCES)

_LIBC = ctypes.CDLL(None, use_errno=True)
_RENAME_NOREPLACE = 1
_NO_NOREPLACE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_NAME_MAX = 255
# File systems keep times in such units: NTFS 100 ns, many others microseconds or seconds, FAT 2 s.
_TIME_UNITS_NS = (1, 100, 1000, 10**6, 10**9, 2 * 10**9)
# Of a journal's token, in the names of what is kept beside a file that changed.
_TOKEN_DIGITS = 6
# Conflicts that are kept to be told.
_TOLD_CONFLICTS = 100


@dataclass(frozen=True, slots=True)
class Expected:
    """What may stand at the source where a change is made, and is ours to replace or remove.

    ``seq`` is the number of the change. ``known``: the last that is known of the file or directory
    at its path; ``as_set``: with each time that may have been set there without a mark. ``ours``:
    staged files that may have got their name in an earlier life that did not record it; a number
    alone does not tell one, for the source gives it again. ``over``: what renames on the mount have
    replaced. ``is_made``: the file was made on the mount, so its owner and mode are as the kernel
    let them become there. ``was_there``: the source has had it under its name; if that leads
    elsewhere, others have done it. ``longest``: that file was perhaps grown in place, up to so many
    bytes. ``is_file``: ``known`` is of a regular file.
    """

    seq: int = 0
    known: Identity | None = None
    as_set: tuple[Identity, ...] = ()
    ours: frozenset[Identity] = frozenset()
    over: tuple[Identity, ...] = ()
    is_made: bool = False
    was_there: bool = False
    longest: int = 0
    is_file: bool = False

    def is_it(self, found: os.stat_result, *, strict: bool, version: bool = False) -> bool:
        """Whether ``found`` is what may be replaced; with ``version``, as it is known.

        A number is given again as soon as its file is removed, so it tells a version of nothing.
        """
        if not strict or self.is_staged(found):
            return True
        known = [] if self.known is None else [self.known, *self.as_set]
        if self.is_file and not stat.S_ISREG(found.st_mode):
            known = []
        return any(
            found.st_ino == each.source_ino and (not version or _is_version(found, each))
            for each in (*self.over, *known)
        )

    def _is_as_long(self, found: os.stat_result) -> bool:
        """Whether it may be what a life that ended has brought behind the bytes that are known."""
        known = self.known
        if known is None or found.st_ino != known.source_ino or not self.longest:
            return True
        return known.size <= found.st_size <= max(known.size, self.longest)

    def is_staged(self, found: os.stat_result) -> bool:
        """Whether ``found`` is one of ``ours``."""
        return any(
            found.st_ino == each.source_ino
            and (
                self._is_as_long(found)
                if each.size == ANY_SIZE
                else (found.st_size == each.size and is_time(found.st_mtime_ns, each.mtime_ns))
            )
            for each in self.ours
        )

    def is_same(self, found: os.stat_result, *, strict: bool, version: bool = False) -> bool:
        """Whether ``found`` is not known to be another, or, with ``version``, to have been changed.

        What nothing is known of may be it, but not what was made on the mount and never came to the
        source.
        """
        is_unknown = self.known is None and not (self.ours or self.over or self.is_made)
        return is_unknown or self.is_it(found, strict=strict, version=version)


def _is_version(found: os.stat_result, known: Identity) -> bool:
    """Whether something of a known number is as it was, as far as its type tells."""
    if stat.S_ISDIR(found.st_mode):
        # What is made in it changes its time.
        return True
    if stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode):
        return (found.st_size, found.st_mtime_ns) == (known.size, known.mtime_ns)
    # So do those who use a fifo.
    return found.st_size == known.size


def is_time(found_ns: int, set_ns: int) -> bool:
    """Whether a time is the one that was set, as the source's file system keeps it."""
    return any(found_ns == set_ns - set_ns % unit_ns for unit_ns in _TIME_UNITS_NS)


PlaceKind = Literal["new", "over", "replace", "conflict"]


@dataclass(slots=True)
class Place:
    """Where a content goes: found out when its staged file is opened, and again when it is named.

    ``new``: the source has no such name. ``over``: ``target`` is an older version of the same file,
    so who may write that may do this. ``replace``: a rename on the mount has replaced ``target``.
    ``conflict``: the name is another's by now, so the content goes beside it. ``by`` is the user
    who made the staged file, None for the daemon; ``source_ino`` is its number.
    """

    kind: PlaceKind = "new"
    target: os.stat_result | None = None
    by: Credentials | None = None
    source_ino: int = 0


@dataclass(frozen=True, slots=True)
class Conflict:
    """``kept`` is where the bytes are that were written here, empty if there are none."""

    path: bytes
    kept: bytes
    why: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a list of steps came: what each that was made answered, and what ended it."""

    made: tuple[Identity | None, ...]
    error: OSError | None


class OpenDirectories:
    """Directories of the source that are open while some steps are made, and synced after them."""

    def __init__(self, writer: SourceWriter) -> None:
        self._writer = writer
        self._open: dict[tuple[bytes, Credentials | None], int] = {}

    def of(self, path: bytes, by: Credentials | None, *, make: bool = False) -> tuple[int, bytes]:
        """A descriptor of the directory that ``path`` is in, as ``by`` finds it, and its name
        there.

        Raises OSError, ENOENT if it is missing; with ``make`` it is made.
        """
        parent, _, name = path.rpartition(b"/")
        fd = self._open.get((parent, by))
        if fd is None:
            try:
                with acting_as(by):
                    fd = self._writer.directory(parent, make=make)
            except PermissionError:
                fd = self._writer.directory(parent, make=False)
                if not _is_owner(fd, by):
                    os.close(fd)
                    raise
            self._open[parent, by] = fd
        # The root has no name, and is in itself.
        return fd, name or b"."

    def sync(self) -> None:
        """Raises OSError."""
        for fd in self._open.values():
            _sync_directory(fd)

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


Step = Callable[[OpenDirectories], "Identity | None"]

# The time of change in the identity of a directory that others had made at the source before one of
# that name was made on the mount. No source tells such a time; some tell 0 of all.
_SHARED_NS = -1


def shared(identity: Identity) -> Identity:
    """The identity of a directory of others, which stands for one that was made on the mount."""
    return replace(identity, ctime_ns=_SHARED_NS)


def is_shared(identity: Identity) -> bool:
    return identity.ctime_ns == _SHARED_NS


def _is_owner(directory: int, by: Credentials | None) -> bool:
    return by is not None and os.fstat(directory).st_uid == by.uid


class SourceWriter:
    """``token`` is in the names of files that are staged, so that nobody's are taken for ours;
    ``node`` in those of what is kept beside a file that changed."""

    def __init__(self, source: Source, token: str, node: str | None = None) -> None:
        self._source = source
        self._prefix = b".monarch-%s-" % token.encode("ascii")
        self._node = os.fsencode(os.uname().nodename if node is None else node)
        # Two mounts of one node, or a journal begun anew, count their changes from 1 as well.
        self._journal = token[:_TOKEN_DIGITS].encode("ascii")
        self._told: set[tuple[str, int]] = set()
        # Where the source had something else than was known, the last of them.
        self.conflicts: deque[Conflict] = deque(maxlen=_TOLD_CONFLICTS)
        # Extended attributes, by path and name, that it has not taken, and why: the last of them.
        self.dropped_xattrs: dict[tuple[bytes, bytes], str] = {}
        self.conflict_count = 0

    def carry_out(self, steps: Sequence[Step]) -> Outcome:
        """Make the steps in order until one fails; those that are told to be made are durable."""
        folders = OpenDirectories(self)
        made: list[Identity | None] = []
        failure: OSError | None = None
        try:
            for step in steps:
                try:
                    made.append(self._source.at_root(_step_at, step, folders))
                except OSError as error:
                    failure = error
                    break
                failpoints.failpoint("drain-published")
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
        """Others have removed it at the source. Nobody shall see more in it than above it."""
        above = os.fstat(above_fd)
        try:
            os.mkdir(name, 0o700, dir_fd=above_fd)
        except FileExistsError:
            return
        # What was brought into it before may be elsewhere by now: others have renamed it.
        self._note_conflict(
            path,
            b"",
            "was removed by others, or renamed; it was made again for what was written here, with"
            " the mode of the directory that it is in",
        )
        fd = os.open(name, _ITSELF, dir_fd=above_fd)
        try:
            like = Op(kind="attr", uid=above.st_uid, gid=above.st_gid, mode=above.st_mode & 0o777)
            self._apply_own_attributes(fd, like)
        finally:
            os.close(fd)
        _sync_directory(above_fd)

    # -- contents ----------------------------------------------------------------------------

    def part_name(self, number: int, *, through: bool = False) -> bytes:
        """What the staged file of an object is called; ``through``: of one whose bytes are there
        alone."""
        return b"%s%d%s.part" % (self._prefix, number, b"-through" if through else b"")

    def _link_name(self, number: int) -> bytes:
        # Not that of the staged file: another content may have been staged already.
        return b"%s%d.link" % (self._prefix, number)

    def open_part(self, op: Op, *, make: bool, is_new: bool) -> int:
        """A descriptor of the empty staged file of an object whose bytes go to the source directly.

        It belongs to the user who writes it. ``is_new``: the source has no such file; otherwise who
        may write that need not be allowed to make others beside it. Raises OSError.
        """
        place = Place("new" if is_new else "over", None, _creator(op))
        folders = OpenDirectories(self)
        try:
            return self._open_part(folders, op, place, make=make)
        finally:
            folders.close()

    def open_place(self, op: Op, place: Place, expected: Expected, *, make: bool) -> int:
        """A descriptor of the empty staged file of an object, beside its first name; ``place`` is
        then where it goes. Raises OSError, EACCES or EPERM if its writers may not do that."""
        folders = OpenDirectories(self)
        try:
            by = place.by = _creator(op)
            fd, name = folders.of(op.path, by, make=make)
            place.kind, place.target = self._kind(fd, name, op, expected)
            if place.kind == "over":
                self._require_writable(fd, name, op)
                assert place.target is not None
                if by is not None and by.uid != place.target.st_uid:
                    # It stays its owner's.
                    place.by = None
            elif place.kind != "conflict" and expected.is_made and _is_given_away(op):
                # By root, or by another who has renamed it. That its name may be made there is
                # tried as the one who has given it.
                os.close(self._open_part(folders, op, place, make=make))
                place.by = None
            part_fd = self._open_part(folders, op, place, make=make)
            place.source_ino = os.fstat(part_fd).st_ino
            return part_fd
        finally:
            folders.close()

    def _open_part(self, folders: OpenDirectories, op: Op, place: Place, *, make: bool) -> int:
        part = self.part_name(op.object, through=op.through)
        try:
            return self._new_part(folders, op.path, part, place.by, make=make)
        except OSError as error:
            if error.errno not in _FORBIDDEN or place.by is None:
                raise
            # The owner of a directory may have closed it since the file was made in it, and could
            # open it again.
            above, _ = folders.of(op.path, place.by, make=make)
            if place.kind != "over" and not (place.kind == "new" and _is_owner(above, place.by)):
                raise
        place.by = None
        return self._new_part(folders, op.path, part, None, make=make)

    def _new_part(
        self,
        folders: OpenDirectories,
        path: bytes,
        part: bytes,
        by: Credentials | None,
        *,
        make: bool,
    ) -> int:
        fd, _ = folders.of(path, by, make=make)
        # What is left of an earlier life may be another's.
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=fd)
        with acting_as(by):
            return os.open(part, _NEW, 0o600, dir_fd=fd)

    def _kind(
        self, fd: int, name: bytes, op: Op, expected: Expected
    ) -> tuple[PlaceKind, os.stat_result | None]:
        target = _status(fd, name)
        if target is None:
            return "new", None
        if stat.S_ISDIR(target.st_mode) or not expected.is_it(
            target, strict=op.strict, version=True
        ):
            return "conflict", target
        known = expected.known.source_ino if expected.known is not None else 0
        is_own = target.st_ino == known or (not expected.is_made and expected.is_staged(target))
        return ("over" if is_own else "replace"), target

    def _require_writable(self, fd: int, name: bytes, op: Op) -> None:
        """Raises PermissionError if one of those who have written a file may not write it there.

        The owner may do so: no other user could prevent it.
        """
        if op.by is None or not can_act_as_others():
            return
        it = os.open(name, _ITSELF, dir_fd=fd)
        try:
            status = os.fstat(it)
            if not stat.S_ISREG(status.st_mode):
                return
            for writer in (op.by, *op.also):
                if not (writer.is_root or writer.uid == status.st_uid):
                    _try_to_write(it, writer)
        finally:
            os.close(it)

    def open_to_grow(
        self, op: Op, expected: Expected, base: int
    ) -> tuple[int, Credentials | None] | None:
        """A descriptor of the source's file, to write behind its first ``base`` bytes, and as whom;
        None if that is not the file that is known, or its users may not write it in place.

        What a life that was killed has written behind them is ours. Raises OSError.
        """
        folders = OpenDirectories(self)
        known = expected.known
        try:
            fd, name = folders.of(op.paths[0], None)
            it = os.open(name, _ITSELF, dir_fd=fd)
            try:
                found = os.fstat(it)
                there = (found.st_ino, found.st_size, found.st_mtime_ns)
                is_ours = expected.is_staged(found) and base <= found.st_size <= op.size
                if (
                    known is None
                    or not stat.S_ISREG(found.st_mode)
                    or found.st_mode & _SPECIAL_BITS
                    or found.st_ino != known.source_ino
                    or not (is_ours or there == (known.source_ino, known.size, known.mtime_ns))
                    or found.st_size < base
                    or found.st_size > op.size
                ):
                    return None
                self._require_writable(fd, name, op)
                by = _creator(op)
                for user in (by, None):
                    with suppress(PermissionError), acting_as(user):
                        return os.open(b"/proc/self/fd/%d" % it, _TO_GROW), user
                return None
            finally:
                os.close(it)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None
        finally:
            folders.close()

    def grown(
        self, folders: OpenDirectories, op: Op, expected: Expected, *, tried: bool
    ) -> Identity | None:
        """What the source has of a content that was brought behind an older one, under all names
        that it is to have; ``tried``: something of it may be staged."""
        if tried:
            self.discard(folders, op)
        found = self.look_at_same(folders, op, expected)
        if found is not None and len(op.paths) > 1:
            fd, name = folders.of(op.paths[0], None)
            for other in op.paths[1:]:
                place = Place("over", None, _creator(op))
                self._link_again(folders, op, fd, name, other, place, expected)
                failpoints.failpoint("drain-linked")
            found = identity_of(os.stat(name, dir_fd=fd, follow_symlinks=False))
        return found

    def finish_part(self, op: Op, place: Place, expected: Expected) -> tuple[int, Identity | None]:
        """Make durable what was written at the source directly, dressed as ``op`` says.

        Its size, and what it is if it has its names already, None if it is still staged. Raises
        OSError, ENOENT if there is neither.
        """
        folders = OpenDirectories(self)
        try:
            place.by = _creator(op)
            directory_fd, name = folders.of(op.paths[0], None)
            part = self.part_name(op.object, through=True)
            is_staged = _status(directory_fd, part) is not None
            if is_staged:
                place.kind, place.target = self._kind(directory_fd, name, op, expected)
                if place.kind == "over":
                    self._require_writable(directory_fd, name, op)
            fd = os.open(part if is_staged else name, _TO_SYNC, dir_fd=directory_fd)
            try:
                status = os.fstat(fd)
                place.source_ino = status.st_ino
                if is_staged:
                    if place.by is not None and status.st_uid != place.by.uid:
                        place.by = None
                    self.apply_attributes(fd, op, place, expected)
                elif not expected.is_it(status, strict=op.strict):
                    raise FileNotFoundError(errno.ENOENT, "it is another file by now")
                os.fsync(fd)
                status = os.fstat(fd)
            finally:
                os.close(fd)
            return status.st_size, None if is_staged else identity_of(status)
        finally:
            folders.close()

    def open_staged(self, path: bytes, number: int, source_ino: int) -> SourceFile:
        """The staged file of an object without bytes in the tier, to read it; ``source_ino`` is its
        number, 0 if that is not known. Raises OSError, SourceChanged."""
        part = _sibling(path, self.part_name(number, through=True))
        return self._source.open_known(part, source_ino)

    def discard_part(self, path: bytes, number: int) -> None:
        """Remove the staged file of an object without bytes in the tier, if it is there."""
        folders = OpenDirectories(self)
        try:
            with suppress(OSError):
                fd, _ = folders.of(path, None)
                os.unlink(self.part_name(number, through=True), dir_fd=fd)
        finally:
            folders.close()

    def apply_attributes(self, fd: int, op: Op, place: Place, expected: Expected) -> None:
        """Give a staged file what it is to have but its bytes. Raises OSError."""
        if place.kind == "over" and place.target is not None and op.strict:
            folders = OpenDirectories(self)
            try:
                at, name = folders.of(op.path, None)
                it = os.open(name, _ITSELF, dir_fd=at)
            finally:
                folders.close()
            try:
                if os.fstat(it).st_ino == place.target.st_ino:
                    self._apply_attributes_like(fd, it, op)
                    return
            finally:
                os.close(it)
            raise OSError(_CHANGED_MEANWHILE, "what was to be replaced at the source is gone")
        if expected.was_there and place.kind in ("new", "conflict") and _is_given_away(op):
            # Who removed a program, or replaced it, has taken its rights back.
            op = replace(op, mode=None if op.mode is None else op.mode & ~_SPECIAL_BITS)
        if place.by is None and not (expected.is_made or op.by is None):
            op = replace(op, uid=None, gid=None, mode=(op.mode or 0) & ~_SPECIAL_BITS)
        # Only root has set these.
        trusted = {n: v for n, v in op.xattrs.items() if n.startswith(b"trusted.")}
        with acting_as(place.by):
            others = {n: v for n, v in op.xattrs.items() if n not in trusted}
            self._apply_own_attributes(fd, replace(op, xattrs=others))
        if trusted:
            self._apply_own_attributes(fd, Op(kind="xattr", path=op.path, xattrs=trusted))

    def _apply_attributes_like(self, fd: int, it: int, op: Op) -> None:
        """What replaces an older version of a file keeps all that this has but its bytes, as a
        write in place does."""
        there = os.fstat(it)
        mode = stat.S_IMODE(there.st_mode)
        if op.by is not None and not op.by.is_root:
            mode &= ~stat.S_ISUID & (~stat.S_ISGID if mode & stat.S_IXGRP else ~0)
        where = b"/proc/self/fd/%d" % it
        xattrs: dict[bytes, bytes | None] = {}
        with suppress(OSError):
            for name in os.listxattr(where):
                if name.startswith(("user.", "trusted.", "system.posix_acl_access")):
                    xattrs[os.fsencode(name)] = os.getxattr(where, name)
        like = replace(op, mode=mode, uid=there.st_uid, gid=there.st_gid, xattrs=xattrs)
        self._apply_own_attributes(fd, like)

    def publish(
        self, folders: OpenDirectories, op: Op, staged: Staged, place: Place, expected: Expected
    ) -> Identity:
        """Give the staged file all names of a content; what it is there, maybe beside its name.

        Raises OSError, EAGAIN if what was staged, or what it was staged for, is not there any more.
        """
        fd, name = folders.of(op.paths[0], place.by, make=True)
        part = self.part_name(op.object, through=op.through)
        found = _status(fd, part)
        if found is None or found.st_size != staged.size:
            raise OSError(_CHANGED_MEANWHILE, "what was staged at the source is gone")
        kind, target = self._kind(fd, name, op, expected)
        if kind != place.kind or _version_of(target) != _version_of(place.target):
            raise OSError(_CHANGED_MEANWHILE, "the source has changed what is to be replaced")
        if kind == "conflict":
            kept = self._beside(name, expected.seq)
            with acting_as(place.by):
                os.rename(part, kept, src_dir_fd=fd, dst_dir_fd=fd)
            path = _sibling(op.paths[0], kept)
            self._note_conflict(op.paths[0], path, "was changed there by others")
            # Its other names are its own.
            name = kept
        elif kind == "new":
            try:
                with acting_as(place.by):
                    _rename_new(part, name, fd)
            except FileExistsError as error:
                raise OSError(_CHANGED_MEANWHILE, "others have made it at the source") from error
        elif kind == "replace":
            self._replace(part, name, fd, op, place.by)
        else:
            self._rename_over(part, name, fd, place.by)
        failpoints.failpoint("drain-renamed")
        for other in op.paths[1:]:
            self._link_again(folders, op, fd, name, other, place, expected)
            failpoints.failpoint("drain-linked")
        return identity_of(os.stat(name, dir_fd=fd, follow_symlinks=False))

    def _replace(self, part: bytes, name: bytes, fd: int, op: Op, by: Credentials | None) -> None:
        """Put a staged file in the place of another, which is there until then."""
        try:
            with acting_as(by or _creator(op)):
                os.rename(part, name, src_dir_fd=fd, dst_dir_fd=fd)
                return
        except OSError as error:
            if error.errno not in _FORBIDDEN or by is not None:
                raise
        # The staged file is another's, which keeps its users from moving it in a directory with the
        # sticky bit. Whether they may remove what it replaces is tried with a second name of that.
        second = self._link_name(op.object)
        with suppress(FileNotFoundError):
            os.unlink(second, dir_fd=fd)
        os.link(name, second, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
        try:
            with acting_as(_creator(op)):
                os.unlink(second, dir_fd=fd)
        except OSError:
            os.unlink(second, dir_fd=fd)
            raise
        os.rename(part, name, src_dir_fd=fd, dst_dir_fd=fd)

    def _rename_over(self, part: bytes, name: bytes, fd: int, by: Credentials | None) -> None:
        # A user who may write a file may lack the right to rename anything there. That the user may
        # write it has been found out.
        try:
            with acting_as(by):
                os.rename(part, name, src_dir_fd=fd, dst_dir_fd=fd)
                return
        except OSError as error:
            if error.errno not in _FORBIDDEN or by is None:
                raise
        os.rename(part, name, src_dir_fd=fd, dst_dir_fd=fd)

    def _link_again(
        self,
        folders: OpenDirectories,
        op: Op,
        fd: int,
        name: bytes,
        other: bytes,
        place: Place,
        expected: Expected,
    ) -> None:
        """Give another name to what was published under its first."""
        to_fd, to_name = folders.of(other, place.by, make=True)
        now = _status(to_fd, to_name)
        if now is not None and now.st_ino == os.stat(name, dir_fd=fd).st_ino:
            return
        if now is not None and not (
            expected.is_it(now, strict=op.strict) or _is_copy(now, expected.known)
        ):
            # The bytes are to have this name, too, when the first one is gone.
            to_name, now = self._beside(to_name, expected.seq), None
            kept = _sibling(other, to_name)
            self._note_conflict(other, kept, "was changed there by others")
        # A name of the file that was replaced leads to the new one, whichever user has given it.
        by = place.by if now is None else None
        with acting_as(by):
            self._link_over(fd, name, to_fd, to_name, op.object)

    def look_at_same(self, folders: OpenDirectories, op: Op, expected: Expected) -> Identity | None:
        """What the source has of a content whose bytes it has already; None if that is another.

        Special rights that a write has taken from the file since then are taken from it here, and
        it gets the time of these bytes.
        """
        try:
            at, name = folders.of(op.paths[0], None)
            fd = os.open(name, _ITSELF, dir_fd=at)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if not expected.is_it(found, strict=op.strict, version=True):
                return None
            extra = found.st_mode & _SPECIAL_BITS & ~(op.mode or 0)
            if extra and not op.same and stat.S_ISREG(found.st_mode):
                os.chmod(b"/proc/self/fd/%d" % fd, stat.S_IMODE(found.st_mode) & ~extra)
            if not op.same and op.mtime_ns not in (None, found.st_mtime_ns):
                # They were brought before an earlier change of the times was made.
                self._require_writable(at, name, op)
                self._apply_own_attributes(fd, Op(kind="attr", path=op.path, mtime_ns=op.mtime_ns))
            return identity_of(os.fstat(fd))
        finally:
            os.close(fd)

    def discard(self, folders: OpenDirectories, op: Op) -> None:
        """Remove what may have been staged for a content that is not to be published."""
        for path in op.paths:
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                fd, _ = folders.of(path, None)
                for name in (self.part_name(op.object), self._link_name(op.object)):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=fd)

    def _beside(self, name: bytes, seq: int) -> bytes:
        """The name of what is kept beside a file that is another's by now."""
        ending = b".monarch-conflict-%s-%s-%d" % (self._node, self._journal, seq)
        return name[: _NAME_MAX - len(ending)] + ending

    def forget_conflicts(self) -> None:
        """The conflicts so far are known to the user."""
        self.conflicts.clear()
        self.dropped_xattrs.clear()
        self.conflict_count = 0

    def _note_conflict(self, path: bytes, kept: bytes, why: str) -> None:
        self.conflicts.append(Conflict(path, kept, why))
        self.conflict_count += 1
        told = f"; what was written here is kept as {os.fsdecode(kept)!r}" if kept else ""
        log.warning("source: conflict: %r %s%s", os.fsdecode(path), why, told)

    # -- all else ----------------------------------------------------------------------------

    def mkdir(self, folders: OpenDirectories, op: Op, expected: Expected) -> Identity:
        """A directory that others have made is shared with them, and stays as they made it."""
        by = _creator(op)
        fd, name = folders.of(op.path, by, make=True)
        try:
            with acting_as(by):
                os.mkdir(name, 0o700, dir_fd=fd)
            is_ours = True
        except FileExistsError:
            there = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if not stat.S_ISDIR(there.st_mode):
                raise
            # A life that ended before it could say so has made it.
            is_ours = not op.strict or (
                there.st_uid == _uid(by) and stat.S_IMODE(there.st_mode) & ~stat.S_ISGID == 0o700
            )
        if is_ours:
            self._apply_directory_attributes(fd, name, op, by)
        identity = identity_of(os.stat(name, dir_fd=fd, follow_symlinks=False))
        return identity if is_ours else shared(identity)

    def _apply_directory_attributes(
        self, fd: int, name: bytes, op: Op, by: Credentials | None
    ) -> None:
        """As ``_apply_attributes_by_name``; a set-group-ID bit that the directory has from above
        stays.

        The kernel takes it at a chmod by a user who is not in the group of the directory.
        """
        it = os.open(name, _ITSELF | os.O_DIRECTORY, dir_fd=fd)
        try:
            inherited = os.fstat(it).st_mode & (op.mode or 0) & stat.S_ISGID
            self._apply_attributes_by_name(fd, name, op, by)
            now = stat.S_IMODE(os.fstat(it).st_mode)
            if inherited and not now & stat.S_ISGID:
                os.chmod(b"/proc/self/fd/%d" % it, now | stat.S_ISGID)
        finally:
            os.close(it)

    def symlink(self, folders: OpenDirectories, op: Op, expected: Expected) -> Identity | None:
        by = _creator(op)
        fd, name = folders.of(op.path, by, make=True)
        try:
            with acting_as(by):
                os.symlink(op.to, name, dir_fd=fd)
        except FileExistsError:
            with suppress(OSError):
                if os.readlink(name, dir_fd=fd) == op.to:
                    there = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    return identity_of(there) if there.st_uid == _uid(by) else None
            name = self._beside(name, expected.seq)
            with suppress(FileExistsError), acting_as(by):
                os.symlink(op.to, name, dir_fd=fd)
            self._note_conflict(op.path, _sibling(op.path, name), "was made there by others")
            return None
        self._apply_attributes_by_name(fd, name, op, by)
        return identity_of(os.stat(name, dir_fd=fd, follow_symlinks=False))

    def mknod(self, folders: OpenDirectories, op: Op, expected: Expected) -> Identity | None:
        by = _creator(op)
        fd, name = folders.of(op.path, by, make=True)
        kind = stat.S_IFMT(op.mode or 0)
        try:
            with acting_as(by):
                os.mknod(name, kind | 0o600, op.rdev, dir_fd=fd)
        except FileExistsError:
            there = os.stat(name, dir_fd=fd, follow_symlinks=False)
            same = (stat.S_IFMT(there.st_mode), there.st_rdev) == (kind, op.rdev)
            is_own = same and there.st_uid == _uid(by)
            if not is_own or stat.S_IMODE(there.st_mode) != 0o600:
                self._note_conflict(op.path, b"", "was made there by others, and stays as it is")
                return identity_of(there) if is_own else None
        except OSError as error:
            if error.errno not in _NOT_TAKEN or error.errno == errno.EACCES:
                raise
            self._tell("special files", error, op.path)
            return None
        self._apply_attributes_by_name(fd, name, op, by)
        return identity_of(os.stat(name, dir_fd=fd, follow_symlinks=False))

    def link(self, folders: OpenDirectories, op: Op, expected: Expected) -> Identity | None:
        by = self._actor(folders, op)
        try:
            fd, name = folders.of(op.path, by)
            there = _status(fd, name)
        except FileNotFoundError:
            there = None
        to_fd, to_name = folders.of(op.to, by, make=True)
        now = _status(to_fd, to_name)
        if there is None:
            if now is None:
                log.warning("source: %r is not there to be linked", os.fsdecode(op.path))
            return None
        if now is not None and now.st_ino == there.st_ino:
            return identity_of(there)
        if op.strict and not expected.is_same(there, strict=True):
            self._note_conflict(op.path, b"", "was changed there by others: it is not linked")
            return None
        if now is not None and op.strict:
            to_name = self._beside(to_name, expected.seq)
            self._note_conflict(op.to, _sibling(op.to, to_name), "was made there by others")
        with acting_as(by):
            self._link_over(fd, name, to_fd, to_name, op.object)
        return identity_of(os.stat(name, dir_fd=fd, follow_symlinks=False))

    def unlink(self, folders: OpenDirectories, op: Op, expected: Expected) -> None:
        """That there is nothing is fine; what others have put there stays."""
        try:
            by = self._actor(folders, op)
            fd, name = folders.of(op.path, by)
            there = _status(fd, name)
            if there is None:
                return
            if op.strict and not expected.is_same(there, strict=True, version=True):
                self._note_conflict(op.path, b"", "was changed there by others, and stays")
                return
            with acting_as(by):
                os.unlink(name, dir_fd=fd)
            for dropped in list(self.dropped_xattrs):
                if dropped[0] == op.path:
                    self.dropped_xattrs.pop(dropped, None)
        except (FileNotFoundError, NotADirectoryError):
            return
        except IsADirectoryError:
            log.warning(
                "source: %r is to be removed, but others have put a directory in its place: it"
                " stays",
                os.fsdecode(op.path),
            )

    def rmdir(self, folders: OpenDirectories, op: Op, expected: Expected) -> None:
        """That there is nothing is fine; what others have put into it stays, and it with it."""
        try:
            by = self._actor(folders, op)
            fd, name = folders.of(op.path, by)
            there = _status(fd, name)
            if there is not None and op.strict and not expected.is_same(there, strict=True):
                self._note_conflict(op.path, b"", "was replaced there by others, and stays")
                return
            try:
                with acting_as(by):
                    os.rmdir(name, dir_fd=fd)
            except OSError as error:
                if error.errno not in _NOT_EMPTY or not self._swept(fd, name):
                    raise
                with acting_as(by):
                    os.rmdir(name, dir_fd=fd)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (*_NOT_EMPTY, errno.ENOTDIR):
                raise
            log.warning(
                "source: directory %r is to be removed, but others have put something there: it"
                " stays (%s)",
                os.fsdecode(op.path),
                errno_words(error.errno),
            )

    def rename(
        self, folders: OpenDirectories, op: Op, expected: Expected, over: Expected
    ) -> Identity | None:
        """``over`` is what may stand under the new name."""
        by = self._actor(folders, op)
        to_fd, to_name = folders.of(op.to, by, make=True)
        now = _status(to_fd, to_name)
        try:
            fd, name = folders.of(op.path, by)
            there = _status(fd, name)
        except FileNotFoundError:
            there = None
        if there is None:
            if now is None or (op.strict and not expected.is_same(now, strict=True)):
                log.warning("source: %r is not there to be renamed", os.fsdecode(op.path))
                return None
            return identity_of(now)
        if op.strict and not expected.is_same(there, strict=True, version=True):
            if now is not None and expected.is_it(now, strict=True, version=True):
                # It has its new name already, and the old one is another's.
                return identity_of(now)
            self._note_conflict(op.path, b"", "was changed there by others: it is not renamed")
            return None
        if op.strict and not (
            now is None or now.st_ino == there.st_ino or over.is_it(now, strict=True, version=True)
        ):
            to_name = self._beside(to_name, expected.seq)
            self._note_conflict(op.to, _sibling(op.to, to_name), "was changed there by others")
        try:
            with acting_as(by):
                os.rename(name, to_name, src_dir_fd=fd, dst_dir_fd=to_fd)
        except OSError as error:
            if error.errno not in _NOT_EMPTY or not self._swept(to_fd, to_name):
                raise
            with acting_as(by):
                os.rename(name, to_name, src_dir_fd=fd, dst_dir_fd=to_fd)
        if now is not None and now.st_ino == there.st_ino and op.path != op.to:
            # Of two names of one file the kernel has left both.
            with suppress(FileNotFoundError), acting_as(by):
                os.unlink(name, dir_fd=fd)
        return identity_of(os.stat(to_name, dir_fd=to_fd, follow_symlinks=False))

    def attr(
        self, folders: OpenDirectories, op: Op, expected: Expected, *, will_come: bool = False
    ) -> Identity | None:
        """Attributes and extended attributes of what ``op.path`` names; ``will_come``: a content
        that brings that name, and all attributes, is still to come."""
        try:
            by = self._actor(folders, op)
            op = replace(op, path=self._own_path(folders, op, by, expected))
            fd, name = folders.of(op.path, by)
            return self._apply_attributes_by_name(fd, name, op, by, expected)
        except FileNotFoundError:
            if not will_come:
                log.warning("source: %r is not there to be changed", os.fsdecode(op.path))
            return None

    def _own_path(
        self, folders: OpenDirectories, op: Op, by: Credentials | None, expected: Expected
    ) -> bytes:
        """The first name of a file that is still its own; the first of all if none is."""
        for path in op.paths if op.strict else ():
            with suppress(OSError):
                there = _status(*folders.of(path, by))
                if there is not None and expected.is_same(there, strict=True):
                    return path
        return op.path

    def _actor(self, folders: OpenDirectories, op: Op) -> Credentials | None:
        """As whom a change of what is there is made: None for the daemon's own identity."""
        if op.by is not None or op.strict or not can_act_as_others():
            return op.by
        there = _status(*folders.of(op.path, None))
        return Credentials(there.st_uid, there.st_gid) if there is not None else None

    # -- how ---------------------------------------------------------------------------------

    def _apply_attributes_by_name(
        self,
        directory_fd: int,
        name: bytes,
        op: Op,
        by: Credentials | None,
        expected: Expected | None = None,
    ) -> Identity | None:
        """Dress what a name leads to, if it is what is expected; what it is then."""
        fd = os.open(name, _ITSELF, dir_fd=directory_fd)
        try:
            status = os.fstat(fd)
            if op.strict and expected is not None and not expected.is_same(status, strict=True):
                self._note_conflict(op.path, b"", "was replaced there by others: it stays as it is")
                return None
            if expected is not None:
                op = self._without_times_of(op, status, expected)
            if expected is None:
                with acting_as(by):
                    self._apply_own_attributes(fd, op)
            elif not self._apply_attributes_as(fd, op, by, expected.known):
                return None
            kind = stat.S_IFMT(status.st_mode)
            if kind in (stat.S_IFREG, stat.S_IFDIR):
                _sync_by_name(fd)
            return identity_of(os.fstat(fd))
        finally:
            os.close(fd)

    def _without_times_of(self, op: Op, found: os.stat_result, expected: Expected) -> Op:
        """A change without its times, if others have written the file since: they would hide it."""
        if (op.mtime_ns, op.atime_ns) == (None, None) or not op.strict:
            return op
        if expected.is_same(found, strict=True, version=True):
            return op
        self._note_conflict(op.path, b"", "was changed there by others: its times stay")
        return replace(op, mtime_ns=None, atime_ns=None)

    def _apply_attributes_as(
        self, fd: int, op: Op, by: Credentials | None, known: Identity | None = None
    ) -> bool:
        """Make a change of a file that is there with the rights of a user; whether it belongs to
        whom it has to. ``known`` is what is known of it."""
        uid = os.fstat(fd).st_uid
        is_given = any(value is not None for value in (op.mode, op.uid, op.gid))
        is_others = by is not None and by.uid not in (0, uid)
        if by is not None and by.is_root and uid != 0 and known is not None and is_shared(known):
            # Access control lists are among the extended attributes.
            is_given, is_others = is_given or bool(op.xattrs), True
        if is_given and is_others:
            why = "is another user's there: its mode and owner stay"
            self._note_conflict(op.path, b"", why)
            return False
        with acting_as(by):
            self._apply_own_attributes(fd, op)
        return True

    def _apply_own_attributes(self, fd: int, op: Op) -> None:
        # This way leads to what the descriptor is of, and ends there, even if it is a link.
        where = b"/proc/self/fd/%d" % fd
        owned = self._own(fd, where, op)
        if op.xattrs:
            # Before the mode, which may take the right to set them.
            self._apply_xattrs(fd, where, op)
        if op.mode is not None and not stat.S_ISLNK(os.fstat(fd).st_mode):
            mode = stat.S_IMODE(op.mode)
            if not owned:
                # Whoever it belongs to now is not who was to have those rights.
                mode &= ~_SPECIAL_BITS
            try:
                os.chmod(where, mode)
            except OSError as error:
                self._raise_if_not_refused("modes", error, op)
        if op.mtime_ns is not None or op.atime_ns is not None:
            now = os.fstat(fd)
            atime_ns = now.st_atime_ns if op.atime_ns is None else op.atime_ns
            mtime_ns = now.st_mtime_ns if op.mtime_ns is None else op.mtime_ns
            try:
                os.utime(where, ns=(atime_ns, mtime_ns))
            except OSError as error:
                self._raise_if_not_refused("times", error, op)

    def _apply_xattrs(self, fd: int, where: bytes, op: Op) -> None:
        # First what goes: it makes room.
        for name, value in sorted(op.xattrs.items(), key=lambda item: item[1] is not None):
            try:
                if value is not None:
                    os.setxattr(where, name, value)
                else:
                    os.removexattr(where, name)
            except OSError as error:
                if error.errno == errno.ENOSPC and os.fstatvfs(fd).f_bavail:
                    # Not the disk is full, but what it has for one file's attributes.
                    error = OSError(errno.E2BIG, os.strerror(errno.E2BIG))
                if error.errno != errno.ENODATA:
                    self._raise_if_not_refused("extended attributes", error, op)
                    self._note_dropped(op.path, name, errno_words(error.errno))
                    continue
            self.dropped_xattrs.pop((op.path, name), None)

    def _note_dropped(self, path: bytes, name: bytes, why: str) -> None:
        self.dropped_xattrs[path, name] = why
        # Other threads are at it, too.
        for oldest in list(self.dropped_xattrs)[:-_TOLD_CONFLICTS]:
            self.dropped_xattrs.pop(oldest, None)

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


def _creator(op: Op) -> Credentials | None:
    """As whom something is made at the source: None for the daemon's own identity."""
    if op.by is not None or op.uid is None or not can_act_as_others():
        return op.by
    return Credentials(op.uid, op.uid if op.gid is None else op.gid)


def _uid(by: Credentials | None) -> int:
    """Whose what is made as ``by`` is."""
    return by.uid if by is not None else os.geteuid()


def _is_given_away(op: Op) -> bool:
    """Whether a file is to belong to another user than the one who makes it at the source."""
    return op.by is not None and op.uid not in (None, op.by.uid)


def _try_to_write(it: int, by: Credentials) -> None:
    """Raises OSError if a user may not write the file that a descriptor leads to."""
    with acting_as(by):
        try:
            os.close(os.open(b"/proc/self/fd/%d" % it, _TO_WRITE))
        except OSError as error:
            # It is a program that runs: who may not write is told something else.
            if error.errno != errno.ETXTBSY:
                raise


def _version_of(status: os.stat_result | None) -> tuple[int, int] | None:
    return None if status is None else (status.st_ino, status.st_ctime_ns)


def _is_copy(found: os.stat_result, known: Identity | None) -> bool:
    """Whether it may be a copy that stands for a hard link, where the source has none of these."""
    return known is not None and (found.st_size, found.st_mtime_ns) == (known.size, known.mtime_ns)


def _sibling(path: bytes, name: bytes) -> bytes:
    directory, slash, _ = path.rpartition(b"/")
    return directory + slash + name


def _rename_new(name: bytes, to_name: bytes, fd: int) -> None:
    """Rename in a directory what must not replace anything. Raises OSError, EEXIST if it would."""
    if _LIBC.renameat2(fd, name, fd, to_name, _RENAME_NOREPLACE) == 0:
        return
    number = ctypes.get_errno()
    if number not in _NO_NOREPLACE:
        raise OSError(number, os.strerror(number))
    # A file system that does not know it: a link does not replace anything either.
    try:
        os.link(name, to_name, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if _status(fd, to_name) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        os.rename(name, to_name, src_dir_fd=fd, dst_dir_fd=fd)
    else:
        os.unlink(name, dir_fd=fd)


def _step_at(_root: int, step: Step, folders: OpenDirectories) -> Identity | None:
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


def _sync_directory(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno == errno.EBADF:
            # One that its user may not list is open for names only.
            _sync_by_name(fd)
        elif error.errno not in _NO_SYNC:
            raise


def _sync_by_name(fd: int) -> None:
    """Sync what is open for its name only. One that may not be read is left to the source."""
    try:
        again = os.open(b"/proc/self/fd/%d" % fd, _SYNC_AGAIN)
    except PermissionError:
        return
    try:
        os.fsync(again)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(again)


def _duplicate(fd: int, name: bytes, to_fd: int, part: bytes) -> None:
    """A copy of a file in the place of a link to it, with its mode and times."""
    source = os.open(name, _TO_SYNC, dir_fd=fd)
    try:
        status = os.fstat(source)
        target = os.open(part, _NEW, 0o600, dir_fd=to_fd)
        try:
            copy_data(source, target, status.st_size)
            with suppress(OSError):
                os.fchown(target, status.st_uid, status.st_gid)
            os.fchmod(target, stat.S_IMODE(status.st_mode))
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fsync(target)
        finally:
            os.close(target)
    finally:
        os.close(source)
