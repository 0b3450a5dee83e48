"""The datapath: what reading through Monarch costs, next to the tier itself and to others.

Each round mounts one contender after the other, in another order each time, over four sources: a
folder of images, one large file, a large tree of names, and a few images behind a slow source.
Every row is measured next to native: the same readers read the same files from a plain directory of
the tier's file system, with the page cache in the same state.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from scripts.benchmark.contenders import ALL_MODES, AUTO, Contender, Monarch, Source, in_turn
from scripts.benchmark.labs import (
    BEST,
    CAPTION,
    FIRST,
    GROUPS,
    LINES,
    QUICK,
    SLOW_FIRST,
    Images,
    Lab,
    Large,
    Line,
    Names,
    Slow,
    Times,
)
from scripts.benchmark.page_cache import can_drop, drop_all, drop_pages
from scripts.benchmark.peers import READING, PlainPyfuse3, available
from scripts.benchmark.quantities import MB
from scripts.benchmark.readers import read_files, read_through
from scripts.benchmark.requirements import require_room
from scripts.benchmark.rows import BenchError, Result, measure_once
from scripts.datasets.main import make
from scripts.tools.mount import MonarchFailed, monarch
from tests.equipment import slowfs
from tests.equipment.modes import MODES
from tests.equipment.mounts import kind_of_file_system

COPY = "cp -r, native"
AUTO_BAR = 0.90
# Files a second in epoch 1 that are enough, however fast the tier's own disk is.
EPOCH_1_ENOUGH = 2_500
EPOCH_1_RATIO = 0.5
PER_DIRECTORY = 1000


# How matrix.py shows the results.
SHOWN: dict[str, Any] = {"groups": GROUPS, "caption": CAPTION}


class Bench:
    """The sources, the contenders, and all results."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self._work, self._rounds = work, options.rounds
        self._times = QUICK if options.quick else Times()
        self._drops = can_drop() and not options.no_drop
        self._mounts = 0
        self._sources: dict[type[Lab], Source] = {}
        self._paths: dict[type[Lab], list[str]] = {}
        self._results: dict[tuple[str, str], Result[Lab]] = {}
        self.contenders: list[Contender] = []
        self.notes: list[str] = []
        self.chosen: dict[str, str] = {}
        if not self._drops:
            why = "--no-drop" if options.no_drop else "only root can drop the page cache"
            self.note(f"{why}: the rows that need it are left out")

    def note(self, line: str) -> None:
        self.notes.append(line)
        sys.stderr.write(f"bench: {line}\n")

    # -- what is read, and through what ------------------------------------------------------------

    def add(self, kind: type[Lab], path: Path, *, snapshot: Path | None = None) -> None:
        """``kind`` reads the files below ``path``, or with ``snapshot`` the directories in it."""
        if snapshot is not None:
            self._paths[kind] = sorted(entry.name for entry in path.iterdir())
            self._sources[kind] = Source(kind.__name__.lower(), path, 0, 0, snapshot)
            return
        files = sorted(found for found in path.rglob("*") if found.is_file())
        self._paths[kind] = [str(found.relative_to(path)) for found in files]
        size = sum(found.stat().st_size for found in files)
        self._sources[kind] = Source(kind.__name__.lower(), path, len(files), size)

    def choose(self, candidates: Sequence[Contender], *, asked: Sequence[str]) -> None:
        """Keep the candidates that can be mounted here, and note those that cannot.

        Raises what went wrong where the candidate was asked for by name.
        """
        for one in candidates:
            try:
                for kind, source in self._sources.items():
                    if one.fronts or kind is not Slow:
                        one.prepare(source, self._work / one.name)
                self._fill(one)
                self.contenders.append(one)
            except (MonarchFailed, BenchError, OSError) as refusal:
                if one.name in asked:
                    raise
                self.note(f"without {one.name}: {refusal}")

    def _fill(self, one: Contender) -> None:
        """Make its copy of the large file once: no row of that file needs an empty tier."""
        source = self._sources[Large]
        place = self._place(one, Large, keep=True)
        filled = place.exists()
        with one.mount(source, self._work / "mnt", place) as mounted:
            if one.fills and not filled:
                read_through(mounted.path / self._paths[Large][0])
                mounted.settle()

    def _place(self, one: Contender, kind: type[Lab], *, keep: bool) -> Path:
        """A new directory, or with ``keep`` that of the last time.

        None is removed before the end: for a minute after many files were deleted, ext4 takes
        almost a millisecond to create one.
        """
        if keep:
            return self._work / f"{one.shares}-{kind.__name__}"
        self._mounts += 1
        return self._work / f"{one.name}-{self._mounts}"

    # -- measuring ---------------------------------------------------------------------------------

    def measure(self) -> list[Result[Lab]]:
        for turn in range(self._rounds):
            for kind in self._sources:
                if kind in (Images, Slow):
                    random.Random(turn).shuffle(self._paths[kind])
                for one in in_turn(self.contenders, turn, self._rounds):
                    if kind is not Slow or self._is_slow_measured(one):
                        where = f"{kind.__name__.lower()}, {one.name}"
                        sys.stderr.write(f"round {turn + 1} of {self._rounds}: {where}\n")
                        self._try(one, kind, turn)
                for line in LINES[kind]:
                    if line in (FIRST, SLOW_FIRST) and self._measurable(line):
                        self._copy(line, kind, turn)
        return list(self._results.values())

    def _try(self, one: Contender, kind: type[Lab], turn: int) -> None:
        """A peer that fails is left out from there on, with all its results."""
        try:
            self._measure(one, kind, turn)
        except (BenchError, OSError) as error:
            if isinstance(one, Monarch):
                raise
            self.note(f"without {one.name}: {error}")
            self.contenders = [other for other in self.contenders if other is not one]
            for line in (line for lines in LINES.values() for line in lines):
                self._results.pop((line.name, one.name), None)

    def _is_slow_measured(self, one: Contender) -> bool:
        """Only contenders that front a directory and copy; in a quick run auto alone."""
        names = [other.name for other in self.contenders]
        quick = self._times is QUICK and AUTO in names
        return one.name == AUTO if quick else one.fronts and one.fills

    def _measurable(self, line: Line) -> bool:
        return self._drops or not line.drops

    def _measure(self, one: Contender, kind: type[Lab], turn: int) -> None:
        source, paths = self._sources[kind], self._paths[kind]
        if source.snapshot is not None and not one.fronts:
            paths = paths[: one.directories]
        place = self._place(one, kind, keep=kind is Large)
        if self._drops:
            # Pages of the contender before this one were read in another way.
            drop_pages()
        with one.mount(source, self._work / "mnt", place) as mounted:
            if one.name == AUTO:
                self.chosen[source.name] = mounted.mode
            lab = kind(source, mounted, self._times, paths)
            for line in LINES[kind]:
                if self._measurable(line):
                    measure_once(self._result(line, one.name), lab, turn)

    def _copy(self, line: Line, kind: type[Lab], turn: int) -> None:
        """Copy everything and read the copy: files a second over all of that time."""
        source, paths = self._sources[kind], self._paths[kind]
        self._mounts += 1
        copy = self._work / f"copy-{self._mounts}"
        if self._drops:
            drop_all()
        begin = time.perf_counter()
        subprocess.run(["cp", "-r", str(source.path), str(copy)], check=True)
        seconds = time.perf_counter() - begin
        readers = 1 if line is FIRST else 4
        seconds += read_files([f"{copy}/{path}" for path in paths], readers).seconds
        result = self._result(line, COPY)
        result.values.append(len(paths) / seconds)
        # Native was measured next to each of the contenders.
        others = (self._results.get((line.name, one.name)) for one in self.contenders)
        natives = [other.against[turn] for other in others if other and len(other.against) > turn]
        result.against.append(median(natives))

    def _result(self, line: Line, contender: str) -> Result[Lab]:
        return self._results.setdefault((line.name, contender), Result(line.row(contender)))


