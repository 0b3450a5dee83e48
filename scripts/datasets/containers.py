"""Samples in a few large files: WebDataset shards, HDF5, LMDB and SQLite."""

from __future__ import annotations

import argparse
import io
import sqlite3
import struct
import tarfile

import numpy as np

from scripts.datasets.images import samples
from scripts.datasets.target import ARCHIVE_MTIME, Meter, new_directory, new_file, shares


def webdataset(options: argparse.Namespace) -> None:
    root = new_directory(options.path, needs=int(options.samples * (options.mean * 1.1 + 2048)))
    meter = Meter("samples", options.samples)
    made = samples(options.samples, classes=options.classes, mean=options.mean, seed=options.seed)
    for shard, count in enumerate(shares(options.samples, options.shards)):
        with tarfile.open(root / f"train-{shard:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for _ in range(count):
                sample = next(made)
                _add_member(tar, f"{sample.key}.jpg", sample.jpeg)
                _add_member(tar, f"{sample.key}.cls", str(sample.label).encode())
                meter.add(1, len(sample.jpeg))
    meter.finish(root)


def _add_member(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(content), ARCHIVE_MTIME, 0o444
    tar.addfile(member, io.BytesIO(content))


def hdf5(options: argparse.Namespace) -> None:
    import h5py  # takes half a second, and the other kinds do not need it

    count, side = options.samples, options.side
    path = new_file(options.path, needs=count * (side * side * 3 + 8))
    meter = Meter("samples", count)
    generator = np.random.default_rng(options.seed)
    batch = 16
    with h5py.File(path, "w", libver="latest") as file:
        shape = (count, side, side, 3)
        chunks = (min(batch, count), side, side, 3)
        images = file.create_dataset("images", shape, "u1", chunks=chunks)
        labels = file.create_dataset("labels", (count,), "i8", chunks=(min(1024, count),))
        for first in range(0, count, batch):
            here = min(batch, count - first)
            block = generator.integers(0, 256, (here, side, side, 3), dtype=np.uint8)
            images[first : first + here] = block
            meter.add(here, block.nbytes)
        labels[:] = generator.integers(0, options.classes, count)
    meter.finish(path)


def lmdb_records(options: argparse.Namespace) -> None:
    import lmdb  # only this kind needs it

    needs = int(options.records * (options.mean * 1.1 + 4096)) + 16 * 1024 * 1024
    root = new_directory(options.path, needs=needs)
    meter = Meter("records", options.records)
    made = samples(options.records, classes=options.classes, mean=options.mean, seed=options.seed)
    # No other process has it open, and a lock file would be one more file in the data set.
    with lmdb.open(str(root), map_size=2 * needs, lock=False) as environment:
        for first in range(0, options.records, 256):
            with environment.begin(write=True) as transaction:
                for _ in range(min(256, options.records - first)):
                    sample = next(made)
                    value = struct.pack("<I", sample.label) + sample.jpeg
                    transaction.put(sample.key.encode(), value)
                    meter.add(1, len(value))
    meter.finish(root)


def sqlite(options: argparse.Namespace) -> None:
    path = new_file(options.path, needs=int(options.records * options.mean * 1.1))
    meter = Meter("records", options.records)
    made = samples(options.records, classes=options.classes, mean=options.mean, seed=options.seed)
    connection = sqlite3.connect(path)
    try:
        with connection:
            connection.execute(
                "CREATE TABLE samples (id INTEGER PRIMARY KEY, label INTEGER, image BLOB)"
            )
            for number, sample in enumerate(made):
                connection.execute(
                    "INSERT INTO samples VALUES (?, ?, ?)", (number, sample.label, sample.jpeg)
                )
                meter.add(1, len(sample.jpeg))
    finally:
        connection.close()
    meter.finish(path)
