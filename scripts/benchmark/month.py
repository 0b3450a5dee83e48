"""A month of a job that logs and saves: how large the journal and the memory become.

Each second a line is appended to one log and fsynced, and checkpoints are saved as jobs do: files
are written and fsynced in a new directory, the directory is renamed, ``latest`` is replaced, and
the oldest checkpoint is removed. This is the real write-back of a mount, below the kernel, over a
real source, tier and state, in virtual time. Calls that a daemon makes in threads are made at once,
so a line is at the source before the next one comes, which is the most work that the drain can
have. Everything lies below ``--directory``, by default in memory: a month of fsyncs would keep a
disk busy for hours, and the disk is not what is measured.

At the end the job is killed before its last lines have come to the source, and mounted again.
"""

from __future__ import annotations

import argparse
import gc
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock
from typing_extensions import TypeVarTuple, Unpack

from monarch.config.settings import MountSettings
from monarch.daemon.snapshot_choice import snapshot_for
from monarch.namespace.namespace import Namespace
from monarch.placement.ledger import Ledger
from monarch.placement.residency import Residency
from monarch.posix.credentials import Credentials
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.metrics import Metrics
from monarch.tiers.ownership import Owner
from monarch.tiers.source import Source
from monarch.tiers.tier import Tier
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import NoDatapath, SourceLoad
from monarch.types import WRITTEN_INO, Ino
from monarch.writeback import commits, front, growth, stager
from monarch.writeback import setup as wiring
from monarch.writeback.front import Reading
from monarch.writeback.growth import Growth
from monarch.writeback.setup import build_write_back
from monarch.writeback.staging import Staging
from monarch.writeback.store import directory_of, open_write_store
from scripts.benchmark.rows import BenchError, Result, Row
from scripts.tools.mount import Mount
from tests.equipment.processes import anonymous_bytes

Args = TypeVarTuple("Args")

LOG = b"train.log"
LATEST = b"latest"
KEPT = 3
# Of a checkpoint.
FILES, FILE_BYTES = 4, 16 << 10
CAPACITY = 8 << 30
# Each part of the month gives one value of a row.
PARTS = 10
# Lines that have not come to the source when the daemon is killed.
LEFT = 60
MOUNTS = 3
ROOT = Credentials(os.geteuid(), os.getegid())


class NoKernel:
    """The caches of no kernel."""

    def invalidate_attributes(self, ino: Ino) -> None: ...
    def invalidate_listing(self, directory: Ino) -> None: ...
    def store(self, ino: Ino, content: bytes) -> None: ...
    def drop(self, ino: Ino) -> None: ...


class AtOnce(ThreadPool):
    """Makes each call at once, while virtual time stands still.

    ``latency_s`` is how long a call of the drain takes, in virtual seconds.
    """

    latency_s = 0.0

    async def run(self, function: Callable[[Unpack[Args]], Any], *args: Unpack[Args]) -> Any:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._name == "drain" and self.latency_s:
            await trio.sleep(self.latency_s)
        return function(*args)

    def start(self, function: Callable[[Unpack[Args]], object], *args: Unpack[Args]) -> None:
        try:
            function(*args)
        except OSError:
            # As in a thread, whose result is not waited for.
            return


class Counted:
    """Bytes of the log that the drain has written at the source."""

    bytes = 0


class CountedGrowth(Growth):
    """Counts bytes of the log, the only file that is appended to."""

    def write(self) -> Any:
        before = self._offset
        try:
            return super().write()
        finally:
            Counted.bytes += self._offset - before


class CountedStaging(Staging):
    """Counts bytes of the log, which is the first object."""

    def turn(self, count: int) -> int:
        before = self.moved
        try:
            return super().turn(count)
        finally:
            if self._number == 1:
                Counted.bytes += self.moved - before


