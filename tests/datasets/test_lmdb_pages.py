"""The pages of LMDB files are read as LMDB reads them, and hostile ones are refused."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from monarch.datasets.lmdb_reader import LmdbReader
from monarch.errors import LmdbError
from tests.datasets.lmdb_files import (
    KIB,
    Records,
    appended,
    assembled,
    built,
    by_cursor,
    child,
    inserted,
    long_keys,
    meta_page,
    node,
    tree_page,
    written,
)

# What a file is made of, and the levels of its tree.
FILES: dict[str, tuple[Callable[[lmdb.Environment], None], int]] = {
    "empty": (lambda environment: None, 0),
    "one small record": (appended(1, 10), 1),
    "one large record": (appended(1, 1 << 20), 1),
    "a page full of records": (appended(100, 10), 1),
    "a page and one": (appended(200, 10), 2),
    "appended, in the pages": (appended(5000, 100), 2),
    "appended, in overflow pages": (appended(1000, 9000), 2),
    "100,000 appended": (appended(100_000, 10), 3),
    "long keys": (long_keys, 4),
    "inserted at random": (inserted(2000, [0, 1, 10, 100, 1000, 2000, 2030, 3000, 70_000]), 3),
    "some deleted": (inserted(2000, [0, 10, 1000, 2030, 5000], deleted=0.6), 3),
    "all sizes to 1 MiB": (inserted(60, [10, 4080, 4081, 100_000, 1 << 20], deleted=0.3), 1),
}


def records_of(path: Path) -> Records:
    with LmdbReader(path) as reader:
        return [*zip(reader.keys, map(bytes, reader.get_many(range(len(reader)))), strict=True)]


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def numbered(count: int, size: int = 40) -> Records:
    return [(b"%04d" % number, random.Random(number).randbytes(size)) for number in range(count)]


@pytest.mark.promise(242)
@pytest.mark.parametrize("name", FILES)
def test_every_record_is_that_of_a_cursor(name: str, tmp_path: Path) -> None:
    make, levels = FILES[name]
    expected = written(tmp_path / "f", make)
    found = records_of(tmp_path / "f")
    assert found == expected
    environment = lmdb.open(str(tmp_path / "f"), subdir=False, readonly=True, lock=False)
    assert environment.stat()["depth"] == levels
    environment.close()


def test_a_directory_and_a_file_of_the_size_of_the_map_are_read(tmp_path: Path) -> None:
    environment = lmdb.open(str(tmp_path / "d"), map_size=1 << 24, writemap=True, sync=False)
    with environment.begin(write=True) as transaction:
        transaction.put(b"key", b"value")
    environment.close()
    assert (tmp_path / "d/data.mdb").stat().st_size == 1 << 24
    assert records_of(tmp_path / "d") == [(b"key", b"value")]


@pytest.mark.parametrize("page_bytes", [512, 4096, 16384, 32768])
def test_pages_have_the_size_that_the_meta_page_gives(page_bytes: int, tmp_path: Path) -> None:
    records = [
        (key, value[: 1 + number % 90] * (1 + number % 7 * page_bytes // 100))
        for number, (key, value) in enumerate(numbered(30, 100))
    ]
    found = put(tmp_path / "f", built(page_bytes, records))
    assert records_of(found) == records
    # The pages that the test builds are those of LMDB.
    if page_bytes == os.sysconf("SC_PAGE_SIZE"):
        assert by_cursor(found) == records


def test_keys_are_in_the_order_of_the_database(tmp_path: Path) -> None:
    integers = [(struct.pack("<Q", number * 999), b"%d" % number) for number in range(7)]
    assert [key for key, _ in integers] != sorted(key for key, _ in integers)
    backward = sorted(numbered(30), key=lambda record: record[0][::-1])
    for name, records, flags in (("i", integers, 8), ("r", backward, 2)):
        found = put(tmp_path / name, built(4096, records, flags=flags))
        assert records_of(found) == records
        with LmdbReader(found) as reader:
            for place, (key, _) in enumerate(records):
                assert reader.keys.place_of(key) == place
            with pytest.raises(KeyError):
                reader.keys.place_of(b"missing.")
        with pytest.raises(LmdbError, match="not in order"):
            records_of(put(tmp_path / name, built(4096, records)))


def test_the_newer_meta_page_is_valid(tmp_path: Path) -> None:
    content = bytearray(built(4096, numbered(5)))
    assert len(records_of(put(tmp_path / "f", bytes(content)))) == 5
    # Page 0, of an empty database, gets the larger number.
    content[144:152] = struct.pack("<Q", 8)
    assert records_of(put(tmp_path / "g", bytes(content))) == []


def named_database(path: Path) -> None:
    environment = lmdb.open(str(path), subdir=False, max_dbs=2, lock=False)
    environment.open_db(b"images")
    environment.close()


def duplicates(path: Path) -> None:
    environment = lmdb.open(str(path), subdir=False, max_dbs=2, lock=False)
    environment.open_db(None, dupsort=True)
    environment.close()


def of_bytes(content: bytes) -> Callable[[Path], None]:
    return lambda path: put(path, content) and None


GOOD = built(4096, numbered(9))
LEAF = tree_page(2, 2, [node(1, 0, b"a", b"x")], 4096)
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a named database": (named_database, "named database 'images'"),
    "several values for a key": (
        of_bytes(built(4096, numbered(3), flags=4)),
        "several values for one key",
    ),
    "unknown flags": (of_bytes(built(4096, numbered(3), flags=0x80)), "unknown flags 0x80"),
    "values of one length": (of_bytes(GOOD[:4184] + b"\1" + GOOD[4185:]), "values of one length"),
    "LMDB 1.0": (
        of_bytes(meta_page(0, 4096, version=2) + meta_page(1, 4096, version=2)),
        "format of LMDB 1.0",
    ),
    "an unknown format": (
        of_bytes(meta_page(0, 4096, version=7) + meta_page(1, 4096)),
        "unknown LMDB",
    ),
    "32 bits": (of_bytes(GOOD[4:]), "32 bits"),
    "big-endian": (of_bytes(GOOD[:16] + b"\xbe\xef\xc0\xde" + GOOD[20:]), "big-endian"),
    "nothing": (of_bytes(b""), "not an LMDB file"),
    "text": (of_bytes(b"text\n" * 1000), "not an LMDB file"),
    "one meta page": (of_bytes(GOOD[:4096]), "meta page 1"),
    "two page sizes": (
        of_bytes(meta_page(0, 4096) + meta_page(1, 8192)),
        "different page sizes",
    ),
    "pages of an odd size": (of_bytes(meta_page(0, 4095) + bytes(9999)), "pages of 4095"),
    "pages of no size": (of_bytes(GOOD[:40] + bytes(4) + GOOD[44:]), "pages of 0"),
    "a directory of another kind": (lambda path: path.mkdir(), "No such file"),
    "a pipe": (lambda path: os.mkfifo(path), "not a regular file"),
    "levels without a page": (
        of_bytes(assembled(4096, {}, depth=1, entries=1, transaction=9)),
        "1 levels",
    ),
    "a hundred levels": (
        of_bytes(assembled(4096, {2: LEAF}, depth=100, entries=1, root=2, transaction=9)),
        "100 levels",
    ),
    "more records than there are": (
        of_bytes(assembled(4096, {2: LEAF}, depth=1, entries=2, root=2, transaction=9)),
        "1 records instead of 2",
    ),
    "a root outside of the file": (
        of_bytes(assembled(4096, {2: LEAF}, depth=1, entries=1, root=1 << 60, transaction=9)),
        "truncated",
    ),
    "a root of the wrong kind": (
        of_bytes(assembled(4096, {2: LEAF}, depth=2, entries=1, root=2, transaction=9)),
        "not a page of the tree",
    ),
    "a page that is its own child": (
        of_bytes(
            assembled(
                4096,
                {2: tree_page(2, 1, [child(2, b""), child(3, b"b")], 4096), 3: bytes(4096)},
                **{"depth": 30, "entries": 9, "root": 2, "transaction": 9},
            )
        ),
        "not a page of the tree",
    ),
    "two children that are one page": (
        of_bytes(
            assembled(
                4096,
                {2: tree_page(2, 1, [child(3, b""), child(3, b"b")], 4096), 3: bytes(4096)},
                **{"depth": 2, "entries": 9, "root": 2, "transaction": 9},
            )
        ),
        "the same page",
    ),
}


@pytest.mark.promise(243)
@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_read_is_refused_with_its_name_and_the_reason(
    name: str, tmp_path: Path
) -> None:
    make, reason = REFUSED[name]
    make(tmp_path / "f")
    with pytest.raises((LmdbError, FileNotFoundError), match=reason) as refused:
        LmdbReader(tmp_path / "f")
    assert str(tmp_path / "f") in str(refused.value)


def test_a_hundred_thousand_branches_of_one_page_are_not_followed(tmp_path: Path) -> None:
    # Each page refers to the same two pages below: 2**30 ways to the leaves.
    pages = {}
    for number in range(2, 62, 2):
        below = [child(number + 2, b""), child(number + 3, b"b")]
        pages[number] = tree_page(number, 1, below, 4096)
        pages[number + 1] = tree_page(number + 1, 1, below, 4096)
    pages[62] = pages[63] = bytes(4096)
    content = assembled(4096, pages, depth=31, entries=9, root=2, transaction=9)
    with pytest.raises(LmdbError, match="the same page"):
        LmdbReader(put(tmp_path / "f", content))


HOSTILE_LEAVES: dict[str, tuple[list[bytes], str]] = {
    "a value beyond the page": ([node(5000, 0, b"a", b"x")], "exceeds it"),
    "a key beyond the page": ([struct.pack("<HHHH", 1, 0, 0, 60000)], "exceeds it"),
    "no key": ([node(1, 0, b"", b"x")], "exceeds it"),
    "a large value outside of the file": (
        [node(9999, 1, b"a", struct.pack("<Q", 3))],
        "refers to 3 pages from 3 on of 4",
    ),
    "a large value of the meta page": ([node(10, 1, b"a", struct.pack("<Q", 0))], "from 0 on"),
    "a large value at 2**64": ([node(9, 1, b"a", struct.pack("<Q", 2**64 - 1))], "refers to"),
    "unknown flags": ([node(1, 8, b"a", b"x")], "has the flags 0x8"),
    "keys in descending order": (
        [node(1, 0, b"b", b"x"), node(1, 0, b"a", b"x")],
        "not in order",
    ),
    "a key twice": ([node(1, 0, b"a", b"x"), node(1, 0, b"a", b"x")], "not in order"),
    "nodes that overlap": ([node(1, 0, b"a", b"x"), node(3, 0, b"b", b"y")], "packed"),
    "nodes with room between them": ([node(1, 0, b"a", b"x"), node(1, 0, b"b", b"xyz")], "packed"),
}


@pytest.mark.promise(243)
@pytest.mark.parametrize("name", HOSTILE_LEAVES)
def test_a_hostile_leaf_is_refused(name: str, tmp_path: Path) -> None:
    nodes, reason = HOSTILE_LEAVES[name]
    leaf = tree_page(2, 2, nodes, 4096)
    content = assembled(
        4096, {2: leaf, 3: bytes(4096)}, depth=1, entries=len(nodes), root=2, transaction=9
    )
    with pytest.raises(LmdbError, match=reason):
        LmdbReader(put(tmp_path / "f", content))


@pytest.mark.promise(243)
def test_a_page_that_is_not_of_a_large_value_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    value = node(9999, 1, b"a", struct.pack("<Q", 3))
    good = struct.pack("<QHHI", 3, 0, 4, 3)
    for head, reason in (
        (good, ""),
        (struct.pack("<QHHI", 4, 0, 4, 3), "page 3"),
        (struct.pack("<QHHI", 3, 0, 2, 3), "page 3"),
        (struct.pack("<QHHI", 3, 0, 4, 2), "page 3"),
    ):
        pages = {2: tree_page(2, 2, [value], 4096), 3: head.ljust(3 * 4096, b"x")}
        content = assembled(4096, pages, depth=1, entries=1, root=2, transaction=9)
        with LmdbReader(put(tmp_path / "f", content)) as reader:
            if not reason:
                assert bytes(reader.get(0)) == b"x" * 9999
                continue
            with pytest.raises(LmdbError, match=reason):
                reader.get(0)


def is_right(path: Path, found: Records, records: Records) -> bool:
    """Whether they are the records before the damage, or those that LMDB reads now."""
    if found == records:
        return True
    try:
        return found == by_cursor(path)
    except lmdb.Error:
        return False


@pytest.mark.promise(243)
def test_a_damaged_file_gives_an_error_or_the_records_that_lmdb_reads(tmp_path: Path) -> None:
    path = tmp_path / "f"
    records = written(path, inserted(150, [0, 7, 100, 1000, 5000], key_bytes=300, deleted=0.3))
    content = path.read_bytes()
    pages = len(content) // 4096
    rng = random.Random(3)
    outcomes = {"refused": 0, "the same": 0, "as LMDB": 0}
    for attempt in range(450):
        damaged = bytearray(content)
        if attempt % 9 == 0:
            del damaged[rng.randrange(len(content)) :]
        else:
            # Most flips are in the headers and the first nodes of pages.
            within = rng.choice((160, 160, 4096))
            at = rng.randrange(pages) * 4096 + rng.randrange(within)
            damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            found = records_of(path)
        except LmdbError:
            outcomes["refused"] += 1
            continue
        assert is_right(path, found, records), attempt
        outcomes["the same" if found == records else "as LMDB"] += 1
    assert min(outcomes.values()) > 10, outcomes


def test_a_wrong_value_is_found(tmp_path: Path) -> None:
    records = written(tmp_path / "f", appended(10, KIB))
    assert is_right(tmp_path / "f", list(records), records)
    swapped = [(records[1][0], records[0][1]), *records[1:]]
    assert not is_right(tmp_path / "f", swapped, records)
