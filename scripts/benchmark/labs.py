"""What the benchmark of the datapath measures, as a table of lines over four sources."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from scripts.benchmark.contenders import AUTO, Mounted, Source
from scripts.benchmark.page_cache import drop_all, drop_pages
from scripts.benchmark.readers import (
    list_and_stat,
    read_files,
    read_randomly,
    read_through,
    scan_mapped,
)
from scripts.benchmark.requirements import ATTRIBUTES_EXPIRE_S
from scripts.benchmark.rows import BenchError, Row
from tests.equipment.processes import anonymous_bytes, cpu_seconds

BEST = "best mode"
SLOW_READERS = 4


@dataclass(frozen=True, slots=True)
class Times:
    """How long one slice of a measurement takes at most, in seconds."""

    warm: float = 0.1
    dropped: float = 0.6
    listing: float = 1.0


QUICK = Times(warm=0.05, dropped=0.3, listing=0.3)

# Directories of 1,000 entries that ``ls -lR`` is given.
LONG_LISTINGS = 200

# Slices of a round. What is in memory is measured in short slices, so that the machine changes
# little between the two sides; before each slice of a dropped row the kernel has to drop its pages.
WARM = 5
DROPPED = 2


@dataclass
class Lab:
    """One contender mounted over one source in one round.

    A method measures the side whose ``root`` it is given: the mount's, or native's.
    """

    source: Source
    mounted: Mounted
    times: Times
    paths: Sequence[str]
    cpu_s: float = 0.0

    def at(self, root: Path) -> list[str]:
        return [f"{root}/{path}" for path in self.paths]

    def cpu(self) -> float:
        """Processor time of the daemon during the row before this one."""
        return self.cpu_s

    def memory(self) -> float:
        return anonymous_bytes(self.mounted.pid) / 1e6


@dataclass
class Images(Lab):
    """The image folder; ``paths`` are in another order in each round."""

    filled: bool = False
    primed: bool = False

    def whole(self, root: Path, readers: int) -> float:
        reading = read_files(self.at(root), readers)
        if reading.bytes != self.source.bytes:
            raise BenchError(f"{root}: {reading.bytes} of {self.source.bytes} bytes were read")
        return reading.rate

    def first(self, root: Path) -> float:
        """Epoch 1, from an empty tier; the kernel has nothing of either side in memory."""
        drop_all()
        rate = self.whole(root, 1)
        if root == self.mounted.path:
            self.mounted.settle()
            self.filled = True
        return rate

    def prime(self) -> None:
        """Bring all files into the tier, and from there into memory."""
        if self.primed:
            return
        if not self.filled:
            self.whole(self.mounted.path, 2)
            self.mounted.settle()
        for root in (self.mounted.path, self.source.path):
            self.whole(root, 2)
        self.primed = True

    def warm(self, root: Path, readers: int) -> float:
        self.prime()
        return read_files(self.at(root), readers, seconds=self.times.warm, again=True).rate

    def dropped(self, root: Path, readers: int) -> float:
        """Names and attributes are in memory, contents are not."""
        self.prime()
        drop_pages()
        before = cpu_seconds(self.mounted.pid)
        reading = read_files(self.at(root), readers, seconds=self.times.dropped)
        if root == self.mounted.path:
            self.cpu_s = (cpu_seconds(self.mounted.pid) - before) * 1000 / reading.count
        return reading.rate


@dataclass
class Large(Lab):
    """The large file, which was copied into the tier before, in memory."""

    def __post_init__(self) -> None:
        for root in (self.mounted.path, self.source.path):
            self.whole(root)

    def whole(self, root: Path) -> None:
        if read_through(root / self.paths[0]).bytes != self.source.bytes:
            raise BenchError(f"{root / self.paths[0]} is not {self.source.bytes} bytes long")

    def warm(self, root: Path) -> float:
        reading = read_through(root / self.paths[0], seconds=self.times.warm, again=True)
        return reading.megabytes_per_s

    def randomly(self, root: Path, block: int) -> float:
        return read_randomly(root / self.paths[0], block, seconds=self.times.warm).megabytes_per_s

    def mapped(self, root: Path) -> float:
        return scan_mapped(root / self.paths[0], seconds=self.times.warm).megabytes_per_s

    def dropped(self, root: Path) -> float:
        drop_pages()
        before = cpu_seconds(self.mounted.pid)
        reading = read_through(root / self.paths[0], seconds=self.times.dropped)
        if root == self.mounted.path:
            self.cpu_s = (cpu_seconds(self.mounted.pid) - before) * 1e9 / reading.bytes
        return reading.megabytes_per_s


@dataclass
class Names(Lab):
    """The large tree; as many of its directories, ``paths``, are listed as time allows."""

    covered: int = 0

    def first(self, root: Path) -> float:
        """The first listing of a fresh mount; the kernel has no name of either side in memory."""
        drop_all()
        reading, directories = list_and_stat(self.at(root), seconds=self.times.listing)
        if root == self.mounted.path:
            self.covered = directories
        return reading.rate

    def again(self, root: Path) -> float:
        """The same directories on both sides, after a walk of them that is not timed."""
        if not self.covered:
            begun = list_and_stat(self.at(self.mounted.path), seconds=self.times.listing)
            self.covered = begun[1]
        directories = self.at(root)[: self.covered]
        list_and_stat(directories)
        return list_and_stat(directories)[0].rate

    def long_listing(self, root: Path) -> float:
        """``ls -lR`` for the second time, which also asks for access control lists and labels."""
        directories = self.at(root)[: min(self.covered or LONG_LISTINGS, LONG_LISTINGS)]
        entries = sum(len(os.listdir(directory)) for directory in directories)
        seconds = 0.0
        for _ in range(2):
            begin = time.perf_counter()
            subprocess.run(["ls", "-lR", "--", *directories], check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - begin
        return entries / seconds


@dataclass
class Slow(Lab):
    """Some images behind a slow source; native is that source itself."""

    def first(self, root: Path) -> float:
        time.sleep(ATTRIBUTES_EXPIRE_S)
        rate = read_files(self.at(root), SLOW_READERS).rate
        if root == self.mounted.path:
            self.mounted.settle()
        return rate


@dataclass(frozen=True, slots=True)
class Line:
    """One row for each contender; ``bars`` are by contender, or for ``BEST`` or ``AUTO``.

    ``function`` is called with the lab and the root of a side; ``own`` measures the mount alone.
    ``drops``: the page cache is dropped, which needs root.
    """

    name: str
    unit: str
    function: Callable[..., float] | None = None
    own: Callable[..., float] | None = None
    bars: Mapping[str, float] = field(default_factory=dict)
    drops: bool = False
    slices: int = 1

    def row(self, contender: str) -> Row[Lab]:
        bar = self.bars.get(contender)
        function, own = self.function, self.own
        if function is None:
            assert own is not None
            return Row(self.name, own, self.unit, bar=bar, contender=contender)
        return Row(
            self.name,
            lambda lab: function(lab, lab.mounted.path),
            self.unit,
            against=lambda lab: function(lab, lab.source.path),
            against_name="native",
            bar=bar,
            more_is_better=True,
            contender=contender,
            slices=self.slices,
        )


def _warm(name: str, unit: str, function: Callable[..., float], bars: Mapping[str, float]) -> Line:
    return Line(name, unit, function, bars=bars, slices=WARM)


def _dropped(
    name: str, unit: str, function: Callable[..., float], bars: Mapping[str, float]
) -> Line:
    return Line(name, unit, function, bars=bars, drops=True, slices=DROPPED)


FILES = "files/s"
MB_S = "MB/s"
FIRST = Line("epoch 1, 1 reader", FILES, Images.first, drops=True)
SLOW_FIRST = Line("epoch 1, slow source, 4 readers", FILES, Slow.first, bars={AUTO: 0.95})
GROUPS = ("epoch 1", "files", "large file", "list and stat")
CAPTION = (
    "ratio to native and median; ~: the ratios of the rounds scatter by more than 10 %. "
    "Native of the slow source is the slow source."
)
# By source: what is measured in one mount, in this order.
LINES: Mapping[type[Lab], tuple[Line, ...]] = {
    Images: (
        FIRST,
        _warm("files warm, 1 reader", FILES, partial(Images.warm, readers=1), {BEST: 0.75}),
        _warm("files warm, 4 readers", FILES, partial(Images.warm, readers=4), {BEST: 0.80}),
        _dropped(
            "files dropped, 4 readers", FILES, partial(Images.dropped, readers=4), {BEST: 0.80}
        ),
        _dropped("files dropped, 1 reader", FILES, partial(Images.dropped, readers=1), {}),
        Line("daemon CPU, files dropped", "s/1,000 files", own=Lab.cpu, drops=True),
        Line("daemon memory, files", "MB", own=Lab.memory),
    ),
    Large: (
        _warm("large file warm", MB_S, Large.warm, {"passthrough": 0.95, "relay": 0.30}),
        _warm(
            "large file, random 4 KiB",
            MB_S,
            partial(Large.randomly, block=4096),
            {"passthrough": 0.90},
        ),
        _warm("large file, random 128 KiB", MB_S, partial(Large.randomly, block=131_072), {}),
        _warm("large file, mmap scan", MB_S, Large.mapped, {"passthrough": 0.90}),
        _dropped("large file dropped", MB_S, Large.dropped, {"passthrough": 0.95}),
        Line(
            "daemon CPU, large file dropped",
            "s/GB",
            own=Lab.cpu,
            bars={"passthrough": 0.15},
            drops=True,
        ),
    ),
    Names: (
        # One slice: after it the mount is no longer fresh.
        Line("list and stat, first", "entries/s", Names.first, bars={AUTO: 0.5}, drops=True),
        Line("list and stat, again", "entries/s", Names.again, bars={AUTO: 0.9}, slices=2),
        Line("ls -lR, again", "entries/s", Names.long_listing, bars={AUTO: 0.8}),
        Line("daemon memory, names", "MB", own=Lab.memory),
    ),
    Slow: (SLOW_FIRST,),
}
