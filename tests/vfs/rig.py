"""A file system below the kernel: a real source, snapshot and tier, and fakes of the rest.

The fakes have behaviour: the engine makes copies when a test lets them arrive, the tier monitor can
refuse a tier, the kernel's caches note what they are sent, the datapath keeps the events that it is
given. All calls are made on the event loop, so a test needs no thread and no real time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.config.settings import ForesightSettings, MountSettings
from monarch.errors import TierError
from monarch.foresight.foresight import Foresight
from monarch.namespace.build import build
from monarch.namespace.namespace import Namespace
from monarch.namespace.snapshot import Snapshot
from monarch.placement.controller import Controller, Promote
from monarch.placement.epochs import Epochs
from monarch.placement.ledger import Ledger
from monarch.placement.policy import Item, Lru, Policy
from monarch.placement.residency import Residency
from monarch.posix.credentials import Credentials
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.metrics import Histogram, Metrics
from monarch.tiers.doubts import Doubts, SourceClock
from monarch.tiers.ownership import Owner
from monarch.tiers.records import Record, Records
from monarch.tiers.source import Source, SourceFile
from monarch.tiers.tier import Tier
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import NoDatapath, SourceLoad, SourceTraffic
from monarch.types import Identity, Ino
from monarch.vfs.filesystem import FileSystem
from monarch.vfs.interfaces import Served, Tally
from monarch.vfs.read_side import build_read_side

Args = TypeVarTuple("Args")
T = TypeVar("T")

READER = Credentials(os.geteuid(), os.getegid())
CAPACITY = 1 << 20


class InlinePool(ThreadPool):
    """Makes each call on the event loop; while ``gate`` is set, calls wait for it first. Then they
    wait for ``before``, which gets the arguments of the call, and may raise OSError."""

    def __init__(self) -> None:
        super().__init__(1, "source", abandon=True)
        self.gate: trio.Event | None = None
        self.before: Callable[..., Awaitable[None]] | None = None
        self.calls = 0

    async def run(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        self.calls += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.before is not None:
            await self.before(*args)
        await trio.lowlevel.checkpoint()
        return function(*args)


class FakeTierCalls:
    """The tier monitor: calls of the tiers in ``bypassed`` and ``hanging`` are not made. While
    ``gate`` is set, calls that change a tier wait for it first, and while ``reading`` is, other
    calls for that."""

    def __init__(self) -> None:
        self.gate: trio.Event | None = None
        self.reading: trio.Event | None = None
        self.bypassed: set[int] = set()
        self.hanging: set[int] = set()
        self.unreadable: list[tuple[int, int | None]] = []
        self.has_room = True
        self.failures: list[TierError] = []
        self.calls = 0

    def is_read(self, number: int) -> bool:
        return number not in self.bypassed

    def copy_unreadable(self, number: int, error: OSError) -> None:
        self.unreadable.append((number, error.errno))

    def failed(self, tier: Tier, error: TierError) -> None:
        self.failures.append(error)

    async def take_room(self, tier: Tier, size: int) -> bool:
        await trio.lowlevel.checkpoint()
        return self.has_room

    async def call(
        self,
        tier: Tier,
        function: Callable[[Unpack[Args]], T],
        *args: Unpack[Args],
        size: int = 0,
    ) -> T:
        await trio.lowlevel.checkpoint()
        if self.gate is not None:
            await self.gate.wait()
        try:
            return function(*args)
        except OSError as error:
            raise TierError(str(error)) from error

    async def ask(
        self,
        number: int,
        function: Callable[[Unpack[Args]], T],
        *args: Unpack[Args],
        size: int = 0,
    ) -> T:
        self.calls += 1
        await trio.lowlevel.checkpoint()
        if self.reading is not None:
            await self.reading.wait()
        if number in self.hanging:
            raise OSError(errno.ETIMEDOUT, "the tier does not answer")
        return function(*args)


@dataclass
class FakeArrival:
    """A fetch ahead of readers; a reader may take it over until it ``began``."""

    began: bool = False
    content: bytes | memoryview | None = None
    done: trio.Event = field(default_factory=trio.Event)


@dataclass
class FakeFlight:
    promote: Promote
    identity: Identity
    content: bytes | memoryview | None
    file: SourceFile | None
    copied: int = 0
    arrival: FakeArrival | None = None


class NoWindow:
    """Has no files."""

    def get(self, ino: Ino) -> None:
        return None

    def read(self, ino: Ino, *, is_last: bool) -> bool:
        return False

    def hand_over(self, ino: Ino) -> None: ...


class FakeEngine:
    """Keeps what is submitted until ``arrive`` makes a copy of it, or ``fail`` gives it up."""

    def __init__(self, controller: Controller, tier: Tier, records: Records) -> None:
        self._controller = controller
        self._tier = tier
        self._records = records
        self.flights: dict[Ino, FakeFlight] = {}
        self.removed_copies: list[Ino] = []
        self.wake_ups = 0
        self.window = NoWindow()

    def wake(self) -> None:
        self.wake_ups += 1

    def make_room(self, promote: Promote) -> Promote:
        for victim in promote.evict:
            self.remove_copy(victim, promote.tier)
        return replace(promote, evict=())

    def submit(
        self,
        promote: Promote,
        identity: Identity,
        *,
        content: bytes | memoryview | None = None,
        file: SourceFile | None = None,
    ) -> bool:
        promote = self.make_room(promote)
        retained = file.retain() if file is not None else None
        self.flights[promote.ino] = FakeFlight(promote, identity, content, retained)
        return True

    def flight(self, ino: Ino) -> FakeFlight | None:
        return self.flights.get(ino)

    def take_over(self, ino: Ino) -> bool:
        arrival = self.flights[ino].arrival
        if arrival is None or arrival.began:
            return False
        self.fail(ino)
        return True

    def fetch_ahead(self, ino: Ino, size: int, identity: Identity, *, began: bool) -> FakeArrival:
        """Begins a fetch ahead of readers."""
        promote = self._controller.offered(Item(ino, size, identity.source_ino))
        assert promote is not None
        arrival = FakeArrival(began)
        self.flights[ino] = FakeFlight(promote, identity, None, None, arrival=arrival)
        return arrival

    def remove_copy(self, ino: Ino, tier: int) -> None:
        self._records.clear(ino)
        self._tier.remove(ino)
        self.removed_copies.append(ino)

    async def removed(self) -> None:
        await trio.lowlevel.checkpoint()

    def has_place(self) -> bool:
        return len(self.flights) < 4

    def has_room_for(self, size: int) -> bool:
        return True

    def arrive(self, ino: Ino) -> None:
        """Makes the copy."""
        flight = self._end(ino)
        content = flight.content
        if content is None:
            assert flight.file is not None
            content = os.pread(flight.file.fd, flight.promote.size, 0)
            flight.file.release()
        self.put(ino, flight.identity, bytes(content))
        self._controller.committed(flight.promote.item, flight.promote.tier)

    def put(self, ino: Ino, identity: Identity, content: bytes) -> None:
        with self._tier.stage(ino) as staged:
            staged.append(content)
            digest = staged.commit(identity)
        self._records.put(ino, Record(self._tier.number, identity, digest))

    def fail(self, ino: Ino) -> None:
        """Gives the copy up."""
        flight = self._end(ino)
        if flight.file is not None:
            flight.file.release()
        self._controller.abandoned(flight.promote.item, flight.promote.tier, retry=False)

    def _end(self, ino: Ino) -> FakeFlight:
        return self.flights.pop(ino)


class FakeCaches:
    """The kernel's caches: what they were sent."""

    def __init__(self) -> None:
        self.attributes: list[Ino] = []
        self.listings: list[Ino] = []
        self.stored: dict[Ino, bytes] = {}
        self.dropped: list[Ino] = []

    def invalidate_attributes(self, ino: Ino) -> None:
        self.attributes.append(ino)

    def invalidate_listing(self, directory: Ino) -> None:
        self.listings.append(directory)

    def store(self, ino: Ino, content: bytes) -> None:
        self.stored[ino] = content

    def drop(self, ino: Ino) -> None:
        self.dropped.append(ino)


