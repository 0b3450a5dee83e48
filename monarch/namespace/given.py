"""The mount's own copy of a snapshot that the user named.

Other programs may overwrite or truncate a given snapshot, or its file system may fail. A mount maps
its snapshot for its whole life, so it maps a copy in its own state directory. The name of the copy
has the id of the snapshot, so the next mount finds it.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from monarch.errors import SnapshotError, TierError
from monarch.namespace.schema import META, decode_meta, unseal
from monarch.namespace.trailer import opened, read_value
from monarch.posix.files import closing_fd
from monarch.posix.private_directory import open_private
from monarch.text import MiB, format_bytes

_PREFIX = "given-"
_SUFFIX = ".lmdb"
# FICLONE of linux/fs.h: makes one file share the blocks of another.
_FICLONE = 0x40049409
_PIECE_BYTES = 4 * MiB


def own_copy(given: Path, directory: Path) -> Path:
    """The copy in the private directory ``directory`` of the snapshot ``given``.

    It is made if it does not exist; the caller must check its contents. Raises SnapshotError if
    ``given`` cannot be used, TierError if ``directory`` has no space.
    """
    with opened(given) as file:
        copy = copy_of(_id(file, given), directory)
        if not copy.exists():
            _copy(file, given, copy)
    return copy


def copy_of(snapshot_id: str, directory: Path) -> Path:
    """The path of the copy in ``directory`` of the snapshot with this id."""
    return directory / f"{_PREFIX}{snapshot_id}{_SUFFIX}"


def read_id(given: Path) -> str:
    """The id of a snapshot. Raises SnapshotError."""
    with opened(given) as file:
        return _id(file, given)


def _id(file: int, given: Path) -> str:
    meta = unseal(META, read_value(file, META, given), where=str(given))
    return decode_meta(bytes(meta), where=str(given)).id


def remove_other_copies(directory: Path, kept: Path) -> None:
    """Remove the copies of given snapshots that are not ``kept``."""
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        if path != kept:
            with suppress(OSError):
                path.unlink()


def _copy(file: int, given: Path, copy: Path) -> None:
    size = os.fstat(file).st_size
    staged = copy.with_name(f"{_PREFIX}copy.part")
    try:
        with closing_fd(open_private(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)) as target:
            _fill(target, file, given)
            os.fsync(target)
        staged.rename(copy)
    except OSError as error:
        raise TierError(
            f"state directory {os.fspath(copy.parent)!r}: the copy of the snapshot {given} needs"
            f" {format_bytes(size)} there: {error.strerror}",
            hint="free space, or name another directory with --state",
        ) from error
    finally:
        with suppress(OSError):
            staged.unlink()


def _fill(target: int, file: int, given: Path) -> None:
    """Raises OSError if ``target`` cannot be written, SnapshotError if ``file`` cannot be read."""
    try:
        fcntl.ioctl(target, _FICLONE, file)
    except OSError:
        # Two file systems, or one without this operation.
        offset = 0
        while True:
            try:
                data = os.pread(file, _PIECE_BYTES, offset)
            except OSError as error:
                raise SnapshotError(f"cannot read snapshot {given}: {error.strerror}") from error
            if not data:
                return
            offset += len(data)
            while data:
                data = data[os.write(target, data) :]
