"""Reads files of the source for copies, and gives way to the readers of the mount."""

from __future__ import annotations

import errno
import os
import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import outcome
import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.config.settings import LimitSettings
from monarch.errors import SourceChanged
from monarch.packmount.source import FetchedRun
from monarch.posix import failpoints
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.metrics import Metrics
from monarch.text import MiB
from monarch.tiers.doubts import Doubts
from monarch.tiers.source import REACH_GAP, Source, SourceFile, at_one_of, read_open
from monarch.transfer.pace import Pace, TokenBucket
from monarch.transfer.queue import Arrival, Buffer, Flight
from monarch.transfer.source_load import SourceLoad
from monarch.transfer.window import Held
from monarch.types import Attributes, Identity, Ino

Args = TypeVarTuple("Args")
T = TypeVar("T")

# Pieces of one file that are read at once while no reader waits for the source.
_AHEAD = 8
# Bytes that a copy reads at once while readers wait, since they wait for that read, too.
_BESIDE_READERS = 1 * MiB
_STEP_S = 0.005
# Bytes moved in one turn of a worker thread: enough to make the hop cheap, few enough that a copy
# gives way to a reader within a few milliseconds.
TURN_BYTES = 4 * MiB
_PIECE_BYTES = 1 * MiB
_HOLE = bytes(_PIECE_BYTES)


class Names(Protocol):
    """The functions of the namespace that copies use."""

    def source_paths(self, ino: Ino) -> list[bytes]: ...
    def path_text(self, ino: Ino) -> str: ...
    def attributes(self, ino: Ino) -> Attributes: ...
    def stored(self, ino: Ino) -> Attributes: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one turn: ``pieces`` in order, of which ``read_bytes`` in ``reads`` calls."""

    pieces: list[bytes]
    reads: int
    read_bytes: int

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of a large file. ``is_ahead``: it is read before the previous one is written."""

    offset: int
    count: int
    is_ahead: bool
    done: trio.Event = field(default_factory=trio.Event)
    result: outcome.Value[Turn] | outcome.Error = field(init=False)

    @property
    def held_bytes(self) -> int:
        """The bytes that count for the buffer; the first piece of each copy does not count."""
        return self.count if self.is_ahead else 0

    async def turn(self) -> Turn:
        """Waits for the bytes and returns them; raises the error of the read."""
        await self.done.wait()
        return self.result.unwrap()


