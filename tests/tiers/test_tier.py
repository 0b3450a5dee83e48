"""One tier on a real file system: staging, committing, removing, and access."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from monarch.errors import LockedError, TierError
from monarch.posix import failpoints
from monarch.tiers.contents import BrokenSeal, copy_name, seal
from monarch.tiers.ownership import Owner
from monarch.tiers.tier import Tier
from monarch.types import Identity, Ino
from tests.equipment.mounts import kind_of_file_system

MIB = 1 << 20
# FS_IOC_GETFLAGS, FS_IOC_SETFLAGS and FS_NOATIME_FL of linux/fs.h
GET_FLAGS, SET_FLAGS, NO_ACCESS_TIME = 0x80086601, 0x40086602, 0x80


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    opened = Tier(1, "fast", tmp_path / "tier", owner=Owner("mount", "/mnt/data"))
    opened.use("g")
    yield opened
    opened.close()


def at_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """No generation gets another directory."""
    make = os.mkdir

    def made(name: str, *arguments: Any, **more: Any) -> None:
        if str(name).startswith("copies-"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        make(name, *arguments, **more)

    monkeypatch.setattr(os, "mkdir", made)


def version(size: int, number: int = 0) -> Identity:
    return Identity(size, 1_700_000_000_123_456_789 + number, 1_700_000_001_000_000_000, 4242)


def put(tier: Tier, ino: int, content: bytes) -> bytes:
    with tier.stage(Ino(ino)) as staged:
        staged.append(content)
        return staged.commit(version(len(content)))


def path_of(tier: Tier, ino: int) -> Path:
    (path,) = tier.own.glob(f"copies-*/*/{ino}")
    return path


def read(fd: int) -> bytes:
    try:
        return os.pread(fd, 1 << 24, 0)
    finally:
        os.close(fd)


def stages(tier: Tier) -> list[str]:
    return os.listdir(tier.own / "stage")


def test_a_copy_is_invisible_before_it_is_committed(tier: Tier) -> None:
    with tier.stage(Ino(7)) as staged:
        staged.append(b"half")
        with pytest.raises(FileNotFoundError):
            tier.open(Ino(7), version(4))
        staged.append(b" and whole")
        assert staged.size == 14
        digest = staged.commit(version(14))
    assert digest == xxhash.xxh3_128_digest(b"half and whole")
    assert read(tier.open(Ino(7), version(14))) == b"half and whole"
    assert stages(tier) == []


def test_a_stage_that_is_not_committed_is_gone(tier: Tier) -> None:
    with tier.stage(Ino(7)) as staged:
        staged.append(bytes(1000))
        assert stages(tier) == ["7.part"]
    assert stages(tier) == []


def test_a_copy_of_another_size_is_not_opened(tier: Tier) -> None:
    put(tier, 7, b"seven")
    with pytest.raises(OSError) as refused:
        tier.open(Ino(7), version(6))
    assert refused.value.errno == errno.ESTALE


def test_holes_stay_holes_and_count_as_bytes(tier: Tier) -> None:
    content = b"x" * MIB + bytes(8 * MIB) + b"end"
    with tier.stage(Ino(3)) as staged:
        for start in range(0, len(content), MIB):
            staged.append(content[start : start + MIB])
        digest = staged.commit(version(len(content)))
    assert digest == xxhash.xxh3_128_digest(content)
    assert read(tier.open(Ino(3), version(len(content)))) == content
    copy = next(tier.own.glob("copies-*/*/3"))
    assert copy.stat().st_blocks * 512 < 2 * MIB


def test_a_copy_that_ends_in_a_hole_has_its_full_size(tier: Tier) -> None:
    with tier.stage(Ino(3)) as staged:
        staged.append(bytes(MIB))
        staged.commit(version(MIB))
    assert read(tier.open(Ino(3), version(MIB))) == bytes(MIB)


def test_a_process_with_a_copy_open_continues_to_read_when_it_is_removed_or_replaced(
    tier: Tier,
) -> None:
    put(tier, 7, b"old")
    fd = tier.open(Ino(7), version(3))
    tier.remove(Ino(7))
    tier.remove(Ino(7))
    put(tier, 7, b"new")
    assert read(fd) == b"old"
    assert read(tier.open(Ino(7), version(3))) == b"new"


@pytest.mark.fault("Security")
def test_files_of_a_tier_are_closed_to_other_users(tier: Tier) -> None:
    put(tier, 7, b"secret")
    own = tier.own
    assert own.stat().st_mode & 0o777 == 0o700
    (copy,) = own.glob("copies-*/*/7")
    assert copy.stat().st_mode & 0o077 == 0


def test_a_shared_directory_keeps_its_mode_and_a_new_one_is_closed(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "somebody-else's").write_text("file")
    shared.chmod(0o755)
    Tier(1, "fast", shared, owner=Owner("mount")).close()
    assert shared.stat().st_mode & 0o777 == 0o755
    Tier(1, "fast", tmp_path / "new", owner=Owner("mount")).close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


@pytest.mark.fault("Security")
def test_a_symlink_planted_in_a_shared_directory_leads_nowhere(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "monarch").symlink_to(elsewhere)
    with pytest.raises(TierError):
        Tier(1, "fast", shared, owner=Owner("mount"))
    assert list(elsewhere.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's directory")
@pytest.mark.fault("Security")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tier" / "monarch").mkdir(parents=True)
    os.chown(tmp_path / "tier" / "monarch", 12345, 12345)
    with pytest.raises(TierError, match="12345"):
        Tier(1, "fast", tmp_path / "tier", owner=Owner("mount"))


def test_a_file_in_the_place_of_a_tier_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="file"):
        Tier(1, "fast", tmp_path / "file", owner=Owner("mount"))


def test_a_second_daemon_is_kept_out_until_the_first_has_ended(tmp_path: Path) -> None:
    first = Tier(1, "fast", tmp_path / "tier", owner=Owner("mount", "/mnt/data"))
    with pytest.raises(LockedError, match=rf"pid {os.getpid()} \(/mnt/data\)"):
        Tier(1, "fast", tmp_path / "tier", owner=Owner("mount", "/mnt/other"))
    first.close()
    Tier(1, "fast", tmp_path / "tier", owner=Owner("mount", "/mnt/other")).close()


def test_a_tier_keeps_its_name_when_it_moves(tmp_path: Path) -> None:
    first = Tier(1, "fast", tmp_path / "tier", owner=Owner("mount"))
    first.close()
    (tmp_path / "tier").rename(tmp_path / "moved")
    moved = Tier(2, "other", tmp_path / "moved", owner=Owner("mount"))
    new = Tier(1, "fast", tmp_path / "tier", owner=Owner("mount"))
    assert moved.id == first.id != new.id
    moved.close()
    new.close()


def test_a_copy_of_another_generation_is_adopted_under_its_new_number(tier: Tier) -> None:
    put(tier, 7, b"seven")
    tier.use("next")
    with pytest.raises(FileNotFoundError):
        tier.open(Ino(7), version(5))
    assert tier.adopt("g", Ino(7), Ino(1000), version(5))
    assert not tier.adopt("g", Ino(7), Ino(1001), version(5))
    assert not tier.adopt("never", Ino(7), Ino(1001), version(5))
    assert read(tier.open(Ino(1000), version(5))) == b"seven"


def test_a_copy_that_was_adopted_before_a_crash_is_there(tier: Tier) -> None:
    put(tier, 7, b"seven")
    tier.use("next")
    assert tier.adopt("g", Ino(7), Ino(1000), version(5))
    assert tier.adopt("g", Ino(7), Ino(1000), version(5))


@pytest.mark.promise(138)
def test_a_full_quota_lends_an_earlier_generation_its_directory(
    tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its copies: their numbers mean other files there."""
    put(tier, 7, b"seven")
    (tier.own / "copies-file").touch()
    at_quota(monkeypatch)
    tier.use("next")
    assert tier.generation_name == "copies-next" and not tier.has(Ino(7))
    assert not (tier.own / "copies-g").exists() and (tier.own / "copies-file").exists()
    assert not tier.adopt("g", Ino(7), Ino(7), version(5))
    # There is nothing to be renamed for the first generation.
    empty = Tier(2, "empty", tmp_path / "empty", owner=Owner("mount"))
    with pytest.raises(OSError) as raised:
        empty.use("first")
    assert raised.value.errno == errno.EDQUOT
    empty.close()


