"""The queue of all changes that are not at the source yet, in the order in which they were made."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from monarch.writeback.conflicts import PendingNames
from monarch.writeback.entry import Entry
from monarch.writeback.held import HeldChanges, Refusal
from monarch.writeback.source_log import Conflict

Paths = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Backlog:
    """The changes that are not at the source yet, and what was drained since the start.

    ``ops`` counts all changes; ``files`` counts the files with contents among them, and ``bytes``
    is the size of these files. ``oldest_ns`` is the time of the oldest change, in ns since the
    epoch; 0 if there is none. ``failures`` counts failed tries, and ``trouble`` describes the
    present failure. ``lost``: the paths of files whose bytes the tier has lost. ``moving_bytes`` of
    the files under way have reached the source. ``conflicts`` counts the conflicts with changes of
    others, and ``conflict`` is the last one. ``aside`` are the changes that are set aside;
    ``aside_ops`` counts these and the changes that wait for them. ``only_aside``: ``trouble`` is
    about a change that is set aside.
    """

    ops: int
    files: int
    bytes: int
    oldest_ns: int
    drained_files: int
    drained_bytes: int
    failures: int
    trouble: str | None
    lost: Paths
    moving_bytes: int = 0
    conflicts: int = 0
    conflict: Conflict | None = None
    aside: tuple[Refusal, ...] = ()
    aside_ops: int = 0
    only_aside: bool = False


class DrainQueue:
    """Belongs to the event loop. Changes that are ``held`` are before all others.

    ``waiting_bytes`` is the size of all waiting contents, in bytes; several contents of one file
    are added. ``last_synced`` is the sequence number of the last content that a process has synced.
    ``pending`` has the names of the waiting changes.
    """

    def __init__(self, held: HeldChanges) -> None:
        self.held = held
        self.waiting_bytes = 0
        self.last_synced = 0
        self._entries: deque[Entry] = deque()
        self.pending = PendingNames()

    def __len__(self) -> int:
        """The number of changes that are not held."""
        return len(self._entries)

    # -- the front ---------------------------------------------------------------------------

    @property
    def front(self) -> Entry:
        """The next change to be made. Raises IndexError if all waiting changes are held."""
        return self._entries[0]

    def first(self, count: int) -> Iterator[Entry]:
        """The first changes that are not held, up to ``count``."""
        return islice(self._entries, count)

    def append(self, entry: Entry) -> None:
        """Appends a change that was recorded."""
        if entry.op.synced:
            self.last_synced = entry.seq
        self._entries.append(entry)
        self.waiting_bytes += entry.op.size
        self.pending.add(entry.op)

    def remove_front(self) -> None:
        """Removes the change at the front: it was made, or need not be made."""
        op = self._entries.popleft().op
        self.pending.remove(op)
        self.waiting_bytes -= op.size

    def hold_front(self, error: OSError) -> None:
        """Holds the change at the front, which the source has refused."""
        self.held.refuse(self._entries.popleft(), error)

    def sift(self) -> None:
        """Holds the changes at the front that depend on a held one. When the pause is over, puts
        the held changes back, to be tried again."""
        if not self.held.entries:
            if not (self._entries and self.front.refusal):
                self.held.end_retries()
        elif self.held.is_due():
            self._entries.extendleft(reversed(self.held.release()))
        else:
            while self._entries and self.held.is_behind(self.front):
                self.held.add(self._entries.popleft())

    # -- all of them -------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        """All waiting changes, held or not, in their order."""
        return chain(self.held.entries, self._entries)

    @property
    def last_seq(self) -> int:
        """The sequence number of the last change that is not at the source; 0 if there is none."""
        last = self._entries or self.held.entries
        return last[-1].seq if last else 0

    def path_of(self, number: int) -> bytes | None:
        """The path at the source of the file of an object with a waiting change; None if it has
        none."""
        return next((entry.op.path for entry in self.entries() if entry.op.object == number), None)

    # -- what is refused ---------------------------------------------------------------------

    def refusals(self) -> list[Refusal]:
        """The changes that the source refuses, in their order."""
        return [
            Refusal(
                seq=entry.seq,
                kind=entry.op.kind,
                path=entry.op.to if entry.op.kind in ("rename", "link") else entry.op.path,
                why=entry.why,
                tries=entry.tries,
                is_aside=entry.is_aside,
            )
            for entry in self.entries()
            if entry.refusal and not entry.is_moot
        ]

    def refusal(self, *, is_aside: bool) -> str | None:
        """The first refusal as text: of the changes that are set aside, or of the others."""
        shown = chain(self.held.entries, self.first(1))
        return next((it.refusal for it in shown if it.refusal and it.is_aside is is_aside), None)

    def set_aside(self, seqs: Collection[int]) -> None:
        """Sets these refused changes aside: other changes of their users go first."""
        for entry in self.entries():
            if entry.refusal and entry.seq in seqs:
                self.held.put_aside(entry)
