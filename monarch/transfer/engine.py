"""The transfer engine: takes promotions from placement and carries them out, never in the way.

``submit`` never waits: what finds no place in the queue is put back as *wanted* and comes up again
when the queue has run dry. At most one flight per item. A copy follows a reader that goes through
the same file (its bytes are then in the page cache of the source's client); else it takes a small
share of the source while readers wait for it (pace.py), and reads several pieces at once while none
does.

Each tier has workers and a queue of its own. When one goes out of service (ward.py) its flights are
given up, so that other tiers, or the source, serve their items; one that was under way in a tier
that hangs cleans up after itself when the tier answers again.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import outcome
import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch import points
from monarch.errors import MonarchError, SourceChanged, TierError
from monarch.log import Limiter
from monarch.metrics import Metrics
from monarch.placement.controller import Controller, Promote
from monarch.placement.policy import Item
from monarch.placement.residency import SOURCE
from monarch.settings import LimitSettings
from monarch.threads import Threads
from monarch.tiers.directory import Staged, Tier
from monarch.tiers.doubts import Doubts
from monarch.tiers.records import Records
from monarch.tiers.source import REACH_GAP, Source, SourceFile, read_whole
from monarch.transfer.copy import (
    TURN_BYTES,
    Content,
    Turn,
    append_all,
    check_unchanged,
    commit,
    commit_contents,
    open_version,
    read_turn,
)
from monarch.transfer.outages import Outage
from monarch.transfer.pace import Pace
from monarch.transfer.readers import Readers
from monarch.transfer.throttle import TokenBucket
from monarch.transfer.ward import Ward, tier_error
from monarch.types import Attributes, Identity, Ino
from monarch.units import MiB

log = logging.getLogger(__name__)

# Promotions waiting for a worker. More would only be a longer list of what is wanted anyway.
_QUEUE_LIMIT = 4096
# How long a worker that was idle lets files gather, so that they share a turn. Seconds.
_GATHER_S = 0.01
# Small files committed in one turn of a worker thread: the hop costs as much as a commit.
_BATCH = 32
# So many pieces of one file are read at once while no reader waits for the source.
_AHEAD = 8
# What a copy reads at once while readers wait: they wait for it, too. Bytes.
_BESIDE_READERS = 1 * MiB
_STEP_S = 0.005
# How often the queue is looked after when nothing happens. Seconds.
_IDLE_S = 0.1
# After a failed copy the wanted items rest: doubling from the first to the second. Seconds.
_BACKOFF_S = (1.0, 60.0)
# Copies removed in one turn of a worker thread.
_REMOVALS = 256

Args = TypeVarTuple("Args")
T = TypeVar("T")


class Names(Protocol):
    """What the engine asks of the namespace."""

    def path(self, ino: Ino) -> bytes: ...
    def attributes(self, ino: Ino) -> Attributes: ...


@dataclass(slots=True, eq=False)
class Flight:
    """One copy under way. ``content`` is what a reader fetched, ``file`` what a reader has open.

    ``copied`` bytes are in the tier's stage so far. ``young`` as of ``Records.put``.
    ``is_left``: its tier hangs, and nobody waits for what comes of it.
    """

    promote: Promote
    identity: Identity
    content: bytes | memoryview | None = None
    file: SourceFile | None = None
    young: bool = False
    is_left: bool = False
    copied: int = 0

    @property
    def ino(self) -> Ino:
        return self.promote.ino

    def given_up(self) -> bool:
        return self.is_left


class _Piece:
    """A part of a large file. ``is_ahead``: it is read before the one before it is written."""

    __slots__ = ("count", "done", "is_ahead", "offset", "result")

    def __init__(self, offset: int, count: int, *, is_ahead: bool) -> None:
        self.offset = offset
        self.count = count
        self.is_ahead = is_ahead
        self.done = trio.Event()
        self.result: outcome.Value[Turn] | outcome.Error

    @property
    def held_bytes(self) -> int:
        """What counts as a file on its way; the first piece of each copy does not."""
        return self.count if self.is_ahead else 0

    async def turn(self) -> Turn:
        """Its bytes, when they are here; raises what reading them raised."""
        await self.done.wait()
        return self.result.unwrap()


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

    def take(self, most: int, *, most_bytes: float = math.inf) -> list[Flight]:
        """The first of them, at least one if there is any."""
        taken: list[Flight] = []
        while self._flights and len(taken) < most:
            most_bytes -= self._flights[0].promote.size
            if taken and most_bytes < 0:
                break
            taken.append(self._flights.popleft())
        return taken


class _Removals:
    """Copies of one tier that nobody may use any more and that are still on its disk."""

    __slots__ = ("_asked", "_done", "_inos", "_worker")

    def __init__(self) -> None:
        self._inos: deque[Ino] = deque()
        self._asked = 0
        self._done = 0
        self._worker = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return self._asked - self._done

    def put(self, ino: Ino) -> None:
        self._inos.append(ino)
        self._asked += 1
        self._worker.unpark()

    async def take(self) -> list[Ino]:
        while not self._inos:
            await self._worker.park()
        return [self._inos.popleft() for _ in range(min(_REMOVALS, len(self._inos)))]

    def done(self, count: int) -> None:
        self._done += count

    async def wait(self) -> None:
        """Until all that has been asked for by now is done."""
        asked = self._asked
        while self._done < asked:
            await trio.sleep(_STEP_S)


class Engine:
    """Carries out promotions with ``limits.copy_workers`` workers. ``run`` is its life.

    ``changed`` is told when the source turns out not to be what the snapshot says.
    """

    def __init__(
        self,
        *,
        source: Source,
        ward: Ward,
        records: Records,
        names: Names,
        controller: Controller,
        metrics: Metrics,
        limits: LimitSettings,
        readers: Readers,
        source_threads: Threads,
        doubts: Doubts,
        changed: Callable[[Ino], None],
    ) -> None:
        self._source = source
        self._ward = ward
        ward.on_outage(self._tier_is_out)
        self._tiers = ward.tiers
        self._records = records
        self._names = names
        self._controller = controller
        self._metrics = metrics
        self._limits = limits
        self._readers = readers
        self._source_threads = source_threads
        self._doubts = doubts
        self._changed = changed
        self._bucket = TokenBucket(limits.source_bandwidth, 2 * TURN_BYTES)
        self._pace = Pace()
        # Pieces beyond the first of each copy that are being read, or wait to be written.
        self._ahead = 0
        # A share for each tier: what one that hangs keeps is no other's.
        self._batch_bytes = limits.buffer_max // (2 * max(1, len(self._tiers)))
        self._copies = {number: _Line() for number in self._tiers}
        self._contents = {number: _Line() for number in self._tiers}
        self._removals = {number: _Removals() for number in self._tiers}
        self._flights: dict[Ino, Flight] = {}
        self._held_bytes = 0
        self._rest_until = -math.inf
        self._rest_s = _BACKOFF_S[0]
        self._limiter = Limiter(60.0)
        self._pieces: trio.Nursery
        self.running = 0

    # -- what others see ---------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Copies that wait to be made, or to be removed from a tier that answers."""
        waiting = sum(len(line) for line in (*self._copies.values(), *self._contents.values()))
        return waiting + sum(
            len(removals)
            for number, removals in self._removals.items()
            if self._ward.answers(number)
        )

    @property
    def is_stuck(self) -> bool:
        """Whether a tier still does, at the end, what nobody waits for any more."""
        return self._ward.is_stuck

    def has_place(self) -> bool:
        """Whether the queue is short; somebody with a long list waits until it is."""
        return self._copies_waiting() < 4 * self._limits.copy_workers

    def _copies_waiting(self) -> int:
        return sum(map(len, self._copies.values()))

    def flight(self, ino: Ino) -> Flight | None:
        return self._flights.get(ino)

    def out_of_service(self) -> Mapping[int, Outage]:
        """The tiers that take no copies now."""
        return self._ward.out_of_service()

    def others(self, tier: int) -> Sequence[str]:
        """The sources of other mounts that have copies in the same tier path."""
        return self._ward.others(tier)

    def is_read(self, tier: int) -> bool:
        """Whether copies there are to be tried, or passed by."""
        return self._ward.is_read(tier)

    async def ask(
        self,
        tier: int,
        function: Callable[[Unpack[Args]], T],
        *args: Unpack[Args],
        size: int = 0,
    ) -> T:
        """Run what reads so many bytes of a copy; raises OSError, ETIMEDOUT if it hangs."""
        return await self._ward.ask(tier, function, *args, size=size)

    def copy_unreadable(self, tier: int, error: OSError) -> None:
        self._ward.copy_unreadable(tier, error)

    async def removed(self) -> None:
        """Until the copies that were let go of are gone from the disks of all tiers that answer."""
        while any(
            self._ward.answers(number) and len(removals)
            for number, removals in self._removals.items()
        ):
            await trio.sleep(_STEP_S)

    def make_room(self, promote: Promote) -> Promote:
        """Remove the copies that a promotion takes the place of; what is left to be done of it.

        A caller that waits before it submits the promotion calls this first: an evicted copy may be
        made anew meanwhile, and is then another.
        """
        for victim in promote.evict:
            # Flights wait for what was removed before, so the room is free when it is written into.
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
        """Take a promotion, or put it back as wanted; never waits. ``file`` is retained.

        One that was evicted since it was decided upon is given up.
        """
        promote = self.make_room(promote)
        if not self._controller.is_wanted(promote.ino):
            # Evicted while the source was asked for it.
            self._controller.abandoned(promote.item, promote.tier, retry=False)
            return False
        size = len(content) if content is not None else 0
        if len(self._flights) >= _QUEUE_LIMIT or self._held_bytes + size > self._limits.buffer_max:
            self._controller.deferred(promote)
            return False
        flight = Flight(promote, identity, content, file.retain() if file else None)
        self._held_bytes += size
        self._flights[promote.ino] = flight
        if file is not None:
            self._pace.expect()
        lines = self._copies if content is None else self._contents
        lines[promote.tier].put(flight)
        points.reached("copy-reserved")
        return True

    def remove_copy(self, ino: Ino, tier: int) -> None:
        """Remove a copy that placement has let go. Readers that have it open go on."""
        try:
            self._records.clear(ino)
            points.reached("eviction-forgotten")
        except OSError as error:
            self._ward.failed(self._tiers[tier], tier_error(error.errno, error.strerror))
        self._removals[tier].put(ino)

    async def finish(self) -> None:
        """Commit what readers have fetched already and give up the rest: nobody reads any more."""
        self._rest_until = math.inf
        try:
            for line in self._copies.values():
                for flight in line.take(len(line)):
                    self._give_up(flight, retry=True)
            while any(flight.content is not None for flight in self._flights.values()):
                await trio.sleep(_STEP_S)
            await self.removed()
        finally:
            self._ward.hurry()

    # -- the workers ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled. Copies that are cancelled leave nothing behind."""
        try:
            async with trio.open_nursery() as nursery:
                self._pieces = nursery
                for tier in self._tiers.values():
                    for _ in range(self._limits.copy_workers):
                        nursery.start_soon(self._copy_worker, tier)
                    nursery.start_soon(self._commit_worker, tier)
                    nursery.start_soon(self._removal_worker, tier)
                nursery.start_soon(self._keep_wanted_going)
                nursery.start_soon(self._ward.run)
        finally:
            # Nobody must find in a line, should the work begin again, what is given up here.
            for line in (*self._copies.values(), *self._contents.values()):
                line.take(len(line))
            for flight in list(self._flights.values()):
                self._give_up(flight, retry=True)

    async def _keep_wanted_going(self) -> None:
        """When the queue has run dry, go on with what was wanted and found no place in it."""
        while True:
            await trio.sleep(_IDLE_S)
            while (
                self._copies_waiting() < self._limits.copy_workers
                and trio.current_time() >= self._rest_until
            ):
                promote = self._controller.next_wanted(self._item)
                if promote is None:
                    break
                if not self.submit(promote, self._names.attributes(promote.ino).identity):
                    break

    def _item(self, ino: Ino) -> Item | None:
        try:
            attributes = self._names.attributes(ino)
        except MonarchError:
            return None
        return Item(ino, attributes.size, attributes.source_ino) if attributes.is_file else None

    async def _copy_worker(self, tier: Tier) -> None:
        line = self._copies[tier.number]
        while True:
            await line.wait()
            for flight in line.take(1):
                with self._carrying([flight]):
                    await self._copy(flight, tier)

    async def _commit_worker(self, tier: Tier) -> None:
        """One for each tier: more would fight over the interpreter instead of writing faster."""
        line = self._contents[tier.number]
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
                await self._ward.call(tier, _remove_all, tier, inos, files=len(inos))
            except TierError as error:
                # No record knows what is left: the next start removes it.
                self._ward.failed(tier, error)
            finally:
                removals.done(len(inos))

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
            self._limiter.exception(
                log,
                "unforeseen",
                "internal error in a copy: it will be tried again. This is a bug, please report it",
            )
            for flight in batch:
                self._failed(flight, error)
        finally:
            for flight in batch:
                if flight.is_left:
                    self._free(flight)
                else:
                    self.running -= 1

    async def _commit(self, batch: list[Flight], tier: Tier) -> None:
        """Commit files whose bytes are here, as many as there is room for."""
        fitting = [flight for flight in batch if await self._has_room(flight, tier)]
        if not fitting:
            return
        for flight in fitting:
            flight.young = self._doubts.by_bytes(flight.ino, flight.identity)
        contents = [
            Content(flight.ino, flight.identity, flight.content, flight.young, flight.given_up)
            for flight in fitting
            if flight.content is not None
        ]
        size = sum(flight.promote.size for flight in fitting)
        results = await self._ward.call(
            tier, commit_contents, tier, self._records, contents, files=len(fitting), size=size
        )
        for flight, error in zip(fitting, results, strict=True):
            if error is None:
                self._arrived(flight)
            else:
                self._failed(flight, tier_error(error.errno, error.strerror))

    async def _has_room(self, flight: Flight, tier: Tier) -> bool:
        """Whether there is room for a copy that is still wanted, and what was to be removed is
        removed; else it is given up.
        """
        await self._removals[tier.number].wait()
        if not flight.is_left and not self._controller.is_wanted(flight.ino):
            self._give_up(flight, retry=False)
            return False
        try:
            if await self._ward.take_room(tier, flight.promote.size):
                return True
        except TierError as error:
            self._failed(flight, error)
        else:
            # Others have taken it since the room was reserved: as if it had not been opened yet.
            if not flight.is_left:
                self._give_up(flight, retry=False)
        return False

    async def _copy(self, flight: Flight, tier: Tier) -> None:
        """Copy a file from the source; a small one is only fetched, its commit comes later."""
        ino, size = flight.ino, flight.promote.size
        if not await self._has_room(flight, tier):
            return
        if size <= self._limits.inline_max:
            await self._fetch(flight)
            _require_wanted(flight)
            self._contents[tier.number].put(flight)
            return
        if flight.file is None:
            flight.file = await self._source_threads.run(
                open_version, self._source, self._names.path(ino), flight.identity
            )
            self._metrics.source_opened(copy=True)
        file = flight.file
        self._doubts.fetched(ino, flight.identity, since_ns=time.monotonic_ns())
        async with self._stage(tier, ino) as staged:
            await self._copy_bytes(flight, file, staged, tier)
            if not self._controller.is_wanted(ino):
                if not flight.is_left:
                    self._give_up(flight, retry=False)
                return
            await self._source_threads.run(check_unchanged, file, flight.identity)
            flight.young = self._doubts.by_bytes(ino, flight.identity)
            await self._ward.call(tier, commit, tier, self._records, staged, flight)
        self._arrived(flight)

    async def _copy_bytes(
        self, flight: Flight, file: SourceFile, staged: Staged, tier: Tier
    ) -> None:
        """Write a file's bytes in order. While no reader waits, pieces of it are read ahead.

        The rest of a file that is evicted meanwhile is not read.
        """
        size = flight.promote.size
        reading: deque[_Piece] = deque()
        offset = done = 0
        try:
            while offset < size or reading:
                while offset < size and (not reading or self._may_read_ahead(len(reading), done)):
                    most = TURN_BYTES if self._pace.is_free else _BESIDE_READERS
                    piece = _Piece(offset, min(most, size - offset), is_ahead=bool(reading))
                    offset += piece.count
                    reading.append(piece)
                    self._ahead += piece.is_ahead
                    self._held_bytes += piece.held_bytes
                    self._pieces.start_soon(self._read_piece, flight.ino, file.retain(), piece)
                turn = await reading[0].turn()
                self._metrics.source_reads[1] += turn.reads
                self._metrics.source_bytes[1] += turn.read_bytes
                flight.copied += turn.size
                _require_wanted(flight)
                await self._ward.call(tier, append_all, staged, turn.pieces, size=turn.size)
                piece = reading.popleft()
                self._let_go(piece)
                done += 1
                if turn.size < piece.count or not self._controller.is_wanted(flight.ino):
                    # It is shorter than it was: what is behind does not matter any more.
                    break
        finally:
            for piece in reading:
                self._let_go(piece)

    def _let_go(self, piece: _Piece) -> None:
        self._ahead -= piece.is_ahead
        self._held_bytes -= piece.held_bytes

    def _may_read_ahead(self, reading: int, done: int) -> bool:
        """Whether a copy may read one more piece: few at first, until it is seen who reads."""
        return (
            reading < min(_AHEAD, 1 + done)
            and self._may_read()
            and self._pace.is_free
            and self._ahead < self._limits.source_concurrency // 2
            and self._held_bytes + TURN_BYTES <= self._limits.buffer_max
        )

    async def _read_piece(self, ino: Ino, file: SourceFile, piece: _Piece) -> None:
        try:
            await trio.sleep(self._bucket.take(piece.count, trio.current_time()))
            async with self._courtesy(ino, file, piece.offset + piece.count):
                piece.result = outcome.Value(
                    await self._source_threads.run(read_turn, file, piece.offset, piece.count)
                )
        except Exception as error:
            # It is raised where the copy waits for the piece.
            piece.result = outcome.Error(error)
        finally:
            file.release()
            piece.done.set()

    @asynccontextmanager
    async def _stage(self, tier: Tier, ino: Ino) -> AsyncIterator[Staged]:
        staged = await self._ward.call(tier, tier.stage, ino)
        try:
            yield staged
        finally:
            await self._ward.call(tier, staged.close)

    async def _fetch(self, flight: Flight) -> None:
        """Take a small file whole, through the descriptor of a reader if there is one."""
        size, file = flight.promote.size, flight.file
        while self._held_bytes + size > self._limits.buffer_max:
            # The tier is slower than the source.
            await trio.sleep(_STEP_S)
        # Claimed before the first wait: other workers are as far.
        self._held_bytes += size
        since_ns = time.monotonic_ns()
        try:
            await trio.sleep(self._bucket.take(size, trio.current_time()))
            async with self._courtesy(flight.promote.ino, file, size):
                if file is None:
                    path = self._names.path(flight.promote.ino)
                    fetched = await self._source_threads.run(
                        self._source.fetch, path, flight.identity
                    )
                    self._metrics.source_opened(copy=True)
                else:
                    fetched = await self._source_threads.run(read_whole, file.fd, flight.identity)
        except BaseException:
            self._held_bytes -= size
            raise
        self._metrics.source_reads[1] += fetched.reads
        self._metrics.source_bytes[1] += size
        flight.content = fetched.data
        self._doubts.fetched(flight.ino, flight.identity, since_ns=since_ns)

    @asynccontextmanager
    async def _courtesy(self, ino: Ino, file: SourceFile | None, end: int) -> AsyncIterator[None]:
        """For what reads the source: let readers go first.

        Unless one has just read the file beyond ``end``: then it costs the source nothing.
        """
        while not self._may_read():
            if file is not None:
                reached = max(file.read_up_to, self._readers.reached(ino))
                if reached >= min(end + REACH_GAP, file.status.st_size):
                    yield
                    return
            await trio.sleep(_STEP_S)
        self._pace.began()
        began = trio.current_time()
        try:
            yield
        finally:
            self._pace.ended(trio.current_time() - began)

    def _may_read(self) -> bool:
        now = trio.current_time()
        self._pace.look(self._readers.waited(now), now)
        return self._pace.may_begin()

    # -- how a flight ends ---------------------------------------------------------------------

    def _arrived(self, flight: Flight) -> None:
        promote = flight.promote
        if flight.is_left:
            self._undo(flight)
            return
        self._forget(flight)
        is_wanted = self._controller.is_wanted(promote.ino)
        self._controller.committed(promote.item, promote.tier)
        self._metrics.promoted(promote.tier, promote.size)
        self._ward.copy_arrived(promote.tier)
        self._rest_s = _BACKOFF_S[0]
        if (
            not is_wanted
            # The file changed after its bytes were read, and a reader has noticed meanwhile.
            or self._names.attributes(promote.ino).identity != flight.identity
        ):
            self._controller.dropped(promote.ino, promote.size)
            self.remove_copy(promote.ino, promote.tier)

    def _failed(self, flight: Flight, error: Exception) -> None:
        if self._flights.get(flight.ino) is not flight:
            return
        tier = self._tiers[flight.promote.tier]
        if isinstance(error, SourceChanged):
            self._metrics.promotion_failed("source-changed")
            self._give_up(flight, retry=False)
            self._changed(flight.ino)
            return
        kind = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
        self._metrics.promotion_failed(kind)
        if isinstance(error, PermissionError):
            # To try it again would change nothing: a reader who may open it brings it in.
            self._metrics.source_refused(flight.ino)
            self._limiter.warning(
                log,
                "copy refused",
                "no copy of %s: the source does not let the daemon open it; it is copied when a"
                " process reads that may",
                self._told(flight.ino),
            )
            self._give_up(flight, retry=False)
            return
        self._limiter.warning(
            log,
            f"copy {kind}",
            "copy to tier %s given up, will be tried again: %s: %s (%s); its readers have the"
            " source",
            tier.name,
            self._told(flight.ino),
            error,
            kind,
        )
        if trio.current_time() >= self._rest_until:
            # Those that were under way with it fail for the same reason: they are one failure.
            self._rest_until = trio.current_time() + self._rest_s
            self._rest_s = min(2 * self._rest_s, _BACKOFF_S[1])
        self._give_up(flight, retry=True)
        if isinstance(error, TierError):
            self._ward.failed(tier, error)

    def _told(self, ino: Ino) -> str:
        try:
            return repr(os.fsdecode(self._names.path(ino)))
        except MonarchError:
            return f"inode {ino}"

    def _tier_is_out(self, number: int) -> None:
        """Nothing waits for it any more; what hangs there is left to itself."""
        for line in (self._copies[number], self._contents[number]):
            for flight in line.take(len(line)):
                self._give_up(flight, retry=True)
        if not self._ward.answers(number):
            for flight in list(self._flights.values()):
                if flight.promote.tier == number:
                    flight.is_left = True
                    self.running -= 1
                    del self._flights[flight.ino]
                    self._controller.abandoned(flight.promote.item, number, retry=True)

    def _undo(self, flight: Flight) -> None:
        """Nobody waits for this copy any more, but it came all the same.

        Its record may be in the place of another tier's, which is then a copy that no record knows.
        """
        number = self._controller.dropped(flight.ino, flight.promote.size)
        for tier in {number, flight.promote.tier} - {SOURCE}:
            self.remove_copy(flight.ino, tier)

    def _give_up(self, flight: Flight, *, retry: bool) -> None:
        self._forget(flight)
        self._controller.abandoned(flight.promote.item, flight.promote.tier, retry=retry)

    def _forget(self, flight: Flight) -> None:
        del self._flights[flight.ino]
        self._free(flight)

    def _free(self, flight: Flight) -> None:
        if flight.content is not None:
            self._held_bytes -= len(flight.content)
            flight.content = None
        if flight.file is not None:
            flight.file.release()
            flight.file = None


def _remove_all(tier: Tier, inos: list[Ino]) -> None:
    for ino in inos:
        tier.remove(ino)


def _require_wanted(flight: Flight) -> None:
    if flight.is_left:
        raise tier_error(errno.ETIMEDOUT, "the tier does not answer")
