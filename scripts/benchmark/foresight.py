"""Epoch 1 with what is fetched ahead: the readers of a PyTorch DataLoader over a slow source.

Each round measures the same readers on the source itself, on mounts with an empty tier (with the
order announced, unmodified, and with all fetches ahead switched off), and what users do today: copy
the files to the tier with eight processes, then read them there. Each value is in files a second of
the whole epoch, copying included. The page cache of the source's file system has all bytes, so a
source is as slow as its rules say.

The last rows have what foresight costs the daemon for an open (``open_cost.py``).
"""

from __future__ import annotations

import argparse
import operator
import random
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from scripts.benchmark.open_cost import BAR_US, Cost, OpenCost
from scripts.benchmark.requirements import require_slow_source
from scripts.benchmark.rows import BenchError, Result, Row, measure
from scripts.datasets.main import make
from scripts.tools.loader import WORKERS, Files
from scripts.tools.mount import Mount
from tests.equipment.slowfs import SlowSource

BATCH = 32
COPIERS = 8
# Latency of a call in ms, bandwidth in MB/s; and the bars of a row against the source: announced,
# unmodified.
SOURCES = ((10.0, 400.0, 3.0, 1.5), (1.0, 50.0, 0.98, 0.98))
ALL_OFF = "foresight.announced=false,foresight.ahead=false,foresight.fill=false"


class Lab:
    """One round over one source."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        bench.round += 1
        self._first_batch_s = self._announced_s = 0.0

    def source(self) -> float:
        return self._epoch(self._bench.slow)

    def announced(self) -> float:
        rate = self._mounted("", announce=True)
        self._announced_s = self._first_batch_s
        return rate

    def unmodified(self) -> float:
        return self._mounted("")

    def switched_off(self) -> float:
        return self._mounted(ALL_OFF)

    def first_batch(self) -> float:
        """Milliseconds until the first batch of the last announced epoch."""
        return self._announced_s * 1e3

    def copied(self) -> float:
        """Copies all files to the file system of the tier, then reads them there."""
        bench = self._bench
        staged = bench.work / f"staged{bench.round}"
        begin = time.perf_counter()
        names = "\0".join(sorted(path.name for path in bench.slow.iterdir() if path.is_dir()))
        staged.mkdir()
        subprocess.run(
            ["xargs", "-0", "-n1", f"-P{COPIERS}", "cp", "-r", "-t", str(staged)],
            input="\0".join(f"{bench.slow}/{name}" for name in names.split("\0")),
            text=True,
            check=True,
        )
        self._epoch(staged)
        seconds = time.perf_counter() - begin
        shutil.rmtree(staged)
        return len(bench.names) / seconds

    def _mounted(self, options: str, *, announce: bool = False) -> float:
        with self._bench.mount(options) as mounted:
            return self._epoch(mounted.path, announce=announce)

    def _epoch(self, root: Path, *, announce: bool = False) -> float:
        """Files a second of one epoch in a new random order."""
        from torch.utils.data import DataLoader

        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        names = self._bench.names
        loader: Any = DataLoader(
            Files([f"{root}/{name}" for name in names]),
            batch_size=BATCH,
            num_workers=WORKERS,
            sampler=self._bench.order(),
            multiprocessing_context="fork",
        )
        if announce:
            from monarch.frameworks import torch

            loader = torch.announce(loader)
        begin = time.perf_counter()
        self._first_batch_s, count = 0.0, 0
        for batch in loader:
            self._first_batch_s = self._first_batch_s or time.perf_counter() - begin
            count += len(batch)
        seconds = time.perf_counter() - begin
        if count != len(names):
            raise BenchError(f"{count} of {len(names)} files came out of {root}")
        return count / seconds


class Bench:
    """The data and the slow source over it."""

    def __init__(self, work: Path, files: int, stack: ExitStack) -> None:
        self.work = work
        self.round = 0
        self._mounts = 0
        self._chance = random.Random(1)
        data = work / "data"
        make("imagefolder", data, "--files", files, "--classes", 50)
        self.names = sorted(str(path.relative_to(data)) for path in data.glob("*/*"))
        self.source = stack.enter_context(SlowSource(data, work / "slow"))
        self.slow = self.source.path

    def order(self) -> list[int]:
        return self._chance.sample(range(len(self.names)), len(self.names))

    def mount(self, options: str) -> Mount:
        """A mount with an empty tier. The tiers of earlier rounds stay until the end: for a minute
        after many files were deleted, ext4 takes almost a millisecond to create one."""
        self._mounts += 1
        return Mount(
            self.slow,
            self.work / "mnt",
            tier=self.work / f"tier{self._mounts}",
            capacity="10GiB",
            state=self.work / f"state{self._mounts}",
            options=options,
        )


def _rows(announced: float, unmodified: float, is_latency: bool) -> Iterator[Row[Lab]]:
    for name, function, bar in (
        ("announced", Lab.announced, announced),
        ("shuffled, unmodified", Lab.unmodified, unmodified),
        ("fetches ahead switched off", Lab.switched_off, None),
    ):
        yield Row(name, function, "files/s", Lab.source, "source", bar=bar, more_is_better=True)
    yield Row("first batch, announced", Lab.first_batch, "ms")
    yield Row(
        f"announced, against cp with {COPIERS} processes",
        Lab.announced,
        "files/s",
        Lab.copied,
        "cp, then tier",
        bar=1.0 if is_latency else None,
        more_is_better=True,
    )


def _open_cost(work: Path, rounds: int) -> list[Result[Any]]:
    rows: list[Row[Cost]] = [
        Row("an open, added by foresight", operator.attrgetter("added"), "us", bar=BAR_US),
        Row(
            "an open in a recognised order, added by foresight",
            operator.attrgetter("added_recognised"),
            "us",
            bar=BAR_US,
        ),
        Row("an open without foresight", operator.attrgetter("without"), "us"),
    ]
    with closing(OpenCost(work / "opens")) as cost:
        return measure(rows, cost.measure, rounds)


def _epochs(options: argparse.Namespace, work: Path) -> list[Result[Lab]]:
    require_slow_source()
    results: list[Result[Lab]] = []
    with ExitStack() as stack:
        bench = Bench(work, options.files, stack)
        for latency, bandwidth, announced, unmodified in SOURCES:
            bench.source.rules(f"lat * {latency}", f"read_MBps {bandwidth}")
            rows = [
                Row(
                    f"{latency:g} ms, {bandwidth:g} MB/s: {row.name}",
                    row.function,
                    row.unit,
                    row.against,
                    row.against_name,
                    row.bar,
                    row.more_is_better,
                )
                for row in _rows(announced, unmodified, latency == SOURCES[0][0])
            ]
            results += measure(rows, partial(Lab, bench), options.rounds)
    return results


def run(
    options: argparse.Namespace, work: Path
) -> tuple[str, dict[str, object], list[Result[Any]]]:
    results: list[Result[Any]] = []
    if options.only != "opens":
        results += _epochs(options, work)
    if options.only != "epochs":
        results += _open_cost(work, options.rounds)
    conditions: dict[str, object] = {
        "files": options.files,
        "rounds": options.rounds,
        "workers": WORKERS,
        "sources": [{"latency_ms": each[0], "bandwidth_MBps": each[1]} for each in SOURCES],
    }
    title = f"Epoch 1 of {options.files} JPEGs of 110 KB, DataLoader with {WORKERS} workers"
    return title, conditions, results
