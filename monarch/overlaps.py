"""What a mount keeps lies in no Monarch mount, and not within what another mount keeps.

Only the running mounts of the same user are compared: those of other users cannot be read. Two
mounts of one configuration file are compared by ``config`` when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from monarch.errors import TierError, UsageError
from monarch.fuse.mountpoint import require_outside
from monarch.places import state_beside, state_directory
from monarch.registry import MountRecord, alive
from monarch.settings import MountSettings
from monarch.state import read_note

Place = tuple[str, Path]


def with_state_directory(settings: MountSettings, records: Sequence[MountRecord]) -> MountSettings:
    """``settings`` with the state directory named.

    It is that of the source, or, if another mount of ``records`` has that now, one beside it.
    """
    state = state_directory(settings)
    is_taken = any(
        record.state == os.fspath(state)
        and record.mountpoint != os.fspath(settings.mountpoint)
        and alive(record)
        for record in records
    )
    if is_taken and settings.state is None:
        state = state_beside(settings)
    return settings.model_copy(update={"state": state})


def check_apart(settings: MountSettings, records: Sequence[MountRecord]) -> None:
    """``records``: the mounts there are. Raises TierError, and UsageError for two mounts that would
    meet. Nothing is changed.
    """
    places = list(_kept(settings))
    for what, path in places:
        require_outside(path, what)
    for record in records:
        if alive(record) and record.mountpoint != os.fspath(settings.mountpoint):
            for their, other in _kept_by(record):
                for what, path in places:
                    if what in ("tier", "state directory"):
                        _require_apart(what, path, their, other, record.mountpoint)


def _kept(settings: MountSettings) -> Iterator[Place]:
    for tier in settings.tiers:
        yield "tier", tier.path
    yield "state directory", state_directory(settings)
    if settings.snapshot.file is not None:
        yield "snapshot", settings.snapshot.file
    if settings.log.file is not None:
        yield "log file", settings.log.file


def _kept_by(record: MountRecord) -> Iterator[Place]:
    yield "source", Path(record.source)
    with suppress(TierError):
        for tier in read_note(Path(record.state)).tiers:
            yield "tier", Path(tier.path)


def _require_apart(what: str, path: Path, their: str, other: Path, mountpoint: str) -> None:
    # The source of another mount may hang.
    two = os.path.normpath(other) if their == "source" else os.path.realpath(other)
    one = os.path.realpath(path)
    inside = one.startswith(f"{two.rstrip('/')}/")
    # The same path is shared.
    around = two.startswith(f"{one.rstrip('/')}/") and (what, their) == ("tier", "tier")
    if inside or around:
        relation = "lies in" if inside else "has inside"
        raise UsageError(
            f"{what} {os.fspath(path)!r} {relation} the {their} {os.fspath(other)!r} of the mount"
            f" {mountpoint!r}",
            hint="name a directory outside of it",
        )
