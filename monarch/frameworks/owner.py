"""Ensures one writer of a directory of checkpoints, on one node or on several.

On one node a lock on the file ``lock`` ensures it, and ends with the process. Other nodes see the
file ``owner``: it names the holder, is created exclusively, and its times are renewed every 15
seconds. It is void if it was not renewed for 60 seconds, by the clock of the file system or by the
local one, or if its process was on this machine and has ended. Nodes that do not see each other's
files, as with two mounts that absorb writes, are not separated in this way: their mounts detect it
(``writeback/lease.py``), and the names of their files differ.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from monarch.control.registry import process_started
from monarch.errors import LockedError
from monarch.posix.files import closing_fd
from monarch.posix.processes import namespaces

LOCK = "lock"
OWNER = "owner"
RENEW_S = 15.0
# An owner that was not renewed for this time, in seconds, is void.
STALE_S = 60.0
# The interval of checks of another owner, in seconds.
_LOOK_S = 1.0
_LARGEST = 4096

# Errors of file systems without locks or links: then none is used.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)

_FLAGS_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_FLAGS_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Holder:
    """The contents of the file. ``started`` in clock ticks, ``namespace`` is the pid namespace."""

    token: str
    host: str
    boot: str
    namespace: str
    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class _Seen:
    content: bytes
    renewed_ns: int


class Owner:
    """This process as the single writer of ``directory``, which messages call ``shown``.

    Raises LockedError, naming the other writer, if there is one; an owner on another node may be
    waited for until it is void, 60 seconds. Raises OSError.
    """

    def __init__(self, directory: Path, token: str, shown: Path | None = None) -> None:
        self._directory, self._shown = directory, shown or directory
        self._path = directory / OWNER
        self._part = directory / f".{OWNER}-{token}.part"
        pid, started = os.getpid(), process_started(os.getpid()) or 0
        self._me = _Holder(token, socket.gethostname(), _boot(), namespaces(), pid, started)
        self._mine = json.dumps(asdict(self._me)).encode()
        self._ending = threading.Event()
        self._lock_fd = self._locked()
        try:
            while not self._make():
                self._remove_stale()
        except BaseException:
            self._unlock()
            raise
        _HELD.add(self)
        threading.Thread(target=self._renew, name="checkpoints-owner", daemon=True).start()

    def confirm(self) -> None:
        """Raises LockedError if another process has taken over the directory, and OSError."""
        if _look(self._path) is None and self._make():
            # The file was removed; no other process owns the directory.
            return
        seen = _look(self._path)
        if seen is None or seen.content != self._mine:
            raise self._refused(seen)

    def release(self) -> None:
        """Releases the directory. May be called twice."""
        if self not in _HELD:
            return
        self._ending.set()
        with contextlib.suppress(OSError):
            seen = _look(self._path)
            if seen is not None and seen.content == self._mine:
                os.unlink(self._path)
        self.forget()

    def forget(self) -> None:
        """Closes the descriptors in a forked process, which is not the owner."""
        _HELD.discard(self)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _locked(self) -> int:
        """A descriptor that holds the lock of this node, or -1 if locks are not supported."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._directory / LOCK, flags, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in _NO_LOCKS:
                return -1
            if error.errno == errno.EWOULDBLOCK:
                raise self._refused(_look(self._path)) from None
            raise
        return fd

    def _write(self, path: Path) -> None:
        """Creates ``path`` with the holder. Raises OSError, FileExistsError if there is one."""
        with closing_fd(os.open(path, _FLAGS_NEW, 0o666)) as fd:
            os.write(fd, self._mine)
            os.fsync(fd)
            self._now_ns = os.fstat(fd).st_mtime_ns

    def _make(self) -> bool:
        """Tries to become the owner; returns False if there is one."""
        try:
            self._write(self._part)
            try:
                os.link(self._part, self._path)
            except FileExistsError:
                # NFS may lose the reply to a successful link and try again, which fails.
                return os.stat(self._part).st_nlink == 2
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                with contextlib.suppress(FileExistsError):
                    self._write(self._path)
                    return True
                return False
            return True
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._part)

    def _remove_stale(self) -> None:
        """Removes a void owner. Raises LockedError if the owner is valid."""
        seen = _look(self._path)
        if seen is None:
            return
        holder = _parse(seen.content)
        own = self._me.boot, self._me.namespace
        if holder is not None and (holder.boot, holder.namespace) == own:
            if _lives(holder):
                raise self._refused(seen)
        else:
            self._watch(seen)
        self._remove(seen)

    def _remove(self, stale: _Seen) -> None:
        """Removes the owner if it is still ``stale``; of several processes only one succeeds."""
        mark = xxhash.xxh3_64_hexdigest(stale.content)
        void = self._directory / f".{OWNER}-{mark}.part"
        try:
            os.link(self._path, void)
        except FileNotFoundError:
            return
        except FileExistsError:
            self._wait_for(void)
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._path.unlink(missing_ok=True)
            return
        try:
            linked = _look(void)
            # Another process may have become the owner before the link was made.
            if linked is not None and linked.content == stale.content:
                self._path.unlink(missing_ok=True)
        finally:
            void.unlink(missing_ok=True)

    def _wait_for(self, void: Path) -> None:
        """Waits while another process removes the owner, or has died in doing so."""
        with contextlib.suppress(FileNotFoundError):
            if self._now_ns - os.lstat(void).st_ctime_ns > STALE_S * 1e9:
                os.unlink(void)
                return
        time.sleep(_LOOK_S / 10)

    def _watch(self, seen: _Seen) -> None:
        """Returns when ``seen`` is void. Raises LockedError if it is renewed."""
        age_s = max(0.0, (self._now_ns - seen.renewed_ns) / 1e9)
        until_s = time.monotonic() + STALE_S - age_s
        while (rest_s := until_s - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, rest_s))
            if _look(self._path) != seen:
                raise self._refused(_look(self._path))

    def _renew(self) -> None:
        while not self._ending.wait(RENEW_S):
            # A failure is tried again; ``confirm`` detects it before a checkpoint is entered.
            with contextlib.suppress(OSError):
                with closing_fd(os.open(self._path, _FLAGS_READ)) as fd:
                    if os.read(fd, _LARGEST) == self._mine:
                        os.utime(fd)

    def _refused(self, seen: _Seen | None) -> LockedError:
        holder = _parse(seen.content) if seen else None
        process = f": process {holder.pid} on {holder.host}" if holder else ""
        return LockedError(
            f"{os.fspath(self._shown)!r} is in use by another trainer{process}",
            hint="wait until it ends, or name another directory; "
            f"{OWNER} there is void {STALE_S:.0f} s after it was last renewed",
        )


