"""Small files: what each call costs a job that makes, names, reads and removes many of them.

The source is a plain local directory, so that nothing but the mount takes time. Native is the same
calls in a plain directory of the tier's file system.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from statistics import median

from _bench import BenchError, Result, Row, measure_once
from _contenders import Contender, Mounted, Source
from _writers import SMALL_BYTES, each_s, make_and_close, wait_until

# The bars: microseconds a call, times native, files a second.
CREATE_US, CREATE_TIMES, NAME_US, DRAIN_RATE, OPEN_US = 250.0, 4.0, 200.0, 1000.0, 200.0
TAR_BYTES = 1000
# Files that are opened again and again, and the pause after each of these opens. Seconds.
OPENED = 32
OPEN_PAUSE_S = 0.001
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Counts:
    """How many files of each kind."""

    files: int
    packed: int
    cloned: int


@dataclass
class Lab:
    """One contender in one round; a method is given the side: the mount's directory or native's."""

    name: str
    counts: Counts
    mounted: Mounted
    native: Path
    source: Path
    archive: Path
    repository: Path
    fronts: bool
    fills: bool
    count: int = 0

    @property
    def ours(self) -> Path:
        return self.mounted.path

    def _directory(self, root: Path) -> Path:
        self.count += 1
        made = root / f"{self.name}-{self.count}"
        made.mkdir()
        return made

    def _come(self, directory: Path) -> int:
        """How many files of a directory of the mount have come to the source."""
        try:
            names = os.listdir(self.source / directory.name)
        except FileNotFoundError:
            return 0
        return sum(name.isdigit() for name in names)

    def _wait(self, directory: Path, count: int) -> None:
        comes = directory.parent == self.ours and self.fronts

        def is_there() -> bool:
            return not comes or self._come(directory) >= count

        if not wait_until(is_there, timeout_s=PATIENCE_S):
            raise BenchError(f"{directory} is not at the source after {PATIENCE_S:.0f} s")
        self.mounted.settle()
        os.sync()

    def create(self, root: Path) -> float:
        directory = self._directory(root)
        content = os.urandom(SMALL_BYTES)
        names = [str(directory / f"{number}") for number in range(self.counts.files)]
        seconds = each_s(lambda name: make_and_close(name, content), names)
        self._wait(directory, len(names))
        return seconds * 1e6

    def rename(self, root: Path) -> float:
        directory = self._made(root)
        names = [str(directory / f"{number}") for number in range(self.counts.files)]
        seconds = each_s(lambda name: os.rename(name, name + "0000000"), names)
        self._wait(directory, len(names))
        return seconds * 1e6

    def unlink(self, root: Path) -> float:
        directory = self._made(root)
        names = [str(directory / f"{number}") for number in range(self.counts.files)]
        return each_s(os.unlink, names) * 1e6

    def _made(self, root: Path) -> Path:
        directory, content = self._directory(root), os.urandom(SMALL_BYTES)
        for number in range(self.counts.files):
            make_and_close(str(directory / f"{number}"), content)
        self._wait(directory, self.counts.files)
        return directory

    def unpack(self, root: Path) -> float:
        directory = self._directory(root)
        return self._timed(["tar", "-xf", str(self.archive), "-C", str(directory)])

    def clone(self, root: Path) -> float:
        directory = self._directory(root)
        return self._timed(
            ["git", "clone", "-q", "--no-hardlinks", str(self.repository), str(directory / "clone")]
        )

    def _timed(self, command: list[str]) -> float:
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise BenchError(f"{command[0]}: {done.stderr.strip().splitlines()[:1]}")
        self.mounted.settle()
        os.sync()
        return seconds

    def drain(self, root: Path) -> float:
        """Files a second from the first that comes to the source to the last."""
        count, content = self.counts.files, os.urandom(SMALL_BYTES)
        directory = self._directory(root)
        for number in range(count):
            make_and_close(str(directory / f"{number}"), content)
        begin, come = time.perf_counter(), 0
        if self.fronts:
            if not wait_until(lambda: self._come(directory) > 0, timeout_s=PATIENCE_S, step_s=0.01):
                raise BenchError(f"nothing of {directory} comes to the source")
            # So few that all came between two looks are counted from the last one that was made.
            if (first := self._come(directory)) < count:
                begin, come = time.perf_counter(), first
            wait_until(lambda: self._come(directory) >= count, timeout_s=PATIENCE_S, step_s=0.02)
        self.mounted.settle()
        return (count - come) / (time.perf_counter() - begin)

    def open_beside(self, root: Path) -> float:
        """How much longer an open and close of a written file takes while others are drained."""
        directory, content = self._directory(root), os.urandom(SMALL_BYTES)
        names = [str(directory / f"{number}") for number in range(OPENED)]
        for name in names:
            make_and_close(name, content)
        self._wait(directory, OPENED)

        def opened() -> float:
            seconds = each_s(lambda name: os.close(os.open(name, os.O_RDONLY)), names, OPEN_PAUSE_S)
            return seconds * 1e6

        before = median(opened() for _ in range(8))
        other = self._directory(root)
        for number in range(self.counts.files):
            make_and_close(str(other / f"{number}"), content)
        wait_until(lambda: self._come(other) > 0, timeout_s=PATIENCE_S, step_s=0.01)
        beside: list[float] = []
        while not beside or self._come(other) < self.counts.files:
            beside.append(opened())
        return median(beside) - before


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    unit: str
    function: Callable[[Lab, Path], float]
    has_native: bool = True
    bar: float | None = None
    ratio_bar: float | None = None
    more_is_better: bool = False

    def row(self, who: str, judged: str) -> Row[Lab]:
        function = self.function
        ours = self.bar if who == judged and not self.has_native else None
        return Row(
            self.name,
            lambda lab: function(lab, lab.ours),
            self.unit,
            against=(lambda lab: function(lab, lab.native)) if self.has_native else None,
            against_name="native" if self.has_native else "",
            bar=self.ratio_bar if who == judged and self.has_native else ours,
            who=who,
            more_is_better=self.more_is_better,
        )


LINES = (
    Line(
        "names: create, write 10 KB, close", "us", Lab.create, bar=CREATE_US, ratio_bar=CREATE_TIMES
    ),
    Line("names: rename", "us", Lab.rename, bar=NAME_US),
    Line("names: unlink", "us", Lab.unlink, bar=NAME_US),
    Line("trees: tar x", "s", Lab.unpack),
    Line("trees: git clone", "s", Lab.clone),
    Line("drain", "files/s", Lab.drain, has_native=False, bar=DRAIN_RATE, more_is_better=True),
    Line("open under drain: more by", "us", Lab.open_beside, has_native=False, bar=OPEN_US),
)
# What a contender that shows the source itself has none of.
OF_DRAINS = ("drain", "open under drain: more by")
GROUPS = ("names", "trees")


def derived(results: Sequence[Result[Lab]], judged: str) -> list[Result[Lab]]:
    """Bars of the time itself, where a line has one beside native's."""
    bars = {line.name: line.bar for line in LINES if line.has_native and line.bar is not None}
    return [
        Result(
            replace(result.row, bar=bars[result.row.name], against=None, derived=True),
            result.values,
        )
        for result in results
        if result.row.who == judged and result.row.name in bars
    ]


