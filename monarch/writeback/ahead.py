"""Stages contents ahead of their turn, several at once, since moving their bytes takes long."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from monarch.errors import Refused
from monarch.writeback.content_order import ContentOrder
from monarch.writeback.drain_queue import DrainQueue, Entry
from monarch.writeback.mover import Courtesy
from monarch.writeback.op import above
from monarch.writeback.source_state import SourceState
from monarch.writeback.stager import Stager
from monarch.writeback.wakeups import Trouble, Wakeups

# The number of changes of the queue that are searched for contents to stage, and the number of
# contents staged ahead at a time. Staged files take room at the source.
_WINDOW = 512
_MOST_STAGED = 128
# The most small contents in one lot.
_LOT = 32
# How long a search waits for further contents after the first one was recorded, in seconds. A
# process that writes many files would cause a search for each of them.
_GATHER_S = 0.01


@dataclass(eq=False, repr=False)
class StageAhead:
    """Stages contents ahead of their turn, in ``workers`` tasks. Belongs to the event loop."""

    _queue: DrainQueue
    _state: SourceState
    _order: ContentOrder
    _stager: Stager
    _courtesy: Courtesy
    _trouble: Trouble
    _wakeups: Wakeups
    _workers: int

    async def run(self) -> None:
        """Stages contents ahead of their turn, until cancelled."""
        found, lots = trio.open_memory_channel[list[Entry]](0)
        async with trio.open_nursery() as nursery:
            for _ in range(self._workers):
                nursery.start_soon(self._stage, lots)
            while True:
                try:
                    next_lots = self.next_lots()
                except Refused:
                    # Some names cannot be read now. The change at the front of the queue will
                    # report that.
                    next_lots = []
                for lot in next_lots:
                    await found.send(lot)
                if not next_lots:
                    await self._wakeups.content()
                    await trio.sleep(_GATHER_S)

    async def _stage(self, lots: trio.MemoryReceiveChannel[list[Entry]]) -> None:
        async for lot in lots:
            # The drain may have made, or begun, some of them while the lot waited for this task.
            try:
                waiting = [it for it in lot if self._is_waiting(it) and self._may_be_staged(it)]
            except Refused:
                continue
            if len(waiting) > 1:
                await self._stager.stage_lot(waiting)
            elif waiting:
                await self._stager.stage(waiting[0], in_turn=False)

    def next_lots(self) -> list[list[Entry]]:
        """Chooses the contents to stage next: a large one, or up to one lot of small ones for each
        worker. Raises Refused.

        A content may be staged before its turn if no earlier change of the same object, of its
        names or of the directories above them waits.
        """
        if self._trouble.reason is not None or self._stager.count >= _MOST_STAGED:
            return []
        if self._courtesy.lets_write(self._queue):
            return []
        found: list[Entry] = []
        objects: set[int] = set()
        changing: set[bytes] = set()
        named: set[bytes] = set()
        for entry in self._queue.first(_WINDOW):
            op = entry.op
            if op.kind == "content":
                if (
                    op.object not in objects
                    and named.isdisjoint(op.paths)
                    and changing.isdisjoint(above(op.path))
                    and self._may_be_staged(entry)
                ):
                    if not self._stager.is_small(entry):
                        return self._shared(found) if found else [[entry]]
                    found.append(entry)
                    if len(found) == _LOT * self._workers:
                        break
                objects.add(op.object)
            elif op.kind in ("mkdir", "rmdir", "rename", "symlink"):
                changing.update(op.names())
            if op.object and op.kind in ("attr", "xattr", "link", "rename"):
                # The next content of the file needs the attributes of this change, so it waits.
                objects.add(op.object)
            if op.kind not in ("content", "attr", "xattr", "create", "take"):
                named.update(op.names())
        return self._shared(found)

    def _shared(self, small: list[Entry]) -> list[list[Entry]]:
        """The lots of small contents: about the same number for each worker."""
        size = -(-len(small) // self._workers)
        return [small[at : at + size] for at in range(0, len(small), size)] if small else []

    def _is_waiting(self, entry: Entry) -> bool:
        return len(self._queue) > 0 and entry.seq >= self._queue.front.seq

    def _may_be_staged(self, entry: Entry) -> bool:
        is_idle = not (entry.is_staging or entry.was_ahead or entry.is_ready)
        return (
            is_idle
            and not entry.op.same
            and not self._queue.is_behind(entry)
            and self._order.later(entry) is None
            and self._state.grows_from(entry.op) is None
            and not self._order.is_skipped(entry)
        )
