"""Loaders of several frameworks and formats over one mount, with and without announcements: they
yield the samples in the same order, with the bytes of the source, where each file is opened once
and each byte is read once."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.clients.conftest import Client, copied_tree, settle
from tests.clients.test_frameworks import needs
from tests.conftest import MonarchCommand, contents
from tests.equipment.inotify import OpenCounter
from tests.equipment.slowfs import SlowSource

pytestmark = pytest.mark.frameworks

Start = Callable[..., Client]
Make = Callable[..., Path]

HOW = ("announced", "plain")
SAMPLERS = ("random", "distributed", "weighted", "batches", "persistent")
FORMATS = ("parquet", "hdf5", "webdataset")
KINDS = (*SAMPLERS, *FORMATS)
# All kinds of samplers in one mode: what they draw does not depend on the mode.
KINDS_IN = {"relay": KINDS, "passthrough": ("random", *FORMATS), "no_open": ("random", *FORMATS)}
EPOCHS = 2


def write_images(directory: Path) -> None:
    for number in range(90):
        path = directory / f"class{number % 3}" / f"{number:03}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(contents(path.name, 2000 + number))


def write_parquet(directory: Path) -> None:
    for number in range(8):
        images = [contents(f"{number} {row}", 3000) for row in range(6)]
        table = pyarrow.table({"image": images, "label": range(6)})
        path = directory / f"part-{number}.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=1)


def write_hdf5(directory: Path) -> None:
    draw = np.random.default_rng(7)
    for number in range(6):
        with h5py.File(directory / f"{number}.h5", "w") as file:
            images = draw.integers(0, 255, (25, 32, 32), dtype=np.uint8)
            file.create_dataset("images", data=images, chunks=(1, 32, 32))


def write_shards(directory: Path) -> None:
    for number in range(6):
        with tarfile.open(directory / f"{number}.tar", "w") as tar:
            for sample in range(10):
                info = tarfile.TarInfo(f"{number}-{sample}.bin")
                info.size = 2000
                tar.addfile(info, io.BytesIO(contents(info.name, info.size)))


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each kind of loader, of equal content with and without announcements."""
    root = tmp_path_factory.mktemp("datasets")
    write = {"parquet": write_parquet, "hdf5": write_hdf5, "webdataset": write_shards}
    for how in HOW:
        for kind in KINDS:
            (root / how / kind).mkdir(parents=True)
            write.get(kind, write_images)(root / how / kind)
    return root


def files_beneath(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.modes(*KINDS_IN)
def test_loaders_yield_the_same_samples_in_the_same_order_and_each_file_is_opened_once(
    monarch: MonarchCommand, client: Start, datasets: Path, tmp_path: Path
) -> None:
    needs("torch")
    needs("webdataset")
    reader, kinds = client("announced_loaders"), KINDS_IN[monarch.mode]
    expected = {
        (kind, number): list(reader.epoch(datasets / "plain" / kind, number).items())
        for kind in kinds
        for number in range(EPOCHS)
    }
    assert all(len(samples) >= 40 for samples in expected.values())
    assert expected["random", 0] != expected["random", 1]
    with SlowSource(datasets, tmp_path / "slow") as slow:
        mounted = monarch.mount(slow.path, tiers={"fast": "100MiB"})
        before = slow.counters()["read_bytes"]
        with OpenCounter(slow.path) as opened:
            for kind, number in expected:
                for how in HOW:
                    read = reader.epoch(mounted.path / how / kind, number)
                    assert list(read.items()) == expected[kind, number], (how, kind, number)
            settle(mounted, 0)
            paths = opened.paths()
        announced = mounted.status()["foresight"]["announced"]
        read_bytes = slow.counters()["read_bytes"] - before
        reader.close()
        mounted.umount()
    assert set(paths.values()) == {1}
    assert read_bytes == sum((datasets / path).stat().st_size for path in paths)
    # The others draw some of the files.
    draw_all = set(kinds) - {"distributed", "weighted"}
    assert {path for path in files_beneath(datasets) if path.split("/")[1] in draw_all} <= set(
        paths
    )
    assert announced["opened"] > 0 and announced["refused"] == 0


@pytest.mark.modes("relay")
def test_tensorflow_yields_the_same_records_in_the_same_order_and_each_shard_is_opened_once(
    monarch: MonarchCommand, client: Start, make_dataset: Make, source: Path, tmp_path: Path
) -> None:
    needs("tensorflow")
    made = make_dataset("tfrecord", "--shards", 8, "--records", 240)
    for how in HOW:
        copied_tree(made, source / how)
    reader = client("announced_records")
    expected = [list(reader.epoch(source / "plain", n).items()) for n in range(EPOCHS)]
    assert [len(records) for records in expected] == [240] * EPOCHS
    with SlowSource(source, tmp_path / "slow") as slow:
        mounted = monarch.mount(slow.path, tiers={"fast": "100MiB"})
        before = slow.counters()["read_bytes"]
        with OpenCounter(slow.path) as opened:
            for number in range(EPOCHS):
                for how in HOW:
                    read = reader.epoch(mounted.path / how, number)
                    assert list(read.items()) == expected[number], (how, number)
            settle(mounted, 0)
            assert opened.paths() == dict.fromkeys(files_beneath(source), 1)
        announced = mounted.status()["foresight"]["announced"]
        read_bytes = slow.counters()["read_bytes"] - before
        reader.close()
        mounted.umount()
    assert read_bytes == sum((source / path).stat().st_size for path in files_beneath(source))
    assert announced["opened"] > 0 and announced["refused"] == 0
