"""Small files: what each call costs a job that makes, renames, reads and removes many of them.

The source is a plain local directory, so that only the mount takes time. Native is the same calls
in a plain directory of the tier's file system.
"""

from __future__ import annotations

import os
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from statistics import median

from scripts.benchmark.contenders import Contender, Mounted, Source, in_turn
from scripts.benchmark.jobs import Job, Line
from scripts.benchmark.programs import checked_output
from scripts.benchmark.rows import BenchError, Result, measure_once
from scripts.benchmark.writers import SMALL_BYTES, each_s, make_and_close
from tests.equipment.waiting import becomes_true

# The bars: microseconds a call, times native, files a second.
CREATE_US, CREATE_TIMES, NAME_US, DRAIN_RATE, OPEN_US = 250.0, 4.0, 200.0, 1000.0, 200.0
TAR_BYTES = 1000
# Files that are opened again and again, and the pause after each of these opens.
OPENED = 32
OPEN_PAUSE_S = 0.001
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Counts:
    """How many files of each kind."""

    files: int
    packed: int
    cloned: int


@dataclass(kw_only=True)
class Lab(Job):
    """A job that works on many small files. ``fronts``: they come to ``source``."""

    counts: Counts
    source: Path
    archive: Path
    repository: Path
    fronts: bool

    def _come(self, directory: Path) -> int:
        """The number of files of a directory of the mount that have come to the source."""
        try:
            names = os.listdir(self.source / directory.name)
        except FileNotFoundError:
            return 0
        return sum(name.isdigit() for name in names)

    def _wait(self, directory: Path, count: int) -> None:
        comes = directory.parent == self.ours and self.fronts

        def is_there() -> bool:
            return not comes or self._come(directory) >= count

        if not becomes_true(is_there, timeout_s=PATIENCE_S, step_s=0.05):
            raise BenchError(f"{directory} is not at the source after {PATIENCE_S:.0f} s")
        self.mounted.settle()
        os.sync()

    def create(self, root: Path) -> float:
        directory = self.new_directory(root)
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
        directory, content = self.new_directory(root), os.urandom(SMALL_BYTES)
        for number in range(self.counts.files):
            make_and_close(str(directory / f"{number}"), content)
        self._wait(directory, self.counts.files)
        return directory

    def unpack(self, root: Path) -> float:
        directory = self.new_directory(root)
        return self._timed(["tar", "-xf", str(self.archive), "-C", str(directory)])

    def clone(self, root: Path) -> float:
        directory = self.new_directory(root)
        return self._timed(
            ["git", "clone", "-q", "--no-hardlinks", str(self.repository), str(directory / "clone")]
        )

    def _timed(self, command: list[str]) -> float:
        begin = time.perf_counter()
        checked_output(command)
        seconds = time.perf_counter() - begin
        self.mounted.settle()
        os.sync()
        return seconds

    def drain(self, root: Path) -> float:
        """Files a second, from the first that comes to the source to the last."""
        count, content = self.counts.files, os.urandom(SMALL_BYTES)
        directory = self.new_directory(root)
        for number in range(count):
            make_and_close(str(directory / f"{number}"), content)
        begin, come = time.perf_counter(), 0
        if self.fronts:
            if not becomes_true(lambda: self._come(directory) > 0, timeout_s=PATIENCE_S):
                raise BenchError(f"nothing of {directory} comes to the source")
            # Where all have come between two looks, the time counts from when the last was made.
            if (first := self._come(directory)) < count:
                begin, come = time.perf_counter(), first
            becomes_true(lambda: self._come(directory) >= count, timeout_s=PATIENCE_S, step_s=0.02)
        self.mounted.settle()
        return (count - come) / (time.perf_counter() - begin)

    def open_beside(self, root: Path) -> float:
        """How much longer open and close of a written file take while other files are drained."""
        directory, content = self.new_directory(root), os.urandom(SMALL_BYTES)
        names = [str(directory / f"{number}") for number in range(OPENED)]
        for name in names:
            make_and_close(name, content)
        self._wait(directory, OPENED)

        def opened() -> float:
            seconds = each_s(lambda name: os.close(os.open(name, os.O_RDONLY)), names, OPEN_PAUSE_S)
            return seconds * 1e6

        before = median(opened() for _ in range(8))
        other = self.new_directory(root)
        for number in range(self.counts.files):
            make_and_close(str(other / f"{number}"), content)
        becomes_true(lambda: self._come(other) > 0, timeout_s=PATIENCE_S)
        beside: list[float] = []
        while not beside or self._come(other) < self.counts.files:
            beside.append(opened())
        return median(beside) - before


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
# Lines of contenders that write back only.
OF_DRAINS = ("drain", "open under drain: more by")
GROUPS = ("names", "trees")


def derived(results: Sequence[Result[Lab]], judged: str) -> list[Result[Lab]]:
    """The bars of the values themselves, of lines that also have one of the ratio to native."""
    bars = {line.name: line.bar for line in LINES if line.has_native and line.bar is not None}
    return [
        Result(
            replace(result.row, bar=bars[result.row.name], against=None, derived=True),
            result.values,
        )
        for result in results
        if result.row.contender == judged and result.row.name in bars
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
            for one in in_turn(contenders, turn, rounds):
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
        checked_output([*git, *command])
    return path
