"""``monarch umount``: drains written files, unmounts, and waits until the daemon ended."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from monarch import errors
from monarch.cli import complete
from monarch.cli.daemon_call import INTERRUPTED, JSON, drain, seconds, waited, waiting
from monarch.cli.output import emit_json, remark
from monarch.config.defaults import state_root
from monarch.control.client import call
from monarch.control.ending import STEPS, step_of
from monarch.control.registry import MountRecord, Registry, alive, process_stat, real_path
from monarch.fuse import mountpoint as mountpoints
from monarch.telemetry import figures
from monarch.text import counted, counted_changes, escape_text

if TYPE_CHECKING:
    from monarch.telemetry.report import DrainReport
    from monarch.writeback.earlier import Inspection

# Time limit for each step of the daemon's end. Its longest step gives up after ten seconds, but a
# process exists until the disk has answered its last call.
_DEADLINE_S = 60.0
# Unmounting is tried this long while a process of the daemon, or one about to end, uses the mount.
_PASSING_S = 2.0
_STEP_S = 0.02
_SHOWN_PIDS = 10
_ANSWER_S = 5.0


@click.command(
    epilog="""\b
Examples:
  monarch umount /mnt/data
  monarch umount /mnt/data --timeout 1h     allow this time for draining to the source
  monarch umount /mnt/data --abandon        do not wait; the next mount drains the rest
  monarch umount --lazy /mnt/data           files in use stay readable until they are closed
