"""Tiers that are full, read-only, missing or return wrong bytes: the readers never notice."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import (
    OPENS_ARE_REPORTED,
    MonarchCommand,
    Tree,
    contents,
    own_directory,
    require_root,
)
from tests.equipment import disks
from tests.equipment.inotify import OpenCounter
from tests.equipment.slowfs import SlowSource
from tests.mount.observe import (
    account,
    accounts_agree,
    as_a_disk_does,
    asked_for,
    copies,
    copy_of,
    epoch,
    files,
    flip_bit,
    read_through,
    resident,
    settled,
    wait_until,
    warnings,
)

# Where a reader is to find a copy damaged before the scrub does.
NO_SCRUB = "limits.scrub_bandwidth=0"

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB at the path of the tier ``fast``."""
    require_root()
    with disks.in_memory(tmp_path / "tiers" / "fast", 4) as path:
        yield path


# -- full ------------------------------------------------------------------------------------------


@pytest.mark.promise(33)
@pytest.mark.fault("T1")
@pytest.mark.promise(8)
def test_reads_continue_when_another_program_has_filled_the_disk(
    small_disk: Path, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("copy to tier fast given up")
    content = files(20, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "100MB"})
    disks.fill(small_disk)
    for _ in range(3):
        epoch(mounted, content)
    report = settled(mounted)
    assert not report["tiers"][0]["in_service"]
    assert "tier fast" in report["health"]["why"]
    assert len(warnings(mounted)) <= 3
    accounts_agree(mounted)


