"""Batches in sealed memory: all kinds of arrays, and memory that no job of ours has made."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from monarch.datasets.staging_batch import Batch, Views, load, store
from monarch.datasets.staging_messages import seal, sealed_size
from monarch.errors import MonarchError
from monarch.posix.files import closing_fd


def through_memory(batch: Batch) -> Views:
    with closing_fd(store(batch)) as fd:
        return load(fd)


@contextmanager
def memory_of(content: bytes, *, is_sealed: bool = True) -> Iterator[int]:
    with closing_fd(os.memfd_create("test", os.MFD_ALLOW_SEALING)) as fd:
        os.write(fd, content)
        if is_sealed:
            seal(fd)
        yield fd


def content_of(batch: Batch) -> bytes:
    with closing_fd(store(batch)) as fd:
        return os.pread(fd, sealed_size(fd), 0)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.int64).reshape(2, 3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(20, dtype=np.uint8)[::3],
        np.array(7.5, np.float16),
        np.float32(3),
        np.zeros((0, 5), np.complex64),
        np.array(["a", "bcd"]),
        np.array([b"xy", b""]),
        np.array([True, False]),
        np.array(["2026-11-26", "NaT"], "datetime64[s]"),
        np.arange(3, dtype=">i4"),
    ],
    ids=lambda array: f"{array.dtype.str}{array.shape}",
)
def test_an_array_is_the_same_in_another_job(array: Any) -> None:
    views = through_memory({"x": array, "other": np.ones(1)})
    assert isinstance(views, dict)
    assert list(views) == ["x", "other"]
    assert (views["x"].dtype, views["x"].shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(views["x"], array)
    assert not views["x"].flags.writeable
    assert views["x"].ctypes.data % 64 == 0


@pytest.mark.parametrize("content", [b"", b"abc", bytearray(1 << 20), memoryview(b"xyz")])
def test_bytes_are_a_read_only_memoryview(content: bytes) -> None:
    view = through_memory(content)
    assert isinstance(view, memoryview)
    assert view.readonly
    assert view == content
    named = through_memory({"x": content})
    assert isinstance(named, dict)
    assert named["x"].tobytes() == bytes(content)


def test_a_batch_may_be_empty() -> None:
    assert through_memory({}) == {}


def test_views_keep_their_memory_and_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    view = through_memory(bytes(1000))
    assert bytes(view) == bytes(1000)
    del view
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    "batch",
    [
        {"x": np.array([object()])},
        {"x": np.zeros(2, [("a", "i4")])},
        {"x": [1, 2]},
        {1: np.zeros(2)},
        "text",
        None,
    ],
)
def test_values_without_plain_bytes_are_refused(batch: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TypeError):
        store(batch)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_too_many_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="4097 arrays"):
        store({str(number): b"" for number in range(4097)})


@pytest.mark.promise(262)
def test_no_process_can_change_a_batch() -> None:
    with closing_fd(store({"x": np.arange(8)})) as fd:
        for change in (
            lambda: os.pwrite(fd, b"x", 0),
            lambda: os.ftruncate(fd, 1),
            lambda: os.ftruncate(fd, 1 << 20),
        ):
            with pytest.raises(PermissionError):
                change()


@pytest.mark.promise(262)
def test_memory_that_may_change_is_refused() -> None:
    content = content_of({"x": np.arange(8)})
    with memory_of(content) as fd:
        load(fd)
    with (
        memory_of(content, is_sealed=False) as fd,
        pytest.raises(MonarchError, match="not sealed"),
    ):
        load(fd)
    with closing_fd(os.open("/dev/null", os.O_RDONLY)) as fd:
        assert sealed_size(fd) == 0


@pytest.mark.promise(262)
@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, b"MSB2"),
        (8, struct.pack("<I", 5000)),
        (12, struct.pack("<I", 1 << 31)),
        (12, struct.pack("<I", 4)),
        # The first entry: lengths, dimensions, offset, shape.
        (16, struct.pack("<H", 60000)),
        (19, b"\xff"),
        (24, struct.pack("<Q", 1 << 63)),
        (24, struct.pack("<Q", 100)),
        (32, struct.pack("<Q", 1 << 61)),
        (32, struct.pack("<Q", 1 << 63)),
        (32, struct.pack("<Q", 9)),
        (41, b"|O8"),
    ],
)
def test_a_damaged_header_is_refused(offset: int, value: bytes) -> None:
    content = bytearray(content_of({"x": np.arange(8)}))
    assert content[40:44] == b"x<i8"
    content[offset : offset + len(value)] = value
    with memory_of(bytes(content)) as fd, pytest.raises(MonarchError, match="cannot be used"):
        load(fd)


@pytest.mark.promise(262)
def test_random_damage_gives_an_error_or_arrays_within_the_memory() -> None:
    rng = random.Random(5)
    batch = {"x": np.arange(8), "name": np.array(["a", "b"]), "y": np.zeros((2, 3), "f4")}
    content = content_of(batch)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(160)] = rng.randrange(256)
        size = rng.choice((len(content), rng.randrange(1, len(content))))
        with memory_of(bytes(damaged[:size])) as fd:
            try:
                views = load(fd)
            except MonarchError:
                refused += 1
                continue
            parts = views.values() if isinstance(views, dict) else [views]
            assert sum(part.nbytes for part in parts) <= 3 * len(content)
    assert refused > 300
