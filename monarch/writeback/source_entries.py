"""Changes of entries at the source: directories, links and special files made; entries renamed,
removed and given other attributes."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from monarch.posix.credentials import (
    Credentials,
    acting_as,
    can_act_as_others,
    without_umask,
)
from monarch.posix.files import born_ns, closing_fd, status_at
from monarch.text import errno_words
from monarch.tiers.source import identity_of
from monarch.types import Identity, kept_ns
from monarch.writeback.expected import Expected, SourceLog, is_shared, shared, with_known_time
from monarch.writeback.op import Op
from monarch.writeback.source_attributes import ITSELF, NOT_SUPPORTED, SourceAttributes, sync_entry
from monarch.writeback.source_contents import Place, may_replace
from monarch.writeback.source_directories import (
    OpenDirectories,
    Temporaries,
    creator,
    is_owner,
)

log = logging.getLogger(__name__)

_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)


@dataclass(eq=False, repr=False)
class SourceEntries:
    """Each method makes one change, in open directories of the source, and may wait for it.

    It returns the identity of the changed entry, None if that is not at the source under its name.
    Raises OSError.
    """

    _attributes: SourceAttributes
    _temporaries: Temporaries
    _log: SourceLog

    def mkdir(self, directories: OpenDirectories, op: Op, expected: Expected) -> Identity:
        """A directory that others have made is shared with them, and keeps its attributes."""
        by = creator(op)
        fd, name = directories.of(op.path, by, make=True)
        # Closed, until it has its attributes. A user outside the group of a set-group-ID directory
        # can make one with that bit, and cannot set its mode without losing the bit.
        keeps_group = os.fstat(fd).st_mode & (op.mode or 0) & stat.S_ISGID and not op.xattrs
        mode = stat.S_IMODE(op.mode or 0) if keeps_group and not can_act_as_others() else 0o700
        try:
            with acting_as(by), without_umask():
                os.mkdir(name, mode, dir_fd=fd)
        except (FileExistsError, PermissionError):
            there = status_at(fd, name)
            if there is None or not stat.S_ISDIR(there.st_mode):
                raise
            # The drain may have made it, and was killed or has failed before it could record that.
            if op.strict and not _may_be_made_by(op, by, there, 0o700):
                return shared(identity_of(there))
        return self._attributes.set_new(fd, name, op, by)

    def symlink(self, directories: OpenDirectories, op: Op, expected: Expected) -> Identity | None:
        by = creator(op)
        fd, name = directories.of(op.path, by, make=True)
        try:
            with acting_as(by):
                os.symlink(op.to, name, dir_fd=fd)
        except (FileExistsError, PermissionError):
            if status_at(fd, name) is None:
                raise
            with suppress(OSError):
                if os.readlink(name, dir_fd=fd) == op.to:
                    return self._link_there(fd, name, op, by)
            kept = self._log.conflict_name(name, expected.seq)
            with suppress(FileExistsError), acting_as(by):
                os.symlink(op.to, kept, dir_fd=fd)
            self._log.note_conflict(op.path, "was made there by others", kept=kept)
            return None
        return self._attributes.set_new(fd, name, op, by)

    def _link_there(self, fd: int, name: bytes, op: Op, by: Credentials | None) -> Identity | None:
        """The identity of a symbolic link that has the name and target of ``op`` already; None if
        it is another user's. Raises OSError."""
        there = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if there.st_uid != _uid(by):
            return None
        if there.st_mtime_ns == there.st_ctime_ns:
            # The drain may have made it, and was killed or has failed before it set its time.
            return self._attributes.set_new(fd, name, op, by)
        return identity_of(there)

    def mknod(self, directories: OpenDirectories, op: Op, expected: Expected) -> Identity | None:
        by = creator(op)
        fd, name = directories.of(op.path, by, make=True)
        kind = stat.S_IFMT(op.mode or 0)
        try:
            with acting_as(by):
                os.mknod(name, kind | 0o600, op.rdev, dir_fd=fd)
        except OSError as error:
            is_taken = error.errno in (errno.EEXIST, errno.EACCES, errno.EPERM)
            there = status_at(fd, name) if is_taken else None
            if there is None:
                if error.errno not in NOT_SUPPORTED or error.errno == errno.EACCES:
                    raise
                self._log.note_refused("special files", error, op.path)
                return None
            same = (stat.S_IFMT(there.st_mode), there.st_rdev) == (kind, op.rdev)
            # As in ``mkdir``.
            if not (same and _may_be_made_by(op, by, there, 0o600)):
                why = "was made there by others, and stays as it is"
                self._log.note_conflict(op.path, why)
                return identity_of(there) if same and there.st_uid == _uid(by) else None
        return self._attributes.set_new(fd, name, op, by)

    def link(
        self, directories: OpenDirectories, op: Op, expected: Expected, *, will_come: bool = False
    ) -> Identity | None:
        """Gives an entry another name. The kernel does not pass the name by which the user has
        reached the entry, so the record does not have it. ``will_come``: a later content brings
        other bytes under this name, so it is not given to a file that others have written."""
        by = directories.user_of(op)
        path = _own_path(directories, op, None, expected) or op.path
        fd, name, there = _found(directories, path, None)
        to_fd, to_name = directories.of(op.to, by, make=True)
        now = status_at(to_fd, to_name)
        if there is None:
            if now is None:
                log.warning("source: %r is not there to be linked", os.fsdecode(op.path))
            return None
        if op.strict and _is_of_others(expected, there, fd, name, version=will_come):
            self._log.note_conflict(op.path, "was changed there by others: it is not linked")
            return None
        if now is not None and now.st_ino == there.st_ino:
            return identity_of(there)
        if now is not None and op.strict:
            to_name = self._log.conflict_name(to_name, expected.seq)
            self._log.note_conflict(op.to, "was made there by others", kept=to_name)
        _require_reached(directories, op, by, there)
        with closing_fd(os.open(name, ITSELF, dir_fd=fd)) as it:
            self._temporaries.link_over(it, to_fd, to_name, op.object, by)
        linked = identity_of(os.stat(name, dir_fd=fd, follow_symlinks=False))
        return with_known_time(expected.known, there, linked) if op.object else linked

    def unlink(
        self, directories: OpenDirectories, op: Op, expected: Expected, place: Place
    ) -> None:
        """A missing name is success; an entry of others stays. ``place`` is ``over`` then if this
        has taken an older version of the file from its name: by a rename, or from its last name."""
        try:
            by = directories.user_of(op)
            fd, name = directories.of(op.path, by)
            there = status_at(fd, name)
            if there is None:
                return
            if op.strict and _is_of_others(expected, there, fd, name, version=True):
                self._log.note_conflict(op.path, "was changed there by others, and stays")
                return
            with acting_as(by):
                os.unlink(name, dir_fd=fd)
            if op.kind == "rename" or there.st_nlink == 1:
                place.kind = "over"
            self._log.note_removed(op.path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except IsADirectoryError:
            log.warning(
                "source: %r is to be removed, but others have put a directory in its place: it"
                " stays",
                os.fsdecode(op.path),
            )

    def rmdir(
        self,
        directories: OpenDirectories,
        op: Op,
        expected: Expected,
        *,
        keep: Collection[int] = (),
    ) -> None:
        """A missing directory is success; one in which others have made entries stays. ``keep`` as
        of ``Temporaries.sweep``."""
        try:
            by = directories.user_of(op)
            fd, name = directories.of(op.path, by)
            there = status_at(fd, name)
            if there is None:
                return
            if op.strict and _is_of_others(expected, there, fd, name):
                self._log.note_conflict(op.path, "was replaced there by others, and stays")
                return
            self._swept(partial(os.rmdir, name, dir_fd=fd), by, fd, name, keep)
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
        self,
        directories: OpenDirectories,
        op: Op,
        expected: Expected,
        over: Expected,
        place: Place,
        *,
        keep: Collection[int] = (),
    ) -> Identity | None:
        """Renames an entry; ``over`` is the entry that may have the new name. ``place`` has the
        file that lost its last name then. ``keep`` as of ``Temporaries.sweep``, for a directory
        that is replaced."""
        by = directories.user_of(op)
        to_fd, to_name = directories.of(op.to, by, make=True)
        now = status_at(to_fd, to_name)
        fd, name, there = _found(directories, op.path, by)
        if there is None:
            if now is None or (
                op.strict and _is_of_others(expected, now, to_fd, to_name, version=True)
            ):
                log.warning("source: %r is not there to be renamed", os.fsdecode(op.path))
                return None
            return identity_of(now)
        if op.strict and _is_of_others(expected, there, fd, name, version=True):
            if now is not None and expected.is_it(now, strict=True, version=True):
                # The entry has its new name already, and the old name is that of another entry.
                return identity_of(now)
            self._log.note_conflict(op.path, "was changed there by others: it is not renamed")
            return None
        if op.strict and not (
            now is None
            or now.st_ino == there.st_ino
            or may_replace(to_fd, to_name, now, over, strict=True)
        ):
            to_name, now = self._log.conflict_name(to_name, expected.seq), None
            self._log.note_conflict(op.to, "was changed there by others", kept=to_name)
        renames = partial(os.rename, name, to_name, src_dir_fd=fd, dst_dir_fd=to_fd)
        self._swept(renames, by, to_fd, to_name, keep)
        if now is not None and now.st_ino != there.st_ino:
            place.note_replaced(now)
        if now is not None and now.st_ino == there.st_ino and op.path != op.to:
            # The kernel leaves both names of one file.
            with suppress(FileNotFoundError), acting_as(by):
                os.unlink(name, dir_fd=fd)
        renamed = identity_of(os.stat(to_name, dir_fd=to_fd, follow_symlinks=False))
        return with_known_time(expected.known, there, renamed) if op.object else renamed

    def _swept(
        self,
        call: Callable[[], None],
        by: Credentials | None,
        fd: int,
        name: bytes,
        keep: Collection[int],
    ) -> None:
        """Removes or replaces a directory, which may still have temporary files. Raises OSError."""
        try:
            with acting_as(by):
                call()
        except OSError as error:
            if error.errno not in _NOT_EMPTY or not self._temporaries.sweep(fd, name, keep):
                raise
            with acting_as(by):
                call()

    def change_attributes(
        self, directories: OpenDirectories, op: Op, expected: Expected, *, will_come: bool = False
    ) -> Identity | None:
        """Changes attributes or extended attributes. ``will_come``: a later content brings the name
        of the entry and all its attributes."""
        try:
            by = directories.user_of(op)
            op = replace(op, path=_own_path(directories, op, by, expected) or op.path)
            directory_fd, name = _place_of_own(directories, op.path, by)
            with closing_fd(os.open(name, ITSELF, dir_fd=directory_fd)) as fd:
                return self._changed(fd, op, by, expected)
        except (FileNotFoundError, NotADirectoryError):
            if not will_come:
                log.warning("source: %r is not there to be changed", os.fsdecode(op.path))
            return None

    def change_older(
        self, directories: OpenDirectories, op: Op, expected: Expected
    ) -> Identity | None:
        """Changes attributes of the older version of a file, if one of the file's names leads to
        it. The next content replaces that version and keeps its attributes."""
        older = replace(expected, over=(), ours=frozenset())
        # A change of a file with a single name has no list of names.
        named = replace(op, paths=op.paths or (op.path,))
        path = _own_path(directories, named, directories.user_of(op), older, version=True)
        if path is None:
            return None
        return self.change_attributes(
            directories, replace(op, path=path, paths=()), older, will_come=True
        )

    def _changed(
        self, fd: int, op: Op, by: Credentials | None, expected: Expected
    ) -> Identity | None:
        found = os.fstat(fd)
        op = replace(op, mode=op.mode_from(stat.S_IMODE(found.st_mode)))
        if op.strict and _is_of_others(expected, found, fd):
            self._log.note_conflict(op.path, "was replaced there by others: it stays as it is")
            return None
        has_times = (op.mtime_ns, op.atime_ns) != (None, None)
        if has_times and op.strict and not expected.is_same(found, version=True):
            # Others have written the file since, which the old times would hide.
            self._log.note_conflict(op.path, "was changed there by others: its times stay")
            op = replace(op, mtime_ns=None, atime_ns=None)
        uid, known = found.st_uid, expected.known
        is_given = any(value is not None for value in (op.mode, op.uid, op.gid))
        is_others = by is not None and by.uid not in (0, uid)
        if by is not None and by.is_root and uid != 0 and known is not None and is_shared(known):
            # Access control lists are among the extended attributes.
            is_given, is_others = is_given or bool(op.xattrs), True
        if is_given and is_others:
            self._log.note_conflict(op.path, "is another user's there: its mode and owner stay")
            return None
        with acting_as(by):
            self._attributes.set(fd, op)
        sync_entry(fd)
        now = identity_of(os.fstat(fd))
        if op.object:
            return with_known_time(expected.known, found, now)
        if not stat.S_ISREG(found.st_mode):
            return now
        return _with_known_bytes(expected, found, now, op)


