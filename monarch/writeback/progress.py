"""The changes that are at the source for good: their marks in the journal, and the callers that
wait for them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from monarch.posix.credentials import USER_BITS
from monarch.posix.thread_pool import ThreadPool
from monarch.types import Identity
from monarch.writeback.conflicts import OF_DIRECTORIES, PathSet
from monarch.writeback.content_order import ContentOrder
from monarch.writeback.drain_queue import DrainQueue
from monarch.writeback.journal import Journal, Replay
from monarch.writeback.numbers import Numbers
from monarch.writeback.objects import of_tier
from monarch.writeback.op import Op, above, is_within
from monarch.writeback.queue_entry import Entry
from monarch.writeback.source_state import SourceState
from monarch.writeback.wakeups import Trouble, Wakeups


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
        """Marks that the staged files of contents will get these versions of their objects. After
        a crash this mark shows that they belong to this journal."""
        files: dict[Entry, tuple[int, Identity, int]] = {}
        for entry, version in lot.items():
            place = entry.place
            assert place is not None
            file = Identity(version.size, version.mtime_ns, 0, place.source_ino)
            files[entry] = entry.op.object, file, place.instead
        # A change that the source refuses is staged again with each try, often as the same file.
        if new := [each for entry, each in files.items() if each[1] != entry.marked]:
            with of_tier():
                self._journal.mark_staged(*new)
        for entry, each in files.items():
            entry.record, entry.marked = self._journal.file.written, each[1]
            self._state.note_staged(*each)

    def durable(self, *entries: Entry) -> None:
        """Marks that the objects of these contents are on the disk: without this mark the next
        mount after a power cut would doubt their bytes."""
        if entries:
            with of_tier():
                self._journal.mark_durable(*(entry.op.object for entry in entries))
        for entry in entries:
            entry.record = self._journal.file.written

    def lost(self, number: int) -> None:
        """Marks that the tier has lost the bytes of an object."""
        self._journal.mark_lost(number)

    def done(
        self,
        done: Mapping[int, Identity | None],
        *,
        upto: int,
        withheld: Mapping[int, int],
        removed: Collection[int],
    ) -> None:
        """Marks changes as drained: by their numbers, with identities, and all up to ``upto``.
        ``withheld`` and ``removed`` as of ``Journal.mark_done``."""
        with of_tier():
            self._journal.mark_done(done, upto=upto, withheld=withheld, removed=removed)
        self._last_mark = self._journal.file.written

    async def sync_done(self) -> None:
        """Waits until all marks are on the disk."""
        await self.sync(self._last_mark)
        self.unsynced.clear()

    async def sync(self, record: int) -> None:
        """Waits until the journal is on the disk up to a record.

        No change may be made at the source whose record a power cut could remove: the mount would
        then show an older state than the source has.
        """
        if self._journal.file.synced < record:
            with of_tier():
                await self._threads.run(self._journal.sync)


class Progress:
    """Belongs to the event loop. Changes are identified by their sequence numbers. While a caller
    waits, pauses of the drain after a failure end early."""

    def __init__(
        self, queue: DrainQueue, order: ContentOrder, trouble: Trouble, wakeups: Wakeups
    ) -> None:
        self._queue = queue
        self._order = order
        self._trouble = trouble
        self._wakeups = wakeups
        # All changes up to the first number are drained, and these of the later ones.
        self._done_upto = 0
        self._done_beyond = Numbers()
        # The greatest of all numbers.
        self._last_done = 0

    def load(self, replay: Replay) -> None:
        """Takes over what an earlier mount has drained. Must be called before all other methods."""
        first = next((seq for seq, _ in replay.ops if seq not in replay.done), None)
        for seq, _ in replay.ops:
            if first is None or seq < first:
                self._done_upto = seq
            elif seq in replay.done:
                self._done_beyond.add(seq)
            if seq in replay.done:
                self._last_done = seq

    def note_done(self, seq: int) -> None:
        """Records that a change was made and has left the queue."""
        first = next(self._queue.entries(), None)
        self._done_beyond.add(seq)
        self._last_done = max(self._last_done, seq)
        # Later changes may have been made while this one was held.
        upto = first.seq - 1 if first else self._last_done
        self._done_upto = max(self._done_upto, upto)
        if self._done_upto >= self._last_done:
            self._done_beyond = Numbers()

    def is_done(self, seq: int) -> bool:
        """Whether a change is drained for good, with all that it depends on."""
        is_made = seq <= self._done_upto or seq in self._done_beyond
        return is_made and seq not in self._order.unmet

    def has_all(self, seq: int) -> bool:
        """Whether all changes up to ``seq`` are drained for good."""
        return seq <= self._done_upto and min(self._order.unmet, default=seq + 1) > seq

    async def wait(self, seq: int) -> None:
        """Waits until a change is drained."""
        await self._wakeups.until(lambda: self.is_done(seq))

    async def wait_or_fail(self, seq: int) -> None:
        """As ``wait``; raises the source's OSError if it takes no change, or refuses this one."""
        stops = self._trouble.stops

        def held() -> Entry | None:
            entry = self._queue.held_entry(seq)
            # A full source is asked once more.
            return None if entry is None or entry.waits_for_room else entry

        await self._wakeups.until(
            lambda: self.is_done(seq) or self._trouble.stops > stops or held() is not None
        )
        if not self.is_done(seq):
            entry = held()
            number = self._trouble.answer if entry is None else entry.answer
            raise OSError(number, os.strerror(number))

    async def wait_all(self, seq: int) -> None:
        """Waits until all changes up to ``seq`` are drained."""
        await self._wakeups.until(lambda: self.has_all(seq))

    async def settle(self) -> None:
        """Waits until all changes recorded by now are drained."""
        await self.wait_all(self._queue.last_seq)

    async def wait_for(self, path: bytes, *, object: int, user: int | None) -> None:
        """Waits until all changes recorded by now that concern the caller are drained.

        All changes that the source does not refuse concern the caller, also those for which it is
        full. Of the refused ones, those of the ``object`` and of the ``user`` do. Only the low bits
        of the user's number are compared (USER_BITS). If it is None, changes of the path, of the
        names directly in it, and of the directories above concern the caller.
        """
        seq = self._queue.last_seq

        def concerns(op: Op) -> bool:
            if object and object in (op.object, op.over_object):
                return True
            if op.by is None or user is not None:
                return op.by is None or op.by.uid & USER_BITS == user
            beside = (path, *above(path))
            return any(name in beside or name.rpartition(b"/")[0] == path for name in op.names())

        await self._wakeups.until(
            lambda: (
                (not self._queue or self._queue.front.seq > seq)
                and not any(
                    entry.seq <= seq and (entry.waits_for_room or concerns(entry.op))
                    for entry in self._queue.held
                )
            )
        )

    def last_of_directories(self, path: bytes) -> int:
        """The sequence number of the last waiting change that creates, removes or moves a directory
        above ``path``; 0 if there is none."""
        if not self._queue.pending.has_directory_of(path):
            return 0
        return max(self._of_directories(path), default=0)

    def waiting_at(self, path: bytes) -> list[int]:
        """The numbers of the waiting changes at and beneath ``path``, and of those that create,
        remove or move a directory above it."""
        beneath = (
            entry.seq
            for entry in self._queue.entries()
            if any(is_within(name, path) for name in entry.op.names())
        )
        return [*beneath, *self._of_directories(path)]

    def _of_directories(self, path: bytes) -> Iterator[int]:
        directories = set(above(path))
        for entry in self._queue.entries():
            if entry.op.kind in OF_DIRECTORIES and not directories.isdisjoint(entry.op.names()):
                yield entry.seq

    async def settle_paths(self, paths: Collection[bytes]) -> None:
        """Waits until all changes recorded by now of ``paths``, and of the directories above, are
        drained, except for those that the source refuses."""
        seq = self._queue.last_seq
        all_paths = {each for path in paths for each in (path, *above(path))}

        def concerns(op: Op) -> bool:
            return not all_paths.isdisjoint(op.names())

        queue = self._queue
        await self._wakeups.until(
            lambda: (
                not any(entry.seq <= seq and concerns(entry.op) for entry in queue.not_refused())
            )
        )

    async def retry(self) -> None:
        """Waits until every refused change has been tried once more, or the first one if the source
        accepted none at all."""
        if self._trouble.reason is not None:
            stops = self._trouble.stops
            await self._wakeups.until(
                lambda: self._trouble.reason is None or self._trouble.stops > stops
            )
        refused = [entry for entry in self._queue.entries() if entry.refusal]
        before = self._queue.retries
        if refused:
            await self._wakeups.until(
                lambda: (
                    self._queue.retries > before
                    and all(entry.is_held or self.is_done(entry.seq) for entry in refused)
                )
            )

    async def come_to_hold(self) -> None:
        """Waits until no refused change is being tried."""
        queue = self._queue
        await self._wakeups.until(
            lambda: not any(entry.refusal for entry in queue.first(len(queue)))
        )
