"""Other processes: their sessions, the process of a thread, and its open descriptors."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from monarch.posix.files import closing_fd

_MOST_BYTES = 1 << 16
_MOST_KNOWN = 1024
_WRITTEN = re.compile(r"^wchar: (\d+)$", re.MULTILINE)
_OWN_COUNTS = "/proc/self/io"


class Sessions:
    """The sessions that processes belong to: one job has one for each of its commands."""

    def __init__(self) -> None:
        # Of the processes that were asked for last.
        self._known: dict[int, int] = {}

    def of(self, pid: int) -> int:
        """The session of a process; 0 if it is unknown, or the process has ended."""
        if pid <= 0:
            return 0
        session = _session(pid)
        self.saw(pid, session)
        return session

    def saw(self, pid: int, session: int) -> None:
        """Records that a process was in a session; 0: one of them is unknown."""
        if pid and session and self._known.get(pid) != session:
            if len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[pid] = session

    def over(self, sessions: Collection[int]) -> set[int]:
        """The sessions without a process that runs. The first process of each, and those that are
        known, are checked before all others: these are read once for all sessions."""
        over = {session for session in sessions if not _is_in(session, session)}
        for pid, session in list(self._known.items()):
            if session in over:
                if _is_in(pid, session):
                    over.remove(session)
                else:
                    del self._known[pid]
        others = [int(name) for name in os.listdir("/proc") if name.isdecimal()] if over else []
        for pid in others:
            session = _session(pid)
            if session in over and _is_in(pid, session):
                over.remove(session)
                self.saw(pid, session)
        return over


def _session(pid: int) -> int:
    """The session of a process; 0 if it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _is_in(pid: int, session: int) -> bool:
    """Whether a process of the session runs under this number. A zombie does not run."""
    if _session(pid) != session:
        return False
    # The name of the command is in parentheses and may contain parentheses.
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:1] != [b"Z"]


def process_space() -> str:
    """Where a number and a start time belong to the same process as here: in these namespaces,
    until the machine is booted again. Raises OSError."""
    return f"{boot_id()} {namespaces()}"


def namespaces() -> str:
    """The namespace of process numbers, and that of times, which shifts the start times of
    processes. Raises OSError."""
    found = os.readlink("/proc/self/ns/pid")
    # Linux before 5.6 has no namespaces of times.
    with suppress(FileNotFoundError):
        found += " " + os.readlink("/proc/self/ns/time")
    return found


def boot_id() -> str:
    """The present start of the machine. Raises OSError."""
    return _read_all("/proc/sys/kernel/random/boot_id").decode().strip()


def written_by(pid: int, before: int | None) -> int | None:
    """The bytes that a process has written to files and sockets (proc(5), ``io``); ``before`` if it
    has ended. None if the kernel does not count them, or not for this user."""
    try:
        counts = Path(f"/proc/{pid}/io").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return before if Path(_OWN_COUNTS).exists() else None
    except OSError:
        return None
    found = _WRITTEN.search(counts)
    return None if found is None else int(found[1])


def process_of(thread: int) -> int:
    """The number of the process that a thread belongs to; 0 if it cannot be seen. Raises
    ProcessLookupError if the thread has ended."""
    if thread <= 0:
        return 0
    text = _read(f"/proc/{thread}/status")
    if not text:
        # /proc may hide the processes of other users.
        with suppress(PermissionError):
            os.getsid(thread)
    return int(_field(text, b"Tgid") or 0)


def user_of(process: int) -> int | None:
    """The user with whose rights a process opens files; None if it has ended. The owner of its
    directory in /proc may be root instead, as it chooses."""
    status = _read(f"/proc/{process}/status")
    numbers = _field(status, b"Uid").split()
    is_over = len(numbers) != 4 or _field(status, b"State").startswith(b"Z")
    return None if is_over else int(numbers[3])


def runs_any_of(user: int) -> bool:
    """Whether a process runs with the rights of a user."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return any(_owner(number) == user for number in numbers) or any(
        user_of(number) == user for number in numbers
    )


def _owner(process: int) -> int | None:
    try:
        return os.stat(f"/proc/{process}").st_uid
    except OSError:
        return None


def link_of(process: int, descriptor: int) -> str:
    """The path of the file that a process has open as ``descriptor``. Raises OSError:
    FileNotFoundError if it is closed; PermissionError if this process may not see it.

    Not from ``fdinfo``, whose length the process determines: it has a line for each file lock, and
    for each watch of inotify, and the kernel makes all of them for each read.
    """
    return os.readlink(f"/proc/{process}/fd/{descriptor}")


def _field(text: bytes, name: bytes) -> bytes:
    for line in text.split(b"\n"):
        key, _, value = line.partition(b":")
        if key == name:
            return value.strip()
    return b""


def _read(path: str) -> bytes:
    try:
        return _read_all(path)
    except OSError:
        return b""


def _read_all(path: str) -> bytes:
    with closing_fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        return os.read(fd, _MOST_BYTES)
