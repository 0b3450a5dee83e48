"""The mount point: may we mount here, is a dead mount in the way, how to mount and take it away.

The mount table is asked first and the directory itself last: touching a dead or hung mount may
fail or hang.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shlex
import socket
import stat
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from monarch.errors import (
    BusyError,
    FuseError,
    MountPointError,
    SourceError,
    TierError,
    source_remedy,
)

FS_TYPE = "fuse.monarch"

# How long a mount may take to answer before it counts as hung. Seconds.
_ANSWER_S = 5.0

# As libfuse mounts; they are those of linux/mount.h.
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Mounted:
    """A line of the mount table: where, of which type, and the device number of its files.

    ``id`` is the kernel's number of the mount, which its open files know after it was detached.
    """

    mountpoint: bytes
    type: str
    source: bytes
    device: str
    id: int


def mounts() -> list[Mounted]:
    """What is mounted in this mount namespace, oldest first."""
    found = []
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            before, _, after = line.partition(b" - ")
            fields = before.split()
            kind, source = after.split()[:2]
            found.append(
                Mounted(
                    _plain(fields[4]),
                    kind.decode(),
                    _plain(source),
                    fields[2].decode(),
                    int(fields[0]),
                )
            )
    return found


def _plain(field: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)


def mount_at(mountpoint: Path) -> Mounted | None:
    """The Monarch mount whose mount point this is, dead or alive."""
    wanted = os.fsencode(os.path.abspath(mountpoint))
    on_top = [mounted for mounted in mounts() if mounted.mountpoint == wanted]
    return on_top[-1] if on_top and on_top[-1].type == FS_TYPE else None


def is_dead(mountpoint: Path) -> bool:
    """Whether the mount's daemon is gone. A daemon that only does not answer is not."""
    failure: list[int | None] = []

    def ask() -> None:
        try:
            # Not stat, which the kernel answers from what it remembers.
            os.statvfs(mountpoint)
        except OSError as error:
            failure.append(error.errno)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_S)
    return failure == [errno.ENOTCONN]


def check(mountpoint: Path, source: Path) -> None:
    """Raises MountPointError or SourceError with what to do, unless we can mount here."""
    told = os.fspath(mountpoint)
    if mount_at(mountpoint) is not None:
        raise MountPointError(
            f"{told!r} is already a Monarch mount",
            hint=f"to mount with other settings, run first: monarch umount {shlex.quote(told)};"
            " the tiers keep their copies",
        )
    try:
        if not stat.S_ISDIR(os.stat(source).st_mode):
            raise SourceError(
                f"source {os.fspath(source)!r} is not a directory", errno=errno.ENOTDIR
            )
        real_source = os.path.realpath(source)
    except OSError as error:
        raise SourceError(
            f"source {os.fspath(source)!r}: {error.strerror}",
            errno=error.errno or errno.EIO,
            hint=source_remedy(error.errno, os.fspath(source)),
        ) from error
    try:
        names = os.listdir(mountpoint)
    except FileNotFoundError:
        raise MountPointError(
            f"mount point {told!r} does not exist", hint=f"run: mkdir -p {told}"
        ) from None
    except NotADirectoryError:
        raise MountPointError(
            f"mount point {told!r} is a file", hint="name an empty directory"
        ) from None
    except OSError as error:
        raise MountPointError(f"mount point {told!r}: {error.strerror}") from error
    real = os.path.realpath(mountpoint)
    if real == real_source:
        raise MountPointError(
            f"mount point {told!r} is the source itself", hint="name another, empty directory"
        )
    if _inside(real, real_source):
        raise MountPointError(
            f"mount point {told!r} lies in the source {os.fspath(source)!r}",
            hint="name a directory outside of it",
        )
    if _inside(real_source, real):
        raise MountPointError(
            f"the source {os.fspath(source)!r} lies below the mount point {told!r}",
            hint="it would be hidden; name another directory",
        )
    if outer := monarch_above(real):
        raise MountPointError(
            f"mount point {told!r} lies in the Monarch mount {outer!r}",
            hint="name a directory outside of it",
        )
    if outer := monarch_above(real_source):
        raise SourceError(
            f"source {os.fspath(source)!r} lies in the Monarch mount {outer!r}",
            errno=errno.ELOOP,
            hint="mount its source, or a directory of that",
        )
    if names:
        raise MountPointError(
            f"mount point {told!r} is not empty: {names[0]!r} and {len(names) - 1} more"
            if len(names) > 1
            else f"mount point {told!r} is not empty: {names[0]!r}",
            hint="name an empty directory",
        )