class FakeFastPath:
    """The datapath: ``events`` are reported at the next request, ``open`` is what it has open."""

    def __init__(self) -> None:
        self.events: list[Served] = []
        self.bound: dict[Ino, tuple[int, int, int]] = {}
        self.descriptors: dict[Ino, int] = {}
        self.parts: dict[Ino, tuple[int, int]] = {}
        self.watched: dict[Ino, int] = {}
        self.open: set[Ino] = set()
        self.passed: set[Ino] = set()
        self.given: set[Ino] = set()
        self.outdated: list[Ino] = []
        self.registered: list[int] = []
        self.unregistered: list[int] = []
        self.kept: list[Ino] = []
        # The requests that wait for the limits of their jobs.
        self.waiting = 0
        none = [0] * len(Histogram().counts)
        self.tally = [Tally(0, 0, 0, none, 0, none, 0)] * 2
        self.traffic = SourceTraffic(0, 0, 0, 0, 0, 0)

    def register(self, fd: int, tier: int) -> int:
        self.registered.append(fd)
        return 100 + len(self.registered)

    def unregister(self, backing_id: int) -> None:
        self.unregistered.append(backing_id)

    def bind(self, ino: Ino, fd: int, *, tier: int, size: int, backing_id: int) -> bool:
        self.bound[ino] = (tier, size, backing_id)
        self.descriptors[ino] = fd
        return True

    def end_binding(self, ino: Ino) -> None:
        self.bound.pop(ino, None)
        self.parts.pop(ino, None)

    def bind_part(self, ino: Ino, fd: int, *, tier: int, size: int) -> bool:
        self.parts[ino] = (tier, size)
        return True

    def drop_part(self, ino: Ino) -> None:
        self.parts.pop(ino, None)

    def watch(self, ino: Ino, offset: int) -> None:
        self.watched[ino] = offset

    def outdate(self, ino: Ino) -> bool:
        self.outdated.append(ino)
        return ino in self.open

    def served(self) -> list[Served]:
        events, self.events = self.events, []
        return events

    def taken(self, ino: Ino) -> None:
        self.kept.append(ino)

    def keep_unread(self, ino: Ino, content: bytes | memoryview, unread: int) -> bool:
        return False

    def throttled(self, change: int) -> None:
        self.waiting += change

    def was_given(self, ino: Ino) -> bool:
        return ino in self.given

    def tallies(self) -> list[Tally]:
        return self.tally

    def source_traffic(self) -> SourceTraffic:
        return self.traffic

    def open_files(self) -> int:
        return len(self.open)

    def backing_ids(self) -> int:
        return len(self.registered) - len(self.unregistered)

    def is_open(self, ino: Ino) -> bool:
        return ino in self.open

    def is_passed(self, ino: Ino) -> bool:
        return ino in self.passed


