"""Many records are read with few reads, in the order asked, by threads and other processes."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt
import pytest

from monarch.datasets import range_reads
from monarch.datasets.lmdb_index import Index, write_index
from monarch.datasets.lmdb_reader import EXTENT_BYTES, LmdbReader
from monarch.errors import LmdbError
from monarch.order import ChunkwiseSampler, chunkwise_order
from monarch.posix.files import closing_fd
from tests.datasets.lmdb_files import KIB, Records, appended, inserted, written
from tests.equipment.slowfs import SlowSource
from tests.equipment.waiting import wait_until

GAP = 64 * KIB


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Records]:
    path = tmp_path_factory.mktemp("lmdb") / "data.mdb"
    return path, written(path, inserted(1500, [0, 100, 2000, 5000, 30_000]))


@pytest.fixture
def index(file: tuple[Path, Records], tmp_path: Path) -> Path:
    path = tmp_path / "data.mlx"
    with LmdbReader(file[0]) as reader:
        write_index(path, Index(reader.version, reader.table))
    return path


class Reads:
    """Counts the calls that read, and their bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, int]] = []
        preadv = os.preadv

        def counting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            self.calls.append((offset, sum(map(len, buffers))))
            return preadv(fd, buffers, offset)

        read_ranges = range_reads._read_ranges
        assert read_ranges is not None, "the extension was not built"

        def counting_ranges(
            fd: int, table: npt.NDArray[np.int64], buffer: memoryview, least: int, most: int
        ) -> tuple[bytes, int]:
            self.calls += [(offset, length) for offset, length, _ in table.tolist()]
            return read_ranges(fd, table, buffer, least, most)

        monkeypatch.setattr(os, "preadv", counting)
        monkeypatch.setattr(range_reads, "_read_ranges", counting_ranges)


def ranges_of(places: Sequence[tuple[int, int]], gap: int) -> list[list[int]]:
    """The reads for values at these places, each with its length."""
    ranges: list[list[int]] = []
    for begin, length in sorted(places):
        if ranges and begin - ranges[-1][1] <= gap:
            ranges[-1][1] = max(ranges[-1][1], begin + length)
        else:
            ranges.append([begin, begin + length])
    return ranges


@pytest.mark.promise(242)
def test_records_come_in_the_order_asked(file: tuple[Path, Records], index: Path) -> None:
    path, records = file
    rng = random.Random(1)
    indices = [rng.randrange(len(records)) for _ in range(999)]
    for reader in (LmdbReader(path), LmdbReader(path, index)):
        assert len(reader) == len(records)
        values = reader.get_many(indices)
        assert [bytes(value) for value in values] == [records[place][1] for place in indices]
        assert bytes(reader.get(np.int64(7))) == records[7][1]
        assert reader.get_many([]) == []
        assert reader.keys[5:8] == [key for key, _ in records[5:8]]
        assert reader.keys[-1] == records[-1][0]
        assert reader.keys.place_of(records[9][0]) == 9
        with pytest.raises(KeyError):
            reader.keys.place_of(b"missing")
        reader.close()
        assert values[0] == records[indices[0]][1]
    with pytest.raises(TypeError):
        values[0][0] = 1


@pytest.mark.parametrize("wrong", [-1, 1500, 1 << 63])
def test_an_index_that_is_not_one_of_a_record_is_refused(
    file: tuple[Path, Records], wrong: int
) -> None:
    with LmdbReader(file[0]) as reader:
        with pytest.raises(IndexError, match="of 1500"):
            reader.get_many([0, wrong])
        with pytest.raises(TypeError):
            reader.get_many([1.0])  # type: ignore[list-item]


