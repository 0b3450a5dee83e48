"""Publishes contents at the source: renames staged files, and completes files grown in place.

The source's entry under a name is compared with the identity that the mount knew. If others have
changed it, it stays, and the content gets a conflict name beside it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO

from monarch.posix import failpoints
from monarch.posix.credentials import Credentials, acting_as
from monarch.posix.files import closing_fd, rename_new, status_at
from monarch.text import MiB
from monarch.tiers.source import identity_of
from monarch.types import Identity, kept_ns
from monarch.writeback.expected import Expected, SourceLog, is_time, with_known_time
from monarch.writeback.op import Op
from monarch.writeback.source_attributes import (
    ITSELF,
    SPECIAL_BITS,
    SourceAttributes,
    path_of,
    sync_entry,
)
from monarch.writeback.source_contents import (
    CHANGED_MEANWHILE,
    FORBIDDEN,
    Place,
    due_bits,
    kind_of_place,
    may_replace,
    require_writable,
)
from monarch.writeback.source_directories import (
    Directories,
    OpenDirectories,
    Temporaries,
    creator,
    is_owner,
    writer,
)

# Bytes that are compared at a time.
_BLOCK = MiB
_TO_GROW = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(eq=False, repr=False)
class Publishing:
    """Publishes contents at one source. All methods may wait for it."""

    _directories: Directories
    _attributes: SourceAttributes
    _temporaries: Temporaries
    _log: SourceLog

    def publish(
        self,
        directories: OpenDirectories,
        op: Op,
        size: int,
        place: Place,
        expected: Expected,
    ) -> Identity:
        """Gives the staged file, of ``size`` bytes, all names of a content, or conflict names.

        Returns the identity of the file then. Raises OSError, EAGAIN if others have changed the
        staged file, or the entry that it was to replace.
        """
        fd, name = directories.of(op.paths[0], place.by, make=True)
        part = self._temporaries.part(op.object, through=op.through)
        found = status_at(fd, part)
        if found is None or found.st_size != size:
            raise OSError(CHANGED_MEANWHILE, "what was staged at the source is gone")
        kind, target = kind_of_place(fd, name, op, expected)
        if kind != place.kind or _version_of(target) != _version_of(place.target):
            raise OSError(CHANGED_MEANWHILE, "the source has changed what is to be replaced")
        if kind == "conflict" and _is_copy_of(fd, part, name, target, op):
            # Another node may have recovered it, while this one was away.
            os.unlink(part, dir_fd=fd)
        elif kind == "conflict":
            self._take_rights(fd, part, op, place.by)
            kept = self._log.conflict_name(name, expected.seq)
            if (earlier := _same_bytes(fd, part, kept)) is not None:
                os.unlink(part, dir_fd=fd)
                kept = earlier
            else:
                renames = partial(os.rename, part, kept, src_dir_fd=fd, dst_dir_fd=fd)
                _make_in(fd, place.by, renames)
            self._log.note_conflict(op.paths[0], "was changed there by others", kept=kept)
            # The content may still have its other names.
            name = kept
        elif kind == "new":
            try:
                _make_in(fd, place.by, partial(rename_new, fd, part, name))
            except FileExistsError as error:
                raise OSError(CHANGED_MEANWHILE, "others have made it at the source") from error
        elif kind == "replace":
            self._replace(part, name, fd, op, place.by)
            if target is not None:
                place.note_replaced(target)
        else:
            _rename_over(part, name, fd, place.by)
        failpoints.failpoint("drain-renamed")
        return self._link_all(directories, op, fd, name, place, expected)

    def _take_rights(self, fd: int, part: bytes, op: Op, by: Credentials | None) -> None:
        """Takes away the rights of a staged file that its content does not have any more."""
        with closing_fd(os.open(part, ITSELF, dir_fd=fd)) as it:
            mode = stat.S_IMODE(os.fstat(it).st_mode)
            if op.mode is None or not mode & ~op.mode:
                return
            with acting_as(by):
                self._attributes.set(it, Op(kind="attr", path=op.paths[0], mode=mode & op.mode))
            sync_entry(it)

    def _replace(self, part: bytes, name: bytes, fd: int, op: Op, by: Credentials | None) -> None:
        """Puts a staged file in the place of another file, which exists until then."""
        user = by or creator(op)
        try:
            with acting_as(user):
                os.rename(part, name, src_dir_fd=fd, dst_dir_fd=fd)
                return
        except OSError as error:
            if error.errno not in FORBIDDEN:
                raise
            # The owner of a directory may remove each file in it, as in ``_make_in``.
            if not is_owner(fd, user):
                if by is not None:
                    raise
                self._require_removable(name, fd, op)
        os.rename(part, name, src_dir_fd=fd, dst_dir_fd=fd)

    def _require_removable(self, name: bytes, fd: int, op: Op) -> None:
        """Raises OSError unless the user who wrote a content may remove the file that it replaces.

        The staged file belongs to another user, so its writers cannot move it in a directory with
        the sticky bit: a second link to the replaced file is removed.
        """
        second = self._temporaries.link(op.object)
        with suppress(FileNotFoundError):
            os.unlink(second, dir_fd=fd)
        os.link(name, second, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
        try:
            with acting_as(creator(op)):
                os.unlink(second, dir_fd=fd)
        except OSError:
            os.unlink(second, dir_fd=fd)
            raise

    def _link_all(
        self,
        directories: OpenDirectories,
        op: Op,
        fd: int,
        name: bytes,
        place: Place,
        expected: Expected,
    ) -> Identity:
        """Gives the file ``name`` the other names of a content; returns its identity then."""
        for other in op.paths[1:]:
            to_fd, to_name = directories.of(other, place.by, make=True)
            now = status_at(to_fd, to_name)
            with closing_fd(os.open(name, ITSELF, dir_fd=fd)) as it:
                if now is not None and now.st_ino == os.fstat(it).st_ino:
                    continue
                if now is not None and not (
                    may_replace(to_fd, to_name, now, expected, strict=op.strict)
                    or self._is_copy(now, expected.known, it, to_fd, op.object)
                ):
                    # The bytes must get this name as well, in case the first one is removed.
                    to_name, now = self._log.conflict_name(to_name, expected.seq), None
                    why = "was changed there by others"
                    self._log.note_conflict(other, why, kept=to_name)
                # A name of the replaced file leads to the new one, whichever user gave it.
                by = place.by if now is None else None
                self._temporaries.link_over(it, to_fd, to_name, op.object, by)
            if now is not None:
                place.note_replaced(now)
            failpoints.failpoint("drain-linked")
        return identity_of(os.stat(name, dir_fd=fd, follow_symlinks=False))

    def _is_copy(
        self, found: os.stat_result, known: Identity | None, it: int, fd: int, number: int
    ) -> bool:
        """Whether an entry in the directory ``fd`` may be a copy in the place of a hard link to the
        known version of the open file ``it``, at a source without hard links."""
        if known is None or _size_and_time(found) != (known.size, known.mtime_ns):
            return False
        return not self._temporaries.can_link(it, fd, number)

    def open_to_grow(
        self, op: Op, expected: Expected, base: int
    ) -> tuple[int, Credentials | None] | None:
        """A descriptor of the source's file, to write after its first ``base`` bytes, and the user
        with whose rights it is written.

        None if the file is not the known version, or its users may not write it in place. Bytes
        after ``base`` may be those of an earlier mount that was killed. Raises OSError.
        """
        known = expected.known
        try:
            with self._directories() as directories:
                fd, name = directories.of(op.paths[0], None)
                with closing_fd(os.open(name, ITSELF, dir_fd=fd)) as it:
                    found = os.fstat(it)
                    there = (found.st_ino, found.st_size, kept_ns(found.st_mtime_ns))
                    is_ours = expected.is_staged(found) and base <= found.st_size <= op.size
                    if (
                        known is None
                        or not stat.S_ISREG(found.st_mode)
                        or found.st_mode & SPECIAL_BITS
                        or found.st_ino != known.source_ino
                        or not (is_ours or there == (known.source_ino, known.size, known.mtime_ns))
                        or found.st_size < base
                        or found.st_size > op.size
                    ):
                        return None
                    require_writable(fd, name, op)
                    for user in (creator(op), None):
                        with suppress(PermissionError), acting_as(user):
                            return os.open(path_of(it), _TO_GROW), writer(op)
                    return None
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None

    def grown(
        self, directories: OpenDirectories, op: Op, expected: Expected, *, tried: bool
    ) -> Identity | None:
        """The identity of a file that was grown in place, which gets all names of the content; None
        if others have replaced it. ``tried``: the content may be staged as well."""
        if tried:
            self.discard(directories, op)
        found = self.look_at_same(directories, op, expected)
        if found is not None and len(op.paths) > 1:
            fd, name = directories.of(op.paths[0], None)
            place = Place("over", None, creator(op))
            found = self._link_all(directories, op, fd, name, place, expected)
        return found

    def discard(self, directories: OpenDirectories, op: Op) -> None:
        """Removes the staged file of a content that is not to be published, if there is one."""
        for path in op.paths:
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                fd, _ = directories.of(path, None)
                for name in (self._temporaries.part(op.object), self._temporaries.link(op.object)):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=fd)

    def look_at_same(
        self, directories: OpenDirectories, op: Op, expected: Expected
    ) -> Identity | None:
        """The identity of a content whose bytes the source has already; None if that has changed.

        The file loses the set-ID bits that a write on the mount has removed since then. It gets
        those that were set after that write, and the modification time of its bytes.
        """
        try:
            at, name = directories.of(op.paths[0], None)
            fd = os.open(name, ITSELF, dir_fd=at)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if not expected.is_it(found, strict=op.strict, version=True):
                return None
            mode = stat.S_IMODE(found.st_mode)
            changed = mode & ~(SPECIAL_BITS & ~(op.mode or 0)) | due_bits(found, op, expected)
            if changed != mode and not op.same and stat.S_ISREG(found.st_mode):
                os.chmod(path_of(fd), changed)
            if not op.same and op.mtime_ns not in (None, kept_ns(found.st_mtime_ns)):
                # The bytes were drained before an earlier change of the times was made.
                require_writable(at, name, op)
                self._attributes.set(fd, Op(kind="attr", path=op.path, mtime_ns=op.mtime_ns))
            return with_known_time(expected.known, found, identity_of(os.fstat(fd)))
        finally:
            os.close(fd)


def _make_in(fd: int, by: Credentials | None, call: Callable[[], None]) -> None:
    """Makes an entry in a directory with the rights of ``by``. The owner of the directory may have
    taken away the right to write in it since, and could give it again. Raises OSError."""
    try:
        with acting_as(by):
            call()
    except PermissionError:
        if not is_owner(fd, by):
            raise
        call()


def _rename_over(part: bytes, name: bytes, fd: int, by: Credentials | None) -> None:
    """Puts a staged file in the place of an older version, which its users may write."""
    try:
        with acting_as(by):
            os.rename(part, name, src_dir_fd=fd, dst_dir_fd=fd)
            return
    except OSError as error:
        # A user who may write the older version may lack the right to rename anything there.
        if error.errno not in FORBIDDEN or by is None:
            raise
    os.rename(part, name, src_dir_fd=fd, dst_dir_fd=fd)


def _same_bytes(fd: int, part: bytes, kept: bytes) -> bytes | None:
    """The name in a directory of an earlier version that this journal has kept beside the same
    file, if it has the bytes, owner and mode of ``part``. ``kept`` is the name for a new one."""
    beginning = kept.rstrip(b"0123456789")
    names: list[str] = []
    # The daemon may lack the right to list the directory.
    with suppress(OSError):
        names = os.listdir(fd)
    for name in map(os.fsencode, names):
        if name.startswith(beginning) and name[len(beginning) :].isdigit():
            with suppress(OSError), _open(fd, part) as new, _open(fd, name) as old:
                if _like(new) == _like(old) and all(
                    block == old.read(_BLOCK) for block in iter(partial(new.read, _BLOCK), b"")
                ):
                    return name
    return None


def _is_copy_of(fd: int, part: bytes, name: bytes, target: os.stat_result | None, op: Op) -> bool:
    """Whether the file ``name``, with the status ``target``, has the bytes, owner, mode,
    modification time and extended attributes of ``part``, which has those of ``op``."""
    with suppress(OSError), _open(fd, part) as new, _open(fd, name) as old:
        wanted, found = (os.fstat(file.fileno()).st_mtime_ns for file in (new, old))
        if (
            _like(new) == _like(old)
            and is_time(found, wanted)
            and (not op.xattrs or _xattrs(new) == _xattrs(old))
            and all(block == old.read(_BLOCK) for block in iter(partial(new.read, _BLOCK), b""))
        ):
            # It was not changed meanwhile.
            return _version_of(status_at(fd, name)) == _version_of(target)
    return False


def _xattrs(file: FileIO) -> dict[str, bytes]:
    fd = file.fileno()
    return {name: os.getxattr(fd, name) for name in os.listxattr(fd)}


def _open(directory: int, name: bytes) -> FileIO:
    fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    return FileIO(fd)


def _like(file: FileIO) -> tuple[int, int, int, int]:
    status = os.fstat(file.fileno())
    return status.st_mode, status.st_uid, status.st_gid, status.st_size


def _size_and_time(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, kept_ns(status.st_mtime_ns)


def _version_of(status: os.stat_result | None) -> tuple[int, int] | None:
    return None if status is None else (status.st_ino, status.st_ctime_ns)
