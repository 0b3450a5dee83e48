"""The operating system under ``store.py``: fails or ends the process at a call, or keeps a log."""

from __future__ import annotations

import errno
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

COUNTED = frozenset(("open", "write", "fsync", "replace", "unlink", "preadv", "fstat"))


class Faulty:
    """In place of ``os`` in a module. The calls in COUNTED are numbered from 1.

    At call ``at`` it fails with ``error``, or, if that is None, the process is killed; of a write
    the first half is done before.
    """

    def __init__(self, *, at: int = 0, error: int | None = None) -> None:
        self.calls = 0
        self.at = at
        self.error = error

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in COUNTED:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                if name == "write":
                    os.write(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
                if self.error is not None:
                    raise OSError(self.error, os.strerror(self.error))
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call


@dataclass
class File:
    content: bytes = b""
    durable: bytes = b""


@dataclass
class Disk:
    """One directory as a disk would have it if the power went now.

    What was not synced, of files and of names, is there or not, each for itself.
    """

    names: dict[str, File] = field(default_factory=dict)
    durable: dict[str, File] = field(default_factory=dict)
    # Changes of names since the directory was synced: ("link", name, file) and ("unlink", name).
    pending: list[tuple[str, str, File | None]] = field(default_factory=list)

    def cut(self, directory: Path, chance: random.Random) -> None:
        """Write what is left into ``directory``."""
        names = dict(self.durable)
        for kind, name, file in self.pending:
            if chance.random() < 0.5:
                continue
            if kind == "link" and file is not None:
                names[name] = file
            else:
                names.pop(name, None)
        for name, file in names.items():
            (directory / name).write_bytes(self._left(file, chance))

    @staticmethod
    def _left(file: File, chance: random.Random) -> bytes:
        if file.content == file.durable:
            return file.durable
        part = file.content[: chance.randrange(len(file.content) + 1)]
        return chance.choice([file.durable, file.content, part, bytes(len(file.content))])


class Recorder:
    """In place of ``os`` in a module: works, and tells ``Disk`` what was done.

    ``disks()`` replays it: the disk before each call, with how many ``acknowledge()`` were before.
    """

    def __init__(self) -> None:
        self._log: list[tuple[Any, ...]] = []
        self._paths: dict[int, Path] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def acknowledge(self) -> None:
        self._log.append(("acknowledge",))

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        fd = os.open(path, flags, mode)
        self._paths[fd] = path
        if flags & os.O_CREAT:
            self._log.append(("create", path.name, bool(flags & os.O_TRUNC)))
        return fd

    def write(self, fd: int, content: Any) -> int:
        count = os.write(fd, content)
        self._log.append(("write", self._paths[fd].name, bytes(content[:count])))
        return count

    def fsync(self, fd: int) -> None:
        os.fsync(fd)
        path = self._paths[fd]
        self._log.append(("sync directory",) if path.is_dir() else ("sync", path.name))

    def replace(self, old: Path, new: Path) -> None:
        os.replace(old, new)
        self._log.append(("replace", old.name, new.name))

    def unlink(self, path: Path) -> None:
        os.unlink(path)
        self._log.append(("unlink", path.name))

    def disks(self) -> Any:
        disk, acknowledged = Disk(), 0
        for kind, *arguments in self._log:
            yield disk, acknowledged
            if kind == "acknowledge":
                acknowledged += 1
            elif kind == "create":
                name, truncates = arguments
                if name not in disk.names:
                    disk.names[name] = File()
                    disk.pending.append(("link", name, disk.names[name]))
                elif truncates:
                    disk.names[name].content = b""
            elif kind == "write":
                disk.names[arguments[0]].content += arguments[1]
            elif kind == "sync":
                disk.names[arguments[0]].durable = disk.names[arguments[0]].content
            elif kind == "sync directory":
                disk.durable, disk.pending = dict(disk.names), []
            elif kind == "replace":
                file = disk.names.pop(arguments[0])
                disk.names[arguments[1]] = file
                disk.pending += [("link", arguments[1], file), ("unlink", arguments[0], None)]
            else:
                disk.pending.append(("unlink", arguments[0], None))
                del disk.names[arguments[0]]
        yield disk, acknowledged


def weights(step: int) -> dict[str, Any]:
    """A state that tells its step in every element."""
    return {"step": step, "w": np.full(1000, step, np.float32), "name": b"run"}


NO_SPACE, FAILS = errno.ENOSPC, errno.EIO
