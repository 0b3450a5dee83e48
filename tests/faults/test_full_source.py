"""Real mounts of a source that is full for all users."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import (
    OPENS_ARE_REPORTED,
    MonarchCommand,
    Mounted,
    Tree,
    contents,
    let_others_in,
)
from tests.equipment import disks
from tests.equipment.disks import Disk
from tests.faults.test_other_users import ALICE, MALLORY, acts
from tests.mount.command import needs_fuse, needs_root, start
from tests.mount.observe import wait_until

pytestmark = [needs_fuse, needs_root, pytest.mark.modes(*OPENS_ARE_REPORTED)]

_MB = 1 << 20
# Needs the room of two old files, also where the disk has some left.
_NEW = 19 * _MB // 2
_TIERS = {"fast": "64MiB"}
_OPTIONS = ["write=absorb", "allow_other", "writeback.end_timeout=1s"]
# Writes a file, says so, and syncs it.
_SYNCING = """
import os, sys
with open(sys.argv[1], "wb") as file:
    file.write(b"s" * int(sys.argv[2]))
    print("written", file=sys.stderr, flush=True)
    os.fsync(file.fileno())
"""
# Becomes a user, and fills the file "alice" in one of three ways.
_WRITING = """
import mmap, os, sys
user, how, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
os.setgroups([])
os.setgid(user)
os.setuid(user)
with open("alice", "w+b", buffering=0) as file:
    if how == "write":
        for _ in range(size >> 16):
            file.write(bytes(1 << 16))
    elif how == "allocate":
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        os.ftruncate(file.fileno(), size)
        with mmap.mmap(file.fileno(), size) as stored:
            stored[:] = b"s" * size
            stored.flush()
