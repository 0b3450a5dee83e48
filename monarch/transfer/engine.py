"""The transfer engine: takes promotions from placement and carries them out, never in the way.

``submit`` never waits: what finds no place in the queue is put back as *wanted* and comes up again
when the queue has run dry. At most one flight per item. A copy follows a reader that is reading
the same file (its bytes are then in the page cache of the source's client) and stands aside while
other readers wait for the source.
"""

from __future__ import annotations

import errno
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import MonarchError, SourceChanged, TierError
from monarch.log import Limiter
from monarch.metrics import Metrics
from monarch.placement.controller import Controller, Promote
from monarch.placement.ledger import Ledger
from monarch.placement.policy import Item
from monarch.settings import LimitSettings
from monarch.threads import Threads
from monarch.tiers.directory import Tier
from monarch.tiers.records import Records
from monarch.tiers.source import Source, SourceFile, read_whole
from monarch.transfer.copy import (
    TURN_BYTES,
    Content,
    append_all,
    check_unchanged,
    commit,
    commit_contents,
    open_version,
    read_turn,
)
from monarch.transfer.readers import Readers
from monarch.transfer.throttle import TokenBucket
from monarch.types import Attributes, Identity, Ino

log = logging.getLogger(__name__)

# Promotions waiting for a worker. More would only be a longer list of what is wanted anyway.
_QUEUE_LIMIT = 4096
# How long a worker that was idle lets files gather, so that they share a turn. Seconds.
_GATHER_S = 0.01
# Small files committed in one turn of a worker thread: the hop costs as much as a commit.
_BATCH = 32
# How long one turn of a copy waits for readers to pause before it takes its share. Seconds.
_COURTESY_S = 0.25
_STEP_S = 0.005
# How often the queue is looked after when nothing happens. Seconds.
_IDLE_S = 0.1
# After a failed copy the wanted items rest: doubling from the first to the second. Seconds.
_BACKOFF_S = (1.0, 60.0)
# How often a tier's free space is asked for, and an unusable tier is tried again. Seconds.
_SPACE_AGE_S = 1.0
_PROBE_S = 10.0

Args = TypeVarTuple("Args")
T = TypeVar("T")


class Names(Protocol):
    """What the engine asks of the namespace."""

    def path(self, ino: Ino) -> bytes: ...
    def attributes(self, ino: Ino) -> Attributes: ...


@dataclass(slots=True, eq=False)
class Flight:
    """One copy under way. ``content`` is what a reader fetched, ``file`` what a reader has open."""

    promote: Promote
    identity: Identity
    content: bytes | memoryview | None = None
    file: SourceFile | None = None


class _Line:
    """Flights that wait for a worker, first come first served."""

    __slots__ = ("_flights", "_workers")

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()
        self._workers = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._flights)

    def put(self, flight: Flight) -> None:
        self._flights.append(flight)
        self._workers.unpark()

    async def wait(self) -> None:
        """Until there is a flight; another worker may still be faster."""
        while not self._flights:
            await self._workers.park()

    def take(self, most: int) -> list[Flight]:
        return [self._flights.popleft() for _ in range(min(most, len(self._flights)))]


class _Health:
    """Whether a tier takes copies: why not, and the free space that was last seen."""

    __slots__ = ("available", "looked_s", "why")

    def __init__(self) -> None:
        self.why = ""
        self.available = 0
        self.looked_s = -math.inf