def test_a_broken_seal_is_not_mended_by_adoption(tier: Tier) -> None:
    put(tier, 7, b"seven")
    path_of(tier, 7).write_bytes(b"SEVEN")
    tier.use("next")
    assert tier.adopt("g", Ino(7), Ino(1000), version(5))
    with pytest.raises(BrokenSeal):
        tier.open(Ino(1000), version(5))


@pytest.mark.parametrize(
    ("ino", "identity", "expected"),
    [
        (1, Identity(0, 0, 0, 0), (950035831, 951239510)),
        (
            7,
            Identity(100, 1_600_000_000_123_456_789, 1_600_000_001_000_000_000, 4242),
            (15053891, 349941886),
        ),
        (1 << 32, Identity(1 << 40, -5, -1, (1 << 64) - 1), (601042413, 870287274)),
    ],
)
def test_the_seal_is_the_one_that_the_datapath_computes(
    ino: int, identity: Identity, expected: tuple[int, int]
) -> None:
    assert divmod(seal(Ino(ino), identity), 10**9) == expected


def test_a_seal_tells_copies_numbers_and_versions_apart() -> None:
    # Another size is seen without a seal.
    versions = [Identity(9, 9, 9, 9), Identity(9, 8, 9, 9), Identity(9, 9, 8, 9)]
    versions += [Identity(9, 9, 9, 8), Identity(9, -9, 9, 9)]
    seals = {seal(Ino(ino), identity) for ino in range(1, 1000) for identity in versions}
    assert len(seals) == 999 * len(versions)
    assert all(0 <= value < 1 << 60 for value in seals)


