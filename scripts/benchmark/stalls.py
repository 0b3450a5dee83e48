"""A real job of PyTorch under ``monarch analyze``: what it is called, and what the advice brings.

The workers of a DataLoader decode and augment JPEG files of an image folder on all cores; a step of
the training is a pause of three quarters of the time that they need for a batch. So the job waits
for prepared batches while its source is fast. With a source of 20 MB/s it waits longer for files.
Then it trains on two mounts of the same source: one with a tier of the size that the analysis
names, and one with a tier for all files. Nothing is hidden from it. Passes over the same samples
alternate, so what changes on the machine meanwhile changes both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from scripts.benchmark.requirements import require_room, require_slow_source
from scripts.benchmark.rows import BenchError, Result, Row, measure
from scripts.benchmark.stalls_training import command
from scripts.datasets.images import Images
from scripts.tools.launch import ROOT
from scripts.tools.mount import Mount
from tests.equipment.slowfs import SlowSource

SIZE, CLASSES = 110_000, 10
SLOW_MB_S = 20
# The training takes this share of the time of a batch of the loader alone.
STEP = 0.75
# With 20 batches a window of four took 0.3 s, and the windows differed by 6 to 10 % (CV).
ITERATIONS = 60
# The fetch stall that may be left.
BAR = 0.05
# Pairs of passes over the samples on both mounts.
PAIRS = 12
# The exit code of an analysis without a verdict.
UNSURE = 15

Profile = dict[str, Any]


class Bench:
    def __init__(self, work: Path, options: argparse.Namespace, stack: ExitStack) -> None:
        self._work = work
        self._files: int = options.files
        self._workers = len(os.sched_getaffinity(0))
        self._mounts = 0
        require_room(work.parent, 4 * self._files * SIZE)
        images = Images(SIZE, seed=1, expected=self._files)
        for number in range(self._files):
            path = work / f"data/class{number % CLASSES}/{number:06d}.jpeg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(images.jpeg(number, number % CLASSES))
        self._source = stack.enter_context(SlowSource(work / "data", work / "slow"))
        loaded = self._ran([*command(work / "data", self._workers, 0.0), "load"])
        self._step_s = STEP * float(loaded)

    def profile(self, *, limit: int, capacity: int) -> Profile:
        """The profile of the job on a new mount. ``limit`` of the source in MB/s, 0: the files
        themselves are the source."""
        source = f"{limit} MB/s" if limit else "without a limit"
        sys.stderr.write(f"analysis: source {source}, tier of {capacity:,} bytes\n")
        out = self._work / "profile.json"
        with self._mounted(capacity, is_slow=limit > 0) as mount:
            self._source.rules(*([f"read_MBps {limit}"] if limit else []))
            analysis = [sys.executable, "-m", "monarch", "analyze", "run", "--json"]
            analysis += ["--mount", str(mount.path), "--out", str(out)]
            analysis += ["--iters", str(ITERATIONS), "--x", "0", "--"]
            self._ran([*analysis, *command(mount.path, self._workers, self._step_s)], UNSURE)
        profile = dict(json.loads(out.read_text()))
        report = [sys.executable, "-m", "monarch", "analyze", "report", str(out)]
        sys.stderr.write(self._ran(report, UNSURE))
        return profile

    def stall(self, *, limit: int, capacity: int) -> float:
        """The share of the time that the job waits for files with a tier of ``capacity`` bytes: how
        much longer a batch takes than with all files in a tier, as the median of pairs."""
        with (
            self._mounted(capacity, is_slow=True) as mount,
            self._mounted(self.whole(), is_slow=True) as whole,
        ):
            self._source.rules(f"read_MBps {limit}")
            training = command(mount.path, self._workers, self._step_s)
            before = _source_opens(mount)
            times = json.loads(self._ran([*training, "pairs", str(whole.path), str(PAIRS)]))
            opens = (_source_opens(mount) - before) / PAIRS
        ratios = sorted(its_s / whole_s for its_s, whole_s in times)
        sys.stderr.write(
            f"tier of {capacity:,} bytes: {opens:.0f} of {self._files} files a pass from the"
            f" source, a batch takes {median(ratios):.3f} times as long as with all files in the"
            f" tier ({ratios[0]:.3f} to {ratios[-1]:.3f} in {PAIRS} pairs)\n"
        )
        return max(0.0, 1 - 1 / float(median(ratios)))

    @contextmanager
    def _mounted(self, capacity: int, *, is_slow: bool) -> Iterator[Mount]:
        """A new mount that has a copy of each file for which its tier has room."""
        self._mounts += 1
        self._source.rules()
        with Mount(
            self._source.path if is_slow else self._work / "data",
            self._work / f"mnt{self._mounts}",
            tier=self._work / f"tier{self._mounts}",
            capacity=str(capacity),
            state=self._work / f"state{self._mounts}",
            options="open=open,limits.scrub_bandwidth=0",
        ) as mount:
            for path in sorted(mount.path.glob("*/*")):
                path.read_bytes()
            mount.settle(0)
            yield mount

    def whole(self) -> int:
        """A capacity for all files."""
        return 2 * self._files * SIZE

    def _ran(self, words: list[str], *allowed: int) -> str:
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, *allowed):
            raise BenchError(f"{' '.join(words[1:5])}: {done.stderr.strip()[-1000:]}")
        return done.stdout


class Lab:
    """One round: each profile is measured when the first of its values is wanted."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    @cached_property
    def fast(self) -> Profile:
        return self._bench.profile(limit=0, capacity=self._bench.whole())

    @cached_property
    def slow(self) -> Profile:
        return self._bench.profile(limit=SLOW_MB_S, capacity=self._bench.whole())

    def left(self) -> float:
        """The fetch stall with the tier of the advice. Raises BenchError if there is none."""
        size = self.slow["result"]["smallest_tier"]
        if size is None:
            raise BenchError("the analysis names no size of a tier")
        return self._bench.stall(limit=SLOW_MB_S, capacity=size)


def _source_opens(mount: Mount) -> int:
    return int(mount.status()["source_totals"]["opens"])


def rows() -> list[Row[Lab]]:
    def called(which: str, verdict: str) -> Callable[[Lab], float]:
        return lambda lab: float(getattr(lab, which)["result"]["verdict"] == verdict)

    def stall(lab: Lab) -> float:
        return float(lab.slow["result"]["shares"][0]["fetch_stall"])

    return [
        Row(
            "called prep-bound, fast source",
            called("fast", "prep-bound"),
            "",
            bar=1.0,
            more_is_better=True,
        ),
        Row(
            f"called fetch-bound, source of {SLOW_MB_S} MB/s",
            called("slow", "fetch-bound"),
            "",
            bar=1.0,
            more_is_better=True,
        ),
        Row(f"fetch stall without a tier, source of {SLOW_MB_S} MB/s", stall, ""),
        Row("the same with the tier of the advice", Lab.left, "", bar=BAR),
    ]


def run(
    options: argparse.Namespace, work: Path
) -> tuple[str, dict[str, object], list[Result[Lab]]]:
    require_slow_source()
    for module in ("torch", "torchvision"):
        if find_spec(module) is None:
            raise BenchError(f"{module} is not installed; the extra bench-formats has it")
    with ExitStack() as stack:
        bench = Bench(work, options, stack)
        results = measure(rows(), partial(Lab, bench), options.rounds)
    conditions: dict[str, object] = {"files": options.files, "rounds": options.rounds}
    return "A job of PyTorch under monarch analyze", conditions, results
