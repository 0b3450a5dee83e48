"""System calls that users make, and the process that makes them.

The kernel judges a process by its effective ids and its capabilities. One process is forked. It
gets one call after the other over a pipe and takes the ids of a user for each, which removes all
capabilities.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROOT = 0
# The group that all ordinary users are in. Beside it each has one of its own, with its own number.
SHARED = 2000

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Call:
    """A call ``name`` of the process of ``user`` with ``arguments``, paths first.

    Paths are relative to a directory that is given when the call is made.
    """

    user: int
    name: str
    arguments: tuple[Any, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that the call is about, the one that it makes or replaces last."""
        count = 2 if self.name in ("rename", "link") else 1
        return self.arguments[:count]


def _create(at: int, path: str, mode: int, content: str) -> None:
    _put(os.open(path, _CREATE, mode, dir_fd=at), content)


def _save(at: int, path: str, mode: int, content: str) -> None:
    _put(os.open(path, _WRITE | os.O_CREAT | os.O_TRUNC, mode, dir_fd=at), content)


def _write(at: int, path: str, content: str) -> None:
    _put(os.open(path, _WRITE | os.O_TRUNC, dir_fd=at), content)


def _append(at: int, path: str, content: str) -> None:
    _put(os.open(path, _WRITE | os.O_APPEND, dir_fd=at), content)


def _put(fd: int, content: str) -> None:
    try:
        os.write(fd, content.encode())
    finally:
        os.close(fd)


def _read(at: int, path: str) -> str:
    fd = os.open(path, _READ, dir_fd=at)
    try:
        return os.read(fd, 1 << 16).decode()
    finally:
        os.close(fd)


def _rename(at: int, path: str, to: str) -> None:
    os.rename(path, to, src_dir_fd=at, dst_dir_fd=at)


def _link(at: int, path: str, to: str) -> None:
    os.link(path, to, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)


def _chown(at: int, path: str, uid: int, gid: int) -> None:
    os.chown(path, uid, gid, dir_fd=at, follow_symlinks=False)


def _set_list(at: int, path: str, name: str, value: str) -> None:
    # The present directory is that of ``at``, and no call takes both.
    os.setxattr(path, name, bytes.fromhex(value), follow_symlinks=False)


def _remove_list(at: int, path: str, name: str) -> None:
    os.removexattr(path, name, follow_symlinks=False)


_CALLS: Mapping[str, Callable[..., str | None]] = {
    "mkdir": lambda at, path, mode: os.mkdir(path, mode, dir_fd=at),
    "create": _create,
    "save": _save,
    "write": _write,
    "append": _append,
    "read": _read,
    "rename": _rename,
    "link": _link,
    "symlink": lambda at, path, target: os.symlink(target, path, dir_fd=at),
    "unlink": lambda at, path: os.unlink(path, dir_fd=at),
    "rmdir": lambda at, path: os.rmdir(path, dir_fd=at),
    "mkfifo": lambda at, path, mode: os.mkfifo(path, mode, dir_fd=at),
    "chmod": lambda at, path, mode: os.chmod(path, mode, dir_fd=at),
    "chown": _chown,
    "setfacl": _set_list,
    "delfacl": _remove_list,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call: the name of its error, ``""`` if there was none; what was read."""

    error: str = ""
    content: str | None = None


def perform(at: int, name: str, arguments: Sequence[Any]) -> Outcome:
    """Make a call in the directory of the descriptor ``at``, which is the present one, as the user
    of this process."""
    try:
        content = _CALLS[name](at, *arguments)
    except OSError as error:
        return Outcome(errno.errorcode[error.errno or errno.EIO])
    except UnicodeDecodeError:
        return Outcome("EILSEQ")
    return Outcome("", content)


class Actors:
    """A process that makes calls as any user in the ``directories``, by name.

    It is given descriptors of these directories, so users need no right in those above.
    """

    def __init__(self, directories: Mapping[str, str]) -> None:
        ask, answer = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                os.close(ask[1])
                os.close(answer[0])
                _serve(directories, ask[0], answer[1])
                code = 0
            finally:
                os._exit(code)
        os.close(ask[0])
        os.close(answer[1])
        self._to = os.fdopen(ask[1], "w")
        self._from = os.fdopen(answer[0])

    def __call__(self, directory: str, below: str, call: Call) -> Outcome:
        """Make ``call`` in ``below`` of one of the directories."""
        self._to.write(json.dumps([directory, below, call.user, call.name, call.arguments]) + "\n")
        self._to.flush()
        return Outcome(*json.loads(self._from.readline()))

    def close(self) -> None:
        self._to.close()
        self._from.close()
        os.waitpid(self._pid, 0)


def _serve(directories: Mapping[str, str], ask: int, answer: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    opened = {name: os.open(path, os.O_PATH) for name, path in directories.items()}
    os.umask(0)
    with os.fdopen(ask) as lines, os.fdopen(answer, "w") as answers:
        for line in lines:
            directory, below, user, name, arguments = json.loads(line)
            at = os.open(below, os.O_PATH | os.O_DIRECTORY, dir_fd=opened[directory])
            os.fchdir(at)
            _become(user)
            try:
                outcome = perform(at, name, arguments)
            finally:
                os.close(at)
                _become(ROOT)
            answers.write(json.dumps([outcome.error, outcome.content]) + "\n")
            answers.flush()


def _become(user: int) -> None:
    if user == ROOT:
        os.seteuid(ROOT)
    os.setgroups([] if user == ROOT else [SHARED])
    os.setegid(user)
    if user != ROOT:
        os.seteuid(user)