"""
)
@click.argument("mountpoint", shell_complete=complete.mount_points)
@click.option(
    "--timeout",
    "timeout_s",
    callback=seconds,
    default="10m",
    show_default=True,
    metavar="TIME",
    help="Time limit for draining to the source; after it the mount stays mounted.",
)
@click.option(
    "--abandon",
    is_flag=True,
    help="Do not wait for the source: files that wait stay in the tier for the next mount.",
)
@click.option(
    "--lazy",
    is_flag=True,
    help="Unmount although files are open; after the last close the daemon drains and ends.",
)
@JSON
def umount(
    mountpoint: str, *, timeout_s: float, abandon: bool, lazy: bool, as_json: bool
) -> int | None:
    """Unmount MOUNTPOINT and wait until its daemon has ended. The tiers keep their copies.

    The files written through the mount are drained to the source first. After the timeout (exit
    code 13), or after Ctrl-C (exit code 130), the mount stays as it is and continues to drain.
    """
    registry = Registry(state_root())
    records = {record.mountpoint: record for record in registry.all()}
    path = Path(real_path(mountpoint, records))
    shown = escape_text(os.fspath(path))
    record = records.get(os.fspath(path))
    is_mounted = mountpoints.mount_at(path) is not None
    if not is_mounted and record is None:
        raise errors.NotMountedError(
            f"{os.fspath(path)!r} is no Monarch mount", hint="`monarch status` lists the mounts"
        )
    users: list[int] = []
    writer = record if record is not None and record.absorbs and alive(record) else None
    if writer is not None and not is_mounted and not lazy:
        # The daemon is ending, and drains what it has.
        since_s = time.monotonic()
        report = _last_look(writer, 0.0 if abandon else timeout_s, quiet=as_json, ends=abandon)
        if report is not None and not report.drained and not abandon:
            raise errors.NotDrainedError(
                f"{shown} is unmounted, and its daemon continues to drain:"
                f" {waited(timeout_s, since_s)}{waiting(report)}",
                hint=f"`monarch umount --abandon {shown}` ends it",
            )
    if is_mounted:
        until = time.monotonic() + timeout_s
        if writer is not None and not abandon:
            try:
                _drain(writer, timeout_s, quiet=as_json)
            except KeyboardInterrupt:
                remark(f"monarch: {shown} stays mounted and continues to drain")
                return INTERRUPTED
        users = mountpoints.users_of(path) if lazy else []
        _unmount(path, record, lazy=lazy)
        if writer is not None and not lazy:
            _last_look(writer, 0.0 if abandon else max(0.0, until - time.monotonic()), quiet=True)
    if record is not None:
        if not lazy:
            _end_waits(record)
            _wait_for_end(record)
        if not alive(record):
            # Another daemon may have made a mount there since.
            registry.remove_own(record)
    undrained = _undrained(record)
    if as_json:
        stays = None
        if undrained is not None and record is not None:
            files, nbytes = len(undrained.waiting), undrained.bytes
            stays = {"files": files, "bytes": nbytes, "directory": record.absorbs}
        emit_json({"mountpoint": os.fspath(path), "unmounted": True, "stays": stays})
        return None
    if users:
        using = counted(len(users), "process uses", "processes use")
        remark(f"monarch: {shown} is detached: {using} it still: {_named(users)}")
    else:
        remark(f"monarch: {shown} is unmounted{_figures(record)}")
    if undrained is not None and record is not None:
        remark(f"monarch: {_undrained_words(undrained, record.absorbs)}")
    return None


def _figures(record: MountRecord | None) -> str:
    """The command that shows what the mount has done; empty if it has left no figures."""
    if record is None:
        return ""
    state = Path(record.state)
    try:
        written_ns = (state / figures.FILE).stat().st_mtime_ns
    except OSError:
        return ""
    place = record.mountpoint if state.parent == state_root() else record.state
    # A name that a terminal cannot show cannot be typed.
    if written_ns < record.started_ns or not place.isprintable():
        return ""
    return f"; its figures: monarch report {shlex.quote(place)}"


def _drain(record: MountRecord, timeout_s: float, *, quiet: bool) -> None:
    """Waits until all written files are at the source. Raises NotDrainedError after the timeout,
    and the errors of ``drain``."""
    where, since_s = escape_text(record.mountpoint), time.monotonic()
    try:
        report = drain(record, {}, timeout_s=timeout_s, quiet=quiet)
    except errors.MonarchError as error:
        raise type(error)(
            str(error.args[0]), hint=f"`monarch umount --abandon {where}` does not wait for it"
        ) from error
    if not report.drained:
        after = waited(timeout_s, since_s)
        longer = f"`monarch ckpt wait {where}` waits longer; " if after else ""
        raise errors.NotDrainedError(
            f"{where} stays mounted: {after}{waiting(report)}",
            hint=f"{longer}with --abandon the files stay in {escape_text(report.directory)} for the"
            " next mount",
        )


def _last_look(
    record: MountRecord, timeout_s: float, *, quiet: bool, ends: bool = True
) -> DrainReport | None:
    """Lets the daemon drain for up to ``timeout_s`` after unmounting: a process may have written
    after the first draining. With ``ends`` it drains no longer. None if it has not answered."""
    # The daemon may have ended by now; if it hangs, the wait for its end reports that.
    with suppress(errors.MonarchError):
        report = drain(record, {}, timeout_s=timeout_s, quiet=quiet, silence_s=_ANSWER_S)
        if ends and not report.drained:
            call(Path(record.socket), "stop", {"abandon": True}, timeout=_ANSWER_S)
        return report
    return None


def _end_waits(record: MountRecord) -> None:
    """Has the daemon give up the calls of a source that hangs: their processes have ended."""
    if alive(record):
        # It may have ended by now, or end without an answer.
        with suppress(errors.MonarchError):
            call(Path(record.socket), "stop", {}, timeout=_ANSWER_S)


def _undrained(record: MountRecord | None) -> Inspection | None:
    """The data that waits in the tier for the next mount; None if none does, or unknown."""
    if record is None or not record.absorbs or alive(record):
        return None
    from monarch.writeback.earlier import inspect

    try:
        found = inspect(Path(record.absorbs), has_ended=True)
    except (errors.TierError, OSError):
        return None
    return found if found.operations else None


def _undrained_words(found: Inspection, directory: str) -> str:
    count = len(found.waiting) or found.operations
    what = counted_changes(found.operations, len(found.waiting), found.bytes)
    return (
        f"{what}, not at the source yet, {'stays' if count == 1 else 'stay'} in"
        f" {escape_text(directory)}: mount again to continue draining"
    )


def _unmount(path: Path, record: MountRecord | None, *, lazy: bool) -> None:
    """Raises BusyError, with the processes that use the mount, unless the daemon itself used it."""
    deadline = time.monotonic() + _PASSING_S
    while True:
        try:
            mountpoints.unmount(path, lazy=lazy or (record is not None and not alive(record)))
        except errors.BusyError as error:
            pids = mountpoints.users_of(path)
            passing = record is not None and all(_parent(pid) in (None, record.pid) for pid in pids)
            if not passing or time.monotonic() > deadline:
                where = escape_text(os.fspath(path))
                raise errors.BusyError(
                    f"{error} by {_named(pids)}" if pids else str(error),
                    hint="end them first, or detach the mount now with"
                    f" `monarch umount --lazy {where}`",
                ) from error
            time.sleep(_STEP_S)
        else:
            return


def _parent(pid: int) -> int | None:
    """The pid of the parent of ``pid``, None if ``pid`` has ended."""
    with suppress(OSError):
        if (fields := process_stat(pid)) is not None:
            return int(fields[1])
    return None


def _named(pids: Sequence[int]) -> str:
    more = ", ..." if len(pids) > _SHOWN_PIDS else ""
    shown = (f"{pid} ({name})" if (name := _command(pid)) else str(pid) for pid in pids)
    return f"pid {', '.join(islice(shown, _SHOWN_PIDS))}{more}"


def _command(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace")
    except OSError:
        return ""
    return escape_text(name.strip())


def _wait_for_end(record: MountRecord) -> None:
    """Waits until the daemon has ended. Raises FuseError if a step takes over _DEADLINE_S."""
    step: str | None = None
    deadline = time.monotonic() + _DEADLINE_S
    while alive(record):
        now = step_of(record.pid)
        if now != step:
            step, deadline = now, time.monotonic() + _DEADLINE_S
        elif time.monotonic() > deadline:
            waits = f": it has waited {_DEADLINE_S:.0f} s for {STEPS[step]}" if step else ""
            raise errors.FuseError(
                f"unmounted, but the daemon (pid {record.pid}) has not ended{waits}",
                hint=f"no data is lost; wait longer, and see {record.log}",
            )
        time.sleep(_STEP_S)
