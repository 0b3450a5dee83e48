"""Where things are when nobody says: the state directory, and scratch for a tier.

Nothing here creates or changes a file.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.errors import ConfigError
from monarch.text import plain_name
from monarch.units import MiB

if TYPE_CHECKING:
    from monarch.settings import MountSettings, TierSettings


def state_root(*, uid: int | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """Where the state directories are: /var/lib/monarch for root, else below the user's own.

    MONARCH_STATE_ROOT comes before both: a container's volume, or a node without a disk.
    """
    environ = os.environ if environ is None else environ
    chosen = Path(environ.get("MONARCH_STATE_ROOT", ""))
    if chosen.is_absolute():
        return chosen
    if (os.getuid() if uid is None else uid) == 0:
        return Path("/var/lib/monarch")
    # The specification of these variables has a relative value ignored.
    given = Path(environ.get("XDG_STATE_HOME", ""))
    if given.is_absolute():
        return given / "monarch"
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    return home / ".local/state/monarch"


def readable_name(source: Path) -> str:
    """``imagenet-1f2e3d4c``: a file name for a source, the same by any of the source's names."""
    resolved = os.path.realpath(source)
    digest = hashlib.blake2b(os.fsencode(resolved), digest_size=4).hexdigest()
    return f"{plain_name(Path(resolved))}-{digest}"


def state_directory(settings: MountSettings) -> Path:
    """The directory of what outlives this mount. It need not exist yet."""
    if settings.state is not None:
        return settings.state
    beside = state_beside(settings)
    return beside if beside.is_dir() else state_root() / readable_name(settings.source)


def state_beside(settings: MountSettings) -> Path:
    """The state directory of a further mount of a source, named after its mount point.

    A mount point that was mounted with it once keeps it.
    """
    mountpoint = os.fsencode(os.path.abspath(settings.mountpoint))
    digest = hashlib.blake2b(mountpoint, digest_size=4).hexdigest()
    return state_root() / f"{readable_name(settings.source)}-at-{digest}"


# Set by schedulers and sites to the scratch directory of the job, best known first.
SCRATCH_VARIABLES = (
    "MONARCH_SCRATCH",
    "SLURM_TMPDIR",
    "TMPDIR_LOCAL",
    "PBS_JOBFS",
    "LOCAL_SCRATCH",
    "JOB_TMPDIR",
)
SCRATCH_DIRECTORIES = tuple(
    Path(name)
    for name in (
        "/local",
        "/scratch/local",
        "/localscratch",
        "/nvme",
        "/mnt/nvme",
        "/tmp",
        "/var/tmp",
    )
)
# A tier with less would hold next to nothing, and the file system is about to be full.
_LEAST_FREE = 256 * MiB
_NOT_LOCAL = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "cifs", "smb3", "smbfs", "ceph"),
    *("glusterfs", "afs", "9p", "pvfs2", "orangefs", "wekafs", "panfs", "virtiofs", "fuse"),
}
# Memory is the job's; a tier there is given by hand.
_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}


@dataclass(frozen=True, slots=True)
class MountedFileSystem:
    """A line of the mount table: where, and which kind."""

    mount_point: Path
    kind: str


def mount_table(text: bytes | None = None) -> list[MountedFileSystem]:
    """The mounts of this process, from the text of ``/proc/self/mountinfo``."""
    table = []
    for line in (Path("/proc/self/mountinfo").read_bytes() if text is None else text).splitlines():
        before, _, after = line.partition(b" - ")
        # Blanks and newlines in a name are written \040 and \012.
        place = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), before.split(b" ")[4])
        table.append(MountedFileSystem(Path(os.fsdecode(place)), after.split(b" ")[0].decode()))
    return table


@dataclass(frozen=True, slots=True)
class _Scratch:
    path: Path
    free: int
    device: int


def default_tier(
    settings: MountSettings,
    *,
    environ: Mapping[str, str] | None = None,
    directories: Sequence[Path] = SCRATCH_DIRECTORIES,
    mounts: Sequence[MountedFileSystem] | None = None,
) -> TierSettings:
    """The tier of a mount for which none is given: on the roomiest local scratch of this node.

    A directory that the scheduler names comes before those that nodes usually have; of these the
    one with most room. Never memory, never a network file system, and the file system of the source
    only if there is no other. Capacity is left to :meth:`TierSettings.capacity_within`, which
    counts what the tier already holds. Raises ConfigError when there is none.
    """
    environ = os.environ if environ is None else environ
    mounts = mount_table() if mounts is None else mounts
    named = [Path(environ[name]) for name in SCRATCH_VARIABLES if environ.get(name)]
    usual = [*directories, _existing(state_directory(settings))]
    by_preference = [s for path in named if (s := _scratch(path, mounts)) is not None]
    by_preference += sorted(
        (s for path in usual if (s := _scratch(path, mounts)) is not None),
        key=lambda scratch: -scratch.free,
    )
    if not by_preference:
        raise ConfigError(
            ["no local scratch with room was found for a tier; give one with --tier PATH[:SIZE]"]
        )
    try:
        source_device = settings.source.stat().st_dev
    except OSError:
        source_device = -1
    chosen = next((s for s in by_preference if s.device != source_device), by_preference[0])
    path = chosen.path / f"monarch-{os.getuid()}" / readable_name(settings.source)
    # Who only asks for a directory does not wait for the model of all settings.
    from monarch.settings import TierSettings

    return TierSettings(path=path)


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.is_dir())


def _scratch(path: Path, mounts: Sequence[MountedFileSystem]) -> _Scratch | None:
    """``path`` with its room, or None where no tier should or can be."""
    try:
        # First by its name alone: to resolve a path on a hung network file system is to hang.
        if not _is_local(path, mounts):
            return None
        resolved = path.resolve(strict=True)
        if not _is_local(resolved, mounts):
            return None
        if not resolved.is_dir() or not os.access(resolved, os.R_OK | os.W_OK | os.X_OK):
            return None
        ours = resolved / f"monarch-{os.getuid()}"
        # In a directory open to all, somebody else may have made it to read what we copy.
        if os.path.lexists(ours) and (ours.is_symlink() or ours.lstat().st_uid != os.getuid()):
            return None
        room = os.statvfs(resolved)
        free = room.f_bavail * room.f_frsize
        return _Scratch(path, free, resolved.stat().st_dev) if free >= _LEAST_FREE else None
    except (OSError, RuntimeError):
        return None


def _is_local(path: Path, mounts: Sequence[MountedFileSystem]) -> bool:
    """Whether ``path`` is on a disk of this node, by the mount that holds it."""
    above = [mount for mount in mounts if path.is_relative_to(mount.mount_point)]
    if not above:
        return False
    # The longest is the nearest; of two at one place the later hides the earlier.
    depth = max(len(mount.mount_point.parts) for mount in above)
    kind = [mount.kind for mount in above if len(mount.mount_point.parts) == depth][-1]
    return kind not in _NOT_LOCAL and kind not in _MEMORY and not kind.startswith("fuse.")
