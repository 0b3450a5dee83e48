"""The scrub finds damaged copies before the job reads them."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import trio

from monarch.daemon.scrub import Scrub
from monarch.placement.residency import Residency
from monarch.posix.thread_pool import ThreadPool
from monarch.text import GiB, MiB
from monarch.tiers.ownership import Owner
from monarch.tiers.records import Record, Records
from monarch.tiers.tier import Tier
from monarch.tiers.verify import GOOD, Step, Verdict, verify_copy
from monarch.types import Identity, Ino
from tests.conftest import MonarchCommand, Mounted, Tree, contents
from tests.equipment import slowfs
from tests.equipment.slowfs import SlowSource
from tests.mount.observe import (
    account,
    accounts_agree,
    copy_of,
    epoch,
    flip_bit,
    forget_pages,
    read_through,
    settled,
    wait_until,
)

# A round costs a GiB of this at least: four rounds a second.
QUICK = "limits.scrub_bandwidth=4GiB"


def decay(copy: Path, offset: int = 0) -> None:
    """A bit flips on the disk: no time of the file shows it."""
    before = copy.stat()
    flip_bit(copy, offset)
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))


def found(mounted: Mounted) -> int:
    number: int = account(mounted)["scrub"]["found"]
    return number


def wait_for_more_found(mounted: Mounted, before: int) -> None:
    wait_until(lambda: found(mounted) > before, "the scrub finds it")


def rounds_pass(mounted: Mounted, count: int) -> None:
    now = account(mounted)["scrub"]["rounds"]
    wait_until(lambda: account(mounted)["scrub"]["rounds"] >= now + count, "the scrub goes round")


@pytest.mark.fault("T4")
@pytest.mark.promise(46)
def test_a_flipped_bit_that_no_seal_shows_is_found_and_never_served_again(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("tier fast: copy of .*large.* dropped.*: found by scrub: its bytes differ")
    content = {"large": contents("large", 3 * MiB), "small": contents("small", 30_000)}
    tree(content)
    mounted = monarch.mount(source, options=["limits.inline_max=1MiB", QUICK])
    epoch(mounted, content)
    settled(mounted)
    decay(copy_of(mounted, "large"), 2 * MiB + 17)
    wait_until(lambda: found(mounted) == 1, "the scrub finds it")
    epoch(mounted, content)
    settled(mounted)
    epoch(mounted, content)
    assert mounted.xattr("large") == "fast"
    rounds_pass(mounted, 2)
    assert found(mounted) == 1
    report = account(mounted)["scrub"]
    assert report["enabled"] and report["bytes"] > 3 * MiB and report["last_round_ns"] > 0
    accounts_agree(mounted)


@pytest.mark.fault("T4")
@pytest.mark.promise(46)
def test_wrong_bytes_that_were_read_already_are_not_read_again_from_memory(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("copy of .*f.* dropped.*: found by scrub")
    content = contents("f", 200_000)
    tree({"f": content})
    # It is not fetched whole, for then the kernel is given the right bytes for those that it has.
    mounted = monarch.mount(
        source, options=["limits.inline_max=4KiB", "limits.scrub_bandwidth=1GiB"]
    )
    file = mounted.path / "f"
    wrong = content
    while wrong == content:
        # The scrub may be faster than this reader.
        read_through(file)
        settled(mounted)
        before = found(mounted)
        decay(copy_of(mounted, "f"), 100_000)
        wrong = file.read_bytes()
        wait_for_more_found(mounted, before)
    wait_until(lambda: file.read_bytes() == content, "the right bytes are back")
    for _ in range(3):
        assert file.read_bytes() == content
    accounts_agree(mounted)


@pytest.mark.fault("T4")
@pytest.mark.promise(46)
@pytest.mark.modes("python", "relay", "no_open")
def test_a_process_with_a_damaged_copy_open_continues_at_the_source(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("copy of .*f.* dropped")
    content = contents("f", 2 * MiB)
    tree({"f": content})
    mounted = monarch.mount(source, options=["limits.inline_max=4KiB", QUICK])
    assert read_through(mounted.path / "f") == content
    settled(mounted)
    with (mounted.path / "f").open("rb", buffering=0) as file:
        assert file.read(4096) == content[:4096]
        decay(copy_of(mounted, "f"), MiB + 1)
        wait_until(lambda: found(mounted) == 1, "the scrub finds it")
        forget_pages(file.fileno())
        assert file.read(2 * MiB) == content[4096:]


@pytest.mark.fault("T4", "T5")
@pytest.mark.promise(46)
def test_missing_truncated_and_swapped_copies_are_found_before_an_open(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("dropped.*: found by scrub")
    content = {name: contents(name, 20_000) for name in ("cut", "gone", "swapped", "fifo", "good")}
    tree(content)
    mounted = monarch.mount(source, options=[QUICK])
    epoch(mounted, content)
    settled(mounted)
    os.truncate(copy_of(mounted, "cut"), 100)
    copy_of(mounted, "gone").unlink()
    swapped = copy_of(mounted, "swapped")
    swapped.unlink()
    swapped.write_bytes(contents("other", 20_000))
    fifo = copy_of(mounted, "fifo")
    fifo.unlink()
    os.mkfifo(fifo)
    wait_until(lambda: found(mounted) >= 4, "the scrub finds them")
    epoch(mounted, content)
    settled(mounted)
    accounts_agree(mounted)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SlowSource]:
    """The disk below the tier ``fast``. Name it before ``monarch``: it must outlive the mount."""
    reason = slowfs.unavailable()
    if reason:
        pytest.skip(reason)
    (tmp_path / "disk").mkdir()
    with SlowSource(tmp_path / "disk", tmp_path / "tiers" / "fast") as slowed:
        yield slowed


@pytest.mark.fault("T3")
@pytest.mark.promise(46)
def test_a_copy_with_a_read_error_is_found_before_an_open(
    disk: SlowSource, monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    monarch.expects_log("copy of 'large' dropped.*: found by scrub: Input/output error")
    content = {"large": contents("large", 3 * MiB), "small": contents("small", 30_000)}
    tree(content)
    mounted = monarch.mount(source, options=["limits.inline_max=1MiB", QUICK])
    epoch(mounted, content)
    settled(mounted)
    rounds_pass(mounted, 1)
    # One that was in memory needs no disk.
    with copy_of(mounted, "large").open("rb") as copy:
        forget_pages(copy.fileno())
    disk.rules(f"bad {2 * MiB} /{(mounted.path / 'large').stat().st_ino}$")
    wait_until(lambda: found(mounted) == 1, "the scrub finds it")
    with (mounted.path / "large").open("rb") as file:
        assert file.read() == content["large"]
    disk.rules()
    settled(mounted)
    epoch(mounted, content)
    accounts_agree(mounted)


@pytest.mark.promise(46)
def test_a_touched_copy_with_the_right_bytes_is_sealed_again(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    tree({"f": 20_000})
    mounted = monarch.mount(source, options=[QUICK])
    read_through(mounted.path / "f")
    settled(mounted)
    copy = copy_of(mounted, "f")
    before = copy.stat()
    os.utime(copy)
    wait_until(lambda: copy.stat().st_mtime_ns == before.st_mtime_ns, "it is sealed again")
    assert copy_of(mounted, "f").stat().st_ino == before.st_ino
    assert found(mounted) == 0


@pytest.mark.promise(46)
@pytest.mark.modes("auto")
def test_without_a_bandwidth_nothing_is_scrubbed(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    tree({"f": 20_000})
    mounted = monarch.mount(source, options=["limits.scrub_bandwidth=0"])
    read_through(mounted.path / "f")
    settled(mounted)
    report = account(mounted)["scrub"]
    assert not report["enabled"] and report["bytes"] == 0


# -- without a mount -------------------------------------------------------------------------------


class FakeCopies:
    """What the scrub does with copies."""

    def __init__(self) -> None:
        self.confirmed: list[Ino] = []
        self.dropped: list[Ino] = []

    def confirm(self, ino: Ino, record: Record) -> None:
        self.confirmed.append(ino)

    async def drop_damaged(self, ino: Ino, tier: int, error: OSError) -> bool:
        self.dropped.append(ino)
        return True


class FakeParts:
    """What the scrub does with partial copies: the tier has none of them."""

    @property
    def accounts(self) -> FakeParts:
        return self

    def inos(self, tier: int) -> list[Ino]:
        return []


def filled_tier(directory: Path, sizes: list[int]) -> tuple[Tier, Records, Residency]:
    tier = Tier(1, "fast", directory / "tier", owner=Owner("mount", "test"))
    tier.use("g")
    (directory / "state").mkdir()
    records = Records(directory / "state", "g", [tier.id])
    residency = Residency(len(sizes))
    for ino, size in enumerate(sizes, start=1):
        identity = Identity(size, ino, ino, ino)
        with tier.stage(Ino(ino)) as staged:
            for piece in range(0, size, MiB):
                staged.append(os.urandom(min(MiB, size - piece)))
            digest = staged.commit(identity)
        records.put(Ino(ino), Record(1, identity, digest))
    residency.load(np.arange(1, len(sizes) + 1), 1)
    return tier, records, residency


def test_the_scrub_keeps_to_its_bandwidth(tmp_path: Path) -> None:
    sizes = [3 * MiB, 0, 20_000, 5 * MiB + 3]
    tier, records, residency = filled_tier(tmp_path, sizes)
    copies = FakeCopies()
    took = []

    async def go() -> None:
        scrub = Scrub(
            tiers=[tier],
            is_read=lambda number: True,
            records=records,
            residency=residency,
            copies=copies,
            parts=FakeParts(),
            threads=ThreadPool(1, "scrub", abandon=True),
            bandwidth=MiB,
        )
        before = trio.current_time()
        for start in (1, 3):
            await scrub.go_round(Ino(start))
        took.append(trio.current_time() - before)
        report = scrub.report()
        assert report.bytes == 2 * sum(sizes)
        assert (report.rounds, report.done_files, report.total_files) == (2, 4, 4)

    trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0.01))
    assert copies.dropped == []
    # A round costs a GiB at least, of which the first piece may come at once.
    assert took == [pytest.approx((2 * GiB - MiB) / MiB)]
    records.close(clean=True)
    tier.close()


def test_bytes_are_paid_for_one_piece_at_a_time(tmp_path: Path) -> None:
    tier, records, residency = filled_tier(tmp_path, [8 * MiB])
    paid: list[tuple[float, int]] = []

    async def go() -> None:
        scrub = Scrub(
            tiers=[tier],
            is_read=lambda number: True,
            records=records,
            residency=residency,
            copies=FakeCopies(),
            parts=FakeParts(),
            threads=ThreadPool(1, "scrub", abandon=True),
            bandwidth=MiB,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scrub.go_round, Ino(1))
            while scrub.report().done_files == 0:
                await trio.sleep(1)
                paid.append((trio.current_time(), scrub.report().bytes))
            nursery.cancel_scope.cancel()

    trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0.01))
    begun = paid[0][0] - 1
    assert all(nbytes <= (now - begun + 2) * MiB for now, nbytes in paid)
    records.close(clean=True)
    tier.close()


def in_memory(path: Path) -> list[bool]:
    """Which pages of a file the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        vector = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(start))
        assert libc.mincore(address, ctypes.c_size_t(len(mapped)), vector) == 0
        del start
        return [bool(page & 1) for page in vector]


def test_a_look_leaves_in_memory_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    tier, records, _ = filled_tier(tmp_path, [8 * MiB])
    tier.sync()
    (copy,) = tmp_path.glob("tier/monarch/*/copies-g/*/*")
    with copy.open("rb", buffering=0) as file:
        forget_pages(file.fileno())
        if any(in_memory(copy)):
            pytest.skip("this file system keeps all its pages")
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(2 * MiB)
    before = in_memory(copy)
    assert any(before) and not all(before)
    record = records.get(Ino(1))
    assert record is not None
    verdicts: list[Verdict] = []

    def steps() -> Iterator[Step]:
        copy = tier.directory, Ino(1), record
        verdicts.append((yield from verify_copy(*copy, seals=tier.seals, whole=True)))

    assert sum(step.nbytes for step in steps()) == 8 * MiB
    assert verdicts == [GOOD]
    assert in_memory(copy) == before
    records.close(clean=True)
    tier.close()
