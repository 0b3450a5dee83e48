"""Written files while the tier, the source, the daemon or the machine fails."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread

import pytest

from tests.conftest import LEASES, OPENS_ARE_REPORTED, MonarchCommand, Mounted, Tree, contents
from tests.equipment import disks
from tests.equipment.disks import CuttableDisk, Disk
from tests.equipment.slowfs import SlowSource
from tests.equipment.syncs import Syncs
from tests.faults.test_machine import mount_by
from tests.mount.command import needs_fuse, needs_root
from tests.mount.conftest import slow
from tests.mount.observe import ended, objects_in, wait_until

__all__ = ["slow"]

pytestmark = [needs_fuse, pytest.mark.modes(*OPENS_ARE_REPORTED)]

_MB = 1 << 20
TIERS = {"fast": "64MiB"}
OPTIONS = ["write=absorb"]

# Saves checkpoints as trainers do, and says which are safe.
SAVER = """
import os, random, sys
directory, seed = sys.argv[1], int(sys.argv[2])
rng = random.Random(seed)
step = int(sys.argv[3])
while True:
    content = rng.randbytes(1000) * rng.choice([1, 40, 400])
    content = b"%08d" % step + content
    path = f"{directory}/step-{step:06d}"
    with open(path + ".tmp", "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".tmp", path)
    fd = os.open(directory, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    print(step, len(content), flush=True)
    step += 1
"""


def durable(path: Path) -> str:
    return os.getxattr(path, "user.monarch.durable").decode()


def drained(mounted: Mounted, *names: str, timeout_s: float = 30) -> None:
    def there() -> bool:
        return all(durable(mounted.path / name) == "source" for name in names)

    wait_until(there, f"{names} are not drained", timeout_s=timeout_s)


def put(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# -- a tier that is full -----------------------------------------------------------------------


@pytest.fixture
def small_tier(monarch: MonarchCommand) -> Iterator[CuttableDisk]:
    """The directory of the tier "fast" is a disk of 16 MiB. Name it before what mounts."""
    reason = disks.unavailable()
    assert reason is None, reason
    disk = Disk(monarch.directory / "disk", size=16 * _MB)
    with disk.mounted(monarch.directory / "tiers" / "fast") as mounted:
        yield mounted
        monarch.close()


@pytest.mark.promise(71)
def test_files_that_do_not_fit_into_the_tier_are_written_to_the_source(
    small_tier: CuttableDisk, monarch: MonarchCommand, tree: Tree
) -> None:
    mounted = monarch.mount(tree({"a": 10}), tiers={"fast": "12MiB"}, options=OPTIONS)
    monarch.expects_log("goes to the source directly: the tier is full")
    large = contents("large", 40 * _MB + 5)
    with (mounted.path / "large").open("wb") as file:
        for offset in range(0, len(large), 333_333):
            file.write(large[offset : offset + 333_333])
        file.flush()
        assert (mounted.path / "large").stat().st_size == len(large)
        os.fsync(file.fileno())
        assert durable(mounted.path / "large") == "local"
    assert (mounted.path / "large").read_bytes() == large
    for number in range(8):
        put(mounted.path / f"{number}", contents(str(number), 4 * _MB))
    drained(mounted, "large", *map(str, range(8)))
    assert (mounted.source / "large").read_bytes() == large
    with (mounted.path / "large").open("r+b") as file:
        file.seek(10)
        file.write(b"again")
    expected = large[:10] + b"again" + large[15:]
    assert (mounted.path / "large").read_bytes() == expected
    mounted.umount()
    assert (mounted.source / "large").read_bytes() == expected
    for number in range(8):
        assert (mounted.source / f"{number}").read_bytes() == contents(str(number), 4 * _MB)
    assert [path.name for path in mounted.source.glob(".monarch-*")] == [LEASES]


@pytest.mark.promise(71)
def test_a_file_of_the_source_is_truncated_although_the_tier_is_full(
    small_tier: CuttableDisk, monarch: MonarchCommand, tree: Tree
) -> None:
    mounted = monarch.mount(tree({"a": 500_000}), tiers={"fast": "12MiB"}, options=OPTIONS)
    monarch.expects_log("goes to the source directly: the tier is full")
    disks.fill(small_tier.path)
    os.truncate(mounted.path / "a", 100)
    expected = contents("a", 500_000)[:100]
    assert (mounted.path / "a").read_bytes() == expected
    drained(mounted, "a")
    assert (mounted.source / "a").read_bytes() == expected
    mounted.umount()


@pytest.mark.promise(71)
def test_there_is_no_room_only_when_the_source_has_none_either(
    small_tier: CuttableDisk, monarch: MonarchCommand, source: Path
) -> None:
    monarch.expects_log("the tier is full|the source has stopped|No space left on device")
    with Disk(monarch.directory / "source disk", size=24 * _MB).mounted(source):
        mounted = monarch.mount(source, tiers={"fast": "12MiB"}, options=OPTIONS)
        with pytest.raises(OSError) as raised:
            put(mounted.path / "huge", bytes(range(256)) * (60 * _MB // 256))
        assert raised.value.errno == errno.ENOSPC
        (mounted.path / "huge").unlink()
        put(mounted.path / "small", b"there is room again")
        drained(mounted, "small")
        assert (source / "small").read_bytes() == b"there is room again"
        mounted.umount()


@pytest.mark.promise(71)
@pytest.mark.parametrize("left", [0, 200_000])
def test_a_file_of_the_source_that_fits_nowhere_cannot_be_written(
    small_tier: CuttableDisk, monarch: MonarchCommand, source: Path, left: int
) -> None:
    monarch.allows_log("No space left on device|has stopped|no space beyond keep_free")
    with Disk(monarch.directory / "source disk", size=24 * _MB).mounted(source):
        put(source / "a", contents("a", 5 * _MB))
        mounted = monarch.mount(source, tiers={"fast": "12MiB"}, options=OPTIONS)
        filler = disks.fill(small_tier.path)
        os.truncate(filler, filler.stat().st_size - left)
        disks.fill(source)
        with pytest.raises(OSError) as raised:
            (mounted.path / "a").open("ab")
        assert raised.value.errno == errno.ENOSPC
        assert (mounted.path / "a").read_bytes() == contents("a", 5 * _MB)
        mounted.umount()
        assert [path.name for path in source.glob(".monarch-*")] == [LEASES]


@pytest.mark.promise(71)
def test_a_program_can_reserve_more_room_than_the_tier_has(
    small_tier: CuttableDisk, monarch: MonarchCommand, tree: Tree
) -> None:
    mounted = monarch.mount(tree({"a": 10}), tiers={"fast": "12MiB"}, options=OPTIONS)
    monarch.allows_log("goes to the source directly: the tier is full")
    with (mounted.path / "large").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 24 * _MB)
        file.write(b"begin")
    expected = b"begin".ljust(24 * _MB, b"\0")
    assert (mounted.path / "large").read_bytes() == expected
    mounted.umount()
    assert (mounted.source / "large").read_bytes() == expected


@pytest.mark.promise(138)
@pytest.mark.modes("relay")
def test_a_tier_that_takes_no_more_files_can_be_mounted(
    small_tier: CuttableDisk, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.allows_log("the tier is full|is full: what it has in reserve|No space left on device")
    source = tree({"a": 10})
    mounted = monarch.mount(source, tiers={"fast": "12MiB"}, options=OPTIONS)
    put(mounted.path / "first", b"first")
    drained(mounted, "first")
    mounted.umount()
    others = small_tier.path / "others"
    others.mkdir()
    with suppress(OSError):
        for number in range(1 << 20):
            (others / f"{number}").touch()
    assert os.statvfs(small_tier.path).f_favail == 0
    for turn in range(2):
        # The names of the source were changed by the drain: the journal is rewritten.
        mounted = monarch.mount(source, tiers={"fast": "12MiB"}, options=OPTIONS)
        put(mounted.path / f"{turn}", b"second")
        assert (mounted.path / "first").read_bytes() == b"first"
        mounted.umount()
        assert (source / f"{turn}").read_bytes() == b"second"


@pytest.mark.promise(70)
def test_copies_of_the_source_give_way_to_what_is_written(
    small_tier: CuttableDisk, monarch: MonarchCommand, tree: Tree
) -> None:
    files = {f"{n}.bin": _MB for n in range(9)}
    mounted = monarch.mount(tree(files), tiers={"fast": "10MiB"}, options=OPTIONS)
    for name in files:
        (mounted.path / name).read_bytes()
    wait_until(lambda: mounted.status()["tiers"][0]["files"] >= 8, "copies are made")
    put(mounted.path / "ckpt", contents("ckpt", 9 * _MB))
    wait_until(lambda: mounted.status()["tiers"][0]["files"] <= 2, "copies have given way")
    assert (mounted.path / "ckpt").read_bytes() == contents("ckpt", 9 * _MB)
    # These are wanted again, and what was written may have left the disk no room for one.
    monarch.allows_log(r"copy to tier fast given up, will be tried again: .*\(ENOSPC\)")
    for name in files:
        assert (mounted.path / name).read_bytes() == contents(name, _MB)
    drained(mounted, "ckpt")


@pytest.mark.promise(71)
@pytest.mark.modes("relay")
def test_a_disk_that_is_full_at_any_write_costs_no_byte(
    small_tier: CuttableDisk, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("goes to the source directly: the tier is full")
    mounted = monarch.mount(
        tree({"a": 10}), tiers={"fast": "12MiB"}, options=[*OPTIONS, "writeback.reserve=0"]
    )
    piece, pieces = 64 << 10, 10
    filler = small_tier.path / "somebody-else's"
    for full_at in range(pieces + 1):
        # Others take all but so many pieces of the disk.
        filler.unlink(missing_ok=True)
        drained(mounted, *(f"{n}" for n in range(full_at)))
        wait_until(lambda: _absorbed(mounted) == 0, "what is drained has left")
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        os.truncate(filler, filler.stat().st_size - full_at * piece)
        content = contents(str(full_at), piece * pieces)
        with (mounted.path / f"{full_at}").open("wb", buffering=0) as file:
            for number in range(pieces):
                assert file.write(content[number * piece : (number + 1) * piece]) == piece
            os.fsync(file.fileno())
        assert (mounted.path / f"{full_at}").read_bytes() == content
    mounted.umount()
    for full_at in range(pieces + 1):
        content = contents(str(full_at), piece * pieces)
        assert (mounted.source / f"{full_at}").read_bytes() == content


@pytest.mark.promise(71, 67)
@pytest.mark.modes("relay")
@pytest.mark.parametrize("is_killed", [False, True], ids=["closed", "killed"])
@pytest.mark.parametrize("is_drained", [False, True], ids=["waiting", "drained"])
def test_a_file_that_was_recorded_before_the_tier_was_full_loses_no_byte(
    small_tier: CuttableDisk,
    slow: SlowSource,
    monarch: MonarchCommand,
    is_drained: bool,
    is_killed: bool,
) -> None:
    monarch.expects_log("goes to the source directly: the tier is full")
    mounted = monarch.mount(slow.path, tiers={"fast": "12MiB"}, options=OPTIONS)
    log = mounted.path / "log"
    stopped = "draining to the source has stopped"
    if not is_drained:
        # The drain does not get beyond the first object.
        slow.rules(r"err write EIO .*-1\.part")
        monarch.expects_log(stopped)
    put(mounted.path / "before", b"before")
    if not is_drained:
        wait_until(lambda: stopped in mounted.log_text, "the drain has not stopped")
    with log.open("wb") as file:
        file.write(b"first")
        # The drain does not bring this content before its turn.
        os.fchmod(file.fileno(), 0o640)
    if is_drained:
        drained(mounted, "log")
    more = contents("more", 300_000)
    filler = disks.fill(small_tier.path)
    with log.open("ab", buffering=0) as file:
        assert file.write(more[:-7]) == len(more) - 7
        os.fsync(file.fileno())
        assert file.write(more[-7:]) == 7
        if is_killed:
            mounted.kill()
            filler.unlink()
            slow.rules()
            mounted = monarch.mount(slow.path, tiers={"fast": "12MiB"}, options=OPTIONS)
            assert log.stat().st_size == len(more) + 5
        else:
            slow.rules()
            drained(mounted, "before")
    drained(mounted, "log")
    assert log.read_bytes() == (slow.root / "log").read_bytes() == b"first" + more
    assert log.stat().st_mtime_ns == (slow.root / "log").stat().st_mtime_ns
    assert monarch("ckpt", "lost", str(mounted.path)).stdout == "nothing is lost\n"
    mounted.umount()


def _absorbed(mounted: Mounted) -> int:
    return len(objects_in(mounted.tiers["fast"]))


def until_full(path: Path) -> None:
    """Change an attribute until there is no room for that."""
    for _ in range(500):
        try:
            os.setxattr(path, "user.big", os.urandom(60_000))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return
    raise AssertionError("the tier does not become full")


@pytest.mark.finding("W4", "W17")
@pytest.mark.promise(138)
@pytest.mark.modes("relay")
def test_a_tier_full_of_what_is_not_drained_ends_and_mounts_and_drains(
    small_tier: CuttableDisk, monarch: MonarchCommand, slow: SlowSource
) -> None:
    monarch.expects_log("is full: what it has in reserve is given up")
    stopped = "draining to the source has stopped"
    monarch.expects_log(stopped)
    monarch.allows_log("goes to the source directly|No space left|extended attributes")
    (slow.path / "a").write_bytes(b"a")
    options = [*OPTIONS, "writeback.reserve=0"]
    mounted = monarch.mount(slow.path, tiers={"fast": "12MiB"}, options=options)
    (directory,) = (small_tier.path / "monarch").glob("absorbed-*")
    wait_until((directory / "reserve").exists, "there is no reserve")
    slow.rules("err create EIO .*", "err write EIO .*")
    put(mounted.path / "ckpt", contents("ckpt", 2 * _MB))
    wait_until(lambda: stopped in mounted.log_text, "the drain has not stopped")
    put(mounted.path / "removed", b"1")
    (mounted.path / "dir").mkdir()
    with (small_tier.path / "somebody-else's").open("wb", buffering=0) as file:
        for size in (_MB, 4096):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
    until_full(mounted.path / "ckpt")
    for call in (lambda: (mounted.path / "new").mkdir(), lambda: (mounted.path / "new").touch()):
        with pytest.raises(OSError) as raised:
            call()
        assert raised.value.errno == errno.ENOSPC
    (mounted.path / "dir").rmdir()
    (mounted.path / "removed").unlink()
    assert sorted(os.listdir(mounted.path)) == ["a", "ckpt"]
    mounted.kill()
    slow.rules()
    mounted = monarch.mount(slow.path, tiers={"fast": "12MiB"}, options=options)
    drained(mounted, "ckpt")
    assert sorted(os.listdir(mounted.path)) == ["a", "ckpt"]
    assert (slow.root / "ckpt").read_bytes() == contents("ckpt", 2 * _MB)
    mounted.kill()
    # A mount with another snapshot needs room for its own.
    (slow.root / "b").write_bytes(b"b")
    mounted = monarch.mount(slow.path, tiers={"fast": "12MiB"}, options=options)
    assert sorted(os.listdir(mounted.path)) == ["a", "b", "ckpt"]
    until_full(mounted.path / "ckpt")
    (small_tier.path / "somebody-else's").unlink()
    # All without another mount.
    wait_until((directory / "reserve").exists, "there is no reserve again")
    (mounted.path / "dir").mkdir()
    put(mounted.path / "new", b"2")
    drained(mounted, "new")
    mounted.umount()
    assert {"a", "b", "ckpt", "dir", "new"} <= {*os.listdir(slow.root)}
    assert not {"removed", "x"} & {*os.listdir(slow.root)}


@pytest.mark.promise(138)
@pytest.mark.modes("relay")
def test_a_tier_whose_quota_takes_nothing_at_all_is_mounted_and_drains_when_there_is_room(
    monarch: MonarchCommand, slow: SlowSource
) -> None:
    if reason := disks.unavailable("btrfs"):
        pytest.skip(reason)
    monarch.allows_log("draining to the source has stopped|quota exceeded|No space left")
    options, ckpt = [*OPTIONS, "writeback.reserve=0"], contents("ckpt", 2 * _MB)
    disk = Disk(monarch.directory / "disk", "btrfs", size=256 * _MB)
    with disk.mounted(monarch.directory / "tiers" / "fast") as tier:
        mounted = monarch.mount(slow.path, tiers={"fast": "12MiB"}, options=options)
        slow.rules("err create EIO .*", "err write EIO .*", "err mkdir EIO .*")
        put(mounted.path / "ckpt", ckpt)
        (mounted.path / "dir").mkdir()
        mounted.kill()
        # It was given up when the disk became full, and others took that room as well.
        (directory,) = (tier.path / "monarch").glob("absorbed-*")
        (directory / "reserve").unlink()
        filler = disks.fill_quota(tier.path, 40 * _MB)
        slow.rules()
        mounted = monarch.mount(slow.path, tiers={"fast": "12MiB"}, options=options)
        assert sorted(os.listdir(mounted.path)) == ["ckpt", "dir"]
        assert (mounted.path / "ckpt").read_bytes() == ckpt
        filler.unlink()
        drained(mounted, "ckpt", timeout_s=60)
        put(mounted.path / "new", b"1")
        mounted.umount()
        assert (slow.root / "ckpt").read_bytes() == ckpt
        assert {"ckpt", "dir", "new"} <= {*os.listdir(slow.root)}
        monarch.close()


# -- a source that fails -----------------------------------------------------------------------


@pytest.mark.promise(69)
@pytest.mark.parametrize("rule", ["err * EIO .*", "hang * .*", "err write ENOSPC .*"])
def test_a_source_that_fails_loses_nothing_and_blocks_no_writer(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, rule: str
) -> None:
    # The file system of the source has room: ENOSPC is that of a quota of a directory.
    failures = {"EIO": "the source has stopped", "ENOSPC": "the source refuses content"}
    expected = [line for number, line in failures.items() if number in rule]
    for line in expected:
        monarch.expects_log(line)
    tree({"a": 10})
    mounted = monarch.mount(slow.path, tiers=TIERS, options=OPTIONS)
    slow.rules(rule)
    (mounted.path / "ckpt").mkdir()
    for step in range(4):
        put(mounted.path / f"ckpt/{step}.tmp", contents(str(step), 300_000))
        (mounted.path / f"ckpt/{step}.tmp").rename(mounted.path / f"ckpt/{step}")
        assert durable(mounted.path / f"ckpt/{step}") == "local"
        assert (mounted.path / f"ckpt/{step}").read_bytes() == contents(str(step), 300_000)
    for line in expected:
        wait_until(lambda line=line: line in mounted.log_text, "the drain has not failed")
    if "hang" in rule:
        wait_until(lambda: slow.counters()["hanging"] > 0, "the drain does not hang")
    time.sleep(1.5)
    slow.rules()
    drained(mounted, *(f"ckpt/{step}" for step in range(4)), timeout_s=60)
    mounted.umount()
    assert sorted(os.listdir(mounted.source / "ckpt")) == ["0", "1", "2", "3"]
    for step in range(4):
        assert (slow.root / f"ckpt/{step}").read_bytes() == contents(str(step), 300_000)


@pytest.mark.promise(69)
@pytest.mark.modes("relay")
def test_a_source_that_is_gone_for_a_while_gets_all_of_it(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("the source has stopped|was opened again|source")
    tree({"a": 10})
    mounted = monarch.mount(slow.path, tiers=TIERS, options=OPTIONS)
    put(mounted.path / "before", b"before")
    drained(mounted, "before")
    slow.kill()
    for step in range(3):
        put(mounted.path / f"{step}", contents(str(step), 100_000))
        assert durable(mounted.path / f"{step}") == "local"
    time.sleep(1.5)
    slow.restart()
    drained(mounted, "0", "1", "2", timeout_s=60)
    for step in range(3):
        assert (slow.root / f"{step}").read_bytes() == contents(str(step), 100_000)


@pytest.mark.promise(67)
@pytest.mark.modes("relay")
def test_a_tier_with_what_is_not_drained_cannot_be_forgotten(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("the source has stopped|is not used any more")
    tree({"a": 10})
    mounted = monarch.mount(slow.path, tiers=TIERS, options=OPTIONS)
    slow.rules("err write EIO .*")
    put(mounted.path / "ckpt", b"only here")
    mounted.kill()
    slow.rules()
    # The refused mount must not renew the snapshot that the change belongs to.
    tree({"later": 10})
    with pytest.raises(pytest.fail.Exception, match=r"still has 1 file, .* not at the source"):
        monarch.mount(slow.path, tiers={"other": "64MiB"}, options=OPTIONS)
    monarch.mounted[-1].killed = True
    again = monarch.mount(slow.path, tiers={**TIERS, "other": "64MiB"}, options=OPTIONS)
    drained(again, "ckpt")
    again.umount()
    assert (slow.root / "ckpt").read_bytes() == b"only here"
    monarch.mount(slow.path, tiers={"other": "64MiB"}, options=OPTIONS)


@pytest.mark.promise(73)
@pytest.mark.modes("relay")
def test_an_object_without_its_bytes_is_reported_and_later_changes_are_drained(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("'one' is lost")
    monarch.expects_log("the source has stopped")
    tree({"one": 10})
    mounted = monarch.mount(slow.path, tiers=TIERS, options=OPTIONS)
    slow.rules("err write EIO .*")
    put(mounted.path / "one", b"new" * 1000)
    put(mounted.path / "two", b"two" * 1000)
    wait_until(lambda: "the source has stopped" in mounted.log_text, "the drain has failed")
    mounted.kill()
    (lost,) = (p for p in mounted.tiers["fast"].rglob("absorbed-*/01/1"))
    lost.unlink()
    slow.rules()
    again = monarch.mount(slow.path, tiers=TIERS, options=OPTIONS)
    drained(again, "two")
    assert (slow.root / "two").read_bytes() == b"two" * 1000
    assert (slow.root / "one").read_bytes() == contents("one", 10)


@pytest.mark.promise(66)
def test_a_name_is_at_the_source_never_before_its_content(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    tree({"ckpt/latest": 1000})
    mounted = monarch.mount(slow.path, tiers=TIERS, options=OPTIONS)
    old, new = contents("ckpt/latest", 1000), contents("new", 5 * _MB)
    slow.rules("write_MBps 5", "hang rename .*")
    put(mounted.path / "ckpt/tmp", new)
    (mounted.path / "ckpt/tmp").rename(mounted.path / "ckpt/latest")
    seen = set()
    while not slow.counters()["hanging"]:
        seen.add((slow.root / "ckpt/latest").read_bytes())
    assert seen | {(slow.root / "ckpt/latest").read_bytes()} == {old}
    slow.rules("lat rename 500 .*")
    while durable(mounted.path / "ckpt/latest") != "source":
        seen.add((slow.root / "ckpt/latest").read_bytes())
    assert seen <= {old, new}
    assert (slow.root / "ckpt/latest").read_bytes() == new


# -- a daemon that dies at a named point -------------------------------------------------------

# At which of its passings the daemon dies there; see monarch/posix/failpoints.py.
WRITE_PLACES = {
    "journal-appended": 9,
    "journal-synced": 3,
    # When a mount begins over a new snapshot.
    "journal-staged": 1,
    "journal-compacted": 1,
    "commit-synced": 1,
    "commit-recorded": 1,
    "drain-staged": 2,
    "drain-synced": 2,
    "drain-renamed": 2,
    "drain-linked": 1,
    "drain-published": 4,
    "drain-marked": 3,
}
AT_MOUNT = ("journal-staged", "journal-compacted")


def _work(directory: Path) -> dict[str, bytes]:
    """What trainers do, until the daemon is dead; the files that were said to be safe by then."""
    safe: dict[str, bytes] = {}
    with suppress(OSError):
        (directory / "ckpt").mkdir(exist_ok=True)
        for step in range(40):
            name, content = f"ckpt/{step}", contents(str(step), 30_000)
            put(directory / f"{name}.tmp", content)
            (directory / f"{name}.tmp").rename(directory / name)
            if step % 3 == 1:
                os.link(directory / name, directory / f"{name}.link")
                put(directory / name, content + b"again")
                content += b"again"
            fd = os.open(directory / "ckpt", os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            safe[name] = content
            if step % 4 == 3:
                (directory / f"ckpt/{step - 2}").unlink()
                safe.pop(f"ckpt/{step - 2}")
            time.sleep(0.02)
    return safe


@pytest.mark.fault("T6")
@pytest.mark.promise(50, 67)
@pytest.mark.modes("auto")
@pytest.mark.parametrize("point", sorted(WRITE_PLACES))
def test_a_daemon_killed_there_loses_nothing_that_was_written(
    monarch: MonarchCommand, tree: Tree, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    source = tree({"a": 10})
    safe: dict[str, bytes] = {}
    if point in AT_MOUNT:
        mounted = monarch.mount(source, tiers=TIERS, options=OPTIONS)
        for number in range(5):
            put(mounted.path / f"{number}", contents(str(number), 5000))
            safe[f"{number}"] = contents(str(number), 5000)
        # Only then is there a new snapshot.
        drained(mounted, *safe)
        mounted.kill()
    monkeypatch.setenv("MONARCH_POINT", f"{point}:{WRITE_PLACES[point]}")
    if point in AT_MOUNT:
        with pytest.raises(pytest.fail.Exception, match="exited with 8"):
            monarch.mount(source, tiers=TIERS, options=OPTIONS)
        monarch.mounted[-1].killed = True
    else:
        mounted = monarch.mount(source, tiers=TIERS, options=OPTIONS)
        safe = _work(mounted.path)
        wait_until(lambda: ended(mounted.pid), "the daemon has died there")
        mounted.killed = True
    monkeypatch.delenv("MONARCH_POINT")
    again = monarch.mount(source, tiers=TIERS, options=OPTIONS)
    for name, content in safe.items():
        assert (again.path / name).read_bytes() == content, name
    shown = sorted(str(p.relative_to(again.path)) for p in again.path.rglob("*"))
    again.umount()
    for name, content in safe.items():
        assert (source / name).read_bytes() == content, name
    there = sorted(str(p.relative_to(source)) for p in source.rglob("*"))
    assert [path for path in there if not path.startswith(LEASES)] == shown


# -- a daemon that dies at any moment ----------------------------------------------------------


@pytest.mark.promise(67)
@pytest.mark.modes("auto")
@pytest.mark.timeout(1800)
def test_no_checkpoint_that_was_said_to_be_safe_is_lost_by_kills(
    monarch: MonarchCommand, tree: Tree, pytestconfig: pytest.Config
) -> None:
    kills = 200 if pytestconfig.getoption("--soak") else 8
    source = tree({"a": 10})
    mounted = monarch.mount(source, tiers=TIERS, options=OPTIONS)
    (mounted.path / "ckpt").mkdir()
    rng, step, safe = random.Random(7), 0, {}
    for turn in range(kills):
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(mounted.path / "ckpt"), str(turn), str(step)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert saver.stdout is not None
        output = [saver.stdout.readline() for _ in range(rng.randrange(1, 12))]
        time.sleep(rng.random() * 0.05)
        mounted.kill()
        output += saver.communicate()[0].splitlines()
        for line in filter(None, output):
            number, size = map(int, line.split())
            safe[number] = size
            step = number + 1
        mounted = monarch.mount(source, tiers=TIERS, options=OPTIONS)
        for number, size in safe.items():
            content = (mounted.path / f"ckpt/step-{number:06d}").read_bytes()
            assert (content[:8], len(content)) == (b"%08d" % number, size)
        step += 1
    mounted.umount()
    for number, size in safe.items():
        content = (source / f"ckpt/step-{number:06d}").read_bytes()
        assert (content[:8], len(content)) == (b"%08d" % number, size)


# -- a tier whose disk takes no writes, or is slow -----------------------------------------------


@pytest.fixture
def syncs(tmp_path: Path) -> Syncs:
    return Syncs(tmp_path)


@pytest.mark.finding("W19")
@pytest.mark.promise(64, 154)
@pytest.mark.modes("relay")
def test_an_fsync_that_failed_fails_until_the_file_is_written_anew(
    syncs: Syncs, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("fsync failed")
    monarch.allows_log("draining to the source has stopped")
    tree({"a": 10})
    mounted = mount_by(monarch, *syncs.by, options="write=absorb")
    path = mounted.path / "f"
    with path.open("wb") as first, path.open("rb+") as second:
        first.write(b"written")
        first.flush()
        syncs.fail_once()
        for file in (first, first, second):
            with pytest.raises(OSError, match="Input/output error"):
                os.fsync(file.fileno())
            assert durable(path) != "local"
        problems = mounted.status()["health"]["problems"]
        assert {problem["kind"] for problem in problems} >= {"fsync-failed"}
        # All of it is written again.
        os.ftruncate(second.fileno(), 0)
        second.write(b"anew")
        second.flush()
        os.fsync(second.fileno())
        assert durable(path) in ("local", "source")
        second.write(b" and more")
        second.flush()
        syncs.fail_once()
        with pytest.raises(OSError, match="Input/output error"):
            os.fsync(second.fileno())

    def is_mended() -> bool:
        kinds = [problem["kind"] for problem in mounted.status()["health"]["problems"]]
        return "fsync-failed" not in kinds

    wait_until(is_mended, "it is not written anew")
    with path.open("rb+") as file:
        file.seek(0, 2)
        file.write(b"!")
        file.flush()
        os.fsync(file.fileno())
        assert durable(path) in ("local", "source")
    assert path.read_bytes() == b"anew and more!"
    mounted.umount()
    assert (mounted.source / "f").read_bytes() == b"anew and more!"


@pytest.mark.finding("W20")
@pytest.mark.promise(155)
@pytest.mark.modes("relay")
def test_many_slow_fsyncs_delay_no_open_and_no_creation(
    syncs: Syncs, monarch: MonarchCommand, tree: Tree
) -> None:
    tree({"a": 10})
    mounted = mount_by(monarch, *syncs.by, options="write=absorb")
    (mounted.path / "old").write_bytes(b"old")
    with ExitStack() as held:
        files = [held.enter_context((mounted.path / f"{n}").open("wb")) for n in range(16)]
        syncs.hang()
        fsyncs = [Thread(target=os.fsync, args=(file.fileno(),)) for file in files]
        for file, thread in zip(files, fsyncs, strict=True):
            file.write(b"x")
            file.flush()
            thread.start()

        def others() -> None:
            (mounted.path / "new").write_bytes(b"new")
            (mounted.path / "old").read_bytes()
            with (mounted.path / "old").open("ab") as file:
                file.truncate(1)

        other = Thread(target=others)
        other.start()
        other.join(timeout=100)
        is_held_up = other.is_alive()
        syncs.go_on()
        for thread in (*fsyncs, other):
            thread.join()
        assert not is_held_up


# -- a machine whose power fails ---------------------------------------------------------------


@pytest.mark.promise(63, 68)
@pytest.mark.modes("auto")
@pytest.mark.timeout(1800)
@needs_root
def test_no_checkpoint_that_was_said_to_be_safe_is_lost_by_a_power_cut(
    monarch: MonarchCommand, tree: Tree, pytestconfig: pytest.Config
) -> None:
    cuts = 200 if pytestconfig.getoption("--soak") else 4
    source = tree({"a": 10})
    at = monarch.directory / "tiers"
    disk = Disk(monarch.directory / "disk 0", size=48 * _MB)
    rng, step, safe = random.Random(3), 0, {}
    for turn in range(cuts):
        options = ("data=writeback", "nodelalloc", "noauto_da_alloc", "commit=1")
        with disk.mounted(at, options) as power:
            mounted = monarch.mount(
                source, tiers={"fast": "30MB"}, state=at / "state", options=OPTIONS
            )
            if turn == 0:
                (mounted.path / "ckpt").mkdir()
            for number, size in safe.items():
                content = (mounted.path / f"ckpt/step-{number:06d}").read_bytes()
                assert (content[:8], len(content)) == (b"%08d" % number, size)
            saver = subprocess.Popen(
                [sys.executable, "-c", SAVER, str(mounted.path / "ckpt"), str(turn), str(step)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert saver.stdout is not None
            output = [saver.stdout.readline() for _ in range(rng.randrange(1, 12))]
            os.kill(mounted.pid, 19)
            disk = power.cut(monarch.directory / f"disk {turn + 1}")
            mounted.kill()
            subprocess.run(["umount", "-l", str(mounted.path)], check=True)
            output += saver.communicate()[0].splitlines()
            for line in filter(None, output):
                number, size = map(int, line.split())
                safe[number] = size
                step = number + 1
            step += 1
    with disk.mounted(at):
        mounted = monarch.mount(source, tiers={"fast": "30MB"}, state=at / "state", options=OPTIONS)
        mounted.umount()
    for number, size in safe.items():
        content = (source / f"ckpt/step-{number:06d}").read_bytes()
        assert (content[:8], len(content)) == (b"%08d" % number, size)


@pytest.mark.finding("W6", "W7")
@pytest.mark.promise(68, 151, 152)
@pytest.mark.modes("auto")
@needs_root
def test_syncs_of_other_kinds_survive_a_power_cut(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    tree({"a": 10})
    at = monarch.directory / "tiers"
    disk = Disk(monarch.directory / "disk 0", size=48 * _MB)
    old, new = contents("old", 100_000), contents("new", 100_000)
    with disk.mounted(at, ("data=writeback", "nodelalloc", "noauto_da_alloc", "commit=1")) as power:
        mounted = monarch.mount(
            slow.path, tiers={"fast": "30MB"}, state=at / "state", options=OPTIONS
        )
        path = mounted.path
        # The drain stands before the first of them.
        slow.rules("err write EIO .*")
        put(path / "first", b"first")
        wait_until(lambda: mounted.status()["writing"]["trouble"], "the drain has failed")
        safe = {"in-step": old, "one-write": new, "touched": old, "linked": old, "open": old}
        for name, content in safe.items():
            fd = os.open(path / name, os.O_WRONLY | os.O_CREAT | (name == "in-step") * os.O_DSYNC)
            flags = os.RWF_DSYNC if name == "one-write" else 0
            os.pwritev(fd, [content], 0, flags)
            if not flags and name != "in-step":
                os.fsync(fd)
            os.close(fd)
        # What was safe is touched, and then replaced by what never was.
        with (path / "touched").open("ab") as file:
            file.write(b"more")
        held = (path / "open").open("ab")
        held.write(b"more")
        held.flush()
        for name in ("touched", "linked", "open"):
            (path / "other").write_bytes(new)
            (path / "other").rename(path / name)
        time.sleep(2)  # in which the objects that no name leads to are removed
        os.kill(mounted.pid, signal.SIGSTOP)
        disk = power.cut(monarch.directory / "disk 1")
        held.close()
        mounted.kill()
        subprocess.run(["umount", "-l", str(mounted.path)], check=True)
    slow.rules()
    with disk.mounted(at):
        mounted = monarch.mount(
            slow.path, tiers={"fast": "30MB"}, state=at / "state", options=OPTIONS
        )
        for name, content in safe.items():
            found = (mounted.path / name).read_bytes()
            assert found == new or found[: len(content)] == content, name
        mounted.umount()
