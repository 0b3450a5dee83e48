"""The format of a snapshot file: tables of checksummed blocks in one LMDB database.

    key              value
    "meta"           JSON: version, identity, where and when built, totals
    "curve"          u64[65536]: bytes of regular files in each bucket
    "i" + block      inodes: 4096 records of 64 bytes, in the order of inode numbers, from 1
    "n" + block      names: 4096 of them, in the same order
    "l" + block      targets of symbolic links: 4096 of them, by the rank of the link
    "c" + block      first children: u32 each, by the rank of the directory
    "a" + block      access control lists: 2048 pairs of strings, an access and a default one

A block's number is a big-endian u32. Each value begins with the xxh3 of the other bytes: a flipped
bit is found at the first use of a block. All numbers inside are little-endian. Behind the database
stands a checksum of its tree (trailer.py).

Inode numbers are dense: 1 is the root, then every directory's children in the order of their
bytes, directories in the order of their own numbers (breadth first). The children of one
directory are therefore consecutive, and its record needs no list of them: the directory of rank r
(the r-th in number order) has the inode numbers from ``first[r]`` to ``first[r + 1] - 1``. Each
block of first children holds one more number, the first of the next block, so that one read gives
both.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import urllib.parse
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import xxhash

from monarch.errors import NewerSnapshot, SnapshotError
from monarch.text import escape_text
from monarch.types import kept_ns

VERSION: Final = 2
# Version 1 has no access control lists: those of the source are unknown.
_READABLE: Final = (1, VERSION)

BLOCK: Final = 4096  # entries in a block of any table
SHIFT: Final = 12  # BLOCK as a power of two
MASK: Final = BLOCK - 1

META: Final = b"meta"
CURVE: Final = b"curve"
INODES: Final = b"i"
NAMES: Final = b"n"
LINKS: Final = b"l"
CHILDREN: Final = b"c"
ACLS: Final = b"a"

# The second and later names of a hard-linked file; ``extra`` is the inode number of the first.
ALIAS: Final = 1
# A directory that could not be listed, or an entry that could not be read.
UNREADABLE: Final = 2
# The bits of ``flags`` above these are the number of the entry's pair of access control lists,
# counted from 1. An alias has none: the first name of its file has it.
ACL_SHIFT: Final = 8
MOST_ACLS: Final = (1 << 32 - ACL_SHIFT) - 1

# parent, mode, uid, gid, nlink, flags, size, mtime_ns, ctime_ns, source_ino, extra
# ``extra`` is st_blocks of a regular file, the rank of a directory or symbolic link, st_rdev of a
# device, the first inode number of an alias.
RECORD_STRUCT: Final = struct.Struct("<6IQqqQQ")
RECORD_BYTES: Final = RECORD_STRUCT.size
RECORD: Final = np.dtype(
    [
        ("parent", "<u4"),
        ("mode", "<u4"),
        ("uid", "<u4"),
        ("gid", "<u4"),
        ("nlink", "<u4"),
        ("flags", "<u4"),
        ("size", "<u8"),
        ("mtime_ns", "<i8"),
        ("ctime_ns", "<i8"),
        ("source_ino", "<u8"),
        ("extra", "<u8"),
    ]
)
MODE_OFFSET: Final = 4
NLINK_OFFSET: Final = 16
FLAGS_OFFSET: Final = 20
EXTRA_OFFSET: Final = 56

SOURCE_INO_OFFSET: Final = 48

HEADER_BYTES: Final = 8
_HEADER: Final = struct.Struct("<Q")

U32: Final = struct.Struct("<I")
U32_PAIR: Final = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class SnapshotSummary:
    """The summary of a snapshot. Sizes in bytes, times in nanoseconds since the epoch.

    ``entries`` counts names, so it is also the highest inode number; ``files`` are regular files,
    ``aliases`` further names of a hard-linked one, ``others`` devices, fifos and sockets.
    ``sizes`` counts files by the bit length of their size: (0, n) empty, (k, n) below ``1 << k``.
    ``acls`` counts entries with access control lists, None if the build did not read them;
    ``acl_values`` are the different ones. ``newest_ns`` is the newest time of change of all
    entries, None if an earlier Monarch built it.
    """

    id: str
    source: bytes
    created_ns: int
    entries: int
    files: int
    directories: int
    symlinks: int
    others: int
    aliases: int
    bytes_total: int
    largest: int
    sizes: tuple[tuple[int, int], ...]
    unreadable: int
    unreadable_paths: tuple[str, ...]
    one_file_system: bool
    scan_seconds: float
    acls: int | None = None
    acl_values: int = 0
    newest_ns: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON can hold them; the source's bytes are percent-encoded."""
        fields = asdict(self)
        fields["source"] = urllib.parse.quote_from_bytes(self.source)
        return fields


