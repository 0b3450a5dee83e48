"""The pages of an LMDB 0.9 file, which may be hostile: pure functions from bytes to values.

Every number is checked against the page, or against the number of pages in the file, before it is
used. The format is that of a little-endian machine with 64 bits (``mdb.c`` of LMDB 0.9); all other
formats are refused with a message that names them. A file has these pages:

    0 and 1   meta pages, written in turn; that with the larger transaction number is valid
    branch    the page numbers of its children, in the order of their keys
    leaf      the records in the order of their keys: small values inside the page
    overflow  one large value behind a page header, in consecutive pages
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from monarch.errors import LmdbError
from monarch.text import counted, escape_text

# The bytes of a meta page that have fields.
META_BYTES = 152
# Where in a meta page its transaction number is.
TRANSACTION_AT = 144
# The header of each page. The bytes of an overflow page begin behind it.
HEADER_BYTES = 16
# A cursor of LMDB has room for so many levels.
MOST_LEVELS = 32
SMALLEST_PAGE, LARGEST_PAGE = 512, 32768

# Flags of a database: the keys are ordered from their last byte, or as integers.
REVERSED, INTEGERS = 0x02, 0x08

_MAGIC = 0xBEEFC0DE
_FORMAT = 1
# The versions of LMDB 1.0 and of its development.
_LATER = (2, 999)
_NO_PAGE = (1 << 64) - 1

# A page of the file is of one kind. The other bits are those of pages in memory, and of lists of
# values for one key.
_BRANCH, _LEAF, _OVERFLOW, _META, _KIND = 0x01, 0x02, 0x04, 0x08, 0x7F
_BIG, _SUBDATABASE = 0x01, 0x02
_NODE_BYTES = 8

# number, padding, flags, lower, upper
_HEADER = struct.Struct("<QHHHH")
# number, padding, flags, number of pages
_OVERFLOW_HEADER = struct.Struct("<QHHI")
# magic, version, address, size of the map
_META_HEAD = struct.Struct("<IIQQ")
# padding (the page size, in the first database), flags, depth, branch, leaf and overflow pages,
# entries, root
_DATABASE = struct.Struct("<IHHQQQQQ")
# last page, transaction number
_META_TAIL = struct.Struct("<QQ")
# two halves of a size, or of a page number with the flags above them; flags, length of the key
_NODE = struct.Struct("<HHHH")
_PAGE_NUMBER = struct.Struct("<Q")

_REMAKE = "copy its records into a new LMDB 0.9 file without named databases"


@dataclass(frozen=True, slots=True)
class Meta:
    """The valid meta page of a file of ``pages`` whole pages, and its main database.

    ``root`` is None if the database is empty. ``flags`` has ``REVERSED`` and ``INTEGERS`` only.
    """

    page_bytes: int
    pages: int
    transaction: int
    map_bytes: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int | None

    def order(self) -> Callable[[bytes], bytes | int]:
        """The value by which a key is compared."""
        return order_of_keys(self.flags)


@dataclass(frozen=True, slots=True)
class Leaf:
    """The records of a leaf page: the key, and the place of the value in the file, in bytes."""

    keys: Sequence[bytes]
    offsets: Sequence[int]
    lengths: Sequence[int]


def order_of_keys(flags: int) -> Callable[[bytes], bytes | int]:
    """The value by which a key of a database with ``flags`` is compared."""
    if flags & INTEGERS:
        return lambda key: int.from_bytes(key, "little")
    if flags & REVERSED:
        return lambda key: key[::-1]
    return bytes


def page_bytes_of(head: bytes) -> int:
    """The size of the pages of a file that begins with ``head``, in bytes.

    Raises LmdbError if ``head``, of at least ``META_BYTES``, is not of a file of LMDB 0.9.
    """
    return _meta(head, 0)[0]


def parse_meta(first: bytes, second: bytes, size: int) -> Meta:
    """The valid one of the meta pages, from the first ``META_BYTES`` of page 0 and of page 1 of a
    file of ``size`` bytes.

    Raises LmdbError if the file is damaged, or has a format or a database that is not supported.
    """
    found = [_meta(head, number) for number, head in enumerate((first, second))]
    if found[0][0] != found[1][0]:
        raise LmdbError("is damaged: its two meta pages have different page sizes")
    # As LMDB: the first one, if their numbers are equal.
    page_bytes, map_bytes, main, _, transaction = max(found, key=lambda meta: meta[-1])
    value_bytes, flags, depth, branch, leaf, overflow, entries, root = main
    _require_plain(flags, value_bytes)
    empty = root == _NO_PAGE
    if empty != (depth == 0) or empty != (entries == 0) or depth > MOST_LEVELS:
        raise LmdbError(f"is damaged: its tree has {depth} levels and {entries} records")
    pages = size // page_bytes
    return Meta(
        page_bytes=page_bytes,
        pages=pages,
        transaction=transaction,
        map_bytes=map_bytes,
        flags=flags,
        depth=depth,
        branch_pages=branch,
        leaf_pages=leaf,
        overflow_pages=overflow,
        entries=entries,
        root=None if empty else root,
    )


def _meta(head: bytes, number: int) -> tuple[int, int, tuple[int, ...], int, int]:
    """The page size, the size of the map, the main database, the last page and the transaction of
    the meta page ``number``. Raises LmdbError."""
    if len(head) < META_BYTES:
        raise LmdbError(
            f"is not an LMDB file: it has {counted(len(head), 'byte', 'bytes')} where meta page"
            f" {number} should be",
            hint="give the file data.mdb, or its directory",
        )
    own, _, kind, _, _ = _HEADER.unpack_from(head)
    magic, version, _, map_bytes = _META_HEAD.unpack_from(head, HEADER_BYTES)
    if magic != _MAGIC or not kind & _META or own != number:
        raise LmdbError(
            _other_format(head) or f"is not an LMDB file, or its meta page {number} is damaged",
            hint="give the file data.mdb, or its directory",
        )
    if version != _FORMAT:
        what = "LMDB 1.0" if version in _LATER else f"an unknown LMDB (version {version})"
        raise LmdbError(f"has the format of {what}; only that of LMDB 0.9 is read", hint=_REMAKE)
    free = _DATABASE.unpack_from(head, 40)
    page_bytes = free[0]
    if page_bytes & (page_bytes - 1) or not SMALLEST_PAGE <= page_bytes <= LARGEST_PAGE:
        raise LmdbError(f"is damaged: it has pages of {page_bytes} bytes")
    main = _DATABASE.unpack_from(head, 40 + _DATABASE.size)
    last, transaction = _META_TAIL.unpack_from(head, 40 + 2 * _DATABASE.size)
    return page_bytes, map_bytes, main, last, transaction


def _other_format(head: bytes) -> str:
    """How the format of a file differs that is not read, if it is one of LMDB."""
    little, big = _MAGIC.to_bytes(4, "little"), _MAGIC.to_bytes(4, "big")
    if head[16:20] == big or head[12:16] == big:
        return "was written on a big-endian machine, which is not supported"
    if head[12:16] == little:
        return "was written by a program of 32 bits, which is not supported"
    return ""


def _require_plain(flags: int, value_bytes: int) -> None:
    """``value_bytes`` is only set with several values for one key, all of that length."""
    unknown = flags & ~(REVERSED | INTEGERS)
    if unknown & 0x04:
        raise LmdbError(
            "has several values for one key (DUPSORT), which is not supported", hint=_REMAKE
        )
    if value_bytes and not unknown:
        raise LmdbError("is damaged: its database has values of one length")
    if unknown:
        raise LmdbError(f"has a database with unknown flags {unknown:#x}", hint=_REMAKE)


def children(page: bytes | memoryview, number: int, meta: Meta) -> list[int]:
    """The page numbers of the children of the branch page ``number``, in the order of their keys.

    ``page`` has ``meta.page_bytes`` bytes. Raises LmdbError if it is damaged.
    """
    found = []
    spans = []
    for at, low, high, flags, key_bytes in _nodes(page, number, _BRANCH, meta):
        child = low | high << 16 | flags << 32
        if not 2 <= child < meta.pages:
            raise _damaged(number, f"it refers to page {child} of {meta.pages}")
        found.append(child)
        spans.append((at, _NODE_BYTES + key_bytes))
    _require_packed(page, number, spans, meta)
    return found


def leaf(page: bytes | memoryview, number: int, meta: Meta) -> Leaf:
    """The records of the leaf page ``number``, in the order of their keys.

    ``page`` has ``meta.page_bytes`` bytes. Raises LmdbError if it is damaged, or has a named
    database.
    """
    keys: list[bytes] = []
    offsets: list[int] = []
    lengths: list[int] = []
    spans = []
    begins = number * meta.page_bytes
    for at, low, high, flags, key_bytes in _nodes(page, number, _LEAF, meta):
        value = at + _NODE_BYTES + key_bytes
        length = low | high << 16
        inside = _PAGE_NUMBER.size if flags & _BIG else length
        if not key_bytes or value + inside > meta.page_bytes:
            raise _damaged(number, "a record exceeds it")
        key = bytes(page[at + _NODE_BYTES : value])
        if flags == _BIG:
            offsets.append(_value_of(page, value, length, number, meta))
        elif flags:
            raise _refused(flags, key, number)
        else:
            offsets.append(begins + value)
        keys.append(key)
        lengths.append(length)
        spans.append((at, _NODE_BYTES + key_bytes + inside))
    _require_packed(page, number, spans, meta)
    require_order(keys, number, meta)
    return Leaf(keys, offsets, lengths)


def is_overflow(offset: npt.NDArray[np.uint64], page_bytes: int) -> npt.NDArray[np.bool_]:
    """Which of the values at these places of a file are in overflow pages: those that begin right
    behind a page header. In a leaf page no value does, since the places of the nodes are there."""
    found: npt.NDArray[np.bool_] = offset % np.uint64(page_bytes) == HEADER_BYTES
    return found


def require_overflow(head: bytes | memoryview, offset: int, length: int, page_bytes: int) -> None:
    """Raises LmdbError if ``head``, of ``HEADER_BYTES``, is not the header of the overflow pages
    of a value of ``length`` bytes at ``offset``."""
    number = offset // page_bytes
    own, _, kind, pages = _OVERFLOW_HEADER.unpack(head)
    if own != number or kind & _KIND != _OVERFLOW or pages < _pages_of(length, page_bytes):
        raise _damaged(number, "it is not the page of a large value")


def _pages_of(length: int, page_bytes: int) -> int:
    return (HEADER_BYTES + length - 1) // page_bytes + 1


def require_order(keys: Sequence[bytes], number: int, meta: Meta) -> None:
    """Raises LmdbError if ``keys``, which end in page ``number``, are not strictly ascending."""
    compared = list(map(meta.order(), keys)) if meta.flags else keys
    if any(map(operator.ge, compared, compared[1:])):
        raise _damaged(number, "its keys are not in order (or the program has an order of its own)")


def _value_of(page: bytes | memoryview, value: int, length: int, number: int, meta: Meta) -> int:
    """The place of a value in overflow pages, whose number is at ``value``."""
    (first,) = _PAGE_NUMBER.unpack_from(page, value)
    pages = _pages_of(length, meta.page_bytes)
    if not 2 <= first <= meta.pages - pages:
        raise _damaged(number, f"it refers to {pages} pages from {first} on of {meta.pages}")
    return int(first) * meta.page_bytes + HEADER_BYTES


def _nodes(
    page: bytes | memoryview, number: int, kind: int, meta: Meta
) -> Iterator[tuple[int, int, int, int, int]]:
    """The place and the four fields of each node of a page. Raises LmdbError unless it is the page
    ``number`` of this kind, and its nodes begin inside it."""
    if len(page) != meta.page_bytes:
        raise LmdbError(f"is truncated: page {number} is not in it")
    own, _, flags, lower, upper = _HEADER.unpack_from(page)
    if own != number or flags & _KIND != kind:
        raise _damaged(number, "it is not a page of the tree")
    if not HEADER_BYTES + 2 <= lower <= upper < meta.page_bytes or lower % 2:
        raise _damaged(number, "its header is wrong")
    for at in struct.unpack_from(f"<{(lower - HEADER_BYTES) // 2}H", page, HEADER_BYTES):
        if not upper <= at <= meta.page_bytes - _NODE_BYTES:
            raise _damaged(number, "a node is outside of it")
        yield (at, *_NODE.unpack_from(page, at))


def _require_packed(
    page: bytes | memoryview, number: int, spans: list[tuple[int, int]], meta: Meta
) -> None:
    """LMDB keeps the nodes of a page together at its end, each at an even place."""
    place: int = _HEADER.unpack_from(page)[4]
    for at, length in sorted(spans):
        if at != place:
            raise _damaged(number, "its nodes overlap, or are not packed")
        place += length + length % 2
    if place != meta.page_bytes:
        raise _damaged(number, "its nodes do not fill it")


def _refused(flags: int, key: bytes, number: int) -> LmdbError:
    if flags & _SUBDATABASE:
        name = escape_text(key.decode("utf-8", "surrogateescape"))
        return LmdbError(f"has the named database {name!r}, which is not supported", hint=_REMAKE)
    return _damaged(number, f"a record has the flags {flags:#x}")


def _damaged(number: int, what: str) -> LmdbError:
    return LmdbError(f"is damaged: page {number}: {what}", hint="check the file, or copy it again")
