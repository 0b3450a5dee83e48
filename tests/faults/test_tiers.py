"""Tiers that fill up, fail, vanish, hang or are slow: reads succeed, and the tiers recover."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MonarchCommand, Mounted, Tree, contents
from tests.equipment import slowfs
from tests.equipment.inotify import OpenCounter
from tests.equipment.slowfs import SlowSource
from tests.mount.observe import (
    PATIENCE_S,
    account,
    accounts_agree,
    copies,
    epoch,
    files,
    forget_pages,
    read_through,
    resident,
    settled,
    wait_until,
    warnings,
)

MIB = 1 << 20
# So that a test need not wait for seconds until a tier is probed or tried again.
PROBED = ("limits.tier_probe=200ms", "limits.scrub_bandwidth=0")
# And until it is seen to hang. Not where a disk is behind it that others may keep busy for longer.
QUICK = (*PROBED, "limits.tier_timeout=1s")
TIERS = {"fast": "100MB", "large": "100MB"}


def tier_in(report: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(t for t in report["tiers"] if t["name"] == "fast")
    return found


def tier(mounted: Mounted) -> dict[str, Any]:
    return tier_in(account(mounted))


def goes_out(mounted: Mounted) -> str:
    """Wait until the tier ``fast`` is out of service; what is wrong with it."""
    report: dict[str, Any] = {}

    def is_out() -> bool:
        # It may be in service again at the next look.
        report.update(account(mounted))
        return not tier_in(report)["in_service"]

    wait_until(is_out, "the tier is out of service")
    assert report["health"]["state"] == "degraded"
    assert any("tier fast" in problem["what"] for problem in report["health"]["problems"])
    return str(tier_in(report)["out_why"])


def comes_back(mounted: Mounted) -> None:
    report: dict[str, Any] = {}

    def is_back() -> bool:
        report.update(account(mounted))
        return bool(tier_in(report)["in_service"])

    wait_until(is_back, "the tier is in service again")
    assert not any("tier fast" in problem["what"] for problem in report["health"]["problems"])


def warmed(mounted: Mounted, content: Mapping[str, bytes]) -> None:
    """All of it has its copy in ``fast``."""
    epoch(mounted, content)
    settled(mounted)
    assert resident(mounted, content) == dict.fromkeys(content, "fast")


def opens_for(mounted: Mounted, content: Mapping[str, bytes]) -> dict[str, int]:
    """Read all of it, and let the copies settle: how often each file was opened at the source."""
    with OpenCounter(mounted.source) as counter:
        epoch(mounted, content)
        settled(mounted)
        return counter.paths()


def epoch_elsewhere(mounted: Mounted, content: Mapping[str, bytes]) -> None:
    """As ``epoch``, by another process: if that hangs, this one does not."""
    reader = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.at_once", str(mounted.path), "1"],
        env=mounted.cli.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    sizes = {name: len(expected) for name, expected in content.items()}
    try:
        outcomes, _ = reader.communicate(json.dumps(sizes), timeout=2 * PATIENCE_S)
    except subprocess.TimeoutExpired:
        reader.kill()
        pytest.fail("a reader hangs")
    assert json.loads(outcomes) == {"right": len(content)}


@pytest.fixture
def slow_tier(tmp_path: Path) -> Iterator[SlowSource]:
    """Where the tier ``fast`` will be. Name it before ``monarch``: it must outlive the mount."""
    reason = slowfs.unavailable()
    if reason:
        pytest.skip(reason)
    # In memory: a disk may be slow by itself.
    memory = next(filter(os.path.isdir, ("/dev/shm", tmp_path)))
    with tempfile.TemporaryDirectory(prefix="monarch-tier-", dir=memory) as disk:
        with SlowSource(Path(disk), tmp_path / "tiers" / "fast") as slowed:
            yield slowed


@contextmanager
def reading_on(path: Path) -> Iterator[None]:
    """Another process has a file open and reads its first bytes again and again."""
    code = (
        "import os, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "while os.getppid() == int(sys.argv[2]):\n"
        "    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "    os.pread(fd, 1, 0)\n"
        "    print(flush=True)\n"
        "    time.sleep(0.1)\n"
    )
    command = [sys.executable, "-c", code, str(path), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == b"\n"
        try:
            yield
        finally:
            reader.kill()


@contextmanager
def ruled(slowed: SlowSource, rule: str) -> Iterator[None]:
    """With this rule, and without it whatever happens: a search for leftovers must not hang."""
    slowed.rules(rule)
    try:
        yield
    finally:
        slowed.rules()


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system in a file, mounted where the tier ``fast`` will be."""

    image: Path
    path: Path

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", str(self.image), str(self.path)], check=True)

    def umount(self) -> None:
        """As one does with a disk that is in use and has to go."""
        subprocess.run(["umount", "-l", str(self.path)], check=True)

    def is_held(self) -> bool:
        """Whether the device is still in use: it disappears when no process holds the file
        system."""
        asked = subprocess.run(["losetup", "-j", str(self.image)], capture_output=True, check=True)
        return asked.stdout != b""


