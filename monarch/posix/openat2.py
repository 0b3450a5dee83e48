"""Opens untrusted paths beneath a directory descriptor, and never leaves that directory.

Other users may change the directory at any time. The kernel resolves the path with ``openat2(2)``:
it follows no symbolic link and refuses ``..``. A path longer than PATH_MAX is resolved in pieces.
The functions may wait for the file system: call them in a worker thread if it may be slow (the
interpreter lock is released).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct

from monarch.posix.files import closing_fd

# The system call has this number on all architectures but alpha.
_SYS_OPENAT2 = 437

_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_RESOLVE = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS

_OPEN_HOW = struct.Struct("=QQQ")

# PATH_MAX is 4096 with the final NUL; the kernel refuses a longer path with ENAMETOOLONG.
_SEGMENT_BYTES = 4000

_STEP = os.O_PATH | os.O_DIRECTORY

_LIBC = ctypes.CDLL(None, use_errno=True)


def open_beneath(root_fd: int, path: bytes, flags: int) -> int:
    """Open ``path`` beneath ``root_fd``; ``b""`` and ``b"."`` are the root itself.

    Always close-on-exec, never through a symbolic link. Raises OSError with the kernel's errno:
    ELOOP for a symbolic link in the way, EXDEV for an absolute path or ``..``.
    """
    if b"\0" in path:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    path = path or b"."
    if path.startswith(b"/") or b".." in path.split(b"/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    opener = _openat2 if _has_openat2() else _open_stepwise
    if len(path) <= _SEGMENT_BYTES:
        return opener(root_fd, path, flags)
    directory_fd = root_fd
    try:
        while len(path) > _SEGMENT_BYTES:
            cut = path.rfind(b"/", 0, _SEGMENT_BYTES)
            if cut < 0:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
            head, path = path[:cut], path[cut:].lstrip(b"/") or b"."
            below_fd = opener(directory_fd, head, _STEP | os.O_CLOEXEC | os.O_NOFOLLOW)
            if directory_fd != root_fd:
                os.close(directory_fd)
            directory_fd = below_fd
        return opener(directory_fd, path, flags)
    finally:
        if directory_fd != root_fd:
            os.close(directory_fd)


def lstat_beneath(root_fd: int, path: bytes) -> os.stat_result:
    """``lstat`` of ``path`` beneath ``root_fd``, of any length. Raises OSError as open_beneath."""
    parent, _, name = path.rstrip(b"/").rpartition(b"/")
    if path.startswith(b"/") or name == b"..":
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    if b"\0" in name:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    if not parent:
        return os.stat(name or b".", dir_fd=root_fd, follow_symlinks=False)
    with closing_fd(open_beneath(root_fd, parent, _STEP)) as parent_fd:
        return os.stat(name or b".", dir_fd=parent_fd, follow_symlinks=False)


@functools.cache
def _syscall() -> ctypes._NamedFuncPointer:
    function = _LIBC.syscall
    function.restype = ctypes.c_long
    text = ctypes.c_char_p
    function.argtypes = (ctypes.c_long, ctypes.c_int, text, text, ctypes.c_size_t)
    return function


@functools.cache
def _has_openat2() -> bool:
    """Whether openat2 is available. Filters of old containers return EPERM instead of ENOSYS."""
    with closing_fd(os.open("/", _STEP | os.O_CLOEXEC)) as fd:
        try:
            os.close(_openat2(fd, b".", _STEP | os.O_CLOEXEC))
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EPERM):
                return False
            raise
    return True


def _openat2(directory_fd: int, path: bytes, flags: int) -> int:
    how = _OPEN_HOW.pack(flags, 0, _RESOLVE)
    while True:
        fd: int = _syscall()(_SYS_OPENAT2, directory_fd, path, how, len(how))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), path)


def _open_stepwise(directory_fd: int, path: bytes, flags: int) -> int:
    """Emulates openat2, one component at a time, for Linux before 5.6."""
    *parents, name = [part for part in path.split(b"/") if part not in (b"", b".")] or [b"."]
    if path.endswith((b"/", b"/.")):
        flags |= os.O_DIRECTORY
    above_fd = directory_fd
    try:
        for part in parents:
            below_fd = _open_here(above_fd, part, _STEP | os.O_CLOEXEC | os.O_NOFOLLOW)
            if above_fd != directory_fd:
                os.close(above_fd)
            above_fd = below_fd
        return _open_here(above_fd, name, flags)
    finally:
        if above_fd != directory_fd:
            os.close(above_fd)


def _open_here(directory_fd: int, name: bytes, flags: int) -> int:
    """Opens an entry. O_PATH with O_NOFOLLOW opens a symbolic link itself; O_DIRECTORY refuses it,
    but with ENOTDIR where openat2 returns ELOOP."""
    try:
        return os.open(name, flags, dir_fd=directory_fd)
    except NotADirectoryError as error:
        try:
            os.readlink(name, dir_fd=directory_fd)
        except OSError:
            raise error from None
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None


def kind_of_file_system(fd: int) -> int:
    """``f_type`` of statfs(2), 0 on failure."""
    buffer = ctypes.create_string_buffer(256)
    if _LIBC.fstatfs(fd, buffer) != 0:
        return 0
    kind: int = struct.unpack_from("=q", buffer)[0]
    return kind & 0xFFFFFFFF
