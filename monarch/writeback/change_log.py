"""Changes as they are made: each goes into the journal, and from there to the drain."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from dataclasses import replace

from monarch.errors import Refused
from monarch.posix.credentials import can_act_as_others
from monarch.text import errno_words
from monarch.writeback.drain import Drain
from monarch.writeback.journal import Journal
from monarch.writeback.object_states import ObjectStates
from monarch.writeback.objects import Objects
from monarch.writeback.op import Op
from monarch.writeback.tier_objects import FULL, TierObjects

log = logging.getLogger(__name__)


class ChangeLog:
    """Belongs to the event loop. ``is_broken``: the journal has failed, so nothing can be changed
    until the next mount."""

    def __init__(
        self, journal: Journal, drain: Drain, states: ObjectStates, objects: TierObjects
    ) -> None:
        self._journal = journal
        self._drain = drain
        self._states = states
        self._objects = objects
        # A daemon with one identity makes all changes as that: no record has to say whose it is.
        self._acts_as_others = can_act_as_others()
        # Changes that were made and did not fit into the journal, in order.
        self._delayed: list[Op] = []
        self.is_broken = False

    def note(self, op: Op) -> int:
        """Record a change and hand it to the drain; its number in the journal.

        Raises Refused if the journal does not take it: the tree is then one change ahead of the
        record. If the disk is full, the change is recorded when there is room, before all later
        ones. A content is not: its bytes may be others by then. After another failure no change of
        names is made any more.
        """
        # A copy of an operation takes longer than making one.
        if not self._acts_as_others and (op.by is not None or op.also):
            op = replace(op, strict=True, by=None, also=())
        elif not op.strict:
            op = replace(op, strict=True)
        if self._delayed:
            self.note_delayed()
        try:
            if self._delayed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            seq = self._journal.append(op)
        except OSError as error:
            number = error.errno or errno.EIO
            if number in FULL:
                if op.kind != "content":
                    self._delayed.append(op)
            elif not self.is_broken:
                log.error("the journal cannot be written: %s; remount", errno_words(number))
                self.is_broken = True
            self._objects.count_failure(number)
            raise Refused(number) from error
        return self._noted(seq, op)

    def _noted(self, seq: int, op: Op) -> int:
        if op.object and op.kind != "gone":
            self._states.noted(op.object, seq)
        self._drain.put(seq, op)
        return seq

    def note_delayed(self) -> None:
        """Record the changes for which the disk had no room, as far as it has now."""
        while self._delayed:
            op = self._delayed[0]
            try:
                seq = self._journal.append(op)
            except OSError:
                return
            del self._delayed[0]
            self._noted(seq, op)
            if op.kind == "gone":
                self.start_removal(op.object)

    def has_room(self) -> bool:
        """Whether the journal takes another change."""
        return not self._delayed and self._journal.has_room()

    async def sync(self) -> None:
        """Make the changes so far safe. Raises Refused."""
        await self._objects.run_sync(self._journal.sync)

    def remove_object(self, number: int) -> None:
        """Record that an object has no file any more, and remove it."""
        # Its room is free once it is closed.
        self._objects.close_pending()
        # If that cannot be recorded, it stays, and the next mount removes it.
        with suppress(Refused):
            self.note(Op(kind="gone", object=number))
            self.start_removal(number)

    def start_removal(self, number: int) -> None:
        """Remove an object that no file has, by the changes so far."""
        self._objects.start_sync(_remove, self._journal, self._objects.on_disk, number)


def _remove(journal: Journal, objects: Objects, number: int) -> None:
    """Remove an object once the record is safe by which no file has it. Raises OSError."""
    journal.sync()
    objects.remove(number)