class Engine:
    """Carries out promotions with ``limits.copy_workers`` workers. ``run`` is its life.

    ``keep_free`` gives, per tier, the bytes of its file system that copies never use.
    ``changed`` is told when the source turns out not to be what the snapshot says.
    """

    def __init__(
        self,
        *,
        source: Source,
        tiers: Sequence[Tier],
        keep_free: Sequence[int],
        records: Records,
        names: Names,
        controller: Controller,
        ledger: Ledger,
        metrics: Metrics,
        limits: LimitSettings,
        readers: Readers,
        source_threads: Threads,
        tier_threads: Threads,
        changed: Callable[[Ino], None],
    ) -> None:
        self._source = source
        self._tiers = {tier.number: tier for tier in tiers}
        self._keep_free = dict(zip(self._tiers, keep_free, strict=True))
        self._health = {number: _Health() for number in self._tiers}
        self._records = records
        self._names = names
        self._controller = controller
        self._ledger = ledger
        self._metrics = metrics
        self._limits = limits
        self._readers = readers
        self._source_threads = source_threads
        self._tier_threads = tier_threads
        self._changed = changed
        self._bucket = TokenBucket(limits.source_bandwidth, 2 * TURN_BYTES)
        self._copies = _Line()
        self._contents = {number: _Line() for number in self._tiers}
        self._flights: dict[Ino, Flight] = {}
        self._held_bytes = 0
        self._rest_until = -math.inf
        self._rest_s = _BACKOFF_S[0]
        self._limiter = Limiter(60.0)
        self.running = 0

    # -- what others see ---------------------------------------------------------------------

    @property
    def queued(self) -> int:
        return len(self._flights) - self.running

    def has_place(self) -> bool:
        """Whether the queue is short; somebody with a long list waits until it is."""
        return len(self._copies) < 4 * self._limits.copy_workers

    def flight(self, ino: Ino) -> Flight | None:
        return self._flights.get(ino)

    def out_of_service(self) -> Mapping[int, str]:
        """The tiers that take no copies now, with the reason."""
        return {number: health.why for number, health in self._health.items() if health.why}

    def submit(
        self,
        promote: Promote,
        identity: Identity,
        *,
        content: bytes | memoryview | None = None,
        file: SourceFile | None = None,
    ) -> bool:
        """Take a promotion, or put it back as wanted; never waits. ``file`` is retained."""
        for victim in promote.evict:
            # At once, so that the room is free on the disk before anybody writes into it.
            self.remove_copy(victim, promote.tier)
            self._metrics.evicted(promote.tier, self._names.attributes(victim).size)
        size = len(content) if content is not None else 0
        if len(self._flights) >= _QUEUE_LIMIT or self._held_bytes + size > self._limits.buffer_max:
            self._controller.deferred(promote)
            return False
        flight = Flight(promote, identity, content, file.retain() if file else None)
        self._held_bytes += size
        self._flights[promote.ino] = flight
        line = self._copies if content is None else self._contents[promote.tier]
        line.put(flight)
        return True

    def remove_copy(self, ino: Ino, tier: int) -> None:
        """Remove a copy that placement has let go. Readers that have it open go on."""
        try:
            self._records.clear(ino)
            self._tiers[tier].remove(ino)
        except OSError as error:
            self._tier_failed(self._tiers[tier], str(error))

    async def finish(self) -> None:
        """Commit what readers have fetched already and give up the rest: nobody reads any more."""
        self._rest_until = math.inf
        for flight in self._copies.take(len(self._copies)):
            self._give_up(flight, retry=True)
        while any(flight.content is not None for flight in self._flights.values()):
            await trio.sleep(_STEP_S)

    # -- the workers ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled. Copies that are cancelled leave nothing behind."""
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(self._limits.copy_workers):
                    nursery.start_soon(self._copy_worker)
                for tier in self._tiers.values():
                    nursery.start_soon(self._commit_worker, tier)
                nursery.start_soon(self._keep_wanted_going)
                nursery.start_soon(self._probe_tiers)
        finally:
            for flight in list(self._flights.values()):
                self._give_up(flight, retry=True)

    async def _keep_wanted_going(self) -> None:
        """When the queue has run dry, go on with what was wanted and found no place in it."""
        while True:
            await trio.sleep(_IDLE_S)
            while (
                len(self._copies) < self._limits.copy_workers
                and trio.current_time() >= self._rest_until
            ):
                promote = self._controller.next_wanted(self._item)
                if promote is None:
                    break
                self.submit(promote, self._names.attributes(promote.ino).identity)

    def _item(self, ino: Ino) -> Item | None:
        try:
            attributes = self._names.attributes(ino)
        except MonarchError:
            return None
        return Item(ino, attributes.size, attributes.source_ino) if attributes.is_file else None

    async def _copy_worker(self) -> None:
        while True:
            await self._copies.wait()
            for flight in self._copies.take(1):
                with self._carrying([flight]):
                    await self._copy(flight, self._tiers[flight.promote.tier])

    async def _commit_worker(self, tier: Tier) -> None:
        """One for each tier: more would fight over the interpreter instead of writing faster."""
        line = self._contents[tier.number]
        while True:
            await line.wait()
            if len(line) < _BATCH:
                await trio.sleep(_GATHER_S)
            batch = line.take(_BATCH)
            with self._carrying(batch):
                await self._commit(batch, tier)

    @contextmanager
    def _carrying(self, batch: list[Flight]) -> Iterator[None]:
        """Whatever goes wrong with a batch ends its flights; the worker lives on."""
        self.running += len(batch)
        try:
            yield
        except (OSError, MonarchError) as error:
            for flight in batch:
                self._failed(flight, error)
        except Exception as error:
            log.exception("a copy failed in a way that nobody foresaw")
            for flight in batch:
                self._failed(flight, error)
        finally:
            self.running -= len(batch)

    async def _commit(self, batch: list[Flight], tier: Tier) -> None:
        """Commit files whose bytes are here."""
        await self._require_room(tier, sum(flight.promote.size for flight in batch))
        contents = [
            Content(flight.promote.ino, flight.identity, flight.content)
            for flight in batch
            if flight.content is not None
        ]
        results = await self._tier_threads.run(commit_contents, tier, self._records, contents)
        for flight, error in zip(batch, results, strict=True):
            if error is None:
                self._arrived(flight)
            else:
                self._failed(flight, _tier_error(error.errno, error.strerror))

    async def _copy(self, flight: Flight, tier: Tier) -> None:
        """Copy a file from the source; a small one is only fetched, its commit comes later."""
        ino, size = flight.promote.ino, flight.promote.size
        await self._require_room(tier, size)
        if size <= self._limits.inline_max:
            await self._fetch(flight)
            self._contents[tier.number].put(flight)
            return
        if flight.file is None:
            flight.file = await self._source_threads.run(
                open_version, self._source, self._names.path(ino), flight.identity
            )
            self._metrics.source_opened(copy=True)
        file = flight.file
        with await self._in_tier(tier.stage, ino) as staged:
            offset = 0
            while offset < size:
                count = min(TURN_BYTES, size - offset)
                await self._courtesy(ino, file, offset + count)
                await trio.sleep(self._bucket.take(count, trio.current_time()))
                turn = await self._source_threads.run(read_turn, file, offset, count)
                self._metrics.source_reads[1] += turn.reads
                self._metrics.source_bytes[1] += turn.read_bytes
                if not turn.pieces:
                    break
                offset += turn.size
                await self._in_tier(append_all, staged, turn.pieces)
            await self._source_threads.run(check_unchanged, file, flight.identity)
            await self._in_tier(commit, tier, self._records, staged, ino, flight.identity)
        self._arrived(flight)

    async def _fetch(self, flight: Flight) -> None:
        """Take a small file whole, through the descriptor of a reader if there is one."""
        size, file = flight.promote.size, flight.file
        while self._held_bytes + size > self._limits.buffer_max:
            # The tier is slower than the source.
            await trio.sleep(_STEP_S)
        # Claimed before the first wait: other workers are as far.
        self._held_bytes += size
        try:
            await self._courtesy(flight.promote.ino, file, size)
            await trio.sleep(self._bucket.take(size, trio.current_time()))
            if file is None:
                path = self._names.path(flight.promote.ino)
                fetched = await self._source_threads.run(self._source.fetch, path, flight.identity)
                self._metrics.source_opened(copy=True)
            else:
                fetched = await self._source_threads.run(read_whole, file.fd, flight.identity)
        except BaseException:
            self._held_bytes -= size
            raise
        self._metrics.source_reads[1] += fetched.reads
        self._metrics.source_bytes[1] += size
        flight.content = fetched.data

    async def _in_tier(self, call: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        try:
            return await self._tier_threads.run(call, *args)
        except OSError as error:
            raise _tier_error(error.errno, error.strerror) from error

    async def _courtesy(self, ino: Ino, file: SourceFile | None, end: int) -> None:
        """Let readers of the source go first, unless one has just read the bytes up to ``end``."""
        patience = trio.current_time() + _COURTESY_S
        while (
            (file is None or max(file.read_up_to, self._readers.reached(ino)) < end)
            and self._readers.busy(trio.current_time())
            and trio.current_time() < patience
        ):
            await trio.sleep(_STEP_S)

    # -- how a flight ends ---------------------------------------------------------------------

    def _arrived(self, flight: Flight) -> None:
        self._forget(flight)
        promote = flight.promote
        self._controller.committed(promote.item, promote.tier)
        self._metrics.promoted(promote.tier, promote.size)
        self._rest_s = _BACKOFF_S[0]
        if self._names.attributes(promote.ino).identity != flight.identity:
            # The file changed after its bytes were read, and a reader has noticed meanwhile.
            self._controller.dropped(promote.ino, promote.size)
            self.remove_copy(promote.ino, promote.tier)

    def _failed(self, flight: Flight, error: Exception) -> None:
        if self._flights.get(flight.promote.ino) is not flight:
            return
        tier = self._tiers[flight.promote.tier]
        if isinstance(error, SourceChanged):
            self._metrics.promotion_failed("source-changed")
            self._give_up(flight, retry=False)
            self._changed(flight.promote.ino)
            return
        kind = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
        self._metrics.promotion_failed(kind)
        if isinstance(error, TierError):
            self._tier_failed(tier, str(error))
        self._limiter.warning(
            log,
            f"copy {kind}",
            "copy to tier %s given up, will be tried again: %s",
            tier.name,
            error,
        )
        if trio.current_time() >= self._rest_until:
            # Those that were under way with it fail for the same reason: they are one failure.
            self._rest_until = trio.current_time() + self._rest_s
            self._rest_s = min(2 * self._rest_s, _BACKOFF_S[1])
        self._give_up(flight, retry=True)

    def _give_up(self, flight: Flight, *, retry: bool) -> None:
        self._forget(flight)
        self._controller.abandoned(flight.promote.item, flight.promote.tier, retry=retry)

    def _forget(self, flight: Flight) -> None:
        del self._flights[flight.promote.ino]
        if flight.content is not None:
            self._held_bytes -= len(flight.content)
        if flight.file is not None:
            flight.file.release()

    # -- tiers that cannot take copies -----------------------------------------------------------

    async def _require_room(self, tier: Tier, size: int) -> None:
        """Raises TierError unless the disk keeps its free share after ``size`` more bytes."""
        health = self._health[tier.number]
        now = trio.current_time()
        if now - health.looked_s > _SPACE_AGE_S:
            health.available = (await self._in_tier(tier.space)).available
            health.looked_s = now
        if health.available - size < self._keep_free[tier.number]:
            raise _tier_error(errno.ENOSPC, "no room beyond what is kept free")
        health.available -= size

    def _tier_failed(self, tier: Tier, why: str) -> None:
        """Take the tier out of service for new copies; ``_probe_tiers`` brings it back."""
        self._ledger.close(tier.number)
        self._health[tier.number].why = why
        self._metrics.error(f"tier-{tier.name}")

    async def _probe_tiers(self) -> None:
        while True:
            await trio.sleep(_PROBE_S)
            for tier in self._tiers.values():
                health = self._health[tier.number]
                if not health.why:
                    continue
                try:
                    await self._in_tier(tier.probe)
                    await self._require_room(tier, 0)
                except TierError as error:
                    health.why = str(error)
                    continue
                log.info("tier %s takes copies again", tier.name)
                health.why = ""
                self._ledger.open(tier.number)


def _tier_error(number: int | None, words: str | None) -> TierError:
    error = TierError(words or "the tier failed")
    error.errno = number or errno.EIO
    return error