def _disk(tmp_path: Path, mebibytes: int, *make: str) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    if shutil.which(make[0]) is None:
        pytest.skip(f"{make[0]} is not installed")
    disk = Disk(tmp_path / "disk.img", tmp_path / "tiers" / "fast")
    disk.path.mkdir(parents=True)
    with disk.image.open("wb") as file:
        file.truncate(mebibytes * MIB)
    subprocess.run([*make, "-q", str(disk.image)], check=True)
    disk.mount()
    try:
        yield disk
    finally:
        while os.path.ismount(disk.path):
            disk.umount()
        wait_until(lambda: not disk.is_held(), "the device is free")


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Disk]:
    """Name it before ``monarch``."""
    yield from _disk(tmp_path, 32, "mkfs.ext4", "-F")


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Disk]:
    """Name it before ``monarch``."""
    if shutil.which("xfs_io") is None:
        pytest.skip("xfs_io is not installed")
    yield from _disk(tmp_path, 300, "mkfs.xfs", "-f")


# -- full ------------------------------------------------------------------------------------------


@pytest.mark.fault("T1")
@pytest.mark.promise(8, 48)
def test_a_disk_without_room_costs_no_read_and_is_not_tried_all_the_time(
    slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("copy to tier fast given up")
    content = files(60, 2_000, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "100MB"}, options=PROBED)
    # Only copies: a probe that writes a few bytes succeeds each time.
    slow_tier.rules("err write EDQUOT /stage/[0-9]")
    before = slow_tier.counters()["create"]
    with OpenCounter(source) as counter:
        # What is on its way is shared, so an epoch may open nothing.
        deadline = time.monotonic() + PATIENCE_S
        while counter.count() < 300 and time.monotonic() < deadline:
            epoch(mounted, content)
        opens = counter.count()
    report = account(mounted)
    retries = report["source_totals"]["copy"]["opens"]
    # The hundreds of opens are the readers' own; copies have tried a few times, not once for each.
    assert opens >= 300
    assert retries < 100
    assert report["copies"]["failed"] < 200
    assert slow_tier.counters()["create"] - before < 200
    assert len(warnings(mounted)) <= 3
    assert copies(mounted) == {"fast": {}}
    slow_tier.rules()
    comes_back(mounted)
    accounts_agree(mounted)
    warmed(mounted, content)
    accounts_agree(mounted)


@pytest.mark.fault("T1")
@pytest.mark.promise(33)
def test_copies_leave_free_what_is_to_be_kept_free(
    ext4: Disk, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files(50, MIB, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "100MB"}, options=PROBED)
    epoch(mounted, content)
    # What does not fit is no failure, and is not tried again and again.
    assert settled(mounted)["copies"]["failed"] == 0
    assert tier(mounted)["in_service"]
    disk = os.statvfs(ext4.path)
    # A twentieth, as nothing else is said.
    assert disk.f_bavail * disk.f_frsize >= disk.f_blocks * disk.f_frsize // 20
    held = set(resident(mounted, content))
    assert len(held) > 10
    assert set(opens_for(mounted, content)) == set(content) - held
    accounts_agree(mounted)


