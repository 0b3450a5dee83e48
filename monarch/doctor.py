"""Is this machine, and are its mounts, as Monarch needs them? Each answer says what to do.

Nothing here changes anything, and a hung mount costs a short wait, not a hang.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from monarch import config, registry
from monarch.errors import ConfigError, FuseError
from monarch.modes import BUILD_IT, NOT_BUILT, Abilities, check_possible, without_passthrough
from monarch.places import MountedFileSystem, default_tier, mount_table
from monarch.registry import MountRecord, Registry
from monarch.settings import MountSettings, TierSettings
from monarch.text import escape_text
from monarch.units import MiB, format_bytes

CheckStatus = Literal["ok", "warn", "fail"]

FUSE_TYPE = "fuse.monarch"

_NETWORK = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "glusterfs", "9p", "afs"}
)
_LEAST_DESCRIPTORS = 4096
_LEAST_MEMORY = 512 * MiB
_PROBE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Check:
    """One answer: what was looked at, how it is, and, unless it is well, what to do."""

    name: str
    status: CheckStatus
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the checks look at, so that they can be pointed elsewhere."""

    abilities: Abilities
    root: Path = Path("/")
    uid: int = -1
    environ: Mapping[str, str] | None = None

    @classmethod
    def here(cls) -> Machine:
        return cls(Abilities.here(), uid=os.geteuid(), environ=os.environ)


MountState = Literal["served", "stale", "leftover", "foreign"]


