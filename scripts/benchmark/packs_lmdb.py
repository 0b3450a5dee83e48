"""An LMDB of twice the tier, read in a random order by four processes.

Each contender reads two epochs of all records, each epoch in another order, with nothing in the
page cache at its begin. A contender on a mount begins with an empty tier. The baseline is the
unmodified library on the file at the source.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lmdb

from monarch.datasets.lmdb_reader import LmdbReader
from monarch.order import ChunkwiseSampler
from scripts.benchmark.page_cache import can_drop, drop_all
from scripts.benchmark.requirements import require_room
from scripts.benchmark.rows import BenchError, Result, Row, measure
from scripts.tools.mount import Mount, monarch
from tests.equipment.slowfs import SlowSource

# Records of a run, and of a run with --quick.
RECORDS = (3264, 640)
EPOCHS = 2
WORKERS = 4
BATCH = 64
GROUP = 8
# Reads that the source serves at the same time, as a parallel file system does.
SOURCE_READS = 64
# The time of the file: an old one is not checked again.
_OLD_NS = 10**18

Read = Callable[[Path, Path, Sequence[int]], int]


def by_library(file: Path, index: Path, records: Sequence[int], *, readahead: bool = True) -> int:
    """The bytes of the values of ``records``, each copied, as a training does."""
    environment = lmdb.open(str(file), subdir=False, readonly=True, lock=False, readahead=readahead)
    with environment, environment.begin() as transaction:
        return sum(len(transaction.get(_key(record), b"")) for record in records)


def by_reader(file: Path, index: Path, records: Sequence[int], *, whole: bool = False) -> int:
    total = 0
    with LmdbReader(file, index, whole_extents=whole) as reader:
        for start in range(0, len(records), BATCH):
            values = reader.get_many(records[start : start + BATCH])
            total += sum(len(bytes(value)) for value in values)
    return total


by_extents = partial(by_reader, whole=True)


@dataclass(frozen=True, slots=True)
class Contender:
    """``is_mounted``: on a mount of Monarch. ``is_chunkwise``: in the order of extents."""

    name: str
    read: Read
    is_mounted: bool = True
    is_chunkwise: bool = False


PLAIN = Contender("lmdb at the source", by_library, is_mounted=False)
CONTENDERS = (
    Contender("lmdb on the mount", by_library),
    Contender("lmdb without readahead on the mount", partial(by_library, readahead=False)),
    Contender("LmdbReader on the mount", by_reader),
    Contender("LmdbReader, chunk-wise, on the mount", by_extents, is_chunkwise=True),
    Contender("LmdbReader at the source", by_reader, is_mounted=False),
    Contender(
        "LmdbReader, chunk-wise, at the source", by_extents, is_mounted=False, is_chunkwise=True
    ),
)


@dataclass(frozen=True, slots=True)
class Epoch:
    """``read_bytes`` at the source; ``kept`` is the size of the copies in the tier at its end."""

    seconds: float
    read_bytes: int
    kept: int


class Lab:
    """One round: each contender reads its epochs when the first of its values is wanted."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._epochs: dict[str, list[Epoch]] = {}

    def seconds(self, contender: Contender, epoch: int) -> float:
        return self._of(contender)[epoch].seconds

    def read_share(self, contender: Contender, epoch: int) -> float:
        """The bytes that were read at the source over those of the file."""
        return self._of(contender)[epoch].read_bytes / self._bench.size

    def read_over_missing(self, contender: Contender) -> float:
        """The bytes that the last epoch read at the source over those that the tier lacks."""
        before, last = self._of(contender)[-2:]
        return last.read_bytes / (self._bench.size - before.kept)

    def _of(self, contender: Contender) -> list[Epoch]:
        if contender.name not in self._epochs:
            self._epochs[contender.name] = list(self._bench.epochs(contender))
        return self._epochs[contender.name]


