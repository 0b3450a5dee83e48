"""Looking at the files of a tier, one by one, and comparing each copy with its record.

For the scrub and for fsck; nothing is changed here. Reading for a look must cost the job no memory:
pages that were in memory stay there, those that the look has brought in go again.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from monarch.tiers.directory import copy_name, ino_of
from monarch.tiers.records import Record, Records
from monarch.tiers.seal import seal
from monarch.types import Identity, Ino
from monarch.units import MiB

# Read between two looks at anything else.
PIECE_BYTES = 1 * MiB

# O_NONBLOCK: somebody may have put a fifo in the place of a copy.
_LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW

MISSING = "copy-missing"
SIZE = "copy-size"
DIGEST = "copy-digest"
SEAL = "copy-seal"
UNREADABLE = "copy-unreadable"
UNKNOWN = "copy-unknown"
TIER = "copy-tier"
VERSION = "copy-version"
TORN = "record-torn"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a copy; ``kind`` is empty if nothing is.

    ``error`` is the disk's own errno where it has failed, else ESTALE: not what was recorded.
    """

    kind: str = ""
    what: str = ""
    error: int = errno.ESTALE


GOOD = Verdict()


def examine(
    directory: int, ino: Ino, record: Record, *, seals: bool, whole: bool
) -> Iterator[int | Verdict]:
    """Compare the copy of ``ino`` beneath ``directory`` with its record, piece by piece.

    Yields the bytes of each piece that was read, and at last the verdict. ``seals``: copies have
    seals there. Without ``whole`` only a copy without its seal is read. Waits for the disk.
    """
    yield (yield from _judged(directory, ino, record, seals=seals, whole=whole))


def _judged(
    directory: int, ino: Ino, record: Record, *, seals: bool, whole: bool
) -> Generator[int, None, Verdict]:
    try:
        fd = os.open(copy_name(ino), _LOOK, dir_fd=directory)
    except FileNotFoundError:
        return Verdict(MISSING, "it is recorded, and not there", errno.ENOENT)
    except OSError as error:
        return _refused(error)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return Verdict(SIZE, "something that is no file has its place")
        size = record.identity.size
        if status.st_size != size:
            return Verdict(SIZE, f"it has {status.st_size} bytes, not the {size} of its record")
        sealed = seals and status.st_mtime_ns == seal(ino, record.identity)
        if sealed and not whole:
            return GOOD
        digest = xxhash.xxh3_128()
        for piece in _pieces(fd, size):
            digest.update(piece)
            yield len(piece)
        if digest.digest() != record.digest:
            return Verdict(DIGEST, "its bytes are not those that were recorded")
        if seals and not sealed:
            return Verdict(SEAL, "it was touched; its bytes are right")
        return GOOD
    except OSError as error:
        return _refused(error)
    finally:
        os.close(fd)


def _refused(error: OSError) -> Verdict:
    return Verdict(UNREADABLE, f"{error.strerror}", error.errno or errno.EIO)


def _pieces(fd: int, size: int) -> Iterator[memoryview]:
    """The bytes of a file; leaves in memory what was there. A view holds until the next."""
    # No reading ahead: only what is asked for comes, and goes again.
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
    """Fill ``piece`` from the page cache without asking the disk; how far that went."""
    try:
        return os.preadv(fd, [piece], offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return 0


class Contents:
    """All that lies beneath the directory ``root``, where a tier keeps the copies of a mount."""

    PREFIX = "copies-"
    _KNOWN = frozenset({"lock", "tier.json", "tier.part", "stage"})

    def __init__(self, root: int) -> None:
        self._root = root

    def generations(self) -> list[str]:
        """The snapshots of which there are copies, by their ids."""
        return [
            name.removeprefix(self.PREFIX)
            for name in self._names(".")
            if name.startswith(self.PREFIX)
        ]

    def strangers(self) -> list[str]:
        """What belongs to no tier."""
        return [
            name
            for name in self._names(".")
            if name not in self._KNOWN and not name.startswith(self.PREFIX)
        ]

    def stages(self) -> list[str]:
        """Copies that are being written, or were when somebody was killed."""
        unnamed = [name for name in self._names(".") if name == "tier.part"]
        return unnamed + [f"stage/{name}" for name in self._names("stage")]

    def copies(self, generation: str) -> Iterator[list[str]]:
        """The paths beneath a generation's directory, one subdirectory at a time."""
        top = self.PREFIX + generation
        loose: list[str] = []
        buckets: list[str] = []
        for name in self._names(top):
            status = os.stat(f"{top}/{name}", dir_fd=self._root, follow_symlinks=False)
            (buckets if stat.S_ISDIR(status.st_mode) else loose).append(name)
        yield loose
        for bucket in buckets:
            yield [f"{bucket}/{name}" for name in self._names(f"{top}/{bucket}")]

    def _names(self, name: str) -> list[str]:
        try:
            fd = os.open(name, _LIST, dir_fd=self._root)
        except FileNotFoundError:
            return []
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A file beneath a generation's directory, or a record, that is not as it should be."""

    kind: str
    path: str
    what: str
    ino: Ino | None = None
    record: Record | None = None
    error: int = errno.ESTALE


@dataclass(frozen=True, slots=True)
class Step:
    """What was done since the last one: copies looked at, bytes read, and what was found."""

    files: int = 0
    nbytes: int = 0
    suspect: Suspect | None = None


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
    """Hold all that lies in one generation of a tier, and all its records, against each other.

    ``root`` is a descriptor of the tier's own directory, ``tier`` its number in the records.
    ``version_of`` gives the version that the snapshot tells of, None where it does not know.
    ``whole``: read every copy. Waits for the disk between two steps.
    """
    believed: set[int] = set()
    for inos, tiers, _sizes in records.load():
        believed.update(inos[tiers == tier].tolist())
    contents = Contents(root)
    try:
        directory = os.open(Contents.PREFIX + generation, _LIST, dir_fd=root)
    except FileNotFoundError:
        directory = -1
    try:
        for paths in contents.copies(generation) if directory >= 0 else ():
            for path in paths:
                ino = ino_of(path)
                record = records.get(ino) if ino is not None else None
                if ino is None or record is None:
                    believed.discard(ino or 0)
                    torn = ino is not None and records.is_torn(ino)
                    yield Step(suspect=_unrecorded(path, ino, torn=torn))
                elif record.tier != tier:
                    what = "it is recorded in another tier"
                    yield Step(suspect=Suspect(TIER, path, what, ino))
                else:
                    believed.discard(ino)
                    if version_of(ino) not in (None, record.identity):
                        what = "the snapshot tells of another version"
                        yield Step(1, 0, Suspect(VERSION, path, what, ino, record))
                        continue
                    verdict = GOOD
                    for step in examine(directory, ino, record, seals=seals, whole=whole):
                        if isinstance(step, int):
                            yield Step(nbytes=step)
                        else:
                            verdict = step
                    yield Step(
                        1,
                        0,
                        Suspect(verdict.kind, path, verdict.what, ino, record, verdict.error)
                        if verdict.kind
                        else None,
                    )
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
            what = "it is recorded, and not there"
            suspect = Suspect(MISSING, copy_name(ino), what, ino, record, errno.ENOENT)
            yield Step(1, 0, suspect)


def _unrecorded(path: str, ino: Ino | None, *, torn: bool) -> Suspect:
    if torn:
        return Suspect(TORN, path, "its record is torn", ino)
    return Suspect(UNKNOWN, path, "no record knows it", ino)
