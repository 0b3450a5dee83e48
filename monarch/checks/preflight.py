"""Checks before a mount: its source, state directory, tiers and port, and other mounts.

Nothing here changes anything. A path may be on a file system that hangs: each is checked in a
thread that is abandoned after a timeout.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

from monarch.config.defaults import is_remote, kind_of, state_beside, state_directory
from monarch.config.settings import MountSettings, TierSettings
from monarch.control.registry import MountRecord, alive
from monarch.control.state_directory import read_note, require_private
from monarch.errors import MonarchError, PackError, SnapshotError, TierError, Unanswered, UsageError
from monarch.fuse import mountpoint as mountpoints
from monarch.fuse.datapath_mode import Abilities, check_possible, without_passthrough
from monarch.namespace.snapshot import Snapshot
from monarch.packs.directory import is_pack, require_complete
from monarch.packs.pack import Pack
from monarch.posix.bounded_calls import PATIENCE_S, call_within
from monarch.posix.mounts import MountedFileSystem, mount_table
from monarch.posix.private_directory import read_private
from monarch.text import MiB, counted, format_bytes
from monarch.tiers.hierarchy import owner_of
from monarch.tiers.ownership import PRIVATE, other_sources, own_directory
from monarch.tiers.records import require_known_versions

CheckStatus = Literal["ok", "warn", "fail"]

# Their times have no nanoseconds, and they do not support files without a name (O_TMPFILE).
_COARSE = frozenset({"vfat", "msdos", "exfat"})
# Space for the records, the log and the snapshot of a large tree.
_LEAST_STATE_BYTES = 64 * MiB
# A modification time that any rounding would change.
_UNEVEN_NS = 1_234_567_891


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: its name, status, detail and, unless it is ok, the remedy."""

    name: str
    status: CheckStatus
    detail: str
    advice: str = ""


def bounded(
    name: str, path: Path, look: Callable[[], Iterable[Check]], *, patience_s: float = PATIENCE_S
) -> list[Check]:
    """The checks of ``look``; a failed one if ``look`` raises OSError or takes too long."""
    found: list[Check] = []
    try:
        call_within(patience_s, lambda: found.extend(look()))
        return found
    except Unanswered:
        advice = (
            "its file system hangs: check its client and server (`dmesg`), or unmount it with"
            f" `umount -l {path}`"
        )
        return [Check(name, "fail", f"{path} has not answered for {patience_s:g} s", advice)]
    except OSError as error:
        advice = "check it with `ls -ld` as the user who mounts"
        if error.errno in (errno.EIO, errno.EUCLEAN, errno.ENOTCONN, errno.ESTALE):
            advice = "its disk or its server has failed: see `dmesg`"
        return [*found, Check(name, "fail", f"{path}: {error.strerror}", advice)]
    except MonarchError as error:
        return [*found, Check(name, "fail", error.args[0], error.hint)]


# -- a mount ---------------------------------------------------------------------------------------


def check_mount(
    mount: MountSettings, abilities: Abilities, records: Sequence[MountRecord]
) -> Iterator[Check]:
    """All checks of a mount before it is mounted. ``records``: the existing mounts."""
    own = next(
        (r for r in records if r.mountpoint == os.fspath(mount.mountpoint) and alive(r)),
        None,
    )
    table = mount_table()
    mount = with_state_directory(mount, records)
    state = state_directory(mount)
    source = bounded(f"{mount.name}: source", mount.source, lambda: check_source(mount))
    yield from source
    # The mount point is compared with the source, which must answer for that.
    if own is None and all(check.status != "fail" for check in source):
        name = f"{mount.name}: mount point"
        yield from bounded(name, mount.mountpoint, lambda: _check_mountpoint(name, mount))
    try:
        check_possible(mount, abilities)
    except MonarchError as error:
        yield Check(f"{mount.name}: datapath", "fail", error.args[0], error.hint)
    name = f"{mount.name}: state"
    yield from bounded(name, state, lambda: check_state(name, state, table, own))
    yield from _check_snapshot(mount, state)
    try:
        check_apart(mount, records)
    except MonarchError as error:
        yield Check(f"{mount.name}: directories", "fail", error.args[0], error.hint)
    for tier in mount.tiers:
        look = _TierLook(f"{mount.name}: tier {tier.name}", mount, tier, abilities, table, own)
        yield from bounded(look.name, tier.path, look.checks)
    if mount.metrics.enabled and own is None:
        yield _check_port(mount)


