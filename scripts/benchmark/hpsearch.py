"""A search for hyper-parameters: jobs with the same images, on a mount, on one node.

Each job reads one epoch of an image folder with augmentations (``hpsearch_job.py``). With a staging
area the jobs prepare each batch once together. They are compared with independent jobs, each with
a DataLoader. The processor time is that of all processes of the jobs and of the broker, from the
end of their imports to the end of the epoch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.benchmark.hpsearch_job import BATCH, Job, command
from scripts.benchmark.requirements import require_room
from scripts.benchmark.rows import BenchError, Result, Row, measure
from scripts.datasets.images import Images
from scripts.tools.launch import ROOT
from scripts.tools.mount import Mount
from tests.equipment.processes import cpu_seconds

SIZE = 110_000
CLASSES = 10
INDEPENDENT = "independent jobs"
# Of the processor time of independent jobs, and of their time.
CPU_BAR, WALL_BAR = 0.3, 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """The processor time of all processes, and the time until the last job has ended, in s."""

    cpu_s: float
    wall_s: float


class Bench:
    """The images, on a mount that has copies of all."""

    def __init__(self, work: Path, options: argparse.Namespace, stack: ExitStack) -> None:
        self._work = work
        self._jobs: int = options.jobs
        self._workers: int = options.workers
        self._step_s: float = options.step_ms / 1000
        self._files: int = options.files // BATCH * BATCH
        self._areas = 0
        require_room(work.parent, 3 * self._files * SIZE)
        images = Images(SIZE, seed=1, expected=self._files)
        for number in range(self._files):
            path = work / f"data/class{number % CLASSES}/{number:06d}.jpeg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(images.jpeg(number, number % CLASSES))
        mounted = stack.enter_context(
            Mount(
                work / "data",
                work / "mnt",
                tier=work / "tier",
                capacity=str(2 * self._files * SIZE),
                state=work / "state",
            )
        )
        self._root = mounted.path
        for path in sorted(self._root.glob("*/*")):
            path.read_bytes()
        mounted.settle(self._files)

    def measured(self, *, shared: bool) -> Measured:
        self._areas += 1
        area = self._work / f"area{self._areas}" if shared else None
        job = Job(
            root=str(self._root),
            area="" if area is None else str(area),
            jobs=self._jobs,
            workers=self._workers,
            step_s=self._step_s,
        )
        with ExitStack() as stack:
            processes = [
                stack.enter_context(
                    subprocess.Popen(
                        command(job),
                        cwd=ROOT,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
                for _ in range(self._jobs)
            ]
            stack.callback(_kill, processes)
            return self._epoch(processes, area)

    def _epoch(self, processes: Sequence[subprocess.Popen[str]], area: Path | None) -> Measured:
        for process in processes:
            line_of(process)
        begin = time.perf_counter()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        reports = [json.loads(line_of(process)) for process in processes]
        wall_s = time.perf_counter() - begin
        cpu_s = sum(report["cpu_s"] for report in reports)
        if area is not None:
            cpu_s += sum(map(cpu_seconds, _brokers(area)))
        if any(report["images"] != self._files for report in reports):
            raise BenchError(f"a job has used other images than {self._files}")
        return Measured(cpu_s, wall_s)


class Lab:
    """One round: each side is measured when the first of its values is wanted."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._measured: dict[bool, Measured] = {}

    def of(self, *, shared: bool) -> Measured:
        if shared not in self._measured:
            self._measured[shared] = self._bench.measured(shared=shared)
        return self._measured[shared]


def rows(jobs: int) -> list[Row[Lab]]:
    """Both times of ``jobs`` jobs, against independent ones."""

    def row(name: str, value: Any, bar: float) -> Row[Lab]:
        ours, theirs = partial(value, shared=True), partial(value, shared=False)
        return Row(f"{jobs} jobs, {name}", ours, "s", theirs, INDEPENDENT, bar)

    return [row("processor time", _cpu_s, CPU_BAR), row("time of an epoch", _wall_s, WALL_BAR)]


def _cpu_s(lab: Lab, *, shared: bool) -> float:
    return lab.of(shared=shared).cpu_s


def _wall_s(lab: Lab, *, shared: bool) -> float:
    return lab.of(shared=shared).wall_s


def run(
    options: argparse.Namespace, work: Path
) -> tuple[str, dict[str, object], list[Result[Any]]]:
    for module in ("torch", "torchvision"):
        if find_spec(module) is None:
            raise BenchError(f"{module} is not installed; the extra bench-formats has it")
    with ExitStack() as stack:
        bench = Bench(work, options, stack)
        results = measure(rows(options.jobs), partial(Lab, bench), options.rounds)
    conditions: dict[str, object] = {
        "files": options.files,
        "file_bytes": SIZE,
        "batch": BATCH,
        "jobs": options.jobs,
        "workers_of_a_job": options.workers,
        "step_ms": options.step_ms,
        "rounds": options.rounds,
    }
    title = (
        f"{options.jobs} jobs with the same {options.files} images, {options.step_ms:g} ms a step"
    )
    return title, conditions, results


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a job writes. Raises BenchError if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchError("a job has failed")
    return line


def _brokers(area: Path) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command_line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(area).encode() in command_line.split(b"\0"):
                yield int(entry.name)


def _kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
        process.kill()
