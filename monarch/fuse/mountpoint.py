"""The mount point: checks it, finds a dead mount there, mounts and unmounts.

The mount table is read first and the directory itself last: access to a dead or hung mount may fail
or hang.
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
from contextlib import suppress
from pathlib import Path

from monarch.errors import (
    BusyError,
    FuseError,
    MountPointError,
    SourceError,
    TierError,
    source_remedy,
)
from monarch.posix.mounts import MONARCH_TYPE, MountedFileSystem, mount_table

# The flags that libfuse uses, from linux/mount.h.
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
# With it the kernel leaves the umask of the processes to the daemon.
_MS_POSIXACL = 1 << 16
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_LIBC = ctypes.CDLL(None, use_errno=True)


def mount_at(mountpoint: Path) -> MountedFileSystem | None:
    """The Monarch mount at this mount point, dead or alive."""
    wanted = Path(os.path.abspath(mountpoint))
    on_top = [mounted for mounted in mount_table() if mounted.mount_point == wanted]
    return on_top[-1] if on_top and on_top[-1].kind == MONARCH_TYPE else None


def open_root(mountpoint: Path) -> int:
    """A descriptor, with O_PATH, of the root of the Monarch mount there. Raises OSError, ENOTCONN
    if the mount is gone: then the path is that of the directory beneath it."""
    fd = os.open(mountpoint, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        device = os.fstat(fd).st_dev
        wanted = (MONARCH_TYPE, f"{os.major(device)}:{os.minor(device)}")
        if wanted not in ((each.kind, each.device) for each in mount_table()):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), os.fspath(mountpoint))
    except BaseException:
        os.close(fd)
        raise
    return fd


def check(mountpoint: Path, source: Path) -> None:
    """Raises MountPointError or SourceError with a remedy, if a mount is not possible here."""
    path_text = os.fspath(mountpoint)
    where, origin = f"mount point {path_text!r}", f"source {os.fspath(source)!r}"
    outside = "name a directory outside it"
    if mount_at(mountpoint) is not None:
        raise MountPointError(
            f"{path_text!r} is already a Monarch mount",
            hint="to mount with other settings, run first: monarch umount "
            f"{shlex.quote(path_text)};"
            " the tiers keep their copies",
        )
    try:
        status = os.stat(source)
        if not stat.S_ISDIR(status.st_mode):
            raise SourceError(f"{origin} is not a directory", errno=errno.ENOTDIR)
        real_source = os.path.realpath(source)
    except OSError as error:
        raise SourceError(
            f"{origin}: {error.strerror}",
            errno=error.errno or errno.EIO,
            hint=source_remedy(error.errno, os.fspath(source)),
        ) from error
    try:
        names = os.listdir(mountpoint)
    except FileNotFoundError:
        hint = f"run: mkdir -p {path_text}"
        raise MountPointError(f"{where} does not exist", hint=hint) from None
    except NotADirectoryError:
        raise MountPointError(f"{where} is a file", hint="name an empty directory") from None
    except OSError as error:
        raise MountPointError(f"{where}: {error.strerror}") from error
    real = os.path.realpath(mountpoint)
    if real == real_source:
        raise MountPointError(f"{where} is the source itself", hint="name another, empty directory")
    # A bind mount of the source has another path.
    if any(os.path.samestat(each.stat(), status) for each in (Path(real), *Path(real).parents)):
        raise MountPointError(f"{where} lies in the {origin}", hint=outside)
    if _inside(real_source, real):
        raise MountPointError(
            f"the {origin} lies below the {where}",
            hint="it would be hidden; name another directory",
        )
    if outer := monarch_above(real):
        raise MountPointError(f"{where} lies in the Monarch mount {outer!r}", hint=outside)
    if outer := monarch_above(real_source):
        raise SourceError(
            f"{origin} lies in the Monarch mount {outer!r}",
            errno=errno.ELOOP,
            hint="mount its source, or a directory of that",
        )
    if inner := _monarch_below(real_source):
        raise SourceError(
            f"the Monarch mount {inner!r} lies in the {origin}",
            errno=errno.ELOOP,
            hint="unmount it, or name a source without it: its files are at its own source",
        )
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise MountPointError(
            f"{where} is not empty: {names[0]!r}{more}", hint="name an empty directory"
        )


def monarch_above(path: str) -> str:
    """The mount point of the Monarch mount that holds ``path``; empty if none does."""
    above = [mounted for mounted in mount_table() if Path(path).is_relative_to(mounted.mount_point)]
    # The longest mount point is the nearest; of two at one place the later hides the earlier.
    nearest = max(reversed(above), key=lambda it: len(it.mount_point.parts), default=None)
    return str(nearest.mount_point) if nearest is not None and nearest.kind == MONARCH_TYPE else ""


def _monarch_below(path: str) -> str:
    """The mount point of a Monarch mount of this user in the directory ``path``; empty if there is
    none."""
    own = (it for it in mount_table() if it.kind == MONARCH_TYPE and it.user == os.geteuid())
    mounts = (str(it.mount_point) for it in own)
    return next((mounted for mounted in mounts if _inside(mounted, path)), "")


def check_tier(tier: Path, source: Path, mountpoint: Path) -> None:
    """Raises MountPointError if a tier overlaps the source or the mount point."""
    real = os.path.realpath(tier)
    for other, what in ((source, "source"), (mountpoint, "mount point")):
        real_other = os.path.realpath(other)
        if real == real_other or _inside(real, real_other) or _inside(real_other, real):
            raise MountPointError(
                f"tier {os.fspath(tier)!r} and the {what} {os.fspath(other)!r} lie in one another",
                hint="name a directory outside it",
            )


def require_outside(path: Path, what: str) -> None:
    """Raises TierError if ``path``, which need not exist, is in a Monarch mount, dead or alive:
    that mount would serve, or drain, the files kept there."""
    path_text = os.fspath(path)
    # First by name alone: resolving the path could hang in a mount.
    if outer := monarch_above(os.path.abspath(path)) or monarch_above(os.path.realpath(path)):
        raise TierError(
            f"{what} {path_text!r} lies in the Monarch mount {outer!r}",
            hint="name a directory on a local disk of this node",
        )


def _inside(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")


def mount(mountpoint: Path, name: str, *, allow_other: bool, writable: bool, has_acls: bool) -> int:
    """Mounts; returns the descriptor of the FUSE device: the mount ends when it is closed. ``name``
    is shown as the device. Root mounts itself, others by fusermount3. Raises FuseError."""
    device = _open_device()
    mode = stat.S_IFMT(os.stat(mountpoint).st_mode)
    options = f"fd={device},rootmode={mode:o},user_id={os.geteuid()},group_id={os.getegid()}"
    options += ",default_permissions" + (",allow_other" if allow_other else "")
    flags = (0 if writable else _MS_RDONLY) | _MS_NOSUID | _MS_NODEV
    flags |= _MS_POSIXACL if has_acls else 0
    done = _LIBC.mount(
        name.encode(),
        os.fsencode(mountpoint),
        MONARCH_TYPE.encode(),
        ctypes.c_ulong(flags),
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
    """Mounts by fusermount3, for an ordinary user; returns the descriptor of the device."""
    escaped = name.replace("\\", "\\\\").replace(",", "\\,")
    access = "rw" if writable else "ro"
    options = f"{access},nosuid,nodev,default_permissions,subtype=monarch,fsname={escaped}"
    options += ",allow_other" if allow_other else ""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = _fusermount("-o", options, mountpoint=mountpoint, channel=theirs.fileno())
        if done.returncode != 0:
            words = done.stderr.strip().replace("\n", "; ")
            raise FuseError(
                f"cannot mount at {os.fspath(mountpoint)!r}: {words}", hint="run: monarch doctor"
            )
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    (device,) = descriptors
    os.set_inheritable(device, False)
    return device


def _fusermount(
    *options: str, mountpoint: Path, channel: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs fusermount3, which sends the device through ``channel``. Raises FuseError."""
    try:
        return subprocess.run(
            ["fusermount3", *options, "--", os.fspath(mountpoint)],
            env={**os.environ, "_FUSE_COMMFD": str(channel)} if channel is not None else None,
            pass_fds=[channel] if channel is not None else [],
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
        raise FuseError("fusermount3 does not end") from None


def unmount(mountpoint: Path, *, lazy: bool = False) -> None:
    """Unmounts. Raises BusyError if files are open, FuseError for other errors."""
    if os.geteuid() == 0:
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
        if _LIBC.umount2(os.fsencode(mountpoint), flags) == 0:
            return
        number = ctypes.get_errno()
        if number == errno.EBUSY:
            raise BusyError(f"{os.fspath(mountpoint)!r} is in use")
        raise FuseError(f"cannot unmount {os.fspath(mountpoint)!r}: {os.strerror(number)}")
    done = _fusermount("-u", "-q", *(["-z"] if lazy else []), mountpoint=mountpoint)
    if done.returncode != 0:
        still = mount_at(mountpoint) is not None
        if still and not lazy:
            raise BusyError(f"{os.fspath(mountpoint)!r} is in use")
        if still:
            raise FuseError(f"cannot unmount {os.fspath(mountpoint)!r}: {done.stderr.strip()}")


def users_of(mountpoint: Path) -> list[int]:
    """The visible pids that have an open file or their current directory in the mount."""
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
    """The visible pids that have a file open in a detached mount. Paths do not show it, and a stat
    would go to the daemon."""
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