def test_writing_swapping_or_restoring_a_copy_breaks_its_seal(
    tier: Tier,
) -> None:
    for number in (7, 8, 9):
        put(tier, number, b"seven")
    path_of(tier, 7).write_bytes(b"SEVEN")
    path_of(tier, 8).rename(tier.path / "aside")
    path_of(tier, 9).rename(path_of(tier, 7).parent.parent / copy_name(Ino(8)))
    for number in (7, 8):
        with pytest.raises(BrokenSeal):
            tier.open(Ino(number), version(5))
    # The version before has the same size and place.
    put(tier, 7, b"seven")
    with pytest.raises(BrokenSeal):
        tier.open(Ino(7), version(5, number=1))


def test_a_copy_whose_bytes_are_right_is_sealed_again_and_another_is_not(tier: Tier) -> None:
    digest = put(tier, 7, b"seven")
    os.utime(path_of(tier, 7))
    with pytest.raises(BrokenSeal):
        tier.open(Ino(7), version(5))
    tier.verify(Ino(7), version(5), digest)
    assert read(tier.open(Ino(7), version(5))) == b"seven"
    path_of(tier, 7).write_bytes(b"SEVEN")
    with pytest.raises(OSError) as refused:
        tier.verify(Ino(7), version(5), digest)
    assert refused.value.errno == errno.ESTALE
    with pytest.raises(BrokenSeal):
        tier.open(Ino(7), version(5))