def encode_meta(info: SnapshotSummary) -> bytes:
    return json.dumps({"version": VERSION, **info.as_json()}).encode()


def decode_meta(content: bytes, *, where: str) -> SnapshotSummary:
    """Raises SnapshotError for a version that this program cannot read."""
    try:
        fields = json.loads(content)
        version = fields.pop("version")
        if version not in _READABLE:
            kind = NewerSnapshot if version > VERSION else SnapshotError
            raise kind(
                f"snapshot {where} has format version {version}, this Monarch reads {VERSION}",
                hint="build it again with this Monarch, or install the one that built it",
            )
        fields["source"] = urllib.parse.unquote_to_bytes(fields["source"])
        fields["sizes"] = tuple((bits, count) for bits, count in fields["sizes"])
        fields["unreadable_paths"] = tuple(map(escape_text, fields["unreadable_paths"]))
        summary = SnapshotSummary(**fields)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise damaged(where) from error
    if not _is_possible(summary):
        raise damaged(where)
    return summary


def _is_possible(it: SnapshotSummary) -> bool:
    """Whether the values can be those of a build: any user may have made the file."""
    parts: list[Any] = [
        it.files,
        it.directories,
        it.symlinks,
        it.others,
        it.aliases,
    ]
    parts += [it.acl_values, it.acls or 0]
    numbers: list[Any] = [
        it.created_ns,
        it.bytes_total,
        it.largest,
        it.unreadable,
    ]
    numbers += itertools.chain(*it.sizes)
    name: Any = it.id
    seconds: Any = it.scan_seconds
    newest: Any = it.newest_ns
    return (
        all(type(number) is int and number >= 0 for number in (it.entries, *parts, *numbers))
        and max(1, *parts) <= it.entries
        and isinstance(name, str)
        and re.fullmatch(r"[0-9a-f]{1,64}", name) is not None
        and isinstance(seconds, int | float)
        and (newest is None or (type(newest) is int and newest == kept_ns(newest)))
    )


def key(table: bytes, block: int) -> bytes:
    return table + block.to_bytes(4, "big")


def seal(name: bytes, content: bytes) -> bytes:
    """The value of the key ``name``: a checksum, then ``content``."""
    return _HEADER.pack(_checksum(name, content)) + content


def unseal(name: bytes, value: bytes | memoryview, *, where: str) -> memoryview:
    """The content of the value of ``name``. Raises SnapshotError if it is another's, or damaged."""
    if len(value) < HEADER_BYTES:
        raise damaged(where)
    content = memoryview(value)[HEADER_BYTES:]
    if _HEADER.unpack_from(value)[0] != _checksum(name, content):
        raise damaged(where)
    return content


def _checksum(name: bytes, content: bytes | memoryview) -> int:
    # Seeded by the key, so that a block in the place of another is detected.
    return xxhash.xxh3_64_intdigest(content, seed=int.from_bytes(name[:8], "little"))


def damaged(where: str) -> SnapshotError:
    return SnapshotError(
        f"snapshot {where} is damaged", hint="build it again with `monarch snapshot build`"
    )


def pack_strings(strings: Sequence[bytes]) -> bytes:
    """A block of strings: their offsets from the block's begin, one more, then all of them."""
    offsets = np.empty(len(strings) + 1, dtype="<u4")
    offsets[0] = offsets.nbytes
    np.cumsum(np.fromiter(map(len, strings), dtype="<u4", count=len(strings)), out=offsets[1:])
    offsets[1:] += offsets[0]
    return offsets.tobytes() + b"".join(strings)


def unpack_strings(block: memoryview, start: int, stop: int) -> list[bytes]:
    """The strings from index ``start`` to ``stop`` of a block."""
    offsets = struct.unpack_from(f"<{stop - start + 1}I", block, start * 4)
    text = bytes(block[offsets[0] : offsets[-1]])
    base = offsets[0]
    return [text[a - base : b - base] for a, b in itertools.pairwise(offsets)]


def pack_firsts(firsts: Iterable[int], following: int) -> bytes:
    return np.fromiter(itertools.chain(firsts, (following,)), dtype="<u4").tobytes()
