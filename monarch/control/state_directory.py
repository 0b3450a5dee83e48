"""The state directory of a mount: private, locked while a daemon uses it, with three notes.

mount.json          the mount, written when it is made
undrained.json      while a tier has changes that the source lacks: which journal has them
figures.json        the figures of the last mount, written when it has ended

For a mount of a pack it has pack-index, too: the index of the pack, to be read at this node.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.config.settings import MountSettings
from monarch.errors import TierError
from monarch.posix.private_directory import (
    Lock,
    open_directory,
    private_opener,
    replace_private,
)
from monarch.telemetry import figures as figures_file
from monarch.telemetry.figures import Figures
from monarch.telemetry.report import Report

log = logging.getLogger(__name__)

NOTE = "mount.json"
_UNDRAINED = "undrained.json"
_PREPARED = "undrained-first.part"
_NOTE_VERSION = 1
# Files that may exist before the first mount writes its note: left by a failed mount, or a snapshot
# that was built or copied there.
_OURS = re.compile(
    r"lock|control\.sock|daemon\.log.*|.*\.lmdb.*|residency-.*|.*\.part|mount\.json|lost\.json"
    r"|undrained\.json|figures\.json|peers|held|pack-index"
)
# The longest files that are taken for a note and for figures.
_MAX_NOTE_BYTES = 256 * 1024
_MAX_FIGURES_BYTES = 4 * 1024 * 1024


@contextmanager
def hold_state(settings: MountSettings, state: Path) -> Iterator[None]:
    """Hold the directory ``state`` for this mount. Raises TierError, LockedError."""
    what = _called(state)
    try:
        directory = open_directory(state)
    except OSError as error:
        hint = "name a writable one with --state"
        raise TierError(f"{what}: {error.strerror}", hint=hint) from error
    try:
        owner = os.fstat(directory).st_uid
        if owner != os.geteuid():
            hint = "name another directory with --state"
            raise TierError(f"{what} belongs to uid {owner}", hint=hint)
        with _no_space(state):
            require_private(state)
            another = "give this mount another directory with --state DIR"
            another += ", or, where nodes share it, each node one with MONARCH_STATE_ROOT"
            lock = Lock(directory, what, os.fspath(settings.mountpoint), instead=another)
        try:
            # A note of a newer version is refused before anything is changed.
            with suppress(OSError, ValueError, RecursionError):
                _read_known(state)
            yield
        finally:
            lock.release()
    finally:
        os.close(directory)


def _called(state: Path) -> str:
    return f"state directory {os.fspath(state)!r}"


@contextmanager
def _no_space(state: Path) -> Iterator[None]:
    """Turns an OSError into a TierError with the remedy."""
    try:
        yield
    except OSError as error:
        hint = "free space, or name another directory with --state"
        raise TierError(f"{_called(state)}: {error.strerror}", hint=hint) from error


def require_private(state: Path) -> None:
    """Raises TierError if the directory has files of others, or is open to other users. Other users
    may need it, so nothing in it is changed. Raises OSError."""
    what, another = _called(state), "name a new directory with --state"
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
    """Describes the mount of a state directory; written at each mount for tools without a daemon.

    Paths are absolute text in which undecodable bytes are surrogate escapes.
    """

    version: int
    source: str
    mountpoint: str
    snapshot: str
    tiers: list[NotedTier]


def write_note(state: Path, settings: MountSettings, snapshot: Path) -> None:
    """Writes the note into the state directory, whose lock is held. Raises TierError."""
    note = MountNote(
        version=_NOTE_VERSION,
        source=os.fspath(settings.source),
        mountpoint=os.fspath(settings.mountpoint),
        snapshot=os.fspath(snapshot),
        tiers=[NotedTier(tier.name, os.fspath(tier.path)) for tier in settings.tiers],
    )
    with _no_space(state):
        replace_private(state / NOTE, json.dumps(note.to_dict(), indent=1))


def read_note(state: Path) -> MountNote:
    """The note of a state directory. Raises TierError if it has none."""
    what = _called(state)
    try:
        return MountNote.from_dict(_read_known(state))
    except FileNotFoundError as error:
        raise TierError(
            f"{what} does not belong to a known mount: it has no {NOTE}",
            hint="check that it is a state directory of Monarch; a mount with it writes that file",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise TierError(
            f"{what}: {NOTE} cannot be read: {error}", hint="a mount with it writes the file again"
        ) from error


@dataclass(frozen=True, slots=True)
class UndrainedNote(Report):
    """Describes the changes that a tier has and the source lacks, so that a mount finds out that
    the tier, or its disk, is missing.

    ``tier`` is the path of the tier, ``directory`` that of the journal, and ``journal`` the token
    of the journal. ``in_memory``: the tier was a directory in memory in the start ``boot`` of the
    machine. ``operations`` counts the changes, and the files that are open for writing: the journal
    may lack bytes of them. ``bytes`` is the size of the contents among the changes. ``names`` are
    the paths in the mount of the files concerned. Paths are text as in ``MountNote``.
    """

    version: int
    tier: str
    directory: str
    journal: str
    in_memory: bool
    boot: str
    operations: int
    bytes: int
    names: list[str]


def undrained_file(state: Path) -> Path:
    return state / _UNDRAINED


def write_undrained(state: Path, note: UndrainedNote | None) -> None:
    """Replaces the note of undrained changes; None removes it. Raises OSError."""
    if note is None:
        undrained_file(state).unlink(missing_ok=True)
    else:
        replace_private(undrained_file(state), json.dumps(note.to_dict()))


def prepare_undrained(state: Path, note: UndrainedNote | None) -> None:
    """Prepares a note for ``put_undrained``; None removes it. Raises OSError."""
    if note is None:
        (state / _PREPARED).unlink(missing_ok=True)
    else:
        replace_private(state / _PREPARED, json.dumps(note.to_dict()))


def put_undrained(state: Path) -> None:
    """Makes the prepared note the note of undrained changes. That needs no room on the disk, and
    outlives the daemon. Raises OSError, FileNotFoundError if none is prepared."""
    (state / _PREPARED).rename(undrained_file(state))


def read_undrained(state: Path) -> UndrainedNote | None:
    """The note of undrained changes, None if there are none. Raises TierError for a note of a newer
    version."""
    try:
        return UndrainedNote.from_dict(_read_known(state, _UNDRAINED))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.warning(
            "%s: %s cannot be read: %s; a missing tier would not be noticed",
            _called(state),
            _UNDRAINED,
            error,
        )
        return None


def write_figures(state: Path, figures: Figures) -> None:
    """Raises OSError."""
    replace_private(state / figures_file.FILE, json.dumps(figures.to_dict()))


def read_figures(state: Path) -> Figures | None:
    """The figures of the last mount with this state directory that has ended; None if there are
    none. Raises OSError, and ValueError if they cannot be read or are of another version."""
    try:
        with open(state / figures_file.FILE, "rb", opener=private_opener) as file:
            raw = json.loads(file.read(_MAX_FIGURES_BYTES))
    except FileNotFoundError:
        return None
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(raw, dict) or raw.get("monarch_figures") != figures_file.VERSION:
        raise ValueError("it is of another version")
    return Figures.from_dict(raw)


def _read_known(state: Path, name: str = NOTE) -> dict[str, Any]:
    """A raw note. Raises OSError, ValueError, and TierError for a newer version."""
    with open(state / name, "rb", opener=private_opener) as file:
        raw = json.loads(file.read(_MAX_NOTE_BYTES))
    if not isinstance(raw, dict):
        raise ValueError("it is not an object")
    version = raw.get("version")
    if isinstance(version, int) and version > _NOTE_VERSION:
        raise TierError(
            f"{_called(state)} is of version {version}, this Monarch knows {_NOTE_VERSION}",
            hint="use the Monarch that wrote it, or name another directory with --state",
        )
    return raw
