"""System calls that Python does not offer, expected errors, and other processes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# An ordinary user.
USER = 65534

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
MS_SYNC = 4

_AT_FDCWD = -100
_SYMLINK_NOFOLLOW = 0x100

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_libc.renameat2.argtypes = (
    *(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint),
)
_libc.opendir.restype = _libc.readdir64.restype = ctypes.c_void_p
_libc.opendir.argtypes = (ctypes.c_char_p,)
for _name in ("readdir64", "telldir", "rewinddir", "closedir"):
    getattr(_libc, _name).argtypes = (ctypes.c_void_p,)
_libc.telldir.restype = ctypes.c_long
_libc.seekdir.argtypes = (ctypes.c_void_p, ctypes.c_long)
_libc.seekdir.restype = _libc.rewinddir.restype = None


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Dirent(ctypes.Structure):
    _fields_ = (
        ("ino", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("length", ctypes.c_uint16),
        ("kind", ctypes.c_uint8),
        ("name", ctypes.c_char * 256),
    )


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    _checked(_libc.fallocate(fd, mode, offset, length))


def renameat2(old: str, new: str, flags: int) -> None:
    old_name, new_name = os.fsencode(old), os.fsencode(new)
    _checked(_libc.renameat2(_AT_FDCWD, old_name, _AT_FDCWD, new_name, flags))


def utimensat(path: str, access_ns: int, change_ns: int, *, follow: bool = True) -> None:
    """Times in nanoseconds since 1970, or ``UTIME_NOW`` and ``UTIME_OMIT`` in their place."""
    times = (_Time * 2)()
    for time, ns in zip(times, (access_ns, change_ns), strict=True):
        special = ns in (UTIME_NOW, UTIME_OMIT)
        time.seconds, time.nanoseconds = (0, ns) if special else divmod(ns, 1_000_000_000)
    flags = 0 if follow else _SYMLINK_NOFOLLOW
    _checked(_libc.utimensat(_AT_FDCWD, os.fsencode(path), times, flags))


class Directory:
    """An open directory with the C library's position in it."""

    def __init__(self, path: str) -> None:
        self._stream = _libc.opendir(os.fsencode(path))
        if not self._stream:
            _checked(-1)

    def next(self) -> bytes | None:
        """The next name but ``.`` and ``..``; None at the end."""
        while entry := _libc.readdir64(self._stream):
            name = bytes(ctypes.cast(entry, ctypes.POINTER(_Dirent)).contents.name)
            if name not in (b".", b".."):
                return name
        return None

    def rest(self) -> list[bytes]:
        return list(iter(self.next, None))

    def tell(self) -> int:
        return int(_libc.telldir(self._stream))

    def seek(self, position: int) -> None:
        _libc.seekdir(self._stream, position)

    def rewind(self) -> None:
        _libc.rewinddir(self._stream)

    def close(self) -> None:
        _libc.closedir(self._stream)


@contextlib.contextmanager
def fails(*numbers: int) -> Iterator[None]:
    """What is in the block has to fail with one of these errors."""
    wanted = " or ".join(errno.errorcode[number] for number in numbers)
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise AssertionError(f"{error!r} instead of {wanted}") from error
    else:
        pytest.fail(f"no error instead of {wanted}")


@contextlib.contextmanager
def as_user() -> Iterator[None]:
    """The block has the rights of an ordinary user; what is open and the directory stay."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(USER)
    os.seteuid(USER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@contextlib.contextmanager
def opened(path: str | bytes, flags: int, mode: int = 0o666) -> Iterator[int]:
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def write_file(path: str | bytes, content: bytes, mode: int = 0o644) -> None:
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode) as fd:
        assert os.write(fd, content) == len(content)


def read_file(path: str | bytes) -> bytes:
    with opened(path, os.O_RDONLY) as fd:
        return b"".join(iter(lambda: os.read(fd, 1 << 20), b""))


def exists(path: str | bytes) -> bool:
    return os.path.lexists(path)


class Child:
    """``function`` in a process of its own, which begins at once."""

    def __init__(self, function: Callable[[], Any], *, uid: int | None = None) -> None:
        self._results, theirs = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(theirs)
            return
        with os.fdopen(theirs, "wb") as results:
            try:
                if uid is not None:
                    os.setgroups([])
                    os.setresgid(uid, uid, uid)
                    os.setresuid(uid, uid, uid)
                pickle.dump((True, function()), results)
            except BaseException:
                pickle.dump((False, traceback.format_exc()), results)
            results.flush()
            os._exit(0)

    def result(self) -> Any:
        """What the function returned; its failure is a failure of the test."""
        with os.fdopen(self._results, "rb") as results:
            raw = results.read()
        os.waitpid(self._pid, 0)
        done, value = pickle.loads(raw) if raw else (False, "the process was killed")
        if not done:
            pytest.fail(f"in another process: {value}")
        return value

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._results)


def elsewhere(function: Callable[[], Any], *, uid: int | None = None) -> Any:
    """What ``function`` returns in another process, if need be of another user."""
    return Child(function, uid=uid).result()


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Each in a process of its own, at the same time."""
    children = [Child(function) for function in functions]
    return [child.result() for child in children]