@dataclass(frozen=True, slots=True)
class SeenMount:
    """A mount point as the mount table and the registry together show it.

    ``served``: its daemon runs. ``stale``: mounted, the daemon is dead. ``leftover``: a record of a
    dead daemon, nothing mounted. ``foreign``: mounted and answering, by another user's daemon or
    one with another state directory.
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
            return "ask as the user that mounted it"
        return ""


def seen_mounts(
    records: Registry, mounts: Sequence[MountedFileSystem] | None = None
) -> list[SeenMount]:
    """All Monarch mounts of this node, and what is left of them, in the order of mount points."""
    table = mount_table() if mounts is None else mounts
    mounted = {str(m.mount_point) for m in table if m.kind == FUSE_TYPE}
    seen: list[SeenMount] = []
    for record in records.all():
        state: MountState = "stale" if record.mountpoint in mounted else "leftover"
        if registry.alive(record):
            state = "served"
        seen.append(SeenMount(record.mountpoint, state, record))
    for mountpoint in mounted - {s.mountpoint for s in seen}:
        state = "stale" if _is_disconnected(mountpoint) else "foreign"
        seen.append(SeenMount(mountpoint, state, None))
    return sorted(seen, key=lambda s: s.mountpoint)


def examine(
    machine: Machine, state_root: Path, *, configuration: Path | None = None
) -> Iterator[Check]:
    """Every check in turn, none of which raises."""
    yield check_fuse_device(machine)
    yield check_fusermount(machine)
    yield check_user_allow_other(machine)
    yield check_kernel(machine)
    yield check_datapath(machine)
    yield from check_packages()
    yield check_descriptors()
    yield check_memory(machine)
    yield check_state_root(state_root, mount_table())
    yield from check_mounts(seen_mounts(Registry(state_root)))
    if configuration is None:
        yield check_scratch(machine)
    else:
        yield from check_configuration(configuration, machine.abilities)
    yield from check_scheduler(machine)


def check_fuse_device(machine: Machine) -> Check:
    path = machine.root / "dev/fuse"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return Check(
            "fuse device",
            "fail",
            f"{path} does not exist",
            "load the module with `modprobe fuse`; give a container the device, like docker"
            " --device /dev/fuse",
        )
    except OSError as error:
        return Check(
            "fuse device",
            "fail",
            f"{path} cannot be opened: {error.strerror}",
            "its mode should be 0666; in a container allow the device",
        )
    return Check("fuse device", "ok", f"{path} can be opened")


def check_fusermount(machine: Machine) -> Check:
    program = shutil.which("fusermount3", path=(machine.environ or {}).get("PATH"))
    if program is None:
        if machine.uid == 0:
            return Check("fusermount3", "ok", "not installed; root does not need it")
        return Check(
            "fusermount3", "fail", "not found in PATH", "install the package fuse3 of the system"
        )
    try:
        shown = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        setuid = bool(os.stat(program).st_mode & 0o4000)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("fusermount3", "fail", f"{program}: {error}", "reinstall the package fuse3")
    if machine.uid != 0 and not setuid:
        return Check(
            "fusermount3",
            "fail",
            f"{program} is not set-uid root, so users cannot mount",
            f"`chmod u+s {program}` as root, or reinstall the package fuse3",
        )
    return Check("fusermount3", "ok", f"{program}: {shown}")


def check_user_allow_other(machine: Machine) -> Check:
    name = "user_allow_other"
    if machine.uid == 0:
        return Check(name, "ok", "root may set allow_other without it")
    path = machine.root / "etc/fuse.conf"
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    if any(line.strip() == "user_allow_other" for line in lines):
        return Check(name, "ok", f"set in {path}")
    return Check(
        name,
        "warn",
        f"not set in {path}; only the user who mounts will see a mount",
        f"for `allow_other: true`, root adds the line user_allow_other to {path}",
    )


def check_kernel(machine: Machine) -> Check:
    abilities = machine.abilities
    shown = f"Linux {abilities.release}"
    if not abilities.cached_listings_expire:
        return Check(
            "kernel",
            "warn",
            f"{shown}: cached directory listings of 6.9 to 6.12 never expire, so none are cached",
            "listing directories is quicker on 6.13 or newer",
        )
    if abilities.kernel < (4, 20):
        return Check(
            "kernel",
            "warn",
            f"{shown} is older than what Monarch is tested with",
            "use 4.20 or newer",
        )
    return Check("kernel", "ok", shown)


def check_datapath(machine: Machine) -> Check:
    """The way that reads take here, if the configuration leaves the choice."""
    abilities = machine.abilities
    if not abilities.built:
        return Check("datapath", "warn", f"python, the slowest, since {NOT_BUILT}", BUILD_IT)
    memory = format_bytes(abilities.memory_bytes)
    small = f"relay without opens for small files that fit twice into {memory} of memory"
    if missing := without_passthrough(abilities):
        # Not a warning: most users are not root, and the mount works.
        return Check("datapath", "ok", f"{small}, relay for others: {missing}")
    return Check("datapath", "ok", f"{small}, passthrough for others")


def check_packages() -> Iterator[Check]:
    found = [f"Python {platform.python_version()}"]
    for name in ("pyfuse3", "trio", "lmdb", "numpy", "xxhash"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            yield Check(name, "fail", "not installed", f"`pip install {name}`")
    yield Check("packages", "ok", ", ".join(found))


def check_descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _LEAST_DESCRIPTORS:
        return Check(
            "open files",
            "warn",
            f"at most {hard} (hard limit)",
            f"with many readers raise it to {_LEAST_DESCRIPTORS} or more in limits.conf",
        )
    shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    return Check("open files", "ok", f"{soft}, can be raised to {shown}")


def check_memory(machine: Machine) -> Check:
    try:
        text = (machine.root / "proc/meminfo").read_text()
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        return Check("memory", "warn", "unknown", f"{machine.root / 'proc'} should be mounted")
    available = int(found[1]) * 1024
    if available < _LEAST_MEMORY:
        return Check(
            "memory",
            "warn",
            f"{format_bytes(available)} available",
            "the daemon takes some tens of MiB and a few bytes per file; leave it"
            f" {format_bytes(_LEAST_MEMORY)}",
        )
    return Check("memory", "ok", f"{format_bytes(available)} available")


def check_state_root(state_root: Path, mounts: Sequence[MountedFileSystem]) -> Check:
    name = "state directory"
    existing = next((p for p in (state_root, *state_root.parents) if p.exists()), Path("/"))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check(
            name,
            "fail",
            f"{state_root} cannot be written",
            "give each mount a `state:` directory, or set XDG_STATE_HOME",
        )
    kind = _kind_of(existing, mounts)
    if kind in _NETWORK or (kind.startswith("fuse") and kind != "fuseblk"):
        return Check(
            name,
            "warn",
            f"{state_root} is on {kind}, a network file system",
            "put it on a local disk: give each mount a `state:` directory or set XDG_STATE_HOME",
        )
    return Check(name, "ok", f"{state_root} on {kind}")


def check_scratch(machine: Machine) -> Check:
    nowhere = Path("/nonexistent")
    settings = MountSettings(name="doctor", source=nowhere, mountpoint=nowhere)
    try:
        tier = default_tier(settings, environ=machine.environ)
    except ConfigError as error:
        return Check("scratch", "warn", str(error), "see `monarch mount --help`")
    # Below it come a directory for the user and one for the source.
    scratch = tier.path.parents[1]
    free = _free(scratch)
    return Check(
        "scratch",
        "ok",
        f"{scratch}, {format_bytes(free)} free, is where a mount without --tier puts its copies",
    )


def check_mounts(seen: Sequence[SeenMount]) -> Iterator[Check]:
    broken = [s for s in seen if s.state in ("stale", "leftover")]
    for mount in broken:
        shown = escape_text(mount.mountpoint)
        if mount.state == "stale":
            yield Check("mounts", "fail", f"{shown}: the daemon is dead", mount.advice)
        else:
            detail = f"{shown}: a daemon ended without cleaning up"
            yield Check("mounts", "warn", detail, mount.advice)
    if not broken:
        yield Check("mounts", "ok", f"{len(seen)} mounted")


def check_configuration(path: Path, abilities: Abilities) -> Iterator[Check]:
    """The file itself, then what each mount of it asks of this machine."""
    try:
        configuration = config.load(path)
    except ConfigError as error:
        for problem in error.problems:
            yield Check("configuration", "fail", problem, f"correct {path}")
        return
    yield Check("configuration", "ok", f"{path}: {len(configuration.mounts)} mounts")
    for mount in configuration.mounts.values():
        if not mount.source.is_dir():
            yield Check(
                f"{mount.name}: source",
                "warn",
                f"{mount.source} is not a directory here",
                "mount the parallel file system first",
            )
        try:
            check_possible(mount, abilities)
        except FuseError as error:
            yield Check(f"{mount.name}: datapath", "fail", error.args[0], error.hint)
        for tier in mount.tiers:
            yield _check_tier(mount, tier)


def _check_tier(mount: MountSettings, tier: TierSettings) -> Check:
    name = f"{mount.name}: tier {tier.name}"
    existing = next((p for p in (tier.path, *tier.path.parents) if p.exists()), Path("/"))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check(
            name, "fail", f"{tier.path} cannot be written", "choose a directory of your own"
        )
    room = os.statvfs(existing)
    free = room.f_bavail * room.f_frsize
    usable = max(free - tier.keep_free_within(room.f_blocks * room.f_frsize), 0)
    if tier.capacity is not None and tier.capacity > usable:
        return Check(
            name,
            "warn",
            f"{tier.path} may take {format_bytes(tier.capacity)}, but {format_bytes(usable)} are"
            " left now, what it already holds not counted",
            "copies stop when it is full; lower `capacity` or make room",
        )
    return Check(name, "ok", f"{tier.path}: {format_bytes(usable)} left for copies")


def check_scheduler(machine: Machine) -> Iterator[Check]:
    environ = machine.environ or {}
    if "SLURM_JOB_ID" not in environ:
        return
    yield Check(
        "slurm",
        "warn" if "SLURM_STEP_ID" in environ else "ok",
        f"job {environ['SLURM_JOB_ID']}: Slurm kills a daemon when the step that started it ends",
        "mount in the batch script itself, in the job's prolog, or as a systemd service; not in"
        " a step of `srun` that ends before the others",
    )


def _free(path: Path) -> int:
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def _kind_of(path: Path, mounts: Sequence[MountedFileSystem]) -> str:
    resolved = path.resolve()
    above = [m for m in mounts if resolved.is_relative_to(m.mount_point)]
    # Of two mounts at one place the later hides the earlier.
    return max(reversed(above), key=lambda m: len(m.mount_point.parts)).kind if above else "unknown"


def _is_disconnected(mountpoint: str) -> bool:
    """Whether nobody serves the mount any more. One that hangs is served, badly."""
    outcome: list[int | None] = []

    def probe() -> None:
        try:
            os.statvfs(mountpoint)
        except OSError as error:
            outcome.append(error.errno)

    return _within(_PROBE_SECONDS, probe) and outcome == [errno.ENOTCONN]


def _within(seconds: float, task: Callable[[], None]) -> bool:
    """Whether ``task`` ended in time; if not, its thread is left behind."""
    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
