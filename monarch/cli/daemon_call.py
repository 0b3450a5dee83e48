"""Requests to the daemon of a mount, and the arguments of the verbs that make them.

No function here touches the mount itself: it may hang.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from monarch.cli import complete
from monarch.cli.output import age, duration, progress_bar
from monarch.config.defaults import state_root
from monarch.control import registry
from monarch.control.client import call
from monarch.control.registry import MountRecord, Registry, real_path
from monarch.errors import MonarchError, NotMountedError, UsageError
from monarch.telemetry.report import DrainProgress, DrainReport, Report
from monarch.text import counted, escape_text, format_bytes, parse_seconds

R = TypeVar("R", bound=Report)

# The exit code after Ctrl-C.
INTERRUPTED = 130
# The daemon reports progress several times a second; after this silence it counts as hanging.
SILENCE_S = 30.0

_argument = partial(
    click.argument, type=click.Path(path_type=Path), shell_complete=complete.mount_points
)
MOUNT = _argument("mountpoint", metavar="MOUNT")
MAYBE_MOUNTPOINT = _argument("mountpoint", required=False)
MOUNT_OR_STATE = _argument("place", metavar="MOUNT|STATE")
PATH = click.argument("path", required=False, type=click.Path(), metavar="[PATH]")
PATHS = click.argument("paths", nargs=-1, type=click.Path(), metavar="[PATH]...")
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def seconds(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """The callback of an option whose value is a duration such as 30s or 10m."""
    try:
        return None if value is None else parse_seconds(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


# -- a mount and paths in it -----------------------------------------------------------------------


def mount_of(place: Path) -> MountRecord:
    """The mount at or above ``place``. Raises NotMountedError."""
    return Registry(state_root()).find(place)


def last_state(place: Path) -> Path:
    """The state directory ``place``, or that of the last mount at ``place``. Raises
    NotMountedError."""
    # Imported here: it loads the settings, which most verbs do not need.
    from monarch.control.state_directory import NOTE, read_note

    path = Path(os.path.abspath(place))
    # Not pathlib's exists(), which raises if a directory may not be searched.
    if os.path.exists(path / NOTE):
        return path
    root = state_root()
    for state in sorted(root.iterdir()) if root.is_dir() else ():
        with suppress(MonarchError):
            if read_note(state).mountpoint in (os.fspath(path), real_path(path)):
                return state
    if os.path.isdir(path) and any(path.glob("residency-*")):
        return path
    raise registry.not_served(
        place,
        "is neither a Monarch mount nor a state directory",
        hint="; of one with --state DIRECTORY name that",
    )


def mount_and_path(mountpoint: Path, path: str | None) -> tuple[MountRecord, str]:
    """The mount, and ``path`` relative to it: "" for the whole mount."""
    record = mount_of(mountpoint)
    return record, inside(record, [path if path is not None else os.path.abspath(mountpoint)])[0]


def mount_and_paths(place: Path, paths: Sequence[str]) -> tuple[MountRecord, list[str]]:
    """The mount at ``place``, and ``paths`` as by ``inside``; a place in a mount counts as a path,
    and excludes others. Raises NotMountedError, UsageError."""
    record = mount_of(place)
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
    for a path outside the mount.
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


# -- requests --------------------------------------------------------------------------------------


def ask(
    record: MountRecord,
    verb: str,
    params: Mapping[str, Any],
    *,
    answer: type[R],
    timeout: float | None = SILENCE_S,
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
        raw = call(socket, verb, {**params}, timeout=timeout, on_progress=on_progress)
        return answer.from_dict(raw)
    except ValueError as error:
        raise MonarchError(
            f"the daemon of {where} is of another version: {error}",
            hint="mount again with this version of monarch",
        ) from error


def drain(
    record: MountRecord,
    params: Mapping[str, Any],
    *,
    timeout_s: float | None,
    quiet: bool,
    silence_s: float = SILENCE_S,
) -> DrainReport:
    """Waits, with a progress bar, until all files are at the source, or ``timeout_s`` has passed.

    None is no limit. An interrupt or a timeout leaves everything unchanged. Raises NotMountedError
    if the daemon is dead or ends meanwhile, MonarchError if it is silent for ``silence_s``.
    """
    with progress_bar(quiet=quiet, of_bytes=True) as advance:

        def on_progress(raw: dict[str, Any]) -> None:
            at = DrainProgress.from_dict(raw)
            if at.files_total or at.trouble:
                why = f" ({at.trouble})" if at.trouble else ""
                files = counted(at.files_total, "file", "files")
                words = f"draining, {at.files_done:,} of {files}{why}"
                advance(at.bytes_done, at.bytes_total, words)

        asked = {**params, "timeout": timeout_s}
        return ask(
            record, "drain", asked, answer=DrainReport, timeout=silence_s, on_progress=on_progress
        )


def waited(timeout_s: float | None, since_s: float) -> str:
    """``after 5 min, ``; empty if a wait since ``since_s`` of ``time.monotonic`` has ended before
    its limit: the journal has failed."""
    if timeout_s is None or time.monotonic() - since_s < timeout_s:
        return ""
    return f"after {duration(timeout_s)}, "


def waiting(report: DrainReport) -> str:
    """``3 files, 12 GiB, the oldest written 5 min ago, are not at the source: why``."""
    what = f"{counted(report.files, 'file', 'files')}, {format_bytes(report.bytes)}"
    if not report.files:
        what = "changes of names and attributes"
    if report.oldest_ns:
        what += f", the oldest written {age(report.oldest_ns)} ago,"
    verb = "is" if report.files == 1 else "are"
    why = f": {escape_text(report.trouble)}" if report.trouble else ""
    return f"{what} {verb} not at the source yet{why}"
