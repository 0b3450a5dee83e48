"""The limits of names, links and attributes, as local file systems have them."""

from __future__ import annotations

import errno

from monarch.errors import Refused

# As renameat2(2) has it.
RENAME_NOREPLACE = 1

NAME_MAX = 255
# As ext4 has it: a link that the source would refuse later is refused now.
LINK_MAX = 65000
# Bytes of a symbolic link's target: a path without its NUL.
TARGET_MAX = 4095
# Bytes of the names and values of one inode's extended attributes, which are kept in memory: twice
# the largest value that Linux allows.
XATTRS_MAX = 128 << 10

DOTS = (b".", b"..")


def require_name(name: bytes, of_dot: int, of_dot_dot: int) -> None:
    """Raises Refused if an entry cannot have the name; for ``.`` and ``..`` with the errors that
    the operation gives for these."""
    if not name:
        raise Refused(errno.ENOENT)
    if name in DOTS:
        raise Refused(of_dot if name == b"." else of_dot_dot)
    if b"/" in name or b"\0" in name:
        raise Refused(errno.EINVAL)
    if len(name) > NAME_MAX:
        raise Refused(errno.ENAMETOOLONG)


def require_target(target: bytes) -> None:
    """Raises Refused if a symbolic link cannot have the target."""
    if not target:
        raise Refused(errno.ENOENT)
    if b"\0" in target:
        raise Refused(errno.EINVAL)
    if len(target) > TARGET_MAX:
        raise Refused(errno.ENAMETOOLONG)
