"""Unmodified LMDB readers on a mount: what they read at the source, and how many at once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import lmdb
import pytest

from monarch.datasets import lmdb_file
from monarch.datasets.lmdb_index import Index, write_index
from monarch.datasets.lmdb_reader import LmdbReader
from monarch.errors import LmdbError
from monarch.order import ChunkwiseSampler
from monarch.tiers.partial import GRANULE
from tests.conftest import OPENS_ARE_REPORTED, MonarchCommand, Mounted
from tests.datasets.lmdb_files import Records, appended, written
from tests.equipment.slowfs import SlowSource
from tests.mount.observe import PATIENCE_S, account, forget_pages, settled, wait_until

MIB = 1 << 20
# The reads before it do not decide how the file is copied, and are not kept.
UNDECIDED = 8 * MIB
OPTIONS = ["limits.range_min=16MiB", "limits.scrub_bandwidth=0"]
# Reads all records, in the order of the keys without a seed, and prints a digest of them.
READ = """
import hashlib, lmdb, random, sys
environment = lmdb.open(sys.argv[1], subdir=False, readonly=True, lock=False)
with environment.begin() as transaction:
    keys = [b"%08d" % number for number in range(transaction.stat()["entries"])]
    if sys.argv[2:]:
        order = random.Random(int(sys.argv[2])).sample(keys, len(keys))
        values = {key: transaction.get(key) for key in order}
    else:
        values = dict(transaction.cursor())
