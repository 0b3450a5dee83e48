"""A damaged snapshot is refused with a message; a whole one answers at low cost."""

from __future__ import annotations

import gc
import json
import os
import random
import struct
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import lmdb
import numpy as np
import pytest

from monarch.errors import SnapshotError
from monarch.namespace.build import build
from monarch.namespace.schema import ALIAS, META, RECORD, seal
from monarch.namespace.snapshot import Snapshot
from monarch.namespace.tables import _without_room
from monarch.namespace.trailer import append_trailer
from monarch.types import ROOT_INO, Ino
from tests.equipment import disks
from tests.namespace.conftest import Taken


@pytest.fixture(scope="module")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("built")
    source = directory / "source"
    (source / "directory").mkdir(parents=True)
    (source / "directory" / "file").write_bytes(b"x")
    for number in range(5000):
        os.symlink("target", source / f"a file {number:014}")
    build(source, directory / "snapshot")
    return (directory / "snapshot").read_bytes()


@pytest.fixture
def built(built_once: bytes, file: Path) -> Path:
    file.write_bytes(built_once)
    return file


def read_all(file: Path) -> list[object]:
    with Snapshot.open(file) as snapshot:
        inos = [Ino(slot) for slot in range(1, snapshot.entries + 1)]
        return [
            snapshot.info(),
            snapshot.curve().tobytes(),
            [records.tobytes() for _, records in snapshot.records()],
            [snapshot.name(ino) for ino in inos],
            [snapshot.children(ino) for ino in inos if snapshot.attributes(ino).is_dir],
            [snapshot.readlink(ino) for ino in inos if snapshot.attributes(ino).mode >> 12 == 10],
        ]


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"not a snapshot\n" * 1000, bytes(8192), b"\xff" * 100_000],
    ids=["empty", "a byte", "text", "zeros", "ones"],
)
def test_a_file_that_is_no_snapshot(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(SnapshotError, match="is not a snapshot of Monarch"):
        Snapshot.open(file)
    assert file.read_bytes() == content


def test_a_database_of_something_else(file: Path) -> None:
    with lmdb.open(str(file), subdir=False, lock=False) as environment:
        with environment.begin(write=True) as transaction:
            transaction.put(b"key", b"value")
    with pytest.raises(SnapshotError, match="truncated, or its end is damaged"):
        Snapshot.open(file)
    append_trailer(file, page_bytes=os.sysconf("SC_PAGE_SIZE"))
    with pytest.raises(SnapshotError, match="is damaged"):
        Snapshot.open(file)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, None], ids=["directory", "fifo", "none"])
def test_no_file_at_all(file: Path, make: Callable[[Path], None] | None) -> None:
    if make is not None:
        make(file)
    with pytest.raises(SnapshotError) as failure:
        Snapshot.open(file)
    assert str(file) in str(failure.value)


