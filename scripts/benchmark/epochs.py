"""Epochs: a real PyTorch DataLoader over a slow source, over Monarch, and over the tier itself.

Each round begins with an empty tier and one mount, which stays for three epochs, as it does for a
training job. Epoch 1 is compared with the same readers on the source, the later epochs with the
same readers on a plain copy on the tier's file system. By then both are in memory and nothing waits
for a disk, so the overhead of Monarch weighs most. Then Monarch is mounted again for one more
epoch, in which every byte has to cross the daemon. Before each epoch the readers list the tree that
they will read, as an image folder does. The worker processes stay the same throughout.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from scripts.benchmark.requirements import require_slow_source
from scripts.benchmark.rows import BenchError, Result, Row, measure
from scripts.datasets.main import make
from scripts.tools.loader import WORKERS, Loader
from scripts.tools.mount import Mount
from tests.equipment.mounts import kind_of_file_system
from tests.equipment.processes import cpu_seconds
from tests.equipment.slowfs import SlowSource

BATCH = 32
SIDE = 224


class Images:
    """The pixels of an image, or without ``decode`` the size of its file."""

    def __init__(self, *, decode: bool) -> None:
        self._decode = decode

    def __getitem__(self, path: str) -> Any:
        import numpy as np
        import torch

        with open(path, "rb") as file:
            content = file.read()
        if not self._decode:
            return len(content)
        from PIL import Image

        image = Image.open(io.BytesIO(content)).convert("RGB").crop((0, 0, SIDE, SIDE))
        return torch.from_numpy(np.array(image))


class Readers:
    """The workers of a DataLoader, which read in a new order in each epoch."""

    def __init__(self, *, decode: bool, seed: int = 1) -> None:
        self._chance = random.Random(seed)
        self._loader = Loader(Images(decode=decode), batch_size=BATCH)

    def epoch(self, root: Path, names: list[str]) -> float:
        """Seconds until the last batch of all files, in an order that was not used before."""
        paths = [entry.path for entry in _files(root)]
        self._chance.shuffle(paths)
        begin = time.perf_counter()
        count = sum(len(batch) for batch in self._loader.epoch(paths))
        seconds = time.perf_counter() - begin
        if count != len(names):
            raise BenchError(f"{count} of {len(names)} files came out of {root}")
        return seconds


def _files(directory: Path | str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files(entry.path)
            elif not entry.name.startswith("."):
                yield entry


class Lab:
    """One round of one kind of reader: a fresh tier, and the trees to read."""

    def __init__(self, bench: Bench, readers: Readers) -> None:
        self._bench, self._readers = bench, readers
        self._cpu_s = {"first": 0.0, "later": 0.0}
        bench.reset()

    def source(self) -> float:
        return self._readers.epoch(self._bench.slow, self._bench.names)

    def plain(self) -> float:
        return self._readers.epoch(self._bench.plain, self._bench.names)

    def first(self) -> float:
        """Epoch 1, without the time to mount; then wait until all files have a copy."""
        mounted = self._bench.mount()
        pid = mounted.status()["pid"]
        before = cpu_seconds(pid)
        seconds = self._readers.epoch(mounted.path, self._bench.names)
        mounted.settle(len(self._bench.names))
        self._cpu_s["first"] = cpu_seconds(pid) - before
        return seconds

    def later(self) -> float:
        """Epoch 2 or a later one. Fails if a file of the source is opened."""
        mounted = self._bench.mounted
        pid = mounted.status()["pid"]
        opens, before = self._bench.opens(), cpu_seconds(pid)
        seconds = self._readers.epoch(mounted.path, self._bench.names)
        self._cpu_s["later"] = cpu_seconds(pid) - before
        opened = self._bench.opens() - opens
        if opened:
            raise BenchError(f"a later epoch opened {opened} files of the source; it must be none")
        return seconds

    def remounted(self) -> float:
        """An epoch after a new mount: the kernel has nothing of it in memory."""
        self._bench.mount()
        return self.later()

    def cpu_first(self) -> float:
        """Processor time of the daemon for each file of the last epoch 1, in milliseconds."""
        return self._cpu_s["first"] * 1e3 / len(self._bench.names)

    def cpu_later(self) -> float:
        return self._cpu_s["later"] * 1e3 / len(self._bench.names)


class Bench:
    """The data, the slow source over it, a plain copy, and where Monarch mounts."""

    def __init__(
        self, work: Path, tiers: Path, files: int, rules: tuple[str, ...], stack: ExitStack
    ) -> None:
        self._work, self._tiers = work, tiers
        self._round = 0
        data = work / "data"
        make("imagefolder", data, "--files", files, "--classes", 10)
        self.names = sorted(str(path.relative_to(data)) for path in data.glob("*/*"))
        self.plain = tiers / "plain"
        shutil.copytree(data, self.plain)
        self._source = stack.enter_context(SlowSource(data, work / "slow"))
        self._source.rules(*rules)
        self.slow = self._source.path
        self._mounts = stack.enter_context(ExitStack())

    def reset(self) -> None:
        # The tiers of earlier rounds stay until the end: for a minute after many files were
        # deleted, ext4 takes almost a millisecond to create one.
        self._round += 1

    def mount(self) -> Mount:
        """Mount, in place of an earlier mount, with the tier of this round."""
        self._mounts.close()
        self.mounted = self._mounts.enter_context(
            Mount(
                self.slow,
                self._work / "mnt",
                tier=self._tiers / f"tier{self._round}",
                capacity="10GiB",
                state=self._work / f"state{self._round}",
            )
        )
        return self.mounted

    def opens(self) -> int:
        return self._source.counters()["open"]


ROWS: tuple[Row[Lab], ...] = (
    Row("epoch 1", Lab.first, against=Lab.source, against_name="source", bar=1.10),
    Row("epoch 2", Lab.later, against=Lab.plain, against_name="tier", bar=1.30),
    Row("epoch 3", Lab.later, against=Lab.plain, against_name="tier", bar=1.30),
    Row("epoch after a new mount", Lab.remounted, against=Lab.plain, against_name="tier"),
    Row("CPU of the daemon, epoch 1", Lab.cpu_first, "ms/file"),
    Row("CPU of the daemon, after a new mount", Lab.cpu_later, "ms/file"),
)


def _elsewhere(directory: Path, stack: ExitStack) -> Path:
    made = tempfile.mkdtemp(prefix="monarch-bench-tier-", dir=directory)
    stack.callback(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def run(
    options: argparse.Namespace, work: Path
) -> tuple[str, dict[str, object], list[Result[Lab]]]:
    require_slow_source()
    rules = (f"lat * {options.latency}", f"read_MBps {options.bandwidth}")
    results: list[Result[Lab]] = []
    with ExitStack() as stack:
        tiers = work if options.tier is None else _elsewhere(options.tier, stack)
        bench = Bench(work, tiers, options.files, rules, stack)
        for words, decode in (("decode", True), ("read only", False)):
            readers = Readers(decode=decode)
            readers.epoch(bench.plain, bench.names)  # starts the workers
            rows = [
                Row(
                    f"{row.name}, {words}",
                    row.function,
                    row.unit,
                    row.against,
                    row.against_name,
                    # Without decoding the row shows the cost of the interpreter and has no bar:
                    # training decodes its files.
                    row.bar if decode or row.function is Lab.first else None,
                )
                for row in ROWS
            ]
            results += measure(rows, partial(Lab, bench, readers), options.rounds)
            del readers
    conditions = {
        "files": options.files,
        "rounds": options.rounds,
        "workers": WORKERS,
        "latency_ms": options.latency,
        "bandwidth_MBps": options.bandwidth,
        "tier": kind_of_file_system(options.tier or work),
    }
    title = (
        f"{options.files} JPEGs of 110 KB, DataLoader with {WORKERS} workers, "
        f"source of {options.latency:g} ms a call and {options.bandwidth:g} MB/s, "
        f"tier on {conditions['tier']}"
    )
    return title, conditions, results
