"""Large files that are read in parts: what reaches the source, and the bytes of the readers.

The oracles: a random read brings the granule that it needs and no more, a file that is read from
its start is copied as a whole, and all readers get the bytes of the source.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest

from monarch.tiers.partial import GRANULE, Layout
from tests.conftest import EVERY_MODE, MonarchCommand, Mounted
from tests.equipment.slowfs import SlowSource
from tests.mount.observe import account, copy_of, forget_pages, read_through, settled, wait_until

MIB = 1 << 20
SIZE = 24 * MIB - 1000
# Before it the reads do not decide how the file is copied.
FROM = 8 * MIB
OPTIONS = ["limits.range_min=16MiB", "limits.scrub_bandwidth=0"]
TIER = {"fast": "64MiB"}
BYTES = np.random.default_rng(11).bytes(SIZE)


def put_big(source: Path) -> None:
    (source / "big").write_bytes(BYTES)
    # Its version is not young, so nothing is checked again.
    os.utime(source / "big", ns=(10**18 + 1, 10**18 + 1))


def offsets(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(FROM // 4096, SIZE // 4096) * 4096 for _ in range(count)]


def touched(places: Sequence[int]) -> int:
    """The bytes of the granules of 4 KiB reads there."""
    return GRANULE * len({place // GRANULE for place in places})


def read_at(path: Path, places: Sequence[int]) -> None:
    """One open, and 4 KiB at each place: none from the pages of the kernel, and none ahead."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        forget_pages(fd)
        for place in places:
            assert os.pread(fd, 4096, place) == BYTES[place : place + 4096], place
        forget_pages(fd)
    finally:
        os.close(fd)


def read_and_release(mounted: Mounted, places: Sequence[int]) -> None:
    """As ``read_at``, until the daemon has got the release, and all is stored."""
    read_at(mounted.path / "big", places)
    wait_until(lambda: account(mounted)["handles"]["open_files"] == 0, "the file is released")
    settled(mounted)


def partial(report: dict[str, Any]) -> tuple[int, int]:
    return report["tiers"][0]["parts"], report["tiers"][0]["part_bytes"]


def of_source(mounted: Mounted) -> int:
    """The bytes that the daemon has read from the source."""
    return int(settled(mounted)["source_totals"]["bytes"])


@pytest.mark.promise(210)
@pytest.mark.modes("relay", "no_open")
def test_random_reads_bring_the_granules_that_they_touch_once(
    slow: SlowSource, monarch: MonarchCommand, source: Path
) -> None:
    put_big(source)
    mounted = monarch.mount(slow.path, tiers=TIER, options=OPTIONS)
    places = offsets(25)
    before = slow.counters()["read_bytes"]
    read_at(mounted.path / "big", places)
    report = settled(mounted)
    got = slow.counters()["read_bytes"] - before
    assert got <= 1.1 * touched(places)
    files, held = partial(report)
    assert files == 1 and touched(places) <= held <= got + Layout(SIZE).overhead
    assert report["tiers"][0]["used"] == held and report["residency"]["files"] == 0
    before = slow.counters()["read_bytes"]
    read_at(mounted.path / "big", places)
    assert slow.counters()["read_bytes"] == before
    # A mount after a clean end has them, too, and so has one after a crash.
    for end in (Mounted.umount, Mounted.kill):
        end(mounted)
        mounted = monarch.mount(slow.path, tiers=TIER, options=OPTIONS)
        assert partial(account(mounted)) == (files, held)
        before = slow.counters()["read_bytes"]
        read_at(mounted.path / "big", places)
        assert slow.counters()["read_bytes"] == before
    assert account(mounted)["errors"] == {}