@pytest.mark.promise(244)
def test_256_random_records_take_no_more_reads_than_there_are_ranges(
    file: tuple[Path, Records], index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = LmdbReader(file[0], index)
    # The 16 bytes before a value in overflow pages are their header.
    places = [
        (offset - 16, length + 16) if offset % 4096 == 16 else (offset, length)
        for offset, length in zip(
            reader.table.offsets.tolist(), reader.table.lengths.tolist(), strict=True
        )
    ]
    for seed in range(5):
        indices = random.Random(seed).sample(range(len(reader)), 256)
        expected = ranges_of([places[place] for place in indices], GAP)
        reads = Reads(monkeypatch)
        reader.get_many(indices)
        assert len(reads.calls) <= len(expected) < 100
        assert sum(length for _, length in reads.calls) == sum(e - b for b, e in expected)
    # The numbers would be others without a gap between values that are read at once.
    assert len(ranges_of([places[place] for place in indices], 0)) > 2 * len(expected)


def test_the_tree_is_found_with_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "f", appended(4000, 9000))
    reads = Reads(monkeypatch)
    with LmdbReader(tmp_path / "f") as reader:
        size = reader.version.size
    assert len(reads.calls) <= 29
    assert sum(length for _, length in reads.calls) < 0.004 * size
    reads = Reads(monkeypatch)
    written(tmp_path / "g", appended(20_000, 100))
    with LmdbReader(tmp_path / "g") as reader:
        size = reader.version.size
    # 590 pages, read together.
    assert len(reads.calls) < 20
    assert sum(length for _, length in reads.calls) <= 1.05 * size


@pytest.mark.promise(245)
def test_an_index_of_an_earlier_version_is_refused_with_the_command_to_run(
    tmp_path: Path,
) -> None:
    path, index = tmp_path / "my data.mdb", tmp_path / "data.mlx"
    written(path, appended(10, 100))
    with LmdbReader(path) as before:
        write_index(index, Index(before.version, before.table))
        written(path, lambda environment: put_one(environment))
        with pytest.raises(LmdbError, match=r"stale.*transaction 2 instead of 1") as refused:
            LmdbReader(path, index)
        assert f"run monarch lmdb index '{path}' -o {index}" in str(refused.value)
        # Neither do readers that are open serve bytes of two versions.
        with pytest.raises(LmdbError, match="was changed"):
            before.get(0)
        with pytest.raises(LmdbError, match="was changed"):
            pickle.loads(pickle.dumps(before))
    with LmdbReader(path) as now:
        write_index(index, Index(now.version, now.table))
    assert len(LmdbReader(path, index)) == 11


def put_one(environment: lmdb.Environment) -> None:
    with environment.begin(write=True) as transaction:
        transaction.put(b"one more", b"")


def test_a_file_with_other_bytes_of_the_same_size_is_refused(tmp_path: Path) -> None:
    path, index = tmp_path / "data.mdb", tmp_path / "data.mlx"
    written(path, appended(10, 100))
    with LmdbReader(path) as reader:
        write_index(index, Index(reader.version, reader.table))
    os.utime(path, ns=(1, 10**18))
    with pytest.raises(LmdbError, match=r"stale.*mtime_ns"):
        LmdbReader(path, index)


@pytest.mark.promise(245)
def test_a_file_that_is_written_through_a_map_is_noticed_without_a_new_time(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data.mdb"
    environment = lmdb.open(
        *(str(path), 1 << 22), subdir=False, lock=False, writemap=True, map_async=True, sync=False
    )
    put_one(environment)
    status = path.stat()
    with LmdbReader(path) as reader:
        reader.get(0)
        put_one(environment)
        # The kernel keeps the time if the pages were not written to the disk meanwhile.
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(LmdbError, match="was changed"):
            reader.get(0)
    environment.close()


@pytest.mark.promise(243)
def test_a_file_that_is_written_while_its_tree_is_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.mdb"
    written(path, appended(2000, 1000))
    preadv, reads = os.preadv, 0

    def writing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal reads
        reads += 1
        # Behind the root: its leaves have other records when they are read.
        if reads == 2:
            for count in (1, 2, 3):
                written(path, partial(replaced, count))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", writing)
    with pytest.raises(LmdbError, match="was changed"):
        LmdbReader(path)
    assert reads >= 2
    assert len(LmdbReader(path)) == 2000


def replaced(size: int, environment: lmdb.Environment) -> None:
    with environment.begin(write=True) as transaction:
        for number in range(0, 2000, 2):
            transaction.put(b"%08d" % number, b"x" * 5000 * size)


def test_a_file_that_grows_while_it_is_opened_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.mdb"
    written(path, appended(10, 1000))
    fstat, is_written = os.fstat, False

    def writing(fd: int) -> os.stat_result:
        nonlocal is_written
        status = fstat(fd)
        if not is_written:
            is_written = True
            written(path, appended(11, 100_000))
        return status

    monkeypatch.setattr(os, "fstat", writing)
    with LmdbReader(path) as reader:
        assert len(reader.get(10)) == 100_000


def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "data.mdb"
    written(path, appended(10, 10_000))
    with LmdbReader(path) as reader:
        os.truncate(path, 8192)
        with pytest.raises(LmdbError, match="ends at byte"):
            reader.get(9)


def test_threads_share_a_reader(file: tuple[Path, Records]) -> None:
    path, records = file

    def read(seed: int) -> bool:
        indices = random.Random(seed).sample(range(len(records)), 50)
        values = reader.get_many(indices)
        return [bytes(value) for value in values] == [records[place][1] for place in indices]

    with LmdbReader(path) as reader, ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(40)))


