"""The steps of one copy, whose space is reserved: stage, verify, commit, record.

These functions wait for disks and for the source: they run in worker threads. Their order survives
a crash at any point: stage under a temporary name, compare the attributes at the source before and
after, rename, then write the record.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

from monarch.errors import SourceChanged
from monarch.posix import failpoints
from monarch.tiers.records import Record, Records
from monarch.tiers.source import Source, SourceFile, identity_now, identity_of
from monarch.tiers.tier import Staged, Tier
from monarch.transfer.queue import Flight
from monarch.types import Identity
from monarch.units import MiB

# Bytes moved in one turn of a worker thread: enough to make the hop cheap, few enough that a copy
# gives way to a reader within a few milliseconds.
TURN_BYTES = 4 * MiB
_PIECE_BYTES = 1 * MiB
_HOLE = bytes(_PIECE_BYTES)


def commit_contents(
    tier: Tier, records: Records, flights: Sequence[Flight]
) -> list[OSError | None]:
    """Commits the contents of each; returns for each None, or the error of the tier."""
    results: list[OSError | None] = []
    for flight in flights:
        try:
            _require_kept(flight)
            with tier.stage(flight.ino) as staged:
                staged.append(flight.content or b"")
                commit(tier, records, staged, flight)
        except OSError as error:
            results.append(error)
        else:
            results.append(None)
    return results


def commit(tier: Tier, records: Records, staged: Staged, flight: Flight) -> None:
    """Renames, then records. Raises OSError, and SourceChanged if bytes are missing."""
    ino, identity = flight.ino, flight.identity
    if staged.size != identity.size:
        raise SourceChanged(f"read {staged.size} bytes of {identity.size}")
    digest = staged.commit(identity)
    try:
        # Another tier may have a copy and the record by now.
        _require_kept(flight)
        records.put(ino, Record(tier.number, identity, digest), young=flight.young)
    except OSError:
        tier.remove(ino)
        raise
    failpoints.failpoint("copy-recorded")


def _require_kept(flight: Flight) -> None:
    """Raises OSError if the copy was given up, because its tier took too long."""
    if flight.is_left:
        raise OSError(errno.ECANCELED, "the copy was given up")


def open_version(source: Source, path: bytes, identity: Identity) -> SourceFile:
    """Opens a file that must be the version ``identity``. Raises SourceChanged, OSError."""
    file = source.open(path)
    if identity_of(file.status) != identity:
        os.close(file.fd)
        raise SourceChanged(f"{os.fsdecode(path)!r} differs from the snapshot")
    return file


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one turn: ``pieces`` in order, of which ``read_bytes`` in ``reads`` calls."""

    pieces: list[bytes]
    reads: int
    read_bytes: int

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))


def read_turn(file: SourceFile, offset: int, count: int) -> Turn:
    """Reads up to ``count`` bytes from ``offset`` on. Pieces that are holes are not read."""
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
    """The begin of the next data at or after ``offset``; called only for a sparse file."""
    status = file.status
    if status.st_blocks * 512 >= status.st_size:
        return offset
    try:
        return os.lseek(file.fd, offset, os.SEEK_DATA)
    except OSError as error:
        # ENXIO: no data follow. Other errors: the file system does not support SEEK_DATA.
        return status.st_size if error.errno == errno.ENXIO else offset


def append_all(staged: Staged, pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        staged.append(piece)


def check_unchanged(file: SourceFile, identity: Identity) -> None:
    """Raises SourceChanged if the file changed since it was opened, and OSError."""
    try:
        now = identity_now(file.fd)
    except OSError as error:
        # A server may not keep an open file that another client unlinks.
        if error.errno in (errno.ENOENT, errno.ESTALE):
            raise SourceChanged("the file was removed while it was copied") from error
        raise
    if now != identity:
        raise SourceChanged("the file changed while it was copied")
    failpoints.failpoint("copy-compared")
