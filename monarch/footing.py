"""Directories of our own in places where others write, too: reached through no link of theirs.

In a shared scratch directory anybody may have put a symbolic link where we are about to make ours.
Links of root, and of the user who runs us, are followed: an administrator moves disks by them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from contextlib import suppress
from pathlib import Path

# As the kernel has it.
_MOST_LINKS = 40

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(path: Path) -> int:
    """A descriptor of the directory ``path``; what of it is missing is made, 0700.

    Raises OSError: ELOOP, with whose it is, for somebody else's link on the way.
    """
    to_go = deque(path.absolute().parts[1:])
    here = os.open("/", os.O_PATH | os.O_CLOEXEC)
    links = 0
    try:
        while to_go:
            name = to_go.popleft()
            target = _link(here, name)
            if target is not None:
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                to_go.extendleft(reversed(Path(target).parts))
                continue
            # Where an absolute link leads, "/" comes first, whatever directory we are in.
            below = os.open(name, _STEP | os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
    finally:
        os.close(here)


def _link(directory: int, name: str) -> str | None:
    """Where ``name`` leads if it is a link, which must be ours or root's; made if it is missing."""
    try:
        entry = os.open(name, _STEP, dir_fd=directory)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=directory)
        entry = os.open(name, _STEP, dir_fd=directory)
    try:
        status = os.fstat(entry)
        if not stat.S_ISLNK(status.st_mode):
            return None
        if status.st_uid not in (0, os.geteuid()):
            raise OSError(errno.ELOOP, f"{name!r} is a symbolic link of uid {status.st_uid}")
        # Of the very link that was looked at.
        return os.readlink("", dir_fd=entry)
    finally:
        os.close(entry)


def private_opener(path: str, flags: int) -> int:
    """For ``open``: a file that it makes is closed to others, whatever the umask is."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