# -- what follows from the numbers -----------------------------------------------------------------


def derived(results: Sequence[Result[Lab]], *, fillers: Sequence[str]) -> list[Result[Lab]]:
    """The bars of the best mode, and of auto against it."""
    by_line: dict[str, dict[str, Result[Lab]]] = {}
    for result in results:
        by_line.setdefault(result.row.name, {})[result.row.contender] = result
    made: list[Result[Lab]] = []
    for line in (line for lines in LINES.values() for line in lines if line.function):
        found = by_line.get(line.name, {})
        single = [found[mode] for mode in MODES if mode in found]
        if not single:
            continue
        best = max(single, key=lambda result: median(result.ratios))
        auto = found.get(AUTO)
        if BEST in line.bars:
            made.append(_judged(best, f"best: {best.row.contender}", line.bars[BEST]))
        if auto is None and AUTO in line.bars:
            made.append(_judged(best, f"best: {best.row.contender}", line.bars[AUTO]))
        if auto is not None:
            made.append(_compared(auto, best, AUTO_BAR))
        if line is FIRST:
            ours = auto or best
            native = median(ours.against)
            bar = min(EPOCH_1_RATIO, EPOCH_1_ENOUGH / native)
            made.append(
                _judged(ours, f"{ours.row.contender}, 2,500 files/s or half of native", bar)
            )
            made += [_compared(ours, found[name], 1.0) for name in fillers if name in found]
    return made


