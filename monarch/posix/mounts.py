"""The mount table of this process, and dead mounts in it."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from monarch.errors import Unanswered
from monarch.posix.bounded_calls import BoundedCalls, call_within

# The type of a mount of Monarch in the mount table.
MONARCH_TYPE = "fuse.monarch"


@dataclass(frozen=True, slots=True)
class MountedFileSystem:
    """A line of the mount table: mount point, type, and the device number of its files. ``id`` is
    the kernel's number of the mount, which its open files still have after a lazy unmount.
    ``source`` is what was mounted, by the name that the file system gives. ``user``: the user
    whose process serves it, None except for FUSE."""

    mount_point: Path
    kind: str
    device: str = ""
    id: int = 0
    source: str = ""
    user: int | None = None


def mount_table(text: bytes | None = None) -> list[MountedFileSystem]:
    """The mounts in this mount namespace, oldest first, from ``/proc/self/mountinfo``."""
    table = []
    for line in (Path("/proc/self/mountinfo").read_bytes() if text is None else text).splitlines():
        before, _, after = line.partition(b" - ")
        number, _, device, _, place = before.split(b" ")[:5]
        kind, source, options = (*after.split(b" "), b"", b"")[:3]
        path = Path(_unescaped(place))
        name = _unescaped(source)
        served = re.search(rb"(?:^|,)user_id=(\d+)", options)
        user = int(served[1]) if served is not None else None
        table.append(
            MountedFileSystem(path, kind.decode(), device.decode(), int(number), name, user)
        )
    return table


def _unescaped(name: bytes) -> str:
    """A name of the table, in which blanks and newlines are written \\040 and \\012."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), name))


def is_dead(
    mountpoint: Path | str, *, wait_s: float = 5.0, calls: BoundedCalls | None = None
) -> bool:
    """Whether the daemon of the FUSE mount has ended. A mount that hangs is not dead. A caller that
    asks again and again gives ``calls``, so that a mount that hangs takes one thread."""
    try:
        # Not stat, which the kernel may answer from its cache.
        if calls is None:
            call_within(wait_s, os.statvfs, mountpoint)
        else:
            calls.call(os.statvfs, mountpoint)
    except (OSError, Unanswered) as error:
        # A request under way when the daemon ends is aborted; later ones find no connection.
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False
