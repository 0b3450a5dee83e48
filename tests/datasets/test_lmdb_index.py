"""An index is written as its format says, whole or not at all; a damaged one is refused."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from monarch.datasets.lmdb_file import Version
from monarch.datasets.lmdb_index import (
    HEADER_BYTES,
    Index,
    may_replace,
    read_index,
    write_index,
)
from monarch.datasets.lmdb_table import Table
from monarch.errors import LmdbError

OF = Version(size=90_000, mtime_ns=-5, transaction=9, page_bytes=4096)


def index_of(
    keys: list[bytes], places: list[tuple[int, int]], *, ends: list[int] | None = None
) -> Index:
    found = np.cumsum([len(key) for key in keys]) if ends is None else np.array(ends)
    table = Table(
        np.array([place for place, _ in places], np.uint64),
        np.array([length for _, length in places], np.uint32),
        found.astype(np.uint32),
        b"".join(keys),
        2,
    )
    return Index(OF, table)


INDEX = index_of([b"a", b"bcd", b"e"], [(100, 7), (89_000, 1000), (0, 0)])


def same(left: Index, right: Index) -> bool:
    return (
        left.of == right.of
        and list(left.table.keys) == list(right.table.keys)
        and left.table.offsets.tolist() == right.table.offsets.tolist()
        and left.table.lengths.tolist() == right.table.lengths.tolist()
        and left.table.flags == right.table.flags
    )


def by_the_format(content: bytes) -> tuple[tuple[int, ...], list[tuple[bytes, int, int]]]:
    """The header and the records, read as docs/lmdb.md says."""
    assert content[:8] == b"LMDB-mlx"
    header = struct.unpack_from("<IIQqQQQIIQQ", content, 8)
    assert header[-1] == xxhash.xxh3_64_intdigest(content[:72])
    assert header[-2] == xxhash.xxh3_64_intdigest(content[80:])
    count, heap_bytes = header[5:7]
    heap = content[80 + 16 * count :]
    assert len(heap) == heap_bytes
    records, begin = [], 0
    for number in range(count):
        offset, length, end = struct.unpack_from("<QII", content, 80 + 16 * number)
        records.append((heap[begin:end], offset, length))
        begin = end
    return header, records


def test_an_index_has_the_documented_format(tmp_path: Path) -> None:
    path = tmp_path / "f.mlx"
    assert write_index(path, INDEX) == path.stat().st_size == HEADER_BYTES + 3 * 16 + 5
    header, records = by_the_format(path.read_bytes())
    assert header[:9] == (1, 4096, 90_000, -5, 9, 3, 5, 2, 0)
    assert records == [(b"a", 100, 7), (b"bcd", 89_000, 1000), (b"e", 0, 0)]
    assert same(read_index(path), INDEX)
    assert os.listdir(tmp_path) == ["f.mlx"]


def test_an_index_without_records_is_read(tmp_path: Path) -> None:
    write_index(tmp_path / "f", index_of([], []))
    assert len(read_index(tmp_path / "f").table) == 0


@pytest.mark.promise(246)
def test_a_flipped_bit_of_any_byte_and_any_truncation_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_index(path, INDEX)
    content = path.read_bytes()
    damaged = [content[:length] for length in range(len(content))] + [content + b"\0"]
    for place in range(2 * len(content)):
        flipped = bytearray(content)
        flipped[place // 2] ^= 1 << place * 5 % 8
        damaged.append(bytes(flipped))
    for wrong in damaged:
        path.write_bytes(wrong)
        with pytest.raises(LmdbError, match=str(path)):
            read_index(path)
    # The loop refuses because of the damage.
    path.write_bytes(content)
    assert same(read_index(path), INDEX)


@pytest.mark.promise(246)
@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (index_of([b"a"], [(89_999, 2)]), "outside of the LMDB file"),
        (index_of([b"a"], [((1 << 64) - 1, 2)]), "outside of the LMDB file"),
        (index_of([b"a", b"b"], [(0, 0), (0, 0)], ends=[2, 1]), "keys are not in order"),
        (index_of([b"a", b"b"], [(0, 0), (0, 0)], ends=[1, 9]), "keys are not in order"),
    ],
)
def test_a_hostile_index_with_right_checksums_is_refused(
    index: Index, reason: str, tmp_path: Path
) -> None:
    write_index(tmp_path / "f", index)
    with pytest.raises(LmdbError, match=reason):
        read_index(tmp_path / "f")


def with_header(content: bytes, at: int, kind: str, value: int) -> bytes:
    """The index with another number in its header, and the right checksum of it."""
    header = bytearray(content[:72])
    struct.pack_into(kind, header, at, value)
    return bytes(header) + struct.pack("<Q", xxhash.xxh3_64_intdigest(header)) + content[80:]


def test_an_index_of_a_newer_format_is_named_and_one_that_lies_about_its_size_not_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "f"
    write_index(path, INDEX)
    content = path.read_bytes()
    path.write_bytes(with_header(content, 8, "<I", 2))
    with pytest.raises(LmdbError, match=r"version 2 of the format.*monarch lmdb index"):
        read_index(path)
    for records in (2, 4, 1 << 60, (1 << 64) - 1):
        path.write_bytes(with_header(content, 40, "<Q", records))
        with pytest.raises(LmdbError, match="damaged: it should have"):
            read_index(path)


def test_random_bytes_are_no_index(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for size in (0, 7, 8, 100, 5000):
        path.write_bytes(random.Random(size).randbytes(size))
        with pytest.raises(LmdbError, match="not the index of an LMDB file"):
            read_index(path)
        assert not may_replace(path)
    assert may_replace(tmp_path / "missing")
    with pytest.raises(OSError):
        read_index(tmp_path / "missing")


@pytest.mark.promise(246)
def test_a_failed_write_leaves_the_earlier_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    write_index(path, INDEX)
    before = path.read_bytes()

    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("monarch.datasets.lmdb_index.sync_path", fail)
    with pytest.raises(OSError, match="No space"):
        write_index(path, index_of([b"other"], [(0, 0)]))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.promise(246)
def test_the_part_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    # A name of the greatest length leaves no room for another beside it.
    path, left = tmp_path / ("i" * 255), tmp_path / ".monarch.4000000.part"
    left.write_bytes(b"of a process that was killed")
    write_index(path, INDEX)
    assert os.listdir(tmp_path) == [path.name]
    assert read_index(path).table.heap == INDEX.table.heap