def test_a_copy_that_is_renewed_while_it_is_compared_is_good(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, now = put(tier, 7, b"seven"), version(5, 1)

    def at_once(name: str) -> None:
        if name == "verify-compared":
            change()

    monkeypatch.setattr(failpoints, "failpoint", at_once)
    change = partial(tier.renew_seal, Ino(7), version(5), now)
    tier.verify(Ino(7), now, digest)
    assert read(tier.open(Ino(7), now)) == b"seven"
    # Others can set the same time once more.
    change = partial(os.utime, path_of(tier, 7), ns=(0, path_of(tier, 7).stat().st_mtime_ns))
    with pytest.raises(OSError) as refused:
        tier.verify(Ino(7), now, digest)
    assert refused.value.errno == errno.ESTALE


def test_an_entry_that_is_not_a_file_is_not_opened_and_blocks_no_thread(tier: Tier) -> None:
    put(tier, 7, b"")
    place = path_of(tier, 7)
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(OSError):
        tier.open(Ino(7), version(0))
    place.unlink()
    place.mkdir()
    with pytest.raises(OSError):
        tier.open(Ino(7), version(0))


def test_a_tier_of_a_newer_monarch_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    Tier(1, "fast", tmp_path / "tier", owner=Owner("mount")).close()
    name = tmp_path / "tier/monarch/mount/tier.json"
    record = json.dumps({**json.loads(name.read_text()), "version": 2, "more": 1})
    name.write_text(record)
    for _ in range(2):
        with pytest.raises(TierError, match="is of version 2, this Monarch knows 1"):
            Tier(1, "fast", tmp_path / "tier", owner=Owner("mount"))
    assert name.read_text() == record


def test_a_tier_that_has_lost_its_name_gets_a_new_one(tmp_path: Path) -> None:
    first = Tier(1, "fast", tmp_path / "tier", owner=Owner("mount"))
    first.close()
    for damaged in ("", "{", "[]", '{"id"'):
        (tmp_path / "tier/monarch/mount/tier.json").write_text(damaged)
        again = Tier(1, "fast", tmp_path / "tier", owner=Owner("mount"))
        assert again.id != first.id
        again.close()
    same = Tier(1, "fast", tmp_path / "tier", owner=Owner("mount"))
    assert same.id == again.id
    same.close()


def test_copies_of_other_generations_are_removed_and_counted(tier: Tier) -> None:
    for number in (7, 8, 263):
        put(tier, number, b"old")
    tier.use("next")
    put(tier, 7, b"new")
    assert tier.remove_other_generations() == 3
    assert tier.remove_other_generations() == 0
    assert sorted(name for names in tier.copies() for name in names) == [copy_name(Ino(7))]


def test_only_what_was_there_before_is_removed_as_a_stranger(tier: Tier) -> None:
    put(tier, 7, b"seven")
    before = tier.own.stat().st_ctime_ns - 10**9
    assert not tier.remove_stranger(copy_name(Ino(7)), before_ns=before)
    assert tier.remove_stranger(copy_name(Ino(7)), before_ns=time.time_ns() + 10**9)
    assert not tier.remove_stranger(copy_name(Ino(7)), before_ns=time.time_ns() + 10**9)


def test_a_tier_that_cannot_be_written_says_so_when_probed(tier: Tier) -> None:
    tier.probe()
    assert stages(tier) == []
    (tier.own / "stage").rmdir()
    with pytest.raises(OSError):
        tier.probe()


def test_syncing_waits_for_the_disk_and_the_space_is_what_the_disk_says(tier: Tier) -> None:
    put(tier, 7, b"seven")
    tier.sync()
    assert 0 < tier.space().available <= tier.space().total


def test_a_tier_knows_whether_its_reads_can_wait_for_a_disk(tier: Tier) -> None:
    directory = Path(tempfile.mkdtemp(prefix="monarch-test-", dir="/dev/shm"))
    try:
        memory = Tier(1, "memory", directory, owner=Owner("mount", "/mnt/data"))
        assert memory.in_memory
        memory.close()
    finally:
        shutil.rmtree(directory)
    assert tier.in_memory == (kind_of_file_system(tier.path) == "tmpfs")


def test_a_tier_keeps_a_committed_copy_until_it_is_removed(tier: Tier) -> None:
    assert not tier.has(Ino(7))
    put(tier, 7, b"content")
    assert tier.has(Ino(7))
    (tier.own / "copies-g" / copy_name(Ino(7))).unlink()
    assert not tier.has(Ino(7))


@pytest.mark.finding("B3")
@pytest.mark.fault("T11", "T8")
def test_files_of_an_earlier_version_are_moved_to_the_mount_that_knows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "tier/monarch"
    (shared / "copies-g/07").mkdir(parents=True)
    (shared / "copies-g/07/7").write_bytes(b"copy")
    (shared / "absorbed-0123456789abcdef").mkdir()
    (shared / "stage").mkdir()
    (shared / "lock").touch()
    (shared / "tier.json").write_text(json.dumps({"version": 1, "id": "earlier"}))
    Tier(1, "fast", tmp_path / "tier", owner=Owner("other")).close()
    assert "holds copies of another mount" in caplog.text
    assert (shared / "copies-g/07/7").exists()
    owner = Owner("mine", known=frozenset({"earlier"}))
    # Killed in the middle of it, the next mount continues.
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda old, new, **fds: rename(old, new, **fds) or die())
    with pytest.raises(KeyboardInterrupt):
        Tier(1, "fast", tmp_path / "tier", owner=owner)
    monkeypatch.undo()
    tier = Tier(1, "fast", tmp_path / "tier", owner=owner)
    assert (tier.id, tier.own) == ("earlier", shared / "mine")
    assert (tier.own / "copies-g/07/7").read_bytes() == b"copy"
    assert sorted(path.name for path in shared.iterdir()) == [
        "absorbed-0123456789abcdef",
        "mine",
        "other",
    ]
    tier.close()


def die() -> None:
    raise KeyboardInterrupt


def test_a_read_of_a_copy_writes_no_access_time(tier: Tier) -> None:
    def flags_of(path: Path, add: int = 0) -> int:
        fd = os.open(path, os.O_RDONLY)
        try:
            flags = int.from_bytes(fcntl.ioctl(fd, GET_FLAGS, bytes(8))[:4], sys.byteorder)
            if add:
                fcntl.ioctl(fd, SET_FLAGS, (flags | add).to_bytes(4, sys.byteorder) + bytes(4))
            return flags
        finally:
            os.close(fd)

    probe = tier.path / "probe"
    probe.mkdir()
    try:
        flags_of(probe, add=NO_ACCESS_TIME)
    except OSError as error:
        pytest.skip(f"the file system of the tier has no such flag: {error}")
    (probe / "file").touch()
    if not flags_of(probe / "file") & NO_ACCESS_TIME:
        pytest.skip("a new file does not inherit the flag there")
    put(tier, 7, b"data")
    assert flags_of(path_of(tier, 7)) & NO_ACCESS_TIME