@pytest.mark.fault("T10")
@pytest.mark.promise(104)
@pytest.mark.finding("C3")
def test_a_file_that_stays_open_while_a_tier_is_full_is_copied_when_it_has_room_again(
    slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("copy to tier fast given up")
    size = 600_000
    tree({"before": size, "during": size})
    options = [*PROBED, "limits.inline_max=64KiB"]
    mounted = monarch.mount(source, tiers={"fast": "100MB"}, options=options)
    with ExitStack() as stack:
        slow_tier.rules("err write ENOSPC /stage/[0-9]")
        stack.enter_context(reading_on(mounted.path / "before"))
        goes_out(mounted)
        # Opened while nothing can be copied: no copy is tried.
        stack.enter_context(reading_on(mounted.path / "during"))
        wait_until(lambda: account(mounted)["residency"]["wanted"] == 0, "nothing is wanted")
        assert copies(mounted) == {"fast": {}}
        slow_tier.rules()
        comes_back(mounted)
        wait_until(lambda: len(copies(mounted)["fast"]) == 2, "both are copied")
        settled(mounted)
        # Evicted by a person, and not copied again by a reader that has it open. Without opens a
        # reader of the first byte that has paused, as on a busy machine, is taken for one that
        # opens anew.
        monarch("evict", str(mounted.path), "before")
        time.sleep(1)
        if monarch.mode != "no_open":
            assert resident(mounted, ["before", "during"]) == {"during": "fast"}
    # None without opens, where there is no release to wait for either.
    wait_until(lambda: not account(mounted)["handles"]["open_files"], "the releases arrived")
    assert read_through(mounted.path / "during") == contents("during", size)
    accounts_agree(mounted)


@pytest.mark.modes("relay")
@pytest.mark.finding("C8")
def test_the_log_names_the_calls_that_the_end_waits_for(
    slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files(1, 20_000, step=1)
    tree(content)
    # The tier is not to be taken for one that hangs.
    options = ["limits.tier_timeout=60s"]
    mounted = monarch.mount(source, tiers={"fast": "100MB"}, options=options)
    name = Path(f"/proc/{mounted.pid}/comm")
    with ruled(slow_tier, "hang write /stage/[0-9]"):
        epoch(mounted, content)
        wait_until(lambda: slow_tier.counters()["hanging"] > 0, "the copy is written")
        os.kill(mounted.pid, signal.SIGTERM)
        wait_until(lambda: name.read_text() == "end: copies\n", "the end waits for copies")
        time.sleep(1.2)  # longer steps are logged
    wait_until(lambda: "the end has waited" in mounted.log_text, "the end is logged")
    assert re.search(r"waited \d+\.\d s for copies whose bytes were fetched", mounted.log_text)


# -- read-only, unmounted, removed, failing --------------------------------------------------------


@pytest.mark.fault("T2")
@pytest.mark.promise(8, 48)
def test_a_disk_that_became_read_only_serves_what_it_has_and_the_next_tier_takes_the_rest(
    ext4: Disk, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("copy to tier fast given up: .*|copy to tier fast given up, will")
    content = files(20, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers=TIERS, options=PROBED)
    before, after = sorted(content)[:8], sorted(content)[8:]
    epoch(mounted, content, before)
    settled(mounted)
    # What the kernel does to a file system in which it finds an error.
    subprocess.run(["mount", "-o", "remount,abort", str(ext4.path)], check=True)
    epoch(mounted, content)
    goes_out(mounted)
    epoch(mounted, content)
    settled(mounted)
    assert opens_for(mounted, content) == {}
    assert resident(mounted, content) == {
        **dict.fromkeys(before, "fast"),
        **dict.fromkeys(after, "large"),
    }
    assert len(warnings(mounted)) <= 3


@pytest.mark.fault("T2")
@pytest.mark.promise(48)
def test_a_disk_that_was_unmounted_is_released_and_its_copies_are_used_again_when_it_is_back(
    ext4: Disk, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("tier fast is out of service")
    content = files(20, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "10MB"}, options=PROBED)
    warmed(mounted, content)
    ext4.umount()
    assert "is not the directory that was opened" in goes_out(mounted)
    # The disk can be repaired or replaced.
    wait_until(lambda: not ext4.is_held(), "no process holds the disk")
    for _ in range(2):
        assert opens_for(mounted, content) == dict.fromkeys(content, 1)
    # Nothing was written into the bare directory below the mount point.
    assert list(ext4.path.iterdir()) == []
    ext4.mount()
    comes_back(mounted)
    assert opens_for(mounted, content) == {}
    accounts_agree(mounted)


@pytest.mark.fault("T2")
@pytest.mark.promise(48)
def test_a_tier_that_was_removed_and_made_anew_is_filled_again(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("tier fast is out of service|dropped|given up")
    content = files(20, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "10MB"}, options=PROBED)
    warmed(mounted, content)
    shutil.rmtree(mounted.tiers["fast"])
    goes_out(mounted)
    epoch(mounted, content)
    mounted.tiers["fast"].mkdir()
    comes_back(mounted)
    warmed(mounted, content)
    assert opens_for(mounted, content) == {}
    accounts_agree(mounted)
    # It is the same tier to the next mount.
    mounted.umount()
    again = monarch.mount(source, tiers={"fast": "10MB"}, options=PROBED)
    assert opens_for(again, content) == {}
    accounts_agree(again)


@pytest.mark.fault("T2", "T3")
@pytest.mark.promise(8, 48)
@pytest.mark.modes("python", "passthrough")
def test_a_disk_that_answers_everything_with_an_error_is_a_miss_until_it_is_repaired(
    xfs: Disk, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("tier fast is out of service|dropped|given up")
    content = files(20, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers=TIERS, options=PROBED)
    before = sorted(content)[:8]
    epoch(mounted, content, before)
    settled(mounted)
    subprocess.run(["xfs_io", "-x", "-c", "shutdown", str(xfs.path)], check=True)
    for _ in range(3):
        epoch(mounted, content)
    goes_out(mounted)
    settled(mounted)
    assert set(resident(mounted, content).values()) == {"large"}
    assert len(warnings(mounted)) <= 4
    xfs.umount()
    wait_until(lambda: not xfs.is_held(), "no process holds the disk")
    xfs.mount()
    comes_back(mounted)
    assert resident(mounted, content) == dict.fromkeys(content, "large")
    epoch(mounted, content)
    accounts_agree(mounted)


# -- copies that cannot be read --------------------------------------------------------------------


@pytest.mark.fault("T3")
@pytest.mark.promise(4, 8)
def test_a_copy_that_cannot_be_read_is_dropped_and_reported_once(
    slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log(r"tier fast: copy of '00.\.jpg' dropped, and the source read .*EIO")
    content = files(6, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "10MB"}, options=PROBED)
    warmed(mounted, content)
    bad = sorted(content)[:3]
    inodes = "|".join(str((mounted.path / name).stat().st_ino) for name in bad)
    slow_tier.rules(f"err read EIO /({inodes})$")
    with OpenCounter(source) as counter:
        epoch(mounted, content)
        settled(mounted)
        slow_tier.rules()
        epoch(mounted, content)
        settled(mounted)
        # Counted are the readers that continued there, and those that came next.
        assert set(counter.paths()) == set(bad)
        assert counter.count() <= 2 * len(bad)
    assert opens_for(mounted, content) == {}
    report = account(mounted)
    assert report["errors"]["copy-EIO"] == len(bad)
    assert report["tiers"][0]["in_service"]
    assert len(warnings(mounted)) == 1
    accounts_agree(mounted)


@pytest.mark.fault("T3")
@pytest.mark.promise(39)
@pytest.mark.modes("passthrough")
def test_with_passthrough_only_processes_with_the_copy_open_see_that_the_disk_fails(
    slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("dropped")
    content = {"large": contents("large", 8 * MIB)}
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "100MB"}, options=PROBED)
    warmed(mounted, content)
    with (mounted.path / "large").open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        forget_pages(file.fileno())
        assert os.pread(file.fileno(), 4096, 0) == content["large"][:4096]
        slow_tier.rules("err read EIO /copies-")
        with pytest.raises(OSError) as failed:
            os.pread(file.fileno(), MIB, 4 * MIB)
        assert failed.value.errno == errno.EIO
    assert read_through(mounted.path / "large") == content["large"]
    slow_tier.rules()
    wait_until(lambda: not account(mounted)["handles"]["open_files"], "the release arrived")
    epoch(mounted, content)
    settled(mounted)
    accounts_agree(mounted)


@pytest.mark.fault("T3")
@pytest.mark.promise(48)
def test_a_disk_that_cannot_be_read_any_more_takes_no_copies_until_it_can(
    slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("dropped")
    monarch.expects_log("tier fast is out of service: copies there cannot be read")
    content = files(30, 2_000, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers=TIERS, options=PROBED)
    warmed(mounted, content)
    # It takes what is written, and gives nothing back.
    slow_tier.rules("err read EIO /(copies-|stage)")
    epoch(mounted, content)
    goes_out(mounted)
    before = slow_tier.counters()
    # Tried twice, in vain.
    wait_until(lambda: slow_tier.counters()["fsync"] >= before["fsync"] + 2, "it is tried")
    assert not tier(mounted)["in_service"]
    for _ in range(2):
        epoch(mounted, content)
        settled(mounted)
    assert slow_tier.counters()["rename"] == before["rename"]
    assert set(resident(mounted, content).values()) == {"large"}
    assert len(warnings(mounted)) <= 3
    assert not tier(mounted)["in_service"]
    slow_tier.rules()
    comes_back(mounted)
    accounts_agree(mounted)


# -- slow, and not answering -----------------------------------------------------------------------


@pytest.mark.fault("T9")
@pytest.mark.promise(37, 47)
def test_a_tier_that_hangs_while_copies_are_made_blocks_no_reader(
    slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    _hangs_at("write", slow_tier, monarch, tree, source)


@pytest.mark.fault("T9")
@pytest.mark.modes("relay")
@pytest.mark.parametrize("call", ["create", "rename", "*"])
def test_it_is_the_same_wherever_the_copies_hang(
    slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, source: Path, call: str
) -> None:
    _hangs_at(call, slow_tier, monarch, tree, source)


def _hangs_at(
    call: str, slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("tier fast is out of service: no answer within 1 s")
    content = {**files(60, 40_000, step=1), "large": contents("large", 3 * MIB)}
    tree(content)
    options = [*QUICK, "limits.inline_max=64KiB", "limits.buffer_max=256KiB"]
    mounted = monarch.mount(source, tiers=TIERS, options=options)
    with ruled(slow_tier, f"hang {call} /monarch"):
        epoch_elsewhere(mounted, content)
        goes_out(mounted)
        # With all threads and all memory that the one tier may use, the other one continues.
        epoch_elsewhere(mounted, content)
        settled(mounted)
        epoch_elsewhere(mounted, content)
        settled(mounted)
        assert resident(mounted, content) == dict.fromkeys(content, "large")
    comes_back(mounted)
    wait_until(lambda: copies(mounted)["fast"] == {}, "the late copy is gone")
    accounts_agree(mounted)
    assert opens_for(mounted, content) == {}


@pytest.mark.fault("T9")
@pytest.mark.promise(47)
def test_copies_in_a_tier_that_hangs_are_passed_by_and_used_again_when_it_answers(
    slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("tier fast is out of service: no answer within 1 s; reads bypass it")
    # Too many to wait for each of them.
    content = files(60, 2_000, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "10MB"}, options=QUICK)
    warmed(mounted, content)
    with ruled(slow_tier, "hang * ."), OpenCounter(source) as counter:
        # Noticed before a process needs the tier.
        goes_out(mounted)
        epoch_elsewhere(mounted, content)
        assert counter.paths() == dict.fromkeys(content, 1)
    comes_back(mounted)
    assert opens_for(mounted, content) == {}
    accounts_agree(mounted)


@pytest.mark.finding("D7")
@pytest.mark.fault("T9")
@pytest.mark.promise(47)
@pytest.mark.modes("passthrough")
def test_an_open_that_waits_for_a_tier_that_hangs_does_not_hold_up_the_daemon(
    slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    """Python decides opens of a file that has changed, and the kernel is to read its copy."""
    monarch.expects_log("tier fast is out of service: no answer within 1 s|changed at the source")
    tree({"changed": 20_000, "other": 20_000})
    mounted = monarch.mount(source, tiers={"fast": "10MB"}, options=QUICK)
    content = contents("changed since", 30_000)
    (source / "changed").write_bytes(content)
    path = mounted.path / "changed"
    assert path.read_bytes() == content
    settled(mounted)
    assert os.getxattr(path, "user.monarch.tier") == b"fast"
    with ruled(slow_tier, "hang read /monarch"):
        reader = subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE)
        wait_until(lambda: slow_tier.counters()["hanging"] > 0, "its open waits for the tier")
        assert mounted.status()["state"] == "serving"
        assert os.statvfs(mounted.path).f_files > 0
        # Only the watch of the tier releases the reader.
        goes_out(mounted)
        output, _ = reader.communicate(timeout=100)
        assert output == content
    comes_back(mounted)
    wait_until(lambda: mounted.status()["handles"]["open_files"] == 0, "it is closed")


@pytest.mark.fault("T9")
@pytest.mark.promise(47)
def test_a_tier_that_became_slower_than_any_source_is_left_alone(
    slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("tier fast is out of service: (no answer|opens and reads take)")
    content = files(20, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "10MB"}, options=QUICK)
    first = dict(list(content.items())[:5])
    warmed(mounted, first)
    with ruled(slow_tier, "lat * 500"):
        epoch(mounted, first)
        epoch(mounted, content)
        goes_out(mounted)
        assert opens_for(mounted, content) == dict.fromkeys(content, 1)
        # An answer is not enough, if it takes its time.
        slow_tier.rules("lat * 100")
        tried = slow_tier.counters()["fsync"]
        wait_until(lambda: slow_tier.counters()["fsync"] >= tried + 2, "it is tried")
        assert not tier(mounted)["in_service"]
    comes_back(mounted)
    epoch(mounted, content)
    settled(mounted)
    assert opens_for(mounted, content) == {}
    accounts_agree(mounted)


@pytest.mark.fault("T9")
def test_the_mount_ends_though_a_tier_hangs_and_the_next_one_believes_nothing_of_it(
    slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("tier fast is out of service|a tier hangs|dropped")
    content = files(20, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "10MB"}, options=QUICK)
    half = dict(list(content.items())[:10])
    warmed(mounted, half)
    with ruled(slow_tier, "hang * ."):
        epoch_elsewhere(mounted, {name: content[name] for name in content if name not in half})
        mounted.umount()
    again = monarch.mount(source, tiers={"fast": "10MB"}, options=QUICK)
    assert again.stages() == []
    opened = opens_for(again, content)
    assert set(opened) <= set(content) - set(half)
    accounts_agree(again)


EMPTYING = {
    "open": "os.open(sys.argv[1], os.O_WRONLY | os.O_TRUNC)",
    "truncate": "os.truncate(sys.argv[1], 0)",
}


@contextmanager
def emptying(slow_tier: SlowSource, path: Path, how: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that empties a written file waits for the tier."""
    command = [sys.executable, "-c", f"import os, sys; {EMPTYING[how]}", str(path)]
    with ruled(slow_tier, "hang truncate ."), subprocess.Popen(command) as process:
        try:
            wait_until(lambda: slow_tier.counters()["hanging"] > 0, "it waits for the tier")
            yield process
        finally:
            process.kill()
            slow_tier.rules()


@pytest.mark.fault("M8")
@pytest.mark.promise(44)
@pytest.mark.modes("python", "relay", "passthrough")
@pytest.mark.parametrize("how", EMPTYING)
def test_others_write_after_the_last_change_of_a_killed_process(
    slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, how: str
) -> None:
    mounted = monarch.mount(tree({}), tiers={"fast": "64MiB"}, options=["write=absorb"])
    path = mounted.path / "log"
    path.write_bytes(b"written before")
    with emptying(slow_tier, path, how) as process:
        process.kill()
        time.sleep(0.5)
        assert process.poll() is None
        slow_tier.rules()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert path.stat().st_size == 0
        with path.open("r+b") as file:
            file.write(b"after")
    assert path.read_bytes() == b"after"
    mounted.umount()
    assert (mounted.source / "log").read_bytes() == b"after"


@pytest.mark.fault("M8", "T9")
@pytest.mark.promise(44)
@pytest.mark.modes("relay", "passthrough")
@pytest.mark.parametrize("how", EMPTYING)
def test_a_killed_process_ends_while_its_change_hangs_in_the_tier(
    slow_tier: SlowSource, monarch: MonarchCommand, tree: Tree, how: str
) -> None:
    mounted = monarch.mount(tree({}), tiers={"fast": "64MiB"}, options=["write=absorb"])
    path = mounted.path / "log"
    path.write_bytes(b"written before")
    with emptying(slow_tier, path, how) as process:
        process.kill()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert slow_tier.counters()["hanging"] > 0
    wait_until(lambda: path.stat().st_size == 0, "the change is made")
