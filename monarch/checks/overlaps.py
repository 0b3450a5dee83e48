"""Refuses a mount whose directories lie in a Monarch mount, or overlap those of another mount.

Only running mounts of the same user are compared, since those of others cannot be read. ``config``
compares the mounts of one configuration file when it reads the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

from monarch.config.defaults import state_beside, state_directory
from monarch.config.settings import MountSettings
from monarch.control.registry import MountRecord, alive
from monarch.control.state_directory import read_note
from monarch.errors import TierError, UsageError
from monarch.fuse.mountpoint import require_outside


def with_state_directory(settings: MountSettings, records: Sequence[MountRecord]) -> MountSettings:
    """``settings`` with the state directory filled in. It is that of the source, or, if another
    mount of ``records`` uses that, one beside it."""
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
    """Raises TierError, or UsageError if the mount would overlap one of ``records``."""
    directories = [("tier", tier.path) for tier in settings.tiers]
    directories.append(("state directory", state_directory(settings)))
    files = {"snapshot": settings.snapshot.file, "log file": settings.log.file}
    for what, path in [*directories, *files.items()]:
        if path is not None:
            require_outside(path, what)
    for record in records:
        if alive(record) and record.mountpoint != os.fspath(settings.mountpoint):
            theirs = [("source", Path(record.source))]
            with suppress(TierError):
                theirs += [("tier", Path(t.path)) for t in read_note(Path(record.state)).tiers]
            for (their, other), (what, path) in product(theirs, directories):
                _require_apart(what, path, their, other, record.mountpoint)


def _require_apart(what: str, path: Path, their: str, other: Path, mountpoint: str) -> None:
    # Not resolved: the source of another mount may hang.
    two = os.path.normpath(other) if their == "source" else os.path.realpath(other)
    one = os.path.realpath(path)
    inside = one.startswith(f"{two.rstrip('/')}/")
    # Two mounts may share the path of a tier.
    around = two.startswith(f"{one.rstrip('/')}/") and (what, their) == ("tier", "tier")
    if inside or around:
        relation = "lies in" if inside else "has inside"
        raise UsageError(
            f"{what} {os.fspath(path)!r} {relation} the {their} {os.fspath(other)!r} of the mount"
            f" {mountpoint!r}",
            hint="name a directory outside it",
        )
