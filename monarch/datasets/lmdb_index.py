"""The index of an LMDB file, ``FILE.mlx``: the key and the place of each record.

All numbers are little-endian (docs/lmdb.md has the format as a table):

    header    80 bytes: what the index is of, and checksums of itself and of the rest
    records   16 bytes each, in the order of the keys: place and length of the value in the LMDB
              file, and the end of the key among the keys
    keys      end to end

A file is written under another name and renamed when it is complete. A reader gets the records
that were written, or an LmdbError: both checksums are compared before anything is used.
"""

from __future__ import annotations

import os
import shlex
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from monarch.datasets.lmdb_file import AnyPath, LmdbFile, Version, naming
from monarch.datasets.lmdb_table import Table
from monarch.errors import LmdbError
from monarch.posix.files import closing_fd, sync_path
from monarch.posix.unfinished import unfinished_file
from monarch.text import MiB

VERSION = 1
MAGIC = b"LMDB-mlx"

# magic, version, page size, size, mtime in ns, transaction, records, bytes of the keys, flags of
# the database, zero, checksum of the rest of the file
_HEADER = struct.Struct("<8sIIQqQQQIIQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECK.size
_RECORD = np.dtype([("offset", "<u8"), ("length", "<u4"), ("key_end", "<u4")])

_READ_BYTES = 64 * MiB


@dataclass(frozen=True, slots=True)
class Index:
    """The records of the version ``of`` of an LMDB file."""

    of: Version
    table: Table


def write_index(path: AnyPath, index: Index) -> int:
    """Writes the index to ``path``, which is replaced when it is complete and synced. Returns its
    size in bytes. Raises OSError."""
    table, of = index.table, index.of
    records = np.empty(len(table), _RECORD)
    records["offset"], records["length"] = table.offsets, table.lengths
    records["key_end"] = table.key_ends
    rest = records.tobytes() + table.heap
    header = _HEADER.pack(
        *(MAGIC, VERSION, of.page_bytes, of.size, of.mtime_ns, of.transaction),
        *(len(table), len(table.heap), table.flags, 0, xxhash.xxh3_64_intdigest(rest)),
    )
    target = Path(path)
    try:
        with unfinished_file(target.parent) as (part, file):
            file.write(header + _CHECK.pack(xxhash.xxh3_64_intdigest(header)))
            file.write(rest)
            file.flush()
            sync_path(part)
            part.rename(target)
        # A user may have the right to make files in a directory and not that to open it.
        with suppress(PermissionError):
            sync_path(target.parent)
    except OSError as error:
        # Instead of the unfinished file, which the user did not name.
        raise OSError(error.errno, error.strerror, os.fspath(target)) from error
    return HEADER_BYTES + len(rest)


def may_replace(path: AnyPath) -> bool:
    """Whether ``path`` is missing, or is an index. Raises OSError."""
    try:
        # O_NONBLOCK: the open of a fifo must not wait for a process that writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    with closing_fd(fd):
        return stat.S_ISREG(os.fstat(fd).st_mode) and os.read(fd, len(MAGIC)) == MAGIC


def read_index(path: AnyPath) -> Index:
    """Reads the index ``path`` into memory. Raises LmdbError if it is not whole, or is of a newer
    version of the format; and OSError."""
    with naming(Path(path)):
        return _parsed(*_bytes_of(path))


def open_indexed(path: AnyPath, index: AnyPath) -> tuple[LmdbFile, Table]:
    """Opens an LMDB file with its index. Raises LmdbError if the index is of another version of
    the file, and as ``LmdbFile.open`` and ``read_index`` do."""
    found = read_index(index)
    file = LmdbFile.open(path)
    try:
        require_current(found, file, Path(index))
    except BaseException:
        file.close()
        raise
    return file, found.table


def require_current(index: Index, file: LmdbFile, path: Path) -> None:
    """Raises LmdbError, with the command that makes a new index, if ``index``, read from ``path``,
    is of another version of ``file``."""
    if index.of == file.version:
        return
    names = ("size", "mtime_ns", "transaction", "page_bytes")
    changed = ", ".join(
        f"{name} {getattr(file.version, name)} instead of {getattr(index.of, name)}"
        for name in names
        if getattr(file.version, name) != getattr(index.of, name)
    )
    command = shlex.join(["monarch", "lmdb", "index", str(file.path), "-o", str(path)])
    with naming(path):
        raise LmdbError(
            f"is stale: the LMDB file was changed since ({changed})", hint=f"run {command}"
        )


def _bytes_of(path: AnyPath) -> tuple[bytes, bytes]:
    """The header and the rest of an index. Raises LmdbError before it reads more than the header of
    a file that is not an index, or is not as long as its header says."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with closing_fd(fd):
        header = os.read(fd, HEADER_BYTES)
        if header[: len(MAGIC)] != MAGIC:
            raise LmdbError("is not the index of an LMDB file")
        if len(header) < HEADER_BYTES:
            raise LmdbError("is damaged: it is shorter than its header")
        if header[-_CHECK.size :] != _CHECK.pack(xxhash.xxh3_64_intdigest(header[: _HEADER.size])):
            raise _damaged_or_newer(header)
        _, version, *_, records, heap_bytes, _, _, _ = _HEADER.unpack_from(header)
        if version != VERSION:
            raise _damaged_or_newer(header)
        length = records * _RECORD.itemsize + heap_bytes
        if os.fstat(fd).st_size != HEADER_BYTES + length:
            raise LmdbError(f"is damaged: it should have {HEADER_BYTES + length} bytes")
        rest = bytearray()
        while len(rest) < length and (piece := os.read(fd, min(_READ_BYTES, length - len(rest)))):
            rest += piece
    return header, bytes(rest)


def _damaged_or_newer(header: bytes) -> LmdbError:
    (version,) = struct.unpack_from("<I", header, len(MAGIC))
    if VERSION < version < 256:
        return LmdbError(
            f"has version {version} of the format; this Monarch reads {VERSION}",
            hint="make it again with `monarch lmdb index`",
        )
    return LmdbError("is damaged: its header has a wrong checksum")


def _parsed(header: bytes, rest: bytes) -> Index:
    _, _, page_bytes, size, mtime_ns, transaction, count, heap_bytes, flags, _, digest = (
        _HEADER.unpack_from(header)
    )
    if xxhash.xxh3_64_intdigest(rest) != digest:
        raise LmdbError("is damaged: its records have a wrong checksum")
    records = np.frombuffer(rest, _RECORD, count)
    offsets = np.ascontiguousarray(records["offset"])
    lengths = np.ascontiguousarray(records["length"])
    ends = np.ascontiguousarray(records["key_end"])
    # A right checksum does not mean that the numbers are. A sum beyond 2**64 is below its first
    # term.
    past = offsets + lengths
    if count and (past.max() > size or (past < offsets).any()):
        raise LmdbError("is damaged: a record is outside of the LMDB file")
    if (np.diff(ends.astype(np.int64), prepend=0) < 0).any() or int(
        ends[-1] if count else 0
    ) != heap_bytes:
        raise LmdbError("is damaged: its keys are not in order")
    of = Version(size, mtime_ns, transaction, page_bytes)
    heap = rest[count * _RECORD.itemsize :]
    return Index(of, Table(offsets, lengths, ends, heap, flags))