@dataclass(eq=False, repr=False)
class SourceReader:
    """Reads whole small files, and large files in pieces. ``run`` is its task. ``doubts`` is
    notified of each file that is read."""

    _source: Source
    names: Names
    _threads: ThreadPool
    _source_load: SourceLoad
    metrics: Metrics
    limits: LimitSettings
    doubts: Doubts

    def __post_init__(self) -> None:
        limits = self.limits
        self._concurrency = limits.source_concurrency
        self.buffer = Buffer(limits.buffer_max)
        self._bucket = TokenBucket(limits.source_bandwidth, 2 * TURN_BYTES)
        self._pace = Pace()
        # The number of pieces, without the first of each copy, that are read or wait to be written.
        self._ahead = 0
        self._pieces: trio.Nursery
        self.unkeep = self._source_load.unkeep

    def begin(self, nursery: trio.Nursery) -> None:
        """Reads pieces in ``nursery``, that of the tasks that call ``turns``: one of its own would
        be closed at a cancellation while such a task still runs."""
        self._pieces = nursery

    def expect(self) -> None:
        """Records that a reader reads a file that is to be copied."""
        self._pace.expect()

    async def open(self, flight: Flight) -> SourceFile:
        """Opens the flight's version of a file. Raises SourceChanged, OSError."""
        if flight.file is None:
            flight.file = await self._at(flight.ino, self._source.open_version, flight.identity)
            self.metrics.source_opened(copy=True)
        self.doubts.fetched(flight.ino, flight.identity, since_ns=time.monotonic_ns())
        return flight.file

    async def check_unchanged(self, flight: Flight, file: SourceFile) -> None:
        """Raises SourceChanged if the file changed since it was opened, and OSError."""
        await self._threads.run(_check_unchanged, file, flight.identity)

    async def fetch(self, flight: Flight) -> None:
        """Reads a whole small file, through the descriptor of a reader if there is one."""
        size, file = flight.promote.size, flight.file
        while not self.buffer.has_room(size):
            # The buffer is full: the tier is slower than the source.
            await trio.sleep(_STEP_S)
        # Claimed before the first wait, since other workers check the buffer, too.
        self.buffer.used += size
        since_ns = time.monotonic_ns()
        try:
            await trio.sleep(self._bucket.take(size, trio.current_time()))
            async with self._courtesy(flight.ino, file, size):
                if file is None:
                    call = self._source.fetch_shared
                    fetched = await self._at(flight.ino, call, flight.identity, flight.ino)
                    self.metrics.source_opened(fetched.opens, copy=True)
                else:
                    fetched = await self._threads.run(read_open, file, flight.identity)
        except BaseException:
            self.buffer.used -= size
            raise
        self.metrics.source_reads[1] += fetched.reads
        self.metrics.source_bytes[1] += fetched.read_bytes
        flight.content = fetched.data
        self.doubts.fetched(flight.ino, flight.identity, since_ns=since_ns)

    async def _at(
        self, ino: Ino, call: Callable[[bytes, Unpack[Args]], T], *args: Unpack[Args]
    ) -> T:
        """Makes a call for each path that a file may have at the source, until it succeeds. Raises
        SourceChanged, OSError."""
        paths = self.names.source_paths(ino)
        return await self._threads.run(at_one_of, paths, call, *args)

    def spend(self, size: int) -> float:
        """Takes ``size`` bytes of ``limits.source_bandwidth``; returns the seconds until the limit
        allows more."""
        return self._bucket.take(size, trio.current_time())

    async def fetch_ahead(self, flight: Flight | Held, arrival: Arrival) -> bytes | None:
        """Reads a whole small file in the only call at the source; None if a reader makes that
        call. Raises SourceChanged, OSError."""
        paths, since_ns = self.names.source_paths(flight.ino), time.monotonic_ns()
        call = self._source.fetch_shared
        fetched = await self._threads.run(
            _claimed, arrival, at_one_of, paths, call, flight.identity, flight.ino
        )
        if fetched is None:
            return None
        self.metrics.source_opened(fetched.opens, copy=True)
        self.metrics.source_reads[1] += fetched.reads
        self.metrics.source_bytes[1] += fetched.read_bytes
        self.doubts.fetched(flight.ino, flight.identity, since_ns=since_ns)
        return fetched.data

    async def fetch_together(
        self, inos: Sequence[Ino], fetch: Callable[[], FetchedRun]
    ) -> tuple[FetchedRun, list[memoryview | None]]:
        """Reads several files of a chunk in one call, and lets the datapath serve them until
        ``unkeep``. Returns its views of the bytes, too: None for a file that it does not serve.
        Raises OSError."""
        fetched, kept = await self._threads.run(self._kept, inos, fetch)
        self.metrics.source_opened(fetched.opens, copy=True)
        self.metrics.source_reads[1] += fetched.reads
        self.metrics.source_bytes[1] += fetched.nbytes
        return fetched, kept

    def _kept(
        self, inos: Sequence[Ino], fetch: Callable[[], FetchedRun]
    ) -> tuple[FetchedRun, list[memoryview | None]]:
        """In a thread. Raises OSError."""
        run = fetch()
        files = array("Q")
        for ino, begin, content in zip(inos, run.begins.tolist(), run.contents, strict=True):
            if content is not None:
                files.extend((ino, begin, len(content)))
        kept = iter(self._source_load.keep(files, run.raw))
        return run, [None if content is None else next(kept) for content in run.contents]

    async def open_ahead(self, flight: Flight, arrival: Arrival) -> None:
        """Opens a large file for its copy and for readers that come meanwhile; does nothing if a
        reader has come first. Raises SourceChanged, OSError."""
        paths = self.names.source_paths(flight.ino)
        flight.file = await self._threads.run(
            _claimed, arrival, at_one_of, paths, self._source.open_version, flight.identity
        )
        if flight.file is not None:
            self.metrics.source_opened(copy=True)

    async def turns(self, ino: Ino, file: SourceFile, size: int) -> AsyncGenerator[Turn, None]:
        """The bytes of a file in order, read ahead while no reader waits. Each turn stays in the
        buffer until the next is requested."""
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
                    self.buffer.used += piece.held_bytes
                    self._pieces.start_soon(self._read_piece, ino, file.retain(), piece)
                turn = await reading[0].turn()
                self.metrics.source_reads[1] += turn.reads
                self.metrics.source_bytes[1] += turn.read_bytes
                yield turn
                piece = reading.popleft()
                self._free(piece)
                done += 1
                if turn.size < piece.count:
                    # The file became shorter: pieces after its end are not needed.
                    break
        finally:
            for piece in reading:
                self._free(piece)

    def _free(self, piece: _Piece) -> None:
        self._ahead -= piece.is_ahead
        self.buffer.used -= piece.held_bytes

    def _may_read_ahead(self, reading: int, done: int) -> bool:
        """Whether a copy may read one more piece: few at first, until readers had time to show."""
        return (
            reading < min(_AHEAD, 1 + done)
            and self._may_read()
            and self._pace.is_free
            and self._ahead < self._concurrency // 2
            and self.buffer.has_room(TURN_BYTES)
        )

    async def _read_piece(self, ino: Ino, file: SourceFile, piece: _Piece) -> None:
        try:
            await trio.sleep(self._bucket.take(piece.count, trio.current_time()))
            async with self._courtesy(ino, file, piece.offset + piece.count):
                piece.result = outcome.Value(
                    await self._threads.run(read_turn, file, piece.offset, piece.count)
                )
        except Exception as error:
            # Raised again when the copy waits for the piece.
            piece.result = outcome.Error(error)
        finally:
            file.release()
            piece.done.set()

    @asynccontextmanager
    async def _courtesy(self, ino: Ino, file: SourceFile | None, end: int) -> AsyncIterator[None]:
        """Surrounds a read of the source: waits first while readers have priority, unless a reader
        has just read the file beyond ``end``: that read costs the source nothing."""
        while not self._may_read():
            if file is not None:
                reached = max(file.read_up_to, self._source_load.reached(ino))
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
        self._pace.look(self._source_load.waited(now), now)
        return self._pace.may_begin()