print(hashlib.sha256(b"".join(values[key] for key in keys)).hexdigest())
"""


def reader(path: Path, *seed: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", READ, str(path), *seed]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def digest(records: Records) -> str:
    return hashlib.sha256(b"".join(value for _, value in records)).hexdigest()


@contextmanager
def held_open(mounted: Mounted) -> Iterator[None]:
    """The file stays open, so all readers share one binding however late they begin. Afterwards
    the kernel has none of its pages."""
    fd = os.open(mounted.path / "db", os.O_RDONLY)
    try:
        yield
        forget_pages(fd)
    finally:
        os.close(fd)
    wait_until(lambda: account(mounted)["handles"]["open_files"] == 0, "the file is released")


@pytest.mark.promise(247)
@pytest.mark.modes("relay")
@pytest.mark.parametrize("seeds", [[[], []], [["1"], ["2"]]], ids=["in order", "at random"])
def test_two_processes_read_each_byte_at_the_source_once(
    seeds: list[list[str]], slow: SlowSource, monarch: MonarchCommand, source: Path
) -> None:
    expected = digest(written(source / "db", appended(350, 50_000)))
    # Its version is not young, so nothing is checked again.
    os.utime(source / "db", ns=(10**18 + 1, 10**18 + 1))
    size = (source / "db").stat().st_size
    mounted = monarch.mount(slow.path, tiers={"fast": "32MiB"}, options=OPTIONS)

    def epoch() -> tuple[int, int]:
        """The reads of the daemon, and the bytes that the source has read for them."""
        before = account(mounted)["source_totals"]["reads"], slow.counters()["read_bytes"]
        with held_open(mounted):
            readers = [reader(mounted.path / "db", *seed) for seed in seeds]
            printed = [each.communicate(timeout=2 * PATIENCE_S)[0].strip() for each in readers]
        assert printed == [expected] * 2
        reads = settled(mounted)["source_totals"]["reads"]
        return reads - before[0], slow.counters()["read_bytes"] - before[1]

    reads, read_bytes = epoch()
    # Each granule is fetched once, and so is what was read before it was decided to keep them.
    assert 0 < reads <= -(-(size + UNDECIDED) // GRANULE)
    assert size <= read_bytes <= 1.02 * size
    # What was read before the decision is kept only if both readers came there in order, and then
    # the copy is whole. Requests of two readers can overtake each other. Otherwise the second epoch
    # fetches it.
    assert epoch()[1] <= UNDECIDED
    wait_until(lambda: account(mounted)["residency"]["files"] == 1, "the copy is whole")
    assert epoch() == (0, 0)
    # The same reader without the mount is counted.
    before = slow.counters()["read_bytes"]
    assert reader(slow.path / "db", *seeds[0]).communicate()[0].strip() == expected
    assert slow.counters()["read_bytes"] - before > size // 2


@pytest.mark.modes("relay")
def test_a_reader_with_an_index_reads_the_ranges_that_it_needs(
    slow: SlowSource, monarch: MonarchCommand, source: Path
) -> None:
    records = written(source / "db", appended(350, 50_000))
    os.utime(source / "db", ns=(10**18 + 1, 10**18 + 1))
    size = (source / "db").stat().st_size
    index = source.parent / "db.mlx"
    mounted = monarch.mount(slow.path, tiers={"fast": "32MiB"}, options=OPTIONS)
    # The index is that of the file at the source: the mount shows the same size and time.
    with LmdbReader(source / "db") as found:
        write_index(index, Index(found.version, found.table))
    before = slow.counters()["read_bytes"]
    with LmdbReader(mounted.path / "db", index) as opened:
        wanted = [340, 250, 251, 249, 340]
        values = [bytes(value) for value in opened.get_many(wanted)]
    assert values == [records[place][1] for place in wanted]
    settled(mounted)
    # Two ranges, each in whole granules, and the meta pages.
    assert 0 < slow.counters()["read_bytes"] - before < size // 10


@pytest.mark.modes("relay")
@pytest.mark.parametrize("whole", [True, False])
def test_a_chunk_wise_epoch_fetches_extents_in_large_parts(
    whole: bool, slow: SlowSource, source: Path
) -> None:
    records = written(source / "db", appended(12_000, 700))
    with LmdbReader(source / "db") as found:
        write_index(source.parent / "db.mlx", Index(found.version, found.table))
    before = slow.counters()
    path = slow.path / "db"
    with LmdbReader(path, source.parent / "db.mlx", whole_extents=whole) as opened:
        order = list(ChunkwiseSampler(opened.extents(), group=1, seed=1))
        for start in range(0, len(order), 64):
            part = order[start : start + 64]
            assert [*map(bytes, opened.get_many(part))] == [records[place][1] for place in part]
        size = opened.version.size
    after = slow.counters()
    assert after["read_bytes"] - before["read_bytes"] <= 1.02 * size
    # The kernel reads at most 128 KiB of slowfs with one call.
    calls = (after["read"] - before["read"]) / (size / (128 << 10))
    assert calls < 1.2 if whole else calls > 3, calls


@pytest.mark.promise(245)
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_a_reader_notices_that_the_file_was_written_at_the_source(
    monarch: MonarchCommand, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monarch.expects_log("changed at the source")
    records = written(source / "db", appended(350, 50_000))
    mounted = monarch.mount(source, tiers={"fast": "8MiB"}, options=OPTIONS)
    monkeypatch.setattr(lmdb_file, "_OPEN_AGAIN_S", 0.0)
    with LmdbReader(mounted.path / "db") as opened:
        # Behind the first bytes of the file, so it gets a partial copy.
        for index in (340, 3):
            assert opened.get(index) == records[index][1]
        # The second transaction writes to pages that the first one has freed.
        for text in (b"once", b"twice", b"three times"):
            written(source / "db", partial(replace_one, text))
        with pytest.raises(LmdbError, match="was changed"):
            opened.get(4)
    with LmdbReader(mounted.path / "db") as opened:
        assert opened.get(4) == b"three times"


def replace_one(value: bytes, environment: lmdb.Environment) -> None:
    with environment.begin(write=True) as transaction:
        transaction.put(b"%08d" % 4, value)


@pytest.mark.promise(248)
@pytest.mark.modes("relay")
@pytest.mark.parametrize("limit", [2, 8])
def test_cold_readers_reach_the_source_in_turn_and_no_more_than_the_limit(
    limit: int, slow: SlowSource, monarch: MonarchCommand, source: Path
) -> None:
    expected = [
        digest(written(source / f"db{number}", appended(20 + number, 1000))) for number in range(8)
    ]
    mounted = monarch.mount(
        slow.path, tiers={"fast": "32MiB"}, options=[f"limits.source_concurrency={limit}"]
    )
    slow.rules(*(f"hang read /db{number}" for number in range(8)))
    readers = []
    for number in range(8):
        # The kernel has the name and the attributes then, and the reader's first request is OPEN.
        os.stat(mounted.path / f"db{number}")
        readers.append(reader(mounted.path / f"db{number}"))
        wait_until(
            lambda: account(mounted)["requests"]["waiting"] == len(readers), "the request waits"
        )
    wait_until(lambda: slow.counters()["hanging"] >= limit, "the limit is used")
    assert slow.counters()["hanging"] == limit
    if limit == 8:
        slow.rules()
    for number, process in enumerate(readers):
        # The longest waiting reader is at the source: another one would not end now.
        if limit < 8:
            slow.rules(*(f"hang read /db{later}" for later in range(number + 1, 8)))
        assert process.communicate(timeout=PATIENCE_S)[0].strip() == expected[number]
        assert slow.counters()["hanging"] <= limit