def test_a_file_that_was_cut_short(built: Path) -> None:
    content = built.read_bytes()
    for size in (4096, 8192, 20_000, len(content) // 2, len(content) - 4096, len(content) - 1):
        built.write_bytes(content[:size])
        with pytest.raises(SnapshotError, match="is truncated"):
            Snapshot.open(built)
    built.write_bytes(content + b"\0")
    with pytest.raises(SnapshotError, match="its end is damaged"):
        Snapshot.open(built)


def test_a_newer_format_is_reported_as_such(built: Path) -> None:
    with lmdb.open(str(built), subdir=False, lock=False) as environment:
        with environment.begin(write=True) as transaction:
            transaction.put(META, seal(META, b'{"version": 3, "more": 1}'))
    append_trailer(built, page_bytes=os.sysconf("SC_PAGE_SIZE"))
    with pytest.raises(SnapshotError, match=r"has format version 3, this Monarch reads 2") as found:
        Snapshot.open(built)
    assert "build it again" in found.value.hint


def test_no_flipped_bit_is_ever_served(built: Path) -> None:
    """Refused, or without effect: never another answer, and never the end of the program."""
    whole = built.read_bytes()
    expected = read_all(built)
    chance = random.Random(7)
    # The pages of LMDB's own tree are few; they are where a flipped bit would be fatal.
    pages = len(whole) // 4096
    tree = [0, 1] + [page for page in range(2, pages) if is_tree_page(whole, page)]
    assert len(tree) < 20
    refused = 0
    for turn in range(150):
        if turn % 2:
            at = chance.randrange(len(whole))
        else:
            at = chance.choice(tree) * 4096 + chance.randrange(4096)
        damaged = bytearray(whole)
        damaged[at] ^= 1 << chance.randrange(8)
        built.write_bytes(damaged)
        try:
            assert read_all(built) == expected
        except SnapshotError:
            refused += 1
    assert refused > 100


def is_tree_page(content: bytes, page: int) -> bool:
    number, _, flags = struct.unpack_from("<QHH", content, page * 4096)
    return number == page and flags in (1, 2)


def test_a_flipped_bit_names_the_file_and_what_to_do(built: Path) -> None:
    content = bytearray(built.read_bytes())
    at = content.index(b"a file 00000000004990")
    content[at] ^= 1
    built.write_bytes(content)
    with Snapshot.open(built) as snapshot:
        assert snapshot.name(2) == b"a file 00000000000000"
        with pytest.raises(SnapshotError) as failure:
            snapshot.names(ROOT_INO)
    assert str(failure.value).startswith(f"snapshot {built} is damaged; build it again")


def test_a_block_in_the_place_of_another_is_refused(built: Path) -> None:
    with lmdb.open(str(built), subdir=False, lock=False) as environment:
        with environment.begin(write=True) as transaction:
            other = transaction.get(b"i\0\0\0\1")
            transaction.put(b"i\0\0\0\0", other)
    append_trailer(built, page_bytes=os.sysconf("SC_PAGE_SIZE"))
    with Snapshot.open(built) as snapshot:
        with pytest.raises(SnapshotError, match="is damaged"):
            snapshot.attributes(ROOT_INO)


def test_inode_numbers_that_do_not_exist(built: Path) -> None:
    with Snapshot.open(built) as snapshot:
        for ino in (0, -1, 100_000):
            with pytest.raises(IndexError):
                snapshot.attributes(Ino(ino))


def test_lookups_that_find_nothing(built: Path) -> None:
    with Snapshot.open(built) as snapshot:
        file = snapshot.resolve(b"directory/file")
        assert file is not None
        assert snapshot.lookup(file, b"file") is None
        assert list(snapshot.list_from(file, 0)) == []
        assert snapshot.resolve(b"directory/file/x") is None
        assert snapshot.resolve(b"./directory//file") == file
        assert snapshot.lookup(ROOT_INO, b"") is None
        for name in (b"\0", b"\xff", b"a file", b"a file 00000000005000", b"b"):
            assert snapshot.lookup(ROOT_INO, name) is None
        with pytest.raises(ValueError, match="not a symbolic link"):
            snapshot.readlink(file)


def test_walk_gives_the_files_beneath(source: Path, taken: Taken) -> None:
    for path in ("a/1", "a/b/2", "a/b/c/3", "a/d/4", "e/5"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).touch()
    (source / "a" / "link").symlink_to("1")
    snapshot = taken(source)

    def beneath(path: bytes) -> list[bytes]:
        ino = snapshot.resolve(path)
        assert ino is not None
        return [snapshot.path(found) for found, _ in snapshot.walk(ino)]

    assert beneath(b"a") == [b"a/1", b"a/b/2", b"a/b/c/3", b"a/d/4"]
    assert beneath(b"") == [*beneath(b"a"), b"e/5"]
    assert beneath(b"e/5") == [b"e/5"]
    assert beneath(b"a/link") == []


def is_file(snapshot: Snapshot, ino: Ino) -> bool:
    return snapshot.attributes(ino).is_file


def test_a_level_has_all_entries_at_one_depth_beneath_a_directory(
    source: Path, taken: Taken
) -> None:
    """Directories stand between, before and after the files of their level."""
    for number in range(30):
        (source / "a" / f"{number:02}" / "deep").mkdir(parents=True)
        for name in ("file", "zz"):
            (source / "a" / f"{number:02}" / name).touch()
    (source / "a" / "05x").touch()
    (source / "a" / "99").touch()
    (source / "a" / "97").symlink_to("99")
    (source / "a" / "98").hardlink_to(source / "a" / "99")
    (source / "b" / "other").mkdir(parents=True)
    snapshot = taken(source)
    for directory in (b"", b"a", b"a/05", b"b", b"b/other", b"a/99"):
        ino = snapshot.resolve(directory)
        assert ino is not None
        inos = {ino}
        for depth in range(5):
            level = snapshot.level(ino, depth)
            assert set(level) == inos, (directory, depth)
            files = {snapshot.attributes(each).ino for each in inos if is_file(snapshot, each)}
            assert snapshot.count_files(level) == len(files & inos)
            inos = {Ino(child) for parent in inos for child in snapshot.children(parent)}


def test_a_snapshot_may_be_open_twice(built: Path) -> None:
    first = Snapshot.open(built)
    with Snapshot.open(built.parent / ".." / built.parent.name / built.name) as second:
        assert second.entries == first.entries
    assert first.lookup(ROOT_INO, b"directory") is not None
    first.close()
    built.rename(built.with_name("elsewhere"))
    with Snapshot.open(built.with_name("elsewhere")) as third:
        assert third.id == first.id


def test_threads_may_share_a_snapshot(built: Path) -> None:
    with Snapshot.open(built) as snapshot:
        found: list[list[bytes]] = []

        def read() -> None:
            found.append([snapshot.path(Ino(slot)) for slot in range(1, snapshot.entries + 1)])

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 4
    assert found[0] == found[1] == found[2] == found[3]


def test_nothing_is_kept_for_a_file(built: Path) -> None:
    with Snapshot.open(built) as snapshot:
        list(snapshot.list_from(ROOT_INO, 0))
        gc.collect()
        before = sys.getallocatedblocks()
        for _, attributes in snapshot.list_from(ROOT_INO, 0):
            snapshot.path(attributes.ino)
            snapshot.lookup(ROOT_INO, b"directory")
        gc.collect()
        assert sys.getallocatedblocks() - before < 200


def test_an_entry_takes_at_most_120_bytes_of_disk(source: Path, taken: Taken) -> None:
    for number in range(8192):
        os.symlink("x", source / f"image_{number:08}.jpeg")
    snapshot = taken(source)
    fixed = 65536 * 8 + 8 * 4096  # the curve, and pages that every snapshot has
    links = 8192 * 5
    assert (snapshot.file.stat().st_size - fixed - links) / snapshot.entries < 120


def test_the_newest_time_of_change_is_known_without_reading_the_records(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is what a mount asks for; an earlier Monarch has not recorded it."""
    with Snapshot.open(built) as snapshot:
        newest_ns = max(int(rows["ctime_ns"].max()) for _, rows in snapshot.records())
        info = snapshot.info()
    passes = []
    records = Snapshot.records
    monkeypatch.setattr(Snapshot, "records", lambda self: passes.append(1) or records(self))
    with Snapshot.open(built) as snapshot:
        assert snapshot.newest_ns() == newest_ns
    assert not passes
    fields = {"version": 2, **info.as_json()}
    del fields["newest_ns"]
    with lmdb.open(str(built), subdir=False, lock=False) as environment:
        with environment.begin(write=True) as transaction:
            transaction.put(META, seal(META, json.dumps(fields).encode()))
    append_trailer(built, page_bytes=os.sysconf("SC_PAGE_SIZE"))
    with Snapshot.open(built) as snapshot:
        assert snapshot.newest_ns() == newest_ns
    assert passes


def digest_of(source: Path, file: Path) -> tuple[str, list[int]]:
    """What nodes compare of a new snapshot, and the blocks of its files."""
    build(source, file)
    with Snapshot.open(file) as snapshot:
        inos = [Ino(slot) for slot in range(1, snapshot.entries + 1)]
        blocks = [snapshot.attributes(ino).blocks for ino in inos]
        return snapshot.content_digest(), blocks


@pytest.mark.promise(271)
def test_nodes_share_copies_although_the_source_allocates_blocks_between_their_snapshots(
    tmp_path: Path, file: Path
) -> None:
    if reason := disks.unavailable():
        pytest.skip(reason)
    with disks.Disk(tmp_path / "disk").mounted(tmp_path / "mounted") as disk:
        source = disk.path / "source"
        source.mkdir()
        for number in count():
            with (source / f"sparse{number}").open("wb") as sparse:
                # Its many extents need a block of their own once they are allocated.
                for piece in range(8):
                    sparse.seek(piece << 16)
                    sparse.write(bytes(4096))
            early = digest_of(source, file)
            os.sync()
            late = digest_of(source, file)
            if early[1] != late[1]:
                break
        assert early[0] == late[0]
        (source / "sparse0").chmod(0o600)
        assert digest_of(source, file)[0] != late[0]


def test_the_digest_of_records_has_all_but_the_room_of_files_and_directories() -> None:
    def digest(record: tuple[int, ...]) -> bytes:
        return _without_room(np.array([record], RECORD)).tobytes()

    for mode, flags, free in (
        (0o100644, 0, {"extra"}),
        (0o040755, 0, {"size"}),
        # The first name of a hard-linked file, the target of a link, the number of a device.
        (0o100644, ALIAS, set()),
        (0o120777, 0, set()),
        (0o020600, 0, set()),
    ):
        record = (1, mode, 0, 0, 1, flags, 70, 10**18, 10**18, 5, 8)
        for place, name in enumerate(RECORD.names or ()):
            other = (*record[:place], record[place] ^ 2, *record[place + 1 :])
            assert (digest(record) == digest(other)) is (name in free), (mode, name)