class Life:
    """One mount, without the kernel."""

    def __init__(self, work: Path, stack: ExitStack) -> None:
        self.source, self.tier, self.state = (work / name for name in ("source", "tier", "state"))
        for path in (self.source, self.tier, self.state):
            path.mkdir(mode=0o700, exist_ok=True)
        settings = MountSettings.model_validate(
            {
                "name": "month",
                "source": self.source,
                "mountpoint": work / "mnt",
                "tiers": [{"path": self.tier, "capacity": CAPACITY}],
                "write": "absorb",
                "limits": {"source_timeout": None},
            }
        )
        begun = time.perf_counter()
        source = Source(os.fsencode(self.source))
        stack.callback(source.close)
        snapshot = snapshot_for(settings, self.state, source, False, lambda *_: None).snapshot
        stack.callback(snapshot.close)
        tier = Tier(1, "fast", self.tier, owner=Owner("bench"))
        stack.callback(tier.close)
        place = open_write_store(settings, [tier])
        assert place is not None
        stack.callback(place.lock.release)
        stack.callback(place.journal.close)
        residency = Residency(snapshot.entries)
        self.names = Namespace(
            snapshot,
            residency.mark_differing,
            first_ino=Ino(max(WRITTEN_INO, place.found.next_ino)),
            spill=self.state / "names",
        )
        source_calls = SourceCalls(
            source,
            AtOnce(4, "source", abandon=False),
            names=self.names,
            metrics=Metrics(["fast"]),
            timeout_s=None,
            datapath=NoDatapath(),
        )
        self.write_back = build_write_back(
            place,
            settings=settings,
            names=self.names,
            source_calls=source_calls,
            source_load=SourceLoad(NoDatapath()),
            ledger=Ledger([CAPACITY]),
            fast=None,
            read=Reading(
                copied_up=lambda ino: None,
                look_again=_never,
                copies=residency.resident_in,
                evict=lambda ino: 0,
                evicted=_nothing,
                is_open=lambda ino: False,
                renewed=lambda ino, before, now: None,
            ),
            kernel=NoKernel(),
        )
        self.seconds = time.perf_counter() - begun
        self.front = self.write_back.front

        self.journal = place.journal

    @property
    def journal_bytes(self) -> int:
        return (directory_of(self.tier, self.source) / "journal").stat().st_size

    def at(self, path: bytes) -> tuple[Ino, bytes]:
        above, _, name = path.rpartition(b"/")
        found = self.names.resolve(above)
        assert found is not None
        return found, name

    def ino(self, path: bytes) -> Ino:
        found = self.names.resolve(path)
        assert found is not None
        return found

    async def write(self, path: bytes, content: bytes) -> None:
        """A new file, fsynced."""
        made = await self.front.operations.create(*self.at(path), mode=0o644, by=ROOT)
        await self.front.files.write(made.ino, 0, content)
        await self.front.fsyncs.sync(made.ino, None)
        self.front.files.release(made.ino)

    async def save(self, number: int, content: bytes) -> None:
        """Save one checkpoint, and remove the one that is too old."""
        writing, path = self.front.operations, b"ckpt-%d" % number
        part = path + b".tmp"
        await writing.make(*self.at(part), mode=stat.S_IFDIR | 0o755, by=ROOT)
        for index in range(FILES):
            await self.write(b"%s/rank-%d.pt" % (part, index), content)
        await writing.rename(*self.at(part), *self.at(path), 0, by=ROOT)
        await self.write(LATEST + b".tmp", path)
        await writing.rename(*self.at(LATEST + b".tmp"), *self.at(LATEST), 0, by=ROOT)
        if number >= KEPT:
            old = b"ckpt-%d" % (number - KEPT)
            for index in range(FILES):
                writing.unlink(*self.at(b"%s/rank-%d.pt" % (old, index)), by=ROOT)
            writing.rmdir(*self.at(old), by=ROOT)


async def _never(ino: Ino) -> None:
    raise BenchError("no other process changes the source here")


async def _nothing() -> None:
    return


