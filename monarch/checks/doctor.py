"""Checks whether this machine and its mounts meet the needs of Monarch, and says what to do if not.

No check changes anything, and a hung mount costs a short wait only.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from monarch.checks.peers import check_peers
from monarch.checks.preflight import Check, bounded, check_mount, check_state, room_of
from monarch.checks.preflight_writes import check_writing
from monarch.config import load
from monarch.config.defaults import default_tier
from monarch.config.settings import MountSettings
from monarch.control.client import call
from monarch.control.registry import MountRecord, Registry, SeenMount, seen_mounts
from monarch.errors import ConfigError, MonarchError
from monarch.fuse.datapath_mode import BUILD_IT, NOT_BUILT, Abilities, without_passthrough
from monarch.posix.cgroups import machine_memory, memory_groups, pids_groups
from monarch.posix.mounts import MountedFileSystem, mount_table
from monarch.telemetry.health import KINDS
from monarch.telemetry.report import StatusReport
from monarch.text import MiB, counted, escape_text, format_bytes

_LEAST_DESCRIPTORS = 4096
_LEAST_MEMORY = 512 * MiB
# Threads that a busy daemon needs with the default limits, and some for the job beside it.
_LEAST_THREADS = 256
# Time limit for an answer of a daemon, which answers from memory.
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Machine:
    """The paths and functions that the checks use; tests replace them."""

    abilities: Abilities
    root: Path = Path("/")
    uid: int = -1
    environ: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Machine:
        return cls(Abilities.here(), uid=os.geteuid(), environ=os.environ)


def examine(
    machine: Machine, state_root: Path, *, configuration: Path | None = None
) -> Iterator[Check]:
    """The results of all checks; none raises."""
    yield check_fuse_device(machine)
    yield check_fusermount(machine)
    yield check_user_allow_other(machine)
    yield check_kernel(machine)
    yield check_request_timeouts(machine)
    yield check_datapath(machine)
    yield from check_packages()
    yield check_descriptors()
    yield check_threads(machine)
    yield check_memory(machine)
    yield from check_state_root(state_root, mount_table())
    records = Registry(state_root)
    seen = seen_mounts(records)
    yield from check_mounts(seen)
    yield from check_health(seen)
    if configuration is None:
        yield check_scratch(machine)
    else:
        yield from check_configuration(
            configuration, machine.abilities, records.all(), environ=machine.environ
        )
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
            "load the module with `modprobe fuse`; give a container the device, as by docker"
            " --device /dev/fuse",
        )
    except OSError as error:
        return Check(
            "fuse device",
            "fail",
            f"{path} cannot be opened: {error.strerror}",
            "its mode should be 0666; in a container, allow access to the device",
        )
    return Check("fuse device", "ok", f"{path} can be opened")


def check_fusermount(machine: Machine) -> Check:
    program = shutil.which("fusermount3", path=machine.environ.get("PATH"))
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
    with suppress(OSError):
        if name in map(str.strip, path.read_text(errors="replace").splitlines()):
            return Check(name, "ok", f"set in {path}")
    return Check(
        name,
        "warn",
        f"not set in {path}; only the user who mounts can use the mount",
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
            "listing directories is faster on 6.13 or newer",
        )
    if abilities.kernel < (4, 20):
        detail = f"{shown} is older than what Monarch is tested with"
        return Check("kernel", "warn", detail, "use 4.20 or newer")
    return Check("kernel", "ok", shown)


def check_request_timeouts(machine: Machine) -> Check:
    """Linux 6.15 can end the connection of a mount whose requests take too long."""
    name = "request timeouts"
    for knob in ("default_request_timeout", "max_request_timeout"):
        try:
            seconds = int((machine.root / "proc/sys/fs/fuse" / knob).read_text())
        except (OSError, ValueError):
            continue
        if seconds:
            return Check(
                name,
                "warn",
                f"fs.fuse.{knob} is {seconds} s: a source that hangs for longer ends the mount, not"
                " one read",
                f"`sysctl fs.fuse.{knob}=0`; limits.source_timeout ends single reads",
            )
    return Check(name, "ok", "the kernel sets none")


def check_datapath(machine: Machine) -> Check:
    """The datapath that `datapath: auto` would choose here."""
    abilities = machine.abilities
    if not abilities.built:
        return Check("datapath", "warn", f"python, the slowest, since {NOT_BUILT}", BUILD_IT)
    memory = format_bytes(abilities.memory_bytes)
    small = f"relay, open: none for small files if twice their size fits into {memory} of memory"
    if missing := without_passthrough(abilities):
        # Not a warning: the mount works, and most users are not root.
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
        advice = f"with many readers raise it to {_LEAST_DESCRIPTORS} or more in limits.conf"
        return Check("open files", "warn", f"at most {hard} (hard limit)", advice)
    shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    return Check("open files", "ok", f"{soft}, can be raised to {shown}")


def check_memory(machine: Machine) -> Check:
    leave = (
        "the daemon takes some tens of MiB and a few bytes per file; leave it"
        f" {format_bytes(_LEAST_MEMORY)}"
    )
    for group, limit in memory_groups(machine.root):
        if limit < _LEAST_MEMORY:
            shown = f"{format_bytes(limit)}, limited by the control group {group}"
            return Check("memory", "warn", shown, leave)
    _, available = machine_memory(machine.root)
    if not available:
        return Check("memory", "warn", "unknown", f"{machine.root / 'proc'} should be mounted")
    if available < _LEAST_MEMORY:
        return Check("memory", "warn", f"{format_bytes(available)} available", leave)
    return Check("memory", "ok", f"{format_bytes(available)} available")


def check_threads(machine: Machine) -> Check:
    """Compares the thread limits of the user and of each control group with the need."""
    name = "threads"
    advice = f"raise it to {_LEAST_THREADS} more: `ulimit -u`, limits.conf, TasksMax= of the unit"
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if machine.uid != 0 and soft != resource.RLIM_INFINITY and soft < _LEAST_THREADS:
        return Check(name, "warn", f"the limit of the user is {soft}", advice)
    for group, limit in pids_groups(machine.root):
        try:
            more = limit - int((group / "pids.current").read_text())
        except (OSError, ValueError):
            continue
        if more < _LEAST_THREADS:
            return Check(name, "warn", f"{more} more, says the control group {group}", advice)
    return Check(name, "ok", f"{_LEAST_THREADS} or more can be started")


def check_state_root(state_root: Path, mounts: Sequence[MountedFileSystem]) -> list[Check]:
    name = "state directory"
    return bounded(
        name, state_root, lambda: check_state(name, state_root, mounts, None, of_all=True)
    )


def check_scratch(machine: Machine) -> Check:
    nowhere = Path("/nonexistent")
    settings = MountSettings(name="doctor", source=nowhere, mountpoint=nowhere)
    try:
        tier = default_tier(settings, environ=machine.environ)
    except ConfigError as error:
        return Check("scratch", "warn", str(error), "see `monarch mount --help`")
    # The path ends with a directory for the user and one for the source.
    scratch = tier.path.parents[1]
    free = format_bytes(room_of(scratch).free)
    detail = f"{scratch}, {free} free, is the tier of a mount without --tier"
    return Check("scratch", "ok", detail)


def check_mounts(seen: Sequence[SeenMount]) -> Iterator[Check]:
    broken = [s for s in seen if s.state in ("stale", "leftover")]
    for mount in broken:
        what = "the daemon is dead"
        if mount.state == "leftover":
            what = "a daemon ended without cleaning up"
        detail = f"{escape_text(mount.mountpoint)}: {what}"
        yield Check("mounts", "fail" if mount.state == "stale" else "warn", detail, mount.advice)
    if not broken:
        yield Check("mounts", "ok", f"{len(seen)} mounted")


def check_health(seen: Sequence[SeenMount]) -> Iterator[Check]:
    """The health that each running daemon reports."""
    for mount in seen:
        if mount.state != "served" or mount.record is None:
            continue
        where = escape_text(mount.mountpoint)
        try:
            answer = call(Path(mount.record.socket), "status", {}, timeout=_ANSWER_SECONDS)
            health = StatusReport.from_dict(answer).health
        except MonarchError as error:
            advice = error.hint or f"see {mount.record.log}"
            yield Check("health", "fail", f"{where}: {error.args[0]}", advice)
            continue
        except ValueError as error:
            advice = f"`monarch umount {where}` and mount it again with this version"
            yield Check("health", "warn", f"{where}: is of another version: {error}", advice)
            continue
        for problem in health.problems:
            grave = KINDS.get(problem.kind, "degraded") == "failing"
            detail = f"{where}: {problem.kind}: {problem.what}"
            yield Check("health", "fail" if grave else "warn", detail, problem.remedy)
        if not health.problems:
            yield Check("health", "ok", f"{where}: ok")


def check_configuration(
    path: Path,
    abilities: Abilities,
    records: Sequence[MountRecord] = (),
    *,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Check]:
    """Checks the file, then the requirements of each of its mounts."""
    try:
        mounts = load.load(path)
    except ConfigError as error:
        for problem in error.problems:
            yield Check("configuration", "fail", problem, f"correct {path}")
        return
    yield Check("configuration", "ok", f"{path}: {counted(len(mounts), 'mount', 'mounts')}")
    for mount in mounts.values():
        yield from check_mount(mount, abilities, records)
        yield from check_writing(mount, records)
        yield from check_peers(mount, environ or {})


def check_scheduler(machine: Machine) -> Iterator[Check]:
    if (job := machine.environ.get("SLURM_JOB_ID")) is not None:
        yield Check(
            "slurm",
            "warn" if "SLURM_STEP_ID" in machine.environ else "ok",
            f"job {job}: Slurm kills a daemon when the step that started it ends",
            "mount in the batch script itself, in the job's prolog, or as a systemd service; not in"
            " a step of `srun` that ends before the others",
        )
