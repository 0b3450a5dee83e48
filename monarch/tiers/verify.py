"""Reads the files of a tier one by one, and compares each copy with its record.

Used by the scrub and by fsck; changes nothing. It must not displace pages of the job: pages that
were in memory stay there, pages that it read are dropped again.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from monarch.text import MiB
from monarch.tiers.contents import DIRECTORY, Contents, copy_name, ino_of, seal
from monarch.tiers.records import Record, Records
from monarch.types import Identity, Ino

T = TypeVar("T")

# Bytes read before other work may run.
PIECE_BYTES = 1 * MiB

# O_NONBLOCK: another program may have put a fifo in the place of a copy.
_LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

MISSING = "copy-missing"
SIZE = "copy-size"
DIGEST = "copy-digest"
SEAL = "copy-seal"
UNREADABLE = "copy-unreadable"
UNKNOWN = "copy-unknown"
TIER = "copy-tier"
VERSION = "copy-version"
TORN = "record-torn"
# The kinds of files that no record of this tier describes.
UNRECORDED = (UNKNOWN, TIER)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for a copy; ``kind`` is empty if the copy is right. ``error`` is the errno of the
    disk if it has failed, else ESTALE: the copy differs from its record."""

    kind: str = ""
    what: str = ""
    error: int = errno.ESTALE


GOOD = Verdict()


@dataclass(frozen=True, slots=True)
class Suspect:
    """A file beneath a generation's directory, or a record, that is wrong."""

    kind: str
    path: str
    what: str
    ino: Ino | None = None
    record: Record | None = None
    error: int = errno.ESTALE


@dataclass(frozen=True, slots=True)
class Step:
    """The work since the last step: copies checked, bytes read, and the suspects found."""

    files: int = 0
    nbytes: int = 0
    suspect: Suspect | None = None


def verify_copy(
    directory: int, ino: Ino, record: Record, *, seals: bool, whole: bool
) -> Generator[Step, None, Verdict]:
    """Compare the copy of ``ino`` beneath ``directory`` with its record, piece by piece.

    Yields a step for each piece that was read, and returns the verdict. ``seals``: copies have
    seals there. Without ``whole`` only a copy without its seal is read. Waits for the disk.
    """
    try:
        fd = os.open(copy_name(ino), _LOOK, dir_fd=directory)
    except FileNotFoundError:
        return Verdict(MISSING, "it is recorded, but missing", errno.ENOENT)
    except OSError as error:
        return _refused(error)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return Verdict(SIZE, "its place is taken by something that is not a file")
        size = record.identity.size
        if status.st_size != size:
            return Verdict(SIZE, f"it has {status.st_size} bytes, not the {size} of its record")
        sealed = seals and status.st_mtime_ns == seal(ino, record.identity)
        if sealed and not whole:
            return GOOD
        digest = xxhash.xxh3_128()
        for piece in _pieces(fd, size):
            digest.update(piece)
            yield Step(nbytes=len(piece))
        if digest.digest() != record.digest:
            return Verdict(DIGEST, "its bytes differ from the recorded digest")
        if seals and not sealed:
            return Verdict(SEAL, "it was touched, but its bytes are right")
        return GOOD
    except OSError as error:
        return _refused(error)
    finally:
        os.close(fd)


def _refused(error: OSError) -> Verdict:
    return Verdict(UNREADABLE, f"{error.strerror}", error.errno or errno.EIO)


def _pieces(fd: int, size: int) -> Iterator[memoryview]:
    """The bytes of a file, without a change of the page cache. A view is valid until the next."""
    # No readahead: only the requested pages are read, and dropped again.
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    buffer = memoryview(bytearray(min(size, PIECE_BYTES)))
    offset = 0
    while offset < size:
        piece = buffer[: min(size - offset, PIECE_BYTES)]
        got = _from_memory(fd, piece, offset)
        if got < len(piece):
            start = offset + got
            while got < len(piece) and (count := os.preadv(fd, [piece[got:]], offset + got)):
                got += count
            os.posix_fadvise(fd, start, offset + got - start, os.POSIX_FADV_DONTNEED)
        yield piece[:got]
        if got < len(piece):
            return
        offset += got


def _from_memory(fd: int, piece: memoryview, offset: int) -> int:
    """Fills ``piece`` from the page cache without reading the disk; returns the bytes filled."""
    try:
        return os.preadv(fd, [piece], offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return 0


def compare(
    root: int,
    generation: str,
    tier: int,
    records: Records,
    *,
    seals: bool,
    whole: bool,
    version_of: Callable[[Ino], Identity | None],
) -> Iterator[Step]:
    """Compares all files in one generation of a tier with all its records.

    ``root`` is a descriptor of the tier's own directory, ``tier`` its number in the records.
    ``version_of`` returns the version in the snapshot, None if the snapshot does not have the
    inode. ``whole``: read every copy. Waits for the disk between two steps.
    """
    believed: set[int] = set()
    for inos, tiers, _sizes in records.load():
        believed.update(inos[tiers == tier].tolist())
    contents = Contents(root)
    try:
        directory = os.open(Contents.PREFIX + generation, DIRECTORY, dir_fd=root)
    except FileNotFoundError:
        directory = -1
    try:
        for paths in contents.files(generation) if directory >= 0 else ():
            for path in paths:
                ino = ino_of(path)
                record = records.get(ino) if ino is not None else None
                if ino is None or record is None:
                    believed.discard(ino or 0)
                    torn = ino is not None and records.is_torn(ino)
                    yield Step(suspect=_unrecorded(path, ino, torn=torn))
                elif record.tier != tier:
                    yield Step(suspect=Suspect(TIER, path, "it is recorded in another tier", ino))
                else:
                    believed.discard(ino)
                    if version_of(ino) not in (None, record.identity):
                        what = "the snapshot has another version"
                        yield Step(1, 0, Suspect(VERSION, path, what, ino, record))
                        continue
                    verdict = yield from verify_copy(
                        directory, ino, record, seals=seals, whole=whole
                    )
                    suspect = Suspect(verdict.kind, path, verdict.what, ino, record, verdict.error)
                    yield Step(1, 0, suspect if verdict.kind else None)
            yield Step()
    finally:
        if directory >= 0:
            os.close(directory)
    for number in sorted(believed):
        ino = Ino(number)
        record = records.get(ino)
        if record is None:
            if records.is_torn(ino):
                yield Step(suspect=_unrecorded(copy_name(ino), ino, torn=True))
        elif record.tier == tier:
            what = "it is recorded, but missing"
            suspect = Suspect(MISSING, copy_name(ino), what, ino, record, errno.ENOENT)
            yield Step(1, 0, suspect)


def turn(steps: Iterator[T], cost: Callable[[T], int]) -> list[T]:
    """The next steps, until they cost about one piece; empty at the end. Waits for the disk."""
    done: list[T] = []
    spent = 0
    for step in steps:
        done.append(step)
        spent += cost(step)
        if spent >= PIECE_BYTES:
            break
    return done


def _unrecorded(path: str, ino: Ino | None, *, torn: bool) -> Suspect:
    if torn:
        return Suspect(TORN, path, "its record is torn", ino)
    return Suspect(UNKNOWN, path, "it has no record", ino)