class Bench:
    """Contenders over a local source beneath ``work``."""

    def __init__(self, counts: Counts, work: Path) -> None:
        self._counts, self._work = counts, work
        self._native, self._source = work / "native", work / "local"
        for directory in (self._native, self._source):
            directory.mkdir(parents=True)
        self._archive = _archive(work / "small.tar", counts.packed)
        self._repository = _repository(work / "repository", counts.cloned)
        self._results: dict[tuple[str, str], Result[Lab]] = {}

    def measure(
        self, contenders: Sequence[Contender], rounds: int, judged: str
    ) -> list[Result[Lab]]:
        source = Source("small", self._source, 0, 0)
        for one in contenders:
            one.prepare(source, self._work / one.name)
        for turn in range(rounds):
            begin = turn * len(contenders) // rounds
            for one in (*contenders[begin:], *contenders[:begin]):
                sys.stderr.write(f"small files, round {turn + 1} of {rounds}: {one.name}\n")
                place = self._work / f"{one.name}-{turn}"
                with one.mount(source, self._work / "small-mnt", place) as mounted:
                    self._measure(one, mounted, turn, judged)
        results = list(self._results.values())
        return results + derived(results, judged)

    def _measure(self, one: Contender, mounted: Mounted, turn: int, judged: str) -> None:
        lab = Lab(
            name=f"{one.name}-{turn}",
            counts=self._counts,
            mounted=mounted,
            native=self._native,
            source=self._source,
            archive=self._archive,
            repository=self._repository,
            fronts=one.fronts,
            fills=one.fills,
        )
        for line in LINES:
            if line.name in OF_DRAINS and not (one.fills and one.fronts):
                continue
            key = line.name, one.name
            result = self._results.setdefault(key, Result(line.row(one.name, judged)))
            measure_once(result, lab, turn)


def _archive(path: Path, count: int) -> Path:
    """Files of 1 KB, a hundred in each directory."""
    content = os.urandom(TAR_BYTES)
    with tarfile.open(path, "w") as archive:
        for number in range(count):
            member = tarfile.TarInfo(f"{number // 100}/{number}")
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, BytesIO(content))
    return path


def _repository(path: Path, count: int) -> Path:
    """One commit of files of 4 KB, twenty in each directory."""
    for number in range(count):
        file = path / f"{number // 20}" / f"{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(4096))
    git = ["git", "-C", str(path), "-c", "user.name=bench", "-c", "user.email=bench@localhost"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "files"]):
        done = subprocess.run([*git, *command], capture_output=True, text=True)
        if done.returncode:
            raise BenchError(f"git {command[0]}: {done.stderr.strip()}")
    return path
