"""The directories of the mounts beneath a tier's path: each mount has one, and uses no other.

Here the directory of a mount is found, and those of other mounts are listed and removed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.errors import TierError
from monarch.posix import failpoints
from monarch.posix.files import closing_fd, status_at
from monarch.posix.private_directory import Lock, open_directory, read_private
from monarch.tiers.contents import DIRECTORY, PARTS, Contents, opened_in, part_of

log = logging.getLogger(__name__)

PRIVATE = "monarch"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Owner:
    """The mount that owns the copies of a tier. Its directory is the one whose id the mount's
    records know, else the one named ``directory``."""

    directory: str
    mountpoint: str = ""
    source: str = ""
    state: str = ""
    known: frozenset[str] = frozenset()


def own_directory(path: Path, owner: Owner) -> Path:
    """Where the tier at ``path`` has, or will have, the copies of a mount; changes nothing."""
    try:
        shared = os.open(path / PRIVATE, DIRECTORY)
    except OSError:
        return path / PRIVATE / owner.directory
    with closing_fd(shared):
        return path / PRIVATE / _own_name(shared, owner)


def _own_name(shared: int, owner: Owner) -> str:
    if os.fstat(shared).st_uid != os.geteuid() or status_at(shared, owner.directory):
        return owner.directory
    # The state directory, whose path makes the name, may have been moved.
    for name in sorted(os.listdir(shared)):
        with suppress(OSError), closing_fd(os.open(name, DIRECTORY, dir_fd=shared)) as directory:
            note = _read_note(directory)
            if note is not None and str(note.get("id")) in owner.known:
                return name
    return owner.directory


def _read_note(directory: int) -> dict[str, Any] | None:
    """The contents of ``tier.json``; None if there are no copies of a mount."""
    try:
        with open(opened_in(directory, "tier.json", os.O_RDONLY), "rb") as file:
            note = json.load(file)
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def require_known_version(path: Path, owner: Owner) -> None:
    """Raises TierError if a newer version has written the tier at ``path``; changes nothing."""
    for own in (own_directory(path, owner), path / PRIVATE):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            _id_of(json.loads(read_private(own / "tier.json")), path)


def _id_of(note: Any, path: Path) -> str:
    version = note.get("version", _VERSION)
    if version > _VERSION:
        raise TierError(
            f"tier {os.fspath(path)!r} is of version {version}, this Monarch knows {_VERSION}",
            hint="mount with the Monarch that wrote it, or name another directory",
        )
    return str(note["id"])


def identify(own: int, path: Path, owner: Owner, known_as: str | None) -> str:
    """The id in tier.json, else ``known_as`` or a new one. Raises TierError, OSError."""
    try:
        with open(opened_in(own, "tier.json", os.O_RDONLY), "rb") as file:
            note = json.load(file)
        identity = _id_of(note, path)
        if note != _note(identity, owner):
            _write_note(own, identity, owner)
        return identity
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("tier %s has lost its name, and with it its copies: %s", path, error)
    identity = known_as or uuid.uuid4().hex
    _write_note(own, identity, owner)
    failpoints.failpoint("tier-named")
    return identity


def _note(identity: str, owner: Owner) -> dict[str, object]:
    return {
        "version": _VERSION,
        "id": identity,
        "source": owner.source,
        "state": owner.state,
    }


def _write_note(own: int, identity: str, owner: Owner) -> None:
    # A power cut must not leave an empty file: every copy would be a stranger's.
    try:
        with open(opened_in(own, "tier.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            json.dump(_note(identity, owner), file)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            os.unlink("tier.part", dir_fd=own)
        raise
    failpoints.failpoint("tier-name-staged")
    os.rename("tier.part", "tier.json", src_dir_fd=own, dst_dir_fd=own)
    os.fsync(own)


def open_own_directory(path: Path, owner: Owner) -> tuple[Path, int]:
    """The owner's directory in PATH/monarch and a descriptor of it: made if missing, and proved to
    be ours. PATH stays as it is. Raises TierError, LockedError."""
    try:
        parent = open_directory(path)
        with ExitStack() as opened:
            opened.callback(os.close, parent)
            # A directory of that name may serve another purpose: it is not changed either.
            shared = _made(parent, PRIVATE, path)
            opened.callback(os.close, shared)
            _require_ours(os.fstat(shared), PRIVATE, path)
            name = _own_name(shared, owner)
            own = _made(shared, name, path)
            with ExitStack() as failed:
                failed.callback(os.close, own)
                _require_ours(os.fstat(own), name, path)
                os.fchmod(own, 0o700)
                _take_over(shared, own, path, owner)
                failed.pop_all()
            return path / PRIVATE / name, own
    except OSError as error:
        raise TierError(
            f"tier {os.fspath(path)!r}: {error.strerror}",
            hint="name a directory on a local disk that you may write",
        ) from error


def _made(parent: int, name: str, path: Path) -> int:
    """A descriptor of the directory, which is made if it is missing. Raises OSError, TierError."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    try:
        return os.open(name, DIRECTORY, dir_fd=parent)
    except PermissionError:
        # A directory of another user may be closed to this one.
        _require_ours(os.stat(name, dir_fd=parent, follow_symlinks=False), name, path)
        raise


def _require_ours(status: os.stat_result, name: str, path: Path) -> None:
    """Raises TierError for a directory of another user, or one that others may write."""
    what = f"tier {os.fspath(path)!r}: its directory {name!r}"
    if status.st_uid != os.geteuid():
        raise TierError(f"{what} belongs to uid {status.st_uid}", hint="choose another directory")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise TierError(
            f"{what} may be written by other users (mode {mode:04o})",
            hint="choose another directory",
        )


