"""The status of a mount that another user's daemon serves, read from an attribute of its root."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from monarch.control.registry import real_path
from monarch.errors import MonarchError, NotMountedError
from monarch.fuse.mountpoint import FS_TYPE, monarch_above
from monarch.posix.bounded_calls import within
from monarch.posix.mounts import mount_table
from monarch.text import escape_text
from monarch.units import format_bytes

ATTRIBUTE = "user.monarch.status"
_ANSWER_S = 5.0


def public_status(place: Path) -> tuple[str, dict[str, Any]]:
    """The mount point of the Monarch mount above ``place``, and its public figures.

    Raises NotMountedError if there is no mount or its daemon is dead; MonarchError if the daemon
    does not answer or denies access.
    """
    ours = [str(mounted.mount_point) for mounted in mount_table() if mounted.kind == FS_TYPE]
    mountpoint = monarch_above(real_path(place, ours))
    if not mountpoint:
        raise NotMountedError(
            f"{escape_text(os.fspath(place))} is not in a Monarch mount",
            hint="`monarch status` lists the mounts",
        )
    found: list[bytes | OSError] = []

    def ask() -> None:
        try:
            found.append(os.getxattr(mountpoint, ATTRIBUTE))
        except OSError as error:
            found.append(error)

    where = escape_text(mountpoint)
    if not within(_ANSWER_S, ask):
        raise MonarchError(f"{where} does not answer", hint="ask the owner of the mount")
    (answer,) = found
    if isinstance(answer, OSError):
        if answer.errno == errno.ENOTCONN:
            raise NotMountedError(f"the daemon of {where} is dead", hint="mount it again")
        raise MonarchError(
            f"{where} is a Monarch mount of another user: {answer.strerror}",
            hint="run the command as the owner of the mount; with allow_other every user may ask",
        )
    try:
        raw = json.loads(answer)
    except ValueError as error:
        raise MonarchError(f"{where}: its daemon is of another version: {error}") from error
    return mountpoint, raw


def words(mountpoint: str, told: dict[str, Any]) -> list[str]:
    """One line for each subject, as text for a person."""
    files, nbytes = told["files"], told["bytes"]
    head = f"{escape_text(mountpoint)}: {told['health']}, {told['state']}, pid {told['pid']}"
    lines = [
        f"{head}; a mount of another user, or of another state directory",
        f"  {told['datapath']}, open: {told['open']}, version {told['version']}",
        f"  {told['resident_files']:,} of {files:,} files resident,"
        f" {format_bytes(told['resident_bytes'])} of {format_bytes(nbytes)}",
    ]
    for tier in told["tiers"]:
        used, capacity = format_bytes(tier["used"]), format_bytes(tier["capacity"])
        lines.append(f"  tier {tier['name']}: {used} of {capacity} used")
    return lines
