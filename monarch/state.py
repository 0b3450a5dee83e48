"""The state directory of a mount: made, ours alone, locked while a daemon uses it, and named."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.errors import TierError
from monarch.footing import open_directory
from monarch.report import Report
from monarch.settings import MountSettings
from monarch.tiers.lock import Lock

NOTE = "mount.json"
_NOTE_VERSION = 1
# What there may be before the first mount has noted itself: what it left when it failed, and a
# snapshot that was built or copied there.
_OURS = re.compile(
    r"lock|control\.sock|daemon\.log.*|.*\.lmdb.*|residency-.*|.*\.part|mount\.json|lost\.json"
)
# A few paths; anything longer was not written by us.
_MAX_NOTE_BYTES = 256 * 1024


@contextmanager
def hold_state(settings: MountSettings, state: Path) -> Iterator[None]:
    """Hold the directory ``state`` for this mount. Raises TierError, LockedError."""
    try:
        directory = open_directory(state)
    except OSError as error:
        raise TierError(
            f"state directory {os.fspath(state)!r}: {error.strerror}",
            hint="name one that you may write with --state",
        ) from error
    try:
        owner = os.fstat(directory).st_uid
        if owner != os.geteuid():
            raise TierError(
                f"state directory {os.fspath(state)!r} belongs to uid {owner}",
                hint="name another with --state",
            )
        what = f"state directory {os.fspath(state)!r}"
        try:
            require_private(state)
            another = "give this mount another directory with --state DIR"
            lock = Lock(directory, what, os.fspath(settings.mountpoint), instead=another)
        except OSError as error:
            raise TierError(
                f"{what}: {error.strerror}", hint="make room, or name another with --state"
            ) from error
        try:
            # What a newer version has written is refused before anything is changed.
            with suppress(OSError, ValueError, RecursionError):
                _read_known(state)
            yield
        finally:
            lock.release()
    finally:
        os.close(directory)


def require_private(state: Path) -> None:
    """Raises TierError for a directory with others' files, or one that others may enter.

    It may be shared by all users, so nothing of it is changed. Raises OSError.
    """
    what, another = f"state directory {os.fspath(state)!r}", "name a new directory with --state"
    names = os.listdir(state)
    strange = sorted(name for name in names if not _OURS.fullmatch(name))
    if strange and NOTE not in names:
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise TierError(f"{what} holds {strange[0]!r}{more}, which is not Monarch's", hint=another)
    mode = stat.S_IMODE(os.stat(state).st_mode)
    if mode & 0o077:
        raise TierError(
            f"{what} is open to other users (mode {mode:04o})",
            hint=f"{another}, or, if no other user needs it, run: chmod 700"
            f" {shlex.quote(os.fspath(state))}",
        )


@dataclass(frozen=True, slots=True)
class NotedTier:
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class MountNote(Report):
    """What a state directory is of: written at each mount, for whoever has only the directory.

    Paths are absolute text in which undecodable bytes are surrogate escapes.
    """

    version: int
    source: str
    mountpoint: str
    snapshot: str
    tiers: list[NotedTier]


def write_note(state: Path, settings: MountSettings, snapshot: Path) -> None:
    """Note the mount in its state directory, which is held. Raises TierError."""
    note = MountNote(
        version=_NOTE_VERSION,
        source=os.fspath(settings.source),
        mountpoint=os.fspath(settings.mountpoint),
        snapshot=os.fspath(snapshot),
        tiers=[NotedTier(tier.name, os.fspath(tier.path)) for tier in settings.tiers],
    )
    target = state / NOTE
    staged = target.with_name(f"{NOTE}.part")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(staged, flags, 0o600), "w", encoding="ascii") as file:
            json.dump(note.to_dict(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        staged.rename(target)
    except OSError as error:
        raise TierError(
            f"state directory {os.fspath(state)!r}: {error.strerror}",
            hint="make room, or name another with --state",
        ) from error


def read_note(state: Path) -> MountNote:
    """What the state directory is of. Raises TierError if it does not tell."""
    what = f"state directory {os.fspath(state)!r}"
    try:
        return MountNote.from_dict(_read_known(state))
    except FileNotFoundError as error:
        raise TierError(
            f"{what} does not say which mount it is of: it has no {NOTE}",
            hint="is it a state directory of Monarch? A mount with it writes that file",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise TierError(
            f"{what}: {NOTE} cannot be read: {error}", hint="mounting with it once mends that"
        ) from error


def _read_known(state: Path) -> dict[str, Any]:
    """The note as it is written. Raises OSError, ValueError, and TierError for a newer one."""
    with open(state / NOTE, "rb") as file:
        raw = json.loads(file.read(_MAX_NOTE_BYTES))
    if not isinstance(raw, dict):
        raise ValueError("it is no object")
    version = raw.get("version")
    if isinstance(version, int) and version > _NOTE_VERSION:
        raise TierError(
            f"state directory {os.fspath(state)!r} is of version {version}, this Monarch knows"
            f" {_NOTE_VERSION}",
            hint="use the Monarch that wrote it, or name another with --state",
        )
    return raw