def _take_over(shared: int, own: int, path: Path, owner: Owner) -> None:
    """Moves the data of an earlier version in PATH/monarch itself, if it is of this mount. The name
    of the tier is moved last: after a kill the next mount continues. Raises TierError, LockedError
    if a daemon of that version uses it."""
    try:
        with open(os.open("tier.json", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=shared), "rb") as file:
            identity = _id_of(json.load(file), path)
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, AttributeError):
        identity = ""
    lock = Lock(shared, f"tier {os.fspath(path)!r}", owner.mountpoint)
    try:
        if identity not in owner.known or status_at(own, "tier.json"):
            log.warning(
                "tier %s holds copies of another mount, made by an earlier version of Monarch: they"
                " stay until that is mounted again, or until `monarch evict --tier` removes them",
                path,
            )
            return
        names = [Contents.PREFIX + known for known in Contents(shared).generations()]
        for name in [*names, "stage", "tier.json"]:
            with suppress(FileNotFoundError):
                os.rename(name, name, src_dir_fd=shared, dst_dir_fd=own)
        os.unlink("lock", dir_fd=shared)
        log.info("tier %s: the copies of the earlier version are in a directory of the mount", path)
    finally:
        lock.release()


# -- the copies of all mounts ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SharedCopies:
    """The copies of one mount; ``source`` and ``state`` are empty if an earlier version made them.
    ``used_ns``: when a mount last opened them, in ns of the wall clock."""

    directory: str
    source: str
    state: str
    files: int
    bytes: int
    used_ns: int


def shared_copies(tier: Path) -> Iterator[SharedCopies]:
    """The copies of each mount in the tier at this path. Raises TierError if a symbolic link is in
    the place of their directory, which may lead to another tier; OSError."""
    private = tier / PRIVATE
    if private.is_symlink():
        raise TierError(
            f"tier {os.fspath(tier)!r}: its directory {PRIVATE!r} is a symbolic link",
            hint="name the tier that the link leads to",
        )
    for path, fd, source, state in _mounts(private) if private.is_dir() else ():
        if os.fstat(fd).st_uid != os.geteuid():
            continue
        files = nbytes = used_ns = 0
        for name in _copies(fd):
            with suppress(FileNotFoundError):
                files += 1
                nbytes += os.stat(name, dir_fd=fd, follow_symlinks=False).st_size
        with suppress(FileNotFoundError):
            used_ns = os.stat("lock", dir_fd=fd, follow_symlinks=False).st_mtime_ns
        yield SharedCopies(os.fspath(path), source, state, files, nbytes, used_ns)


def _mounts(private: Path) -> Iterator[tuple[Path, int, str, str]]:
    """Of each mount with copies: its directory, a descriptor of that until the next one, its source
    and its state directory. Raises OSError."""
    with closing_fd(os.open(private, DIRECTORY)) as shared:
        for name in [".", *sorted(os.listdir(shared))]:
            try:
                fd = os.open(name, DIRECTORY, dir_fd=shared)
            except OSError:
                continue
            with closing_fd(fd):
                if (note := _read_note(fd)) is not None:
                    source, state = str(note.get("source", "")), str(note.get("state", ""))
                    yield private / name, fd, source, state


def other_mounts(own: Path) -> list[tuple[str, str]]:
    """Source and state directory of the other mounts with copies in the tier path of ``own``, a
    mount's directory there. Both are empty for an earlier version's copies."""
    with suppress(OSError):
        return [(source, state) for path, _, source, state in _mounts(own.parent) if path != own]
    return []


def other_sources(own: Path) -> list[str]:
    """The sources of ``other_mounts``, each once, for a person."""
    return sorted({source or "another source" for source, _ in other_mounts(own)})


def remove_copies(held: SharedCopies) -> None:
    """Removes the files that Monarch has made there, recognised by their names. Raises LockedError
    if a daemon uses them, and OSError."""
    directory = Path(held.directory)
    is_own = directory.name != PRIVATE
    with ExitStack() as opened:
        shared = os.open(directory.parent if is_own else directory, DIRECTORY)
        opened.callback(os.close, shared)
        fd = os.open(directory.name if is_own else ".", DIRECTORY, dir_fd=shared)
        opened.callback(os.close, fd)
        opened.callback(Lock(fd, f"{held.directory!r}", "monarch evict").release)
        for name in [*_copies(fd), *Contents(fd).staged_copies()]:
            os.unlink(name, dir_fd=fd)
        for generation in Contents(fd).generations():
            top = Contents.PREFIX + generation
            for bucket in range(256):
                _rmdir(fd, f"{top}/{bucket:02x}")
            _rmdir(fd, f"{top}/{PARTS}")
            _rmdir(fd, top)
        _rmdir(fd, "stage")
        for name in ("tier.part", "tier.json", "lock"):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
        if is_own:
            with suppress(OSError):
                os.rmdir(directory.name, dir_fd=shared)


def _copies(fd: int) -> Iterator[str]:
    contents = Contents(fd)
    for generation in contents.generations():
        yield from contents.copies(generation)
        for name in filter(part_of, contents.parts(generation)):
            yield f"{contents.PREFIX}{generation}/{PARTS}/{name}"


def _rmdir(fd: int, name: str) -> None:
    try:
        os.rmdir(name, dir_fd=fd)
    except OSError as error:
        # A file of another program stays, and so does its directory.
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
