"""Private directories of this process in places where other users may write, and the lock that
keeps a second daemon out of one.

In a shared scratch directory any user may have put a symbolic link at the path of our directory.
Links of root, and of the user of this process, are followed: administrators move disks by them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections import deque
from contextlib import suppress
from pathlib import Path

from monarch.errors import LockedError
from monarch.posix.files import closing_fd

# The limit of the kernel.
_MOST_LINKS = 40

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(path: Path) -> int:
    """A descriptor of the directory ``path``; its missing components are created with mode 0700.
    Raises OSError: ELOOP, naming the owner, for a link of another user in the path."""
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
            # The first component of an absolute link is "/", which os.open takes as absolute.
            below = os.open(name, _STEP | os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
    finally:
        os.close(here)


def _link(directory: int, name: str) -> str | None:
    """The target of ``name`` if it is a link of ours or of root; creates a missing directory."""
    try:
        entry = os.open(name, _STEP, dir_fd=directory)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=directory)
        entry = os.open(name, _STEP, dir_fd=directory)
    with closing_fd(entry):
        status = os.fstat(entry)
        if not stat.S_ISLNK(status.st_mode):
            return None
        if status.st_uid not in (0, os.geteuid()):
            raise OSError(errno.ELOOP, f"{name!r} is a symbolic link of uid {status.st_uid}")
        # Reads the link that was checked, even if its name has changed since.
        return os.readlink("", dir_fd=entry)


def open_private(path: str | Path, flags: int, *, dir_fd: int | None = None) -> int:
    """A descriptor of a regular file of this process. The mode of a new file is 0600, whatever the
    umask.

    A link in the place of the file is not followed, and a fifo is not waited for. Raises OSError:
    ELOOP for a link, EISDIR for a directory, and EINVAL if another kind of file is there."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _not_a_file(path) from error
        raise
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        os.close(fd)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        raise _not_a_file(path)
    return fd


def _not_a_file(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def private_opener(path: str, flags: int) -> int:
    """``open_private`` as an opener for ``open``."""
    return open_private(path, flags)


def read_private(path: Path) -> bytes:
    """The content of a file that ``open_private`` opens. Raises OSError."""
    with open(path, "rb", opener=private_opener) as file:
        return file.read()


def replace_private(path: Path, content: str | bytes) -> None:
    """Replaces a file, or makes it, with mode 0600 and ``content``, text in ASCII. After a crash or
    a power cut the file is the old or the new one, and complete. Raises OSError."""
    staged = path.with_name(f"{path.name}.part")
    raw = content.encode("ascii") if isinstance(content, str) else content
    try:
        with open(staged, "wb", opener=private_opener) as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        staged.rename(path)
    except OSError:
        with suppress(OSError):
            staged.unlink()
        raise


class Lock:
    """An flock on ``lock`` in a directory; the file names its holder.

    The kernel releases it when the holder dies, so the next daemon gets the lock of a dead one.
    Raises LockedError with the holder's pid and mount point; ``instead`` is a remedy other than
    unmounting that mount.
    """

    def __init__(self, directory_fd: int, what: str, owner: str, *, instead: str = "") -> None:
        self._fd = open_private("lock", os.O_RDWR | os.O_CREAT, dir_fd=directory_fd)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.pread(self._fd, 8192, 0))
            os.close(self._fd)
            raise LockedError(
                f"{what} is in use by {holder}",
                hint="unmount that mount first" + (f", or {instead}" if instead else ""),
            ) from None
        node = os.uname().nodename
        note = json.dumps({"pid": os.getpid(), "mountpoint": owner, "node": node}).encode()
        try:
            # Over all of an earlier note, in its block: a full disk has no other.
            os.pwrite(self._fd, note.ljust(os.fstat(self._fd).st_size), 0)
        except OSError as error:
            # The lock is held all the same: a full disk, or quota, must not prevent a mount.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                os.close(self._fd)
                raise
            # Rather no name than that of an earlier holder.
            with suppress(OSError):
                os.ftruncate(self._fd, 0)

    def release(self) -> None:
        """May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _holder(note: bytes) -> str:
    try:
        raw = json.loads(note)
        # Of a directory on a file system that nodes share.
        is_elsewhere = "node" in raw and raw["node"] != os.uname().nodename
        where = f" on node {raw['node']}" if is_elsewhere else ""
        return f"pid {raw['pid']}{where} ({raw['mountpoint']})"
    except (ValueError, KeyError, TypeError):
        return "another daemon"