class Bench:
    """The file, its index, and the slow source over it."""

    def __init__(self, work: Path, options: argparse.Namespace, stack: ExitStack) -> None:
        self.work = work
        self._records: int = options.files or RECORDS[options.quick]
        self._value_bytes: int = options.record_kb * 1000
        self._mounts = 0
        self._seed = 0
        require_room(work.parent, 3 * self._records * self._value_bytes)
        data = work / "data"
        data.mkdir(parents=True)
        self._write(data / "train.mdb")
        self.size = (data / "train.mdb").stat().st_size
        self.index = work / "train.mlx"
        monarch("lmdb", "index", data / "train.mdb", "-o", self.index, "-q")
        with LmdbReader(data / "train.mdb", self.index) as reader:
            self._extents = reader.extents()
        self.source = stack.enter_context(SlowSource(data, work / "slow", background=SOURCE_READS))
        self.source.rules(f"lat * {options.latency}", f"read_MBps {options.bandwidth}")

    def epochs(self, contender: Contender) -> Iterator[Epoch]:
        if not contender.is_mounted:
            for _ in range(EPOCHS):
                yield self._epoch(contender, self.source.path / "train.mdb", None)
            return
        self._mounts += 1
        with Mount(
            self.source.path,
            self.work / "mnt",
            tier=self.work / f"tier{self._mounts}",
            capacity=str(self.size // 2),
            state=self.work / f"state{self._mounts}",
            options="limits.range_min=16MiB,limits.scrub_bandwidth=0",
        ) as mounted:
            for _ in range(EPOCHS):
                yield self._epoch(contender, mounted.path / "train.mdb", mounted)

    def _epoch(self, contender: Contender, file: Path, mounted: Mount | None) -> Epoch:
        self._seed += 1
        shares = self._shares(contender)
        drop_all()
        before = self.source.counters()["read_bytes"]
        begin = time.perf_counter()
        with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("fork")) as pool:
            read = partial(contender.read, file, self.index)
            totals = list(pool.map(read, shares))
        seconds = time.perf_counter() - begin
        if sum(totals) != self._records * self._value_bytes:
            raise BenchError(f"{contender.name}: {sum(totals)} bytes came out of {file}")
        kept = 0
        if mounted is not None:
            mounted.settle(0)
            tier = mounted.status()["tiers"][0]
            kept = tier["used"]
        return Epoch(seconds, self.source.counters()["read_bytes"] - before, kept)

    def _shares(self, contender: Contender) -> list[list[int]]:
        """The records of each worker: every fourth batch, as a DataLoader gives them."""
        if contender.is_chunkwise:
            order = list(ChunkwiseSampler(self._extents, group=GROUP, seed=self._seed))
        else:
            order = random.Random(self._seed).sample(range(self._records), self._records)
        batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        return [
            [record for batch in batches[worker::WORKERS] for record in batch]
            for worker in range(WORKERS)
        ]

    def _write(self, path: Path) -> None:
        room = 2 * self._records * (self._value_bytes + 8192)
        chance = random.Random(1)
        with lmdb.open(str(path), subdir=False, map_size=room, sync=False, lock=False) as made:
            with made.begin(write=True) as transaction:
                for record in range(self._records):
                    value = chance.randbytes(self._value_bytes)
                    transaction.put(_key(record), value, append=True)
        os.utime(path, ns=(_OLD_NS, _OLD_NS))


def _key(record: int) -> bytes:
    return b"%08d" % record


def _rows() -> Iterator[Row[Lab]]:
    for epoch in range(EPOCHS):
        plain = partial(_seconds, contender=PLAIN, epoch=epoch)
        for contender in CONTENDERS:
            measured = partial(_seconds, contender=contender, epoch=epoch)
            yield Row(f"epoch {epoch + 1}, {contender.name}", measured, "s", plain, PLAIN.name)
    for epoch in range(EPOCHS):
        for contender in (PLAIN, *CONTENDERS):
            yield Row(
                f"epoch {epoch + 1}, read at the source, {contender.name}",
                partial(_read_share, contender=contender, epoch=epoch),
                "of the file",
            )
    for contender in CONTENDERS:
        if contender.is_mounted:
            yield Row(
                f"epoch {EPOCHS}, read at the source over what the tier lacks, {contender.name}",
                partial(_read_over_missing, contender=contender),
                "times",
                bar=1.02,
            )


def _seconds(lab: Lab, *, contender: Contender, epoch: int) -> float:
    return lab.seconds(contender, epoch)


def _read_share(lab: Lab, *, contender: Contender, epoch: int) -> float:
    return lab.read_share(contender, epoch)


def _read_over_missing(lab: Lab, *, contender: Contender) -> float:
    return lab.read_over_missing(contender)


def measured(
    options: argparse.Namespace, work: Path
) -> tuple[list[Result[Lab]], dict[str, object]]:
    if not can_drop():
        raise BenchError("the page cache must be dropped before each epoch, which needs root")
    with ExitStack() as stack:
        bench = Bench(work, options, stack)
        results = measure(list(_rows()), partial(Lab, bench), options.rounds)
        conditions: dict[str, object] = {
            "records": options.files or RECORDS[options.quick],
            "file_bytes": bench.size,
            "tier_bytes": bench.size // 2,
            "record_bytes": options.record_kb * 1000,
            "workers": WORKERS,
            "batch": BATCH,
            "group": GROUP,
        }
    return results, conditions
