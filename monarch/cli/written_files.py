"""Files that a command writes at the end of long work: checked before it, and replaced whole."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from monarch.cli.output import remark
from monarch.posix.files import closing_fd, copy_data, rename_new
from monarch.posix.unfinished import unfinished_file
from monarch.text import escape_text


@contextmanager
def or_unchanged(out: Path) -> Iterator[None]:
    """Says for a command that is interrupted that ``out`` was not written."""
    try:
        yield
    except KeyboardInterrupt:
        remark(f"monarch: interrupted: nothing was written to {escape_text(os.fspath(out))}")
        raise


def require_writable(out: Path) -> None:
    """Fails before the runs instead of after them. Leaves no file, and a file that exists as it
    is."""
    is_new = not out.exists()
    with out.open("a"):
        pass
    if is_new:
        # A link stays, and the file that it leads to does not.
        os.unlink(os.path.realpath(out))


def replace_whole(out: Path, content: str | bytes) -> None:
    """Replaces the file as a whole, or, where that is impossible, as a device or in a directory of
    another user, its content. Bytes of a name that are not UTF-8 are written as they are. Raises
    OSError with the name of the file; a file that is replaced as a whole is then unchanged."""
    try:
        if isinstance(content, str):
            content = content.encode(errors="surrogateescape")
        _replace(out, content)
    except OSError as error:
        # A write that fails has no name, and the name of the temporary file says nothing to users.
        raise OSError(error.errno, error.strerror, os.fspath(out)) from error


def _replace(out: Path, content: bytes) -> None:
    target = Path(os.path.realpath(out))
    # /dev/stdout may be a pipe, which has no path.
    if (out.exists() and not out.is_file()) or not os.access(target.parent, os.W_OK):
        out.write_bytes(content)
        return
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    with unfinished_file(target.parent) as (part, file):
        _write_new(file, content, mode)
        part.replace(target)


def _write_new(file: BinaryIO, content: bytes, mode: int | None) -> None:
    """Writes a file, and sets ``mode`` unless it is None. Raises OSError."""
    if mode is not None:
        os.fchmod(file.fileno(), mode)
    file.write(content)
    file.flush()


def copy_to_new(content_fd: int, out: Path) -> int:
    """Copies an open file to a new one that only this user can read; returns its size. It has its
    name only when it is complete and durable. Raises OSError, EEXIST if the name is taken."""
    if os.path.lexists(out):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(out))
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with (
        closing_fd(os.open(out.parent, flags)) as directory,
        unfinished_file(out.parent) as (part, file),
    ):
        # Some file systems have no modes.
        with suppress(OSError):
            os.fchmod(file.fileno(), 0o600)
        count = copy_data(content_fd, file.fileno(), os.fstat(content_fd).st_size)
        os.fsync(file.fileno())
        rename_new(directory, os.fsencode(part.name), os.fsencode(out.name))
        os.fsync(directory)
        return count
