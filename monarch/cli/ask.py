"""What the verbs that talk to a daemon share: asking it, and naming files of its mount.

A mount is never looked at from here: it may hang.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from monarch import registry
from monarch.control.client import call
from monarch.errors import MonarchError, NotMountedError, UsageError
from monarch.places import state_root
from monarch.registry import MountRecord, Registry, real_path
from monarch.report import Report
from monarch.text import escape_text

R = TypeVar("R", bound=Report)


def ask(
    record: MountRecord,
    verb: str,
    params: dict[str, Any],
    *,
    answer: type[R],
    timeout: float | None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> R:
    """The daemon's answer. NotMountedError if it is dead; what it raised, if it raised.

    ``timeout`` is the longest silence in seconds, None for no limit.
    """
    where = escape_text(record.mountpoint)
    if not registry.alive(record):
        raise NotMountedError(
            f"the daemon of {where} is dead (pid {record.pid}, log {escape_text(record.log)})",
            hint=f"`monarch umount {where}` cleans up, and so does mounting it again",
        )
    socket = Path(record.socket)
    try:
        raw = call(socket, verb, params, timeout=timeout, on_progress=on_progress)
        return answer.from_dict(raw)
    except ValueError as error:
        raise MonarchError(
            f"the daemon of {where} is of another version: {error}",
            hint="mount again with this version of monarch",
        ) from error


def mount_and_paths(place: Path, paths: Sequence[str]) -> tuple[MountRecord, list[str]]:
    """The mount that ``place`` is, and ``paths`` as of ``inside``; a place in a mount is a path.

    Raises NotMountedError, and UsageError for a place in a mount with more paths.
    """
    record = Registry(state_root()).find(place)
    full = real_path(place, [record.mountpoint])
    if full == record.mountpoint:
        return record, inside(record, paths)
    if paths:
        mount = escape_text(record.mountpoint)
        raise UsageError(
            f"{escape_text(os.fspath(place))} is in the mount {mount}, not the mount",
            hint=f"name the mount first: {mount} PATH ...",
        )
    return record, inside(record, [full])


def inside(record: MountRecord, paths: Sequence[str]) -> list[str]:
    """``paths`` relative to the mount's root, "" being the root; all of it if there are none.

    An absolute path lies in the mount, a relative one counts from its root. Raises UsageError for
    one that leads out.
    """
    root = record.mountpoint
    relative = []
    for path in paths or [root]:
        full = real_path(os.path.join(root, path), [root])
        if full != root and not full.startswith(root.rstrip("/") + "/"):
            raise UsageError(
                f"{escape_text(path)} is outside the mount {escape_text(root)}",
                hint="name paths inside the mount, or relative to it",
            )
        relative.append("" if full == root else os.path.relpath(full, root))
    return relative
