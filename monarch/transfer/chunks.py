"""Reads chunks of a pack as a whole: a chunk is the unit in which a pack is promoted.

A chunk is read as a whole if placement admits it: then all its files become copies. Or if an
announced order has its files close together: then those without a copy go to the window, and its
bytes cross the network once an epoch. Of any other chunk a reader gets the extent of its file only:
a chunk that does not stay would cost many times the bytes that are asked for.

A chunk is read in pieces, behind its readers: a few pieces at a time (depth.py), one chunk after
the other, so that the bytes of the first are there while the next are read. A file that is opened
before its piece is read alone, and left out of the piece if that saves a read. Readers of the files
of a piece that is being read wait for it. A chunk that cannot be read is left to its readers for a
while, file by file.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from monarch.errors import MonarchError
from monarch.packmount.chunks import PackChunks
from monarch.placement.controller import Controller
from monarch.transfer.chunk_jobs import PIECE_BYTES, Job, Piece, Pieces
from monarch.transfer.chunk_plans import ChunkPlans, Plan, Uses
from monarch.transfer.depth import Depth
from monarch.transfer.engine import Engine
from monarch.transfer.queue import Flight
from monarch.transfer.source_reader import SourceReader
from monarch.transfer.window import Held
from monarch.types import Ino

log = logging.getLogger(__name__)

# The fewest pieces that are read at the same time, for sources with few calls and with more, and
# the most, short ones too, as a share of the source's calls.
_LEAST_DEPTH = 2, 3
_DEPTH_SHARE = 1 / 4
# Chunks for the window that are read ahead of their readers at the same time, and chunks that a
# caller with many may have begun.
_AHEAD = 4
# A chunk with a file that could not be read is not read as a whole for so long, in seconds.
_PAUSE_S = 10.0
# The interval in which it is checked again whether there is room for the next piece, in seconds.
_STEP_S = 0.01
# The entries of an announced order in which chunks are looked for, the chunks that are begun then,
# and the interval in seconds.
_LOOK_FILES = 1 << 16
_LOOK_CHUNKS = 16
_LOOK_S = 0.1
# Files that are handed over before the event loop runs other tasks.
_STRIDE = 64


class Coming(enum.Enum):
    """How a file will be read: ALONE, with its chunk, which is under way (TOGETHER), or with its
    chunk when there is room for it (LATER)."""

    ALONE = enum.auto()
    TOGETHER = enum.auto()
    LATER = enum.auto()


@dataclass(eq=False, repr=False)
class ChunkReads:
    """Belongs to the event loop. ``run`` is its task: without it each file is read alone."""

    _chunks: PackChunks
    _controller: Controller
    _engine: Engine
    _reader: SourceReader
    _uses: Uses

    def __post_init__(self) -> None:
        self._window = window = self._engine.window
        self._plans = ChunkPlans(self._chunks, self._controller, self._uses, window.most)
        self._pieces = Pieces(self._chunks, self._controller, self._engine, self._uses.next_use)
        self._nursery: trio.Nursery | None = None
        # Set when ``run`` has begun.
        self.has_begun = trio.Event()
        # The chunks that are being read, those with files that no piece has yet first: for readers,
        # and ahead of them.
        self._jobs: dict[int, Job] = {}
        self._opened: dict[int, Job] = {}
        self._foreseen: dict[int, Job] = {}
        fewest, least = _LEAST_DEPTH
        most = max(fewest, int(self._reader.limits.source_concurrency * _DEPTH_SHARE))
        self._depth, self._most = Depth(min(least, most), most), most
        # The pieces that are being read, and the bytes of their files.
        self._running = self._reading_bytes = 0
        self._looked_s = -math.inf
        self._woken = trio.Event()
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
        self._engine.backlog = self._files_left
        # Whether the chunks of announced orders are read ahead of their readers.
        self.looks_ahead = True

    async def run(self) -> None:
        """Reads what ``open``, ``ahead`` and ``warm`` begin, until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                self.has_begun.set()
                while True:
                    self._woken = trio.Event()
                    self._look_ahead()
                    is_blocked = self._begin_pieces()
                    pause_s = _LOOK_S if self._uses.has_orders else math.inf
                    with trio.move_on_after(_STEP_S if is_blocked else pause_s):
                        await self._woken.wait()
        finally:
            self._nursery, self._next = None, None
            for job in self._jobs.values():
                for piece in job.ready:
                    self._give_up(piece)
            for jobs in (self._jobs, self._opened, self._foreseen, self._waiting):
                jobs.clear()
            self._running = self._reading_bytes = 0

    def leave_to_readers(
        self, is_open: Callable[[Ino], bool], has_pages: Callable[[Ino], bool]
    ) -> None:
        """From now on files for which ``is_open`` returns True are left to their readers, and those
        for which ``has_pages`` does are not read ahead into the window: the kernel has them."""
        self._pieces.is_open = is_open
        self._plans.has_pages = has_pages

    def _files_left(self) -> int:
        """The files that will get a copy, and that no piece has yet."""
        return sum(len(job.left) for job in self._jobs.values() if job.plan.is_copied)

    # -- what is read as a whole -----------------------------------------------------------------

    def open(self, ino: Ino) -> Flight | Held | None:
        """Called when a reader needs a file that has no copy, or has read it alone: begins to read
        its chunk if that is to be read as a whole. Returns the flight of the file if its bytes come
        soon; None: the reader reads it alone."""
        self._begin(ino, forced=False)
        return self._engine.flight(ino)

    def warm(self, ino: Ino) -> bool:
        """As ``open``, for a user's request. Returns whether the file comes with its chunk."""
        self._begin(ino, forced=True)
        return self._engine.flight(ino) is not None

    def is_right(self, ino: Ino) -> None:
        """The datapath has read a file, and its bytes are right."""
        self._chunks.is_right(ino)

    def ahead(self, ino: Ino) -> Coming:
        """Called when a file is to be fetched ahead of its readers. Chunks are read in the order in
        which they are needed."""
        chunk = self._chunks.chunk_of(ino)
        if chunk is None or self._nursery is None or self._is_paused(chunk):
            return Coming.ALONE
        job = self._jobs.get(chunk)
        if job is not None and job.plan.is_copied:
            return Coming.TOGETHER
        if job is None and chunk not in self._waiting:
            plan = self._plans.of(ino, chunk, is_ahead=True)
            if plan is None:
                return Coming.ALONE
            if plan.is_copied:
                self._begin_job(chunk, plan, is_ahead=True)
                return Coming.TOGETHER
        if self._engine.flight(ino) is not None:
            return Coming.TOGETHER
        self._wait(chunk, ino)
        self.begin_waiting()
        return Coming.LATER if self._engine.flight(ino) is None else Coming.TOGETHER

    def is_coming(self, ino: Ino) -> bool:
        """Whether a file will get a copy with its chunk."""
        chunk = self._chunks.chunk_of(ino)
        job = None if chunk is None else self._jobs.get(chunk)
        return job is not None and job.plan.is_copied

    def _look_ahead(self) -> None:
        """Begins to read the chunks that announced orders need next, beyond the files that are
        foreseen one by one."""
        now, is_on = trio.current_time(), self.looks_ahead and self._uses.has_orders
        if not is_on or len(self._jobs) > _AHEAD or now < self._looked_s + _LOOK_S:
            return
        self._looked_s = now
        for entries in self._uses.following(_LOOK_FILES):
            known = [*self._jobs, *self._waiting]
            for ino in self._chunks.first_of_each(entries, known, _LOOK_CHUNKS):
                self.ahead(ino)

    def begin_waiting(self) -> None:
        """Begins to read the chunks that wait for the window, as many as there is room for."""
        next_use = self._uses.next_use
        while self._nursery is not None:
            if self._next is not None and self._still_waits(*self._next):
                return
            self._next = None
            # A chunk that is being read may bring the file, and keeps no other waiting.
            uses = {
                chunk: next_use(ino)
                for chunk, ino in self._waiting.items()
                if chunk not in self._jobs
            }
            if not uses:
                return
            chunk = min(uses, key=uses.__getitem__)
            ino = self._waiting[chunk]
            is_needed = uses[chunk] < math.inf and self._chunks.is_missing(ino)
            plan = self._plans.of(ino, chunk, is_ahead=True) if is_needed else None
            if plan is None or self._is_paused(chunk):
                del self._waiting[chunk]
            elif self._must_wait(chunk, plan.nbytes):
                self._next = chunk, plan.nbytes
                return
            else:
                self._begin_job(chunk, plan, is_ahead=True)

    def _wait(self, chunk: int, ino: Ino) -> None:
        before = self._waiting.get(chunk)
        if before is None or self._uses.next_use(ino) < self._uses.next_use(before):
            self._waiting[chunk] = ino
            # It may be needed before the one that has its turn.
            self._next = None

    def _still_waits(self, chunk: int, nbytes: int) -> bool:
        """Whether the chunk that has its turn is still to be read, and cannot be read now."""
        ino = None if chunk in self._jobs else self._waiting.get(chunk)
        is_needed = ino is not None and self._chunks.is_missing(ino)
        return is_needed and self._must_wait(chunk, nbytes)

    def _must_wait(self, chunk: int, nbytes: int) -> bool:
        """Whether a chunk cannot be read into the window now. Files that wait for a reader of this
        epoch must not divide the chunk for the next one."""
        return (
            len(self._foreseen) >= _AHEAD
            or not self._has_window(nbytes)
            or self._chunks.is_under_way(chunk)
        )

    def has_place(self) -> bool:
        """Whether another chunk may be read now for a caller that has many."""
        buffer = self._reader.buffer
        return len(self._jobs) < _AHEAD and buffer.used <= buffer.most // 2

    def _begin(self, ino: Ino, *, forced: bool) -> None:
        chunk = self._chunks.chunk_of(ino)
        if chunk is None or self._nursery is None or self._is_paused(chunk):
            return
        job = self._jobs.get(chunk)
        if job is not None:
            if self._foreseen.pop(chunk, None) is not None:
                self._opened[chunk] = job
                job.is_ahead = False
                self._woken.set()
            return
        plan = self._plans.of(ino, chunk, forced=forced)
        if plan is not None and self._has_room(plan):
            self._begin_job(chunk, plan, forced=forced)

    def _has_room(self, plan: Plan) -> bool:
        return plan.is_copied or self._has_window(plan.nbytes)

    def _has_window(self, nbytes: int) -> bool:
        promised = sum(job.promised for job in self._jobs.values())
        return self._window.has_room(nbytes + promised)

    def _is_paused(self, chunk: int) -> bool:
        until = self._failed.get(chunk)
        if until is None:
            return False
        if trio.current_time() < until:
            return True
        del self._failed[chunk]
        return False

    def _begin_job(
        self, chunk: int, plan: Plan, *, is_ahead: bool = False, forced: bool = False
    ) -> None:
        self._waiting.pop(chunk, None)
        job = Job(chunk, plan, is_ahead, forced, deque(plan.members), plan.nbytes)
        self._jobs[chunk] = job
        (self._foreseen if is_ahead else self._opened)[chunk] = job
        if forced:
            # The user sees at once which files have no place.
            while (piece := self._pieces.cut(job)) is not None:
                job.ready.append(piece)
        self._woken.set()
        self._begin_pieces()

    # -- pieces ----------------------------------------------------------------------------------

    def _begin_pieces(self) -> bool:
        """Begins to read pieces, as many as may be read now. Returns whether one waits for room."""
        while self._nursery is not None:
            job = next(iter(self._opened.values()), None) or next(
                iter(self._foreseen.values()), None
            )
            if job is None or not self._may_begin(job):
                return False
            if not (job.ready or self._has_room_now(job)):
                return True
            piece = job.ready.popleft() if job.ready else self._pieces.cut(job)
            if piece is None:
                self._opened.pop(job.chunk, None)
                self._foreseen.pop(job.chunk, None)
                self._end_job(job)
                continue
            job.pieces += 1
            self._running += 1
            self._reading_bytes += piece.nbytes
            self._nursery.start_soon(self._read, job, piece)
        return False

    def _may_begin(self, job: Job) -> bool:
        """Whether one more piece may be read beside the others. Where many files were read alone,
        pieces are short: then there are more, with no more bytes before those of a reader. Chunks
        for the window keep their order."""
        if self._running < self._depth.limit:
            return True
        most_bytes = (self._depth.limit - 1) * PIECE_BYTES
        is_short = self._running < self._most and self._reading_bytes <= most_bytes
        return is_short and job.plan.is_copied

    def _has_room_now(self, job: Job) -> bool:
        """Whether there is memory for one more piece. That for the window was promised."""
        if not job.plan.is_copied or not job.left:
            return True
        size, buffer = max(PIECE_BYTES, job.left[0].size), self._reader.buffer
        # What is read ahead leaves half of the buffer to readers.
        most = buffer.most // 2 if job.is_ahead else buffer.most
        return buffer.used + size <= most or not buffer.used

    def _end_job(self, job: Job) -> None:
        """Ends a job without a piece that is being read, and without files for one."""
        if job.pieces or job.left or job.ready or self._jobs.get(job.chunk) is not job:
            return
        del self._jobs[job.chunk]
        self.read += not job.is_failed
        self._window.on_room()

    # -- reading ---------------------------------------------------------------------------------

    async def _read(self, job: Job, piece: Piece) -> None:
        """Reads a piece, and hands over its files."""
        try:
            await self._hand_over(job, piece, *await self._fetched(job, piece))
        except (OSError, MonarchError) as error:
            self._fail(job)
            self._engine.hold_failed(piece.members[0].ino, error)
            log.debug("chunk %d: %s", job.chunk, error)
        finally:
            self._give_up(piece)
            job.pieces -= 1
            self._end_job(job)
            self._woken.set()
        # Not at the end of the mount, where each would be given up.
        self._begin_pieces()
        if not self._running:
            self._depth.idle()

    async def _fetched(
        self, job: Job, piece: Piece
    ) -> tuple[Sequence[memoryview | None], Sequence[memoryview | None]]:
        """The bytes of the files of a piece, and the copies of them that the datapath has. Raises
        OSError, MonarchError."""
        try:
            pause_s = self._reader.spend(piece.nbytes)
            if not job.is_near:
                # Copies keep within ``limits.source_bandwidth``; readers do not wait for it.
                await trio.sleep(pause_s)
            inos = [member.ino for member in piece.members]
            fetch = partial(self._chunks.fetch, piece.members)
            run, kept = await self._reader.fetch_together(inos, fetch)
        finally:
            self._running -= 1
            self._reading_bytes -= piece.nbytes
        if None in run.contents:
            self._fail(job)
        self._depth.ended(piece.nbytes, trio.current_time())
        return run.contents, kept

    def _fail(self, job: Job) -> None:
        """Leaves the rest of a chunk to its readers."""
        self._failed[job.chunk] = trio.current_time() + _PAUSE_S
        job.is_failed = True
        job.left.clear()
        job.left_bytes = 0
        while job.ready:
            self._give_up(job.ready.popleft())

    async def _hand_over(
        self,
        job: Job,
        piece: Piece,
        contents: Sequence[memoryview | None],
        kept: Sequence[memoryview | None],
    ) -> None:
        """Gives the files of a piece to their readers, to the tier and to the window. ``kept``: the
        copies of ``contents`` that the datapath has. The next piece is read meanwhile: the source
        must not wait for this."""
        for flight, content, copy in zip(piece.flights, contents, kept, strict=True):
            flight.is_kept = copy is not None
            if flight.arrival is not None:
                flight.arrival.content = content if copy is None else copy
        piece.done.set()
        self._begin_pieces()
        for member, content, copy in zip(piece.members, contents, kept, strict=True):
            is_here = self._end(piece, content if copy is None else copy)
            if job.is_ahead and is_here:
                self.fetched(member.ino, member.size)
            if piece.ended % _STRIDE == 0:
                await trio.sleep(0)

    def _give_up(self, piece: Piece) -> None:
        piece.done.set()
        while piece.ended < len(piece.flights):
            self._end(piece, None)

    def _end(self, piece: Piece, content: memoryview | None) -> bool:
        """Ends the next flight of a piece; returns whether its bytes are used."""
        flight = piece.flights[piece.ended]
        piece.ended += 1
        if isinstance(flight, Held):
            if content is not None and not flight.is_kept:
                # Its own bytes: a file that waits for its reader must not keep a whole piece.
                return self._window.end(flight, bytes(content))
            return self._window.end(flight, content)
        return self._engine.end_fetch(flight, content)


def _ignore(ino: Ino, nbytes: int) -> None:
    """Until ``fetched`` is set."""