def check_source(mount: MountSettings) -> Iterator[Check]:
    name, source = f"{mount.name}: source", mount.source
    try:
        if not stat.S_ISDIR(os.stat(source).st_mode):
            yield Check(name, "fail", f"{source} is not a directory", "correct the path")
            return
        with os.scandir(source) as entries:
            empty = next(entries, None) is None
    except FileNotFoundError:
        yield Check(name, "fail", f"{source} does not exist", "mount its file system first")
    except PermissionError:
        detail = f"{source} cannot be read by uid {os.geteuid()}"
        yield Check(name, "fail", detail, "mount as a user who may read it")
    else:
        if empty:
            yield Check(name, "warn", f"{source} is empty", "check that its file system is mounted")
        elif is_pack(os.fsencode(source)):
            yield _check_pack(name, mount)
        else:
            yield _check_directory(name, source)


def _check_directory(name: str, source: Path) -> Check:
    try:
        require_complete(os.fsencode(source))
    except PackError as error:
        return Check(name, "fail", str(error.args[0]), error.hint)
    return Check(name, "ok", f"{source} answers")


def _check_pack(name: str, mount: MountSettings) -> Check:
    source = mount.source
    try:
        with Pack.open(os.fsencode(source)) as pack:
            info = pack.info
    except PackError as error:
        return Check(name, "fail", str(error), error.hint)
    shown = (
        f"{source} is a pack: {counted(info.files, 'file', 'files')} in"
        f" {counted(info.chunks, 'chunk', 'chunks')}"
    )
    if mount.absorbs:
        advice = "leave `write` and `absorb` out: writing fails with EROFS"
        return Check(name, "warn", f"{shown}; a pack is read-only", advice)
    return Check(name, "ok", shown)


def _check_mountpoint(name: str, mount: MountSettings) -> Iterator[Check]:
    try:
        mountpoints.check(mount.mountpoint, mount.source)
        for tier in mount.tiers:
            mountpoints.check_tier(tier.path, mount.source, mount.mountpoint)
    except MonarchError as error:
        # The next mount unmounts a dead one.
        dead = mountpoints.mount_at(mount.mountpoint) is not None
        yield Check(name, "warn" if dead else "fail", error.args[0], error.hint)
    else:
        yield Check(name, "ok", f"{mount.mountpoint} can be mounted on")


def _check_snapshot(mount: MountSettings, state: Path) -> Iterator[Check]:
    name = f"{mount.name}: snapshot"
    path = mount.snapshot.file or state / "snapshot.lmdb"

    def look() -> Iterator[Check]:
        if not path.exists():
            yield Check(name, "ok", f"{path} does not exist yet, the first mount builds it")
            return
        try:
            with Snapshot.open(path) as snapshot:
                entries = counted(snapshot.entries, "entry", "entries")
                yield Check(name, "ok", f"{path}: {entries}")
        except SnapshotError as error:
            if mount.snapshot.file is None:
                advice = "nothing to do: the next mount builds it anew"
                yield Check(name, "warn", str(error), advice)
            else:
                advice = f"`monarch snapshot build {mount.source} -o {path}` builds it anew"
                yield Check(name, "fail", str(error), advice)

    yield from bounded(name, path, look)


def _check_port(mount: MountSettings) -> Check:
    name, address = f"{mount.name}: metrics", mount.metrics.address
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(where)
    except OSError as error:
        advice = "give each mount a `metrics.address` of its own; `ss -ltnp` shows its user"
        return Check(name, "fail", f"{address}: {error.strerror}", advice)
    return Check(name, "ok", f"{address} is free")


# -- directories -----------------------------------------------------------------------------------


