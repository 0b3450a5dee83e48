"""Which changes the source has for good, and callers that wait for them."""

from __future__ import annotations

import os

from monarch.posix.credentials import USER_BITS
from monarch.writeback.content_order import ContentOrder
from monarch.writeback.drain_queue import DrainQueue
from monarch.writeback.entry import Entry
from monarch.writeback.journal import Replay
from monarch.writeback.op import Op, above
from monarch.writeback.trouble import Trouble
from monarch.writeback.wakeups import Wakeups


class Progress:
    """Belongs to the event loop. Changes are known by their number in the journal.

    While a caller waits, pauses of the drain after a failure end early.
    """

    def __init__(
        self, queue: DrainQueue, order: ContentOrder, trouble: Trouble, wakeups: Wakeups
    ) -> None:
        self._queue = queue
        self._order = order
        self._trouble = trouble
        self._wakeups = wakeups
        # The source has all changes up to the first number, and these of the later ones.
        self._done_upto = 0
        self._done_beyond: set[int] = set()

    def load(self, replay: Replay) -> None:
        """Take over which changes an earlier mount has made. Before any other call."""
        first = next((seq for seq, _ in replay.ops if seq not in replay.done), None)
        for seq, _ in replay.ops:
            if first is None or seq < first:
                self._done_upto = seq
            elif seq in replay.done:
                self._done_beyond.add(seq)

    def note_done(self, seq: int) -> None:
        """A change was made, and is not in the queue any more."""
        first = self._queue.first_seq
        self._done_beyond.add(seq)
        # Later changes may have been made while this one was held.
        upto = first - 1 if first else max(self._done_beyond)
        self._done_upto = max(self._done_upto, upto)
        if not self._queue.held.entries:
            self._done_beyond = {done for done in self._done_beyond if done > self._done_upto}

    def is_done(self, seq: int) -> bool:
        """Whether the source has that change for good, and all that it depends on."""
        is_made = seq <= self._done_upto or seq in self._done_beyond
        return is_made and self._order.is_met(seq)

    def has_all(self, seq: int) -> bool:
        """Whether the source has all changes up to ``seq`` for good."""
        return seq <= self._done_upto and self._order.is_met_upto(seq)

    async def wait(self, seq: int) -> None:
        """Until the source has that change."""
        await self._wakeups.until(lambda: self.is_done(seq))

    async def wait_or_fail(self, seq: int) -> None:
        """Until the source has that change.

        Raises OSError with what the source answers, if it takes nothing, or not that change.
        """
        stops = self._trouble.stops

        def held() -> Entry | None:
            return next((each for each in self._queue.held.entries if each.seq == seq), None)

        await self._wakeups.until(
            lambda: self.is_done(seq) or self._trouble.stops > stops or held() is not None
        )
        if not self.is_done(seq):
            entry = held()
            number = self._trouble.answer if entry is None else entry.answer
            raise OSError(number, os.strerror(number))

    async def wait_all(self, seq: int) -> None:
        """Until the source has all changes up to ``seq``."""
        await self._wakeups.until(lambda: self.has_all(seq))

    async def settle(self) -> None:
        """Until the source has all changes that were recorded by now."""
        await self.wait_all(self._queue.last_seq)

    async def come_to_rest(self) -> None:
        """Until the source has all changes that were recorded by now but what it refuses."""
        seq = self._queue.last_seq
        await self._wakeups.until(lambda: self._has_all_but_held(seq))

    async def wait_for(self, path: bytes, *, object: int, user: int | None) -> None:
        """Until the source has all changes that were recorded by now and concern the caller.

        These are all changes that the source takes, and, of what it refuses, the changes of the
        ``object`` and of the ``user``. Only the low bits of that number count (USER_BITS). If it is
        None, changes of the path, of the names directly in it, and of the directories above count.
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
                self._has_all_but_held(seq)
                and not any(
                    entry.seq <= seq and concerns(entry.op) for entry in self._queue.held.entries
                )
            )
        )

    async def settle_path(self, path: bytes) -> None:
        """Until the source has all changes that were recorded by now of a path, and of the
        directories above, but what it refuses."""
        seq = self._queue.last_seq

        def concerns(op: Op) -> bool:
            return any(name == path or path.startswith(name + b"/") for name in op.names())

        queue = self._queue
        await self._wakeups.until(
            lambda: (
                not any(
                    entry.seq <= seq and concerns(entry.op) for entry in queue.first(len(queue))
                )
            )
        )

    async def retry(self) -> None:
        """Until every change that the source refuses has been tried once more."""
        refused = [entry for entry in self._queue.entries() if entry.refusal]
        before = self._queue.held.retries
        if refused:
            await self._wakeups.until(
                lambda: (
                    self._queue.held.retries > before
                    and all(entry.is_held or self.is_done(entry.seq) for entry in refused)
                )
            )

    async def come_to_hold(self) -> None:
        """Until no change that was refused is tried at this moment."""
        queue = self._queue
        await self._wakeups.until(
            lambda: not any(entry.refusal for entry in queue.first(len(queue)))
        )

    def _has_all_but_held(self, seq: int) -> bool:
        return not self._queue or self._queue.front.seq > seq
