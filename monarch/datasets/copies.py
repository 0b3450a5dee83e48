"""The copies of a mount in its tiers, for a program that may open them: the daemon's user, or root.

A file of a mount without passthrough is read from pages of FUSE, which costs twice the time of the
copy itself. So ``get_many`` asks the mount, at most once a second, where the copies are. For each
file it takes the attributes and the rights from the mount, and the version of the copy from the
daemon's records; the seal of the copy shows that it is of this version (tiers/contents.py). It
opens the file itself if anything differs. Nothing is kept for a file.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from array import array
from contextlib import suppress

from monarch.posix.mounts import MONARCH_TYPE, mount_table
from monarch.types import XATTR_COPIES, XATTR_STATUS

# The interval in which the mount is asked again, in seconds.
_ASK_S = 1.0
_MOST_PLACES = 255
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Opened:
    """The directories with the copies of a mount, and their records. They are closed with the
    object. ``table`` has their numbers, as _copies.h."""

    def __init__(self, value: bytes, directory: int) -> None:
        """``value`` is that of the attribute: ``records`` is the path of the records, ``term`` that
        of the copies that need no check, ``acls`` whether files may have access control lists, and
        ``directories`` the path of the copies of each place of a record. Raises OSError, and
        ValueError for another value."""
        self._fds: list[int] = []
        self.value = value
        try:
            found = json.loads(value)
            head = (os.fstat(directory).st_dev, bool(found["acls"]), int(found["term"]))
            paths = {int(place): str(path) for place, path in found["directories"].items()}
            if not all(0 < place <= _MOST_PLACES for place in paths):
                raise ValueError("no place of a record")
            places = [-1] * max(paths, default=0)
            records = self._open(str(found["records"]), _FILE)
            if not stat.S_ISREG(os.fstat(records).st_mode):
                raise ValueError("no file of records")
            for place, path in paths.items():
                places[place - 1] = self._open(path, _DIRECTORY)
            # The files themselves need one beside these.
            os.close(os.dup(directory))
            self.table = array("q", (*head, records, *places))
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError) as error:
            raise ValueError("another value") from error

    def _open(self, path: str, flags: int) -> int:
        fd = os.open(path, flags)
        self._fds.append(fd)
        return fd

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)


class Copies:
    """The copies of the mount that an open directory is in, as this process may use them now."""

    def __init__(self) -> None:
        self._opened: Opened | None = None
        self._asked_s = -_ASK_S
        self._asked_by: tuple[object, ...] = ()

    def now(self, directory: int) -> Opened | None:
        """None if all files must be opened themselves. The result must be kept as long as its
        descriptors are used."""
        by, now_s = (os.geteuid(), os.getegid(), os.getgroups()), time.monotonic()
        if by != self._asked_by or now_s - self._asked_s >= _ASK_S:
            # Other threads must not use the last answer while the mount is asked.
            opened, self._opened = self._opened, None
            self._opened = _asked(directory, opened if by == self._asked_by else None)
            self._asked_by, self._asked_s = by, now_s
        return self._opened


def _value(directory: int) -> bytes:
    """The value of the attribute. Raises OSError if there is none, or if it is not given by a
    daemon of root or of this user: on other file systems the owner of the directory may have set
    it, and a program of another user may serve any value."""
    value = os.getxattr(directory, XATTR_COPIES)
    number = os.fstat(directory).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    found = {(each.kind, each.user) for each in mount_table() if each.device == device}
    if not found or not found <= {(MONARCH_TYPE, 0), (MONARCH_TYPE, os.geteuid())}:
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
    return value


def reads_ahead(directory: int) -> bool:
    """Whether ``directory`` is of a mount with ``open: none``. There an open waits for nothing, and
    the kernel reads a file without a thread that waits for it, if it is asked to."""
    with suppress(OSError, ValueError, AttributeError):
        number = os.fstat(directory).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        for each in mount_table():
            if each.device == device and each.kind == MONARCH_TYPE:
                status = json.loads(os.getxattr(each.mount_point, XATTR_STATUS))
                return bool(status.get("open") == "none")
    return False


def _asked(directory: int, opened: Opened | None) -> Opened | None:
    """Asks the mount; ``opened`` is its last answer."""
    with suppress(OSError, ValueError):
        value = _value(directory)
        return opened if opened is not None and opened.value == value else Opened(value, directory)
    return None