def check_state(
    name: str,
    state: Path,
    table: Sequence[MountedFileSystem],
    own: MountRecord | None,
    *,
    of_all: bool = False,
) -> Iterator[Check]:
    """Checks an existing state directory, or the one in which it will be created. ``of_all``: it is
    the directory of all state directories, which may be open to others."""
    another = "name another directory with `state:` or --state"
    if os.path.islink(state) and (owner := os.lstat(state).st_uid) not in (0, os.geteuid()):
        advice = f"see its owner (`ls -ld {state}`); {another}"
        detail = f"{state} is a symbolic link of uid {owner}, which is not followed"
        yield Check(name, "fail", detail, advice)
        return
    unusable = _unusable(name, state, another) or _locked(name, state / "lock", own)
    if unusable is not None:
        yield unusable
        return
    try:
        if state.is_dir() and not of_all:
            require_private(state)
            require_known_versions(state)
    except MonarchError as error:
        yield Check(name, "fail", error.args[0], error.hint)
        return
    existing = nearest(state)
    if (free := room_of(existing).free) < _LEAST_STATE_BYTES:
        detail = f"{state}: {format_bytes(free)} are free"
        yield Check(name, "warn", detail, f"free space there, or {another}")
    elif is_remote(kind := kind_of(existing.resolve(), table)):
        advice = f"put it on a local disk: {another}, or set XDG_STATE_HOME"
        yield Check(name, "warn", f"{state} is on {kind}, a network file system", advice)
    else:
        yield Check(name, "ok", f"{state} on {kind}")


@dataclass(frozen=True, slots=True)
class _TierLook:
    """The checks of one tier of a configured mount; ``own`` is the record of the mount if it is
    mounted."""

    name: str
    mount: MountSettings
    tier: TierSettings
    abilities: Abilities
    table: Sequence[MountedFileSystem]
    own: MountRecord | None

    def checks(self) -> Iterator[Check]:
        path, private = self.tier.path, self.tier.path / PRIVATE
        own = own_directory(path, owner_of(state_directory(self.mount)))
        if os.path.islink(private):
            advice = (
                f"another user may have planted it to see the copies: `ls -ld {private}`; remove"
                " it, or choose a directory that only you can write"
            )
            detail = f"{private} is a symbolic link, which is not followed"
            yield Check(self.name, "fail", detail, advice)
            return
        unusable = (
            _unusable(self.name, path, "choose a directory of your own on a local disk")
            or _unusable(self.name, private, "remove it, or choose another directory")
            or _unusable(self.name, own, "remove it, or choose another directory")
            or _locked(self.name, own / "lock", self.own)
        )
        if unusable is not None:
            yield unusable
            return
        remarks = [*self._of_file_system(), *self._of_room()]
        yield from remarks
        if not remarks:
            others = ", ".join(other_sources(own))
            held = f"; it also holds copies of {others}" if others else ""
            room = format_bytes(self._usable())
            yield Check(self.name, "ok", f"{path}: {room} left for copies{held}")

    def _of_file_system(self) -> Iterator[Check]:
        path, existing = self.tier.path, nearest(self.tier.path)
        kind = kind_of(existing.resolve(), self.table)
        if is_remote(kind):
            yield self._warn(
                f"{path} is on {kind}, a network file system: no faster than the source",
                "choose a directory on a disk of this node, or in memory (/dev/shm)",
            )
        may_pass = self.mount.datapath in ("auto", "passthrough")
        if kind == "overlay" and may_pass and not without_passthrough(self.abilities):
            yield self._warn(
                f"{path} is on overlay, which does not support passthrough",
                "reads are relayed; in a container give the tier as a volume: -v /local/nvme:/tier",
            )
        if _is_coarse(existing, kind):
            yield self._warn(
                f"{path} ({kind}) does not keep times exactly, so copies there have no seal",
                "the scrub alone finds damage that other processes do to a copy; format it with"
                " xfs, or with `mkfs.ext4 -I 256`",
            )

    def _of_room(self) -> Iterator[Check]:
        path, usable = self.tier.path, self._usable()
        room = room_of(nearest(path))
        left = "not counting what it already holds"
        if room.free_inodes == 0:
            advice = "`df -i` shows it; remove small files there, or choose another directory"
            yield self._warn(f"{path}: no inode is free", advice)
        elif usable == 0:
            shown = format_bytes(room.free)
            kept = format_bytes(self.tier.keep_free_within(room.total))
            yield self._warn(
                f"{path} is full: {shown} are free, {kept} of it are kept free, {left}",
                "free space there, or lower `keep_free`; until then it stores no copies",
            )
        elif self.tier.capacity is not None and self.tier.capacity > usable:
            yield self._warn(
                f"{path} may take {format_bytes(self.tier.capacity)}, but {format_bytes(usable)}"
                f" are left now, {left}",
                "copies stop when it is full; lower `capacity` or free space",
            )

    def _usable(self) -> int:
        room = room_of(nearest(self.tier.path))
        return max(room.free - self.tier.keep_free_within(room.total), 0)

    def _warn(self, detail: str, advice: str) -> Check:
        return Check(self.name, "warn", detail, advice)


