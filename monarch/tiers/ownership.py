"""Finds the directory of a mount beneath a tier's path: each mount has one, and uses no other."""

from __future__ import annotations

import json
import logging
import os
import stat
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from monarch.errors import TierError
from monarch.posix import failpoints
from monarch.posix.file_lock import Lock
from monarch.posix.private_directory import open_directory
from monarch.tiers.contents import DIRECTORY, Contents

log = logging.getLogger(__name__)

PRIVATE = "monarch"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Owner:
    """The mount that owns the copies of a tier.

    Its directory is the one whose id the mount's records know, else the one named ``directory``.
    """

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
    try:
        return path / PRIVATE / _own_name(shared, owner)
    finally:
        os.close(shared)


def _own_name(shared: int, owner: Owner) -> str:
    if os.fstat(shared).st_uid != os.geteuid() or _exists(shared, owner.directory):
        return owner.directory
    # The state directory, whose path makes the name, may have been moved.
    for name in sorted(os.listdir(shared)):
        with suppress(OSError, ValueError, KeyError, TypeError):
            fd = os.open(f"{name}/tier.json", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=shared)
            with open(fd, "rb") as file:
                if json.load(file)["id"] in owner.known:
                    return name
    return owner.directory


def require_known_version(path: Path, owner: Owner) -> None:
    """Raises TierError if a newer version has written the tier at ``path``; changes nothing."""
    for own in (own_directory(path, owner), path / PRIVATE):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            _id_of((own / "tier.json").read_bytes(), path)


def _id_of(told: bytes, path: Path) -> str:
    known = json.loads(told)
    version = known.get("version", _VERSION)
    if version > _VERSION:
        raise TierError(
            f"tier {os.fspath(path)!r} is of version {version}, this Monarch knows {_VERSION}",
            hint="mount with the Monarch that wrote it, or name another directory",
        )
    return str(known["id"])


def opened_in(directory: int, name: str, flags: int) -> int:
    return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory)


def identify(own: int, path: Path, owner: Owner, known_as: str | None) -> str:
    """The id in tier.json, else ``known_as`` or a new one. Raises TierError, OSError."""
    try:
        with open(opened_in(own, "tier.json", os.O_RDONLY), "rb") as file:
            told = file.read()
        identity = _id_of(told, path)
        if json.loads(told) != _note(identity, owner):
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
    told = {"source": owner.source, "state": owner.state}
    return {"version": _VERSION, "id": identity, **told}


def _write_note(own: int, identity: str, owner: Owner) -> None:
    # A power cut must not leave an empty file: every copy would be a stranger's.
    with open(opened_in(own, "tier.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        json.dump(_note(identity, owner), file)
        file.flush()
        os.fsync(file.fileno())
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


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _take_over(shared: int, own: int, path: Path, owner: Owner) -> None:
    """Moves the data of an earlier version in PATH/monarch itself, if it is of this mount. The name
    of the tier is moved last: after a kill the next mount continues. Raises TierError, LockedError
    if a daemon of that version uses it."""
    try:
        with open(os.open("tier.json", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=shared), "rb") as file:
            identity = _id_of(file.read(), path)
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, AttributeError):
        identity = ""
    lock = Lock(shared, f"tier {os.fspath(path)!r}", owner.mountpoint)
    try:
        if identity not in owner.known or _exists(own, "tier.json"):
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