def monarch_above(path: str) -> str:
    """The mount point of the Monarch mount that holds ``path``; empty if none does."""
    wanted = os.fsencode(path)
    above = [
        mounted
        for mounted in mounts()
        if wanted == mounted.mountpoint or wanted.startswith(mounted.mountpoint.rstrip(b"/") + b"/")
    ]
    # The longest is the nearest; of two at one place the later hides the earlier.
    nearest = max(enumerate(above), key=lambda m: (len(m[1].mountpoint), m[0]), default=None)
    if nearest is None or nearest[1].type != FS_TYPE:
        return ""
    return os.fsdecode(nearest[1].mountpoint)


def check_tier(tier: Path, source: Path, mountpoint: Path) -> None:
    """Raises MountPointError if a tier and the source or the mount point lie in one another."""
    real = os.path.realpath(tier)
    for other, what in ((source, "source"), (mountpoint, "mount point")):
        real_other = os.path.realpath(other)
        if real == real_other or _inside(real, real_other) or _inside(real_other, real):
            raise MountPointError(
                f"tier {os.fspath(tier)!r} and the {what} {os.fspath(other)!r} lie in one another",
                hint="name a directory outside of it",
            )


def require_outside(path: Path, what: str) -> None:
    """Raises TierError if ``path``, which need not exist, lies in a Monarch mount, dead or alive.

    What is kept there would be served, or drained, by that mount.
    """
    told = os.fspath(path)
    # First by its name alone: a mount that hangs would hold up who resolves it.
    if outer := monarch_above(os.path.abspath(path)) or monarch_above(os.path.realpath(path)):
        raise TierError(
            f"{what} {told!r} lies in the Monarch mount {outer!r}",
            hint="name a directory on a local disk of this node",
        )


