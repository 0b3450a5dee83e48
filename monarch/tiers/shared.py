"""The copies in a tier path of all mounts, served or not, and their removal."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from monarch.posix.file_lock import Lock
from monarch.tiers.contents import DIRECTORY, Contents
from monarch.tiers.ownership import PRIVATE


@dataclass(frozen=True, slots=True)
class SharedCopies:
    """The copies of one mount; ``source`` and ``state`` are empty if an earlier version made them.

    ``used_ns``: when a mount last opened them, in ns of the wall clock.
    """

    directory: str
    source: str
    state: str
    files: int
    bytes: int
    used_ns: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def shared_copies(tier: Path) -> Iterator[SharedCopies]:
    """The copies of each mount in the tier at this path. Raises OSError."""
    private = tier / PRIVATE
    names = sorted(os.listdir(private)) if private.is_dir() else []
    for path in [private, *(private / name for name in names)]:
        try:
            fd = os.open(path, DIRECTORY)
        except OSError:
            continue
        try:
            note = _note(fd)
            if note is None or os.fstat(fd).st_uid != os.geteuid():
                continue
            files = nbytes = used_ns = 0
            for name in _copies(fd):
                with suppress(FileNotFoundError):
                    files += 1
                    nbytes += os.stat(name, dir_fd=fd, follow_symlinks=False).st_size
            with suppress(FileNotFoundError):
                used_ns = os.stat("lock", dir_fd=fd, follow_symlinks=False).st_mtime_ns
            source, state = str(note.get("source", "")), str(note.get("state", ""))
            yield SharedCopies(os.fspath(path), source, state, files, nbytes, used_ns)
        finally:
            os.close(fd)


def other_mounts(own: Path) -> list[tuple[str, str]]:
    """Source and state directory of the other mounts with copies in a tier path.

    ``own`` is the directory of this mount there. Both are empty for an earlier version's copies.
    """
    found = []
    with suppress(OSError):
        private = own.parent
        for path in [private, *(private / name for name in sorted(os.listdir(private)))]:
            if path != own and (note := _note_at(path)) is not None:
                found.append((str(note.get("source", "")), str(note.get("state", ""))))
    return found


def other_sources(own: Path) -> list[str]:
    """The sources of ``other_mounts``, each once, for a person."""
    return sorted({source or "another source" for source, _ in other_mounts(own)})


def _note_at(path: Path) -> dict[str, Any] | None:
    try:
        fd = os.open(path, DIRECTORY)
    except OSError:
        return None
    try:
        return _note(fd)
    finally:
        os.close(fd)


def remove_copies(held: SharedCopies) -> None:
    """Removes the files that Monarch has made there, recognised by their names, and no others.

    Raises LockedError if a daemon uses them, and OSError.
    """
    fd = os.open(held.directory, DIRECTORY)
    try:
        lock = Lock(fd, f"{held.directory!r}", "monarch evict")
        try:
            for name in [*_copies(fd), *Contents(fd).staged_copies()]:
                os.unlink(name, dir_fd=fd)
            for generation in Contents(fd).generations():
                top = Contents.PREFIX + generation
                for bucket in range(256):
                    _rmdir(fd, f"{top}/{bucket:02x}")
                _rmdir(fd, top)
            _rmdir(fd, "stage")
            for name in ("tier.part", "tier.json", "lock"):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
        finally:
            lock.release()
    finally:
        os.close(fd)
    if Path(held.directory).name != PRIVATE:
        with suppress(OSError):
            os.rmdir(held.directory)


def _copies(fd: int) -> Iterator[str]:
    contents = Contents(fd)
    for generation in contents.generations():
        yield from contents.copies(generation)


def _rmdir(fd: int, name: str) -> None:
    try:
        os.rmdir(name, dir_fd=fd)
    except OSError as error:
        # A file of another program stays, and so does its directory.
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.ENOTDIR):
            raise


def _note(fd: int) -> dict[str, Any] | None:
    """The contents of ``tier.json``; None if there are no copies of a mount."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        note = os.open("tier.json", flags, dir_fd=fd)
        with open(note, "rb") as file:
            if not stat.S_ISREG(os.fstat(note).st_mode):
                return None
            told = json.load(file)
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None
