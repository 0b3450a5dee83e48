"""Mounts and the snapshots they serve from: shared, refused, rebuilt, refreshed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Tree
from tests.equipment import slowfs
from tests.equipment.slowfs import SlowSource
from tests.mount.command import (
    assert_nothing_is_left,
    needs_fuse,
    not_mounted,
    one_line,
    registered,
)

# How reads are served has nothing to do with it, but where a test says so.
pytestmark = [needs_fuse, pytest.mark.modes("auto")]


def built(monarch: MonarchCommand, source: Path) -> Path:
    snapshot = monarch.directory / "shared.snapshot"
    monarch("snapshot", "build", str(source), "-o", str(snapshot))
    return snapshot


def test_two_mounts_serve_from_one_snapshot_at_the_same_time(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source = tree({"a": b"content", "b/c": 1})
    snapshot = built(monarch, source)
    before = snapshot.read_bytes()
    one = monarch.mount(source, snapshot=snapshot)
    (tmp_path / "second").mkdir()
    two = registered(
        monarch, tmp_path / "second", source, tmp_path / "state-2", {"t": tmp_path / "tier-2"}
    )
    where = ["--state", str(two.state), "--tier", f"{tmp_path}/tier-2:1MiB"]
    monarch("mount", str(source), str(two.path), "--snapshot", str(snapshot), *where)
    two.pid = int(two.status()["pid"])
    assert one.status()["snapshot"]["id"] == two.status()["snapshot"]["id"]
    assert one.status()["snapshot"]["file"] == two.status()["snapshot"]["file"] == str(snapshot)
    for made in (one, two):
        assert (made.path / "a").read_bytes() == b"content"
        assert os.listdir(made.path / "b") == ["c"]
        assert not (made.state / "snapshot.lmdb").exists()
    assert os.stat(one.path / "a").st_ino == os.stat(two.path / "a").st_ino
    one.umount()
    assert os.listdir(two.path / "b") == ["c"]
    two.umount()
    assert snapshot.read_bytes() == before


def test_a_given_snapshot_that_is_missing_is_built_there_and_a_line_says_so(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source, snapshot = tree({"a": b"content"}), tmp_path / "new.snapshot"
    made = registered(monarch, tmp_path / "mnt", source, tmp_path / "state")
    made.path.mkdir()
    where = ["mount", str(source), str(made.path), "--snapshot", str(snapshot)]
    where += ["--state", str(made.state), "--tier", f"{tmp_path}/tier:1MiB"]
    line = f"monarch: snapshot {snapshot} does not exist: it is built now"
    for there in (False, True):
        assert snapshot.exists() is there
        assert (line in monarch(*where).stderr) is not there
        monarch("umount", str(made.path))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("other", "describes another source"),
        ("truncated", "snapshot"),
        ("garbage", "snapshot"),
    ],
)
def test_a_given_snapshot_that_cannot_be_used_is_refused_and_kept(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path, damage: str, words: str
) -> None:
    source = tree({"a": 1})
    if damage == "other":
        (tmp_path / "elsewhere").mkdir()
        snapshot = built(monarch, tmp_path / "elsewhere")
    else:
        snapshot = built(monarch, source)
        whole = snapshot.read_bytes()
        damaged = {"truncated": whole[: len(whole) // 2], "garbage": b"\x5a" * 9000}
        snapshot.write_bytes(damaged[damage])
    before = snapshot.read_bytes()
    mnt, state = tmp_path / "mnt", tmp_path / "state"
    mnt.mkdir()
    where = ["--state", str(state), "--tier", f"{tmp_path}/tier:1MiB", "--snapshot", str(snapshot)]
    done = not_mounted(monarch, mnt, "mount", str(source), str(mnt), *where)
    line = one_line(done)
    assert (done.returncode, words in line, str(snapshot) in line) == (5, True, True), line
    assert "the daemon died" not in line
    assert_nothing_is_left(monarch)
    assert snapshot.read_bytes() == before


def test_a_damaged_snapshot_of_the_state_directory_is_built_anew_and_that_is_logged(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"a": b"content"})
    monarch.mount(source).umount()
    snapshot = monarch.directory / "state/snapshot.lmdb"
    snapshot.write_bytes(snapshot.read_bytes()[:5000])
    monarch.expects_log("building the snapshot anew: ")
    again = monarch.mount(source)
    assert (again.path / "a").read_bytes() == b"content"


def test_new_files_are_seen_after_a_mount_with_refresh(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree({"kept/a": b"old", "gone": 1})
    made = monarch.mount(source, options=["snapshot.freshness=never"])
    (made.path / "kept/a").read_bytes()
    made.umount()
    (source / "kept/new").write_bytes(b"new")
    (source / "gone").unlink()
    without = monarch.mount(source, options=["snapshot.freshness=never"])
    assert sorted(os.listdir(without.path)) == ["gone", "kept"]
    assert os.listdir(without.path / "kept") == ["a"]
    without.umount()
    fresh = monarch.mount(source, arguments=["--refresh"])
    assert os.listdir(fresh.path) == ["kept"]
    assert (fresh.path / "kept/new").read_bytes() == b"new"
    # What an earlier snapshot's mount promoted is still warm.
    assert fresh.xattr("kept/a") == "fast"


@pytest.mark.skipif(slowfs.unavailable() is not None, reason=slowfs.unavailable() or "")
def test_a_mount_with_a_snapshot_asks_the_source_for_nothing_but_its_root(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    tree({f"{number}/{name}": 10 for number in range(100) for name in "ab"})
    never = ["snapshot.freshness=never"]
    with SlowSource(tmp_path / "source", tmp_path / "slow", attribute_s=0) as slow:
        monarch.mount(slow.path, options=never).umount()
        before = slow.counters()
        made = monarch.mount(slow.path, options=never)
        assert len(os.listdir(made.path)) == 100
        assert os.stat(made.path / "50/a").st_size == 10
        after = slow.counters()
        # The root's first names: by them it is known again after its client was started anew.
        assert after["readdir"] == before["readdir"] + 1
        assert after["open"] - before["open"] <= 1  # the root's own counters
        # The root, by each of the checks of the command and of the daemon; not the entries.
        assert after["getattr"] - before["getattr"] < 30
        made.umount()