def _inside(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")


def mount(mountpoint: Path, name: str, *, allow_other: bool, writable: bool) -> int:
    """Mount and return the descriptor of the FUSE device, which is the mount's life.

    ``name`` is shown as what is mounted. Root mounts by itself, others through fusermount3. Raises
    FuseError.
    """
    device = _open_device()
    mode = stat.S_IFMT(os.stat(mountpoint).st_mode)
    options = f"fd={device},rootmode={mode:o},user_id={os.geteuid()},group_id={os.getegid()}"
    options += ",default_permissions" + (",allow_other" if allow_other else "")
    done = _LIBC.mount(
        name.encode(),
        os.fsencode(mountpoint),
        FS_TYPE.encode(),
        ctypes.c_ulong((0 if writable else _MS_RDONLY) | _MS_NOSUID | _MS_NODEV),
        options.encode(),
    )
    if done == 0:
        return device
    number = ctypes.get_errno()
    os.close(device)
    if number != errno.EPERM:
        raise FuseError(
            f"cannot mount at {os.fspath(mountpoint)!r}: {os.strerror(number)}",
            hint="run: monarch doctor",
        )
    return _mount_by_program(mountpoint, name, allow_other=allow_other, writable=writable)


def _open_device() -> int:
    try:
        return os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        hint = {
            errno.ENOENT: "load the kernel module: modprobe fuse",
            errno.EACCES: "ask the administrator for access to /dev/fuse",
            errno.EPERM: "allow the device in the container: --device /dev/fuse",
        }.get(error.errno or 0, "run: monarch doctor")
        raise FuseError(f"/dev/fuse: {error.strerror}", hint=hint) from error


def _mount_by_program(mountpoint: Path, name: str, *, allow_other: bool, writable: bool) -> int:
    """fusermount3 mounts for an ordinary user and hands the device's descriptor back."""
    escaped = name.replace("\\", "\\\\").replace(",", "\\,")
    access = "rw" if writable else "ro"
    options = f"{access},nosuid,nodev,default_permissions,subtype=monarch,fsname={escaped}"
    options += ",allow_other" if allow_other else ""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            done = subprocess.run(
                ["fusermount3", "-o", options, "--", os.fspath(mountpoint)],
                env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="backslashreplace",
                timeout=30,
                check=False,
            )
        except FileNotFoundError:
            raise FuseError("fusermount3 is missing", hint="install the package fuse3") from None
        except subprocess.TimeoutExpired:
            raise FuseError("fusermount3 does not come back") from None
        if done.returncode != 0:
            words = done.stderr.strip().replace("\n", "; ")
            raise FuseError(
                f"cannot mount at {os.fspath(mountpoint)!r}: {words}", hint="run: monarch doctor"
            )
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    (device,) = descriptors
    os.set_inheritable(device, False)
    return device


def unmount(mountpoint: Path, *, lazy: bool = False) -> None:
    """Take the mount away. Raises BusyError if files are open, FuseError if it cannot be done."""
    if os.geteuid() == 0:
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
        if _LIBC.umount2(os.fsencode(mountpoint), flags) == 0:
            return
        number = ctypes.get_errno()
        if number == errno.EBUSY:
            raise BusyError(f"{os.fspath(mountpoint)!r} is in use")
        raise FuseError(f"cannot unmount {os.fspath(mountpoint)!r}: {os.strerror(number)}")
    command = ["fusermount3", "-u", "-q", *(["-z"] if lazy else []), "--", os.fspath(mountpoint)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        raise FuseError("fusermount3 is missing", hint="install the package fuse3") from None
    except subprocess.TimeoutExpired:
        raise FuseError("fusermount3 does not come back") from None
    if done.returncode != 0:
        still = mount_at(mountpoint) is not None
        if still and not lazy:
            raise BusyError(f"{os.fspath(mountpoint)!r} is in use")
        if still:
            raise FuseError(f"cannot unmount {os.fspath(mountpoint)!r}: {done.stderr.strip()}")


def users_of(mountpoint: Path) -> list[int]:
    """The pids, as far as we may see them, that have a file or their directory in the mount."""
    prefix = os.fsencode(os.path.abspath(mountpoint))
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        links = [f"/proc/{name}/cwd", f"/proc/{name}/root"]
        try:
            links += [f"/proc/{name}/fd/{fd}" for fd in os.listdir(f"/proc/{name}/fd")]
        except OSError:
            continue
        for link in links:
            try:
                target = os.fsencode(os.readlink(link))
            except OSError:
                continue
            if target == prefix or target.startswith(prefix + b"/"):
                found.append(int(name))
                break
    return sorted(found)


def detached_users(mount_id: int) -> list[int]:
    """The pids, as far as we may see them, with a file open in a mount that was detached.

    Its paths say nothing any more, and asking the files themselves would ask the daemon.
    """
    wanted = re.compile(rb"^mnt_id:\s+%d$" % mount_id, re.MULTILINE)
    return sorted(
        int(name) for name in os.listdir("/proc") if name.isdigit() and _has_open(name, wanted)
    )


def _has_open(pid: str, wanted: re.Pattern[bytes]) -> bool:
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fdinfo"):
            with suppress(OSError), open(f"/proc/{pid}/fdinfo/{fd}", "rb") as file:
                if wanted.search(file.read()):
                    return True
    return False
