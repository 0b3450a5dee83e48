"""Files and directories that a process makes under a name that only it uses, and removes at its
end. Those of processes that were killed are removed by others. A lock shows which these are: the
kernel releases it when the process dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from monarch.posix.files import closing_fd


@contextmanager
def unfinished_file(directory: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file in a directory, which is removed at the end of the block unless it was renamed.
    Those of killed processes are removed first. Raises OSError."""
    for left in directory.glob(".monarch.*.part"):
        remove_if_left(left, os.O_RDWR | os.O_NONBLOCK, os.unlink)
    part = directory / f".monarch.{os.getpid()}.part"
    with _locked_file(part) as file:
        try:
            yield part, file
        finally:
            part.unlink(missing_ok=True)


def _locked_file(part: Path) -> BinaryIO:
    """Makes a file. In a directory of all users another one may have made a link of this name: it
    is not followed. Raises OSError."""
    while True:
        part.unlink(missing_ok=True)
        file = part.open("xb")
        if is_locked(part, file.fileno()):
            return file
        file.close()


def is_locked(path: Path, fd: int) -> bool:
    """Locks what this process has just made, and has open as ``fd``. False if another process has
    removed it before, as that of a killed one."""
    # Some file systems have no locks: there it stays if this process is killed.
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX)
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    return False


def remove_if_left(path: Path, flags: int, remove: Callable[[Path], object]) -> None:
    """Removes what another process of this user has made if that process was killed. ``flags``
    open it."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(OSError), closing_fd(os.open(path, flags)) as fd:
        if os.fstat(fd).st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its process may have ended meanwhile, and another one may have made this name anew.
            if os.path.samestat(os.fstat(fd), os.lstat(path)):
                remove(path)
