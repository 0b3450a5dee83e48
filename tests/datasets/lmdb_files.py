"""LMDB files for tests: written by the lmdb module, or page by page for what it cannot write."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import lmdb

Records: TypeAlias = list[tuple[bytes, bytes]]

KIB = 1 << 10
NO_PAGE = (1 << 64) - 1


def written(path: Path, make: Callable[[lmdb.Environment], None], **options: object) -> Records:
    """Writes the file ``path`` with ``make``. Returns its records as a cursor of LMDB gets them."""
    environment = lmdb.open(
        str(path), subdir=False, map_size=1 << 30, sync=False, lock=False, **options
    )
    try:
        make(environment)
    finally:
        environment.close()
    return by_cursor(path)


def by_cursor(path: Path) -> Records:
    environment = lmdb.open(str(path), subdir=False, readonly=True, lock=False)
    try:
        with environment.begin() as transaction:
            return list(transaction.cursor())
    finally:
        environment.close()


def appended(count: int, size: int) -> Callable[[lmdb.Environment], None]:
    """``count`` records in the order of their keys, of ``size`` random bytes each."""

    def make(environment: lmdb.Environment) -> None:
        rng = random.Random(count)
        with environment.begin(write=True) as transaction:
            for number in range(count):
                transaction.put(b"%08d" % number, rng.randbytes(size), append=True)

    return make


def inserted(
    count: int, sizes: Sequence[int], *, key_bytes: int = 60, deleted: float = 0.0
) -> Callable[[lmdb.Environment], None]:
    """``count`` records with random keys in several transactions, which delete and replace some."""

    def make(environment: lmdb.Environment) -> None:
        rng = random.Random(count)
        keys = [rng.randbytes(rng.randint(1, key_bytes)) for _ in range(count)]
        for part in range(4):
            with environment.begin(write=True) as transaction:
                for key in keys[part::4]:
                    transaction.put(key, rng.randbytes(rng.choice(sizes)))
            with environment.begin(write=True) as transaction:
                for key in rng.sample(keys, int(count * deleted / 4)):
                    transaction.delete(key)
                for key in rng.sample(keys, count // 20):
                    transaction.put(key, rng.randbytes(rng.choice(sizes)))

    return make


def long_keys(environment: lmdb.Environment) -> None:
    """Long keys, so that seven fill a page: four levels."""
    with environment.begin(write=True) as transaction:
        for number in random.Random(5).sample(range(1200), 1200):
            transaction.put(b"%0511d" % number, b"%d" % number)


def header(number: int, flags: int, lower: int, upper: int) -> bytes:
    return struct.pack("<QHHHH", number, 0, flags, lower, upper)


def meta_page(
    number: int,
    page_bytes: int,
    *,
    version: int = 1,
    flags: int = 0,
    depth: int = 0,
    entries: int = 0,
    root: int = NO_PAGE,
    transaction: int = 1,
) -> bytes:
    free = struct.pack("<IHHQQQQQ", page_bytes, 8, 0, 0, 0, 0, 0, NO_PAGE)
    main = struct.pack("<IHHQQQQQ", 0, flags, depth, 0, 0, 0, entries, root)
    fields = struct.pack("<IIQQ", 0xBEEFC0DE, version, 0, 1 << 20)
    tail = struct.pack("<QQ", 1 << 10, transaction)
    return (header(number, 8, 0, 0) + fields + free + main + tail).ljust(page_bytes, b"\0")


def tree_page(number: int, kind: int, nodes: Sequence[bytes], page_bytes: int) -> bytes:
    """A branch (1) or leaf (2) page with ``nodes``, packed at its end."""
    places, end = [], page_bytes
    body = b""
    for node in nodes:
        padded = node + b"\0" * (len(node) % 2)
        end -= len(padded)
        places.append(end)
        body = padded + body
    lower = 16 + 2 * len(nodes)
    page = header(number, kind, lower, end) + struct.pack(f"<{len(nodes)}H", *places)
    return page + b"\0" * (end - len(page)) + body


def node(low: int, flags: int, key: bytes, content: bytes = b"") -> bytes:
    """A node of a leaf: ``low`` is the length of the value."""
    return struct.pack("<HHHH", low & 0xFFFF, low >> 16, flags, len(key)) + key + content


def child(number: int, key: bytes) -> bytes:
    return (
        struct.pack("<HHHH", number & 0xFFFF, number >> 16 & 0xFFFF, number >> 32, len(key)) + key
    )


def built(page_bytes: int, records: Records, *, per_leaf: int = 3, flags: int = 0) -> bytes:
    """A file of two levels, with pages of any size. Values above half a page are in overflow
    pages."""
    leaves: list[tuple[int, bytes, list[bytes]]] = []
    pages: dict[int, bytes] = {}
    following = 3
    for start in range(0, len(records), per_leaf):
        nodes = []
        own, following = following, following + 1
        for key, value in records[start : start + per_leaf]:
            if len(value) <= page_bytes // 4:
                nodes.append(node(len(value), 0, key, value))
                continue
            nodes.append(node(len(value), 1, key, struct.pack("<Q", following)))
            count = (15 + len(value)) // page_bytes + 1
            content = struct.pack("<QHHI", following, 0, 4, count) + value
            pages[following] = content.ljust(count * page_bytes, b"\0")
            following += count
        leaves.append((own, records[start][0], nodes))
    for own, _, nodes in leaves:
        pages[own] = tree_page(own, 2, nodes, page_bytes)
    pages[2] = tree_page(
        2, 1, [child(own, key if own > 3 else b"") for own, key, _ in leaves], page_bytes
    )
    return assembled(
        page_bytes, pages, flags=flags, depth=2, entries=len(records), root=2, transaction=7
    )


def assembled(page_bytes: int, pages: Mapping[int, bytes], **main: int) -> bytes:
    """The file with these pages behind two meta pages."""
    first = meta_page(0, page_bytes)
    second = meta_page(1, page_bytes, **main)
    return first + second + b"".join(pages[number] for number in sorted(pages))
