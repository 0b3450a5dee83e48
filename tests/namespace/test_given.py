"""A given snapshot is served from a copy that is the mount's own."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path

import lmdb
import pytest
import xxhash
from click.testing import CliRunner

from monarch.cli.snapshot import snapshot as snapshots
from monarch.config.settings import MountSettings
from monarch.daemon import snapshot_choice
from monarch.daemon.snapshot_choice import snapshot_for
from monarch.errors import SnapshotError, TierError
from monarch.namespace import given as given_module
from monarch.namespace.build import build
from monarch.namespace.given import own_copy
from monarch.namespace.schema import (
    ACL_SHIFT,
    ALIAS,
    BLOCK,
    CHILDREN,
    EXTRA_OFFSET,
    FLAGS_OFFSET,
    INODES,
    META,
    RECORD_BYTES,
    key,
    pack_strings,
    seal,
)
from monarch.namespace.schema import (
    NAMES as NAMES_TABLE,
)
from monarch.namespace.snapshot import Snapshot
from monarch.namespace.trailer import append_trailer, read_value
from monarch.tiers.source import Source
from monarch.types import ROOT_INO

NAMES = [f"{number:06}".encode() for number in range(5000)]


@pytest.fixture
def given(source: Path, tmp_path: Path) -> Path:
    for name in NAMES:
        os.close(os.open(source / os.fsdecode(name), os.O_CREAT | os.O_WRONLY))
    build(source, tmp_path / "given.snapshot")
    return tmp_path / "given.snapshot"


def opened(source: Path, given: Path, state: Path) -> Snapshot:
    settings = MountSettings.model_validate(
        {
            "name": "given",
            "source": source,
            "mountpoint": "/unused",
            "snapshot": {"file": given, "freshness": "never"},
        }
    )
    root = Source(os.fsencode(source))
    try:
        return snapshot_for(settings, state, root, False, lambda *_: None)[0]
    finally:
        root.close()


def copies(state: Path) -> list[Path]:
    return sorted(state.iterdir())


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir()
    return path


@pytest.mark.fault("S13")
@pytest.mark.finding("D2")
@pytest.mark.parametrize("in_memory", [True, False], ids=["in memory", "mapped"])
def test_a_given_snapshot_that_is_written_over_is_not_felt(
    source: Path, given: Path, state: Path, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_memory:
        monkeypatch.setattr(snapshot_choice, "memory_bytes", lambda _root: 0)
    with opened(source, given, state) as snapshot:
        assert copies(state) == [snapshot.file]
        assert snapshot.file.stat().st_mode & 0o777 == 0o600
        given.write_bytes(b"\x5a" * 1000)
        assert list(filter(None, snapshot.damages())) == []
        assert snapshot.names(ROOT_INO) == NAMES
        if in_memory:
            os.truncate(snapshot.file, 0)
            assert list(filter(None, snapshot.damages())) == []
            with pytest.raises(SnapshotError):
                snapshot.opened_again()


@pytest.mark.fault("S13")
@pytest.mark.finding("D2")
def test_a_copy_is_kept_for_the_next_mount_until_another_snapshot_is_given(
    source: Path, given: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(source, given, state) as snapshot:
        first = snapshot.file
    made = first.stat().st_mtime_ns
    with opened(source, given, state) as snapshot:
        assert (snapshot.file, first.stat().st_mtime_ns) == (first, made)
    # Damaged since: made anew.
    content = first.read_bytes()
    first.write_bytes(content[:9000] + bytes([content[9000] ^ 1]) + content[9001:])
    with opened(source, given, state) as snapshot:
        assert first.read_bytes() == content == given.read_bytes()
    # Where files cannot share their blocks.
    monkeypatch.setattr(given_module, "_FICLONE", 0)
    build(source, given)
    with opened(source, given, state) as snapshot:
        assert snapshot.file != first
        assert copies(state) == [snapshot.file]
        assert snapshot.file.read_bytes() == given.read_bytes()


@pytest.mark.fault("S13")
def test_a_copy_that_finds_no_room_says_how_much_it_needs_and_leaves_nothing(
    given: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(given_module, "_FICLONE", 0)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TierError) as caught:
        own_copy(given, state)
    info = str(caught.value)
    assert str(given) in info and str(state) in info
    assert "KiB there: No space left on device" in info, info
    assert copies(state) == []


def test_a_value_is_read_without_a_mapping_from_leaves_and_from_pages_of_its_own(
    tmp_path: Path,
) -> None:
    values = {f"{number:04}".encode(): bytes([number % 251]) * number * 7 for number in range(1500)}
    path = tmp_path / "database"
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 26) as environment:
        with environment.begin(write=True) as transaction:
            for name, value in values.items():
                transaction.put(name, value)
        page_bytes = environment.stat()["psize"]
    append_trailer(path, page_bytes=page_bytes)
    fd = os.open(path, os.O_RDONLY)
    try:
        for name in (b"0000", b"0001", b"0100", b"0777", b"1499"):
            assert read_value(fd, name, path) == values[name]
        with pytest.raises(SnapshotError):
            read_value(fd, b"not there", path)
    finally:
        os.close(fd)


def reseal(content: bytearray, page_bytes: int | None = None) -> bytes:
    """A snapshot file whose end has the right checksum of the pages as they are now."""
    footer = struct.Struct("<4IQ8s")
    size, pages, count, zero, _, magic = footer.unpack_from(content, len(content) - footer.size)
    tree = content[pages * size : pages * size + 4 * count]
    head = (size if page_bytes is None else page_bytes, pages, count, zero)
    state = xxhash.xxh3_64(struct.pack("<4I", *head) + bytes(tree))
    for number in struct.unpack(f"<{count}I", tree):
        state.update(bytes(content[number * head[0] : (number + 1) * head[0]]))
    footer.pack_into(content, len(content) - footer.size, *head, state.intdigest(), magic)
    return bytes(content)


def tree_pages(content: bytes) -> list[int]:
    size, pages, count = struct.unpack_from("<3I", content, len(content) - 32)
    return list(struct.unpack_from(f"<{count}I", content, pages * size))


@pytest.mark.finding("D2")
def test_a_foreign_snapshot_may_hold_any_numbers_in_its_tree(
    source: Path, given: Path, state: Path
) -> None:
    """With the right checksum: it is refused in words, or serves what it says."""
    whole = given.read_bytes()
    pages = tree_pages(whole)
    chance = random.Random(11)
    refused = 0
    for _ in range(40):
        content = bytearray(whole)
        # The heads of the pages, and the entries of the leaves, which are at their ends.
        within = chance.choice([range(24, 160), range(60), range(4000, 4096)])
        at = chance.choice(pages) * 4096 + chance.choice(within)
        content[at] ^= 1 << chance.randrange(8)
        given.write_bytes(reseal(content))
        try:
            with opened(source, given, state) as snapshot:
                assert snapshot.names(ROOT_INO) == NAMES
        except SnapshotError:
            refused += 1
    assert refused > 3
    for page_bytes in (0, 1, 4095, 1 << 31):
        given.write_bytes(reseal(bytearray(whole), page_bytes))
        with pytest.raises(SnapshotError):
            own_copy(given, state)


@pytest.mark.finding("D2")
def test_a_foreign_snapshot_may_have_any_trailer(source: Path, given: Path, state: Path) -> None:
    with Snapshot.open(given) as snapshot:
        info = snapshot.info()
    fields = {"version": 2, **info.as_json()}
    for change in (
        {"id": "x/../../../there"},
        {"id": 7},
        {"entries": 1 << 60},
        {"entries": -1},
        {"entries": "many"},
        {"acl_values": 1 << 50},
        {"newest_ns": "now"},
        {"newest_ns": 1 << 63},
        {"sizes": [["many", None]]},
    ):
        with_value(given, META, json.dumps({**fields, **change}).encode())
        with pytest.raises(SnapshotError):
            opened(source, given, state)
    for content in (b"[" * 100_000, b"{}", b"", bytes(300 * 1024)):
        with_value(given, META, content)
        with pytest.raises(SnapshotError):
            opened(source, given, state)
    assert copies(state) == []


@pytest.mark.finding("D2")
def test_a_foreign_snapshot_leads_to_no_address_outside_the_file(
    source: Path, given: Path, state: Path
) -> None:
    with Snapshot.open(given) as snapshot:
        rows = bytes(next(snapshot.records())[1].tobytes())
    for at, value in (
        (RECORD_BYTES + 0, 3),  # the parents of two entries are each other
        (RECORD_BYTES + 0, 0),
        (RECORD_BYTES + 0, 1 << 31),
        (RECORD_BYTES + FLAGS_OFFSET, ALIAS),
        (RECORD_BYTES + FLAGS_OFFSET, 1 << ACL_SHIFT),
        (EXTRA_OFFSET, 1 << 20),
    ):
        changed = bytearray(rows)
        struct.pack_into("<I", changed, at, value)
        with_value(given, key(INODES, 0), bytes(changed))
        with pytest.raises(SnapshotError):
            opened(source, given, state)
    with_value(given, key(INODES, 0), rows)
    with opened(source, given, state) as snapshot:
        snapshot.file.unlink()
    for table, content in (
        (INODES, rows[:RECORD_BYTES]),
        (INODES, rows[:-1]),
        (NAMES_TABLE, struct.pack("<2I", 8, 1 << 30)),
        (CHILDREN, struct.pack("<2I", 2, 1 << 30)),
        (CHILDREN, b"odd"),
    ):
        was = given.read_bytes()
        with_value(given, key(table, 0), content)
        with pytest.raises(SnapshotError):
            opened(source, given, state)
        given.write_bytes(was)
    assert copies(state) == []


@pytest.mark.finding("D2")
@pytest.mark.parametrize(
    "name", [b"..", b".", b"", b"a/b", b"/etc/passwd", b"../../etc/passwd", b"a\0b"]
)
def test_a_foreign_snapshot_with_a_name_that_no_directory_has_is_refused(
    source: Path, given: Path, state: Path, name: bytes
) -> None:
    with Snapshot.open(given) as snapshot:
        root = snapshot.name(ROOT_INO)
        count = min(BLOCK, snapshot.entries) - 1

    def with_names(*names: bytes) -> None:
        with_value(given, key(NAMES_TABLE, 0), pack_strings([root, *names]))

    with_names(*NAMES[: count - 1], name)
    with pytest.raises(SnapshotError, match="is damaged"):
        opened(source, given, state)
    assert copies(state) == []
    # Odd ones that a directory may have.
    with_names(b"...", b"..a", b".a", b"a.", b"\xff\n", b"\\", *NAMES[6:count])
    opened(source, given, state).close()


@pytest.mark.finding("D2")
@pytest.mark.parametrize(
    "use",
    [
        "verify SOURCE FILE",
        "verify SOURCE FILE --sample 50",
        "refresh SOURCE FILE",
        "diff FILE FILE",
    ],
)
def test_no_command_follows_the_numbers_of_a_foreign_snapshot(
    source: Path, given: Path, use: str
) -> None:
    """Two entries are the parents of each other: their paths have no end."""
    with Snapshot.open(given) as snapshot:
        rows = bytearray(next(snapshot.records())[1].tobytes())
    for slot in range(2, len(rows) // RECORD_BYTES + 1):
        struct.pack_into("<I", rows, (slot - 1) * RECORD_BYTES, slot ^ 1)
    with_value(given, key(INODES, 0), bytes(rows))
    places = {"SOURCE": os.fspath(source), "FILE": os.fspath(given)}
    before = given.read_bytes()
    result = CliRunner().invoke(snapshots, [places.get(word, word) for word in use.split()])
    assert isinstance(result.exception, SnapshotError), result.output
    assert "is damaged" in str(result.exception) and given.read_bytes() == before


def with_value(given: Path, name: bytes, content: bytes) -> None:
    with lmdb.open(str(given), subdir=False, lock=False, map_size=1 << 28) as environment:
        with environment.begin(write=True) as transaction:
            transaction.put(name, seal(name, content))
        page_bytes = environment.stat()["psize"]
    append_trailer(given, page_bytes=page_bytes)
