"""Fetches ahead and readers between a real source and a real tier, in virtual time.

There are no threads. The calls of the source take as long as a model says (``sources.py``), those
of the tier no time.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import outcome
import trio
import trio.testing
from typing_extensions import TypeVarTuple, Unpack

from monarch.config.settings import ForesightSettings, MountSettings
from monarch.foresight.foresight import Foresight
from monarch.namespace.build import build
from monarch.namespace.namespace import Namespace
from monarch.namespace.snapshot import Snapshot
from monarch.placement.controller import Controller
from monarch.placement.epochs import Epochs
from monarch.placement.ledger import Ledger
from monarch.placement.policy import FirstCome, Policy
from monarch.placement.residency import Residency
from monarch.posix.credentials import Credentials
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.metrics import Metrics
from monarch.tiers.doubts import Doubts, SourceClock
from monarch.tiers.ownership import Owner
from monarch.tiers.records import Records
from monarch.tiers.source import Source, close_result
from monarch.tiers.tier import Tier
from monarch.transfer.ahead import FetchAhead
from monarch.transfer.chunks import ChunkReads
from monarch.transfer.engine import Engine
from monarch.transfer.queue import Buffer
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import NoDatapath, SourceLoad
from monarch.transfer.source_reader import SourceReader
from monarch.transfer.tier_monitor import TierMonitor
from monarch.transfer.window import Window
from monarch.types import Identity, Ino
from monarch.vfs.filesystem import FileSystem
from monarch.vfs.read_side import build_read_side
from tests.transfer.sources import Latency, Model
from tests.vfs.rig import FakeCaches

Args = TypeVarTuple("Args")
T = TypeVar("T")

READER = Credentials(os.geteuid(), os.getegid())


class InlinePool(ThreadPool):
    """Makes each call on the event loop, after ``seconds``."""

    seconds = 0.0

    async def run(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        await trio.sleep(self.seconds)
        return function(*args)

    def prepare(self) -> None: ...


class ModelThreads(ThreadPool):
    """``limit`` threads for a source: each call is made at once, and returns when ``model`` says.

    ``began`` has the time of the begin of each call that opens a file.
    """

    def __init__(self, model: Model, limit: int = 128) -> None:
        super().__init__(limit, "source", abandon=True)
        self.model = model
        self.began: list[float] = []
        self.running = self.most_running = 0
        self._free = trio.CapacityLimiter(limit)

    def oldest_s(self) -> float:
        return 0.0

    async def run(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        async with self._free:
            now = trio.current_time()
            size = next((arg.size for arg in args if isinstance(arg, Identity)), 0)
            self.began.append(now)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            result = outcome.capture(function, *args)
            try:
                await trio.sleep_until(self.model.end(size, now))
            except BaseException:
                if isinstance(result, outcome.Value):
                    close_result(result.value)
                raise
            finally:
                self.running -= 1
            return result.unwrap()


@dataclass
class Listed:
    """Foresees files in a given order. ``over``: they were foreseen, and will not be read.
    ``is_shared``: another job reads them, too."""

    order: list[Ino]
    coming: dict[Ino, int] = field(default_factory=dict)
    refusals: list[Ino] = field(default_factory=list)
    questions: list[int] = field(default_factory=list)
    over: set[Ino] = field(default_factory=set)
    idle: set[Ino] = field(default_factory=set)
    awaited: set[Ino] = field(default_factory=set)
    is_shared: bool = False
    must: list[Ino] = field(default_factory=list)

    def pinned(self, most: int) -> list[Ino]:
        found, self.must = self.must[:most], self.must[most:]
        return found

    def next(self, most: int) -> list[Ino]:
        self.questions.append(most)
        found, self.order = self.order[:most], self.order[most:]
        return found

    def is_foreseen(self, ino: Ino) -> bool:
        return ino not in self.over

    def fetched(self, ino: Ino, nbytes: int) -> None:
        assert ino not in self.coming
        self.coming[ino] = nbytes

    def refused(self, ino: Ino) -> None:
        self.refusals.append(ino)

    def is_announced(self, ino: Ino) -> bool:
        return ino in self.awaited

    def is_idle(self, ino: Ino) -> bool:
        return ino in self.idle

    def is_recognised(self, ino: Ino) -> bool:
        return False

    def reader_of(self, ino: Ino) -> int:
        return 0

    def is_expected_again(self, ino: Ino, job: int) -> bool:
        return self.is_shared


class CountingSource(Source):
    """Counts the opens of each path."""

    def __init__(self, path: bytes) -> None:
        super().__init__(path)
        self.opens: dict[bytes, int] = {}
        self.failing: dict[bytes, int] = {}

    def _opened(self, path: bytes) -> int:
        self.opens[path] = self.opens.get(path, 0) + 1
        if path in self.failing:
            raise OSError(self.failing[path], os.strerror(self.failing[path]))
        return super()._opened(path)


class AheadRig:
    """One file system over ``source`` with fetches ahead. Its tasks run in ``running``."""

    foreseeing = ForesightSettings()

    def __init__(
        self,
        root: Path,
        source: Path,
        *,
        model: Model | None = None,
        threads: int = 128,
        capacity: int = 1 << 40,
        sends_opens: bool = True,
        limits: Mapping[str, int | float] | None = None,
        window: int = 0,
        policy: Policy | None = None,
    ) -> None:
        self.sends_opens = sends_opens
        state = root / "state"
        state.mkdir(parents=True)
        self.source_path = source
        self.source = self._opened_source(source)
        self._make_snapshot(source, root / "snapshot")
        self.snapshot = Snapshot.open(root / "snapshot")
        self.tier = Tier(1, "fast", root / "tier", owner=Owner("test"))
        self.tier.use(self.snapshot.id)
        self.records = Records(state, self.snapshot.id, [self.tier.id])
        self.residency = Residency(self.snapshot.entries)
        self.ledger = Ledger([capacity])
        self.controller = Controller(self.residency, self.ledger, self._policy(policy, capacity))
        self.metrics = Metrics(["fast"])
        self.names = Namespace(self.snapshot, self.residency.mark_differing)
        self.threads = ModelThreads(model or Latency(0.01), threads)
        settings = MountSettings.model_validate(
            {
                "name": "m",
                "source": source,
                "mountpoint": root / "mnt",
                "limits": {
                    "tier_timeout": 10**6,
                    "source_concurrency": threads,
                    **(limits or {}),
                },
            }
        )
        doubts = Doubts(SourceClock(0, 0))
        self.load = SourceLoad(NoDatapath())
        self.reader = SourceReader(
            self.source,
            self.names,
            self.threads,
            self.load,
            self.metrics,
            settings.limits,
            doubts,
        )
        self.monitor = TierMonitor(
            tiers=[self.tier],
            keep_free=[0],
            ledger=self.ledger,
            metrics=self.metrics,
            limits=settings.limits,
            datapath=NoDatapath(),
        )
        self.changed: list[Ino] = []
        self.window = Window(self.controller, self._window_buffer(window), window)
        self.engine = Engine(
            self.monitor,
            self.records,
            self.controller,
            self.reader,
            self.changed.append,
            self.window,
        )
        self.calls = SourceCalls(
            self.source,
            self.threads,
            names=self.names,
            metrics=self.metrics,
            timeout_s=settings.limits.source_timeout,
            datapath=NoDatapath(),
        )
        self.read_side = build_read_side(
            names=self.names,
            source_calls=self.calls,
            source_load=self.load,
            tiers=[self.tier],
            records=self.records,
            residency=self.residency,
            controller=self.controller,
            engine=self.engine,
            tier_calls=self.monitor,
            caches=FakeCaches(),
            fast=None,
            sends_opens=sends_opens,
            reads_copies=False,
            settings=settings,
            doubts=doubts,
            metrics=self.metrics,
        )
        foresight = Foresight(self.snapshot, self.foreseeing, self.controller.is_placed)
        epochs = Epochs(self.snapshot.entries)
        self.filesystem = FileSystem(self.read_side, epochs, foresight, None)
        self.foresight = foresight
        self.foreseen = Listed([])
        self.chunks = self._chunk_reads()
        if self.chunks is not None:
            self.read_side.promotions.chunks = self.chunks
            self.chunks.leave_to_readers(
                self.read_side.bindings.is_open, self.read_side.kernel.may_be_half_read
            )
        self.ahead = FetchAhead(
            self.foreseen,
            self.names,
            self.controller,
            self.engine,
            self.reader,
            self.load,
            self.read_side.bindings.is_open,
            self.chunks,
            self.read_side.kernel.may_be_half_read,
        )

    def _policy(self, policy: Policy | None, capacity: int) -> Policy:
        return policy or FirstCome()

    def _opened_source(self, source: Path) -> Source:
        return CountingSource(os.fsencode(source))

    def _make_snapshot(self, source: Path, target: Path) -> None:
        build(source, target)

    def _window_buffer(self, most: int) -> Buffer:
        return self.reader.buffer

    def _chunk_reads(self) -> ChunkReads | None:
        return None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[trio.Nursery]:
        async def never(tier: Tier) -> None:
            raise AssertionError("no tier leaves its path")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(self.engine.run, on_return=never))
            nursery.start_soon(self.calls.run)
            nursery.start_soon(self.ahead.run)
            if self.chunks is not None:
                nursery.start_soon(self.chunks.run)
                await trio.testing.wait_all_tasks_blocked()
            yield nursery
            nursery.cancel_scope.cancel()
        assert self.ledger.reserved(1) == 0
        assert self.reader.buffer.used == 0
        assert self.engine.running == 0

    def close(self) -> None:
        self.read_side.bindings.close()
        self.records.close(clean=True)
        self.tier.close()
        self.source.close()
        self.snapshot.close()

    def ino(self, path: str) -> Ino:
        found = self.names.resolve(path.encode())
        assert found is not None, path
        return found

    def foresee(self, *paths: str) -> list[Ino]:
        inos = [self.ino(path) for path in paths]
        self.foreseen.order += inos
        self.foreseen.awaited |= set(inos)
        self.ahead.wake()
        return inos

    async def content(self, ino: Ino) -> bytes:
        """Opens, reads and releases a file."""
        if not self.sends_opens:
            return bytes(await self.filesystem.read(ino, 0, 1 << 30))
        await self.filesystem.open(ino, os.O_RDONLY, READER)
        try:
            return bytes(await self.filesystem.read(ino, 0, 1 << 30))
        finally:
            self.filesystem.release(ino)

    def opens_of(self, path: str) -> int:
        assert isinstance(self.source, CountingSource)
        return self.source.opens.get(path.encode(), 0)


async def until(holds: Callable[[], bool], *, virtual_s: float = 60.0) -> None:
    with trio.fail_after(virtual_s):
        while not holds():
            await trio.sleep(0.001)
