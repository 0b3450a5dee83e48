"""The kernel's reports of opens, in the order of the opens (inotify(7)).

This module is also a program that sets watches: a daemon must not access its own mount, not even in
a thread, so another process sets the watches of the daemon's descriptor. The program is given the
number of the descriptor, and on standard input the paths of directories, each ended by a zero byte.
It writes the numbers of the watches to standard output, 32 bits each, up to the first directory
that cannot be watched; its exit code is then the errno. It needs the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

_IN_OPEN = 0x20
_IN_DONT_FOLLOW = 0x02000000
_IN_ONLYDIR = 0x01000000
# The kernel queues at most 16,384 events (fs.inotify.max_queued_events) of at most 272 bytes; one
# read of the queue is seldom larger than this.
_READ_BYTES = 1 << 20
_WATCHES_MAX = Path("/proc/sys/fs/inotify/max_user_watches")


class OpenEvents:
    """A queue of the opens of files in watched directories. Raises OSError without a free
    descriptor, and EMFILE above fs.inotify.max_user_instances."""

    def __init__(self) -> None:
        self._fd = _checked(_libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def fileno(self) -> int:
        return self._fd

    def setter(self) -> list[str]:
        """The command that sets watches; it must inherit the descriptor."""
        return [sys.executable, "-I", "-S", __file__, str(self._fd)]

    def read(self) -> bytes:
        """The oldest events of the queue as ``struct inotify_event``; empty if there are none."""
        try:
            return os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Ends all watches."""
        os.close(self._fd)


def most_watches() -> int:
    """The number of watches that all processes of this user may have; 0 if it is unknown."""
    try:
        return int(_WATCHES_MAX.read_text())
    except (OSError, ValueError):
        return 0


def watch(fd: int, directory: bytes) -> int:
    """Adds a watch of the opens in a directory; returns its number. Raises OSError: ENOSPC above
    fs.inotify.max_user_watches."""
    mask = _IN_OPEN | _IN_ONLYDIR | _IN_DONT_FOLLOW
    return _checked(_libc().inotify_add_watch(fd, directory, mask))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _main(arguments: Sequence[str]) -> int:
    numbers, code = array("i"), 0
    for directory in sys.stdin.buffer.read().split(b"\0")[:-1]:
        try:
            numbers.append(watch(int(arguments[0]), directory))
        except OSError as error:
            code = error.errno or 1
            break
    sys.stdout.buffer.write(numbers.tobytes())
    return code


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1:]))
