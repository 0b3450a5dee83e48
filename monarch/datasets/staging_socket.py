"""How the jobs of a user find the broker of a staging area, and how the first one starts it.

The socket is in a private directory. A lock says that a broker runs: the job that gets it makes the
socket, which can be connected to from then on, and gives both to the broker. So the lock is free
when the broker has ended, in whatever way.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from monarch.datasets.staging_messages import MOST_JOBS, peer_of
from monarch.errors import MonarchError
from monarch.posix.files import closing_fd, status_at
from monarch.posix.private_directory import open_private

# The time in which a broker must be reached, in seconds.
_PATIENCE_S = 30.0
_PAUSE_S = 0.01
# The time that a broker waits for a new job after the last one has left, in seconds.
LINGER_S = 10.0

# Its first argument is the directory of the package.
_BROKER = "monarch.datasets.staging_broker"
_PROGRAM = f"import sys; sys.path.insert(0, sys.argv[1]); from {_BROKER} import main; main()"


def default_directory() -> Path:
    """The same in all jobs of a user, whatever their environment."""
    return Path(f"/tmp/monarch-staging-{os.geteuid()}")


def connect(directory_fd: int, directory: Path, name: str) -> socket.socket:
    """A connection to the broker of the area ``name`` in ``directory_fd``. The broker is started
    if none runs. ``directory`` is the path of the directory, for messages.

    Raises MonarchError if the socket belongs to another user, or if there is no connection within
    30 seconds, and OSError.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # It waits if many jobs connect at once.
            connection.settimeout(_PATIENCE_S)
            # A long path does not fit into an address.
            connection.connect(f"/proc/self/fd/{directory_fd}/{name}")
            if peer_of(connection)[1] == os.geteuid():
                return connection
            raise MonarchError(f"the staging area {name!r} in {directory} is of another user")
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            # The last one: the queue of connections is full.
            connection.close()
        except BaseException:
            connection.close()
            raise
        _start(directory_fd, directory, name)
        if time.monotonic() > deadline:
            raise MonarchError(
                f"the broker of the staging area {name!r} in {directory} cannot be reached",
                hint="end the process that has the lock, or use another name",
            )
        time.sleep(_PAUSE_S)


@contextmanager
def private_directory(directory: Path) -> Iterator[int]:
    """A descriptor of the directory, which is created if it is missing. Raises MonarchError if the
    directory belongs to another user or is open to others, and OSError."""
    with suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(directory, flags)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise _not_private(directory) from error
    with closing_fd(fd):
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise _not_private(directory)
        yield fd


def _not_private(directory: Path) -> MonarchError:
    return MonarchError(
        f"{directory} is not a directory of this user with mode 0700",
        hint="give StagingArea another directory",
    )


def _start(directory_fd: int, directory: Path, name: str) -> None:
    """Starts a broker, unless one runs or another job starts one. Raises OSError."""
    lock = open_private(f"{name}.lock", os.O_RDWR | os.O_CREAT, dir_fd=directory_fd)
    with closing_fd(lock):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        named = status_at(directory_fd, f"{name}.lock")
        if named is None or named.st_ino != os.fstat(lock).st_ino:
            # A broker that ended has removed it.
            return
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory_fd)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"/proc/self/fd/{directory_fd}/{name}")
            os.chmod(name, 0o600, dir_fd=directory_fd)
            listener.listen(MOST_JOBS)
            _spawn((listener.fileno(), lock, directory_fd), directory, name)


def _spawn(fds: tuple[int, int, int], directory: Path, name: str) -> None:
    """The broker is no child of this job, and no signal of its terminal reaches it. It gets the
    descriptors of the listening socket, the lock and the directory. Lists of processes show the
    path."""
    package = str(Path(__file__).parents[2])
    arguments = (package, *map(str, fds), str(directory.absolute()), name, str(LINGER_S))
    started = subprocess.run(
        [sys.executable, "-I", "-c", _PROGRAM, *arguments],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=fds,
        start_new_session=True,
        cwd="/",
    )
    if started.returncode:
        raise MonarchError(
            f"the broker of the staging area {name!r} cannot be started: {sys.executable} failed",
            hint="check that this program is a Python interpreter with monarch",
        )
