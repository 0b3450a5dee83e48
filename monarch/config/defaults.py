"""Default locations: the state directory, and local scratch for a tier.

Nothing here creates or changes a file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from monarch.errors import ConfigError
from monarch.posix.mounts import MountedFileSystem, mount_table
from monarch.text import MiB, plain_name

if TYPE_CHECKING:
    from monarch.config.settings import MountSettings, TierSettings


def state_root(*, uid: int | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """The directory of all state directories: /var/lib/monarch for root, else in the user's home.

    MONARCH_STATE_ROOT overrides both: for a volume of a container, or a node without a disk. Raises
    ConfigError for a user without a home, as in a container that runs as any uid.
    """
    environ = os.environ if environ is None else environ
    chosen = Path(environ.get("MONARCH_STATE_ROOT", ""))
    if chosen.is_absolute():
        return chosen
    if (os.getuid() if uid is None else uid) == 0:
        return Path("/var/lib/monarch")
    # The XDG specification demands that a relative value is ignored.
    given = Path(environ.get("XDG_STATE_HOME", ""))
    if given.is_absolute():
        return given / "monarch"
    home = environ.get("HOME") or os.path.expanduser("~")
    if home == "~":
        raise ConfigError(["this user has no home directory; set HOME or MONARCH_STATE_ROOT"])
    return Path(home) / ".local/state/monarch"


def readable_name(source: Path) -> str:
    """``imagenet-1f2e3d4c``: a file name for a source, the same for all paths to the source."""
    resolved = os.path.realpath(source)
    digest = hashlib.blake2b(os.fsencode(resolved), digest_size=4).hexdigest()
    return f"{plain_name(Path(resolved))}-{digest}"


def state_directory(settings: MountSettings) -> Path:
    """The state directory of a mount. It need not exist yet."""
    if settings.state is not None:
        return settings.state
    beside = state_beside(settings)
    return beside if beside.is_dir() else state_root() / readable_name(settings.source)


def state_beside(settings: MountSettings) -> Path:
    """The state directory of a further mount of a source, named after its mount point.

    A mount point that was mounted with it before keeps it.
    """
    mountpoint = os.fsencode(os.path.abspath(settings.mountpoint))
    digest = hashlib.blake2b(mountpoint, digest_size=4).hexdigest()
    return state_root() / f"{readable_name(settings.source)}-at-{digest}"


# Variables that schedulers and sites set to the scratch directory of a job, best known first.
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
        *("/local", "/scratch/local", "/localscratch", "/nvme", "/mnt/nvme", "/tmp", "/var/tmp"),
    )
)
# A file system with less free space is not used for a default tier.
_LEAST_FREE = 256 * MiB
_REMOTE = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "cifs", "smb3", "smbfs", "ceph"),
    *("glusterfs", "afs", "9p", "pvfs2", "orangefs", "wekafs", "panfs", "virtiofs"),
}
# Memory belongs to the job; a tier in memory must be configured.
_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}


class _Scratch(NamedTuple):
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
    """The default tier of a mount: on the local scratch of this node with the most free space.

    A directory that the scheduler names is preferred to the usual ones of nodes. Memory and network
    file systems are never used, and the file system of the source only if there is no other. The
    capacity is left to :meth:`TierSettings.capacity_within`, which counts the bytes that the tier
    already holds. Raises ConfigError if there is no scratch.
    """
    environ = os.environ if environ is None else environ
    mounts = mount_table() if mounts is None else mounts
    named = [Path(environ[name]) for name in SCRATCH_VARIABLES if environ.get(name)]
    state = state_directory(settings)
    usual = [*directories, next(path for path in (state, *state.parents) if path.is_dir())]
    by_preference = [s for path in named if (s := _scratch(path, mounts)) is not None]
    others = (s for path in usual if (s := _scratch(path, mounts)) is not None)
    by_preference += sorted(others, key=lambda scratch: -scratch.free)
    if not by_preference:
        raise ConfigError(
            ["no local scratch with free space was found; name a tier with --tier PATH[:SIZE]"]
        )
    try:
        source_device = settings.source.stat().st_dev
    except OSError:
        source_device = -1
    chosen = next((s for s in by_preference if s.device != source_device), by_preference[0])
    path = chosen.path / f"monarch-{os.getuid()}" / readable_name(settings.source)
    # Imported here: callers that only need a directory do not load pydantic.
    from monarch.config.settings import TierSettings

    return TierSettings(path=path)


def _scratch(path: Path, mounts: Sequence[MountedFileSystem]) -> _Scratch | None:
    """``path`` with its free space, or None if it cannot or should not hold a tier."""
    try:
        # First by name alone: resolving a path on a hung network file system would hang.
        if not _is_local_disk(kind_of(path, mounts)):
            return None
        resolved = path.resolve(strict=True)
        if not _is_local_disk(kind_of(resolved, mounts)):
            return None
        if not resolved.is_dir() or not os.access(resolved, os.R_OK | os.W_OK | os.X_OK):
            return None
        ours = resolved / f"monarch-{os.getuid()}"
        # In a directory open to all, another user may have made it to read the copies.
        if os.path.lexists(ours) and (ours.is_symlink() or ours.lstat().st_uid != os.getuid()):
            return None
        room = os.statvfs(resolved)
        free = room.f_bavail * room.f_frsize
        return _Scratch(path, free, resolved.stat().st_dev) if free >= _LEAST_FREE else None
    except (OSError, RuntimeError):
        return None


def kind_of(path: Path, mounts: Sequence[MountedFileSystem]) -> str:
    """The type of the file system that holds ``path``, whose links are not resolved."""
    above = [mount for mount in mounts if path.is_relative_to(mount.mount_point)]
    # Of two mounts at one place the later hides the earlier.
    nearest = max(reversed(above), key=lambda mount: len(mount.mount_point.parts), default=None)
    return "unknown" if nearest is None else nearest.kind


def is_remote(kind: str) -> bool:
    """Whether file systems of type ``kind`` are on a network."""
    return kind in _REMOTE or (kind.startswith("fuse") and kind != "fuseblk")


def _is_local_disk(kind: str) -> bool:
    return kind != "unknown" and kind not in _MEMORY and not is_remote(kind)
