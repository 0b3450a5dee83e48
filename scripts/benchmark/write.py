"""Writing: how long a job waits for what it writes to a slow source, directly and through mounts.

Checkpoints and other files are written to the source itself, through Monarch, and through other
file systems that write back. What small files cost on a local source is measured in small.py.

Each round mounts one contender after the other over the slow source, in another order each time.
Every row is measured next to native: the same calls in a plain directory of the tier's file system.
After each measurement the next one waits until everything has come to the source.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from scripts.benchmark import small
from scripts.benchmark.contenders import (
    ALL_MODES,
    AUTO,
    SLOW,
    Contender,
    MonarchWriting,
    Source,
    SourceItself,
    in_turn,
)
from scripts.benchmark.jobs import Job, Line
from scripts.benchmark.peers import WRITING, available
from scripts.benchmark.quantities import MB
from scripts.benchmark.requirements import require_room, require_slow_source
from scripts.benchmark.rows import BenchError, Result, measure_once
from scripts.benchmark.writers import (
    SMALL_BYTES,
    append_and_sync,
    create_files,
    replace_file,
    save_model,
    tensors,
    write_through,
)
from tests.equipment.mounts import kind_of_file_system
from tests.equipment.slowfs import SlowSource
from tests.equipment.waiting import becomes_true

# Without requests to open, the daemon does not know which process writes.
MODES = [name for name in ALL_MODES if name != "no_open"]
SAVE_BAR, WAITS_BAR = 1.2, 5.0
# Until everything has come to the source, beyond the time that the bandwidth takes.
PATIENCE_S = 120.0

Written = Mapping[str, int | None]


# -- what is written -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a checkpoint; numbers of files, renames and appends; MB a second of the source."""

    checkpoint: int
    files: int
    renames: int
    appends: int
    bandwidth: float


