"""Chunks of a pack that are being read, and the pieces in which they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from monarch.packmount.chunks import Member, PackChunks
from monarch.placement.controller import Controller
from monarch.placement.policy import Item
from monarch.text import KiB
from monarch.transfer.chunk_plans import Plan
from monarch.transfer.engine import Engine
from monarch.transfer.queue import Arrival, Flight
from monarch.transfer.window import Held
from monarch.types import Ino

# The most bytes of a piece. A reader that reads a file alone waits behind the pieces that are being
# read, in the queue of the source.
PIECE_BYTES = 512 * KiB
# The most bytes between two files of a piece, which are read too: in all no more than those of its
# files.
_GAP_BYTES = 64 * KiB
# The most bytes of a chunk whose readers wait for it: to read it takes about as long as a call.
_NEAR_BYTES = 256 * KiB


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
class Piece:
    """Files that are read at once, and the flight of each. ``done`` is set when their bytes have
    arrived, or will not; ``ended``: the number of flights that have ended."""

    members: list[Member]
    nbytes: int
    done: trio.Event = field(default_factory=trio.Event)
    flights: list[Flight | Held] = field(default_factory=list)
    ended: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """A chunk that is read as a whole. ``left``: the files that no piece has yet, in the order of
    their bytes; ``ready``: pieces whose flights have begun; ``pieces``: how many are being read."""

    chunk: int
    plan: Plan
    is_ahead: bool
    is_forced: bool
    left: deque[Member]
    left_bytes: int
    ready: deque[Piece] = field(default_factory=deque)
    pieces: int = 0
    is_failed: bool = False

    @property
    def is_near(self) -> bool:
        """Whether its readers wait for it."""
        return self.plan.nbytes <= _NEAR_BYTES

    @property
    def promised(self) -> int:
        """The bytes of the window that files without a piece will need."""
        return 0 if self.plan.is_copied else self.left_bytes


def _never(ino: Ino) -> bool:
    return False


@dataclass(slots=True)
class Pieces:
    """Divides chunks. ``_next_use`` returns the time of the next open of a file, and ``is_open``
    whether a process has a file open or is opening it, and so reads it alone."""

    _chunks: PackChunks
    _controller: Controller
    _engine: Engine
    _next_use: Callable[[Ino], float]
    is_open: Callable[[Ino], bool] = _never

    def cut(self, job: Job) -> Piece | None:
        """The next piece of a chunk, with its flights; None if all files have one, are read
        already, or have no place."""
        while job.left:
            members = self._next_members(job)
            if members and (piece := self._taken_off(job, members)) is not None:
                return piece
        return None

    def _next_members(self, job: Job) -> list[Member]:
        """The files of the next piece: those that are still to be read."""
        members: list[Member] = []
        size = gaps = kept = 0
        while job.left:
            member = job.left[0]
            gap = member.offset - members[-1].end if members else 0
            is_far = gap > _GAP_BYTES or size + gaps + gap + member.size > PIECE_BYTES
            if members and is_far:
                break
            job.left.popleft()
            job.left_bytes -= member.size
            if self._is_needed(job, member):
                members.append(member)
                size += member.size
                gaps += gap
                if gaps <= size:
                    kept = len(members)
        # With more bytes in gaps than in files: these are for later pieces.
        for member in reversed(members[kept:]):
            job.left.appendleft(member)
            job.left_bytes += member.size
        return members[:kept]

    def _is_needed(self, job: Job, member: Member) -> bool:
        if not self._chunks.is_missing(member.ino):
            return False
        if not (job.is_near or job.is_forced) and self.is_open(member.ino):
            return False
        return job.plan.is_copied or self._next_use(member.ino) <= job.plan.end

    def _taken_off(self, job: Job, members: list[Member]) -> Piece | None:
        """Begins the flights of files, if there is a place for them."""
        identity = self._chunks.identity
        piece = Piece(members, sum(member.size for member in members))
        if not job.plan.is_copied:
            piece.flights += [
                self._engine.window.begin(member.ino, identity(member), ChunkArrival(piece.done))
                for member in members
            ]
            return piece
        items = [Item(member.ino, member.size, member.number) for member in members]
        promotes = {
            promote.ino: promote
            for promote in self._controller.offered_together(items, forced=job.is_forced)
        }
        piece.members = [member for member in members if member.ino in promotes]
        piece.flights += [
            self._engine.begin_fetch(
                promotes[member.ino], identity(member), ChunkArrival(piece.done)
            )
            for member in piece.members
        ]
        return piece if piece.members else None
