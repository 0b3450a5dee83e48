"""A snapshot that was given, as a file of the mount's own.

A given snapshot lies where others can write: they may copy another over it, cut it short, or lose
its file system. A mount maps it for as long as it lives, so it maps a copy that is kept in its own
state directory. The copy is named by the snapshot's identity, so the next mount finds it there.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from monarch.errors import SnapshotError, TierError
from monarch.namespace.schema import META, decode_meta, unseal
from monarch.namespace.trailer import opened, read_value
from monarch.units import MiB, format_bytes

_PREFIX = "given-"
_SUFFIX = ".lmdb"
# Of linux/fs.h: have one file share the blocks of another.
_FICLONE = 0x40049409
_PIECE_BYTES = 4 * MiB


def own_copy(given: Path, directory: Path) -> Path:
    """The copy in ``directory``, which is ours alone, of the snapshot ``given``.

    It is made if it is not there yet; whether it is whole is for the caller to check. Raises
    SnapshotError if ``given`` cannot be used, TierError if ``directory`` has no room for a copy.
    """
    with opened(given) as file:
        copy = copy_of(_id(file, given), directory)
        if not copy.exists():
            _copy(file, given, copy)
    return copy


def copy_of(snapshot_id: str, directory: Path) -> Path:
    """Where the copy of a given snapshot is in ``directory``, if it is there."""
    return directory / f"{_PREFIX}{snapshot_id}{_SUFFIX}"


def read_id(given: Path) -> str:
    """The identity of a snapshot of which nothing else is needed. Raises SnapshotError."""
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
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        target = os.open(staged, flags, 0o600)
        try:
            _fill(target, file, given)
            os.fsync(target)
        finally:
            os.close(target)
        staged.rename(copy)
    except OSError as error:
        raise TierError(
            f"state directory {os.fspath(copy.parent)!r}: the copy of the snapshot {given} needs"
            f" {format_bytes(size)} there: {error.strerror}",
            hint="make room, or name another with --state",
        ) from error
    finally:
        with suppress(OSError):
            staged.unlink()


def _fill(target: int, file: int, given: Path) -> None:
    """Raises OSError if ``target`` cannot be written, SnapshotError if ``file`` cannot be read."""
    try:
        fcntl.ioctl(target, _FICLONE, file)
    except OSError:
        # Two file systems, or one that knows no such thing.
        offset = 0
        while data := _read(file, offset, given):
            offset += len(data)
            while data:
                data = data[os.write(target, data) :]


def _read(file: int, offset: int, given: Path) -> bytes:
    try:
        return os.pread(file, _PIECE_BYTES, offset)
    except OSError as error:
        raise SnapshotError(f"cannot read snapshot {given}: {error.strerror}") from error
