"""A given snapshot is served from a copy that is the mount's own."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import pytest

from monarch import snapshots
from monarch.errors import SnapshotError, TierError
from monarch.namespace import given as given_module
from monarch.namespace.build import build
from monarch.namespace.given import own_copy
from monarch.namespace.snapshot import Snapshot
from monarch.namespace.trailer import append_trailer, read_value
from monarch.settings import MountSettings
from monarch.snapshots import snapshot_for
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
        monkeypatch.setattr(snapshots, "memory_bytes", lambda _root: 0)
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
    told = str(caught.value)
    assert str(given) in told and str(state) in told
    assert "KiB there: No space left on device" in told, told
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