def _is_of_others(
    expected: Expected, found: os.stat_result, fd: int, name: bytes = b"", *, version: bool = False
) -> bool:
    """Whether the entry ``found``, at ``name`` in an open directory or open itself, is not the
    expected one. Only its time of creation tells that if others have removed the expected entry,
    and the source has given its inode number to another one. Raises OSError."""
    if not expected.is_same(found, version=version):
        return True
    if expected.known == identity_of(found):
        return False
    return expected.is_reused(found, born_ns(fd, name))


def _with_known_bytes(expected: Expected, found: os.stat_result, now: Identity, op: Op) -> Identity:
    """The identity ``now`` of a file without an object after a change of its attributes.

    It is that of the bytes that the mount knows. If others may have changed them before, it differs
    from the file's own identity, so that the mount notices their change, and no later change of the
    mount overwrites it.
    """
    known = expected.known
    is_untouched = now.size == found.st_size and (
        op.mtime_ns is not None or now.mtime_ns == kept_ns(found.st_mtime_ns)
    )
    if known is None or (is_untouched and identity_of(found) == known):
        return now
    if is_untouched and expected.is_same(found, version=True):
        return replace(now, ctime_ns=known.ctime_ns)
    return replace(known, source_ino=now.source_ino)


def _own_path(
    directories: OpenDirectories,
    op: Op,
    by: Credentials | None,
    expected: Expected,
    *,
    version: bool = False,
) -> bytes | None:
    """The first of several names that still leads to the file, with ``version`` in its known
    version; None if none does."""
    for path in op.paths if op.strict else ():
        with suppress(OSError):
            there = status_at(*directories.of(path, by))
            if there is not None and expected.is_same(there, version=version):
                return path
    return None


