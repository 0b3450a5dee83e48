"""Many small files in one call: ``get_many`` through a mount, against a loop of ``open`` and
``read`` in a plain directory of the tier's file system.

One process reads files of 110 KB in batches. Both sides are in memory: every file was read before,
and the mount has a copy of each. A round is several short measurements of each side in turns, each
of all files several times, once the daemon has nothing to do.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import monarch
from monarch.datasets.files import Dataset
from monarch.posix.files import closing_fd, sync_file_system
from scripts.benchmark.contenders import ALL_MODES, Contender, Monarch, Source, in_turn
from scripts.benchmark.packs_writers import tree
from scripts.benchmark.requirements import require_room
from scripts.benchmark.rows import BenchError, Result, Row, measure_once
from tests.equipment.processes import cpu_seconds
from tests.equipment.waiting import becomes_true

# Files of a run, and of a run with --quick.
FILES = (2000, 500)
SIZE = 110_000
BATCH = 128
SLICES = 7
# Times that a measurement reads all files: a fifth of a second for the files of a run.
PASSES = 10
# The daemon is at rest if it has used less than this share of a processor for REST_S seconds. A
# daemon that reads or writes copies takes one of the cores that ``get_many`` uses.
REST_SHARE = 0.02
REST_S = 0.5
REST_WITHIN_S = 30.0
BAR = 2.0
DIRECTORY = "get_many in the directory itself"


class Lab:
    """The files below ``many``, by ``get_many``, and those below ``plain``, by a loop."""

    def __init__(self, many: Path, plain: Path, names: Sequence[str]) -> None:
        self._dataset = monarch.open_dataset(many)
        self._plain = plain
        self._names = list(names)
        self._chance = random.Random(1)

    def many(self) -> float:
        """Files a second."""
        return self._rate(self._read_many)

    def loop(self) -> float:
        """Files a second."""
        return self._rate(self._read_in_a_loop)

    def _rate(self, read: Callable[[Sequence[str]], int]) -> float:
        seconds = 0.0
        for _ in range(PASSES):
            self._chance.shuffle(self._names)
            batches = [
                self._names[start : start + BATCH] for start in range(0, len(self._names), BATCH)
            ]
            begin = time.perf_counter()
            size = sum(map(read, batches))
            seconds += time.perf_counter() - begin
            if size != SIZE * len(self._names):
                raise BenchError(f"{size} bytes of {SIZE * len(self._names)} were read")
        return PASSES * len(self._names) / seconds

    def _read_many(self, names: Sequence[str]) -> int:
        return sum(map(len, self._dataset.get_many(names)))

    def _read_in_a_loop(self, names: Sequence[str]) -> int:
        size = 0
        for name in names:
            with open(f"{self._plain}/{name}", "rb") as file:
                size += len(file.read())
        return size

    def close(self) -> None:
        self._dataset.close()


def _row(name: str, bar: float | None) -> Row[Lab]:
    return Row(
        name,
        Lab.many,
        "files/s",
        Lab.loop,
        "open().read() on the tier",
        bar,
        more_is_better=True,
        slices=SLICES,
    )


def measured(
    options: argparse.Namespace, work: Path
) -> tuple[list[Result[Lab]], dict[str, object]]:
    for name in options.modes or ():
        if name not in ALL_MODES:
            raise BenchError(f"there is no {name}; {', '.join(ALL_MODES)}")
    files = options.files or FILES[options.quick]
    modes: list[Contender] = [Monarch(name) for name in options.modes or ALL_MODES]
    require_room(work.parent, (2 + len(modes)) * files * SIZE)
    source = Source("many", work / "data", files, files * SIZE)
    names = tree(source.path, files, SIZE)
    plain = work / "plain"
    shutil.copytree(source.path, plain)
    results = {mode.name: Result(_row(f"get_many, {mode.name}", BAR)) for mode in modes}
    results[DIRECTORY] = Result(_row(DIRECTORY, None))
    _write_back(work)
    for turn in range(options.rounds):
        _measure(results[DIRECTORY], plain, plain, names, turn)
        for mode in in_turn(modes, turn, options.rounds):
            with mode.mount(source, work / "mnt", work / mode.name) as mounted:
                _read_all(mounted.path, names)
                mounted.settle()
                _write_back(work)
                _wait_for_rest(mode.name, mounted.pid)
                _measure(results[mode.name], mounted.path, plain, names, turn)
    conditions: dict[str, object] = {"files": files, "file_bytes": SIZE, "batch": BATCH}
    return list(results.values()), conditions


def _measure(result: Result[Lab], many: Path, plain: Path, names: Sequence[str], turn: int) -> None:
    lab = Lab(many, plain, names)
    try:
        lab.many()
        lab.loop()
        measure_once(result, lab, turn)
    finally:
        lab.close()


def _write_back(work: Path) -> None:
    """Writes all files to the disk. Otherwise the kernel does so half a minute later, with one of
    the cores that read."""
    with closing_fd(os.open(work, os.O_RDONLY)) as fd:
        sync_file_system(fd)


def _wait_for_rest(name: str, pid: int) -> None:
    def is_at_rest() -> bool:
        before = cpu_seconds(pid)
        time.sleep(REST_S)
        return cpu_seconds(pid) - before <= REST_SHARE * REST_S

    if not becomes_true(is_at_rest, timeout_s=REST_WITHIN_S):
        sys.stderr.write(f"{name}: the daemon still has work after {REST_WITHIN_S:.0f} s\n")


def _read_all(root: Path, names: Sequence[str]) -> None:
    with Dataset(root) as dataset:
        for start in range(0, len(names), BATCH):
            dataset.get_many(names[start : start + BATCH])
