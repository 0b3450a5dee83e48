"""Staged files at the source: opened in the place of a content, given their attributes, and
discarded.

A staged file lies beside its future name, and belongs to the user who wrote it. So the source's own
kernel decides what that user may do there.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from monarch.errors import SourceChanged
from monarch.posix.credentials import Credentials, acting_as, can_act_as_others
from monarch.posix.files import born_ns, closing_fd, status_at
from monarch.tiers.source import Source, SourceFile, identity_of
from monarch.types import Identity
from monarch.writeback.expected import Expected
from monarch.writeback.op import Op
from monarch.writeback.source_attributes import ITSELF, SPECIAL_BITS, SourceAttributes, path_of
from monarch.writeback.source_directories import (
    NEW,
    Directories,
    OpenDirectories,
    Temporaries,
    creator,
    is_owner,
    writer,
)

# Others have changed the entry at the source that the staged file was to replace. The drain stages
# it again. The errno is not ESTALE, with which a lost source answers until it is opened anew.
CHANGED_MEANWHILE = errno.EAGAIN
# The errors of a call that the user may not make.
FORBIDDEN = (errno.EPERM, errno.EACCES)
_TO_SYNC = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
_TO_WRITE = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

PlaceKind = Literal["new", "over", "replace", "conflict"]


@dataclass(slots=True)
class Place:
    """The place of a content at the source: determined when its staged file is opened, and again
    when it is published.

    ``new``: the source has no such name. ``over``: ``target`` is an older version of the same file,
    so a user who may write that may publish this. ``replace``: a rename on the mount has replaced
    ``target``. ``conflict``: the name belongs to another entry now, so the content is kept beside
    it. ``by`` is the user who made the staged file, None for the daemon; ``source_ino`` is the
    inode number of the staged file. ``instead`` is that of an earlier one, which was removed for
    it before it had another name; 0 if there was none. ``replaced``: the inode numbers of other
    files whose last name the change has taken.
    """

    kind: PlaceKind = "new"
    target: os.stat_result | None = None
    by: Credentials | None = None
    source_ino: int = 0
    instead: int = 0
    replaced: set[int] = field(default_factory=set)

    def note_replaced(self, status: os.stat_result) -> None:
        """Notes that the change has taken a name of another file, of this status before."""
        if status.st_nlink == 1:
            self.replaced.add(status.st_ino)


@dataclass(eq=False, repr=False)
class StagedContents:
    """The staged files of objects at one source. All methods may wait for it."""

    _source: Source
    _directories: Directories
    _attributes: SourceAttributes
    _temporaries: Temporaries

    def open_part(self, op: Op, *, make: bool, is_new: bool) -> int:
        """A descriptor of the empty staged file of an object whose bytes go to the source directly.

        It belongs to the user who writes it. ``is_new``: the source has no such file; otherwise a
        user who may write that file need not be allowed to make others beside it. Raises OSError.
        """
        place = Place("new" if is_new else "over", None, creator(op))
        with self._directories() as directories:
            return self._open_part(directories, op, place, make=make)

    def open_place(self, op: Op, place: Place, expected: Expected, *, make: bool) -> int:
        """A descriptor of the empty staged file of an object, beside its first name.

        ``place`` is filled in; ``make``: missing directories are made. Raises OSError, EACCES or
        EPERM if the users who wrote the content may not do that.
        """
        with self._directories() as directories:
            by = place.by = creator(op)
            fd, name = directories.of(op.path, by, make=make)
            place.kind, place.target = kind_of_place(fd, name, op, expected)
            if place.kind == "over":
                require_writable(fd, name, op)
                assert place.target is not None
                if by is not None and by.uid != place.target.st_uid:
                    # The file stays its owner's.
                    place.by = None
            elif place.kind != "conflict" and expected.is_made and is_given_away(op):
                # Root gave the file to another user, or another user renamed it. Whether its name
                # may be made there is tried with the rights of the user who gave it.
                try:
                    os.close(self._open_part(directories, op, place, make=make))
                except PermissionError:
                    if place.kind != "new" or expected.maker is None:
                        raise
                    # The user has written a file that another user made there.
                    place.by = expected.maker
                    os.close(self._open_part(directories, op, place, make=make))
                place.by = None
            part_fd = self._open_part(directories, op, place, make=make)
            place.source_ino = os.fstat(part_fd).st_ino
            return part_fd

    def _open_part(self, directories: OpenDirectories, op: Op, place: Place, *, make: bool) -> int:
        part = self._temporaries.part(op.object, through=op.through)

        def opened(by: Credentials | None) -> int:
            fd, _ = directories.of(op.path, place.by, make=make)
            # A file that an earlier mount has left may belong to another user.
            if (earlier := status_at(fd, part)) is not None:
                with suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=fd)
                if earlier.st_nlink == 1:
                    place.instead = place.instead or earlier.st_ino
            with acting_as(by):
                return os.open(part, NEW, 0o600, dir_fd=fd)

        user = place.by
        try:
            return opened(user)
        except OSError as error:
            if error.errno not in FORBIDDEN or user is None:
                raise
            if place.kind == "over":
                place.by = None
            else:
                # The owner of a directory may have taken away the right to write in it since the
                # file was made there, and could give it again.
                above, _ = directories.of(op.path, user, make=make)
                if not is_owner(above, user):
                    raise
        part_fd = opened(None)
        try:
            if place.by is not None:
                # As if the user had made it.
                os.fchown(part_fd, user.uid, user.gid)
        except BaseException:
            os.close(part_fd)
            raise
        return part_fd

    def open_staged(self, places: list[bytes], number: int, source_ino: int) -> SourceFile:
        """Opens the staged file of an object without bytes in the tier, for reading. It is beside
        one of ``places``. ``source_ino`` is its inode number, 0 if that is not known. Raises
        OSError, SourceChanged."""
        part = self._temporaries.part(number, through=True)
        *others, last = (os.path.join(os.path.dirname(path), part) for path in places)
        for path in others:
            with suppress(FileNotFoundError, NotADirectoryError, SourceChanged):
                return self._source.open_known(path, source_ino)
        return self._source.open_known(last, source_ino)

    def staged_status(self, path: bytes, number: int) -> os.stat_result | None:
        """The status of the staged file of an object without bytes in the tier; None if there is
        no such file, or the source does not answer."""
        with self._directories() as directories, suppress(OSError):
            fd, _ = directories.of(path, None)
            return status_at(fd, self._temporaries.part(number, through=True))
        return None

    def finish_part(
        self, op: Op, place: Place, expected: Expected, *, beside: bytes | None = None
    ) -> tuple[int, Identity | None]:
        """Makes data durable that was written at the source directly, with the attributes of
        ``op``. Returns its size, and its identity if it has its names already, None if it is
        still staged. ``beside``: the path beside which the file was staged; it is moved beside its
        first name. Raises OSError, ENOENT with the name of the staged file if it is neither."""
        part = self._temporaries.part(op.object, through=True)
        try:
            if beside is not None:
                self._bring_beside(op.paths[0], beside, part)
            return self._finish(op, place, expected, part)
        except FileNotFoundError as error:
            raise FileNotFoundError(error.errno, error.strerror, os.fsdecode(part)) from error

    def _bring_beside(self, path: bytes, beside: bytes, part: bytes) -> None:
        """Moves a staged file from beside one path to beside another, unless it is there."""
        with self._directories() as directories:
            fd, _ = directories.of(path, None)
            if status_at(fd, part) is not None:
                return
            with suppress(FileNotFoundError, NotADirectoryError):
                from_fd, _ = directories.of(beside, None)
                os.rename(part, part, src_dir_fd=from_fd, dst_dir_fd=fd)
                directories.sync()

    def _finish(
        self, op: Op, place: Place, expected: Expected, part: bytes
    ) -> tuple[int, Identity | None]:
        with self._directories() as directories:
            place.by = creator(op)
            directory_fd, name = directories.of(op.paths[0], None)
            is_staged = status_at(directory_fd, part) is not None
            if is_staged:
                place.kind, place.target = kind_of_place(directory_fd, name, op, expected)
                if place.kind == "over":
                    require_writable(directory_fd, name, op)
            with closing_fd(
                os.open(part if is_staged else name, _TO_SYNC, dir_fd=directory_fd)
            ) as fd:
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
            return status.st_size, None if is_staged else identity_of(status)

    def discard_part(self, places: list[bytes], number: int) -> None:
        """Removes the staged file of an object without bytes in the tier, beside one of ``places``:
        the earliest first, since its directory may be renamed meanwhile. Raises nothing."""
        part = self._temporaries.part(number, through=True)
        with self._directories() as directories:
            for path in places:
                with suppress(OSError):
                    fd, _ = directories.of(path, None)
                    os.unlink(part, dir_fd=fd)
                    return

    def apply_attributes(self, fd: int, op: Op, place: Place, expected: Expected) -> None:
        """Gives a staged file the attributes of a content. Raises OSError, EAGAIN if others have
        removed the file that it replaces."""
        if place.kind == "over" and place.target is not None and op.strict:
            self._apply_attributes_of(place.target, fd, op, expected)
            return
        if expected.known is not None or not expected.is_made:
            # A file that the source has had has its own list, or none.
            op = replace(op, xattrs={**self._attributes.without_list(fd), **op.xattrs})
        if has_ended_rights(op, place, expected):
            op = replace(op, mode=None if op.mode is None else op.mode & ~SPECIAL_BITS)
        if place.by is None and not (expected.is_made or op.by is None):
            op = replace(op, uid=None, gid=None, mode=(op.mode or 0) & ~SPECIAL_BITS)
        # Only root can have set these bits on the mount.
        trusted = {n: v for n, v in op.xattrs.items() if n.startswith(b"trusted.")}
        with acting_as(place.by or _root(op)):
            others = {n: v for n, v in op.xattrs.items() if n not in trusted}
            self._attributes.set(fd, replace(op, xattrs=others))
        if trusted:
            self._attributes.set(fd, Op(kind="xattr", path=op.path, xattrs=trusted))

    def _apply_attributes_of(
        self, target: os.stat_result, fd: int, op: Op, expected: Expected
    ) -> None:
        """Copies the attributes of the replaced version, which a write in place would keep."""
        with self._directories() as directories:
            directory_fd, name = directories.of(op.path, None)
            it = os.open(name, ITSELF, dir_fd=directory_fd)
        try:
            there = os.fstat(it)
            if there.st_ino != target.st_ino:
                raise OSError(CHANGED_MEANWHILE, "what was to be replaced at the source is gone")
            mode = stat.S_IMODE(there.st_mode)
            if any(writer is not None and not writer.is_root for writer in (op.by, *op.also)):
                mode &= ~(stat.S_ISUID | stat.S_ISGID)
            mode = mode & ~expected.taken | due_bits(there, op, expected)
            xattrs = self._attributes.without_list(fd) | self._attributes.kept_of(it)
            like = replace(op, mode=mode, uid=there.st_uid, gid=there.st_gid, xattrs=xattrs)
            with acting_as(_root(op)):
                self._attributes.set(fd, like)
        finally:
            os.close(it)


def _root(op: Op) -> Credentials | None:
    """Root, if root alone has written a content: the owner may get it over a quota."""
    by = writer(op)
    return by if by is not None and by.is_root else None


def kind_of_place(
    directory_fd: int, name: bytes, op: Op, expected: Expected
) -> tuple[PlaceKind, os.stat_result | None]:
    """The kind of a place and the entry that has its name. Raises OSError."""
    target = status_at(directory_fd, name)
    if target is None:
        return "new", None
    if stat.S_ISDIR(target.st_mode) or not may_replace(
        directory_fd, name, target, expected, strict=op.strict
    ):
        return "conflict", target
    # The drain may have removed the known version. An entry that is to be replaced may have its
    # number by now.
    is_own = expected.is_known(target, version=op.strict)
    # A staged file that was to replace no version may lack some of its attributes.
    has_version = expected.known is not None or not expected.is_made
    return ("over" if is_own or (has_version and expected.is_staged(target)) else "replace"), target


def may_replace(
    directory_fd: int, name: bytes, found: os.stat_result, expected: Expected, *, strict: bool
) -> bool:
    """Whether the entry ``found``, at ``name`` in an open directory, may be replaced: with
    ``strict`` only if it is an expected one in its known version.

    The size and time of modification show that of a file or a symbolic link. Any other entry may
    have the number of a removed one, and only its time of creation shows that. Raises OSError.
    """
    if not expected.is_it(found, strict=strict, version=True):
        return False
    if not strict or stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode):
        return True
    return not expected.is_reused(found, born_ns(directory_fd, name))


def require_writable(directory_fd: int, name: bytes, op: Op) -> None:
    """Raises PermissionError if one of the users who wrote a file may not write it at the source.
    The owner may: no other user could prevent it."""
    if op.by is None or not can_act_as_others():
        return
    with closing_fd(os.open(name, ITSELF, dir_fd=directory_fd)) as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return
        for writer in (op.by, *op.also):
            if not (writer.is_root or writer.uid == status.st_uid):
                _try_to_write(fd, writer)


def _try_to_write(fd: int, by: Credentials) -> None:
    with acting_as(by):
        try:
            os.close(os.open(path_of(fd), _TO_WRITE))
        except OSError as error:
            # ETXTBSY: the file is a running program. A user without the right to write gets another
            # error.
            if error.errno != errno.ETXTBSY:
                raise


def due_bits(found: os.stat_result, op: Op, expected: Expected) -> int:
    """The set-ID bits that a file gets or keeps with a content, whose older version is ``found``.

    0 if the owner or group of that version is another than on the mount, or if another user than
    the owner and root has written the bytes. Bits that the older version lacks are given only if
    others have not changed its mode: its owner may have ended these rights.
    """
    if op.uid not in (None, found.st_uid) or op.gid not in (None, found.st_gid):
        return 0
    writers = (op.by, *op.also)
    if any(writer is not None and writer.uid not in (0, found.st_uid) for writer in writers):
        return 0
    known, bits = expected.known, expected.kept & found.st_mode
    if stat.S_IMODE(found.st_mode) | SPECIAL_BITS == (op.mode or 0) | SPECIAL_BITS:
        bits |= expected.due
        if expected.is_unmarked(found):
            bits |= expected.lacking
        if known is not None and (known.source_ino, known.ctime_ns) == (
            found.st_ino,
            found.st_ctime_ns,
        ):
            bits |= expected.doubtful
    return bits


def has_ended_rights(op: Op, place: Place, expected: Expected) -> bool:
    """Whether the owner of a file has ended the rights of its set-ID bits: others have removed or
    replaced the file at the source, and another user has written this content of it on the mount.

    The content then gets no set-ID bits, also not later. Each other content that gets a name at the
    source has the bits that the file has on the mount, also if the file was copied up: they come
    with the content or, if its bytes are newer than its record, with the record of these bytes.
    """
    return expected.was_there and place.kind != "over" and is_given_away(op)


def is_given_away(op: Op) -> bool:
    """Whether a file is to belong to another user than the one who makes it at the source."""
    return op.by is not None and op.uid not in (None, op.by.uid)