"""


@pytest.fixture
def source_disk(monarch: MonarchCommand, source: Path) -> Iterator[Path]:
    """A source of 24 MiB with four old files of 5 MiB, two of them in a directory. All users may
    write there."""
    if reason := disks.unavailable():
        pytest.skip(reason)
    with Disk(monarch.directory / "disk of the source", size=24 * _MB).mounted(source):
        for name in ("a", "b", "d/a", "d/b"):
            (source / name).parent.mkdir(exist_ok=True)
            (source / name).write_bytes(contents(name, 5 * _MB))
        for path in (source, source / "d"):
            path.chmod(0o777)
        let_others_in(monarch.directory)
        yield source
        monarch.close()


@pytest.fixture
def small_tier(monarch: MonarchCommand) -> Iterator[Path]:
    """The directory of the tier "fast", a disk of 16 MiB. Name it before what mounts."""
    if reason := disks.unavailable():
        pytest.skip(reason)
    path = monarch.directory / "tiers" / "fast"
    with Disk(monarch.directory / "disk of the tier", size=16 * _MB).mounted(path):
        yield path
        monarch.close()


@pytest.fixture
def small(source_disk: Path, monarch: MonarchCommand) -> Path:
    """The same. Its mounts say that it is full, and nothing is set aside."""
    monarch.expects_log("the source is full: only removals are drained")
    monarch.allows_log("written data is not at the source yet")
    return source_disk


def until_full(mounted: Mounted) -> None:
    def is_named() -> bool:
        problems = mounted.status()["health"]["problems"]
        return any("the source is full" in problem["what"] for problem in problems)

    wait_until(is_named, "health does not say that the source is full")


def drain(mounted: Mounted) -> None:
    mounted.cli("ckpt", "wait", str(mounted.path), "--timeout", "100s")
    assert mounted.status()["health"]["problems"] == []
    assert "set aside" not in mounted.log_text and "refuses" not in mounted.log_text


def keep_all_but(disk: Path, left: int) -> int:
    """Keeps all free room of a disk for root but ``left`` bytes; returns the number of blocks."""
    now = os.statvfs(disk)
    # ext4 keeps less than half of a disk.
    most = now.f_blocks // 2 - 1
    others = now.f_bfree - left // now.f_bsize - most
    if others > 0:
        (disk / "file of others").write_bytes(bytes(others * now.f_bsize))
        os.sync()
    kept = os.statvfs(disk).f_bfree - left // now.f_bsize
    keep_for_root(disk, kept)
    return kept


def mounted_for_all(monarch: MonarchCommand, tree: Tree) -> Mounted:
    source = tree({"a": 10})
    source.chmod(0o777)
    let_others_in(monarch.directory)
    return monarch.mount(source, tiers={"fast": "12MiB"}, options=_OPTIONS)


def alice_writes(mounted: Mounted, how: str, size: int) -> str:
    """Runs ``_WRITING``; returns its errors."""
    return subprocess.run(
        [sys.executable, "-c", _WRITING, str(ALICE), how, str(size)],
        cwd=mounted.path,
        stderr=subprocess.PIPE,
        text=True,
    ).stderr


def keep_for_root(disk: Path, blocks: int) -> None:
    found = subprocess.run(
        ["findmnt", "--noheadings", "--output", "SOURCE", "--mountpoint", disk],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    tune = ["tune2fs", "-r", str(blocks), found.stdout.strip()]
    subprocess.run(tune, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.fault("S19")
@pytest.mark.promise(65, 81)
def test_files_removed_on_the_mount_make_room_at_a_full_source(
    small: Path, monarch: MonarchCommand
) -> None:
    mounted = monarch.mount(small, tiers=_TIERS, options=_OPTIONS)
    (mounted.path / "new.tmp").write_bytes(contents("new", _NEW))
    until_full(mounted)
    (mounted.path / "new.tmp").rename(mounted.path / "new")
    (mounted.path / "later").mkdir()
    waiting = start(monarch, "ckpt", "wait", str(mounted.path), "--timeout", "100s")
    (mounted.path / "a").unlink()
    wait_until(lambda: not (small / "a").exists(), "the first removal is not at the source")
    # It is not enough.
    assert not (small / "later").exists()
    acts(0, mounted.path, "chmod -R u+w d && rm -r d")
    _, output = waiting.communicate(timeout=100)
    assert waiting.returncode == 0, output
    drain(mounted)
    mounted.umount()
    assert {*os.listdir(small)} >= {"b", "new", "later"}
    assert not {"a", "d", "new.tmp"} & {*os.listdir(small)}
    assert (small / "new").read_bytes() == contents("new", _NEW)


@pytest.mark.promise(81)
def test_a_user_gets_no_room_that_the_source_keeps_for_root(
    small: Path, monarch: MonarchCommand
) -> None:
    """As with a quota, which root may exceed, too."""
    keep_for_root(small, os.statvfs(small).f_bfree)
    mounted = monarch.mount(small, tiers=_TIERS, options=_OPTIONS)
    acts(ALICE, mounted.path, "head -c 100000 /dev/zero > alice")
    until_full(mounted)
    assert not (small / "alice").exists()
    keep_for_root(small, 0)
    drain(mounted)
    mounted.umount()
    assert (small / "alice").read_bytes() == bytes(100_000)


@pytest.mark.promise(351)
@pytest.mark.modes("relay")
def test_a_user_who_writes_another_user_s_file_gets_no_room_that_is_kept_for_root(
    small: Path, monarch: MonarchCommand
) -> None:
    """The staged file belongs to the daemon until it has all bytes."""
    shared = small / "shared"
    shared.write_bytes(b"old")
    os.chown(shared, MALLORY, MALLORY)
    shared.chmod(0o666)
    keep_all_but(small, 0)
    mounted = monarch.mount(small, tiers=_TIERS, options=_OPTIONS)
    acts(ALICE, mounted.path, "head -c 100000 /dev/zero > shared")
    until_full(mounted)
    assert shared.read_bytes() == b"old"
    keep_for_root(small, 0)
    drain(mounted)
    mounted.umount()
    assert shared.read_bytes() == bytes(100_000)
    assert shared.stat().st_uid == MALLORY


@pytest.mark.promise(351)
@pytest.mark.modes("relay")
def test_root_gets_the_room_that_is_kept_for_root(
    source_disk: Path, monarch: MonarchCommand
) -> None:
    os.chown(source_disk / "a", ALICE, ALICE)
    keep_all_but(source_disk, 0)
    mounted = monarch.mount(source_disk, tiers=_TIERS, options=_OPTIONS)
    (mounted.path / "root").write_bytes(bytes(100_000))
    with (mounted.path / "a").open("ab") as file:
        file.write(bytes(100_000))
    drain(mounted)
    mounted.umount()
    assert (source_disk / "root").read_bytes() == bytes(100_000)
    assert (source_disk / "a").read_bytes() == contents("a", 5 * _MB) + bytes(100_000)
    assert (source_disk / "a").stat().st_uid == ALICE


@pytest.mark.promise(351)
@pytest.mark.parametrize("how", ["write", "store", "allocate"])
def test_a_user_gets_no_room_that_the_tier_keeps_for_root(
    small_tier: Path, monarch: MonarchCommand, tree: Tree, how: str
) -> None:
    """What does not fit goes to the source, as with a full tier."""
    monarch.allows_log("goes to the source directly: the tier is full")
    kept = keep_all_but(small_tier, 4 * _MB)
    mounted = mounted_for_all(monarch, tree)
    said = alice_writes(mounted, how, 8 * _MB)
    assert os.statvfs(small_tier).f_bfree >= kept
    if how != "allocate":
        assert said == "" and (mounted.path / "alice").stat().st_size == 8 * _MB
    drain(mounted)
    mounted.umount()


@pytest.mark.promise(351)
@pytest.mark.modes("relay")
def test_a_user_who_writes_to_a_file_that_root_has_opened_gets_no_room_that_is_kept_for_root(
    small_tier: Path, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("goes to the source directly: the tier is full")
    kept = keep_all_but(small_tier, 4 * _MB)
    mounted = mounted_for_all(monarch, tree)
    with (mounted.path / "log").open("wb") as file:
        command = ["head", "-c", str(8 * _MB), "/dev/zero"]
        subprocess.run(command, stdout=file, user=ALICE, check=True)
        assert os.statvfs(small_tier).f_bfree >= kept
    drain(mounted)
    mounted.umount()


@pytest.mark.promise(351)
@pytest.mark.modes("relay", "python")
def test_root_gets_the_room_that_the_tier_keeps_for_root(
    small_tier: Path, monarch: MonarchCommand, tree: Tree
) -> None:
    keep_all_but(small_tier, 2 * _MB)
    mounted = mounted_for_all(monarch, tree)
    (mounted.path / "root").write_bytes(contents("root", 6 * _MB))
    assert "goes to the source directly" not in mounted.log_text
    drain(mounted)
    mounted.umount()


@pytest.mark.promise(71, 351)
@pytest.mark.modes("relay", "python")
def test_a_user_whose_bytes_go_to_the_source_directly_gets_no_room_that_is_kept_for_root(
    source_disk: Path, small_tier: Path, monarch: MonarchCommand
) -> None:
    monarch.allows_log("the tier is full|the source is full|No space left on device")
    (source_disk / "old").write_bytes(contents("old", 300_000))
    (source_disk / "old").chmod(0o666)
    mounted = monarch.mount(source_disk, tiers={"fast": "12MiB"}, options=_OPTIONS)
    filler = disks.fill(small_tier)
    kept = keep_all_but(source_disk, 0)
    # A new file, and the copy of a file that is to be changed.
    assert "No space left on device" in alice_writes(mounted, "write", _MB)
    assert "No space left on device" in acts(ALICE, mounted.path, "echo more >> old")
    # A directory entry at most.
    assert os.statvfs(source_disk).f_bfree >= kept - 1
    acts(ALICE, mounted.path, "rm -f alice")
    with (mounted.path / "old").open("ab") as file:
        file.write(b"more")
    filler.unlink()
    mounted.cli("ckpt", "wait", str(mounted.path), "--timeout", "100s")
    mounted.umount()
    assert (source_disk / "old").read_bytes() == contents("old", 300_000) + b"more"


@pytest.mark.fault("S19")
@pytest.mark.promise(65, 67, 81)
@pytest.mark.modes("relay")
def test_one_user_makes_the_room_that_another_user_needs_over_a_killed_daemon(
    small: Path, monarch: MonarchCommand
) -> None:
    mounted = monarch.mount(small, tiers=_TIERS, options=_OPTIONS)
    acts(ALICE, mounted.path, f"head -c {_NEW} /dev/zero > alice; echo 1 > pointer")
    until_full(mounted)
    # What Mallory writes waits as well; what Mallory removes does not.
    acts(MALLORY, mounted.path, "echo 2 > mallory; rm -f a")
    wait_until(lambda: not (small / "a").exists(), "the removal is not at the source")
    assert not {"alice", "pointer", "mallory"} & {*os.listdir(small)}
    mounted.kill()
    mounted = monarch.mount(small, tiers=_TIERS, options=_OPTIONS)
    until_full(mounted)
    acts(MALLORY, mounted.path, "rm -f b")
    drain(mounted)
    mounted.umount()
    assert (small / "alice").stat().st_size == _NEW
    assert (small / "alice").stat().st_uid == ALICE
    assert (small / "mallory").stat().st_uid == MALLORY
    assert (small / "pointer").read_text() == "1\n"


@pytest.mark.fault("S19")
@pytest.mark.promise(63, 81, 153)
@pytest.mark.modes("relay")
def test_an_fsync_that_waits_for_a_full_source_returns_when_a_removal_has_made_room(
    small: Path, monarch: MonarchCommand
) -> None:
    options = [*_OPTIONS, "writeback.fsync=source"]
    mounted = monarch.mount(small, tiers=_TIERS, options=options)
    syncing = [
        subprocess.Popen(
            [sys.executable, "-c", _SYNCING, mounted.path / str(size), str(size)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for size in (7 * _MB, 2 * _MB)
    ]
    for process in syncing:
        assert process.stderr is not None and process.stderr.readline() == "written\n"
    until_full(mounted)
    assert syncing[0].poll() is None
    for name in ("a", "b"):
        (mounted.path / name).unlink()
    for process in syncing:
        process.communicate(timeout=100)
        assert process.returncode == 0
    for size in (7 * _MB, 2 * _MB):
        assert (small / str(size)).read_bytes() == b"s" * size
    drain(mounted)
    mounted.umount()
