"""Compares files of a mount with those of its source, byte by byte.

It reads like any process: a hanging mount or source makes it hang, too. So it is for a command that
the user can interrupt.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from monarch.units import MiB

_PIECE_BYTES = 1 * MiB
# Does not wait for a fifo and does not follow a symbolic link out of a directory.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

Verdict = Literal["same", "waiting", "damaged", "different", "missing", "unreadable"]


@dataclass(frozen=True, slots=True)
class Compared:
    """``waiting``: right in the mount, not at the source yet. ``damaged``: the checksum differs.
    ``different``, ``missing``, ``unreadable``: at the source or in the mount; ``why`` says which.
    """

    path: str
    bytes: int
    verdict: Verdict
    why: str


def compare(
    path: str,
    *,
    mount: Path,
    source: Path,
    drained: bool,
    expected: str | None,
    progress: Callable[[int], None],
) -> Compared:
    """Compares ``path``, relative to both. ``drained``: the source should have it. ``expected``:
    the recorded XXH3 (64 bits, hexadecimal), if any. ``progress`` is called with the bytes read.
    """
    here = _digest(mount / path, progress)
    if isinstance(here, Compared):
        return Compared(path, 0, here.verdict, f"{here.why} in the mount")
    size, digest = here
    if expected is not None and digest != expected:
        return Compared(path, size, "damaged", "its bytes differ from the recorded checksum")
    if not drained:
        return Compared(path, size, "waiting", "it is not at the source yet")
    there = _digest(source / path, progress)
    if isinstance(there, Compared):
        return Compared(path, size, there.verdict, f"{there.why} at the source")
    if there[0] != size:
        why = f"it has {there[0]} bytes at the source, but {size} in the mount"
        return Compared(path, size, "different", why)
    if there[1] != digest:
        return Compared(path, size, "different", "its bytes at the source differ")
    return Compared(path, size, "same", "")


def _digest(path: Path, progress: Callable[[int], None]) -> tuple[int, str] | Compared:
    """The size and the checksum of a file, or why it has none, in a Compared without a path."""
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        return Compared("", 0, "missing", "it is missing")
    except OSError as error:
        return Compared("", 0, "unreadable", f"it cannot be read ({error.strerror})")
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return Compared("", 0, "unreadable", "it is not a regular file")
        # Drops the page cache, so that the disk or the server is read.
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        digest, size = xxhash.xxh3_64(), 0
        for piece in _pieces(fd):
            digest.update(piece)
            size += len(piece)
            progress(len(piece))
        return size, digest.hexdigest()
    except OSError as error:
        return Compared("", 0, "unreadable", f"it cannot be read ({error.strerror})")
    finally:
        os.close(fd)


def _pieces(fd: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_PIECE_BYTES))
    offset = 0
    while count := os.preadv(fd, [buffer], offset):
        yield buffer[:count]
        offset += count
