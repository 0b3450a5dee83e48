"""The mounts that daemons of this user serve on this node: one small file for each.

The daemon writes a record; a killed daemon leaves its record behind, and ``alive`` tells the two
apart. Nothing here waits for a mount: a dead mount may hang.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from monarch.errors import NotMountedError, TierError
from monarch.posix import failpoints
from monarch.posix.bounded_calls import PATIENCE_S
from monarch.posix.mounts import MONARCH_TYPE, MountedFileSystem, is_dead, mount_table
from monarch.posix.private_directory import private_opener
from monarch.telemetry.report import Report
from monarch.text import escape_text

log = logging.getLogger(__name__)

# The limit of the kernel for symbolic links in one path.
_MOST_LINKS = 40
# A record has a few paths; a longer file is not a record.
_MAX_RECORD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class MountRecord(Report):
    """One mount. Paths are absolute text in which undecodable bytes are surrogate escapes.

    ``pid_started`` is ``process_started(pid)`` of the daemon, ``started_ns`` the time of the mount.
    ``absorbs`` is the directory that written data is drained from; empty for a read-only mount.
    """

    mountpoint: str
    source: str
    pid: int
    pid_started: int
    socket: str
    state: str
    log: str
    started_ns: int
    absorbs: str = ""


class Registry:
    """The records under ``<root>/mounts``; ``root`` is the state root of the user.

    Calls are short, blocking file operations. Different mounts have different files; only the
    holder of the lock of a mount writes its record.
    """

    def __init__(self, root: Path) -> None:
        self._directory = root / "mounts"

    def add(self, record: MountRecord) -> None:
        """Writes ``record``, replacing an earlier one of its mount point. Raises TierError."""
        target = self._file(record.mountpoint)
        staged = target.with_name(f"{target.name}.{os.getpid()}.part")
        # ASCII with escapes, so that a name that is not UTF-8 survives.
        text = json.dumps(record.to_dict(), indent=1) + "\n"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(staged, "w", encoding="ascii", opener=private_opener) as file:
                file.write(text)
                # After a power cut the record is complete or missing, never empty.
                file.flush()
                os.fsync(file.fileno())
            failpoints.failpoint("registry-staged")
            staged.rename(target)
            failpoints.failpoint("registry-added")
            self._sweep_stages()
        except OSError as error:
            with contextlib.suppress(OSError):
                staged.unlink()
            raise TierError(
                f"cannot record the mount in {self._directory}: {error.strerror}",
                hint="the state directory must be writable",
            ) from error

    def remove(self, mountpoint: str) -> None:
        """Removes the record of a mount, if there is one."""
        self._file(mountpoint).unlink(missing_ok=True)
        failpoints.failpoint("registry-removed")

    def remove_own(self, record: MountRecord) -> None:
        """Removes ``record``, unless another daemon has replaced it meanwhile."""
        there = _load(self._file(record.mountpoint))
        if there is not None and (there.pid, there.pid_started) == (record.pid, record.pid_started):
            self.remove(record.mountpoint)

    def _sweep_stages(self) -> None:
        """Removes temporary files of killed daemons."""
        for path in self._directory.glob("*.part"):
            pid = path.suffixes[-2].removeprefix(".") if len(path.suffixes) > 1 else ""
            if not pid.isdecimal() or process_started(int(pid)) is None:
                path.unlink(missing_ok=True)

    def all(self) -> list[MountRecord]:
        """Every readable record, in the order of mount points, also those of dead daemons."""
        records = [_load(path) for path in sorted(self._directory.glob("*.json"))]
        return sorted((r for r in records if r is not None), key=lambda r: r.mountpoint)

    def find(self, path: Path) -> MountRecord:
        """The innermost mount at or above ``path``, found by names alone. Raises
        NotMountedError."""
        records = self.all()
        wanted = real_path(path, [record.mountpoint for record in records])
        matching = [r for r in records if f"{wanted}/".startswith(r.mountpoint.rstrip("/") + "/")]
        if not matching:
            raise not_served(path, "is not in a Monarch mount")
        return max(matching, key=lambda r: len(r.mountpoint))

    def _file(self, mountpoint: str) -> Path:
        digest = hashlib.sha256(os.fsencode(os.path.abspath(mountpoint))).hexdigest()
        return self._directory / f"{digest[:32]}.json"


def not_served(path: Path, what: str, *, hint: str = "") -> NotMountedError:
    """The error for a place that belongs to no mount of this user: ``what`` it is, or that it is in
    a mount of another one. ``hint`` is added to that for the former."""
    shown = escape_text(os.fspath(path))
    mounted = [str(each.mount_point) for each in mount_table() if each.kind == MONARCH_TYPE]
    place = real_path(path, mounted)
    if any(f"{place}/".startswith(f"{each.rstrip('/')}/") for each in mounted):
        return NotMountedError(
            f"{shown} is in a mount of another user, or of another MONARCH_STATE_ROOT",
            hint=f"its user may ask for that; `monarch status {shown}` shows its public figures",
        )
    return NotMountedError(f"{shown} {what}", hint=f"`monarch status` lists the mounts{hint}")


def real_path(path: Path | str, mountpoints: Collection[str] = ()) -> str:
    """``path`` without symbolic links, as in the mount table of the kernel.

    Components inside one of ``mountpoints`` are not resolved: a mount may hang.
    """
    done, rest = "/", os.path.abspath(path).split("/")[:0:-1]
    links = 0
    while rest:
        part = rest.pop()
        here = os.path.normpath(os.path.join(done, part))
        if here in mountpoints:
            return os.path.normpath(os.path.join(here, *reversed(rest)))
        try:
            target = os.readlink(here) if links < _MOST_LINKS else ""
        except OSError:
            target = ""
        if target:
            links += 1
            rest.extend(reversed(target.split("/")))
            done = "/" if target.startswith("/") else done
        else:
            done = here
    return done


def alive(record: MountRecord) -> bool:
    """Whether the daemon that wrote ``record`` is running; a reused pid does not count."""
    return process_started(record.pid) == record.pid_started


def process_started(pid: int) -> int | None:
    """The start time of a process, in clock ticks since boot; None if it does not run."""
    fields = process_stat(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])


def process_stat(pid: int) -> list[bytes] | None:
    """The fields of ``/proc/PID/stat`` from the state on; None if there is no process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of the command is in parentheses and may contain parentheses and blanks.
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _load(path: Path) -> MountRecord | None:
    try:
        with open(path, "rb", opener=private_opener) as file:
            raw = json.loads(file.read(_MAX_RECORD_BYTES))
        record = MountRecord.from_dict(raw)
        if unknown := raw.keys() - record.to_dict().keys():
            raise ValueError(f"it has the unknown keys {sorted(unknown)}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.warning("ignored the mount record %s: %s; delete it if it persists", path, error)
        return None
    return record


# -- all mounts of the node ------------------------------------------------------------------------

MountState = Literal["served", "stale", "leftover", "foreign"]


@dataclass(frozen=True, slots=True)
class SeenMount:
    """A mount point of the mount table or the registry.

    ``served``: its daemon runs. ``stale``: mounted, the daemon is dead. ``leftover``: the record of
    a dead daemon without a mount. ``foreign``: mounted and answering, by a daemon of another user
    or with another state directory.
    """

    mountpoint: str
    state: MountState
    record: MountRecord | None

    @property
    def advice(self) -> str:
        where = escape_text(self.mountpoint)
        if self.state == "stale":
            return f"`monarch umount {where}` removes it, and so does mounting it again"
        if self.state == "leftover":
            return f"mount it again, or `monarch umount {where}` to forget it"
        if self.state == "foreign":
            return (
                "a mount of another user, or of another MONARCH_STATE_ROOT: `monarch status"
                f" {where}` shows its public figures"
            )
        return ""


def seen_mounts(
    records: Registry, mounts: Sequence[MountedFileSystem] | None = None
) -> list[SeenMount]:
    """All Monarch mounts of this node, and records of dead ones, by mount point."""
    table = mount_table() if mounts is None else mounts
    mounted = {str(m.mount_point) for m in table if m.kind == MONARCH_TYPE}
    seen: list[SeenMount] = []
    for record in records.all():
        state: MountState = "stale" if record.mountpoint in mounted else "leftover"
        if alive(record):
            state = "served"
        seen.append(SeenMount(record.mountpoint, state, record))
    for mountpoint in mounted - {s.mountpoint for s in seen}:
        state = "stale" if is_dead(mountpoint, wait_s=PATIENCE_S) else "foreign"
        seen.append(SeenMount(mountpoint, state, None))
    return sorted(seen, key=lambda s: s.mountpoint)
