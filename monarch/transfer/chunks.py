"""Reads chunks of a pack as a whole: a chunk is the unit in which a pack is promoted.

A chunk is read as a whole if placement admits it: then all its files become copies. Or if an
announced order has its files close together: then those without a copy go to the window, and its
bytes cross the network once an epoch. Of any other chunk a reader gets the extent of its file only:
a chunk that does not stay would cost many times the bytes that are asked for.

Readers of the files of a chunk that is being read wait for it, as for any fetch ahead. A chunk that
cannot be read is left to its readers for a while, file by file.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import trio

from monarch.errors import MonarchError
from monarch.packed.chunks import Member, PackChunks
from monarch.placement.controller import Controller
from monarch.placement.policy import Item
from monarch.text import MiB
from monarch.transfer.chunk_plans import ChunkPlans, Plan, Uses
from monarch.transfer.engine import Engine
from monarch.transfer.queue import Arrival, Flight
from monarch.transfer.source_reader import Names, SourceReader
from monarch.transfer.window import Held
from monarch.types import Ino

log = logging.getLogger(__name__)

# The most bytes of one read.
_PIECE_BYTES = 4 * MiB
# Bytes between the files that are needed which are read too, as a fraction of these files.
_GAPS = 1 / 20
# Chunks that are read ahead of their readers at the same time.
_AHEAD = 4
# A chunk with a file that could not be read is not read as a whole for so long, in seconds.
_PAUSE_S = 10.0
# Files that are handed over before the event loop runs other tasks.
_STRIDE = 64


class Coming(enum.Enum):
    """How a file will be read: ALONE, with its chunk, which is under way (TOGETHER), or with its
    chunk when there is room for it (LATER)."""

    ALONE = enum.auto()
    TOGETHER = enum.auto()
    LATER = enum.auto()


class ChunkArrival(Arrival):
    """The arrival of one file of a chunk; no reader makes the call instead."""

    __slots__ = ()

    is_whole = True

    def __init__(self, done: trio.Event) -> None:
        super().__init__()
        self.done = done

    def claim(self) -> bool:
        return False


@dataclass(slots=True, eq=False)
class _Piece:
    """Files that are read at once, and the flight of each. ``done`` is set when their bytes have
    arrived, or will not; ``ended``: the number of flights that have ended."""

    members: list[Member]
    done: trio.Event = field(default_factory=trio.Event)
    flights: list[Flight | Held] = field(default_factory=list)
    ended: int = 0


@dataclass(eq=False, repr=False)
class ChunkReads:
    """Belongs to the event loop. ``run`` is its task: without it each file is read alone."""

    _chunks: PackChunks
    _names: Names
    _controller: Controller
    _engine: Engine
    _reader: SourceReader
    _uses: Uses

    def __post_init__(self) -> None:
        self._window = window = self._engine.window
        self._plans = ChunkPlans(
            self._chunks, self._names, self._controller, self._uses, window.most
        )
        self._nursery: trio.Nursery | None = None
        # The chunks that are being read.
        self._reading: set[int] = set()
        self._ahead = 0
        # Until when a chunk with a failure is read file by file.
        self._failed: dict[int, float] = {}
        # The chunks that wait for room in the window, each with the file that is needed first; and
        # the one that has its turn, with the bytes that it needs.
        self._waiting: dict[int, Ino] = {}
        self._next: tuple[int, int] | None = None
        # How often a chunk was read as a whole.
        self.read = 0
        # Is called with each file that was fetched ahead, and its size.
        self.fetched: Callable[[Ino, int], None] = _ignore

    async def run(self) -> None:
        """Reads what ``open``, ``ahead`` and ``warm`` begin, until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                await trio.sleep_forever()
        finally:
            self._nursery, self._next = None, None
            self._reading.clear()
            self._waiting.clear()
            self._ahead = 0

    # -- what is read as a whole -----------------------------------------------------------------

    def open(self, ino: Ino) -> Flight | Held | None:
        """Called when a reader needs a file that has no copy: begins to read its chunk if that is
        to be read as a whole. Returns the flight of the file; None: the reader reads it alone."""
        if self._begin(ino, forced=False) is not Coming.TOGETHER:
            return None
        return self._engine.flight(ino)

    def warm(self, ino: Ino) -> bool:
        """As ``open``, for a user's request. Returns whether the file comes with its chunk."""
        return self._begin(ino, forced=True) is Coming.TOGETHER

    def ahead(self, ino: Ino) -> Coming:
        """Called when a file is to be fetched ahead of its readers. Chunks for the window are read
        in the order in which they are needed."""
        chunk = self._chunks.chunk_of(ino)
        if chunk is None or self._nursery is None or self._is_paused(chunk):
            return Coming.ALONE
        if chunk not in self._reading and chunk not in self._waiting:
            plan = self._plans.of(ino, chunk)
            if plan is None:
                return Coming.ALONE
            if plan.is_copied:
                return self._begin_if(chunk, plan, is_ahead=True)
        if self._engine.flight(ino) is not None:
            return Coming.TOGETHER
        self._wait(chunk, ino)
        self.begin_waiting()
        return Coming.LATER if self._engine.flight(ino) is None else Coming.TOGETHER

    def begin_waiting(self) -> None:
        """Begins to read the chunks that wait for the window, as many as there is room for."""
        while self._waiting and self._nursery is not None:
            if self._next is not None and self._must_wait(*self._next):
                return
            next_use = self._uses.next_use
            uses = {chunk: next_use(ino) for chunk, ino in self._waiting.items()}
            chunk = min(uses, key=uses.__getitem__)
            ino, self._next = self._waiting[chunk], None
            plan = None if uses[chunk] == math.inf else self._plans.of(ino, chunk)
            if plan is None or self._is_paused(chunk):
                del self._waiting[chunk]
            elif self._must_wait(chunk, plan.nbytes):
                self._next = chunk, plan.nbytes
                return
            elif self._begin_if(chunk, plan, is_ahead=True) is not Coming.TOGETHER:
                del self._waiting[chunk]

    def _wait(self, chunk: int, ino: Ino) -> None:
        before = self._waiting.get(chunk)
        if before is None or self._uses.next_use(ino) < self._uses.next_use(before):
            self._waiting[chunk] = ino
            # It may be needed before the one that has its turn.
            self._next = None

    def _must_wait(self, chunk: int, nbytes: int) -> bool:
        """Whether a chunk cannot be read into the window now. Files that wait for a reader of this
        epoch must not divide the chunk for the next one."""
        return (
            chunk in self._reading
            or self._ahead >= _AHEAD
            or not self._window.has_room(nbytes)
            or self._chunks.is_under_way(chunk)
        )

    def has_place(self) -> bool:
        """Whether another chunk may be read now for a caller that has many."""
        buffer = self._reader.buffer
        return len(self._reading) < _AHEAD and buffer.used <= buffer.most // 2

    def _begin(self, ino: Ino, *, forced: bool) -> Coming:
        chunk = self._chunks.chunk_of(ino)
        if chunk is None or self._nursery is None or self._is_paused(chunk):
            return Coming.ALONE
        if chunk in self._reading:
            is_coming = self._engine.flight(ino) is not None
            return Coming.TOGETHER if is_coming else Coming.ALONE
        plan = self._plans.of(ino, chunk, forced=forced)
        return Coming.ALONE if plan is None else self._begin_if(chunk, plan, forced=forced)

    def _begin_if(
        self, chunk: int, plan: Plan, *, is_ahead: bool = False, forced: bool = False
    ) -> Coming:
        """Begins to read a chunk if there is room for it."""
        if self._nursery is None or not self._has_room(plan, is_ahead=is_ahead):
            return Coming.LATER if is_ahead else Coming.ALONE
        pieces = self._take_off(plan, forced=forced)
        if not pieces:
            return Coming.ALONE
        self._waiting.pop(chunk, None)
        self._reading.add(chunk)
        self._ahead += is_ahead
        self._nursery.start_soon(self._read, chunk, pieces, is_ahead)
        return Coming.TOGETHER

    def _is_paused(self, chunk: int) -> bool:
        until = self._failed.get(chunk)
        if until is None:
            return False
        if trio.current_time() < until:
            return True
        del self._failed[chunk]
        return False

    def _has_room(self, plan: Plan, *, is_ahead: bool) -> bool:
        if is_ahead and self._ahead >= _AHEAD:
            return False
        if plan.is_copied:
            buffer = self._reader.buffer
            return buffer.has_room(plan.nbytes) and (not is_ahead or self._engine.may_fetch(0))
        return self._window.has_room(plan.nbytes)

    def _take_off(self, plan: Plan, *, forced: bool) -> list[_Piece]:
        """Begins the flights of the files, and returns what to read."""
        attributes = {each.ino: self._names.stored(each.ino) for each in plan.members}
        if not plan.is_copied:
            pieces = _pieces(plan.members)
            for piece in pieces:
                arrivals = [ChunkArrival(piece.done) for _ in piece.members]
                piece.flights += [
                    self._window.begin(member.ino, attributes[member.ino].identity, arrival)
                    for member, arrival in zip(piece.members, arrivals, strict=True)
                ]
            return pieces
        items = [Item.of(each) for each in attributes.values()]
        promotes = {
            promote.ino: promote
            for promote in self._controller.offered_together(items, forced=forced)
        }
        pieces = _pieces([each for each in plan.members if each.ino in promotes])
        for piece in pieces:
            for ino in (member.ino for member in piece.members):
                arrival = ChunkArrival(piece.done)
                piece.flights.append(
                    self._engine.begin_fetch(promotes[ino], attributes[ino].identity, arrival)
                )
        return pieces

    # -- reading ---------------------------------------------------------------------------------

    async def _read(self, chunk: int, pieces: list[_Piece], is_ahead: bool) -> None:
        """Reads the pieces of a chunk one after the other, and hands over their files."""
        left = list(reversed(pieces))
        try:
            while left:
                piece = left[-1]
                contents = await self._contents(chunk, piece, is_ahead)
                if None in contents:
                    self._failed[chunk] = trio.current_time() + _PAUSE_S
                await self._hand_over(piece, contents, is_ahead)
                left.pop()
            self.read += 1
        except (OSError, MonarchError) as error:
            self._failed[chunk] = trio.current_time() + _PAUSE_S
            self._engine.hold_failed(left[-1].members[0].ino, error)
            log.debug("chunk %d: %s", chunk, error)
        finally:
            for piece in left:
                self._give_up(piece)
            self._reading.discard(chunk)
            self._ahead -= is_ahead
            self._window.on_room()

    async def _contents(
        self, chunk: int, piece: _Piece, is_ahead: bool
    ) -> Sequence[memoryview | None]:
        size = sum(member.size for member in piece.members)
        pause_s = self._reader.spend(size)
        if is_ahead:
            # Copies keep within ``limits.source_bandwidth``; readers do not wait for it.
            await trio.sleep(pause_s)
        return await self._reader.fetch_together(partial(self._chunks.fetch, piece.members))

    async def _hand_over(
        self, piece: _Piece, contents: Sequence[memoryview | None], is_ahead: bool
    ) -> None:
        """Gives the files of a piece to their readers, to the tier and to the window."""
        for flight, content in zip(piece.flights, contents, strict=True):
            if flight.arrival is not None:
                flight.arrival.content = content
        piece.done.set()
        for member, content in zip(piece.members, contents, strict=True):
            is_here = self._end(piece, content)
            if is_ahead and is_here:
                self.fetched(member.ino, member.size)
            if piece.ended % _STRIDE == 0:
                await trio.sleep(0)

    def _give_up(self, piece: _Piece) -> None:
        piece.done.set()
        while piece.ended < len(piece.flights):
            self._end(piece, None)

    def _end(self, piece: _Piece, content: memoryview | None) -> bool:
        """Ends the next flight of a piece; returns whether its bytes are used."""
        flight = piece.flights[piece.ended]
        piece.ended += 1
        if isinstance(flight, Held):
            # Its own bytes: a file that waits for its reader must not keep those of a whole piece.
            return self._window.end(flight, None if content is None else bytes(content))
        return self._engine.end_fetch(flight, content)


def _pieces(members: Sequence[Member]) -> list[_Piece]:
    """Divides files, in the order of their bytes, into those that are read at once. The
    bytes between them are read too if they are few."""
    gaps = sum(after.offset - before.end for before, after in pairwise(members))
    is_bridged = gaps <= _GAPS * sum(member.size for member in members)
    pieces: list[_Piece] = []
    end = size = 0
    for member in members:
        is_next = member.offset == end or is_bridged
        if not pieces or not is_next or size + member.size > _PIECE_BYTES:
            pieces.append(_Piece([]))
            size = 0
        pieces[-1].members.append(member)
        end = member.end
        size += member.size
    return pieces


def _ignore(ino: Ino, nbytes: int) -> None:
    """Until ``fetched`` is set."""