@dataclass(kw_only=True)
class Lab(Job):
    """A job that writes checkpoints and other files.

    ``backing`` is the directory behind the slow source, where calls are fast. ``names_arrive``: the
    files come to the source under their names.
    """

    sizes: Sizes
    backing: Path
    names_arrive: bool
    state: Any
    slowest: dict[Path, float] = field(default_factory=dict)

    def _arrived(self, directory: Path, written: Written) -> None:
        """Wait until the files have come to the source, and everything is on a disk.

        Where a size is None, the file has to be gone.
        """
        if directory.parent == self.ours and self.names_arrive:
            at = self.backing / directory.name
            size = sum(size or 0 for size in written.values())
            patience_s = PATIENCE_S + 3 * size / MB / self.sizes.bandwidth

            def all_there() -> bool:
                return all(size_of(at / name) == size for name, size in written.items())

            if not becomes_true(all_there, timeout_s=patience_s, step_s=0.05):
                raise BenchError(f"{directory} is not at the source after {patience_s:.0f} s")
        self.mounted.settle()
        os.sync()

    def _remove(self, path: Path) -> None:
        """Remove a large file at once: the next one needs its space."""
        size = path.stat().st_size
        self._arrived(path.parent, {path.name: size})
        path.unlink()
        self._arrived(path.parent, {path.name: None})

    def save(self, root: Path) -> float:
        path = self.new_directory(root) / "model.pt"
        seconds = save_model(path, self.state)
        self._remove(path)
        return seconds

    def sequential(self, root: Path) -> float:
        path = self.new_directory(root) / "file"
        seconds = write_through(path, self.sizes.checkpoint)
        self._remove(path)
        return seconds

    def create(self, root: Path) -> float:
        return self._created(root, sync=False)

    def create_safely(self, root: Path) -> float:
        return self._created(root, sync=True)

    def _created(self, root: Path, *, sync: bool) -> float:
        directory = self.new_directory(root)
        seconds = create_files(directory, self.sizes.files, sync=sync)
        self._arrived(directory, {f"{number}": SMALL_BYTES for number in range(self.sizes.files)})
        return seconds

    def storm(self, root: Path) -> float:
        directory, count = self.new_directory(root), self.sizes.renames
        seconds = replace_file(directory, count)
        self._arrived(directory, {"target": SMALL_BYTES + count - 1, "staged": None})
        return seconds

    def fsync(self, root: Path) -> float:
        """The median, in milliseconds; ``fsync_99`` is of the same run."""
        path = self.new_directory(root) / "log"
        seconds = append_and_sync(path, self.sizes.appends)
        self._arrived(path.parent, {path.name: path.stat().st_size})
        self.slowest[root] = seconds[len(seconds) * 99 // 100] * 1000
        return median(seconds) * 1000

    def fsync_99(self, root: Path) -> float:
        return self.slowest[root]


def size_of(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return None


SAVE = Line("checkpoint: torch.save and fsync", "s", Lab.save, ratio_bar=SAVE_BAR)
LINES = (
    SAVE,
    Line("checkpoint: 1 MiB writes and fsync", "s", Lab.sequential),
    Line("small files: create", "s", Lab.create),
    Line("small files: create and fsync", "s", Lab.create_safely),
    Line("small files: write and rename over", "s", Lab.storm),
    Line("fsync of 4 KiB: median", "ms", Lab.fsync),
    Line("fsync of 4 KiB: 99 of 100", "ms", Lab.fsync_99),
)
GROUPS = ("checkpoint", "small files", "fsync of 4 KiB", *small.GROUPS)
# How matrix.py shows the results.
SHOWN: dict[str, Any] = {"groups": GROUPS, "log": True}
SHOWN["caption"] = (
    "ratio of the time to native's and the time itself; "
    "~: the ratios of the rounds scatter by more than 10 %."
)


def derived(results: Sequence[Result[Lab]], judged: str) -> list[Result[Lab]]:
    """How many times longer the job waits for the slow source than for Monarch."""
    found = {result.row.contender: result for result in results if result.row.name == SAVE.name}
    if not {SLOW, judged} <= found.keys():
        return []
    row = replace(
        found[SLOW].row,
        contender=f"{SLOW} against {judged}",
        against_name=judged,
        bar=WAITS_BAR,
        more_is_better=True,
        derived=True,
    )
    return [Result(row, found[SLOW].values, found[judged].values)]


# -- the run ---------------------------------------------------------------------------------------


class Bench:
    def __init__(self, sizes: Sizes, work: Path, source: Source, backing: Path) -> None:
        self._sizes, self._work, self._source, self._backing = sizes, work, source, backing
        self._native = work / "native"
        self._native.mkdir()
        self._mounts = 0
        self._state: Any = None
        self._results: dict[tuple[str, str], Result[Lab]] = {}
        self.contenders: list[Contender] = []
        self.notes: list[str] = []
        self.lines: tuple[Line, ...] = LINES
        if importlib.util.find_spec("torch") is None:
            self.note("without torch.save: PyTorch is not installed")
            self.lines = LINES[1:]
        else:
            # The first call loads libraries.
            save_model(work / "warm-up", tensors(MB))
            self._state = tensors(sizes.checkpoint)

    def note(self, line: str) -> None:
        self.notes.append(line)
        sys.stderr.write(f"bench: {line}\n")

    def add(self, one: Contender) -> None:
        one.prepare(self._source, self._work / one.name)
        self.contenders.append(one)

    def measure(self, rounds: int, judged: str) -> list[Result[Lab]]:
        for turn in range(rounds):
            for one in in_turn(self.contenders, turn, rounds):
                sys.stderr.write(f"round {turn + 1} of {rounds}: {one.name}\n")
                self._measure(one, turn, judged)
        return list(self._results.values())

    def _measure(self, one: Contender, turn: int, judged: str) -> None:
        self._mounts += 1
        place = self._work / f"{one.name.replace(' ', '-')}-{self._mounts}"
        with one.mount(self._source, self._work / "mnt", place) as mounted:
            lab = Lab(
                name=place.name,
                sizes=self._sizes,
                mounted=mounted,
                native=self._native,
                backing=self._backing,
                names_arrive=one.fronts,
                state=self._state,
            )
            for line in self.lines:
                key = line.name, one.name
                result = self._results.setdefault(key, Result(line.row(one.name, judged)))
                measure_once(result, lab, turn)


def run(
    options: argparse.Namespace, work: Path
) -> tuple[str, dict[str, object], list[Result[Any]]]:
    peers = available(options, MODES, WRITING)
    modes = options.modes or MODES
    judged = AUTO if AUTO in modes else modes[0]
    for name in WRITING if options.peers is None else ():
        if name not in peers:
            sys.stderr.write(f"bench: without {name}: it is not installed; --install-peers\n")
    conditions: dict[str, object] = {
        "rounds": options.rounds,
        "quick": options.quick,
        "tier": kind_of_file_system(work),
        "judged": judged,
    }
    titles, results = [], list[Result[Any]]()
    for part in (_run_slow, _run_small):
        if options.only in (None, part.__name__.removeprefix("_run_")):
            title, more, found = part(options, work, modes, peers, judged)
            titles.append(title)
            conditions |= more
            results += found
    conditions["peers"] = {name: WRITING[name]().version() for name in peers}
    title = f"{'. '.join(titles)}; tier on {conditions['tier']}; {options.rounds} rounds"
    return title, conditions, results


Part = tuple[str, dict[str, object], list[Result[Any]]]


def _run_small(
    options: argparse.Namespace, work: Path, modes: list[str], peers: list[str], judged: str
) -> Part:
    counts = small.Counts(
        files=options.files,
        packed=10 * options.files if not options.quick else 5 * options.files,
        cloned=options.files,
    )
    contenders: list[Contender] = [MonarchWriting(name, 4 << 30) for name in modes]
    contenders += [WRITING[name]() for name in peers]
    results = small.Bench(counts, work / "small").measure(contenders, options.rounds, judged)
    title = (
        f"Local source: {counts.files:,} files of 10 KB, {counts.packed:,} files in an archive,"
        f" {counts.cloned:,} in a repository"
    )
    return title, {"packed": counts.packed, "cloned": counts.cloned}, results


def _run_slow(
    options: argparse.Namespace, work: Path, modes: list[str], peers: list[str], judged: str
) -> Part:
    require_slow_source()
    size_mb = options.size_mb or (100 if options.quick else 1000)
    files_mb = options.files * 0.08 * options.rounds * (len(modes) + 2)
    require_room(work, (size_mb * 5 + files_mb) * MB)
    sizes = Sizes(
        checkpoint=size_mb * MB,
        files=options.files,
        renames=max(1, options.files // 2),
        appends=max(1, options.files // 10),
        bandwidth=options.bandwidth,
    )
    backing = work / "source"
    backing.mkdir()
    with ExitStack() as stack:
        slow = stack.enter_context(SlowSource(backing, work / "slow"))
        latency = [f"lat * {options.latency}"] if options.latency else []
        slow.rules(f"write_MBps {options.bandwidth}", *latency)
        bench = Bench(sizes, work, Source("writes", slow.path, 0, 0), backing)
        bench.add(SourceItself())
        for name in modes:
            bench.add(MonarchWriting(name, sizes.checkpoint * 4 + (1 << 30)))
        for name in peers:
            if (peer := WRITING[name]()).fills:
                bench.add(peer)
        results = bench.measure(options.rounds, judged)
    conditions: dict[str, object] = {
        "size_mb": size_mb,
        "files": sizes.files,
        "renames": sizes.renames,
        "appends": sizes.appends,
        "latency_ms": options.latency,
        "bandwidth_MBps": options.bandwidth,
        "notes": bench.notes,
    }
    title = (
        f"A checkpoint of {size_mb:,} MB, {sizes.files:,} files of 10 KB, {sizes.renames:,} renames"
        f", {sizes.appends:,} appends; slow source: {options.bandwidth:g} MB/s,"
        f" {options.latency:g} ms a call"
    )
    return title, conditions, results + derived(results, judged)
