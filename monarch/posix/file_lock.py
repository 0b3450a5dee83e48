"""The lock that keeps a second daemon out of a tier or a state directory."""

from __future__ import annotations

import fcntl
import json
import os

from monarch.errors import LockedError


class Lock:
    """An flock on ``lock`` in a directory; the file names its holder.

    The kernel releases it when the holder dies, so the next daemon gets the lock of a dead one.
    Raises LockedError with the holder's pid and mount point; ``instead`` is a remedy other than
    unmounting that mount.
    """

    def __init__(self, directory_fd: int, what: str, owner: str, *, instead: str = "") -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open("lock", flags, 0o600, dir_fd=directory_fd)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.pread(self._fd, 8192, 0))
            os.close(self._fd)
            raise LockedError(
                f"{what} is in use by {holder}",
                hint="unmount that mount first" + (f", or {instead}" if instead else ""),
            ) from None
        note = json.dumps({"pid": os.getpid(), "mountpoint": owner}).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, note, 0)

    def release(self) -> None:
        """May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _holder(note: bytes) -> str:
    try:
        raw = json.loads(note)
        return f"pid {raw['pid']} ({raw['mountpoint']})"
    except (ValueError, KeyError, TypeError):
        return "another daemon"
