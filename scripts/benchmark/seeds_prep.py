"""CoorDL's coordinated prep (VLDB 2021) with real processes: a search for hyper-parameters.

Each job uses all batches of an epoch. The files of a batch are read from the source, and preparing
them is a pause, so that each job has the processor time of a machine with a core for each. With a
staging area each batch is read and prepared by one of the jobs. ``scripts/bench hpsearch`` measures
the same with real images.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from monarch.datasets.staging import StagingArea
from scripts.benchmark.hpsearch import line_of
from scripts.benchmark.packs_writers import tree
from scripts.benchmark.requirements import ATTRIBUTES_EXPIRE_S
from scripts.benchmark.rows import BenchError, Result, Row, measure
from scripts.tools.launch import ROOT
from tests.equipment.slowfs import SlowSource

# The paper's search has eight jobs.
JOBS = 8
BATCH = 8
FILE_BYTES = 32_768
# The time to prepare a file, in seconds.
PREP_S = 0.002
TOGETHER, ALONE = "together", "alone"


@dataclass(frozen=True, slots=True)
class Job:
    """``area`` is the directory of the staging area. Empty: the job prepares all its batches, in an
    order of its own, which ``seed`` determines."""

    root: str
    names: list[str]
    area: str
    seed: int


@dataclass(frozen=True, slots=True)
class Search:
    """An epoch of all jobs: its time, the bytes of the source, and batches that were prepared."""

    seconds: float
    read_bytes: int
    prepared: int


class Bench:
    def __init__(self, work: Path, options: argparse.Namespace, stack: ExitStack) -> None:
        self._work = work
        self._areas = 0
        self.batches: int = options.files // BATCH
        files = self.batches * BATCH
        self._names = tree(work / "data", files, FILE_BYTES)
        self._source = stack.enter_context(SlowSource(work / "data", work / "slow"))
        self._source.rules(f"lat * {options.latency}", f"read_MBps {options.bandwidth}")

    def searched(self, how: str) -> Search:
        self._areas += 1
        area = str(self._work / f"area{self._areas}") if how == TOGETHER else ""
        root = str(self._source.path)
        time.sleep(ATTRIBUTES_EXPIRE_S)
        command = [sys.executable, "-m", "scripts.benchmark.seeds_prep"]
        with ExitStack() as stack:
            processes = []
            for _ in range(JOBS):
                process = subprocess.Popen(
                    command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                processes.append(stack.enter_context(process))
                stack.callback(process.kill)
            for number, process in enumerate(processes):
                _write(process, json.dumps(asdict(Job(root, self._names, area, number))))
                line_of(process)
            before = self._source.counters()["read_bytes"]
            begin = time.perf_counter()
            for process in processes:
                _write(process, "go")
            reports = [json.loads(line_of(process)) for process in processes]
            seconds = time.perf_counter() - begin
        if any(report["used"] != self.batches for report in reports):
            raise BenchError(f"a job has used other batches than {self.batches}")
        read_bytes = self._source.counters()["read_bytes"] - before
        return Search(seconds, read_bytes, sum(report["prepared"] for report in reports))


class Lab:
    """One round: each side is measured when the first of its values is wanted."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._of: dict[str, Search] = {}

    def ratio(self, value: Callable[[Search], float]) -> float:
        """A value of independent jobs over that of jobs that prepare together."""
        alone, together = (self._searched(how) for how in (ALONE, TOGETHER))
        return value(alone) / value(together)

    def prepared(self) -> float:
        """How often a batch was prepared, by jobs that do it together."""
        return self._searched(TOGETHER).prepared / self._bench.batches

    def _searched(self, how: str) -> Search:
        if how not in self._of:
            self._of[how] = self._bench.searched(how)
        return self._of[how]


def rows() -> list[Row[Lab]]:
    def row(
        name: str, published: str, function: Callable[[Lab], float], unit: str, bar: float
    ) -> Row[Lab]:
        return Row(
            f"{JOBS} jobs, {name}",
            function,
            unit,
            bar=bar,
            more_is_better=unit == "times",
            contender="CoorDL, prep",
            published=published,
            how="run",
        )

    return [
        row(
            "bytes of the source, alone against together",
            "6.4 (3.5 TB to 550 GB)",
            partial(_ratio, value=lambda found: found.read_bytes),
            "times",
            0.9 * JOBS,
        ),
        row("a batch is prepared, together", "1", Lab.prepared, "of the batches", 1.0),
        row(
            "time of an epoch, alone against together",
            "3 to 5.6",
            partial(_ratio, value=lambda found: found.seconds),
            "times",
            2.0,
        ),
    ]


def _ratio(lab: Lab, *, value: Callable[[Search], float]) -> float:
    return lab.ratio(value)


def of_coordl(options: argparse.Namespace, work: Path) -> list[Result[Lab]]:
    with ExitStack() as stack:
        bench = Bench(work, options, stack)
        return measure(rows(), partial(Lab, bench), options.rounds)


def _write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


# -- a job -----------------------------------------------------------------------------------------


class Preparing:
    """Prepares batches of a job, and counts them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.count = 0

    def __call__(self, number: int) -> bytes:
        self.count += 1
        names = self._job.names[number * BATCH : (number + 1) * BATCH]
        contents = [Path(self._job.root, name).read_bytes() for name in names]
        time.sleep(PREP_S * len(names))
        return b"".join(contents)


def _batches(job: Job, prepare: Preparing) -> Iterator[object]:
    count = len(job.names) // BATCH
    if not job.area:
        yield from map(prepare, random.Random(job.seed).sample(range(count), count))
        return
    with StagingArea("search", jobs=JOBS, workers=0, directory=job.area) as area:
        yield from area.epoch(0, count, prepare)


def main() -> None:
    warnings.simplefilter("ignore")
    job = Job(**json.loads(sys.stdin.readline()))
    prepare = Preparing(job)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    used = sum(1 for _ in _batches(job, prepare))
    sys.stdout.write(json.dumps({"used": used, "prepared": prepare.count}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
