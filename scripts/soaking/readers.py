"""Processes that read through a mount all the time and compare each byte with the original.

The original is the directory behind the source, where nothing is slow and nothing fails. A reader
reports over a pipe once a second; the commands to pause and to continue come over the same pipe.
"""

from __future__ import annotations

import errno
import mmap
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

_PIECES = (5000, 65_536, 1 << 20)
_MAPPED = 200_000
_MOST_OPEN = 8
_REPORT_S = 1.0
# How long a reader waits after its mount has gone.
_REST_S = 0.05


@dataclass(frozen=True, slots=True)
class Refused:
    """A read that failed, and since when its file was open, by the machine's monotonic clock."""

    name: str
    number: int
    opened_s: float
    ended_s: float


@dataclass(slots=True)
class Report:
    """What a reader has done since its last report."""

    files: int = 0
    bytes: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    paused: bool = False


@dataclass(frozen=True, slots=True)
class _Open:
    name: str
    fd: int
    opened_s: float


class Reading:
    """One reader: each ``step`` reads a file, in one of several ways."""

    def __init__(
        self, mountpoint: Path, source: Path, names: Sequence[str], dice: random.Random
    ) -> None:
        self._mountpoint = mountpoint
        self._source = source
        self._names = names
        self._dice = dice
        self._order: list[str] = []
        self._kept: list[_Open] = []
        self._copied = os.memfd_create("copied")
        self.report = Report()

    def step(self) -> None:
        """Read the next file of the epoch, or one of those that are open."""
        begun = time.monotonic()
        name = self._next()
        try:
            self._kept.append(_Open(name, os.open(self._mountpoint / name, os.O_RDONLY), begun))
            chosen = self._dice.choice((self._kept[-1], self._kept[-1], *self._kept))
            name, begun = chosen.name, chosen.opened_s
            self._compare(chosen)
        except OSError as error:
            number = error.errno or errno.EIO
            self.report.refused.append(Refused(name, number, begun, time.monotonic()))
            if number in (errno.ENOTCONN, errno.ENOENT, errno.EFAULT):
                # All open files are of a mount that has gone.
                self.close()
                time.sleep(_REST_S)
        while len(self._kept) > self._dice.randrange(1, _MOST_OPEN):
            _close(self._kept.pop(self._dice.randrange(len(self._kept))).fd)

    def _next(self) -> str:
        if not self._order:
            self._order = self._dice.sample(self._names, len(self._names))
        return self._order.pop()

    def _compare(self, chosen: _Open) -> None:
        original = os.open(self._source / chosen.name, os.O_RDONLY)
        try:
            size = os.fstat(original).st_size
            if self._dice.random() < 0.5:
                os.posix_fadvise(chosen.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            way = self._dice.choice((self._whole, self._whole, self._parts, self._mapped))
            wrong = way(chosen.fd, original, size)
            if wrong:
                how, now_s = way.__name__.lstrip("_"), time.monotonic()
                text = f"{chosen.name}, read {how}: {wrong}; of {size} bytes, open for"
                open_s = now_s - chosen.opened_s
                self.report.wrong.append(f"{text} {open_s:.3f} s until {now_s:.3f}")
            self.report.files += 1
        finally:
            os.close(original)

    def _whole(self, fd: int, original: int, size: int) -> str:
        piece = self._dice.choice(_PIECES)
        place = 0
        while True:
            got = os.pread(fd, piece, place)
            if not got:
                return "" if place == size else f"ends at {place}"
            # What follows a short read may be an error, as when the daemon dies in between.
            expected = os.pread(original, len(got), place)
            if got != expected:
                return _difference(place, got, expected)
            place += len(got)
            self.report.bytes += len(got)

    def _parts(self, fd: int, original: int, size: int) -> str:
        for _ in range(6):
            place, piece = self._dice.randrange(size + 10), self._dice.choice(_PIECES)
            expected, got = os.pread(original, piece, place), b""
            while more := os.pread(fd, piece - len(got), place + len(got)):
                got += more
            if got != expected:
                return _difference(place, got, expected)
            self.report.bytes += len(got)
        return ""

    def _mapped(self, fd: int, original: int, size: int) -> str:
        if os.fstat(fd).st_size != size:
            return f"fstat gives {os.fstat(fd).st_size} bytes"
        if not size:
            return ""
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as pages, memoryview(pages) as whole:
            place = self._dice.randrange(size)
            with whole[place : place + _MAPPED] as part:
                # The kernel copies: for it a page that cannot be read is EFAULT, for us SIGBUS.
                os.ftruncate(self._copied, 0)
                count = os.pwrite(self._copied, part, 0)
        self.report.bytes += count
        got, expected = os.pread(self._copied, count, 0), os.pread(original, count, place)
        return "" if got == expected else _difference(place, got, expected)

    def close(self) -> None:
        for one in self._kept:
            _close(one.fd)
        self._kept.clear()


def _difference(place: int, got: bytes, expected: bytes) -> str:
    """Where the first wrong byte is, and what follows it."""
    same = next((n for n, (a, b) in enumerate(zip(got, expected)) if a != b), None)  # noqa: B905
    if same is None:
        return f"{len(got)} instead of {len(expected)} bytes at {place}"
    zeros = "zeros" if not any(got[same:]) else "other bytes"
    return f"{zeros} from {place + same} on, {len(got)} of {len(expected)} bytes at {place}"


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError as error:
        # The daemon that would be informed is gone.
        if error.errno not in (errno.ENOTCONN, errno.ECONNABORTED):
            raise


def _read_on(reading: Reading, pipe: Connection) -> None:
    reported_s = time.monotonic()
    paused = False
    while True:
        if paused or pipe.poll():
            word = pipe.recv()
            if word == "end":
                return
            paused = word == "pause"
            if paused:
                reading.close()
        if not paused:
            reading.step()
        if paused or time.monotonic() - reported_s > _REPORT_S:
            reading.report.paused = paused
            pipe.send(reading.report)
            reading.report, reported_s = Report(), time.monotonic()


def _main(
    mountpoint: Path, source: Path, names: Sequence[str], seed: int, pipe: Connection
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    _read_on(Reading(mountpoint, source, names, random.Random(seed)), pipe)


class Readers:
    """``count`` processes that read below ``mountpoint``; paused until the first ``go``."""

    def __init__(
        self, mountpoint: Path, source: Path, names: Sequence[str], *, count: int, seed: int
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.files = self.bytes = 0
        self.wrong: list[str] = []
        self.refused: list[Refused] = []
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._paused: set[Connection] = set()
        for number in range(count):
            ours, theirs = context.Pipe()
            ours.send("pause")
            process = context.Process(
                target=_main, args=(mountpoint, source, names, seed + number, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def collect(self) -> None:
        """Add the reports that have come."""
        for pipe in self._pipes:
            while pipe.poll():
                report: Report = pipe.recv()
                self.files += report.files
                self.bytes += report.bytes
                self.wrong += report.wrong
                self.refused += report.refused
                if report.paused:
                    self._paused.add(pipe)

    def pause(self, *, patience_s: float, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Have all readers close their files; False if one does not within the time."""
        self._paused.clear()
        for pipe in self._pipes:
            pipe.send("pause")
        deadline = time.monotonic() + patience_s
        while len(self._paused) < len(self._pipes):
            meanwhile()
            self.collect()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def go(self) -> None:
        for pipe in self._pipes:
            pipe.send("go")

    def end(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send("end")
            except OSError:
                self.wrong.append("a reader has died")
        for process in self._processes:
            process.join(10)
            if process.exitcode is None:
                self.wrong.append("a reader hangs")
                process.kill()
            elif process.exitcode:
                self.wrong.append(f"a reader ended with {process.exitcode}")
