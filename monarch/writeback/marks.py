"""The drain's marks in the journal, and which of them are on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from monarch.posix.thread_pool import ThreadPool
from monarch.types import Identity
from monarch.writeback.conflicts import PathSet
from monarch.writeback.drain_queue import Entry
from monarch.writeback.journal import Journal
from monarch.writeback.source_state import SourceState


@dataclass(eq=False, repr=False)
class Marks:
    """Belongs to the event loop. Each method raises OSError if the journal cannot be written.

    ``unsynced`` has the paths of the changes that were made and whose marks may not be on the disk.
    Such a change is made again after a power cut. So another change of its paths has to wait for
    its mark.
    """

    _journal: Journal
    _threads: ThreadPool
    _state: SourceState
    unsynced: PathSet = field(default_factory=PathSet, init=False)
    # The record of the last mark of a drained change.
    _last_mark: int = field(default=0, init=False)

    def staged(self, lot: Mapping[Entry, Identity]) -> None:
        """Marks that the staged files of contents are about to be filled with these versions of
        their objects.

        After a crash this mark shows that they belong to this journal.
        """
        marks = []
        for entry, version in lot.items():
            assert entry.place is not None
            file = Identity(version.size, version.mtime_ns, 0, entry.place.source_ino)
            marks.append((entry.op.object, file))
        self._journal.mark_staged(*marks)
        for entry in lot:
            entry.record = self._journal.written
        for number, file in marks:
            self._state.note_staged(number, file)

    def durable(self, *entries: Entry) -> None:
        """Marks that the objects of these contents are on the disk.

        Without this mark the next mount after a power cut would doubt their bytes.
        """
        if entries:
            self._journal.mark_durable(*(entry.op.object for entry in entries))
        for entry in entries:
            entry.record = self._journal.written

    def lost(self, number: int) -> None:
        """Marks that the tier has lost the bytes of an object."""
        self._journal.mark_lost(number)

    def done(self, done: Mapping[int, Identity | None], *, upto: int) -> None:
        """Marks changes as drained, by sequence number with their identities, and all up to
        ``upto``."""
        self._journal.mark_done(done, upto=upto)
        self._last_mark = self._journal.written

    async def sync_done(self) -> None:
        """Waits until all marks are on the disk."""
        await self.sync(self._last_mark)
        self.unsynced.clear()

    async def sync(self, record: int) -> None:
        """Waits until the journal is on the disk up to a record.

        No change may be made at the source whose record a power cut could remove: the mount would
        then show an older state than the source has.
        """
        if self._journal.synced < record:
            await self._threads.run(self._journal.sync)
