"""POSIX access control lists (ACLs): how they are read, stored, and told to the kernel.

An ACL is kept as the kernel's own extended attribute has it (linux/posix_acl_xattr.h): a version,
then entries of tag, permissions and id. The entries of the owner, of the mask and of others are the
mode bits of the file; they are stored as zeros and filled in from the mode that the mount shows.
So a ``chmod`` changes the mask as it does on a disk, and files with the same ACL and different
modes share one value.
"""

from __future__ import annotations

import errno
import os
import struct
from typing import Final, NamedTuple

from monarch.beneath import kind_of_file_system, open_beneath

ACCESS: Final = b"system.posix_acl_access"
DEFAULT: Final = b"system.posix_acl_default"
NAMES: Final = (ACCESS, DEFAULT)

# FUSE_SUPER_MAGIC of statfs(2), and an attribute that any file system with attributes may have.
_FUSE: Final = 0x65735546
_ANY: Final = b"user.monarch"
_VERSION = struct.pack("<I", 2)
_ENTRY = struct.Struct("<HHI")
_OWNER, _USER, _GROUP_OWNER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_NO_ID = 0xFFFFFFFF
# The tags whose permissions are mode bits, and where these are in the mode.
_IN_MODE = {_OWNER: 6, _MASK: 3, _OTHERS: 0}


class Acls(NamedTuple):
    """The ACLs of one entry as they are stored, each empty if there is none.

    ``access`` decides who may use the entry, ``default`` what is made in a directory.
    """

    access: bytes = b""
    default: bytes = b""


NO_ACLS: Final = Acls()


def stored(access: bytes) -> bytes:
    """An access ACL without the mode bits; empty if it has no more than those.

    One that is no ACL is kept as it is: the kernel will not take it and refuse access.
    """
    entries = _entries(access)
    if entries is None:
        return access
    if all(tag in (_OWNER, _GROUP_OWNER, _OTHERS) for tag, _, _ in entries):
        return b""
    kept = ((tag, 0 if tag in _IN_MODE else bits, number) for tag, bits, number in entries)
    return _VERSION + b"".join(_ENTRY.pack(*entry) for entry in kept)


def with_mode(access: bytes, mode: int) -> bytes:
    """A stored access ACL with the mode bits filled in, as the kernel wants to hear it."""
    entries = _entries(access)
    if entries is None:
        return access
    shown = (
        (tag, mode >> _IN_MODE[tag] & 7 if tag in _IN_MODE else bits, number)
        for tag, bits, number in entries
    )
    return _VERSION + b"".join(_ENTRY.pack(*entry) for entry in shown)


def narrowed(mode: int, acls: Acls) -> int:
    """The mode where the ACL is not used: its group bits are the mask, which may promise
    the group more than the ACL gives it."""
    for tag, bits, _ in _entries(acls.access) or ():
        if tag == _GROUP_OWNER:
            return mode & (~0o070 | bits << 3)
    return mode & ~0o070 if acls.access else mode


def are_known(directory_fd: int) -> bool:
    """Whether the file system of an open directory has ACLs.

    Of a FUSE file system without extended attributes the kernel tells that there is no list here,
    not that there are none at all; it tells so of other attributes.
    """
    if kind_of_file_system(directory_fd) == _FUSE and not _has(directory_fd, _ANY):
        return False
    return _has(directory_fd, ACCESS)


def _has(directory_fd: int, attribute: bytes) -> bool:
    """Whether a file system has such attributes; this directory need not have one."""
    try:
        os.getxattr(directory_fd, attribute)
    except OSError as error:
        return error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS)
    return True


def read(directory_fd: int, name: bytes, attribute: bytes) -> bytes:
    """A list of an entry of an open directory, empty if there is none. Raises OSError."""
    try:
        path = b"/proc/self/fd/%d/%s" % (directory_fd, name)
        return os.getxattr(path, attribute, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return b""
        raise


def read_beneath(root_fd: int, path: bytes) -> Acls:
    """The ACLs of ``path`` beneath a directory, through no symbolic link. Raises OSError."""
    parent, _, name = path.rstrip(b"/").rpartition(b"/")
    parent_fd = open_beneath(root_fd, parent, os.O_PATH | os.O_DIRECTORY)
    try:
        access, default = (read(parent_fd, name or b".", attribute) for attribute in NAMES)
    finally:
        os.close(parent_fd)
    return Acls(stored(access), default)


def _entries(access: bytes) -> list[tuple[int, int, int]] | None:
    if not access.startswith(_VERSION) or len(access) % _ENTRY.size != len(_VERSION):
        return None
    return list(_ENTRY.iter_unpack(access[len(_VERSION) :]))
