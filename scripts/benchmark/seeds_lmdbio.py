"""LMDBIO's reads (SC 2018): an LMDB at a source with latency, by the library and ``LmdbReader``.

In LMDBIO one reader a node knows where the records are, and reads many of them at once. Four
processes read all records in a random order, once, and nothing is in memory before. The bandwidth
does not limit them: the paper's file systems have many servers.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import lmdb

from monarch.datasets.lmdb_reader import LmdbReader
from monarch.datasets.ranges import merged
from scripts.benchmark.packs_lmdb import CONTENDERS, PLAIN, Bench, Contender
from scripts.benchmark.page_cache import can_drop
from scripts.benchmark.rows import BenchError, Result, Row, measure

RECORD_KB = 9
# Records for each one of --files.
_MORE = 10
LATENCY_MS, BANDWIDTH_MB_S = 10.0, 1000.0
READER, BY_EXTENTS = CONTENDERS[-2:]
# Records in a call, for reads in the order of the file.
TOGETHER = 256
NODE_READERS = 8


class Lab:
    """One round: each contender reads one epoch."""

    def __init__(self, bench: Bench) -> None:
        self._seconds = {
            each.name: next(bench.epochs(each)).seconds for each in (PLAIN, READER, BY_EXTENTS)
        }
        self._file, self._index = bench.work / "data" / "train.mdb", bench.index

    def speed_up(self, contender: Contender) -> float:
        """The time of the library over that of ``contender``."""
        return self._seconds[PLAIN.name] / self._seconds[contender.name]

    def walked(self) -> float:
        """The records that readers walk over with a cursor for each record that they use: each of
        them uses a consecutive part, and begins at the start of the file."""
        visited = 0
        with lmdb.open(str(self._file), subdir=False, readonly=True, lock=False) as environment:
            records = environment.stat()["entries"]
            for reader in range(NODE_READERS):
                end = records * (reader + 1) // NODE_READERS
                with environment.begin() as transaction, transaction.cursor() as cursor:
                    visited += sum(1 for _ in itertools.islice(cursor.iternext(values=False), end))
        return visited / records

    def read_mb(self) -> float:
        """The mean size of a read of ``LmdbReader``, in MB, in the order of the file."""
        sizes = []
        with LmdbReader(self._file, self._index) as reader:
            table = reader.table
            for start in range(0, len(reader), TOGETHER):
                chosen = slice(start, start + TOGETHER)
                found = merged(table.offsets[chosen], table.lengths[chosen])
                sizes += [each.length for each in found]
        return sum(sizes) / len(sizes) / 1e6


def of_lmdbio(options: argparse.Namespace, work: Path) -> list[Result[Lab]]:
    if not can_drop():
        raise BenchError("LMDBIO: the page cache must be dropped, which needs root")

    def row(
        name: str, published: str, function: Callable[[Lab], float], unit: str, bar: float | None
    ) -> Row[Lab]:
        return Row(
            name,
            function,
            unit,
            bar=bar,
            more_is_better=True,
            contender="LMDBIO",
            published=published,
            how="run",
        )

    rows = [
        row(
            f"records that {NODE_READERS} cursors walk over, for each that is used",
            "many: the reason for LMDBIO",
            Lab.walked,
            "",
            4.0,
        ),
        row(f"size of a read of {TOGETHER} records", "4 (coalesced)", Lab.read_mb, "MB", 1.0),
        row(
            f"time of an epoch, lmdb against {READER.name}",
            "20 (one reader a node)",
            partial(_speed_up, contender=READER),
            "times",
            # LMDBIO reads in the order of the file.
            None,
        ),
        row(
            f"time of an epoch, lmdb against {BY_EXTENTS.name}",
            "77 (all six, 9,216 processes)",
            partial(_speed_up, contender=BY_EXTENTS),
            "times",
            2.0,
        ),
    ]
    with ExitStack() as stack:
        chosen = argparse.Namespace(
            files=_MORE * options.files,
            record_kb=RECORD_KB,
            quick=options.quick,
            latency=LATENCY_MS,
            bandwidth=BANDWIDTH_MB_S,
        )
        bench = Bench(work, chosen, stack)
        return measure(rows, partial(Lab, bench), options.rounds)


def _speed_up(lab: Lab, *, contender: Contender) -> float:
    return lab.speed_up(contender)