class Month:
    """The values: one for each part of the month, or for each mount."""

    def __init__(self, work: Path, lines: int, checkpoints: int) -> None:
        self.work, self.lines, self.checkpoints = work, lines, checkpoints
        self.largest: list[float] = []
        self.memory: list[float] = []
        self.objects: list[float] = []
        self.cost: list[float] = []
        self.below: list[float] = []
        self.mounts: list[float] = []
        self.fresh: list[float] = []
        self.logged = 0

    def live(self) -> None:
        trio.run(self._live, clock=MockClock(autojump_threshold=0))
        for _ in range(MOUNTS):
            self.below.append(trio.run(self._replayed))

    async def _replayed(self) -> float:
        with ExitStack() as stack:
            return Life(self.work, stack).seconds

    def mount(self) -> None:
        """Real mounts with the journal of the month, next to mounts with an empty tier.

        The first of them drains what is left.
        """
        for number in range(MOUNTS):
            with self._mounted("tier", "state") as mount:
                self.mounts.append(mount.seconds)
                log = (mount.path / LOG.decode()).stat().st_size
                if log != self.logged:
                    raise BenchError(f"the log has {log:,} bytes, not {self.logged:,}")
            with self._mounted(f"tier-{number}", f"state-{number}") as mount:
                self.fresh.append(mount.seconds)

    def _mounted(self, tier: str, state: str) -> Mount:
        return Mount(
            self.work / "source",
            self.work / "mnt",
            tier=self.work / tier,
            capacity=str(CAPACITY),
            state=self.work / state,
            options="write=absorb",
        )

    async def _live(self) -> None:
        with ExitStack() as stack:
            life = Life(self.work, stack)
            draining = trio.CancelScope()

            async def drain_until_killed() -> None:
                with draining:
                    await tasks["drain"]()

            tasks = dict(life.write_back.tasks())
            async with trio.open_nursery() as nursery:
                for name, task in tasks.items():
                    nursery.start_soon(drain_until_killed if name == "drain" else task)
                await self._job(life, draining.cancel)
                nursery.cancel_scope.cancel()

    async def _job(self, life: Life, stop_draining: Callable[[], None]) -> None:
        front, content = life.front, os.urandom(FILE_BYTES)
        log = await front.operations.create(*life.at(LOG), mode=0o644, by=ROOT)
        every = max(1, self.lines // max(1, self.checkpoints))
        part = max(1, self.lines // PARTS)
        saved, largest, begun_bytes, base = 0, 0, 0, 0.0
        begun = time.perf_counter()
        for number in range(self.lines):
            if number == self.lines - LEFT:
                stop_draining()
            line = b"step %d: loss %.6f, lr 3.0e-04, %d tokens/s\n" % (
                number,
                1 + 1 / (1 + number),
                number,
            )
            await front.files.write(log.ino, self.logged, line)
            await front.fsyncs.sync(log.ino, None)
            self.logged += len(line)
            if number % every == every - 1 and saved < self.checkpoints:
                await life.save(saved, content)
                saved += 1
            largest = max(largest, life.journal.file.position)
            await trio.sleep(1)
            if number % part == part - 1 and len(self.memory) < PARTS:
                gc.collect()
                memory = anonymous_bytes(os.getpid())
                base = base or memory
                self.memory.append((memory - base) / 1e6)
                self.objects.append(len(gc.get_objects()))
                self.largest.append(largest / 1e6)
                there = (life.source / os.fsdecode(LOG)).stat().st_size
                if there > begun_bytes:
                    self.cost.append(Counted.bytes / (there - begun_bytes))
                begun_bytes, Counted.bytes, largest = there, 0, 0
                sys.stderr.write(
                    f"{number + 1:,} lines in {time.perf_counter() - begun:.0f} s: journal"
                    f" {life.journal_bytes / 1e6:.1f} MB, {memory / 1e6:.1f} MB of memory,"
                    f" {self.objects[-1]:,.0f} objects\n"
                )


def run(
    options: argparse.Namespace, work: Path
) -> tuple[str, dict[str, object], list[Result[Any]]]:
    lines, checkpoints = options.files, options.checkpoints
    if checkpoints is None:
        checkpoints = max(1, lines // 260)
    month = Month(work, lines, checkpoints)
    with calls_made_at_once(options.latency):
        month.live()
    month.mount()
    results = [
        _result("journal: the largest size", "MB", month.largest, bar=8),
        _result("memory beyond that of the first part", "MB", month.memory, bar=8),
        _result("Python objects", "", month.objects),
        _result("bytes to the source a byte of the log", "", month.cost, bar=1.1),
        _result("the write side takes it up after a kill", "s", month.below, bar=2),
        Result(
            Row("monarch mount of the same", _never_called, "s", _never_called, "of a new tier"),
            month.mounts,
            month.fresh,
        ),
    ]
    conditions = {
        "lines": lines,
        "checkpoints": checkpoints,
        "latency_s": options.latency,
        "kept": KEPT,
        "files_of_a_checkpoint": FILES,
        "file_bytes": FILE_BYTES,
        "log_bytes": month.logged,
    }
    title = (
        f"{lines:,} lines, one fsynced each virtual second, and {checkpoints:,} checkpoints of"
        f" {FILES} files of {FILE_BYTES >> 10} KiB, of which the last {KEPT} stay"
    )
    return title, conditions, results


def _result(name: str, unit: str, values: list[float], *, bar: float | None = None) -> Result[Any]:
    if not values:
        raise BenchError(f"{name}: nothing was measured; there are too few lines")
    return Result(Row(name, _never_called, unit, bar=bar), values)


def _never_called(_: object) -> float:
    raise NotImplementedError("rows of a month are not measured one by one")


@contextmanager
def calls_made_at_once(latency_s: float) -> Iterator[None]:
    AtOnce.latency_s = latency_s
    replaced: list[tuple[Any, str, type]] = [
        (wiring, "ThreadPool", AtOnce),
        (commits, "ThreadPool", AtOnce),
        (front, "ThreadPool", AtOnce),
        (growth, "Growth", CountedGrowth),
        (stager, "Staging", CountedStaging),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    for module, name, ours in replaced:
        setattr(module, name, ours)
    try:
        yield
    finally:
        for module, name, theirs in before:
            setattr(module, name, theirs)
