"""Requests to a daemon, and paths of files in its mount; shared by the verbs.

No function here touches the mount itself: it may hang.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from monarch.config.defaults import state_root
from monarch.control import registry
from monarch.control.client import call
from monarch.control.registry import MountRecord, Registry, real_path
from monarch.errors import MonarchError, NotMountedError, UsageError
from monarch.telemetry.report import Report
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
    """Sends a request to the daemon and returns its answer.

    ``timeout`` is the longest silence in seconds, None for no limit. Raises NotMountedError if the
    daemon is dead, and the error of the daemon if the request failed.
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
    """The mount at ``place``, and ``paths`` as by ``inside``; a place in a mount counts as a path.

    Raises NotMountedError, and UsageError if ``place`` is in a mount and ``paths`` are given.
    """
    record = Registry(state_root()).find(place)
    full = real_path(place, [record.mountpoint])
    if full == record.mountpoint:
        return record, inside(record, paths)
    if paths:
        mount = escape_text(record.mountpoint)
        raise UsageError(
            f"{escape_text(os.fspath(place))} is in the mount {mount}, it is not the mount itself",
            hint=f"name the mount first: {mount} PATH ...",
        )
    return record, inside(record, [full])


def inside(record: MountRecord, paths: Sequence[str]) -> list[str]:
    """``paths`` relative to the root of the mount, "" being the root; without paths, the root.

    An absolute path must be in the mount, a relative one counts from its root. Raises UsageError
    for
    a path outside the mount.
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
