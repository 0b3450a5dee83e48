"""``monarch fsck`` finds every kind of damage by its name, and mends it."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monarch.checks.findings import KINDS
from monarch.checks.fsck import check_state
from monarch.control.client import call
from monarch.control.registry import Registry
from monarch.tiers.records import Record, Records
from monarch.types import Ino
from tests.conftest import MonarchCommand, Mounted, Tree, contents, own_directory
from tests.faults.test_scrub import decay
from tests.mount.command import ordinary_user
from tests.mount.observe import (
    account,
    accounts_agree,
    copies,
    copy_of,
    epoch,
    read_through,
    settled,
)

# Only fsck searches for damage.
ALONE = ["limits.scrub_bandwidth=0", "limits.inline_max=64KiB"]
TIERS = {"fast": "10MiB", "large": "10MiB"}

NAMES = (
    *("gone", "cut", "rotten", "touched", "link", "fifo", "other version", "moved", "torn", "good"),
    *("d/deep", "large"),
)


def the_files() -> dict[str, bytes]:
    return {name: contents(name, 200_000 if name == "large" else 20_000) for name in NAMES}


def fsck(
    monarch: MonarchCommand, place: Path, *options: str, code: int | None = None
) -> dict[str, Any]:
    """The command line, with the exit code that it must have."""
    done = monarch("fsck", str(place), "--json", *options, check=False)
    assert code is None or done.returncode == code, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def check(mounted: Mounted, *, repair: bool = False) -> dict[str, Any]:
    """The same of a mount that is served or not, with digests, and without another process."""
    socket = mounted.state / "control.sock"
    if socket.exists():
        return call(socket, "fsck", {"digests": True, "repair": repair}, timeout=60)
    return check_state(
        mounted.state,
        registry=Registry(Path(mounted.cli.environment()["MONARCH_STATE_ROOT"])),
        digests=True,
        repair=repair,
        progress=lambda progress: None,
    ).to_dict()


def found(report: dict[str, Any]) -> set[tuple[str, str]]:
    """The kind of each finding, and the last part of the path that it names."""
    return {(finding["kind"], finding["path"].split("/")[-1]) for finding in report["findings"]}


def filled(monarch: MonarchCommand, tree: Tree, source: Path) -> tuple[Mounted, dict[str, bytes]]:
    content = the_files()
    tree(content)
    mounted = monarch.mount(source, tiers=TIERS, options=ALONE)
    epoch(mounted, content)
    settled(mounted)
    epoch(mounted, content)
    return mounted, content


def records_file(mounted: Mounted) -> Path:
    (path,) = mounted.state.glob("residency-*")
    return path


def damage(mounted: Mounted, files: dict[str, Path], inos: dict[str, int]) -> set[tuple[str, str]]:
    """Do to copies, records and stages what disks and people do; what fsck must say of it."""
    files["gone"].unlink()
    os.truncate(files["cut"], 100)
    decay(files["rotten"], 777)
    os.utime(files["touched"])
    files["link"].unlink()
    files["link"].symlink_to(files["good"])
    files["fifo"].unlink()
    os.mkfifo(files["fifo"])
    own = own_directory(mounted.tiers["large"])
    (generation,) = own.glob("copies-*")
    there = generation / files["moved"].parent.name
    there.mkdir(mode=0o700, exist_ok=True)
    files["moved"].rename(there / files["moved"].name)
    with records_file(mounted).open("r+b") as file:
        file.seek(4096 + 64 * inos["torn"] + 45)
        file.write(b"?")
    (generation / "somebody's").write_bytes(b"x")
    (there / "01").mkdir()
    (own / "copies-unknown").mkdir(mode=0o700)
    (own / "copies-unknown/00").mkdir()
    (own / "copies-unknown/00/256").write_bytes(b"x")
    (own / "stage/9999.part").write_bytes(b"x")
    return {
        ("copy-missing", "gone"),
        ("copy-size", "cut"),
        ("copy-digest", "rotten"),
        ("copy-seal", "touched"),
        ("copy-unreadable", "link"),
        ("copy-size", "fifo"),
        ("copy-missing", "moved"),
        ("copy-tier", "moved"),
        ("record-torn", "torn"),
        ("copy-unknown", "somebody's"),
        ("copy-unknown", "01"),
        ("stage", "9999.part"),
    }


def as_they_lie(mounted: Mounted) -> tuple[dict[str, Path], dict[str, int]]:
    files = {name: copy_of(mounted, name) for name in NAMES}
    return files, {name: int(path.name) for name, path in files.items()}


def everything(mounted: Mounted) -> set[tuple[str, int, int, int]]:
    """All that lies in the state directory and the tiers, with modes, sizes and times."""
    roots = [mounted.state, *mounted.tiers.values()]
    paths = [path for root in roots for path in [root, *root.rglob("*")]]
    return {
        (str(path), status.st_mode, status.st_size, status.st_mtime_ns)
        for path in paths
        # A lock says who has it.
        if path.name not in ("lock", "daemon.log")
        for status in [path.lstat()]
        if not path.is_dir() or path.name != "stage"
    }


@pytest.mark.fault("T4", "T5")
@pytest.mark.promise(53)
@pytest.mark.modes("auto")
def test_fsck_without_a_daemon_finds_and_repairs_every_damage(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    mounted, content = filled(monarch, tree, source)
    files, inos = as_they_lie(mounted)
    mounted.umount()
    report = check(mounted)
    assert (report["findings"], report["problems"], report["served"]) == ([], 0, False)
    assert report["files"] == len(NAMES)
    assert report["bytes"] == sum(map(len, content.values()))

    expected = damage(mounted, files, inos)
    tell_another_version(mounted, inos["other version"])
    expected |= {("copy-version", "other version"), ("copy-unknown", "copies-unknown")}
    (mounted.tiers["fast"] / "monarch").chmod(0o755)
    mounted.state.chmod(0o750)
    expected |= {("directory-mode", "monarch"), ("directory-mode", mounted.state.name)}
    (mounted.state / "snapshot.lmdb.123.part").write_bytes(b"x")
    (own_directory(mounted.tiers["fast"]) / "tier.part").write_bytes(b"x")
    expected |= {("stage", "snapshot.lmdb.123.part"), ("stage", "tier.part")}

    before = everything(mounted)
    # Without the digests a rotten copy looks good.
    report = fsck(monarch, mounted.state, code=1)
    assert found(report) == expected - {("copy-digest", "rotten")}
    report = fsck(monarch, mounted.state, "--digests", code=1)
    assert found(report) == expected
    assert report["repaired"] == 0
    assert everything(mounted) == before

    # The source need not be there to mend copies of it.
    source.rename(source.with_name("away"))
    report = fsck(monarch, mounted.state, "--digests", "--repair", code=0)
    # With its record cleared, the copy in the other tier has no record there.
    moved = ("copy-unknown", files["moved"].name)
    assert found(report) == expected - {("copy-tier", "moved")} | {moved}
    assert report["repaired"] == report["problems"] == len(expected)
    assert check(mounted)["findings"] == []
    source.with_name("away").rename(source)

    mounted = monarch.mount(source, tiers=TIERS, options=ALONE)
    epoch(mounted, content)
    settled(mounted)
    epoch(mounted, content)
    accounts_agree(mounted)
    assert check(mounted)["findings"] == []


def tell_another_version(mounted: Mounted, ino: int) -> None:
    """Record a copy as one of a version that the snapshot does not know."""
    ids = [
        json.loads((own_directory(path) / "tier.json").read_text())["id"]
        for path in mounted.tiers.values()
    ]
    generation = records_file(mounted).name.removeprefix("residency-")
    records = Records(mounted.state, generation, ids)
    record = records.get(Ino(ino))
    assert record is not None
    other = replace(record.identity, ctime_ns=record.identity.ctime_ns + 1)
    records.put(Ino(ino), Record(record.tier, other, record.digest))
    records.close(clean=True)


@pytest.mark.fault("T4", "T5")
@pytest.mark.promise(53)
def test_every_damage_to_a_mount_that_is_served_is_found_and_mended(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("copy of .* dropped.*: found by fsck: ")
    mounted, content = filled(monarch, tree, source)
    report = check(mounted)
    assert (report["findings"], report["problems"], report["served"]) == ([], 0, True)
    assert report["files"] == len(NAMES)
    files, inos = as_they_lie(mounted)
    expected = damage(mounted, files, inos)
    with records_file(mounted).open("r+b") as file:
        file.seek(4096 + 64 * inos["d/deep"])
        file.write(b"\0")
    expected |= {("record-lost", "deep")}
    (mounted.tiers["fast"] / "monarch").chmod(0o755)
    expected |= {("directory-mode", "monarch"), ("copy-unknown", "copies-unknown")}

    report = fsck(monarch, mounted.path, "--digests", code=1)
    assert found(report) == expected | {("accounts", "fast")}
    report = check(mounted, repair=True)
    assert report["repaired"] == report["problems"] >= len(expected) - 1
    assert check(mounted)["findings"] == []
    epoch(mounted, content)
    settled(mounted)
    epoch(mounted, content)
    accounts_agree(mounted)
    assert check(mounted)["findings"] == []


@pytest.mark.promise(53)
def test_fsck_finds_nothing_wrong_with_copies_that_come_and_go_meanwhile(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = {f"{number:03}": contents(str(number), 30_000) for number in range(150)}
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "2MiB"}, options=["placement.policy=lru"])
    enough = threading.Event()

    def read() -> None:
        while not enough.is_set():
            epoch(mounted, content)

    with ThreadPoolExecutor(1) as others:
        reader = others.submit(read)
        try:
            for _ in range(8):
                assert check(mounted)["findings"] == []
        finally:
            enough.set()
        reader.result()
    accounts_agree(mounted)


@pytest.mark.promise(53)
@pytest.mark.modes("auto")
def test_a_damaged_records_file_and_a_damaged_snapshot_are_removed_and_made_anew(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    mounted, content = filled(monarch, tree, source)
    mounted.umount()
    with records_file(mounted).open("r+b") as file:
        file.write(b"?" * 16)
    report = check(mounted, repair=True)
    assert {kind for kind, _ in found(report)} == {"records-file", "copy-unknown"}
    assert check(mounted)["findings"] == []
    assert copies(mounted) == {"fast": {}, "large": {}}
    mounted = monarch.mount(source, tiers=TIERS, options=ALONE)
    epoch(mounted, content)
    settled(mounted)
    mounted.umount()

    snapshot = mounted.state / "snapshot.lmdb"
    whole = snapshot.read_bytes()
    place = whole.index(b"other version")
    snapshot.write_bytes(whole[:place] + b"O" + whole[place + 1 :])
    assert {kind for kind, _ in found(check(mounted))} == {"snapshot"}
    check(mounted, repair=True)
    assert not snapshot.exists()
    assert check(mounted)["findings"] == []
    mounted = monarch.mount(source, tiers=TIERS, options=ALONE)
    report = account(mounted)
    # The copies are those of before: only the names were lost.
    assert report["residency"]["files"] == len(NAMES)
    epoch(mounted, content)
    accounts_agree(mounted)


@pytest.mark.promise(53)
@pytest.mark.modes("auto")
def test_fsck_finds_the_state_of_a_killed_daemon_by_its_mount_point_and_repairs_it(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    mounted, content = filled(monarch, tree, source)
    mounted.kill()
    report = fsck(monarch, mounted.path, code=1)
    assert {kind for kind, _ in found(report)} == {"registry", "mount-dead"}
    assert not report["served"]
    fsck(monarch, mounted.path, "--repair", code=0)
    # The registry does not know the mount point any more.
    assert fsck(monarch, mounted.state, code=0)["findings"] == []
    mounted = monarch.mount(source, tiers=TIERS, options=ALONE)
    epoch(mounted, content)
    accounts_agree(mounted)


@pytest.mark.promise(53)
@pytest.mark.modes("auto")
def test_a_state_directory_of_its_own_place_is_found_by_its_mount_point(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    tree({"f": 1000})
    state = Path(monarch.environment()["MONARCH_STATE_ROOT"]) / "mine"
    mounted = monarch.mount(source, state=state)
    read_through(mounted.path / "f")
    settled(mounted)
    mounted.umount()
    report = fsck(monarch, mounted.path, code=0)
    assert (report["state"], report["files"]) == (str(state), 1)
    note = state / "mount.json"
    assert note.stat().st_mode & 0o777 == 0o600
    assert json.loads(note.read_text())["source"] == str(source)


@pytest.mark.promise(53)
@pytest.mark.modes("auto")
def test_a_tier_that_is_not_there_keeps_its_records(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    mounted, content = filled(monarch, tree, source)
    mounted.umount()
    tier = mounted.tiers["fast"]
    tier.rename(tier.with_name("unplugged"))
    report = fsck(monarch, mounted.state, "--repair", code=1)
    assert {kind for kind, _ in found(report)} == {"tier-gone"}
    tier.with_name("unplugged").rename(tier)
    (own_directory(tier) / "notes.txt").write_text("mine")
    assert found(check(mounted, repair=True)) == {("stranger", "notes.txt")}
    (own_directory(tier) / "notes.txt").unlink()
    assert check(mounted)["findings"] == []
    mounted = monarch.mount(source, tiers=TIERS, options=ALONE)
    assert account(mounted)["residency"]["files"] == len(content)


@pytest.mark.modes("auto")
def test_a_tier_whose_copies_were_removed_is_in_order(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    mounted, content = filled(monarch, tree, source)
    mounted.umount()
    tier = mounted.tiers["fast"]
    monarch("evict", "--tier", str(tier), "--all")
    assert fsck(monarch, mounted.state, "--repair", code=0)["findings"] == []
    # What belongs to no copy is checked all the same.
    written = tier / "monarch/absorbed-0"
    written.mkdir(mode=0o700)
    (written / "journal.part").write_bytes(b"half")
    assert found(check(mounted)) == {("stage", "journal.part"), ("journal", "absorbed-0")}
    shutil.rmtree(written)
    # An unplugged disk leaves an empty directory.
    shutil.rmtree(tier / "monarch")
    assert {kind for kind, _ in found(check(mounted))} == {"tier-gone"}
    mounted = monarch.mount(source, tiers=TIERS, options=ALONE)
    epoch(mounted, content)
    settled(mounted)
    assert account(mounted)["residency"]["files"] == len(content)
    mounted.umount()
    assert check(mounted)["findings"] == []


@pytest.mark.fault("T7")
@pytest.mark.promise(53)
@pytest.mark.modes("auto")
def test_a_directory_in_use_is_refused_and_its_user_named(
    monarch: MonarchCommand, tree: Tree, source: Path, tmp_path: Path
) -> None:
    tree({"f": 1000})
    mounted = monarch.mount(source)
    done = monarch("fsck", str(mounted.state), "--repair", check=False)
    assert done.returncode == 7
    assert f"in use by pid {mounted.pid} ({mounted.path})" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    # Another mount's state, which names this one's tier.
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    shutil.copy(mounted.state / "mount.json", other)
    shutil.copy(records_file(mounted), other)
    done = monarch("fsck", str(other), check=False)
    assert done.returncode == 7
    assert f"pid {mounted.pid}" in done.stderr


@pytest.mark.fault("I2", "T8")
@pytest.mark.promise(53)
@pytest.mark.modes("auto")
def test_a_path_without_mount_and_state_directory_is_reported_in_one_line(
    monarch: MonarchCommand, tmp_path: Path
) -> None:
    for text, code, words in (
        (None, 9, "neither a Monarch mount nor a state directory"),
        ("{", 6, "mount.json cannot be read"),
        ("[]", 6, "mount.json cannot be read"),
        ('{"version": 99}', 6, "is of version 99, this Monarch knows 1"),
        ('{"version": 1}', 6, "mount.json cannot be read"),
    ):
        directory = tmp_path / f"state-{len(text or '')}"
        directory.mkdir()
        if text is not None:
            (directory / "mount.json").write_text(text)
        done = monarch("fsck", str(directory), "--repair", check=False)
        assert (done.returncode, len(done.stderr.splitlines())) == (code, 1), done.stderr
        assert words in done.stderr
        assert {path.name for path in directory.iterdir()} <= {"mount.json"}


@pytest.mark.fault("T8")
@pytest.mark.modes("auto")
def test_a_mount_refuses_the_state_of_a_newer_version_and_leaves_it(
    monarch: MonarchCommand, tree: Tree, source: Path, tmp_path: Path
) -> None:
    tree({"f": 1000})
    state, mountpoint = tmp_path / "state", tmp_path / "mnt"
    state.mkdir(mode=0o700)
    mountpoint.mkdir()
    (state / "mount.json").write_text('{"version": 2}')
    arguments = ("mount", str(source), str(mountpoint), "--state", str(state))
    done = monarch(*arguments, "--tier", str(tmp_path / "tier"), check=False)
    assert done.returncode == 6
    assert "is of version 2, this Monarch knows 1" in done.stderr
    assert (state / "mount.json").read_text() == '{"version": 2}'
    assert {path.name for path in state.iterdir()} == {"lock", "mount.json"}
    (state / "mount.json").write_text("damaged")
    mounted = monarch.mount(source)
    assert json.loads((mounted.state / "mount.json").read_text())["version"] == 1


@pytest.mark.promise(53)
@pytest.mark.modes("auto")
def test_a_person_reads_what_is_wrong_and_what_was_done(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    tree({"a\nname": 1000, "b": 2000})
    mounted = monarch.mount(source, options=ALONE)
    for name in ("a\nname", "b"):
        read_through(mounted.path / name)
    settled(mounted)
    copy = copy_of(mounted, "a\nname")
    mounted.umount()
    good = monarch("fsck", str(mounted.state)).stdout
    assert good == "2 copies checked: nothing is wrong\n"
    copy.unlink()
    wrong = monarch("fsck", str(mounted.state), check=False)
    assert wrong.returncode == 1
    assert re.search(r"^wrong .*fast: a\\nname: it is recorded, but missing", wrong.stdout)
    assert "--repair: its record is cleared" in wrong.stdout
    mended = monarch("fsck", str(mounted.state), "--repair")
    assert re.search(r"^repaired .*a\\nname", mended.stdout)
    assert "1 problem, all repaired" in mended.stdout


@pytest.mark.fault("Security")
@pytest.mark.promise(53)
@pytest.mark.modes("auto")
def test_an_ordinary_user_checks_only_mounts_of_that_user(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    tree({"f": 1000})
    theirs = monarch.mount(source)
    theirs.umount()
    with ordinary_user(monarch.case) as user:
        own, mountpoint, tier = user.mkdir("source"), user.mkdir("mnt"), user.mkdir("tier")
        state = user.mkdir("state")
        (own / "f").write_bytes(b"x" * 1000)
        done = user("mount", str(own), str(mountpoint), "--state", str(state), "--tier", str(tier))
        assert done.returncode == 0, done.stderr
        try:
            user("warm", str(mountpoint), "--wait")
            served = user("fsck", str(mountpoint), "--digests", "--json")
            assert json.loads(served.stdout)["files"] == 1, served.stderr
        finally:
            user("umount", str(mountpoint))
        idle = user("fsck", str(state), "--digests")
        assert (idle.returncode, "1 copy checked" in idle.stdout) == (0, True), idle.stderr
        refused = user("fsck", str(theirs.state))
        assert refused.returncode in (6, 9)
        assert len(refused.stderr.splitlines()) == 1


def test_every_kind_of_finding_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    section = text[text.index("## Something looks wrong: fsck") :]
    report = set(re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE))
    assert report == set(KINDS)
