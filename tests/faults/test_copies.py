"""Copies that a user or the disk has changed: reads always return the right bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Mounted, Tree, contents
from tests.equipment.inotify import OpenCounter
from tests.mount.observe import (
    account,
    accounts_agree,
    as_a_disk_does,
    copies,
    copy_of,
    epoch,
    flip_bit,
    read_through,
    resident,
    settled,
    wait_until,
)

SIZE = 20_000
# One above the size up to which a file is fetched whole.
LARGE = 100_000
OPTIONS = ["limits.inline_max=64KiB", "limits.scrub_bandwidth=0"]


def files() -> dict[str, bytes]:
    """Small and large ones, of two sizes only: their copies can take each other's place."""
    small = {f"{number}.jpg": contents(str(number), SIZE) for number in range(6)}
    return small | {f"{number}.bin": contents(str(number), LARGE) for number in range(4)}


def filled(monarch: MonarchCommand, source: Path, content: Mapping[str, bytes]) -> Mounted:
    mounted = monarch.mount(source, options=OPTIONS)
    for _ in range(2):
        # A large file's first reader may be faster than its copy.
        epoch(mounted, content)
        settled(mounted)
    assert set(resident(mounted, content)) == set(content)
    return mounted


def swap(one: Path, other: Path) -> None:
    aside = one.parent / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def wrong_ones_are_fetched_anew(
    mounted: Mounted, source: Path, content: Mapping[str, bytes], wrong: set[str]
) -> None:
    with OpenCounter(source) as counter:
        epoch(mounted, content)
        settled(mounted)
        assert set(counter.paths()) == wrong
    with OpenCounter(source) as counter:
        epoch(mounted, content)
        assert counter.count() == 0
    for name in wrong:
        assert copy_of(mounted, name).read_bytes() == content[name]
    accounts_agree(mounted)


