"""The encoding of tables, attributes and the index: round trips, and bytes that are refused."""

from __future__ import annotations

import random
import re
import stat
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.errors import PackError
from monarch.packs.format import (
    LARGE,
    NONE,
    PAYLOAD,
    TABLE_DTYPE,
    TREE,
    Entry,
    Header,
    decode_header,
    decode_table,
    decode_xattrs,
    encode_header,
    encode_table,
    encode_xattrs,
    table_size,
)
from monarch.packs.index import HEADER_BYTES, RECORD_DTYPE, ChunkFile, Index, encode_index

FILE = stat.S_IFREG | 0o644
FOLDER = stat.S_IFDIR | 0o755
NAMES = st.binary(min_size=1, max_size=8).filter(
    lambda name: name not in (b".", b"..") and b"/" not in name and b"\0" not in name
)


def header_of(entries: Sequence[Entry], *, kind: int = TREE, **fields: int) -> Header:
    table = encode_table(entries)
    raw = {
        **{"kind": kind, "seed": 1, "sequence": 0, "entries": len(entries), "order": 0},
        **{"table_bytes": len(table), "chunk_bytes": 1 << 20, "large": 0},
        "payload_bytes": sum(entry.size for entry in entries) if kind == PAYLOAD else 0,
        "table_digest": xxhash.xxh3_64_intdigest(table),
    }
    return Header(**{**raw, **fields})


def extents(sizes: Sequence[int], *, chunk: int = 0) -> list[Entry]:
    """Files of these sizes, one behind the other in a payload chunk."""
    entries = [Entry(b"f%03d" % at, FILE, size=size, chunk=chunk) for at, size in enumerate(sizes)]
    offset = header_of(entries, kind=PAYLOAD, sequence=chunk).payload_offset
    placed = []
    for entry in entries:
        placed.append(entry._replace(offset=offset))
        offset += entry.size
    return placed


ENTRIES = st.tuples(
    st.lists(NAMES, min_size=1, max_size=4).map(b"/".join),
    st.integers(0, (1 << 32) - 1),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.dictionaries(NAMES.map(b"user.".__add__), st.binary(max_size=20)),
).map(
    lambda drawn: Entry(
        *(drawn[0], FOLDER, drawn[1]), mtime_ns=drawn[2], xattrs=encode_xattrs(drawn[3].items())
    )
)


