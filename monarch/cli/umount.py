"""``monarch umount``: take a mount away and see its daemon end."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import click

from monarch.cli.output import emit_json, stderr
from monarch.errors import BusyError, FuseError, NotMountedError
from monarch.fuse import mountpoint as mountpoints
from monarch.places import state_root
from monarch.registry import MountRecord, Registry, alive

# The daemon syncs its tiers at the end, for at most ten seconds.
_DEADLINE_S = 30.0
# How long a process of the daemon's own, or one that has just let go, may be in the way. Seconds.
_PASSING_S = 2.0
_STEP_S = 0.02
_SHOWN_PIDS = 10


@click.command(
    epilog="""\b
Examples:
  monarch umount /mnt/data
  monarch umount --lazy /mnt/data     files in use stay readable until they are closed
"""
)
@click.argument("mountpoint")
@click.option("--lazy", is_flag=True, help="Do it although files are open.")
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
def umount(mountpoint: str, *, lazy: bool, as_json: bool) -> None:
    """Unmount MOUNTPOINT and wait until its daemon has ended. The tiers keep their copies."""
    path = Path(os.path.abspath(mountpoint))
    registry = Registry(state_root())
    record = _record(registry, path)
    if mountpoints.mount_at(path) is None and record is None:
        raise NotMountedError(
            f"{os.fspath(path)!r} is no Monarch mount", hint="`monarch status` lists the mounts"
        )
    if mountpoints.mount_at(path) is not None:
        _unmount(path, record, lazy=lazy)
    if record is not None:
        if not lazy:
            _wait_for_end(record)
        if not alive(record):
            registry.remove(record.mountpoint)
    if as_json:
        emit_json({"mountpoint": os.fspath(path), "unmounted": True})
    else:
        stderr().print(f"monarch: {path} is unmounted", markup=False, soft_wrap=True)


def _record(registry: Registry, path: Path) -> MountRecord | None:
    return next((r for r in registry.all() if r.mountpoint == os.fspath(path)), None)


def _unmount(path: Path, record: MountRecord | None, *, lazy: bool) -> None:
    """Raises BusyError with who it is, unless it is the daemon that has had something looked at."""
    deadline = time.monotonic() + _PASSING_S
    while True:
        try:
            mountpoints.unmount(path, lazy=lazy or (record is not None and not alive(record)))
        except BusyError as error:
            pids = mountpoints.users_of(path)
            passing = record is not None and all(_parent(pid) in (None, record.pid) for pid in pids)
            if not passing or time.monotonic() > deadline:
                raise BusyError(f"{error}{_named(pids)}", hint="or use --lazy") from error
            time.sleep(_STEP_S)
        else:
            return


def _parent(pid: int) -> int | None:
    """The process that started another, None if that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return None


def _named(pids: Sequence[int]) -> str:
    if not pids:
        return ""
    more = ", ..." if len(pids) > _SHOWN_PIDS else ""
    return f" by pid {', '.join(map(str, pids[:_SHOWN_PIDS]))}{more}"


def _wait_for_end(record: MountRecord) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while alive(record):
        if time.monotonic() > deadline:
            raise FuseError(
                f"unmounted, but the daemon (pid {record.pid}) has not ended",
                hint=f"see {record.log}",
            )
        time.sleep(_STEP_S)