@pytest.mark.promise(242)
@pytest.mark.promise(250)
def test_a_reader_that_is_closed_during_a_call_reads_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    records = written(tmp_path / "root/data.mdb", appended(20, 30_000))
    other = tmp_path / "other"
    other.write_bytes(bytes(2 << 20))
    with SlowSource(tmp_path / "root", tmp_path / "slow") as slow:
        reader = LmdbReader(slow.path / "data.mdb")
        slow.rules("hang read data.mdb")
        with ThreadPoolExecutor(1) as pool:
            try:
                call = pool.submit(reader.get_many, [3])
                wait_until(lambda: slow.counters()["hanging"] > 0, "the record is read")
                reader.close()
                # It would get the number of the descriptor.
                with closing_fd(os.open(other, os.O_RDONLY)):
                    slow.rules()
                    assert call.result() == [records[3][1]]
            finally:
                slow.rules()
        with pytest.raises(ValueError, match=r"data\.mdb is closed"):
            reader.get(3)


def test_a_forked_process_and_one_that_gets_a_pickled_reader_read_the_same(
    file: tuple[Path, Records], index: Path, tmp_path: Path
) -> None:
    path, records = file
    read = (
        "import pickle, sys; reader = pickle.load(sys.stdin.buffer);"
        "sys.stdout.buffer.write(b''.join(reader.get_many(range(0, len(reader), 7))))"
    )
    expected = b"".join(value for _, value in records[::7])
    for reader in (LmdbReader(path), LmdbReader(path, index)):
        pickled = pickle.dumps(reader)
        # The places of the records are not in it if there is an index file.
        assert (len(pickled) < 1000) == (reader.table is not None and reader._index is not None)
        run = subprocess.run(
            [sys.executable, "-c", read], input=pickled, check=True, capture_output=True
        )
        assert run.stdout == expected
        got = tmp_path / "got"
        child = os.fork()
        if child == 0:
            try:
                got.write_bytes(b"".join(reader.get_many(range(0, len(reader), 7))))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert got.read_bytes() == expected
        # The child closed nothing of this process.
        assert reader.get(0) == records[0][1]
        reader.close()


@pytest.mark.promise(240)
def test_a_chunk_wise_epoch_stays_in_a_group_of_extents(file: tuple[Path, Records]) -> None:
    with LmdbReader(file[0], whole_extents=True) as reader:
        extents = reader.extents()
        of_file = reader.table.offsets // EXTENT_BYTES
        assert len(set(extents.tolist())) == len(set(of_file.tolist())) == extents.max() + 1 > 3
        assert (np.argsort(extents, kind="stable") == np.argsort(of_file, kind="stable")).all()
        sampler = ChunkwiseSampler(extents, group=2, seed=2)
        order = list(sampler)
        assert order == chunkwise_order(2, 0, extents, 2).tolist()
        for start in range(0, len(order), 100):
            part = order[start : start + 100]
            assert len(set(extents[part].tolist())) <= 4
            assert [*map(bytes, reader.get_many(part))] == [file[1][place][1] for place in part]
