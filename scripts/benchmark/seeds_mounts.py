"""Figures of Monarch (CCGrid 2022) and CoorDL (VLDB 2021) on real mounts over a throttled source.

The readers are four workers of a PyTorch DataLoader, which read all files in a new order in each
epoch. The training is a pause after each batch. The mount is ``datapath: relay, open: open``, so
each open of a file without a copy is an open at the source, as where memory is short.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.benchmark.packs_writers import tree
from scripts.benchmark.requirements import ATTRIBUTES_EXPIRE_S, require_room
from scripts.benchmark.rows import BenchError, Result, Row, measure
from scripts.tools.loader import Loader
from scripts.tools.mount import Mount
from tests.equipment.slowfs import SlowSource

RUN = "run"
FILE_BYTES = 110_000
BATCH = 32
EPOCHS = 3
# The paper's tier of 115 GiB holds this share of its data set of 200 GiB.
SHARE = 0.56
# Time of a training step, as a share of the time that the source takes for the bytes of a batch.
FREE, BUSY = 0.0, 0.95
# CoorDL: files in the mounts whose misses are counted.
COUNTED, COUNTED_BYTES = 500, 16_384
RELAY = "datapath=relay,open=open,limits.scrub_bandwidth=0"


class Sizes:
    """The size of each file, by its path."""

    def __getitem__(self, path: str) -> int:
        with open(path, "rb", buffering=0) as file:
            return len(file.read())


@dataclass(frozen=True, slots=True)
class Training:
    """Three epochs: their time, and what the source was asked for meanwhile."""

    seconds: float
    opens: int
    calls: int
    read_bytes: int


class Bench:
    """The files, the slow source over them, and the readers."""

    def __init__(self, work: Path, options: argparse.Namespace, stack: ExitStack) -> None:
        self._work = work
        self._mounts = 0
        require_room(work, 6 * options.files * FILE_BYTES)
        self._names = tree(work / "data", options.files, FILE_BYTES)
        self._bytes = options.files * FILE_BYTES
        self._batch_s = BATCH * FILE_BYTES / (options.bandwidth * 1e6)
        self._source = stack.enter_context(SlowSource(work / "data", work / "slow"))
        self._source.rules(f"lat * {options.latency}", f"read_MBps {options.bandwidth}")
        self._loader = Loader(Sizes(), batch_size=BATCH)
        # Starts the workers.
        self._epoch(work / "data", 0, 0.0)

    def trained(self, *, step: float, mounted: bool) -> Training:
        """``step``: ``FREE`` or ``BUSY``."""
        pause_s = step * self._batch_s
        time.sleep(ATTRIBUTES_EXPIRE_S)
        if not mounted:
            return self._trained(self._source.path, pause_s)
        self._mounts += 1
        with Mount(
            self._source.path,
            self._work / "mnt",
            tier=self._work / f"tier{self._mounts}",
            capacity=str(int(SHARE * self._bytes)),
            state=self._work / f"state{self._mounts}",
            options=RELAY,
        ) as mount:
            return self._trained(mount.path, pause_s)

    def _trained(self, root: Path, pause_s: float) -> Training:
        calls, before = self._source.calls(), self._source.counters()
        begin = time.perf_counter()
        for epoch in range(EPOCHS):
            self._epoch(root, epoch, pause_s)
        seconds = time.perf_counter() - begin
        after = self._source.counters()
        opens, read_bytes = (after[name] - before[name] for name in ("open", "read_bytes"))
        return Training(seconds, opens, self._source.calls() - calls, read_bytes)

    def _epoch(self, root: Path, epoch: int, pause_s: float) -> None:
        order = random.Random(epoch).sample(self._names, len(self._names))
        count = 0
        for sizes in self._loader.epoch([f"{root}/{name}" for name in order]):
            count += len(sizes)
            time.sleep(pause_s)
        if count != len(self._names):
            raise BenchError(f"{count} of {len(self._names)} files came out of {root}")


class Lab:
    """One round: each training is measured when the first of its values is wanted."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._of: dict[tuple[float, bool], Training] = {}

    def ratio(self, value: Callable[[Training], float], step: float) -> float:
        """A value of the mount over that of the source alone."""
        ours, theirs = (value(self._trained(step, mounted)) for mounted in (True, False))
        return ours / theirs

    def _trained(self, step: float, mounted: bool) -> Training:
        if (step, mounted) not in self._of:
            self._of[step, mounted] = self._bench.trained(step=step, mounted=mounted)
        return self._of[step, mounted]


