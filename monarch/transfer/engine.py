"""The transfer engine: carries out the promotions of placement without delaying readers.

``submit`` never waits: a promotion without a place in the queue (queue.py) is put back as *wanted*
and is tried again when the queue is empty. Each item has at most one flight. A copy follows a
reader that reads the same file (its bytes are then in the page cache of the source's client).
Otherwise it takes a small share of the source while readers wait for it (pace.py), and reads
several pieces at once while none does (source_reader.py).

Each tier has its own workers and queue. When a tier goes out of service (tier_monitor.py), its
flights are given up, so that other tiers or the source serve their items. A flight that runs in a
hanging tier cleans up after itself when the tier answers again.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import trio
import xxhash

from monarch.errors import MonarchError, SourceChanged, TierError
from monarch.placement.controller import Controller, Promote
from monarch.placement.policy import Item
from monarch.placement.residency import SOURCE
from monarch.posix import failpoints
from monarch.telemetry.log import Limiter
from monarch.tiers import lots
from monarch.tiers.records import Record, Records
from monarch.tiers.source import SourceFile
from monarch.tiers.tier import Staged, Tier
from monarch.transfer.failures import Failures
from monarch.transfer.queue import Arrival, Flight, Flights, Removals
from monarch.transfer.source_reader import Names, SourceReader
from monarch.transfer.tier_monitor import TierMonitor, tier_error
from monarch.transfer.window import Held, Window
from monarch.types import Identity, Ino

log = logging.getLogger(__name__)

# Promotions that may wait for a worker. All others are kept as wanted marks.
_QUEUE_LIMIT = 4096
# The time in which an idle worker collects small files for one turn.
_GATHER_S = 0.01
# Small files committed in one turn of a worker thread: the hop costs as much as a commit.
_BATCH = 32
_STEP_S = 0.005
# The interval of checks of the queue while an item is wanted, and none was submitted just before.
_WANTED_S = 0.1


@dataclass(eq=False, repr=False)
class Engine:
    """Carries out promotions with ``limits.copy_workers`` workers. ``run`` is its task. ``changed``
    is called when the source differs from the snapshot."""

    _monitor: TierMonitor
    _records: Records
    _controller: Controller
    _reader: SourceReader
    _changed: Callable[[Ino], None]
    window: Window

    def __post_init__(self) -> None:
        self._tiers = self._monitor.tiers
        reader = self._reader
        self._names, self._metrics, self._doubts = reader.names, reader.metrics, reader.doubts
        self._limits = limits = reader.limits
        # Each tier has its own share, so that a hanging tier does not use up all.
        self._batch_bytes = limits.buffer_max // (2 * max(1, len(self._tiers)))
        self._flights = Flights(self._tiers, self._controller, reader.buffer, reader.unkeep)
        self.window.unkeep = reader.unkeep
        # Returns the number of copies that will be made, and that this does not know yet.
        self.backlog: Callable[[], int] = int
        self._removals = {number: Removals() for number in self._tiers}
        self._failures = Failures()
        self._limiter = Limiter(log)
        self._work = trio.Event()
        self.running = 0

    # -- state ---------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """The number of copies that wait to be made, or to be removed from a responsive tier."""
        return (
            self.backlog()
            + self._flights.waiting
            + sum(
                len(removals)
                for number, removals in self._removals.items()
                if self._monitor.is_responsive(number)
            )
        )

    def has_place(self) -> bool:
        """Whether the queue is short; a caller with a long list waits until it is."""
        return self._flights.waiting_copies < 4 * self._limits.copy_workers

    def flight(self, ino: Ino) -> Flight | Held | None:
        """The copy of a file that is being made, or its bytes in the window."""
        return self._flights.get(ino) or self.window.get(ino)

    async def removed(self) -> None:
        """Waits until all removed copies are deleted from the disks of all responsive tiers."""
        while any(
            self._monitor.is_responsive(number) and len(removals)
            for number, removals in self._removals.items()
        ):
            await trio.sleep(_STEP_S)

    def make_room(self, promote: Promote) -> Promote:
        """Removes the copies that a promotion evicts; returns the promotion without them.

        A caller that waits before it submits the promotion must call this first: meanwhile a new
        copy of an evicted item could be made, which must not be removed.
        """
        if not promote.evict:
            return promote
        for victim in promote.evict:
            # Flights wait for earlier removals, so the space is free when they write.
            self.remove_copy(victim, promote.tier)
            self._metrics.evicted(promote.tier, self._names.attributes(victim).size)
        return replace(promote, evict=())

    def submit(
        self,
        promote: Promote,
        identity: Identity,
        *,
        content: bytes | memoryview | None = None,
        file: SourceFile | None = None,
    ) -> bool:
        """Queues a promotion, or puts it back as wanted; never waits. Retains ``file``. A promotion
        that was evicted since the decision is given up."""
        promote = self.make_room(promote)
        self._work.set()
        if not self._controller.is_wanted(promote.ino):
            # The item was evicted during a call to the source.
            self._controller.abandoned(promote.item, promote.tier, retry=False)
            return False
        size = len(content) if content is not None else 0
        if not self.has_room_for(size):
            self._controller.deferred(promote)
            return False
        self._flights.put(Flight(promote, identity, content, file.retain() if file else None))
        if file is not None:
            self._reader.expect()
        failpoints.failpoint("copy-reserved")
        return True

    def has_room_for(self, size: int) -> bool:
        """Whether ``submit`` would queue a copy with ``size`` bytes of content."""
        return len(self._flights) < _QUEUE_LIMIT and self._reader.buffer.has_room(size)

    def may_fetch(self, size: int) -> bool:
        """Whether a small file of ``size`` bytes may be fetched ahead now. Readers keep half of
        the buffer and of the queue."""
        buffer = self._reader.buffer
        return (
            not self._failures.rests(trio.current_time())
            and len(self._monitor.out_of_service()) < len(self._tiers)
            and len(self._flights) < _QUEUE_LIMIT // 2
            and (buffer.used + size <= buffer.most // 2 or not buffer.used)
        )

    def begin_fetch(self, promote: Promote, identity: Identity, arrival: Arrival) -> Flight:
        """Begins a copy whose bytes the caller fetches ahead of readers, in the call of
        ``arrival``. Must be followed by ``end_fetch``."""
        flight = Flight(self.make_room(promote), identity, arrival=arrival)
        self._flights.begin(flight, _held(flight, self._limits.inline_max))
        self.running += 1
        return flight

    def end_fetch(
        self,
        flight: Flight,
        content: bytes | memoryview | None = None,
        error: Exception | None = None,
    ) -> bool:
        """Ends a fetch: with ``content`` or the open file of the flight the copy is made, with an
        error, or without all of them, it is given up. Returns whether the copy is made."""
        if not flight.is_abandoned:
            self.running -= 1
        if not self._flights.end(flight, _held(flight, self._limits.inline_max), content):
            return False
        if error is not None:
            self._failed(flight, error)
            return False
        has_bytes = content is not None or flight.file is not None
        if not has_bytes or not self._controller.is_wanted(flight.ino):
            self._flights.give_up(flight, retry=False)
            return False
        self._flights.queue(flight)
        return True

    def take_over(self, ino: Ino) -> bool:
        """Gives up the fetch ahead of a file if its call at the source has not begun: a reader
        makes it. Returns False if the call has begun, or there is none."""
        flight = self._flights.get(ino)
        if flight is None:
            return self.window.take_over(ino)
        if flight.arrival is None or not flight.arrival.claim():
            return False
        self._flights.give_up(flight, retry=False)
        return True

    def hold_failed(self, ino: Ino, error: Exception) -> None:
        """Records that a file could not be fetched into the window."""
        if isinstance(error, SourceChanged):
            self._changed(ino)
        elif not isinstance(error, PermissionError):
            self._failures.failed(ino, trio.current_time(), is_tier=False)

    def wake(self) -> None:
        """Call this when an item has become wanted without a promotion."""
        self._work.set()

    def remove_copy(self, ino: Ino, tier: int) -> None:
        """Removes a copy that placement has dropped. Readers that have it open continue."""
        try:
            self._records.clear(ino)
            failpoints.failpoint("eviction-forgotten")
        except OSError as error:
            self._monitor.failed(self._tiers[tier], tier_error(error))
        self._removals[tier].put(ino)

    async def finish(self) -> None:
        """Commits files that readers have fetched and gives up the rest, at the end."""
        self._failures.end()
        try:
            self._flights.give_up_copies()
            while self._flights.has_content:
                await trio.sleep(_STEP_S)
            await self.removed()
        finally:
            self._monitor.abort_at_deadline()

    # -- the workers ---------------------------------------------------------------------------

    async def run(self, *, on_return: Callable[[Tier], Awaitable[None]]) -> None:
        """Runs until cancelled. Cancelled copies leave no files. ``on_return`` as in
        TierMonitor.run."""
        try:
            async with trio.open_nursery() as nursery:
                self._reader.begin(nursery)
                for tier in self._tiers.values():
                    for _ in range(self._limits.copy_workers):
                        nursery.start_soon(self._copy_worker, tier)
                    nursery.start_soon(self._commit_worker, tier)
                    nursery.start_soon(self._removal_worker, tier)
                nursery.start_soon(self._keep_wanted_going)
                watch = partial(self._monitor.run, on_outage=self._tier_is_out, on_return=on_return)
                nursery.start_soon(watch)
        finally:
            # A restarted task must not find flights in the queue that are given up here.
            self._flights.give_up_all()

    async def _keep_wanted_going(self) -> None:
        """Submits wanted items when the queue is empty, as fast as they are copied."""
        pause_s = _WANTED_S
        while True:
            if not self._controller.wanted and not len(self._flights):
                # An item becomes wanted with its promotion, which is then submitted or abandoned,
                # or the caller calls ``wake``.
                self._work = trio.Event()
                await self._work.wait()
            await trio.sleep(pause_s)
            now, pause_s = trio.current_time(), _WANTED_S
            while (
                # Otherwise each of them is being copied.
                self._controller.wanted > len(self._flights)
                and self._flights.waiting_copies < self._limits.copy_workers
                and not self._failures.rests(now)
            ):
                is_resting = partial(self._failures.is_resting, now=now)
                promote = self._controller.next_wanted(partial(_item, self._names), is_resting)
                if promote is None:
                    break
                if not self.submit(promote, self._names.stored(promote.ino).identity):
                    break
                pause_s = _STEP_S

    async def _copy_worker(self, tier: Tier) -> None:
        line = self._flights.copies[tier.number]
        while True:
            await line.wait()
            for flight in line.take(1):
                with self._carrying([flight]):
                    await self._copy(flight, tier)

    async def _commit_worker(self, tier: Tier) -> None:
        """Commits small files of one tier: more tasks would compete for the interpreter."""
        line = self._flights.contents[tier.number]
        while True:
            await line.wait()
            if len(line) < _BATCH:
                await trio.sleep(_GATHER_S)
            batch = line.take(_BATCH, most_bytes=self._batch_bytes)
            with self._carrying(batch):
                await self._commit(batch, tier)

    async def _removal_worker(self, tier: Tier) -> None:
        removals = self._removals[tier.number]
        while True:
            inos = await removals.take()
            try:
                await self._monitor.call(tier, tier.remove_all, inos, files=len(inos))
            except TierError as error:
                # The remaining files have no record: the next start removes them.
                self._monitor.failed(tier, error)
            finally:
                removals.done(len(inos))

    @contextmanager
    def _carrying(self, batch: list[Flight]) -> Iterator[None]:
        """An exception in a batch ends the flights of the batch, not the worker."""
        self.running += len(batch)
        try:
            yield
        except Exception as error:
            if not isinstance(error, OSError | MonarchError):
                self._limiter.exception(
                    "unforeseen",
                    "internal error in a copy: it will be tried again."
                    " This is a bug, please report it",
                )
            for flight in batch:
                self._failed(flight, error)
        finally:
            for flight in batch:
                if flight.is_abandoned:
                    self._flights.free(flight)
                else:
                    self.running -= 1

    async def _commit(self, batch: list[Flight], tier: Tier) -> None:
        """Commits files whose bytes are in memory, as many as fit."""
        fitting = [flight for flight in batch if await self._has_room(flight, tier)]
        if not fitting:
            return
        for flight in fitting:
            flight.young = self._doubts.by_bytes(flight.ino, flight.identity)
        size = sum(flight.promote.size for flight in fitting)
        commit = partial(_commit_contents, tier, self._records, fitting, tier.terms[0])
        results = await self._monitor.call(tier, commit, files=len(fitting), size=size)
        for flight, error in zip(fitting, results, strict=True):
            if error is None:
                self._arrived(flight)
            else:
                self._failed(flight, tier_error(error) if isinstance(error, OSError) else error)

    async def _has_room(self, flight: Flight, tier: Tier) -> bool:
        """Whether there is space for a copy that is still wanted, after all pending removals;
        otherwise the copy is given up."""
        await self._removals[tier.number].wait()
        if not flight.is_abandoned and not self._controller.is_wanted(flight.ino):
            self._flights.give_up(flight, retry=False)
            return False
        try:
            if await self._monitor.take_room(tier, flight.promote.size):
                return True
        except TierError as error:
            self._failed(flight, error)
        else:
            # Other programs have used the space since it was reserved: the item counts as not
            # opened.
            if not flight.is_abandoned:
                self._flights.give_up(flight, retry=False)
        return False

    async def _copy(self, flight: Flight, tier: Tier) -> None:
        """Copies a file from the source; a small one is only fetched here and committed later."""
        ino, size = flight.ino, flight.promote.size
        if not await self._has_room(flight, tier):
            return
        if size <= self._limits.inline_max:
            await self._reader.fetch(flight)
            _require_wanted(flight)
            self._flights.contents[tier.number].put(flight)
            return
        file = await self._reader.open(flight)
        staged = await self._monitor.call(tier, tier.stage, ino)
        try:
            is_right = await self._copy_bytes(flight, file, staged, tier)
            if not (is_right and self._controller.is_wanted(ino)):
                if not flight.is_abandoned:
                    self._flights.give_up(flight, retry=False)
                return
            await self._reader.check_unchanged(flight, file)
            flight.young = self._doubts.by_bytes(ino, flight.identity)
            await self._monitor.call(tier, _commit_copy, tier, self._records, staged, flight)
        finally:
            await self._monitor.call(tier, staged.close)
        self._arrived(flight)

    async def _copy_bytes(
        self, flight: Flight, file: SourceFile, staged: Staged, tier: Tier
    ) -> bool:
        """Writes the bytes of a file in order; stops if the file is evicted meanwhile. Returns
        whether the source knows them as right, or does not know."""
        digest = xxhash.xxh3_64()
        async with aclosing(self._reader.turns(flight.ino, file, flight.promote.size)) as turns:
            async for turn in turns:
                flight.copied += turn.size
                _require_wanted(flight)
                await self._monitor.call(tier, _append_all, staged, turn.pieces, size=turn.size)
                if file.is_right is not None:
                    for piece in turn.pieces:
                        digest.update(piece)
                if not self._controller.is_wanted(flight.ino):
                    return True
        return file.is_right is None or file.is_right(digest.intdigest())

    # -- how a flight ends ---------------------------------------------------------------------

    def _arrived(self, flight: Flight) -> None:
        promote = flight.promote
        if flight.is_abandoned:
            self._undo(flight)
            return
        self._flights.forget(flight)
        is_wanted = self._controller.is_wanted(promote.ino)
        self._controller.committed(promote.item, promote.tier)
        self._metrics.promoted(promote.tier, promote.size)
        self._monitor.copy_arrived(promote.tier)
        self._failures.succeeded(promote.ino)
        if (
            not is_wanted
            # A reader found that the file changed after its bytes were read.
            or self._names.stored(promote.ino).identity != flight.identity
        ):
            self._controller.dropped(promote.ino, promote.size)
            self.remove_copy(promote.ino, promote.tier)

    def _failed(self, flight: Flight, error: Exception) -> None:
        if self._flights.get(flight.ino) is not flight:
            return
        tier = self._tiers[flight.promote.tier]
        if isinstance(error, SourceChanged):
            self._metrics.promotion_failed("source-changed")
            self._flights.give_up(flight, retry=False)
            self._changed(flight.ino)
            return
        kind = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
        self._metrics.promotion_failed(kind)
        if isinstance(error, PermissionError):
            # A retry would fail again: a process that may open the file will cause a copy.
            self._metrics.source_refused(flight.ino)
            self._limiter.warning(
                "copy refused",
                "no copy of %s: the source does not let the daemon open it; it is copied when a"
                " process that may read it does so",
                self._names.path_text(flight.ino),
            )
            self._flights.give_up(flight, retry=False)
            return
        # What is fetched ahead is not worth another read of a source that fails.
        is_tier = isinstance(error, TierError)
        retry = flight.arrival is None or is_tier
        self._limiter.warning(
            f"copy {kind}",
            "copy to tier %s given up, %s: %s: %s (%s); the source serves its readers",
            tier.name,
            "will be tried again" if retry else "was made ahead of readers",
            self._names.path_text(flight.ino),
            error,
            kind,
        )
        self._failures.failed(flight.ino, trio.current_time(), is_tier=is_tier)
        self._flights.give_up(flight, retry=retry)
        if isinstance(error, TierError):
            self._monitor.failed(tier, error)

    def _tier_is_out(self, number: int) -> None:
        """Gives up all flights of a tier; hanging ones are abandoned."""
        self._flights.give_up_waiting(number)
        if not self._monitor.is_responsive(number):
            self.running -= self._flights.abandon(number)
            lots.give_up(self._tiers[number])

    def _undo(self, flight: Flight) -> None:
        """Removes a copy that was completed after it was given up. Its record may have replaced
        that of another tier, whose copy then has none."""
        number = self._controller.dropped(flight.ino, flight.promote.size)
        for tier in {number, flight.promote.tier} - {SOURCE}:
            self.remove_copy(flight.ino, tier)


def _held(flight: Flight, inline_max: int) -> int:
    """The bytes in the buffer of a fetch ahead."""
    size = flight.promote.size
    is_whole = flight.arrival is not None and flight.arrival.is_whole
    return size if size <= inline_max or is_whole else 0


def _require_wanted(flight: Flight) -> None:
    if flight.is_abandoned:
        raise tier_error(OSError(errno.ETIMEDOUT, "the tier does not answer"))


def _item(names: Names, ino: Ino) -> Item | None:
    try:
        attributes = names.stored(ino)
    except MonarchError:
        return None
    return Item.of(attributes) if attributes.is_file else None


# -- in a thread of a tier: a crash leaves no record of an incomplete copy -------------------------


def _commit_contents(
    tier: Tier, records: Records, flights: Sequence[Flight], term: int
) -> list[Exception | None]:
    """Commits the contents of each, in a lot of the tier's ``term``; returns for each None, or why
    there is no copy."""
    contents = [
        lots.Content(flight.ino, flight.identity, flight.content or b"") for flight in flights
    ]
    results: list[Exception | None] = []
    for flight, written in zip(flights, lots.write(tier, contents, term), strict=True):
        if isinstance(written, Exception):
            results.append(written)
            continue
        try:
            _record_copy(tier, records, flight, written)
        except OSError as error:
            results.append(error)
        else:
            results.append(None)
    return results


def _commit_copy(tier: Tier, records: Records, staged: Staged, flight: Flight) -> None:
    """Renames, then records. Raises OSError, and SourceChanged if bytes are missing."""
    if staged.size != flight.identity.size:
        raise SourceChanged(f"read {staged.size} bytes of {flight.identity.size}")
    _record_copy(tier, records, flight, staged.commit(flight.identity))


def _record_copy(tier: Tier, records: Records, flight: Flight, digest: bytes) -> None:
    """Records a copy that has its name, or removes it. Raises OSError."""
    ino = flight.ino
    try:
        # Another tier may have a copy and the record by now.
        _require_kept(flight)
        records.put(ino, Record(tier.number, flight.identity, digest), young=flight.young)
    except OSError:
        tier.remove(ino)
        raise
    failpoints.failpoint("copy-recorded")


def _require_kept(flight: Flight) -> None:
    """Raises OSError if the copy was given up, because its tier took too long."""
    if flight.is_abandoned:
        raise OSError(errno.ECANCELED, "the copy was given up")


def _append_all(staged: Staged, pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        staged.append(piece)