def _unusable(name: str, path: Path, advice: str) -> Check | None:
    """A failed check if this process cannot keep files in ``path``, or create it; else None."""
    existing = nearest(path)
    if not existing.is_dir():
        return Check(name, "fail", f"{existing} is not a directory", advice)
    status = os.stat(existing)
    # This process must own the private directories of a tier only.
    is_private = PRIVATE in (path.name, path.parent.name) or (path / "lock").exists()
    if existing == path and status.st_uid != os.geteuid() and is_private:
        return Check(name, "fail", f"{path} belongs to uid {status.st_uid}", advice)
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        repair = f"find the cause (`dmesg`) and `mount -o remount,rw` it, or {advice}"
        return Check(name, "fail", f"{path} is on a read-only file system", repair)
    if not os.access(existing, os.W_OK | os.X_OK):
        return Check(name, "fail", f"{path} cannot be written by uid {os.geteuid()}", advice)
    return None


def _locked(name: str, path: Path, own: MountRecord | None) -> Check | None:
    """A failed check if a daemon holds the lock. Only reads, and never takes the lock."""
    try:
        status = os.stat(path, follow_symlinks=False)
        note = read_private(path)[:8192]
        locks = Path("/proc/locks").read_text()
    except OSError:
        return None
    major, minor = os.major(status.st_dev), os.minor(status.st_dev)
    if f" {major:02x}:{minor:02x}:{status.st_ino} " not in locks:
        return None
    holder = {}
    with suppress(ValueError):
        holder = json.loads(note)
    pid, mountpoint = holder.get("pid", "?"), holder.get("mountpoint", "?")
    if own is not None and pid == own.pid:
        return None
    detail = f"{path.parent} is in use by pid {pid}, mounted at {mountpoint}"
    advice = f"`monarch umount {mountpoint}`, or give this mount its own directory"
    return Check(name, "fail", detail, advice)


def nearest(path: Path) -> Path:
    """The path itself, or its nearest parent directory that exists."""
    return next((p for p in (path, *path.parents) if os.path.lexists(p)), Path("/"))


class Room(NamedTuple):
    """Free bytes of a file system; ``free_inodes`` is None if the number is not fixed."""

    total: int
    free: int
    free_inodes: int | None


def room_of(path: Path) -> Room:
    statvfs = os.statvfs(path)
    # Some file systems have no fixed number of inodes and report 0.
    inodes = statvfs.f_favail if statvfs.f_files else None
    return Room(statvfs.f_blocks * statvfs.f_frsize, statvfs.f_bavail * statvfs.f_frsize, inodes)


def _is_coarse(directory: Path, kind: str) -> bool:
    """Whether the file system rounds times; tested with a file without a name."""
    if kind in _COARSE:
        return True
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        os.utime(fd, ns=(_UNEVEN_NS, _UNEVEN_NS))
        return os.fstat(fd).st_mtime_ns != _UNEVEN_NS
    except OSError:
        return True
    finally:
        os.close(fd)


# -- other mounts ----------------------------------------------------------------------------------

# Only running mounts of the same user are compared, since those of others cannot be read. Those of
# one configuration file are compared when it is read.


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
            mountpoints.require_outside(path, what)
    directories.append(("mount point", settings.mountpoint))
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
