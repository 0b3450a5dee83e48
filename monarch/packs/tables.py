"""Reads the header and the table of a chunk from its file."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from monarch.errors import PackError
from monarch.packs.format import HEADER_BYTES, Entry, Header, decode_header, decode_table
from monarch.posix.files import data_at
from monarch.text import MiB

# One read of this size gives the table of a usual chunk.
_FIRST_READ = 64 * 1024
# The most bytes of holes in a table or an index. A copy of a pack may have holes where attributes
# are zeros.
_MOST_HOLES = 64 * MiB


@dataclass(frozen=True, slots=True)
class TableFile:
    """The header and the entries of a chunk. ``is_whole``: its file has the size that the header
    says."""

    header: Header
    entries: list[Entry]
    is_whole: bool


def read_table(fd: int) -> TableFile:
    """The table of the open chunk ``fd``. Raises PackError if it is damaged, OSError if it cannot
    be read. A damaged number in the file takes no memory beyond the size of the file."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise PackError("it is not a regular file")
    first = os.pread(fd, _FIRST_READ, 0)
    header = decode_header(first)
    if header.payload_offset > status.st_size:
        raise PackError("it ends within its table")
    require_few_holes(fd, header.payload_offset)
    raw = bytearray(first[HEADER_BYTES : header.payload_offset])
    while len(raw) < header.table_bytes:
        piece = os.pread(fd, header.table_bytes - len(raw), HEADER_BYTES + len(raw))
        if not piece:
            raise PackError("it ends within its table")
        raw += piece
    entries = decode_table(header, bytes(raw))
    return TableFile(header, entries, status.st_size == header.file_bytes)


def require_few_holes(fd: int, end: int) -> None:
    """Raises PackError if much of the first ``end`` bytes are holes, which take memory when they
    are read, but no space on the disk. The file position is then 0."""
    position, holes = 0, 0
    while position < end:
        begin, data_end = data_at(fd, position, end)
        holes += begin - position
        if holes > _MOST_HOLES:
            raise PackError("it has holes, and no writer of packs makes them")
        position = data_end
    os.lseek(fd, 0, os.SEEK_SET)
