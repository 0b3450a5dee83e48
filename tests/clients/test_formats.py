"""Data sets in a single file, small and large, read by the libraries of their formats."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import Client, copied_tree, settle, three_epochs
from tests.conftest import MonarchCommand, names_in

Start = Callable[..., Client]
Make = Callable[..., Path]

# The reader of a large file, and the copy that follows it.
READER_AND_COPY = 2


def test_hdf5_of_24_megabytes_is_copied_behind_its_reader(
    monarch: MonarchCommand, client: Start, make_dataset: Make
) -> None:
    source = make_dataset("hdf5", "--samples", 2000, name="train.h5")
    reader = client("hdf5_chunks")
    expected = reader.epoch(source)
    mounted = three_epochs(
        monarch, source, reader.epoch, expected=expected, opens_at_first=READER_AND_COPY
    )
    assert mounted.xattr("train.h5") != "source"


def test_lmdb_is_mapped_from_the_source_first_and_from_the_tier_later(
    monarch: MonarchCommand, client: Start, make_dataset: Make
) -> None:
    source = make_dataset("lmdb", "--records", 150, name="train")
    reader = client("lmdb_records")
    expected = reader.epoch(source)
    assert len(expected) == 150
    three_epochs(monarch, source, reader.epoch, expected=expected, opens_at_first=READER_AND_COPY)


@pytest.mark.parametrize("query", ["mode=ro", "mode=ro&immutable=1"])
def test_sqlite_reads_a_database_on_a_mount_that_cannot_be_written(
    monarch: MonarchCommand, client: Start, make_dataset: Make, query: str
) -> None:
    source = make_dataset("sqlite", "--records", 80, "--mean", "20KB", name="train.sqlite")
    reader = client("sqlite_rows", query)
    expected = reader.epoch(source)
    assert len(expected) == 80
    three_epochs(monarch, source, reader.epoch, expected=expected)


def test_sqlite_in_write_ahead_log_mode_needs_immutable_as_on_any_read_only_file_system(
    monarch: MonarchCommand, client: Start, make_dataset: Make, tmp_path: Path
) -> None:
    plain = make_dataset("sqlite", "--records", 20, "--mean", "5KB", name="train.sqlite")
    source = copied_tree(plain, tmp_path / "wal")
    with contextlib.closing(sqlite3.connect(source / "train.sqlite")) as connection:
        assert connection.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
    assert names_in(source) == ["train.sqlite"]
    mounted = monarch.mount(source)
    path = mounted.path / "train.sqlite"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        with pytest.raises(sqlite3.OperationalError, match="unable to open"):
            connection.execute("SELECT count(*) FROM samples")
    reader = client("sqlite_rows", "mode=ro&immutable=1")
    expected = client("sqlite_rows", "mode=ro&immutable=1").epoch(source)
    assert reader.epoch(mounted.path, 1) == expected
    settle(mounted, 1)
    assert reader.epoch(mounted.path, 2) == expected


@pytest.mark.promise(250)
def test_many_small_files_are_read_in_one_call_for_three_epochs(
    monarch: MonarchCommand, client: Start, images: Path
) -> None:
    reader = client("many_files")
    expected = reader.epoch(images)
    assert len(expected) == 200
    three_epochs(monarch, images, reader.epoch, expected=expected, opens_at_first=200)