def _place_of_own(
    directories: OpenDirectories, path: bytes, by: Credentials | None
) -> tuple[int, bytes]:
    """As ``OpenDirectories.of``. The owner of an entry may have it open, and reaches it also if
    others have closed a directory above it since."""
    try:
        return directories.of(path, by)
    except PermissionError:
        fd, name = directories.of(path, None)
        there = status_at(fd, name)
        if by is None or there is None or there.st_uid != by.uid:
            raise
        return fd, name


def _require_reached(
    directories: OpenDirectories, op: Op, by: Credentials | None, there: os.stat_result
) -> None:
    """Raises PermissionError unless ``by`` owns the entry ``there``, or may reach it by one of its
    names in ``op``. The owner of a directory may use it in any mode."""
    if by is None or by.is_root or there.st_uid == by.uid:
        return
    for path in op.paths or (op.path,):
        try:
            fd, name = directories.of(path, by)
            with acting_as(None if is_owner(fd, by) else by):
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except (PermissionError, FileNotFoundError, NotADirectoryError):
            continue
        if found.st_ino == there.st_ino:
            return
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _found(
    directories: OpenDirectories, path: bytes, by: Credentials | None
) -> tuple[int, bytes, os.stat_result | None]:
    """The directory of ``path``, its name there, and its status; -1 and None if it is missing."""
    try:
        fd, name = directories.of(path, by)
        return fd, name, status_at(fd, name)
    except (FileNotFoundError, NotADirectoryError):
        return -1, b"", None


def _may_be_made_by(op: Op, by: Credentials | None, there: os.stat_result, first: int) -> bool:
    """Whether an entry is that of ``by``, and has the mode ``first`` with which the drain makes it,
    or all attributes that it gets then."""
    mode = stat.S_IMODE(there.st_mode) & ~stat.S_ISGID
    is_whole = mode == stat.S_IMODE(op.mode or 0) & ~stat.S_ISGID
    has_owner = op.uid in (None, there.st_uid) and op.gid in (None, there.st_gid)
    return there.st_uid == _uid(by) and (mode == first or (is_whole and has_owner))


def _uid(by: Credentials | None) -> int:
    """The owner of entries that are created with the rights of ``by``."""
    return by.uid if by is not None else os.geteuid()