def _judged(result: Result[Lab], contender: str, bar: float) -> Result[Lab]:
    return Result(
        replace(result.row, contender=contender, bar=bar, derived=True),
        result.values,
        result.against,
    )


def _compared(ours: Result[Lab], theirs: Result[Lab], bar: float) -> Result[Lab]:
    """One contender's ratios to native against another's, round by round."""
    contender = f"{ours.row.contender} against {theirs.row.contender}"
    row = replace(
        ours.row,
        contender=contender,
        unit="x",
        against_name=theirs.row.contender,
        bar=bar,
        derived=True,
    )
    return Result(row, ours.ratios, theirs.ratios)


# -- the run ---------------------------------------------------------------------------------------


def _prepare(bench: Bench, options: argparse.Namespace, work: Path, stack: ExitStack) -> None:
    images, few, large, tree = (work / name for name in ("images", "few", "large", "tree"))
    snapshot = work / "tree.snapshot"
    make("imagefolder", images, "--files", options.files, "--classes", 50)
    bench.add(Images, images)
    large.mkdir()
    chance = random.Random(1)
    with (large / "file").open("wb") as file:
        for _ in range(options.size_mb):
            file.write(chance.randbytes(MB))
    bench.add(Large, large)
    directories = max(1, options.entries // PER_DIRECTORY)
    make("empty", tree, "--files", options.entries, "--directories", directories)
    monarch("snapshot", "build", tree, "-o", snapshot)
    bench.add(Names, tree, snapshot=snapshot)
    if reason := slowfs.unavailable():
        bench.note(f"without the slow source: {reason}")
        return
    make("imagefolder", few, "--files", max(100, options.files // 8), "--classes", 10)
    slow = stack.enter_context(slowfs.SlowSource(few, work / "slow"))
    bench.add(Slow, slow.path)
    slow.rules(f"lat * {options.latency}", f"read_MBps {options.bandwidth}")


def _sizes(options: argparse.Namespace) -> None:
    options.size_mb = options.size_mb or (100 if options.quick else 2000)
    options.entries = options.entries or (20_000 if options.quick else 1_000_000)


def _candidates(options: argparse.Namespace) -> tuple[list[Contender], list[str]]:
    """The contenders, and the names of those that were asked for."""
    peers = available(options, ALL_MODES, READING)
    found: list[Contender] = [Monarch(name) for name in options.modes or ALL_MODES]
    found.append(PlainPyfuse3())
    asked = [] if options.peers is None and not options.install_peers else peers
    return found + [READING[name]() for name in peers], [*(options.modes or []), *asked]


def run(
    options: argparse.Namespace, work: Path
) -> tuple[str, dict[str, object], list[Result[Lab]]]:
    _sizes(options)
    candidates, asked = _candidates(options)
    images_bytes = options.files * 110_000 * (3 + 8 * options.rounds)
    require_room(work, images_bytes + options.size_mb * MB * 6)
    with ExitStack() as stack:
        bench = Bench(options, work)
        _prepare(bench, options, work, stack)
        bench.choose(candidates, asked=asked)
        results = bench.measure()
    fillers = [one.name for one in bench.contenders if one.fills and one.name in READING]
    chosen = ", ".join(f"{name}: {mode}" for name, mode in bench.chosen.items())
    conditions: dict[str, object] = {
        "files": options.files,
        "size_mb": options.size_mb,
        "entries": options.entries,
        "rounds": options.rounds,
        "quick": options.quick,
        "latency_ms": options.latency,
        "bandwidth_MBps": options.bandwidth,
        "tier": kind_of_file_system(work),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "peers": {one.name: one.version() for one in bench.contenders},
        "auto": bench.chosen,
        "notes": bench.notes,
    }
    title = (
        f"{options.files:,} files of 110 KB, a file of {options.size_mb:,} MB, {options.entries:,} "
        f"names; tier on {conditions['tier']}; slow source: {options.latency:g} ms a call, "
        f"{options.bandwidth:g} MB/s; {options.rounds} rounds"
        + (f"; auto took {chosen}" if chosen else "")
    )
    return title, conditions, results + derived(results, fillers=fillers)
