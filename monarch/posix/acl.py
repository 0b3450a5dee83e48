"""POSIX access control lists (ACLs): reading, storing, and passing them to the kernel.

An ACL is stored in the format of the extended attribute (linux/posix_acl_xattr.h): a version, then
entries of tag, permissions and id. The entries of the owner, the mask and the others are mode bits
of the file. They are stored as zeros and filled in from the mode that the mount shows. So a
``chmod`` changes the mask as on a disk, and files that differ only in the mode share one value.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

from monarch.posix.credentials import Credentials
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import kind_of_file_system, open_beneath

ACCESS: Final = b"system.posix_acl_access"
DEFAULT: Final = b"system.posix_acl_default"
NAMES: Final = (ACCESS, DEFAULT)

# FUSE_SUPER_MAGIC of statfs(2), and an attribute that any file system with attributes knows.
_FUSE: Final = 0x65735546
_ANY: Final = b"user.monarch"
_VERSION = struct.pack("<I", 2)
_ENTRY = struct.Struct("<HHI")
_OWNER, _USER, _GROUP_OWNER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_NO_ID = 0xFFFFFFFF
# The tags whose permissions are mode bits, and the shift of these bits in the mode.
_IN_MODE = {_OWNER: 6, _MASK: 3, _OTHERS: 0}


class Acls(NamedTuple):
    """The ACLs of one entry as they are stored, each empty if there is none.

    ``access`` controls access to the entry; ``default`` is the initial ACL of new entries in it.
    """

    access: bytes = b""
    default: bytes = b""


NO_ACLS: Final = Acls()


def stored(access: bytes) -> bytes:
    """An access ACL without its mode bits; empty if it has no other entries. An invalid one is
    kept: the kernel will reject it and refuse access."""
    entries = _entries(access)
    if entries is None:
        return access
    if all(tag in (_OWNER, _GROUP_OWNER, _OTHERS) for tag, _, _ in entries):
        return b""
    kept = ((tag, 0 if tag in _IN_MODE else bits, number) for tag, bits, number in entries)
    return _VERSION + b"".join(_ENTRY.pack(*entry) for entry in kept)


def with_mode(access: bytes, mode: int) -> bytes:
    """A stored access ACL with the mode bits filled in, in the format of the kernel."""
    entries = _entries(access)
    if entries is None:
        return access
    shown = (
        (tag, mode >> _IN_MODE[tag] & 7 if tag in _IN_MODE else bits, number)
        for tag, bits, number in entries
    )
    return _VERSION + b"".join(_ENTRY.pack(*entry) for entry in shown)


def with_group(access: bytes, most: int) -> bytes:
    """An access ACL that gives the group of the file no other permissions than ``most``, the bits
    of one class of a mode."""
    entries = _entries(access)
    if entries is None:
        return access
    kept = (
        (tag, bits & most if tag == _GROUP_OWNER else bits, each) for tag, bits, each in entries
    )
    return _VERSION + b"".join(_ENTRY.pack(*entry) for entry in kept)


def narrowed(mode: int, acls: Acls) -> int:
    """``mode`` for a user of the file that ignores the ACL: the group bits of a file with an ACL
    are the mask, which may allow more than the ACL gives the group."""
    for tag, bits, _ in _entries(acls.access) or ():
        if tag == _GROUP_OWNER:
            return mode & (~0o070 | bits << 3)
    return mode & ~0o070 if acls.access else mode


def inherited(default: bytes, mode: int, umask: int) -> tuple[int, Acls]:
    """The mode and the ACLs of a new entry with ``mode`` in a directory with the default ACL
    ``default``, which may be empty (acl(5)). With one, the umask of the process is ignored."""
    bits = {tag: bits for tag, bits, _ in _entries(default) or ()}
    if not {_OWNER, _GROUP_OWNER, _OTHERS} <= bits.keys():
        return mode & ~umask, NO_ACLS
    group = bits.get(_MASK, bits[_GROUP_OWNER])
    mode &= ~0o777 | bits[_OWNER] << 6 | group << 3 | bits[_OTHERS]
    return mode, Acls(stored(default), default if stat.S_ISDIR(mode) else b"")


def with_acls(xattrs: Mapping[bytes, bytes], acls: Acls) -> dict[bytes, bytes]:
    """Extended attributes with the ACLs that are not empty, in place of others."""
    others = {name: value for name, value in xattrs.items() if name not in NAMES}
    return others | {name: acl for name, acl in zip(NAMES, acls, strict=True) if acl}


def allows(access: bytes, mode: int, *, uid: int, gid: int, by: Credentials, wanted: int) -> bool:
    """Whether ``by`` has the permissions ``wanted``, as the bits of one class of a mode, for an
    entry with these attributes and a stored access ACL, which may be empty (acl(5)). An invalid ACL
    allows nothing. Root is not treated differently.

    As in Linux, an ACL is not used if its mask is empty: its users then get the permissions of the
    others (acl_permission_check in fs/namei.c).
    """
    if by.uid == uid:
        return mode >> 6 & wanted == wanted
    if not access or not mode & 0o070:
        is_member = gid == by.gid or gid in by.groups
        return mode >> (3 if is_member else 0) & wanted == wanted
    entries = _entries(access)
    if entries is None:
        return False
    mask = mode >> 3 & 7
    groups = []
    for tag, bits, number in entries:
        if tag == _USER and number == by.uid:
            return bits & mask & wanted == wanted
        group = gid if tag == _GROUP_OWNER else number
        if tag in (_GROUP_OWNER, _GROUP) and (group == by.gid or group in by.groups):
            groups.append(bits & mask)
    if groups:
        return any(bits & wanted == wanted for bits in groups)
    return mode & wanted == wanted


def are_known(directory_fd: int) -> bool:
    """Whether the file system of an open directory supports ACLs.

    For a FUSE file system without extended attributes the kernel reports "no ACL", not "not
    supported". It reports the latter for other attributes, so one of those is read.
    """
    if kind_of_file_system(directory_fd) == _FUSE and not _has(directory_fd, _ANY):
        return False
    return _has(directory_fd, ACCESS)


def _has(directory_fd: int, attribute: bytes) -> bool:
    """Whether the file system supports ``attribute``; the directory need not have it."""
    try:
        os.getxattr(directory_fd, attribute)
    except OSError as error:
        return error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS)
    return True


def read(directory_fd: int, name: bytes, attribute: bytes) -> bytes:
    """The ACL ``attribute`` of an entry of an open directory, empty if none. Raises OSError."""
    try:
        path = b"/proc/self/fd/%d/%s" % (directory_fd, name)
        return os.getxattr(path, attribute, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return b""
        raise


def read_beneath(root_fd: int, path: bytes) -> Acls:
    """The ACLs of ``path`` beneath a directory, following no symbolic link. Raises OSError."""
    parent, _, name = path.rstrip(b"/").rpartition(b"/")
    with closing_fd(open_beneath(root_fd, parent, os.O_PATH | os.O_DIRECTORY)) as parent_fd:
        access, default = (read(parent_fd, name or b".", attribute) for attribute in NAMES)
    return Acls(stored(access), default)


def _entries(access: bytes) -> list[tuple[int, int, int]] | None:
    if not access.startswith(_VERSION) or len(access) % _ENTRY.size != len(_VERSION):
        return None
    return list(_ENTRY.iter_unpack(access[len(_VERSION) :]))
