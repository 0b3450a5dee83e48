"""A mount finds the copies of the previous mount, after a clean end or a kill."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import EITHER_SIDE, OPENS_ARE_REPORTED, MonarchCommand, Mounted, Tree, contents
from tests.equipment.inotify import OpenCounter
from tests.mount.command import not_mounted
from tests.mount.observe import (
    account,
    accounts_agree,
    copies,
    epoch,
    read_through,
    resident,
    settled,
    wait_until,
)

TIERS = {"fast": "200000", "large": "10MB"}


def files(count: int = 30, size: int = 20_000) -> dict[str, bytes]:
    names = [f"class{number % 3}/{number:03d}.jpg" for number in range(count)]
    return {name: contents(name, size + 3 * number) for number, name in enumerate(names)}


def filled(
    monarch: MonarchCommand, source: Path, content: dict[str, bytes], tiers: dict[str, str]
) -> Mounted:
    """A mount with everything resident."""
    mounted = monarch.mount(source, tiers=tiers)
    epoch(mounted, content)
    settled(mounted)
    assert set(resident(mounted, content)) == set(content)
    return mounted


def nothing_is_asked_or_copied_again(
    mounted: Mounted, source: Path, content: dict[str, bytes]
) -> None:
    with OpenCounter(source) as counter:
        assert set(resident(mounted, content)) == set(content)
        epoch(mounted, content)
        report = settled(mounted)
        assert counter.count() == 0
    assert report["copies"]["done"] == 0
    assert report["source_totals"]["opens"] == 0
    if report["mode"]["open"] == "open":
        assert report["epochs"][-1]["hits"] == len(content)
    accounts_agree(mounted)


# -- after a clean end -----------------------------------------------------------------------------


def test_a_restart_finds_every_copy_and_copies_nothing_again(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files()
    tree(content)
    where = resident(filled(monarch, source, content, TIERS), content)
    for _ in range(2):
        monarch.mounted[-1].umount()
        again = monarch.mount(source, tiers=TIERS)
        assert resident(again, content) == where
        nothing_is_asked_or_copied_again(again, source, content)


def test_copies_are_found_again_after_a_refresh_that_renumbers_the_files(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files()
    tree(content)
    os.link(source / "class1/001.jpg", source / "class1/link.jpg")
    content["class1/link.jpg"] = content["class1/001.jpg"]
    mounted = filled(monarch, source, content, TIERS)
    before = (mounted.path / "class1/001.jpg").stat().st_ino
    mounted.umount()
    tree({f"000-first/{number}": 1000 for number in range(7)})
    monarch("snapshot", "refresh", str(source), str(mounted.state / "snapshot.lmdb"))
    again = monarch.mount(source, tiers=TIERS)
    assert (again.path / "class1/001.jpg").stat().st_ino != before
    nothing_is_asked_or_copied_again(again, source, content)
    assert read_through(again.path / "000-first/3") == contents("000-first/3", 1000)


def test_a_file_that_changed_before_a_refresh_is_not_found_again(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files()
    tree(content)
    filled(monarch, source, content, TIERS).umount()
    changed = {"class0/000.jpg": b"other", "class1/004.jpg": contents("new", 20_012)}
    tree(changed)
    again = monarch.mount(source, tiers=TIERS, arguments=["--refresh"])
    assert set(resident(again, content)) == set(content) - set(changed)
    with OpenCounter(source) as counter:
        epoch(again, content | changed)
        assert counter.paths() == dict.fromkeys(changed, 1)
    accounts_agree(again)


def test_copies_are_found_again_when_the_snapshot_was_deleted(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files()
    tree(content)
    mounted = filled(monarch, source, content, TIERS)
    mounted.umount()
    for path in mounted.state.glob("snapshot.lmdb*"):
        path.unlink()
    again = monarch.mount(source, tiers=TIERS)
    nothing_is_asked_or_copied_again(again, source, content)


def test_tiers_may_change_their_order(monarch: MonarchCommand, tree: Tree, source: Path) -> None:
    content = files()
    tree(content)
    mounted = filled(monarch, source, content, TIERS)
    where = resident(mounted, content)
    mounted.umount()
    again = monarch.mount(source, tiers=dict(reversed(TIERS.items())))
    assert resident(again, content) == where
    nothing_is_asked_or_copied_again(again, source, content)


def test_a_tier_that_is_no_longer_named_is_a_miss_and_may_come_back_empty(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files()
    tree(content)
    mounted = filled(monarch, source, content, TIERS)
    where = resident(mounted, content)
    mounted.umount()
    again = monarch.mount(source, tiers={"large": TIERS["large"]})
    kept = {name for name, tier in where.items() if tier == "large"}
    assert set(resident(again, content)) == kept
    with OpenCounter(source) as counter:
        epoch(again, content)
        assert counter.paths() == dict.fromkeys(set(content) - kept, 1)
    accounts_agree(again)
    again.umount()
    both = monarch.mount(source, tiers=TIERS)
    wait_until(lambda: copies(both)["fast"] == {}, "what no record knows is gone")
    nothing_is_asked_or_copied_again(both, source, content)


def test_a_tier_made_smaller_keeps_what_still_fits(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files()
    tree(content)
    mounted = filled(monarch, source, content, {"fast": "10MB"})
    mounted.umount()
    again = monarch.mount(source, tiers={"fast": "300000"})
    report = account(again)["tiers"][0]
    assert 0 < report["used"] <= report["capacity"] == 300_000
    accounts_agree(again)
    kept = set(resident(again, content))
    with OpenCounter(source) as counter:
        epoch(again, content)
        assert counter.paths() == dict.fromkeys(set(content) - kept, 1)
    accounts_agree(again)


@pytest.mark.modes(*OPENS_ARE_REPORTED)
@pytest.mark.parametrize(("before", "after"), [(50_000, 900), (900, 50_000), (900, 900)])
def test_a_copy_of_a_version_that_the_snapshot_does_not_know_is_not_believed(
    monarch: MonarchCommand, tree: Tree, source: Path, before: int, after: int
) -> None:
    monarch.expects_log("changed at the source since the snapshot")
    old, new = contents("old", before), contents("new", after)
    tree({"changing": old, "other": b"o"})
    # A check of the source at each mount would hide it.
    mounted = monarch.mount(source, options=["snapshot.freshness=never"])
    epoch(mounted, {"changing": old})
    settled(mounted)
    monarch("evict", str(mounted.path), "changing")
    tree({"changing": new})
    epoch(mounted, {"changing": new})
    settled(mounted)
    assert mounted.xattr("changing") == "fast"
    mounted.umount()
    for freshness in ("never", "mount"):
        again = monarch.mount(source, options=[f"snapshot.freshness={freshness}"])
        epoch(again, {"changing": new, "other": b"o"})
        accounts_agree(again)
        again.umount()


# -- after an unclean end --------------------------------------------------------------------------


def _read_until_it_dies(
    mounted: Mounted, content: dict[str, bytes], seed: int
) -> Callable[[], None]:
    wrong: list[str] = []

    def read() -> None:
        chosen = random.Random(seed)
        while True:
            name = chosen.choice(list(content))
            try:
                if read_through(mounted.path / name) != content[name]:
                    wrong.append(name)
            except OSError:
                return

    reader = threading.Thread(target=read)
    reader.start()

    def join() -> None:
        reader.join(60)
        assert not reader.is_alive(), "a reader hangs on a dead mount"
        assert wrong == []

    return join


@pytest.mark.fault("T6", "M2")
@pytest.mark.promise(50)
def test_a_daemon_killed_under_load_leaves_nothing_that_the_next_one_believes_wrongly(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files(120) | {f"large{number}": contents(str(number), 700_000) for number in range(6)}
    tree(content)
    options = ["limits.inline_max=64KiB"]
    tiers = {"fast": "1MB", "large": "10MB"}
    for seed, copied in enumerate((5, 40)):
        mounted = monarch.mount(source, tiers=tiers, options=options)
        # The first daemon may have made most of the copies before it was killed.
        copied = min(copied, len(content) - len(resident(mounted, content)))
        joins = [_read_until_it_dies(mounted, content, 10 * seed + n) for n in range(3)]

        def far(mounted: Mounted = mounted, copied: int = copied) -> bool:
            return int(account(mounted)["copies"]["done"]) >= copied

        wait_until(far, "copies were made")
        mounted.kill()
        for join in joins:
            join()
    again = monarch.mount(source, tiers=tiers, options=options)
    warm = len(resident(again, content))
    assert warm >= 40
    with OpenCounter(source) as counter:
        epoch(again, content)
        assert counter.count() == len(content) - warm
    accounts_agree(again)


# -- two daemons -----------------------------------------------------------------------------------


@pytest.mark.fault("T7")
@pytest.mark.modes(*EITHER_SIDE)
def test_a_second_daemon_on_one_state_directory_is_refused_with_the_pid_of_the_first(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    tree({"file": 1000})
    first = monarch.mount(source)
    second = monarch.directory / "second"
    second.mkdir()
    refused = not_mounted(
        *(monarch, second, "mount", str(source), str(second)),
        *("--state", str(first.state), "--tier", f"{monarch.directory / 'tier2'}:1MB"),
    )
    assert refused.returncode == 7
    assert str(first.pid) in refused.stderr
    assert str(first.path) in refused.stderr
    assert "Traceback" not in refused.stderr
    epoch(first, {"file": contents("file", 1000)})


@pytest.mark.fault("T7")
@pytest.mark.modes(*EITHER_SIDE)
def test_the_lock_of_a_dead_daemon_is_taken_over(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    tree({"file": 1000})
    monarch.mount(source).kill()
    again = monarch.mount(source)
    epoch(again, {"file": contents("file", 1000)})


@pytest.mark.modes(*EITHER_SIDE)
def test_a_source_that_is_not_there_yet_costs_neither_the_snapshot_nor_the_copies(
    monarch: MonarchCommand, tree: Tree, source: Path, tmp_path: Path
) -> None:
    content = files()
    tree(content)
    mounted = filled(monarch, source, content, TIERS)
    mounted.umount()
    source.rename(tmp_path / "elsewhere")
    source.mkdir()
    arguments = ["mount", str(source), str(mounted.path), "--state", str(mounted.state)]
    for name, size in TIERS.items():
        arguments += ["--tier", f"{mounted.tiers[name]}:{size}"]
    refused = monarch(*arguments, check=False)
    monarch.expects_log("is empty, but its snapshot has")
    assert refused.returncode == 4
    assert "mount its file system" in refused.stderr
    source.rmdir()
    (tmp_path / "elsewhere").rename(source)
    nothing_is_asked_or_copied_again(monarch.mount(source, tiers=TIERS), source, content)


@pytest.mark.modes(*EITHER_SIDE)
def test_a_refused_mount_leaves_nothing_at_a_source_that_is_not_mounted(
    monarch: MonarchCommand, tree: Tree, source: Path, tmp_path: Path
) -> None:
    tree(files(1))
    mounted = monarch.mount(source, tiers=TIERS, options=["write=absorb"])
    mounted.umount()
    source.rename(tmp_path / "elsewhere")
    source.mkdir()
    arguments = ["mount", str(source), str(mounted.path), "--state", str(mounted.state)]
    for name, size in TIERS.items():
        arguments += ["--tier", f"{mounted.tiers[name]}:{size}"]
    refused = monarch(*arguments, "-o", "write=absorb", check=False)
    monarch.expects_log("is empty, but its snapshot has")
    assert refused.returncode == 4
    assert os.listdir(source) == []


@pytest.mark.modes(*EITHER_SIDE)
def test_a_source_that_was_emptied_is_mounted_on_demand(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files(5)
    tree(content)
    filled(monarch, source, content, TIERS).umount()
    for name in content:
        (source / name).unlink()
    for directory in {str(Path(name).parent) for name in content}:
        (source / directory).rmdir()
    again = monarch.mount(source, tiers=TIERS, arguments=["--refresh"])
    assert os.listdir(again.path) == []
    wait_until(lambda: not any(copies(again).values()), "the copies are removed")
