"""The format of the chunks of a pack: header, table, extended attributes and paths (docs/packs.md).

All numbers are little-endian. The functions convert between bytes and values; they open no file.
A decoder raises PackError for everything that an encoder would not write, before it takes memory
for it: a number in a file never decides alone how much memory is used.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import xxhash

from monarch.errors import NewerPack, PackError
from monarch.text import GiB, MiB

FORMAT: Final = "monarch-pack"
VERSION: Final = 1

# The orders of the files in the chunks, by their number in a header.
ORDERS: Final = ("random", "path")

CHUNK_MAGIC: Final = b"MONCHUNK"
# The tree chunk has the entries without bytes in a chunk.
PAYLOAD, TREE = 0, 1

# The chunk of an entry that has bytes in none, and of a file in large/.
NONE: Final = 0xFFFFFFFF
LARGE: Final = 0xFFFFFFFE
# The most chunks, large files and records of one pack.
MOST: Final = 0xFFFF0000

# magic, version, kind, seed, sequence, entries, table bytes, payload bytes, chunk bytes, order,
# large files, digest of the table; then the digest of all these.
_HEADER = struct.Struct("<8sIIQIIQQQIIQ")
_DIGEST = struct.Struct("<Q")
HEADER_BYTES: Final = _HEADER.size + _DIGEST.size

TABLE_DTYPE: Final = np.dtype(
    [
        ("offset", "<u8"),
        ("size", "<u8"),
        ("digest", "<u8"),
        ("mtime_ns", "<i8"),
        ("mode", "<u4"),
        ("uid", "<u4"),
        ("gid", "<u4"),
        ("chunk", "<u4"),
        ("group", "<u4"),
        ("path_length", "<u4"),
        ("target_length", "<u4"),
        ("xattr_length", "<u4"),
    ]
)

MOST_SIZE: Final = (1 << 63) - 1
# The most bytes of the files of one chunk: a reader may take a file of a chunk into memory.
MOST_CHUNK: Final = 1 * GiB
# Limits of Linux: NAME_MAX; PATH_MAX without its NUL; XATTR_LIST_MAX and the size of a value.
MOST_NAME: Final = 255
MOST_TARGET: Final = 4095
MOST_PATH: Final = 64 * 1024
MOST_XATTRS: Final = 4 * MiB

_XATTR = struct.Struct("<HI")

KINDS: Final = frozenset(
    {
        *(stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO),
        *(stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK),
    }
)

EMPTY_DIGEST: Final = xxhash.xxh3_64_intdigest(b"")


class Header(NamedTuple):
    """The first bytes of a chunk. ``sequence``: its number; of the tree chunk, the number of the
    other chunks. ``large``: the number of large files, in the tree chunk only."""

    kind: int
    seed: int
    sequence: int
    entries: int
    table_bytes: int
    payload_bytes: int
    chunk_bytes: int
    order: int
    large: int
    table_digest: int

    @property
    def payload_offset(self) -> int:
        """The offset of the first byte of the payload in the file."""
        return HEADER_BYTES + self.table_bytes

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.payload_offset + self.payload_bytes


class Entry(NamedTuple):
    """One line of a table.

    ``path`` is relative to the root, which is ``b""``. ``mode`` has the type. ``size`` is in bytes,
    0 if the entry is not a regular file. ``chunk`` is the number of the chunk with the bytes, NONE
    or LARGE. ``offset`` is the position in the chunk's file, the number of the large file, or the
    number of a device. ``digest`` is the XXH3 (64 bits) of the bytes. Entries with the same
    ``group`` other than 0 are names of one file; at most one of them has a chunk. ``xattrs`` is
    encoded (``encode_xattrs``).
    """

    path: bytes
    mode: int
    uid: int = 0
    gid: int = 0
    size: int = 0
    mtime_ns: int = 0
    digest: int = 0
    chunk: int = NONE
    offset: int = 0
    group: int = 0
    target: bytes = b""
    xattrs: bytes = b""


def require_version(version: object, what: str) -> None:
    """Raises PackError for another version of the format than that of this module; NewerPack if it
    is a later one, so that the file must not be written again by this Monarch."""
    if version == VERSION:
        return
    kind = NewerPack if isinstance(version, int) and version > VERSION else PackError
    raise kind(
        f"{what} format version {str(version)[:20]}, and this Monarch reads {VERSION}",
        hint="use the Monarch that wrote it, or a newer one",
    )


def path_key(path: bytes) -> bytes:
    """The sort key of the index: a directory stands before its entries, and these together."""
    return path.replace(b"/", b"\0")


# -- headers ---------------------------------------------------------------------------------------


def encode_header(header: Header) -> bytes:
    """``HEADER_BYTES`` bytes."""
    kind, seed, sequence, entries, table, payload, chunk, order, large, digest = header
    plain = _HEADER.pack(
        *(CHUNK_MAGIC, VERSION, kind, seed, sequence, entries, table, payload, chunk, order),
        *(large, digest),
    )
    return plain + _DIGEST.pack(xxhash.xxh3_64_intdigest(plain))


def decode_header(raw: bytes) -> Header:
    """The header at the start of ``raw``. Raises PackError."""
    if len(raw) < HEADER_BYTES:
        raise PackError("it ends within its header")
    magic, version, *fields = _HEADER.unpack_from(raw)
    if magic != CHUNK_MAGIC:
        raise PackError("it is no chunk of a pack")
    (digest,) = _DIGEST.unpack_from(raw, _HEADER.size)
    if digest != xxhash.xxh3_64_intdigest(raw[: _HEADER.size]):
        raise PackError("its header is damaged")
    require_version(version, "it has")
    header = Header(*fields)
    is_sound = (
        header.kind in (PAYLOAD, TREE)
        and header.order < len(ORDERS)
        and header.sequence <= MOST
        and header.large <= MOST
        and 0 < header.chunk_bytes <= MOST_CHUNK
        and header.entries * TABLE_DTYPE.itemsize <= header.table_bytes
        and header.table_bytes <= MOST_SIZE
        and header.payload_bytes <= (header.chunk_bytes if header.kind == PAYLOAD else 0)
    )
    if not is_sound:
        raise PackError("its header has impossible numbers")
    return header


# -- tables ----------------------------------------------------------------------------------------


def table_size(entries: Iterable[Entry]) -> int:
    """The bytes of the table of ``entries``; digests need not be known."""
    return sum(
        TABLE_DTYPE.itemsize + len(entry.path) + len(entry.target) + len(entry.xattrs)
        for entry in entries
    )


def encode_table(entries: Sequence[Entry]) -> bytes:
    """The table: one fixed record for each entry, then path, target and attributes of each."""
    rows = np.array(
        [
            (
                *(entry.offset, entry.size, entry.digest, entry.mtime_ns, entry.mode),
                *(entry.uid, entry.gid, entry.chunk, entry.group),
                *(len(entry.path), len(entry.target), len(entry.xattrs)),
            )
            for entry in entries
        ],
        dtype=TABLE_DTYPE,
    )
    texts = b"".join(text for entry in entries for text in (entry.path, entry.target, entry.xattrs))
    return rows.tobytes() + texts


def decode_table(header: Header, raw: bytes) -> list[Entry]:
    """The entries of a table, checked one by one. Raises PackError.

    ``raw`` is the table alone. The extents of a payload chunk are in the order of their offsets,
    inside the payload, and do not overlap.
    """
    if len(raw) != header.table_bytes:
        raise PackError("it ends within its table")
    if xxhash.xxh3_64_intdigest(raw) != header.table_digest:
        raise PackError("its table is damaged")
    count = header.entries
    rows = np.frombuffer(raw, TABLE_DTYPE, count)
    position = count * TABLE_DTYPE.itemsize
    free = header.payload_offset
    entries = []
    for row in rows.tolist():
        offset, size, digest, mtime_ns, mode, uid, gid, chunk, group, *lengths = row
        texts = []
        for length in lengths:
            texts.append(raw[position : position + length])
            position += length
        if position > len(raw):
            raise PackError("its table has impossible lengths")
        path, target, xattrs = texts
        entry = Entry(
            *(path, mode, uid, gid, size, mtime_ns, digest, chunk, offset, group, target, xattrs)
        )
        require_sound(entry)
        _require_place(header, entry, free)
        if header.kind == PAYLOAD:
            free = offset + size
        entries.append(entry)
    if position != len(raw):
        raise PackError("its table has bytes that belong to no entry")
    return entries


def require_sound(entry: Entry) -> None:
    """Raises PackError if no encoder writes such an entry, wherever its bytes are."""
    kind = stat.S_IFMT(entry.mode)
    if entry.mode > 0xFFFF or kind not in KINDS:
        raise PackError("an entry has an unknown type")
    require_path(entry.path)
    is_file = kind == stat.S_IFREG
    if not entry.path and kind != stat.S_IFDIR:
        raise PackError("its root is no directory")
    if entry.size > MOST_SIZE or (entry.size and not is_file):
        raise PackError("an entry has an impossible size")
    if (entry.chunk != NONE or entry.group) and not is_file:
        raise PackError("an entry without bytes has a chunk")
    if (kind == stat.S_IFLNK) != bool(entry.target):
        raise PackError("a symbolic link has no target, or another entry has one")
    if len(entry.target) > MOST_TARGET or b"\0" in entry.target:
        raise PackError("a symbolic link has an impossible target")
    decode_xattrs(entry.xattrs)


def _require_place(header: Header, entry: Entry, free: int) -> None:
    """Raises PackError if the bytes of ``entry`` cannot lie where the table has them."""
    if header.kind == PAYLOAD:
        if entry.chunk != header.sequence:
            raise PackError("an entry names another chunk")
        if not free <= entry.offset <= entry.offset + entry.size <= header.file_bytes:
            raise PackError("an extent overlaps another, or lies outside")
    elif entry.chunk == LARGE:
        if entry.offset >= header.large:
            raise PackError("an entry names a large file that the pack does not have")
    elif entry.chunk != NONE or (entry.size and not entry.group):
        raise PackError("an entry of the tree has bytes")


def require_path(path: bytes) -> None:
    """Raises PackError if ``path`` could lead out of a directory, or is not in its plain form."""
    if not path:
        return
    if len(path) > MOST_PATH or b"\0" in path:
        raise PackError("a path is too long, or has a NUL")
    for name in path.split(b"/"):
        require_name(name)


def require_name(name: bytes) -> None:
    """Raises PackError if ``name`` is no name of a directory entry."""
    if name in (b"", b".", b"..") or len(name) > MOST_NAME or b"/" in name or b"\0" in name:
        raise PackError("an entry has an impossible name")


# -- extended attributes ---------------------------------------------------------------------------


def encode_xattrs(xattrs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Attributes in the order of their names, so that equal ones have equal bytes."""
    return b"".join(
        _XATTR.pack(len(name), len(value)) + name + value for name, value in sorted(xattrs)
    )


def decode_xattrs(raw: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """Pairs of name and value. Raises PackError."""
    if len(raw) > MOST_XATTRS:
        raise PackError("an entry has too many extended attributes")
    found: list[tuple[bytes, bytes]] = []
    position = 0
    while position < len(raw):
        if position + _XATTR.size > len(raw):
            raise PackError("an extended attribute is cut off")
        name_length, value_length = _XATTR.unpack_from(raw, position)
        position += _XATTR.size
        end = position + name_length + value_length
        name = raw[position : position + name_length]
        if end > len(raw) or not is_kept_xattr(name) or (found and name <= found[-1][0]):
            raise PackError("an entry has an impossible extended attribute")
        found.append((name, raw[position + name_length : end]))
        position = end
    return tuple(found)


def is_kept_xattr(name: bytes) -> bool:
    """Whether a pack keeps the extended attribute: those of users, and POSIX ACLs."""
    if name.startswith(b"user."):
        return len(name) <= MOST_NAME and b"\0" not in name
    return name in (b"system.posix_acl_access", b"system.posix_acl_default")
