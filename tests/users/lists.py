"""Access control lists as extended attributes (linux/posix_acl_xattr.h)."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping
from contextlib import suppress

NAMES = ("system.posix_acl_access", "system.posix_acl_default")

_OWNER, _USER, _GROUP_OWNER, _GROUP, _MASK, _OTHERS = 1, 2, 4, 8, 16, 32
_LETTERS = {1: "u:", 2: "u:", 4: "g:", 8: "g:", 16: "m:", 32: "o:"}
_NO_ID = 2**32 - 1


def packed(
    owner: int,
    group: int,
    mask: int,
    others: int,
    users: Mapping[int, int],
    groups: Mapping[int, int],
) -> bytes:
    """A list with named ``users`` and ``groups``. Permissions are the bits rwx."""
    entries = [
        (_OWNER, owner, _NO_ID),
        *((_USER, bits, number) for number, bits in sorted(users.items())),
        (_GROUP_OWNER, group, _NO_ID),
        *((_GROUP, bits, number) for number, bits in sorted(groups.items())),
        (_MASK, mask, _NO_ID),
        (_OTHERS, others, _NO_ID),
    ]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def text_of(value: bytes) -> str:
    """A list as text, as setfacl takes it."""
    words = []
    for tag, bits, number in struct.iter_unpack("<HHI", value[4:]):
        rights = "".join(
            letter if bits & bit else "-" for letter, bit in (("r", 4), ("w", 2), ("x", 1))
        )
        words.append(f"{_LETTERS[tag]}{'' if number == _NO_ID else number}:{rights}")
    return ",".join(words) or "none"


def lists_at(fd: int, name: str) -> tuple[bytes, bytes]:
    """Both lists of an entry of an open directory, which is no symbolic link; empty if none."""
    access, default = (_read(f"/proc/self/fd/{fd}/{name}", each) for each in NAMES)
    return access, default


def _read(path: str, name: str) -> bytes:
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
        return b""


def set_lists(fd: int, name: str, lists: tuple[bytes, bytes], *, anew: bool = False) -> None:
    """Sets those that are not empty; with ``anew`` the others are removed."""
    path = f"/proc/self/fd/{fd}/{name}"
    for each, value in zip(NAMES, lists, strict=True):
        if value:
            os.setxattr(path, each, value, follow_symlinks=False)
        elif anew:
            with suppress(OSError):
                os.removexattr(path, each, follow_symlinks=False)