@dataclass
class Rig:
    """One file system over ``source``. ``inline_max`` in bytes."""

    root: Path
    source_path: Path
    sends_opens: bool = True
    reads_copies: bool = False
    verify: str = "unclean"
    inline_max: int = 4096
    capacity: int = CAPACITY
    policy: Policy = field(default_factory=Lru)
    parts: bool = True
    buffer_max: str = "16MiB"
    fast: FakeFastPath | None = None
    caches: FakeCaches = field(default_factory=FakeCaches)
    tier_calls: FakeTierCalls = field(default_factory=FakeTierCalls)
    threads: InlinePool = field(default_factory=InlinePool)

    def __post_init__(self) -> None:
        state = self.root / "state"
        state.mkdir(parents=True)
        build(self.source_path, self.root / "snapshot")
        snapshot = self.snapshot = Snapshot.open(self.root / "snapshot")
        self.source = Source(os.fsencode(self.source_path))
        self.tier = Tier(1, "fast", self.root / "tier", owner=Owner("test"))
        self.tier.use(snapshot.id)
        # As a disk: reads go through the monitor unless the page cache has the bytes.
        self.tier.in_memory = False
        self.records = Records(state, snapshot.id, [self.tier.id])
        self.residency = Residency(snapshot.entries)
        self.ledger = Ledger([self.capacity])
        self.controller = Controller(self.residency, self.ledger, self.policy)
        self.engine = FakeEngine(self.controller, self.tier, self.records)
        self.metrics = Metrics(["fast"])
        self.epochs = Epochs(snapshot.entries)
        self.names = Namespace(snapshot, self.residency.mark_differing)
        self.doubts = Doubts(SourceClock(0, 0))
        settings: dict[str, Any] = {
            "name": "m",
            "source": self.source_path,
            "mountpoint": self.root / "mnt",
            "verify": self.verify,
            "foresight": {"parts": self.parts},
            "limits": {
                "inline_max": self.inline_max,
                "buffer_max": self.buffer_max,
                "range_min": "16MiB",
            },
        }
        self.source_calls = SourceCalls(
            self.source,
            self.threads,
            names=self.names,
            metrics=self.metrics,
            timeout_s=None,
            datapath=NoDatapath(),
        )
        self.read_side = build_read_side(
            names=self.names,
            source_calls=self.source_calls,
            source_load=SourceLoad(NoDatapath()),
            tiers=[self.tier],
            records=self.records,
            residency=self.residency,
            controller=self.controller,
            engine=self.engine,
            tier_calls=self.tier_calls,
            caches=self.caches,
            fast=self.fast,
            sends_opens=self.sends_opens,
            reads_copies=self.reads_copies,
            settings=MountSettings.model_validate(settings),
            doubts=self.doubts,
            metrics=self.metrics,
        )
        foresight = Foresight(self.snapshot, ForesightSettings())
        self.filesystem = FileSystem(self.read_side, self.epochs, foresight, None)

    def close(self) -> None:
        self.read_side.bindings.close()
        self.read_side.parts.close()
        for flight in self.engine.flights.values():
            if flight.file is not None:
                flight.file.release()
        self.records.close(clean=True)
        self.tier.close()
        self.source.close()
        self.snapshot.close()

    def ino(self, path: str) -> Ino:
        found = self.names.resolve(path.encode())
        assert found is not None, path
        return found

    def write(self, path: str, content: bytes, *, in_place: bool = False) -> None:
        """Another program writes a file at the source: a new one by rename, or in place."""
        target = self.source_path / path
        before = target.stat().st_mtime_ns if target.exists() else 0
        if in_place:
            target.write_bytes(content)
        else:
            (target.parent / ".new").write_bytes(content)
            (target.parent / ".new").rename(target)
        os.utime(target, ns=(before + 10**9, before + 10**9))

    def copy(self, path: str) -> Ino:
        """Makes a copy as it is recorded, without a reader."""
        ino = self.ino(path)
        assert self.read_side.promotions.warm(ino)
        flight = self.engine.flights[ino]
        flight.content = (self.source_path / path).read_bytes()
        self.engine.arrive(ino)
        return ino

    def copy_path(self, ino: Ino) -> Path:
        (found,) = self.tier.own.rglob(str(ino))
        return found

    async def open(self, path: str) -> Ino:
        ino = self.ino(path)
        await self.filesystem.open(ino, os.O_RDONLY, READER)
        return ino

    async def read(self, ino: Ino, offset: int = 0, size: int = 1 << 20) -> bytes:
        return bytes(await self.filesystem.read(ino, offset, size))

    async def content(self, path: str) -> bytes:
        """Opens, reads and releases a file."""
        ino = await self.open(path)
        try:
            return await self.read(ino)
        finally:
            self.filesystem.release(ino)