@given(st.lists(ENTRIES, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_table_returns_the_entries_that_were_put_into_it(entries: list[Entry]) -> None:
    header = header_of(entries)
    assert decode_header(encode_header(header)) == header
    assert table_size(entries) == header.table_bytes
    assert decode_table(header, encode_table(entries)) == entries


def test_extents_of_a_payload_chunk_are_accepted_in_their_order() -> None:
    entries = extents([10, 0, 5])
    header = header_of(entries, kind=PAYLOAD)
    assert decode_table(header, encode_table(entries)) == entries


BAD = [
    Entry(b"../up", FOLDER),
    Entry(b"a/../b", FOLDER),
    Entry(b"/absolute", FOLDER),
    Entry(b"a//b", FOLDER),
    Entry(b"a/", FOLDER),
    Entry(b".", FOLDER),
    Entry(b"nul\0", FOLDER),
    Entry(b"n" * 256, FOLDER),
    Entry(b"a/" * 40_000 + b"b", FOLDER),
    Entry(b"", FILE),
    Entry(b"a", 0),
    Entry(b"a", FILE | 1 << 20),
    Entry(b"a", FOLDER, size=1),
    Entry(b"a", FOLDER, chunk=LARGE),
    Entry(b"a", FILE, size=1),
    Entry(b"a", FILE, size=1 << 63, chunk=LARGE),
    Entry(b"a", FILE, size=1, chunk=LARGE, offset=3),
    Entry(b"a", FILE, size=1, chunk=0),
    Entry(b"a", stat.S_IFLNK | 0o777),
    Entry(b"a", FILE, target=b"b"),
    Entry(b"a", stat.S_IFLNK | 0o777, target=b"nul\0"),
    Entry(b"a", FOLDER, xattrs=b"\1"),
    Entry(b"a", FOLDER, xattrs=encode_xattrs([(b"user.a", b"")]) * 2),
    Entry(b"a", FOLDER, xattrs=encode_xattrs([(b"security.capability", b"x")])),
]


@pytest.mark.parametrize("entry", BAD, ids=range(len(BAD)))
def test_an_entry_that_no_pack_has_is_refused(entry: Entry) -> None:
    entries = [entry]
    with pytest.raises(PackError):
        decode_table(header_of(entries, large=1), encode_table(entries))


@pytest.mark.parametrize(
    "change",
    [
        lambda first, second: (first, second._replace(offset=first.offset)),
        lambda first, second: (first, second._replace(offset=second.offset + 1)),
        lambda first, second: (first._replace(offset=0), second),
        lambda first, second: (second, first),
        lambda first, second: (first, second._replace(chunk=NONE)),
        lambda first, second: (first, second._replace(chunk=5)),
    ],
    ids=range(6),
)
def test_extents_that_overlap_or_lie_outside_are_refused(change: object) -> None:
    assert callable(change)
    first, second = extents([10, 5])
    entries = change(first, second)
    with pytest.raises(PackError):
        decode_table(header_of(entries, kind=PAYLOAD), encode_table(entries))


def test_every_flipped_bit_of_a_header_or_a_table_is_found() -> None:
    entries = extents([10, 5])
    raw = encode_header(header_of(entries, kind=PAYLOAD)) + encode_table(entries)
    size = len(encode_header(header_of(entries)))

    def decoded(raw: bytes) -> list[Entry]:
        return decode_table(decode_header(raw), raw[size:])

    assert decoded(raw) == entries
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PackError):
            decoded(bytes(flipped))
    for length in range(len(raw)):
        with pytest.raises(PackError):
            decoded(raw[:length])


def test_a_newer_format_is_refused_by_its_version() -> None:
    raw = bytearray(encode_header(header_of([])))
    raw[8] = 2
    raw[72:] = xxhash.xxh3_64_intdigest(bytes(raw[:72])).to_bytes(8, "little")
    with pytest.raises(PackError, match="version 2"):
        decode_header(bytes(raw))


def test_extended_attributes_do_not_depend_on_their_order() -> None:
    pairs = [(b"user.b", b"1"), (b"user.a", b"\0" * 10)]
    assert encode_xattrs(pairs) == encode_xattrs(pairs[::-1])
    assert decode_xattrs(encode_xattrs(pairs)) == tuple(sorted(pairs))


def _documented(heading: str, table: int) -> list[int]:
    """The positions in a table of docs/packs.md: its rows that begin with a number."""
    text = (Path(__file__).parents[2] / "docs/packs.md").read_text()
    section = text.split(f"### {heading}\n")[1].split("\n### ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [int(found) for found in re.findall(r"^\| (\d+) \|", tables[table], re.MULTILINE)]


def _positions(dtype: np.dtype[np.void]) -> list[int]:
    return [dtype.fields[name][1] for name in dtype.names or ()] if dtype.fields else []


def test_the_documented_positions_are_those_of_the_format() -> None:
    assert _documented("Chunks", 1) == _positions(TABLE_DTYPE)
    assert _documented("Index", 1) == _positions(RECORD_DTYPE)
    header = header_of([], kind=TREE, sequence=5, large=3)
    raw = encode_header(header)
    *begins, end = _documented("Chunks", 0)
    assert end == len(raw) == 80
    numbers = [
        int.from_bytes(raw[begin:after], "little") for begin, after in pairwise([*begins, end])
    ]
    assert numbers[1:-2] == [
        *(1, header.kind, header.seed, header.sequence, header.entries, header.table_bytes),
        *(header.payload_bytes, header.chunk_bytes, header.order, header.large),
    ]
    assert numbers[-2:] == [header.table_digest, xxhash.xxh3_64_intdigest(raw[:72])]


# -- the index -------------------------------------------------------------------------------------

SMALL = [
    Entry(b"", FOLDER),
    Entry(b"a", FOLDER),
    Entry(b"a-b", FOLDER),
    Entry(b"a/x", FILE, size=3, chunk=0, offset=200, group=1),
    Entry(b"a/y", FILE, size=3, group=1),
    Entry(b"b", FILE, size=9, chunk=LARGE, offset=0),
    Entry(b"l", stat.S_IFLNK | 0o777, target=b"a/x"),
]
CHUNKS = [ChunkFile(203, 1)]


def test_the_index_is_in_the_order_of_the_tree_whatever_the_order_of_the_entries() -> None:
    entries = list(SMALL)
    expected = encode_index(entries, CHUNKS)
    for seed in range(5):
        random.Random(seed).shuffle(entries)
        assert encode_index(entries, CHUNKS) == expected
    index = Index(expected)
    index.require_sound()
    paths = [index.path(number) for number in range(1, index.entries + 1)]
    assert paths == [b"", b"a", b"a/x", b"a/y", b"a-b", b"b", b"l"]
    assert [index.number(path) for path in paths] == list(range(1, 8))
    assert index.number(b"a/z") == index.number(b"A") == index.number(b"b/x") == 0
    assert [index.name(int(at)) for at in index.names(1)] == [b"a", b"a-b", b"b", b"l"]
    assert index.records["nlink"][1:].tolist() == [4, 2, 2, 2, 2, 1, 1]
    assert index.records["link"][1:].tolist() == [0, 0, 3, 3, 0, 6, 0]
    assert index.placed.tolist() == [3]
    assert (index.files, index.file_bytes) == (3, 12)


def test_directories_and_links_that_are_lost_with_a_chunk_leave_a_sound_index() -> None:
    index = Index(encode_index([Entry(b"d/e/f", FILE), SMALL[4]], []))
    index.require_sound()
    assert index.number(b"d/e/f")
    assert not index.number(b"a/y")


@pytest.mark.parametrize(
    "entries",
    [
        [*SMALL, Entry(b"a/x", FILE)],
        [*SMALL, Entry(b"b/below a file", FILE)],
        [*SMALL, Entry(b"c", FILE, size=1, chunk=1, offset=9)],
        [*SMALL, Entry(b"c", FILE, size=3, chunk=0, offset=300, group=1)],
        [*SMALL, *(Entry(name, FILE, size=9, chunk=LARGE, offset=1) for name in (b"c", b"d"))],
        [*SMALL, Entry(b"c", FILE, size=(1 << 64) - 1, chunk=0, offset=1)],
        [*SMALL, Entry(b"c", FILE, size=1 << 63, chunk=LARGE, offset=1)],
    ],
    ids=range(7),
)
def test_entries_that_contradict_each_other_make_no_index(entries: list[Entry]) -> None:
    with pytest.raises(PackError):
        encode_index(entries, CHUNKS)


@pytest.mark.parametrize(
    "entry",
    [
        Entry(b"c", FILE, size=1, chunk=0, offset=201),
        Entry(b"c", FILE, size=1, chunk=0, offset=203),
        Entry(b"c", FILE, size=(1 << 30) + 1, chunk=1),
        Entry(b"..", FOLDER),
        Entry(b"nul\0", FOLDER),
        Entry(b"n" * 256, FOLDER),
        Entry(b"c", 0o644),
        Entry(b"c", FOLDER | 1 << 20),
        Entry(b"c", stat.S_IFLNK | 0o777),
        Entry(b"c", stat.S_IFLNK | 0o777, target=b"a\0b"),
        Entry(b"c", stat.S_IFLNK | 0o777, target=b"t" * 4096),
        Entry(b"/".join([b"n" * 255] * 257), FOLDER),
    ],
    ids=range(12),
)
def test_an_index_of_impossible_entries_is_not_sound(entry: Entry) -> None:
    chunks = [*CHUNKS, ChunkFile(1 << 40, 2)]
    Index(encode_index(SMALL, chunks)).require_sound()
    index = Index(encode_index([*SMALL, entry], chunks))
    with pytest.raises(PackError):
        index.require_sound()


def _of_one_large_file(records: npt.NDArray[Any]) -> None:
    records["offset"][-1] = records["offset"][-2]


def _of_one_text(records: npt.NDArray[Any]) -> None:
    records["extra_offset"][-1] = records["extra_offset"][-2]


def _of_no_text(records: npt.NDArray[Any]) -> None:
    records["xattr_length"][-1] = 0


@pytest.mark.promise(226)
@pytest.mark.parametrize("change", [_of_one_large_file, _of_one_text, _of_no_text])
def test_bytes_and_texts_of_a_pack_belong_to_one_entry(
    change: Callable[[npt.NDArray[Any]], None],
) -> None:
    """A small pack has no large tree."""
    xattrs = encode_xattrs([(b"user.a", b"x" * 100)])
    entries = [
        Entry(name, FILE, size=9, chunk=LARGE, offset=number, xattrs=xattrs)
        for number, name in enumerate((b"y", b"z"), 5)
    ]
    raw = bytearray(encode_index([*SMALL, *entries], CHUNKS))
    Index(bytes(raw)).require_sound()
    change(np.frombuffer(raw, RECORD_DTYPE, len(SMALL) + 3, HEADER_BYTES))
    with pytest.raises(PackError):
        Index(bytes(raw)).require_sound()


@pytest.mark.promise(226)
@pytest.mark.parametrize("field", ["files", "bytes"])
def test_an_index_whose_header_counts_other_files_is_not_sound(field: str) -> None:
    raw = bytearray(encode_index(SMALL, CHUNKS))
    raw[{"files": 48, "bytes": 56}[field]] += 1
    raw[64:72] = xxhash.xxh3_64_intdigest(bytes(raw[:64])).to_bytes(8, "little")
    with pytest.raises(PackError, match="counts other"):
        Index(bytes(raw)).require_sound()


@pytest.mark.promise(226)
@pytest.mark.parametrize(("field", "value"), [("nlink", 7), ("nlink", 0), ("size", 1 << 62)])
@pytest.mark.parametrize("kind", [stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO])
def test_an_index_whose_numbers_do_not_fit_its_entries_is_not_sound(
    kind: int, field: str, value: int
) -> None:
    entry = Entry(b"z", kind | 0o755, target=b"to" if kind == stat.S_IFLNK else b"")
    raw = bytearray(encode_index([*SMALL, entry], CHUNKS))
    Index(bytes(raw)).require_sound()
    np.frombuffer(raw, RECORD_DTYPE, len(SMALL) + 2, HEADER_BYTES)[field][-1] = value
    with pytest.raises(PackError):
        Index(bytes(raw)).require_sound()


@pytest.mark.promise(226)
@pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_an_index_of_more_bytes_than_a_pack_can_have_is_not_sound(size: int) -> None:
    entries = [
        Entry(name, FILE, size=1, chunk=LARGE, offset=number)
        for number, name in enumerate((b"y", b"z"), 5)
    ]
    raw = bytearray(encode_index([*SMALL, *entries], CHUNKS))
    np.frombuffer(raw, RECORD_DTYPE, len(SMALL) + 3, HEADER_BYTES)["size"][-2:] = size
    # As far as the field can have them.
    raw[56:64] = ((12 + 2 * size) % (1 << 64)).to_bytes(8, "little")
    raw[64:72] = xxhash.xxh3_64_intdigest(bytes(raw[:64])).to_bytes(8, "little")
    with pytest.raises(PackError):
        Index(bytes(raw)).require_sound()


def test_directories_that_are_lost_are_not_made_without_end() -> None:
    deep = b"/".join([b"d"] * 8_000)
    with pytest.raises(PackError, match="directories"):
        encode_index([*SMALL, Entry(deep, FILE)], CHUNKS)


def test_an_index_whose_extents_leave_the_range_of_64_bits_is_not_sound() -> None:
    entry = Entry(b"c", FILE, size=10, chunk=1, offset=(1 << 64) - 5)
    index = Index(encode_index([*SMALL, entry], [*CHUNKS, ChunkFile((1 << 64) - 1, 2)]))
    with pytest.raises(PackError):
        index.require_sound()


def test_no_flipped_bit_of_an_index_gives_more_than_an_error() -> None:
    raw = encode_index(SMALL, CHUNKS)
    draw = random.Random(3)
    found = 0
    for bit in draw.sample(range(8 * len(raw)), 1500):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            index = Index(bytes(flipped))
            for number in range(1, index.entries + 1):
                index.number(index.path(number))
            index.require_sound()
        except (PackError, IndexError):
            found += 1
    # Flips in attributes and digests leave a sound index.
    assert found > 500
    for length in range(len(raw)):
        with pytest.raises(PackError):
            Index(raw[:length])
    with pytest.raises(PackError):
        Index(raw + b"\0")
