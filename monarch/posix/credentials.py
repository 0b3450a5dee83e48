"""Lets one thread of a root daemon act on files as another user for the duration of one call.

What is written for a user has the limits of that user: the daemon itself may not exceed quotas
(``keep_quotas``), and the bytes of a user are written with that user's identity (``least_of``),
since a file system lets its administrator use the blocks that it keeps.

The kernel keeps the file system identity (user, group, supplementary groups, capabilities) for
each thread. libc's ``setgroups`` would change the groups of all threads, so the system call is made
directly. A daemon that is not root has only one identity and keeps it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeGuard

from monarch.posix.files import closing_fd

log = logging.getLogger(__name__)

_LIBC = ctypes.CDLL(None, use_errno=True)
# The number of the system call setgroups by machine (asm/unistd.h).
_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "ppc64le": 81, "s390x": 206}
# Version 3 of linux/capability.h: two words each of effective, permitted, inheritable.
_CAPABILITIES_3 = 0x20080522
_CAPABILITY_WORDS = "=6I"
# The flag of unshare for the umask and the current directory (sched.h).
_CLONE_FS = 0x200
# The right to exceed quotas, and to use the blocks that ext4 keeps (linux/capability.h).
_CAP_SYS_RESOURCE = 1 << 24
# The argument with which setfsuid and setfsgid return the id and change nothing.
_NO_ID = ctypes.c_uint32(-1)
# Bytes of /proc/PID/status that are searched for groups: enough for 65,536 of them.
_LARGEST_STATUS = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user, a group, and supplementary groups, by number."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    @property
    def is_root(self) -> bool:
        return self.uid == 0


ROOT = Credentials(0, 0)
# A user who is not known, except that it is not root.
NOBODY = Credentials(65534, 65534)
# Bits of a user number that fit beside an inode number.
USER_BITS = (1 << 24) - 1


def credentials_of(pid: int, uid: int, gid: int) -> Credentials:
    """The credentials of process ``pid``, which waits for an answer as ``uid`` and ``gid``. Its
    supplementary groups are read now; a process of another pid namespace has none."""
    if uid == 0:
        return Credentials(uid, gid)
    return Credentials(uid, gid, _groups_of(pid, uid))


def _groups_of(pid: int, uid: int) -> tuple[int, ...]:
    if pid <= 0:
        return ()
    status = b""
    try:
        with closing_fd(os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)) as fd:
            while part := os.read(fd, _LARGEST_STATUS):
                status += part
    except OSError:
        return ()
    groups: tuple[int, ...] = ()
    for line in status.split(b"\n"):
        key, _, value = line.partition(b":")
        if key == b"Uid" and int(value.split()[3]) != uid:
            # The pid belongs to another process by now.
            return ()
        if key == b"Groups":
            groups = tuple(map(int, value.split()))
            break
    return groups


def can_act_as_others() -> bool:
    """Whether the threads of this process can take the identity of another user."""
    return os.geteuid() == 0


def is_another_user(credentials: Credentials | None) -> TypeGuard[Credentials]:
    """Whether ``acting_as`` gives a thread the identity of another user."""
    return credentials is not None and not credentials.is_root and can_act_as_others()


def least_of(writers: Iterable[Credentials | None]) -> Credentials | None:
    """The one of several writers of a file with whose rights its bytes are written: the first who
    is not root, else the first; None for the daemon's own rights."""
    own: list[Credentials | None] = []
    for writer in writers:
        if is_another_user(writer):
            return writer
        own.append(writer)
    return own[0] if own else None


def keep_quotas() -> None:
    """Ends the right of this thread, and of those that it starts, to exceed quotas and to use
    blocks that a file system keeps. ``acting_as`` gives it back for what root does."""
    if can_act_as_others():
        words = list(struct.unpack(_CAPABILITY_WORDS, _capabilities()))
        words[0] &= ~_CAP_SYS_RESOURCE
        _set_capabilities(struct.pack(_CAPABILITY_WORDS, *words))


@contextmanager
def without_umask() -> Iterator[None]:
    """Lets this thread make entries with their whole mode. The other threads of the process keep
    the umask; so does this one if the kernel refuses it a umask of its own."""
    if _LIBC.unshare(_CLONE_FS) != 0:
        yield
        return
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def acting_as(credentials: Credentials | None) -> Iterator[None]:
    """Let this thread act on files with the rights of ``credentials``: those of a user without
    capabilities, those of root with the right that ``keep_quotas`` has ended.

    It changes nothing for None, or if the daemon is not root. It must be nested in no identity but
    root's, and its body must not wait for another thread. Raises OSError if the kernel refuses the
    identity; then the thread keeps its own.
    """
    if not is_another_user(credentials):
        with _exceeding_quotas() if credentials and can_act_as_others() else nullcontext():
            yield
        return
    groups, gid = os.getgroups(), _LIBC.setfsgid(_NO_ID) & 0xFFFFFFFF
    capabilities = _capabilities()
    # If the groups are refused, nothing has changed and nothing has to be undone.
    _set_groups(credentials.groups)
    try:
        _take(credentials)
        yield
    finally:
        try:
            _set_id(_LIBC.setfsuid, 0)
            _set_capabilities(capabilities)
            _set_id(_LIBC.setfsgid, gid)
            _set_groups(groups)
        except OSError:
            log.critical("a thread cannot restore its own identity: the daemon ends")
            os.abort()


@contextmanager
def _exceeding_quotas() -> Iterator[None]:
    capabilities = _capabilities()
    words = list(struct.unpack(_CAPABILITY_WORDS, capabilities))
    # A container may not permit it.
    words[0] |= words[1] & _CAP_SYS_RESOURCE
    _set_capabilities(struct.pack(_CAPABILITY_WORDS, *words))
    try:
        yield
    finally:
        _set_capabilities(capabilities)


def _take(credentials: Credentials) -> None:
    _set_id(_LIBC.setfsgid, credentials.gid)
    _set_id(_LIBC.setfsuid, credentials.uid)
    # The identity removes the capabilities about files, but not others that a file system may
    # check.
    _set_capabilities(_without_effective(_capabilities()))


def _set_groups(groups: Sequence[int]) -> None:
    number = _SETGROUPS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"cannot set the groups of a thread on {platform.machine()}")
    values = (ctypes.c_uint32 * len(groups))(*groups)
    if _LIBC.syscall(ctypes.c_long(number), ctypes.c_size_t(len(groups)), values) != 0:
        raise _error()


def _set_id(call: Callable[[ctypes.c_uint32], int], wanted: int) -> None:
    call(ctypes.c_uint32(wanted))
    # These calls do not report a refusal.
    if call(_NO_ID) & 0xFFFFFFFF != wanted:
        raise OSError(errno.EPERM, f"the kernel refused the identity {wanted}")


def _capabilities() -> bytes:
    """The effective, permitted and inheritable sets, the lower words, then the upper words."""
    header = struct.pack("=Ii", _CAPABILITIES_3, 0)
    data = ctypes.create_string_buffer(struct.calcsize(_CAPABILITY_WORDS))
    if _LIBC.capget(header, data) != 0:
        raise _error()
    return data.raw


def _without_effective(capabilities: bytes) -> bytes:
    words = list(struct.unpack(_CAPABILITY_WORDS, capabilities))
    words[0] = words[3] = 0
    return struct.pack(_CAPABILITY_WORDS, *words)


def _set_capabilities(capabilities: bytes) -> None:
    if _LIBC.capset(struct.pack("=Ii", _CAPABILITIES_3, 0), capabilities) != 0:
        raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
