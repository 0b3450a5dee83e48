"""One copy: reserve was done by placement; here bytes are staged, verified, committed, recorded.

These functions wait for disks and for the source: they run in worker threads. Their order is the
one that a crash at any point survives: stage under a temporary name, compare with the source's
attributes before and after, rename, then write the record.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from monarch import points
from monarch.errors import SourceChanged
from monarch.tiers.directory import Staged, Tier
from monarch.tiers.records import Record, Records
from monarch.tiers.source import Source, SourceFile, identity_now, identity_of
from monarch.types import Identity, Ino
from monarch.units import MiB

# What one turn in a worker thread moves: long enough to make the hop cheap, short enough that a
# copy stands aside for a reader within a few milliseconds.
TURN_BYTES = 4 * MiB
_PIECE_BYTES = 1 * MiB
_HOLE = bytes(_PIECE_BYTES)


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of a small file, as they were read from the source.

    ``young`` as of ``Records.put``. ``given_up`` says whether nobody wants the copy any more: its
    tier has let us wait too long.
    """

    ino: Ino
    identity: Identity
    data: bytes | memoryview
    young: bool
    given_up: Callable[[], bool]


def commit_contents(
    tier: Tier, records: Records, contents: Sequence[Content]
) -> list[OSError | None]:
    """Commit each; None where it went well, else the tier's error."""
    results: list[OSError | None] = []
    for content in contents:
        try:
            _require_wanted(content.given_up)
            with tier.stage(content.ino) as staged:
                staged.append(content.data)
                commit(tier, records, staged, content)
        except OSError as error:
            results.append(error)
        else:
            results.append(None)
    return results


class Wanted(Protocol):
    """What a copy is of, and whether it is still wanted."""

    @property
    def ino(self) -> Ino: ...
    @property
    def identity(self) -> Identity: ...
    @property
    def young(self) -> bool: ...
    @property
    def given_up(self) -> Callable[[], bool]: ...


def commit(tier: Tier, records: Records, staged: Staged, wanted: Wanted) -> None:
    """Rename, then record. Raises OSError, also if the staged bytes are too few."""
    ino, identity = wanted.ino, wanted.identity
    if staged.size != identity.size:
        raise SourceChanged(f"read {staged.size} bytes of {identity.size}")
    digest = staged.commit(identity)
    try:
        # Another tier may have the copy by now, and its record.
        _require_wanted(wanted.given_up)
        records.put(ino, Record(tier.number, identity, digest), young=wanted.young)
    except OSError:
        tier.remove(ino)
        raise
    points.reached("copy-recorded")


def _require_wanted(given_up: Callable[[], bool]) -> None:
    if given_up():
        raise OSError(errno.ECANCELED, "the copy was given up")


def open_version(source: Source, path: bytes, identity: Identity) -> SourceFile:
    """Open a file that must be the version given. Raises SourceChanged, OSError."""
    file = source.open(path)
    if identity_of(file.status) != identity:
        os.close(file.fd)
        raise SourceChanged(f"{os.fsdecode(path)!r} is not what the snapshot says")
    return file


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn brought: ``pieces`` in order, of which ``read_bytes`` in ``reads`` calls."""

    pieces: list[bytes]
    reads: int
    read_bytes: int

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))


def read_turn(file: SourceFile, offset: int, count: int) -> Turn:
    """Up to ``count`` bytes from ``offset`` on. Whole pieces of a hole are not read."""
    pieces: list[bytes] = []
    reads = read_bytes = 0
    end = offset + count
    data = _next_data(file, offset)
    while offset < end:
        wanted = min(_PIECE_BYTES, end - offset)
        if offset + wanted <= data:
            pieces.append(_HOLE[:wanted])
            offset += wanted
            continue
        piece = os.pread(file.fd, wanted, offset)
        if not piece:
            break
        reads += 1
        read_bytes += len(piece)
        pieces.append(piece)
        offset += len(piece)
    return Turn(pieces, reads, read_bytes)


def _next_data(file: SourceFile, offset: int) -> int:
    """Where the data at or behind ``offset`` begin; asked only of a file that has holes."""
    status = file.status
    if status.st_blocks * 512 >= status.st_size:
        return offset
    try:
        return os.lseek(file.fd, offset, os.SEEK_DATA)
    except OSError as error:
        # No data behind it, or a file system that cannot tell.
        return status.st_size if error.errno == errno.ENXIO else offset


def append_all(staged: Staged, pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        staged.append(piece)


def check_unchanged(file: SourceFile, identity: Identity) -> None:
    """Raises SourceChanged if the file was touched since it was opened, OSError."""
    try:
        now = identity_now(file.fd)
    except OSError as error:
        # A server does not always keep for us what others unlink.
        if error.errno in (errno.ENOENT, errno.ESTALE):
            raise SourceChanged("the file went while it was copied") from error
        raise
    if now != identity:
        raise SourceChanged("the file changed while it was copied")
    points.reached("copy-compared")