@pytest.mark.fault("T5")
@pytest.mark.promise(45)
def test_copies_swapped_by_hand_are_never_served_for_one_another(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("tier fast: copy of .* dropped")
    content = files()
    tree(content)
    mounted = filled(monarch, source, content)
    swap(copy_of(mounted, "1.jpg"), copy_of(mounted, "2.jpg"))
    swap(copy_of(mounted, "1.bin"), copy_of(mounted, "2.bin"))
    swapped = {"1.jpg", "2.jpg", "1.bin", "2.bin"}
    wrong_ones_are_fetched_anew(mounted, source, content, swapped)
    places = [(copy_of(mounted, "3.jpg"), copy_of(mounted, "4.jpg"))]
    places += [(copy_of(mounted, "3.bin"), copy_of(mounted, "0.bin"))]
    mounted.umount()
    for one, other in places:
        swap(one, other)
    again = monarch.mount(source, options=OPTIONS)
    wrong_ones_are_fetched_anew(again, source, content, {"3.jpg", "4.jpg", "3.bin", "0.bin"})


@pytest.mark.fault("T5")
@pytest.mark.promise(45)
def test_a_copy_with_changed_bytes_is_fetched_again_and_one_with_changed_times_is_kept(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("tier fast: copy of .* dropped")
    content = files()
    tree(content)
    mounted = filled(monarch, source, content)
    copy_of(mounted, "1.jpg").write_bytes(bytes(SIZE))
    copy_of(mounted, "1.bin").write_bytes(bytes(LARGE))
    os.utime(copy_of(mounted, "2.jpg"))
    os.utime(copy_of(mounted, "2.bin"))
    wrong_ones_are_fetched_anew(mounted, source, content, {"1.jpg", "1.bin"})


@pytest.mark.fault("T5")
def test_files_planted_at_the_path_of_a_copy_are_never_served(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files()
    tree(content)
    mounted = monarch.mount(source, options=OPTIONS)
    (generation,) = mounted.tiers["fast"].glob("monarch/*/copies-*")
    planted = {}
    for name, kind in (("1.jpg", "file"), ("2.jpg", "fifo"), ("1.bin", "file")):
        ino = (mounted.path / name).stat().st_ino
        planted[name] = generation / f"{ino & 0xFF:02x}" / str(ino)
        planted[name].parent.mkdir()
        if kind == "fifo":
            os.mkfifo(planted[name])
        else:
            planted[name].write_bytes(bytes(len(content[name])))
    for _ in range(2):
        epoch(mounted, content)
        settled(mounted)
    for name, path in planted.items():
        assert path.read_bytes() == content[name]
    accounts_agree(mounted)


@pytest.mark.fault("T5")
def test_a_fifo_in_the_place_of_a_copy_blocks_no_reader(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("tier fast: copy of .* dropped")
    content = {"other": b"other"}
    if monarch.mode != "no_open":
        # With `open: none` no process requests a file without bytes.
        content["empty"] = b""
    tree(content)
    mounted = monarch.mount(source)
    epoch(mounted, content)
    settled(mounted)
    for name in content:
        place = copy_of(mounted, name)
        place.unlink()
        os.mkfifo(place)
    epoch(mounted, content)
    settled(mounted)
    for name in content:
        assert copy_of(mounted, name).read_bytes() == content[name]


@pytest.mark.fault("T5")
def test_copies_deleted_while_nothing_was_mounted_are_a_miss_and_are_not_counted(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files()
    tree(content)
    mounted = filled(monarch, source, content)
    gone = {"1.jpg", "2.bin"}
    places = [copy_of(mounted, name) for name in gone]
    mounted.umount()
    for place in places:
        place.unlink()
    again = monarch.mount(source, options=OPTIONS)
    wait_until(
        lambda: int(account(again)["residency"]["files"]) == len(content) - len(gone),
        "the missing ones are known",
    )
    accounts_agree(again)
    wrong_ones_are_fetched_anew(again, source, content, gone)


@pytest.mark.fault("T4", "T6")
@pytest.mark.promise(50)
def test_copies_truncated_by_a_power_cut_are_not_counted_even_without_a_read(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files()
    tree(content)
    mounted = filled(monarch, source, content)
    short = {name: copy_of(mounted, name) for name in ("1.jpg", "2.bin")}
    mounted.kill()
    for place in short.values():
        with as_a_disk_does(place):
            os.truncate(place, 0)
    again = monarch.mount(source, options=OPTIONS)
    wait_until(
        lambda: int(account(again)["residency"]["files"]) == len(content) - len(short),
        "the short ones are known",
    )
    accounts_agree(again)
    assert not set(short.values()) & set(copies(again)["fast"].values())
    wrong_ones_are_fetched_anew(again, source, content, set(short))


@pytest.mark.fault("T4")
@pytest.mark.promise(3, 4)
@pytest.mark.modes("python", "relay")
def test_a_copy_that_a_crash_left_is_compared_once_and_believed_from_then_on(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("digest")
    content = files()
    tree(content)
    mounted = filled(monarch, source, content)
    flipped = copy_of(mounted, "1.jpg")
    mounted.kill()
    flip_bit(flipped, 100)
    again = monarch.mount(source, options=OPTIONS)
    wrong_ones_are_fetched_anew(again, source, content, {"1.jpg"})
    again.umount()
    # Copies that were not verified are verified by the next mount; verified ones are used.
    clean = monarch.mount(source, options=OPTIONS)
    with OpenCounter(source) as counter:
        epoch(clean, content)
        assert counter.count() == 0
    accounts_agree(clean)


@pytest.mark.fault("T4", "T5")
@pytest.mark.modes("python", "relay")
def test_on_a_tier_that_keeps_no_exact_times_copies_are_served_and_sizes_still_count(
    coarse_disk: Path, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("tier fast: copy of .* dropped")
    content = files()
    tree(content)
    mounted = filled(monarch, source, content)
    assert "copies have no seal" in mounted.log_text
    os.truncate(copy_of(mounted, "1.jpg"), 100)
    wrong_ones_are_fetched_anew(mounted, source, content, {"1.jpg"})
    mounted.umount()
    again = monarch.mount(source, options=OPTIONS)
    with OpenCounter(source) as counter:
        epoch(again, content)
        assert counter.count() == 0
    assert read_through(again.path / "2.bin") == content["2.bin"]
    accounts_agree(again)
