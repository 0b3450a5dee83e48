"""The mounts that daemons of this user serve on this node: one small file for each.

The daemon writes a record; a killed daemon leaves its record behind, and ``alive`` tells the two
apart. Nothing here waits for a mount: a dead mount may hang.

    mounts/MOUNTPOINT-NODE-BOOT.json

Each part of the name is a digest, NODE that of the name of the node, and BOOT that of its start.
Nodes may share the directory, as in a home. The processes of another node cannot be seen, so its
records are only shown. One of the two marks stays when a node gets another name or is started
again, and so do the pods of one machine. Earlier versions have written MOUNTPOINT.json.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from monarch.errors import NotMountedError, TierError
from monarch.posix import failpoints
from monarch.posix.bounded_calls import PATIENCE_S
from monarch.posix.mounts import MONARCH_TYPE, MountedFileSystem, is_dead, mount_table
from monarch.posix.private_directory import private_opener
from monarch.posix.processes import boot_id
from monarch.telemetry.report import Report
from monarch.text import escape_text

log = logging.getLogger(__name__)

# The limit of the kernel for symbolic links in one path.
_MOST_LINKS = 40
# The digits of a digest that stands for a node.
_MARK_DIGITS = 12
# A record has a few paths; a longer file is not a record.
_MAX_RECORD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class MountRecord(Report):
    """One mount. Paths are absolute text in which undecodable bytes are surrogate escapes.

    ``pid_started`` is ``process_started(pid)`` of the daemon, ``started_ns`` the time of the mount.
    ``absorbs`` is the directory that written data is drained from; empty for a read-only mount.
    ``node`` is the name of the node, empty in a record of an earlier version.
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
    node: str = ""


class Registry:
    """The records under ``<root>/mounts``; ``root`` is the state root of the user. All methods but
    ``elsewhere`` are for the records of this node.

    Calls are short, blocking file operations. Different mounts have different files; only the
    holder of the lock of a mount writes its record.
    """

    def __init__(self, root: Path) -> None:
        self._directory = root / "mounts"
        self._marks = [_digest(name)[:_MARK_DIGITS] for name in _this_node()]

    def add(self, record: MountRecord) -> None:
        """Writes ``record``, replacing an earlier one of its mount point. Raises TierError."""
        name = "-".join([_place(record.mountpoint), *self._marks])
        target = self._directory / f"{name}.json"
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
            for path in self._files(record.mountpoint):
                if path != target:
                    path.unlink(missing_ok=True)
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
        _unlink(self._files(mountpoint))

    def remove_own(self, record: MountRecord) -> None:
        """Removes ``record``, unless another daemon has replaced it meanwhile."""
        own = record.pid, record.pid_started
        for path in self._files(record.mountpoint):
            there = _load(path)
            if there is not None and (there.pid, there.pid_started) == own:
                _unlink([path])

    def _sweep_stages(self) -> None:
        """Removes temporary files of killed daemons."""
        for path in filter(self._is_here, self._directory.glob("*.part")):
            pid = path.suffixes[-2].removeprefix(".") if len(path.suffixes) > 1 else ""
            if not pid.isdecimal() or _started(int(pid)) is None:
                path.unlink(missing_ok=True)

    def all(self) -> list[MountRecord]:
        """Every readable record, in the order of mount points, also those of dead daemons."""
        records = _loaded(filter(self._is_here, self._directory.glob("*.json")))
        # A daemon that was killed while it replaced a record has left both.
        newest = {r.mountpoint: r for r in sorted(records, key=lambda r: r.started_ns)}
        return sorted(newest.values(), key=lambda r: r.mountpoint)

    def elsewhere(self) -> list[MountRecord]:
        """The records of other nodes, whose daemons may be running or not."""
        others = (path for path in self._directory.glob("*.json") if not self._is_here(path))
        return sorted(_loaded(others), key=lambda r: (r.mountpoint, r.node))

    def find(self, path: Path) -> MountRecord:
        """The innermost mount at or above ``path``, found by names alone. Raises
        NotMountedError."""
        records = self.all()
        wanted = real_path(path, [record.mountpoint for record in records])
        matching = [r for r in records if f"{wanted}/".startswith(r.mountpoint.rstrip("/") + "/")]
        if not matching:
            raise not_served(path, "is not in a Monarch mount")
        return max(matching, key=lambda r: len(r.mountpoint))

    def _files(self, mountpoint: str) -> list[Path]:
        """The files of a mount of this node, in general one at most."""
        found = self._directory.glob(f"{_place(mountpoint)}*.json")
        return [*filter(self._is_here, found)]

    def _is_here(self, path: Path) -> bool:
        """Whether a record, or its temporary file, is of this node."""
        _, *marks = path.name.partition(".")[0].split("-")
        return not marks or not set(marks).isdisjoint(self._marks)


def _this_node() -> list[str]:
    """What distinguishes this node from others: its name and, if it is known, its start."""
    names = [os.uname().nodename]
    with contextlib.suppress(OSError):
        names.append(boot_id())
    return names


def _place(mountpoint: str) -> str:
    return _digest(os.path.abspath(mountpoint))


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:32]


def _unlink(records: Iterable[Path]) -> None:
    for path in records:
        path.unlink(missing_ok=True)
        failpoints.failpoint("registry-removed")


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
    return _started(record.pid) == record.pid_started


def _started(pid: int) -> int | None:
    """As ``process_started``; also None for a process of another user which /proc hides
    (``hidepid=1``): it is no daemon of this user."""
    try:
        return process_started(pid)
    except PermissionError:
        return None


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


def _loaded(paths: Iterable[Path]) -> list[MountRecord]:
    return [record for path in sorted(paths) if (record := _load(path)) is not None]


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
