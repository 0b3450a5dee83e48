"""Attributes at the source: owner, mode, times, extended attributes and access control lists.

Where the source does not support an attribute, or refuses it to this daemon, that is reported once
and the attribute is left out. Every other failure is raised.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Container
from contextlib import suppress
from dataclasses import replace

from monarch.posix import acl
from monarch.posix.credentials import Credentials, acting_as
from monarch.posix.files import closing_fd
from monarch.text import MiB, errno_words
from monarch.tiers.source import identity_of
from monarch.types import Identity
from monarch.writeback.expected import SourceLog
from monarch.writeback.op import Op

# Opens an entry of any type by its name, a symbolic link itself.
ITSELF = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
SPECIAL_BITS = stat.S_ISUID | stat.S_ISGID
# The errors of a source that does not support something, or refuses it to this daemon.
NOT_SUPPORTED = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
    | {errno.E2BIG, errno.ERANGE, errno.EACCES}
)
# The largest block in which a file system keeps the attributes of a file, in bytes.
_BLOCK = 4096
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_SYNC_AGAIN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def path_of(fd: int) -> bytes:
    """A path that leads to the entry of a descriptor, and not further if it is a link."""
    return b"/proc/self/fd/%d" % fd


class SourceAttributes:
    """Sets attributes of open entries of the source."""

    def __init__(self, log: SourceLog) -> None:
        self._log = log

    def set(self, fd: int, op: Op) -> None:
        """Set all attributes that ``op`` names, with the rights of the thread. Raises OSError."""
        has_owner = self._set_owner(fd, op)
        if op.kind != "attr" and op.gid not in (None, os.fstat(fd).st_gid):
            op = _for_another_group(op)
        # Set before the mode, which may remove the right to set them.
        refused = self._set_xattrs(fd, op) if op.xattrs else ()
        now_mode = os.fstat(fd).st_mode
        if op.mode is not None and not stat.S_ISLNK(now_mode):
            mode = stat.S_IMODE(op.mode)
            if acl.ACCESS in refused:
                mode = acl.narrowed(mode, acl.Acls(op.xattrs[acl.ACCESS] or b""))
            if not (has_owner or stat.S_ISDIR(now_mode)):
                # Set-ID bits would give the rights of the wrong user.
                mode &= ~SPECIAL_BITS
            try:
                # The kernel may remove a set-group-ID bit at a chmod to the same mode.
                if mode != stat.S_IMODE(now_mode):
                    os.chmod(path_of(fd), mode)
            except OSError as error:
                self._raise_if_supported("modes", error, op)
        if op.mtime_ns is not None or op.atime_ns is not None:
            now = os.fstat(fd)
            atime_ns = now.st_atime_ns if op.atime_ns is None else op.atime_ns
            mtime_ns = now.st_mtime_ns if op.mtime_ns is None else op.mtime_ns
            try:
                os.utime(path_of(fd), ns=(atime_ns, mtime_ns))
            except OSError as error:
                self._raise_if_supported("times", error, op)

    @staticmethod
    def without_list(fd: int) -> dict[bytes, bytes | None]:
        """The change that removes the access control list of an open entry, if it has one: a
        default list of its directory has given it to a staged file."""
        with suppress(OSError):
            if acl.ACCESS.decode() in os.listxattr(path_of(fd)):
                return {acl.ACCESS: None}
        return {}

    @staticmethod
    def kept_of(fd: int) -> dict[bytes, bytes | None]:
        """The extended attributes of an open entry that a new version of it keeps, as far as they
        may be read. Raises OSError if it has an access control list that may not: without the list
        the group would get the rights of the mask."""
        found: dict[bytes, bytes | None] = {}
        names: list[str] = []
        with suppress(OSError):
            names = os.listxattr(path_of(fd))
        for name in names:
            if name == acl.ACCESS.decode():
                found[acl.ACCESS] = os.getxattr(path_of(fd), name)
            elif name.startswith(("user.", "trusted.")):
                with suppress(OSError):
                    found[os.fsencode(name)] = os.getxattr(path_of(fd), name)
        return found

    def set_new(self, directory_fd: int, name: bytes, op: Op, by: Credentials | None) -> Identity:
        """Sets the attributes of an entry that ``by`` has just made, and syncs it. A directory
        keeps a set-group-ID bit that it has from the one above. Raises OSError."""
        with closing_fd(os.open(name, ITSELF, dir_fd=directory_fd)) as fd:
            inherited = 0
            if op.kind == "mkdir":
                inherited = os.fstat(fd).st_mode & (op.mode or 0) & stat.S_ISGID
            with acting_as(by):
                self.set(fd, op)
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            if inherited and not mode & stat.S_ISGID:
                # The kernel removes the bit at a chmod by a user outside the directory's group.
                os.chmod(path_of(fd), mode | stat.S_ISGID)
            sync_entry(fd)
            return identity_of(os.fstat(fd))

    def _set_owner(self, fd: int, op: Op) -> bool:
        """Sets owner and group; returns whether the entry has them then."""
        now = os.fstat(fd)
        uid = now.st_uid if op.uid is None else op.uid
        gid = now.st_gid if op.gid is None else op.gid
        if (uid, gid) == (now.st_uid, now.st_gid):
            return True
        try:
            os.chown(path_of(fd), uid, gid)
        except OSError as error:
            self._raise_if_supported("owners", error, op)
            # A user may still give the file to one of the user's own groups.
            with suppress(OSError):
                os.chown(path_of(fd), -1, gid)
            return False
        return True

    def _set_xattrs(self, fd: int, op: Op) -> Container[bytes]:
        """Returns the names of those that the source does not take."""
        refused = set()

        def order(item: tuple[bytes, bytes | None]) -> tuple[bool, bool]:
            # Removals first: they make room. ACLs last: they may remove the right to set others.
            return item[1] is not None, item[0] in acl.NAMES

        for name, value in sorted(op.xattrs.items(), key=order):
            try:
                if value is not None:
                    os.setxattr(path_of(fd), name, value)
                else:
                    os.removexattr(path_of(fd), name)
            except OSError as error:
                if error.errno == errno.ENOSPC and _is_too_much(fd, name, value or b""):
                    error = OSError(errno.E2BIG, os.strerror(errno.E2BIG))
                if error.errno != errno.ENODATA:
                    self._raise_if_supported("extended attributes", error, op)
                    self._log.note_dropped(op.path, name, errno_words(error.errno))
                    refused.add(name)
                    continue
            self._log.note_taken(op.path, name)
        return refused

    def _raise_if_supported(self, what: str, error: OSError, op: Op) -> None:
        if error.errno not in NOT_SUPPORTED:
            raise error
        self._log.note_refused(what, error, op.path)


def _for_another_group(op: Op) -> Op:
    """The attributes of a new entry whose group the source refuses: the members of the group that
    it has instead get no right that others lack."""
    if op.mode is None:
        return op
    others = op.mode & stat.S_IRWXO
    if access := op.xattrs.get(acl.ACCESS):
        return replace(op, xattrs={**op.xattrs, acl.ACCESS: acl.with_group(access, others)})
    return replace(op, mode=op.mode & (~stat.S_IRWXG | others << 3))


def _is_too_much(fd: int, name: bytes, value: bytes) -> bool:
    """Whether a file system that is not full reports that the attributes of one file do not fit: it
    may keep them in one block. A small attribute fits, so its disk, or a quota, is full."""
    disk, path = os.fstatvfs(fd), path_of(fd)
    size = len(name) + len(value)
    for each in map(os.fsencode, os.listxattr(path)):
        # Some belong to root only.
        with suppress(OSError):
            size += len(each) + len(os.getxattr(path, each)) if each != name else 0
    block = min(disk.f_bsize, _BLOCK)
    return size > block * 3 // 4 and disk.f_bavail * disk.f_frsize >= MiB


def sync_directory_at(fd: int) -> None:
    """Makes the names in an open directory durable. Raises OSError."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno == errno.EBADF:
            # A directory that its user may not list is open as O_PATH only.
            sync_entry(fd)
        elif error.errno not in _NO_SYNC:
            raise


def sync_entry(fd: int) -> None:
    """Makes a file or directory durable that is open as O_PATH only, unless the thread may not
    read it: that is left to the source. Raises OSError."""
    if stat.S_IFMT(os.fstat(fd).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        return
    try:
        again = os.open(path_of(fd), _SYNC_AGAIN)
    except PermissionError:
        return
    try:
        os.fsync(again)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(again)
