"""Ranges of a file are read in one call, those of a slow file at the same time."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from monarch.datasets import range_reads
from monarch.datasets.range_reads import MOST_READS, RangeReads
from monarch.datasets.ranges import Range
from tests.equipment.slowfs import SlowSource
from tests.equipment.waiting import wait_until

STEP = 128 << 10
SIZE = 100
# More than are read at the same time.
COUNT = 2 * MOST_READS


@pytest.fixture(params=["native", "python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the C extension, and without it."""
    assert range_reads._read_ranges is not None, "the extension was not built"
    if request.param == "python":
        monkeypatch.setattr(range_reads, "_read_ranges", None)
    return str(request.param)


def written(path: Path) -> bytes:
    """A file of ``2 * COUNT`` steps, with bytes at the begin of each, and otherwise holes."""
    rng = random.Random(1)
    data = b"".join(rng.randbytes(SIZE).ljust(STEP, b"\0") for _ in range(2 * COUNT))
    path.write_bytes(data)
    return data


def at(steps: range) -> list[Range]:
    return [Range(step * STEP, SIZE, np.arange(1)) for step in steps]


def read(fd: int, reads: RangeReads, found: list[Range]) -> tuple[bytes, list[int]]:
    buffer = bytearray(sum(each.length for each in found))
    counts = reads.read(fd, found, memoryview(buffer))
    return bytes(buffer), counts


def test_ranges_are_read_one_behind_the_other_up_to_the_end(reader: str, tmp_path: Path) -> None:
    data = written(tmp_path / "f")
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        found = [
            *at(range(COUNT)),
            Range(len(data) - 10, 30, np.arange(1)),
            Range(5, 0, np.arange(1)),
        ]
        expected = b"".join(data[step * STEP : step * STEP + SIZE] for step in range(COUNT))
        got, counts = read(fd, RangeReads(), found)
        assert got == expected + data[-10:] + bytes(20)
        assert counts == [SIZE] * COUNT + [10, 0]
        assert read(fd, RangeReads(), []) == (b"", [])
    finally:
        os.close(fd)


def test_a_range_outside_of_the_buffer_is_refused(tmp_path: Path) -> None:
    read_ranges = range_reads._read_ranges
    assert read_ranges is not None
    written(tmp_path / "f")
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        for offset, size, place in ((0, 11, 0), (0, -1, 0), (0, 5, -1), (0, 5, 6), (0, 1, 1 << 62)):
            table = np.array([[offset, size, place]], np.int64)
            with pytest.raises(ValueError, match="outside"):
                read_ranges(fd, table, memoryview(bytearray(10)), 1, 1)
    finally:
        os.close(fd)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowSource]:
    (tmp_path / "root").mkdir()
    with SlowSource(tmp_path / "root", tmp_path / "slow") as source:
        yield source


@pytest.mark.promise(249)
def test_ranges_of_a_slow_file_are_read_at_the_same_time(slow: SlowSource) -> None:
    data = written(slow.root / "f")
    fd = os.open(slow.path / "f", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    reads = RangeReads()

    def values(steps: range) -> list[bytes]:
        got, _ = read(fd, reads, at(steps))
        return [got[place : place + SIZE] for place in range(0, len(got), SIZE)]

    def expected(steps: range) -> list[bytes]:
        return [data[step * STEP : step * STEP + SIZE] for step in steps]

    first, second = range(COUNT), range(COUNT, 2 * COUNT)
    before = slow.counters()["read"]
    try:
        # From now on it is known that reads wait.
        slow.rules("lat read 20 /f")
        assert values(first) == expected(first)
        slow.rules("hang read /f")
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(values, second)
            try:
                wait_until(
                    lambda: slow.counters()["hanging"] == MOST_READS, "few reads are under way"
                )
            finally:
                slow.rules()
            assert reading.result() == expected(second)
    finally:
        os.close(fd)
    assert slow.counters()["read"] - before == 2 * COUNT


def test_an_error_of_a_read_is_raised(reader: str, slow: SlowSource) -> None:
    written(slow.root / "f")
    fd = os.open(slow.path / "f", os.O_RDONLY)
    try:
        slow.rules("err read EIO /f")
        with pytest.raises(OSError) as caught:
            read(fd, RangeReads(), at(range(3)))
        assert caught.value.errno == errno.EIO
    finally:
        os.close(fd)
