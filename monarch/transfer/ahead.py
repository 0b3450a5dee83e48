"""Fetches files before a reader opens them, as far as the source allows beside its readers.

A ``Foreseen`` knows which files will be read next. Placement decides which of it gets a copy; no
copy is evicted for it. A small file is read whole, and the engine's commit worker writes it to the
tier. A small file that no tier admits is kept in memory until it is read (``window.py``); if there
is no room for it, it waits, and files that a tier admits pass it. A large file is opened, and is
then copied as if a reader had opened it, a few at a time.

A file is opened at the source once. If a reader opens it meanwhile, the reader waits for the call
under way, or makes the call itself if it has not begun. A file that is open already is left to its
reader. ``concurrency.py`` decides how many calls run beside the readers.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from monarch.errors import MonarchError
from monarch.placement.controller import Controller
from monarch.placement.policy import Item
from monarch.transfer.chunks import ChunkReads, Coming
from monarch.transfer.concurrency import Call, Concurrency
from monarch.transfer.engine import Engine
from monarch.transfer.queue import Arrival, Flight
from monarch.transfer.source_load import ReaderTotals, SourceLoad
from monarch.transfer.source_reader import Names, SourceReader
from monarch.transfer.waiting import Waiting
from monarch.transfer.window import Held
from monarch.types import Attributes, Ino

# Large files that are copied ahead at the same time, and those that wait for that: some times as
# many as one order foresees.
_LARGE = 2
_LARGE_WAITING = 1 << 14
# Questions that only bring large files, or files that have copies, before other tasks run.
_TURNS = 64
# Files of a pack that are asked for at once.
_CHUNK_TURN = 64
# Files that wait for room in the window.
_WINDOW_WAITING = 1 << 14
# The interval in which a limit is checked again while files wait for it.
_STEP_S = 0.01
# The interval in which files leave the window that no reader is expected to open, in seconds. One
# that is not announced leaves, too, if for so long no file of the window was read.
_SWEEP_S = 1.0
_IDLE_S = 60.0
# Files of the window that are checked before other tasks run: a few milliseconds. It may have a
# hundred thousand.
_SWEPT = 512
# The daemon takes up to this time to fetch a file ahead and to store it, or to open it from the
# window, one after the other. So readers that call the source at the same time may be faster.
_FILE_S = 0.0005
# The latency of the reads of readers is a mean over so many of them. The number of readers at the
# source is their highest number, which fades by this factor each ``_SWEEP_S``.
_READS = 32
_FADING = 0.95
# Pinned files that are begun in each ``_LOOK_S`` while readers are faster: 3 % of a processor.
_PINNED = 4
# Readers that have not called the source for so long do not, in seconds. While they do, it is
# checked again after the second time.
_PAUSED_S = 1.0
_LOOK_S = 0.05


class Foreseen(Protocol):
    """Knows which files will be read. ``next`` returns up to ``most`` files to fetch now, the most
    urgent first; each is returned once. It is called again after ``FetchAhead.wake``."""

    def next(self, most: int) -> list[Ino]: ...

    def is_foreseen(self, ino: Ino) -> bool:
        """Whether a file that was returned by ``next`` will still be read. Large files wait for
        others, and meanwhile the job may have ended."""

    def fetched(self, ino: Ino, nbytes: int) -> None:
        """The file was fetched ahead, or its copy begins, and has ``nbytes``."""

    def refused(self, ino: Ino) -> None:
        """The file is not fetched: it has a copy, a reader fetches it, there is no place for it, or
        it cannot be read."""

    def is_announced(self, ino: Ino) -> bool:
        """Whether an announced order has the file before it, so that it will be opened."""

    def is_idle(self, ino: Ino) -> bool:
        """Whether the readers of all announced orders that have the file have paused."""

    def is_recognised(self, ino: Ino) -> bool:
        """Whether a recognised order has the file before it."""

    def reader_of(self, ino: Ino) -> Hashable:
        """For which of several readers the file was returned by ``next``."""

    def is_expected_again(self, ino: Ino, job: int) -> bool:
        """Whether readers other than ``job``, which opens the file, are expected to open it; 0: any
        readers."""


class ForeseenAndPinned(Foreseen, Protocol):
    def pinned(self, most: int) -> list[Ino]:
        """As ``next``, of the files that must have copies although no reader may come. ``next``
        returns them, too, after all that is foreseen."""


class Files(Names, Protocol):
    """The functions of the namespace that fetches ahead use. Files of the source have the numbers 1
    to ``entries``."""

    @property
    def entries(self) -> int: ...
    def is_gone(self, ino: Ino) -> bool: ...
    def is_rewritten(self, ino: Ino) -> bool: ...


def _never(ino: Ino) -> bool:
    return False


@dataclass(eq=False, repr=False)
class FetchAhead:
    """Belongs to the event loop. ``run`` is its task. ``is_open`` returns whether a process has a
    file open or is opening it, ``has_pages`` whether the kernel has its pages and asks for no open.
    The chunks are those of a pack, None if the source is none."""

    _foreseen: ForeseenAndPinned
    _names: Files
    _controller: Controller
    _engine: Engine
    _reader: SourceReader
    _load: SourceLoad
    is_open: Callable[[Ino], bool]
    _chunks: ChunkReads | None = None
    has_pages: Callable[[Ino], bool] = _never

    def __post_init__(self) -> None:
        if self._chunks is not None:
            self._chunks.fetched = self._foreseen.fetched
        limits = self._reader.limits
        self._inline_max = limits.inline_max
        self._concurrency = Concurrency(limits.source_concurrency)
        self._window = self._engine.window
        # Files that wait for a place: small ones, those of them that wait for the window, and large
        # ones, with the bytes of large files that are copied for each reader.
        self._small: deque[Ino] = deque()
        self._for_window = Waiting(self._window.held_for)
        self._copied: Counter[Hashable] = Counter()
        self._large = Waiting(self._copied)
        self._window.on_room = self.wake
        # The files of the window that no reader was expected to open at the last sweep. One of them
        # may just have been opened, and its read still comes: ``open: none``.
        self._doubted: set[Ino] = set()
        # The sweep that is under way, and when its last part began.
        self._sweeping: Iterator[None] | None = None
        self._part_s = -math.inf
        self._swept_s = self._served_s = -math.inf
        self._served_files = 0
        # The readers at the source, the latency of their reads, and their totals with the time at
        # which these changed.
        self._readers = self._read_s = 0.0
        self._seen = ReaderTotals(0, 0.0, 0)
        self._seen_s = self._pinned_s = -math.inf
        self._copying: list[tuple[Hashable, Flight]] = []
        # Set when a fetch has ended, or more files are foreseen.
        self._woken = trio.Event()
        # Files that are asked for at once, at least: most of those of a pack come with their
        # chunks, and are done then.
        self._turn = 1 if self._chunks is None else _CHUNK_TURN

    def wake(self) -> None:
        """Call this when ``Foreseen.next`` may return files again."""
        self._woken.set()

    def stage(self, attributes: Attributes, content: bytes | memoryview) -> None:
        """Keeps a file that a reader has fetched, and that no tier admits, in the window for
        another reader, unless the source is faster than the daemon."""
        ino, window = attributes.ino, self._window
        if not 0 < len(content) == attributes.size <= window.most or self._chunks is not None:
            return
        if self._controller.is_excluded(ino) or self._controller.is_placed(ino):
            return
        now = trio.current_time()
        self._look(self._load.totals(), now)
        if not self._is_gain(now) or not window.stage(ino, attributes.identity, content):
            return
        if len(window) == 1:
            # Files leave it in time.
            self.wake()

    @property
    def running(self) -> int:
        """The number of small files that are being fetched."""
        return self._concurrency.running

    async def run(self) -> None:
        """Fetches what is foreseen, until cancelled."""
        if self._chunks is not None:
            # Before, a file would be read alone, and its bytes again with those around it.
            await self._chunks.has_begun.wait()
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    self._woken = trio.Event()
                    self._sweep(trio.current_time())
                    self._begin_all(nursery)
                    with trio.move_on_after(self._pause_s()):
                        await self._woken.wait()
        finally:
            self._window.sweep(lambda held: False, self._window.files())
            self._small.clear()
            self._for_window.clear()
            self._large.clear()
            self._copying.clear()

    def _pause_s(self) -> float:
        """How long to wait for ``wake``."""
        if self._sweeping is not None:
            return _STEP_S
        if not self._is_gain(trio.current_time()):
            return _LOOK_S
        is_idle = not (self._small or self._large or self._concurrency.running)
        if not is_idle or self._foresees():
            return _STEP_S
        return _SWEEP_S if self._for_window or len(self._window) else math.inf

    def _sweep(self, now: float) -> None:
        """Drops files of the window that no reader is expected to open, a part of them in each
        call."""
        if self._sweeping is None:
            if now < self._swept_s + _SWEEP_S:
                return
            self._swept_s = now
            self._readers *= _FADING
            if not (len(self._window) or self._for_window):
                return
            self._sweeping = self._swept(now)
        if now < self._part_s + _STEP_S:
            return
        self._part_s = now
        for _ in self._sweeping:
            return
        self._sweeping = None

    def _swept(self, now: float) -> Iterator[None]:
        """A sweep, which waits after each of its parts."""
        if self._served_files != self._window.served_files or not len(self._window):
            self._served_files, self._served_s = self._window.served_files, now
        is_idle = now > self._served_s + _IDLE_S

        foreseen = self._foreseen
        # An order that is not read now keeps its files only until another one needs the room.
        is_scarce = len(self._for_window) >= _WINDOW_WAITING or any(
            not foreseen.is_idle(ino) for ino in self._for_window
        )

        def is_expected(ino: Ino) -> bool:
            if foreseen.is_announced(ino) and not (is_scarce and foreseen.is_idle(ino)):
                return True
            return not is_idle and foreseen.is_recognised(ino)

        doubted, self._doubted = self._doubted, set()

        def stays(held: Held) -> bool:
            is_shared = held.is_read and not is_idle and foreseen.is_expected_again(held.ino, 0)
            if not (is_shared or is_expected(held.ino)):
                self._doubted.add(held.ino)
                if held.ino in doubted:
                    return False
            return self._is_current(held)

        files = self._window.files()
        for start in range(0, len(files), _SWEPT):
            for ino in self._window.sweep(stays, files[start : start + _SWEPT]):
                self._foreseen.refused(ino)
            yield
        for ino in self._for_window.keep(is_expected):
            self._foreseen.refused(ino)

    def _is_current(self, held: Held) -> bool:
        """Whether a reader would still get these bytes."""
        names, ino = self._names, held.ino
        is_changed = names.is_rewritten(ino) or names.is_gone(ino)
        return not is_changed and names.stored(ino).identity == held.identity

    def _foresees(self) -> bool:
        """Whether there is a next file, which then waits for its turn."""
        if len(self._for_window) >= _WINDOW_WAITING:
            return False
        return self._take(1) or bool(self._small or self._large)

    def _take(self, most: int) -> bool:
        """Asks for up to ``most`` files and sorts them by size. Returns whether there may be
        more."""
        inos = self._foreseen.next(most)
        self._sort(inos)
        return bool(inos)

    def _sort(self, inos: Sequence[Ino]) -> None:
        """Adds files to those that wait, by their size."""
        for ino in inos:
            if self._chunks is not None and self._chunks.is_coming(ino):
                continue
            attributes = self._fetchable(ino)
            if attributes is not None:
                if attributes.size <= self._inline_max:
                    self._small.append(ino)
                else:
                    self._large.append(self._foreseen.reader_of(ino), ino)

    def _fetchable(self, ino: Ino) -> Attributes | None:
        """The attributes of a file that is to be fetched; None, after the answer, if it is not."""
        names = self._names
        if not 1 <= ino <= names.entries or names.is_rewritten(ino) or names.is_gone(ino):
            self._foreseen.refused(ino)
            return None
        attributes = names.stored(ino)
        # A further name of a file is never opened: readers open the number of its first name.
        if not attributes.is_file or attributes.ino != ino:
            self._foreseen.refused(ino)
            return None
        if self._controller.is_placed(ino) or self.is_open(ino):
            self._foreseen.refused(ino)
            return None
        return attributes

    def _begin_all(self, nursery: trio.Nursery) -> None:
        """Begins the fetches that may begin now."""
        now, load = trio.current_time(), self._load.totals()
        self._look(load, now)
        self._concurrency.look(load.reads, load.waited_s, load.running, now)
        if self._chunks is not None:
            self._chunks.begin_waiting()
        is_gain = self._is_gain(now)
        while is_gain and self._concurrency.may_begin(now) and self._may_read(0):
            ino, take = self._next_small()
            if take is None or not self._may_read(self._names.attributes(ino).size):
                break
            self._begin(take(), nursery)
        if not is_gain:
            self._begin_pinned(now, nursery)
        self._copying = [each for each in self._copying if self._is_copied(*each)]
        while self._large and len(self._copying) < _LARGE and self._may_read(0):
            reader = self._foreseen.reader_of(self._large.first())
            flight = self._begin(self._large.pop(), nursery)
            if flight is not None:
                self._copying.append((reader, flight))
                self._copied[reader] += flight.promote.size

    def _is_copied(self, reader: Hashable, flight: Flight) -> bool:
        """Whether a copy of a large file is still under way."""
        if self._engine.flight(flight.ino) is flight:
            return True
        self._copied[reader] -= flight.promote.size
        self._copied += Counter()
        return False

    def _begin_pinned(self, now: float, nursery: trio.Nursery) -> None:
        """While readers are faster: begins a few pinned files, and refuses all others."""
        while self._small:
            # A file that waits may be read meanwhile, and would then be fetched in vain.
            self._foreseen.refused(self._small.popleft())
        if now < self._pinned_s + _LOOK_S:
            return
        self._pinned_s = now
        for _ in range(_PINNED):
            if not (self._concurrency.may_begin(now) and self._may_read(0)):
                break
            self._sort(self._foreseen.pinned(1))
            if self._small:
                self._begin(self._small.popleft(), nursery)

    def _look(self, load: ReaderTotals, now: float) -> None:
        """Takes the totals of the readers so far."""
        self._readers = max(self._readers, load.running)
        reads = load.reads - self._seen.reads
        if reads or load.running:
            self._seen_s = now
        if reads:
            latency_s = (load.waited_s - self._seen.waited_s) / reads
            share = min(1.0, reads / _READS) if self._seen.reads else 1.0
            self._read_s += (latency_s - self._read_s) * share
        self._seen = load

    def _is_gain(self, now: float) -> bool:
        """False while readers fetch more files from the source than the daemon could fetch ahead.
        The chunks of a pack are read by the daemon alone."""
        are_reading = self._seen.reads > 0 and now < self._seen_s + _PAUSED_S
        are_faster = are_reading and self._read_s < max(1.0, self._readers) * _FILE_S
        return self._chunks is not None or not are_faster

    def _next_small(self) -> tuple[Ino, Callable[[], Ino] | None]:
        """The next small file, and the function that takes it; None if there is none now."""
        waiting = self._for_window
        if waiting and self._window.has_room(self._names.attributes(waiting.first()).size):
            return waiting.first(), waiting.pop
        for _ in range(_TURNS):
            is_full = len(self._large) >= _LARGE_WAITING or len(waiting) >= _WINDOW_WAITING
            if self._small or is_full:
                break
            if not self._take(max(self._turn, self._concurrency.limit - self._concurrency.running)):
                break
        if self._small:
            return self._small[0], self._small.popleft
        return Ino(0), None

    def _may_read(self, size: int) -> bool:
        return self._engine.may_fetch(size) and self._reader.spend(0) <= 0

    def _begin(self, ino: Ino, nursery: trio.Nursery) -> Flight | None:
        """Begins the flight of a file; None if it is not fetched, or fetched into the window."""
        if not self._foreseen.is_foreseen(ino):
            self._foreseen.refused(ino)
            return None
        attributes = self._fetchable(ino)
        if attributes is None:
            return None
        if self._chunks is not None and (coming := self._chunks.ahead(ino)) is not Coming.ALONE:
            if coming is Coming.LATER:
                self._foreseen.refused(ino)
            return None
        was_wanted = self._controller.is_wanted(ino)
        promote = self._controller.offered(Item.of(attributes))
        if promote is None:
            self._begin_hold(attributes, nursery)
            return None
        promote = self._engine.make_room(promote)
        # From now on the datapath passes opens of the file to Python, where its flight is found.
        # An open may have begun just before.
        if self.is_open(ino):
            self._controller.abandoned(promote.item, promote.tier, retry=was_wanted)
            self._foreseen.refused(ino)
            return None
        arrival, call = Arrival(), None
        flight = self._engine.begin_fetch(promote, attributes.identity, arrival)
        if attributes.size <= self._inline_max:
            self._reader.spend(attributes.size)
            call = self._concurrency.began(trio.current_time())
        nursery.start_soon(self._fetch, flight, arrival, call)
        return flight

    def _may_hold(self, ino: Ino) -> bool:
        """Whether a file may be fetched into the window."""
        foreseen = self._foreseen
        # A pinned file, or one that is filled in, may not be read soon.
        is_expected = foreseen.is_announced(ino) or foreseen.is_recognised(ino)
        is_excluded = not self._window.most or self._controller.is_excluded(ino)
        return is_expected and not is_excluded and not self.has_pages(ino)

    def _begin_hold(self, attributes: Attributes, nursery: trio.Nursery) -> None:
        """Begins the fetch of a file into the window, or lets the file wait for it."""
        ino, size, window = attributes.ino, attributes.size, self._window
        if size > min(self._inline_max, window.most) or not self._may_hold(ino):
            self._foreseen.refused(ino)
            return
        reader = self._foreseen.reader_of(ino)
        if not window.has_room(size):
            self._for_window.append(reader, ino)
            return
        arrival = Arrival()
        held = window.begin(ino, attributes.identity, arrival, reader)
        # An open may have begun just before: see ``_begin``.
        if self.is_open(ino):
            window.drop(held)
            self._foreseen.refused(ino)
            return
        self._reader.spend(size)
        call = self._concurrency.began(trio.current_time())
        nursery.start_soon(self._fetch_held, held, arrival, call)

    async def _fetch_held(self, held: Held, arrival: Arrival, call: Call) -> None:
        """Makes the call of a file that goes into the window."""
        try:
            arrival.content = await self._reader.fetch_ahead(held, arrival)
        except (OSError, MonarchError) as error:
            self._engine.hold_failed(held.ino, error)
        finally:
            arrival.done.set()
            is_held = self._window.end(held, arrival.content)
            self._called(call, arrival, held.identity.size)
        if is_held:
            self._foreseen.fetched(held.ino, held.identity.size)
        else:
            self._foreseen.refused(held.ino)

    def _called(self, call: Call, arrival: Arrival, size: int) -> None:
        """Records the end of a call."""
        now = trio.current_time()
        if arrival.content is not None:
            self._concurrency.ended(call, size, now)
        else:
            self._concurrency.failed(call, now)
        self._woken.set()

    async def _fetch(self, flight: Flight, arrival: Arrival, call: Call | None) -> None:
        """Makes the call of a flight; ``call`` is None for a large file."""
        ino, size = flight.ino, flight.promote.size
        error: Exception | None = None
        try:
            if call is None:
                await self._reader.open_ahead(flight, arrival)
            else:
                arrival.content = await self._reader.fetch_ahead(flight, arrival)
        except (OSError, MonarchError) as caught:
            error = caught
        finally:
            arrival.done.set()
            is_made = self._engine.end_fetch(flight, arrival.content, error)
            if call is not None:
                self._called(call, arrival, size)
            self._woken.set()
        if is_made:
            self._foreseen.fetched(ino, size)
        else:
            self._foreseen.refused(ino)