@pytest.mark.fault("T1")
@pytest.mark.promise(8)
def test_a_copy_that_runs_out_of_space_half_way_leaves_nothing_behind(
    slow: SlowSource, small_disk: Path, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("copy to tier fast given up")
    large = contents("large", 3 * MIB)
    tree({"large": large, "small": 10_000})
    mounted = monarch.mount(slow.path, tiers={"fast": "100MB"}, options=["limits.inline_max=64KiB"])
    slow.rules("hang read large")
    with asked_for(mounted, "large"):
        stages = own_directory(small_disk) / "stage"
        wait_until(lambda: list(stages.iterdir()) != [], "the copy has begun")
        disks.fill(small_disk)
        slow.rules()
        wait_until(lambda: not account(mounted)["tiers"][0]["in_service"], "the tier is out")
    assert read_through(mounted.path / "large") == large
    assert read_through(mounted.path / "small") == contents("small", 10_000)
    accounts_agree(mounted)
    assert copies(mounted) == {"fast": {}}
    assert len(warnings(mounted)) <= 3


@pytest.mark.fault("T1")
@pytest.mark.promise(48)
def test_a_full_tier_takes_copies_again_when_there_is_room(
    small_disk: Path, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    # A copy notices it, or the probe of the tier before any copy does, which logs nothing.
    monarch.allows_log("copy to tier fast given up")
    content = files(20, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "100MB"}, options=["limits.tier_probe=1s"])
    filler = disks.fill(small_disk)
    epoch(mounted, content)
    assert not settled(mounted)["tiers"][0]["in_service"]
    filler.unlink()
    wait_until(lambda: account(mounted)["tiers"][0]["in_service"] is True, "in service again")
    assert account(mounted)["health"]["state"] == "ok"
    epoch(mounted, content)
    settled(mounted)
    assert set(resident(mounted, content)) == set(content)
    accounts_agree(mounted)


@pytest.mark.fault("T1")
@pytest.mark.promise(8)
def test_a_second_tier_takes_what_a_full_one_cannot(
    small_disk: Path, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("copy to tier fast given up")
    content = files(20, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "100MB", "large": "100MB"})
    disks.fill(small_disk)
    epoch(mounted, content)
    settled(mounted)
    epoch(mounted, content)
    settled(mounted)
    assert resident(mounted, content) == dict.fromkeys(content, "large")
    accounts_agree(mounted)


# -- cannot be written, vanished -------------------------------------------------------------------


@pytest.mark.fault("T2")
@pytest.mark.promise(8, 48)
def test_a_tier_that_cannot_be_written_is_out_of_service_and_still_serves_its_copies(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("copy to tier fast given up")
    content = files(20, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source)
    before, after = sorted(content)[:5], sorted(content)[5:]
    epoch(mounted, content, before)
    settled(mounted)
    # As on a file system that went read-only: nothing can be made there.
    (own_directory(mounted.tiers["fast"]) / "stage").rmdir()
    with OpenCounter(source) as counter:
        for _ in range(3):
            epoch(mounted, content)
        assert set(counter.paths()) == set(after)
    report = settled(mounted)
    assert not report["tiers"][0]["in_service"]
    assert len(warnings(mounted)) <= 3
    accounts_agree(mounted)


@pytest.mark.fault("T2")
@pytest.mark.promise(7, 8)
def test_a_tier_removed_under_the_daemon_is_a_miss_and_the_end_is_clean(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("dropped")
    monarch.expects_log("given up")
    content = files(20, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source)
    epoch(mounted, content)
    settled(mounted)
    shutil.rmtree(mounted.tiers["fast"])
    for _ in range(2):
        epoch(mounted, content)
    report = settled(mounted)
    assert report["tiers"][0]["used"] == report["residency"]["files"] == 0
    assert len(warnings(mounted)) <= 4
    mounted.umount()
    assert "Traceback" not in mounted.log_text
    again = monarch.mount(source)
    epoch(again, content)
    settled(again)
    assert set(resident(again, content)) == set(content)
    accounts_agree(again)


def test_a_tier_on_a_read_only_file_system_is_refused_in_one_line(
    small_disk: Path, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files(3, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "1MB"})
    mounted.umount()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    refused = monarch(
        *("mount", str(source), str(mounted.path), "--tier", f"{small_disk}:1MB"),
        *("--state", str(mounted.state)),
        check=False,
    )
    assert refused.returncode == 6
    assert str(small_disk) in refused.stderr
    assert "Read-only" in refused.stderr
    assert "Traceback" not in refused.stderr
    monarch.expects_log("Read-only")


# -- copies that were tampered with ----------------------------------------------------------------


@pytest.mark.fault("T4", "T5")
@pytest.mark.promise(4, 8)
def test_a_copy_that_was_deleted_or_cut_short_is_a_miss(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("tier fast: copy of .* dropped")
    content = files(8, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source)
    epoch(mounted, content)
    settled(mounted)
    copy_of(mounted, "001.jpg").unlink()
    os.truncate(copy_of(mounted, "002.jpg"), 100)
    os.truncate(copy_of(mounted, "003.jpg"), 1_000_000)
    broken = {"001.jpg", "002.jpg", "003.jpg"}
    with OpenCounter(source) as counter:
        epoch(mounted, content)
        settled(mounted)
        epoch(mounted, content)
        assert counter.paths() == dict.fromkeys(broken, 1)
    assert resident(mounted, content) == dict.fromkeys(content, "fast")
    for name in broken:
        assert copy_of(mounted, name).read_bytes() == content[name]
    accounts_agree(mounted)


@pytest.mark.modes("python", "relay", "no_open")
def test_a_copy_cut_short_while_it_is_read_is_read_on_at_the_source(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("tier fast: copy of .* dropped")
    content = {"large": contents("large", 2 * MIB)}
    tree(content)
    mounted = monarch.mount(source)
    epoch(mounted, content)
    settled(mounted)
    with (mounted.path / "large").open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(file.fileno(), 4096, 0) == content["large"][:4096]
        os.truncate(copy_of(mounted, "large"), 4096)
        assert os.pread(file.fileno(), MIB, MIB) == content["large"][MIB:]
    wait_until(lambda: not account(mounted)["handles"]["open_files"], "the release arrived")
    epoch(mounted, content)
    settled(mounted)
    assert copy_of(mounted, "large").read_bytes() == content["large"]
    accounts_agree(mounted)


@pytest.mark.fault("T4")
@pytest.mark.promise(3, 4)
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_with_verify_open_a_flipped_bit_is_found_and_the_file_fetched_anew(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("digest")
    content = files(6, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source, options=["verify=open"])
    epoch(mounted, content)
    settled(mounted)
    # In the mount that made the copy, and in the next one.
    for name in ("002.jpg", "004.jpg"):
        flip_bit(copy_of(mounted, name), 1234)
        with OpenCounter(source) as counter:
            epoch(mounted, content)
            settled(mounted)
            assert counter.paths() == {name: 1}
        assert copy_of(mounted, name).read_bytes() == content[name]
        accounts_agree(mounted)
        mounted.umount()
        mounted = monarch.mount(source, options=["verify=open"])


@pytest.mark.fault("T4")
@pytest.mark.promise(3, 4)
def test_after_an_unclean_end_every_copy_is_verified_before_it_is_used(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("digest")
    content = files(12, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source, options=[NO_SCRUB])
    epoch(mounted, content)
    settled(mounted)
    flipped, zeroed = copy_of(mounted, "003.jpg"), copy_of(mounted, "007.jpg")
    mounted.kill()
    flip_bit(flipped, 19_000)
    # What a power cut may leave: the name, the size and the times, but no bytes.
    with as_a_disk_does(zeroed):
        zeroed.write_bytes(bytes(zeroed.stat().st_size))
    again = monarch.mount(source, options=[NO_SCRUB])
    with OpenCounter(source) as counter:
        epoch(again, content)
        settled(again)
        epoch(again, content)
        assert counter.paths() == {"003.jpg": 1, "007.jpg": 1}
    accounts_agree(again)


@pytest.mark.fault("T5")
def test_files_without_a_record_are_removed_from_a_tier_at_start(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files(5, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source)
    epoch(mounted, content)
    settled(mounted)
    mounted.umount()
    own = own_directory(mounted.tiers["fast"])
    (generation,) = own.glob("copies-*")
    strangers = [
        own / "stage" / "99.part",
        generation / "c7" / "7000007",
        own / "copies-of-an-older-snapshot" / "03" / "3",
    ]
    # Names that Monarch does not give belong to files of others.
    theirs = [
        mounted.tiers["fast"] / "not-ours",
        own / "not-ours",
        generation / "02" / "not-a-number",
        generation / "07" / "0000007",
        generation / "ab",
        generation / "03" / "directory" / "file",
        own / "stage" / "directory" / "file",
        own / "stage" / "notes",
        own / "copies-of-an-older-snapshot" / "03" / "deep" / "3",
        own / "copies-that-is-a-file",
    ]
    for path in [*strangers, *theirs]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"planted")
    again = monarch.mount(source)
    wait_until(lambda: not any(map(os.path.lexists, strangers)), "the strangers are gone")
    assert {path.read_bytes() for path in theirs} == {b"planted"}
    with OpenCounter(source) as counter:
        epoch(again, content)
        assert counter.count() == 0
    for path in theirs:
        path.unlink()
    accounts_agree(again)


def test_a_daemon_without_a_free_descriptor_keeps_its_copies(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("Too many open files")
    content = files(3, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source)
    epoch(mounted, content)
    settled(mounted)
    before = resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    with pytest.raises(OSError) as short:
        read_through(mounted.path / "001.jpg")
    assert short.value.errno == errno.EMFILE
    resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE, before)
    with OpenCounter(source) as counter:
        epoch(mounted, content)
        assert counter.count() == 0
    accounts_agree(mounted)


@pytest.mark.promise(7)
def test_an_emptied_tier_is_filled_again_by_readers(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files(600, 1000, step=1)
    tree(content)
    mounted = monarch.mount(source, options=[NO_SCRUB])
    epoch(mounted, content)
    settled(mounted)
    mounted.umount()
    for directory in own_directory(mounted.tiers["fast"]).glob("copies-*/*"):
        shutil.rmtree(directory)
    # A reader may open a copy before the mount has found that it is missing.
    monarch.allows_log("copy of .* dropped, and the source read instead: No such file")
    again = monarch.mount(source, options=[NO_SCRUB])
    epoch(again, content)
    wait_until(lambda: len(resident(again, content)) == len(content), "all are back")
    time.sleep(0.5)  # longer than a sweep
    settled(again)
    assert set(resident(again, content)) == set(content)
    accounts_agree(again)


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """The tier ``fast`` on an overlay file system, as the root of a container is."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount an overlay")
    path = tmp_path / "tiers" / "fast"
    parts = {name: tmp_path / "overlay" / name for name in ("lowerdir", "upperdir", "workdir")}
    for directory in (path, *parts.values()):
        directory.mkdir(parents=True)
    options = ",".join(f"{name}={directory}" for name, directory in parts.items())
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.modes("passthrough")
def test_a_tier_that_the_kernel_does_not_pass_through_is_relayed_and_status_says_so(
    overlay: Path, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files(5, 20_000, step=1)
    tree(content)
    mounted = monarch.mount(source)
    for _ in range(2):
        epoch(mounted, content)
        settled(mounted)
    report = account(mounted)
    assert "ELOOP" in report["mode"]["why"]
    assert report["tiers"][0]["opens"] == 5
    with (mounted.path / next(iter(content))).open("rb") as file:
        assert file.read()
        handles = account(mounted)["handles"]
        assert (handles["open_files"], handles["backing_ids"]) == (1, 0), "the daemon reads it"
