"""The figures of the mixing of labels, against those that were measured for DIESEL's shuffle."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from monarch.order import chunkwise_order, distinct_labels, epoch_permutation
from monarch.packs import mixing
from monarch.packs.format import LARGE, Entry
from monarch.packs.index import encode_index
from monarch.packs.pack import Pack, encode_description, summary_of
from tests.packs.test_format import FILE
from tests.packs.trees import pack

# 20,000 files of 100 classes in 400 chunks of 50; batches of 128 files.
FILES, CLASSES, CHUNKS, BATCH = 20_000, 100, 400, 128
LABELS = np.arange(FILES) // (FILES // CLASSES)
AT_RANDOM = epoch_permutation(5, 0, FILES) // (FILES // CHUNKS)
BY_CLASS = np.arange(FILES) // (FILES // CHUNKS)

# The size of a group: the probability that two files of a batch share a chunk.
SHARED = {1: 0.335, 8: 0.110, 40: 0.024, 100: 0.0098}


def labels_in_a_batch(chunks: npt.NDArray[np.int64], group: int) -> float:
    return distinct_labels(chunkwise_order(1, 0, chunks, group), LABELS, BATCH)


@pytest.mark.parametrize("group", SHARED)
def test_the_probability_of_a_shared_chunk_is_the_measured_one(group: int) -> None:
    order = chunkwise_order(1, 0, AT_RANDOM, group)
    assert mixing.shared_chunks(order, AT_RANDOM, BATCH) == pytest.approx(SHARED[group], rel=0.1)


def test_a_shuffle_of_all_files_shares_few_chunks() -> None:
    order = epoch_permutation(1, 0, FILES)
    assert mixing.shared_chunks(order, AT_RANDOM, BATCH) == pytest.approx(0.0025, rel=0.1)


@pytest.mark.parametrize("group", SHARED)
def test_files_packed_at_random_keep_the_labels_of_a_shuffle_of_all(group: int) -> None:
    assert labels_in_a_batch(AT_RANDOM, group) == pytest.approx(72.8, abs=1.5)


def test_files_packed_by_class_do_not() -> None:
    assert labels_in_a_batch(BY_CLASS, 1) < 5


def test_shared_chunks_are_counted_in_full_batches() -> None:
    chunks = np.array([0, 0, 1, 1, 1, 2, 0])
    order = np.arange(7)
    # Batches 0 0 1 and 1 1 2: one pair of three in each.
    assert mixing.shared_chunks(order, chunks, 3) == pytest.approx(1 / 3)
    assert math.isnan(mixing.shared_chunks(order, chunks, 8))
    assert math.isnan(mixing.shared_chunks(order, chunks, 1))


def _labels(tmp_path: Path, paths: list[str]) -> tuple[bytes, dict[str, int]]:
    """The directory of the labels, and the label of each path as a small number."""
    for path in paths:
        file = tmp_path / "source" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(path.encode())
    (tmp_path / "source/aaa empty").mkdir()
    pack(tmp_path / "source", tmp_path / "pack")
    with Pack.open(os.fsencode(tmp_path / "pack")) as opened:
        numbers = mixing.numbers_with_bytes(opened)
        directory, labels = mixing.labels(opened, numbers)
        found = {
            os.fsdecode(opened.record(int(number)).path): int(label)
            for number, label in zip(numbers, labels, strict=True)
        }
    kinds: dict[int, int] = {}
    return directory, {path: kinds.setdefault(found[path], len(kinds)) for path in sorted(found)}


@pytest.mark.parametrize(
    ("paths", "directory", "expected"),
    [
        (["a/1", "a/2", "b/1", "c/x/1"], b"", [0, 0, 1, 2]),
        (["top/train/a/1", "top/train/a/2", "top/train/b/1"], b"top/train", [0, 0, 1]),
        (["a/1", "b/1", "readme"], b"", [0, 1, 2]),
        (["only/1", "only/2"], b"only", [0, 0]),
        (["1", "2"], b"", [0, 0]),
        ([], b"", []),
    ],
)
def test_the_label_is_the_first_directory_that_distinguishes(
    tmp_path: Path, paths: list[str], directory: bytes, expected: list[int]
) -> None:
    (tmp_path / "source").mkdir()
    assert _labels(tmp_path, paths) == (directory, dict(zip(paths, expected, strict=True)))


def test_numbers_of_large_files_take_no_memory(tmp_path: Path) -> None:
    entries = [
        Entry(b"%d" % number, FILE, size=1, chunk=LARGE, offset=number << 40)
        for number in range(1, 4)
    ]
    raw = encode_index(entries, [])
    info = summary_of(raw, large=3, chunk_bytes=4096, seed=0, order="random")
    (tmp_path / "index").write_bytes(raw)
    (tmp_path / "pack.json").write_bytes(encode_description(info))
    with Pack.open(os.fsencode(tmp_path)) as opened:
        opened.require_sound()
        chunks = mixing.chunk_of_each(opened, mixing.numbers_with_bytes(opened))
    assert chunks.tolist() == [0, 1, 2]
