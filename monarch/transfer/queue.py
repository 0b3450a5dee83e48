"""The queues of copies to be made, and of copies to be removed."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import trio

from monarch.placement.controller import Controller, Promote
from monarch.tiers.source import SourceFile
from monarch.types import Identity, Ino

# Copies removed in one turn of a worker thread.
_REMOVALS = 256
_STEP_S = 0.005


class Arrival:
    """The only call at the source for a file that is fetched ahead. Readers wait for ``done``.

    ``content`` are then the bytes of a small file; None if the call failed, or was not made. Either
    the thread of the fetch or a reader that comes before it has begun makes the call.
    """

    __slots__ = ("_claimed", "content", "done")

    # Whether ``content`` are the bytes of a large file, too.
    is_whole = False

    def __init__(self) -> None:
        self.done = trio.Event()
        self.content: bytes | memoryview | None = None
        self._claimed = threading.Lock()

    def claim(self) -> bool:
        """Whether the caller makes the call; True only once. In any thread."""
        return self._claimed.acquire(blocking=False)


@dataclass(slots=True, eq=False)
class Flight:
    """One copy to be made. ``content`` was fetched by a reader, ``file`` is open for a reader.
    ``copied`` bytes are in the stage so far. ``young`` as in ``Records.put``. ``is_abandoned``: its
    tier hangs. ``arrival``: the file is fetched ahead of its readers. ``is_kept``: the datapath
    keeps the bytes for readers."""

    promote: Promote
    identity: Identity
    content: bytes | memoryview | None = None
    file: SourceFile | None = None
    young: bool = False
    is_abandoned: bool = False
    copied: int = 0
    arrival: Arrival | None = None
    is_kept: bool = False

    @property
    def ino(self) -> Ino:
        return self.promote.ino


@dataclass(slots=True, eq=False)
class Buffer:
    """Counts the bytes in memory between the source and the tiers, at most ``most``."""

    most: int
    used: int = 0

    def has_room(self, size: int) -> bool:
        return self.used + size <= self.most


class _Line:
    """Flights that wait for a worker, in the order of arrival."""

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
        """Waits until there is a flight; another worker may take it first."""
        while not self._flights:
            await self._workers.park()

    def take(self, most: float = math.inf, *, most_bytes: float = math.inf) -> list[Flight]:
        """Removes and returns the first flights, at least one if there is any."""
        taken: list[Flight] = []
        while self._flights and len(taken) < most:
            most_bytes -= self._flights[0].promote.size
            if taken and most_bytes < 0:
                break
            taken.append(self._flights.popleft())
        return taken


class Flights:
    """All copies from submission to end, at most one for each item. A flight waits in ``copies`` to
    be read from the source, or in ``contents`` to be written, by the number of its tier, or a
    worker or a fetch ahead has it."""

    def __init__(
        self,
        tiers: Iterable[int],
        controller: Controller,
        buffer: Buffer,
        unkeep: Callable[[Ino], None],
    ) -> None:
        self._unkeep = unkeep
        self.copies = {number: _Line() for number in tiers}
        self.contents = {number: _Line() for number in self.copies}
        self._controller = controller
        self._buffer = buffer
        self._flights: dict[Ino, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def waiting_copies(self) -> int:
        return sum(map(len, self.copies.values()))

    @property
    def waiting(self) -> int:
        return self.waiting_copies + sum(map(len, self.contents.values()))

    @property
    def has_content(self) -> bool:
        """Whether the bytes of any small file are in memory."""
        return any(flight.content is not None for flight in self._flights.values())

    def get(self, ino: Ino) -> Flight | None:
        return self._flights.get(ino)

    def put(self, flight: Flight) -> None:
        if flight.content is not None:
            self._buffer.used += len(flight.content)
        self._flights[flight.ino] = flight
        self.queue(flight)

    def begin(self, flight: Flight, held_bytes: int) -> None:
        """Adds a flight that is fetched ahead, with its place in the buffer."""
        self._buffer.used += held_bytes
        self._flights[flight.ino] = flight

    def end(self, flight: Flight, held_bytes: int, content: bytes | memoryview | None) -> bool:
        """Ends the fetch of a flight, which must then be queued or given up; its bytes keep their
        place in the buffer. Returns False if it was given up meanwhile."""
        flight.content = content
        if content is None:
            self._buffer.used -= held_bytes
        if self._flights.get(flight.ino) is flight:
            return True
        self.free(flight)
        return False

    def queue(self, flight: Flight) -> None:
        lines = self.copies if flight.content is None else self.contents
        lines[flight.promote.tier].put(flight)

    def give_up_copies(self) -> None:
        """Gives up the flights that wait to be read from the source."""
        for line in self.copies.values():
            for flight in line.take():
                self.give_up(flight, retry=True)

    def give_up_all(self) -> None:
        for line in (*self.copies.values(), *self.contents.values()):
            line.take()
        for flight in list(self._flights.values()):
            self.give_up(flight, retry=True)

    def give_up_waiting(self, tier: int) -> None:
        """Gives up the flights that wait for a tier."""
        for line in (self.copies[tier], self.contents[tier]):
            for flight in line.take():
                self.give_up(flight, retry=True)

    def abandon(self, tier: int) -> int:
        """Abandons the running flights of a hanging tier; returns their number."""
        abandoned = [flight for flight in self._flights.values() if flight.promote.tier == tier]
        for flight in abandoned:
            flight.is_abandoned = True
            del self._flights[flight.ino]
            self._controller.abandoned(flight.promote.item, tier, retry=True)
        return len(abandoned)

    def give_up(self, flight: Flight, *, retry: bool) -> None:
        self.forget(flight)
        self._controller.abandoned(flight.promote.item, flight.promote.tier, retry=retry)

    def forget(self, flight: Flight) -> None:
        del self._flights[flight.ino]
        self.free(flight)

    def free(self, flight: Flight) -> None:
        """Releases the bytes and the file of a flight that has ended."""
        if flight.content is not None:
            self._buffer.used -= len(flight.content)
            flight.content = None
        if flight.is_kept:
            self._unkeep(flight.ino)
            flight.is_kept = False
        if flight.file is not None:
            flight.file.release()
            flight.file = None


class Removals:
    """Dropped copies of one tier that are still on its disk."""

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
        """Waits until all removals requested so far are done."""
        asked = self._asked
        while self._done < asked:
            await trio.sleep(_STEP_S)
