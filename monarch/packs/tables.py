"""Reads the header and the table of a chunk from its file."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from monarch.errors import PackError
from monarch.packs.format import HEADER_BYTES, Entry, Header, decode_header, decode_table

# One read of this size gives the table of a usual chunk.
_FIRST_READ = 64 * 1024


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
    raw = first[HEADER_BYTES : header.payload_offset]
    while len(raw) < header.table_bytes:
        piece = os.pread(fd, header.table_bytes - len(raw), HEADER_BYTES + len(raw))
        if not piece:
            raise PackError("it ends within its table")
        raw += piece
    entries = decode_table(header, raw)
    return TableFile(header, entries, status.st_size == header.file_bytes)