def _look(path: Path) -> _Seen | None:
    try:
        with closing_fd(os.open(path, _FLAGS_READ)) as fd:
            return _Seen(os.read(fd, _LARGEST), os.fstat(fd).st_mtime_ns)
    except FileNotFoundError:
        return None


def _parse(content: bytes) -> _Holder | None:
    """The holder; None if the file is not an owner's."""
    try:
        raw = json.loads(content)
        return _Holder(
            token=str(raw["token"]),
            # Limited, since it is shown in messages.
            host=ascii(str(raw["host"]))[1:-1][:64],
            boot=str(raw["boot"]),
            namespace=str(raw["namespace"]),
            pid=int(raw["pid"]),
            started=int(raw["started"]),
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _lives(holder: _Holder) -> bool:
    """Whether a holder on this machine is still running."""
    if holder.pid == os.getpid():
        return holder.token in {each._me.token for each in _HELD}
    try:
        return process_started(holder.pid) == holder.started
    except PermissionError:
        # /proc is mounted with hidepid=1, and it is a process of another user: perhaps the holder.
        return True


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# Forked workers may outlive the trainer for a time, and would hold its lock.
_HELD: weakref.WeakSet[Owner] = weakref.WeakSet()


def _forget_in_child() -> None:
    for owner in list(_HELD):
        owner.forget()


os.register_at_fork(after_in_child=_forget_in_child)