# -- in a thread -----------------------------------------------------------------------------------


def _claimed(arrival: Arrival, call: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T | None:
    """Returns ``call(*args)``; None, without the call, if a reader makes it."""
    return call(*args) if arrival.claim() else None


def read_turn(file: SourceFile, offset: int, count: int) -> Turn:
    """Reads up to ``count`` bytes from ``offset`` on. Pieces that are holes are not read."""
    pieces: list[bytes] = []
    reads = read_bytes = 0
    end = offset + count
    data = _next_data(file, offset)
    while offset < end:
        wanted = min(_PIECE_BYTES, end - offset)
        if offset + wanted <= data:
            pieces.append(_HOLE[:wanted])
            offset += wanted
            continue
        piece = os.pread(file.fd, wanted, offset)
        if not piece:
            break
        reads += 1
        read_bytes += len(piece)
        pieces.append(piece)
        offset += len(piece)
    return Turn(pieces, reads, read_bytes)


def _next_data(file: SourceFile, offset: int) -> int:
    """The begin of the next data at or after ``offset``; called only for a sparse file."""
    status = file.status
    if status.st_blocks * 512 >= status.st_size:
        return offset
    try:
        return os.lseek(file.fd, offset, os.SEEK_DATA)
    except OSError as error:
        # ENXIO: no data follow. Other errors: the file system does not support SEEK_DATA.
        return status.st_size if error.errno == errno.ENXIO else offset


def _check_unchanged(file: SourceFile, identity: Identity) -> None:
    """Raises SourceChanged if the file changed since it was opened, and OSError."""
    try:
        now = file.identity_now()
    except OSError as error:
        # A server may not keep an open file that another client unlinks.
        if error.errno in (errno.ENOENT, errno.ESTALE):
            raise SourceChanged("the file was removed while it was copied") from error
        raise
    if now != identity:
        raise SourceChanged("the file changed while it was copied")
    failpoints.failpoint("copy-compared")