@pytest.mark.modes(*EVERY_MODE)
def test_all_readers_get_the_bytes_of_the_source_until_the_copy_is_whole(
    monarch: MonarchCommand, source: Path
) -> None:
    put_big(source)
    mounted = monarch.mount(source, tiers=TIER, options=OPTIONS)
    path = mounted.path / "big"
    wrong: list[str] = []

    def by_pread(seed: int, flags: int = 0) -> None:
        rng = random.Random(seed)
        fd = os.open(path, os.O_RDONLY | flags)
        # O_DIRECT needs memory of whole pages.
        with mmap.mmap(-1, MIB) as room:
            for _ in range(40):
                place = rng.randrange(SIZE // 4096) * 4096
                size = rng.choice((4096, 64 << 10, 300 << 10, MIB)) // 4096 * 4096
                got = os.preadv(fd, [memoryview(room)[:size]], place)
                if room[:got] != BYTES[place : place + size]:
                    wrong.append(f"{flags} {place} {size} {got}")
        os.close(fd)

    def by_mmap(seed: int) -> None:
        rng = random.Random(seed)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as room:
            for _ in range(60):
                place = rng.randrange(SIZE)
                if room[place : place + 500] != BYTES[place : place + 500]:
                    wrong.append(f"mmap {place}")

    with path.open("rb", buffering=0) as keep:
        # Kept open, so that all share one partial copy.
        os.pread(keep.fileno(), 10, SIZE - 10)
        threads = [
            threading.Thread(target=by_pread, args=(1,)),
            threading.Thread(target=by_pread, args=(2, os.O_DIRECT)),
            threading.Thread(target=by_mmap, args=(3,)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        # The rest, in order: then the copy has all.
        assert read_through(path) == BYTES
    # The kernel sends the last release after the close; without opens a visit must end first.
    wait_until(lambda: account(mounted)["residency"]["files"] == 1, "the copy is whole")
    assert partial(account(mounted)) == (0, 0)
    assert account(mounted)["tiers"][0]["used"] == SIZE
    assert copy_of(mounted, "big").read_bytes() == BYTES
    assert of_source(mounted) <= 1.02 * SIZE
    assert read_through(path) == BYTES
    assert of_source(mounted) <= 1.02 * SIZE


@pytest.mark.promise(211)
@pytest.mark.modes("relay")
def test_a_file_that_is_read_from_its_start_is_copied_behind_its_reader(
    monarch: MonarchCommand, source: Path, slow: SlowSource
) -> None:
    put_big(source)
    mounted = monarch.mount(slow.path, tiers=TIER, options=OPTIONS)
    assert read_through(mounted.path / "big") == BYTES
    report = settled(mounted)
    assert report["residency"]["files"] == 1 and report["source_totals"]["copy"]["bytes"] == SIZE
    # The copy reads from the page cache of the source's client.
    assert slow.counters()["read_bytes"] <= 1.02 * SIZE


@pytest.mark.modes("auto")
def test_switched_off_the_whole_file_is_copied(monarch: MonarchCommand, source: Path) -> None:
    put_big(source)
    mounted = monarch.mount(source, tiers=TIER, options=[*OPTIONS, "foresight.parts=false"])
    read_at(mounted.path / "big", [FROM])
    assert settled(mounted)["residency"]["files"] == 1


@pytest.mark.modes("relay")
def test_fsck_and_evict_know_partial_copies(monarch: MonarchCommand, source: Path) -> None:
    put_big(source)
    monarch.expects_log("partial copy of 'big' dropped.*found by fsck")
    mounted = monarch.mount(source, tiers=TIER, options=OPTIONS)
    places = [10 * MIB, 12 * MIB]
    read_and_release(mounted, places)
    monarch("fsck", str(mounted.path), "--digests")
    (path,) = mounted.tiers["fast"].rglob("parts/*")
    with path.open("r+b") as file:
        file.seek(12 * MIB)
        file.write(b"rotten")
    assert monarch("fsck", str(mounted.path), "--digests", check=False).returncode != 0
    monarch("fsck", str(mounted.path), "--digests", "--repair", check=False)
    monarch("fsck", str(mounted.path), "--digests")
    assert partial(settled(mounted)) == (0, 0) and not path.exists()
    read_and_release(mounted, places)
    # Without a daemon.
    mounted.umount()
    monarch("fsck", str(mounted.state), "--digests")
    os.truncate(path, 100)
    assert monarch("fsck", str(mounted.state), check=False).returncode != 0
    monarch("fsck", str(mounted.state), "--repair", check=False)
    assert not path.exists()
    mounted = monarch.mount(source, tiers=TIER, options=OPTIONS)
    read_and_release(mounted, places)
    monarch("evict", str(mounted.path))
    assert account(mounted)["tiers"][0]["used"] == 0 and not path.exists()
    read_and_release(mounted, places)
    monarch("warm", str(mounted.path), "--wait")
    assert account(mounted)["residency"]["files"] == 1
    assert partial(account(mounted)) == (0, 0)


@pytest.mark.modes("relay")
def test_lmdb_hdf5_and_zip_read_what_they_need(monarch: MonarchCommand, source: Path) -> None:
    rng = np.random.default_rng(5)
    values = [rng.bytes(50_000) for _ in range(400)]
    with lmdb.open(str(source / "db"), map_size=64 * MIB, subdir=False, lock=False) as database:
        with database.begin(write=True) as transaction:
            for number, value in enumerate(values):
                transaction.put(b"%06d" % number, value)
    array = rng.integers(0, 1 << 60, (4000, 640))
    with h5py.File(source / "array.h5", "w") as file:
        file["x"] = array
    with zipfile.ZipFile(source / "files.zip", "w") as archive:
        for number, value in enumerate(values):
            archive.writestr(f"{number}.bin", value)
    mounted = monarch.mount(source, tiers={"fast": "100MiB"}, options=OPTIONS)
    numbers = random.Random(2).sample(range(400), 20)
    for _ in range(2):
        with lmdb.open(
            str(mounted.path / "db"), readonly=True, subdir=False, lock=False, readahead=False
        ) as database:
            with database.begin() as transaction:
                for number in numbers:
                    assert transaction.get(b"%06d" % number) == values[number]
        with h5py.File(mounted.path / "array.h5", "r") as file:
            for number in numbers:
                assert (file["x"][10 * number] == array[10 * number]).all()
        with zipfile.ZipFile(mounted.path / "files.zip") as archive:
            for number in numbers:
                assert archive.read(f"{number}.bin") == values[number]
    report = settled(mounted)
    assert partial(report)[0] == 3
    whole = sum((source / name).stat().st_size for name in ("db", "array.h5", "files.zip"))
    assert report["source_totals"]["bytes"] < whole * 3 // 5


@pytest.mark.promise(210)
@pytest.mark.modes("relay", "passthrough")
def test_an_lmdb_of_twice_the_tier_is_read_from_the_share_that_fits(
    monarch: MonarchCommand, source: Path
) -> None:
    rng = np.random.default_rng(6)
    values = [rng.bytes(100_000) for _ in range(400)]
    with lmdb.open(str(source / "db"), map_size=64 * MIB, subdir=False, lock=False) as database:
        with database.begin(write=True) as transaction:
            for number, value in enumerate(values):
                transaction.put(b"%06d" % number, value)
    size = (source / "db").stat().st_size
    tier = size // 2
    mounted = monarch.mount(source, tiers={"fast": str(tier)}, options=OPTIONS)

    def read_all(seed: int) -> int:
        """Reads all values in a random order; returns the bytes read at the source."""
        before = of_source(mounted)
        order = random.Random(seed).sample(range(400), 400)
        with lmdb.open(
            str(mounted.path / "db"), readonly=True, subdir=False, lock=False, readahead=False
        ) as database:
            with database.begin() as transaction:
                for number in order:
                    assert transaction.get(b"%06d" % number) == values[number]
        fd = os.open(mounted.path / "db", os.O_RDONLY)
        forget_pages(fd)
        os.close(fd)
        wait_until(lambda: account(mounted)["handles"]["open_files"] == 0, "the file is released")
        return of_source(mounted) - before

    first, *later = (read_all(seed) for seed in range(3))
    report = settled(mounted)
    files, held = partial(report)
    assert files == 1 and tier // 2 < held == report["tiers"][0]["used"] <= tier
    assert first <= 1.02 * size
    # Whole blocks of the file, always the same.
    assert later == [size - (held - Layout(size).overhead)] * 2


@pytest.mark.promise(210)
@pytest.mark.modes("relay")
def test_the_client_of_the_source_reads_nothing_ahead_that_the_tier_has(
    slow: SlowSource, monarch: MonarchCommand, source: Path
) -> None:
    put_big(source)
    mounted = monarch.mount(slow.path, tiers={"fast": "13MiB"}, options=OPTIONS)

    def read_from(places: Sequence[int]) -> int:
        before = slow.counters()["read_bytes"]
        read_and_release(mounted, places)
        return slow.counters()["read_bytes"] - before

    # The eleventh granule and those behind it, of each block: the tier has three blocks of six.
    blocks = range(0, SIZE, 4 * MIB)
    behind = [block + granule * GRANULE for block in blocks for granule in (12, 11, 10)]
    read_and_release(mounted, [FROM, *behind])
    block = next(block for block in blocks if not read_from([block + 10 * GRANULE]))
    # The two before them, in order, so that the client of the source begins to read ahead.
    before = range(block + 8 * GRANULE, block + 10 * GRANULE, 4096)
    assert read_from(before) == 2 * GRANULE


@pytest.mark.promise(248)
@pytest.mark.modes("relay")
def test_random_readers_of_one_file_make_no_more_calls_at_once_than_allowed(
    slow: SlowSource, monarch: MonarchCommand, source: Path
) -> None:
    put_big(source)
    options = [*OPTIONS, "limits.source_concurrency=2"]
    mounted = monarch.mount(slow.path, tiers=TIER, options=options)
    read_and_release(mounted, [FROM])
    slow.rules("hang read /big")
    right: list[int] = []

    def read(place: int) -> None:
        read_at(mounted.path / "big", [place])
        right.append(place)

    places = range(FROM + MIB, SIZE - MIB, 2 * MIB)
    threads = [threading.Thread(target=read, args=[place]) for place in places]
    try:
        for thread in threads:
            thread.start()
        wait_until(
            lambda: account(mounted)["requests"]["waiting"] == len(places), "all readers wait"
        )
        wait_until(lambda: slow.counters()["hanging"] >= 2, "the limit is used")
        assert slow.counters()["hanging"] == 2
    finally:
        slow.rules()
        for thread in threads:
            thread.join()
    assert sorted(right) == list(places)
