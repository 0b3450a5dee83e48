"""The data sets of tests, benchmark and demo are real, have the given sizes, and never change."""

from __future__ import annotations

import hashlib
import io
import os
import sqlite3
import statistics
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest
from PIL import Image

from scripts.datasets.tfrecord import crc32c
from scripts.tools.launch import ROOT


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/dataset"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def make(*arguments: object) -> None:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def contents(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_an_image_folder_has_different_jpegs_that_decode_in_a_directory_per_class(
    tmp_path: Path,
) -> None:
    make("imagefolder", tmp_path / "set", "--files", 103, "--classes", 10, "--mean", "20KB")
    found = contents(tmp_path / "set")
    assert len(found) == len(set(found.values())) == 103
    assert sorted({name.split("/")[0] for name in found}) == [f"n{n:08d}" for n in range(1, 11)]
    for name in found:
        directory, file = name.split("/")
        assert file.startswith(f"{directory}_")
        assert file.endswith(".JPEG")
        with Image.open(tmp_path / "set" / name) as image:
            image.load()
            assert image.format == "JPEG"


def test_sizes_are_log_normal_around_the_mean(tmp_path: Path) -> None:
    make("imagefolder", tmp_path / "set", "--files", 400, "--mean", "30KB")
    sizes = [path.stat().st_size for path in (tmp_path / "set").rglob("*.JPEG")]
    assert statistics.mean(sizes) == pytest.approx(30_000, rel=0.1)
    assert statistics.stdev(np.log(sizes).tolist()) == pytest.approx(0.5, rel=0.15)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make("imagefolder", tmp_path / name, "--files", 20, "--mean", "8KB", "--seed", seed)
    first = contents(tmp_path / "a")
    assert contents(tmp_path / "b") == first
    assert not set(contents(tmp_path / "c").values()) & set(first.values())


@pytest.mark.parametrize(
    ("message", "checksum"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_crc32c_gives_the_published_values(message: bytes, checksum: int) -> None:
    assert crc32c(message) == checksum


@pytest.mark.parametrize("length", [4, 127, 128, 129, 4096, 5001])
def test_crc32c_of_any_length_is_that_of_the_plain_loop(length: int) -> None:
    message = np.random.default_rng(length).bytes(length)
    register = 0xFFFFFFFF
    for byte in message:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    assert crc32c(message) == register ^ 0xFFFFFFFF


def records(path: Path) -> Iterator[bytes]:
    stream = io.BytesIO(path.read_bytes())
    while header := stream.read(12):
        (length,) = struct.unpack("<Q", header[:8])
        payload = stream.read(length)
        assert len(payload) == length
        assert len(stream.read(4)) == 4
        yield payload


def test_tfrecord_shards_hold_every_record_once(tmp_path: Path) -> None:
    make("tfrecord", tmp_path / "set", "--shards", 3, "--records", 20, "--mean", "5KB")
    shards = sorted((tmp_path / "set").iterdir())
    assert [path.name for path in shards] == [
        f"train-{number:05d}-of-00003.tfrecord" for number in range(3)
    ]
    found = [record for path in shards for record in records(path)]
    assert len(found) == len(set(found)) == 20
    assert all(b"image/encoded" in record and b"\xff\xd8\xff" in record for record in found)


def test_webdataset_shards_hold_pairs_of_image_and_label(tmp_path: Path) -> None:
    make("webdataset", tmp_path / "set", "--shards", 2, "--samples", 11, "--mean", "5KB")
    labels = []
    for path in sorted((tmp_path / "set").iterdir()):
        with tarfile.open(path) as tar:
            members = tar.getmembers()
            for image, label in zip(members[::2], members[1::2], strict=True):
                assert image.name == label.name.replace(".cls", ".jpg")
                stream, text = tar.extractfile(image), tar.extractfile(label)
                assert stream is not None
                assert text is not None
                Image.open(stream).load()
                labels.append(int(text.read()))
    assert sorted(labels) == sorted(number % 10 for number in range(11))


def test_hdf5_lmdb_and_sqlite_hold_as_many_samples_as_asked(tmp_path: Path) -> None:
    make("hdf5", tmp_path / "a.h5", "--samples", 50, "--side", 16)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["images"].shape == (50, 16, 16, 3)
        assert file["images"].chunks is not None
        assert file["labels"].shape == (50,)
    make("lmdb", tmp_path / "b", "--records", 30, "--mean", "5KB")
    with (
        lmdb.open(str(tmp_path / "b"), readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        values = [value for _, value in transaction.cursor()]
    assert len(set(values)) == 30
    make("sqlite", tmp_path / "c.sqlite", "--records", 30, "--mean", "5KB")
    connection = sqlite3.connect(tmp_path / "c.sqlite")
    assert connection.execute("SELECT count(DISTINCT image) FROM samples").fetchone() == (30,)
    connection.close()


def test_a_git_repository_is_clean_and_has_history(tmp_path: Path) -> None:
    make("git", tmp_path / "set", "--files", 20)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path / "set"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert git("status", "--porcelain") == ""
    assert git("rev-list", "--count", "HEAD") == "3\n"
    assert len(git("ls-files").splitlines()) == 20


def test_empty_files_are_spread_over_their_directories(tmp_path: Path) -> None:
    make("empty", tmp_path / "set", "--files", 1003, "--directories", 10)
    counts = [len(os.listdir(path)) for path in sorted((tmp_path / "set").iterdir())]
    assert counts == [101] * 3 + [100] * 7


def test_existing_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    for arguments in (("imagefolder", tmp_path), ("hdf5", tmp_path / "mine")):
        done = run(*arguments)
        assert done.returncode == 1
        assert done.stderr.startswith(f"dataset: {arguments[1]} exists")
        assert done.stderr.count("\n") == 1
    assert (tmp_path / "mine").read_text() == "precious"
    assert os.listdir(tmp_path) == ["mine"]


def test_a_set_larger_than_the_disk_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    done = run("imagefolder", tmp_path / "set", "--files", 10**12)
    assert done.returncode == 1
    assert "free and this needs" in done.stderr
    assert os.listdir(tmp_path / "set") == []


@pytest.mark.parametrize("bad", [("--files", "0"), ("--files", "x"), ("--mean", "1")])
def test_a_number_that_makes_no_sense_is_a_usage_error(
    tmp_path: Path, bad: tuple[str, str]
) -> None:
    done = run("imagefolder", tmp_path / "set", *bad)
    assert done.returncode == 2
    assert not (tmp_path / "set").exists()