def monarch_rows() -> list[Row[Lab]]:
    """The values are relative to the same training on the source alone."""

    def row(
        name: str, published: str, value: Callable[[Training], float], step: float, bar: float
    ) -> Row[Lab]:
        function = partial(_ratio, value=value, step=step)
        return Row(
            f"{name} in {EPOCHS} epochs, {SHARE:.0%} fits, against the source alone",
            function,
            bar=bar,
            unit="",
            contender="Monarch",
            published=published,
            how=RUN,
        )

    return [
        row("calls at the source", "0.44 to 0.50", lambda found: found.calls, FREE, 0.50),
        row("opens at the source", "-", lambda found: found.opens, FREE, 0.65),
        row("bytes", "0.63, by arithmetic", lambda found: found.read_bytes, FREE, 0.65),
        row(
            "time, bound by reads",
            "0.63 to 0.65 (PyTorch), 0.72 to 0.79 (TensorFlow)",
            lambda found: found.seconds,
            FREE,
            0.80,
        ),
        row(
            "time, bound by the GPU",
            "0.95 (ResNet-50)",
            lambda found: found.seconds,
            BUSY,
            1.05,
        ),
    ]


def _ratio(lab: Lab, *, value: Callable[[Training], float], step: float) -> float:
    return lab.ratio(value, step)


def of_monarch(options: argparse.Namespace, work: Path) -> list[Result[Lab]]:
    with ExitStack() as stack:
        bench = Bench(work, options, stack)
        return measure(monarch_rows(), partial(Lab, bench), options.rounds)


# -- CoorDL ----------------------------------------------------------------------------------------


class Misses:
    """Mounts of small files whose opens at the source are counted."""

    def __init__(self, work: Path, stack: ExitStack) -> None:
        self._work = work
        self._mounts = 0
        self._names = tree(work / "data", COUNTED, COUNTED_BYTES)
        self._source = stack.enter_context(SlowSource(work / "data", work / "slow"))

    def of(self, share: float) -> float:
        """The misses of the third epoch in per cent, if ``share`` of the files fits."""
        self._mounts += 1
        with Mount(
            self._source.path,
            self._work / "mnt",
            tier=self._work / f"tier{self._mounts}",
            capacity=str(int(share * COUNTED) * COUNTED_BYTES),
            state=self._work / f"state{self._mounts}",
            options=RELAY,
        ) as mount:
            for epoch in range(EPOCHS - 1):
                self._read(mount.path, epoch)
                mount.settle(0)
            before = self._source.counters()["open"]
            self._read(mount.path, EPOCHS)
            return 100 * (self._source.counters()["open"] - before) / COUNTED

    def _read(self, root: Path, seed: int) -> None:
        for name in random.Random(seed).sample(self._names, len(self._names)):
            (root / name).read_bytes()


def _of(misses: Misses, *, share: float) -> float:
    return misses.of(share)


def of_coordl(options: argparse.Namespace, work: Path) -> list[Result[Misses]]:
    rows = [
        Row(
            f"misses of a mount, {share:.0%} cached",
            partial(_of, share=share),
            "%",
            bar=100 - 100 * share + 1,
            contender="CoorDL",
            published=f"{100 - 100 * share:.0f} (MinIO)",
            how=RUN,
        )
        for share in (0.35, 0.65)
    ]
    with ExitStack() as stack:
        misses = Misses(work, stack)
        return measure(rows, lambda: misses, options.rounds)
