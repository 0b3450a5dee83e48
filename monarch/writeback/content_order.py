"""Which recorded contents are brought to the source, and which come with a later one.

An object holds the newest bytes only. If a file is written again before an earlier content has had
its turn, bringing the newer bytes in the earlier place would let them be at the source before
other files that they refer to. So the earlier content is left out, and its bytes come in the place
of the later one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import trio

from monarch.writeback.entry import Entry
from monarch.writeback.journal import Replay
from monarch.writeback.op import Op
from monarch.writeback.source_state import SourceState

# A file that is appended to and synced again and again waits for its last content, but is put off
# for no longer than this. Seconds.
_PUT_OFF_S = 10.0


class FileUse(Protocol):
    """What processes do with the file of an object. Called on the event loop."""

    def is_dead(self, object: int) -> bool:
        """Whether it has no name any more."""
        ...

    def is_written(self, object: int) -> bool:
        """Whether a process has it open for writing."""
        ...

    def lowest(self, object: int) -> int:
        """The lowest offset at which bytes were changed since the last content was recorded; more
        than any size if none were."""
        ...


class ContentOrder:
    """The contents, renames and changes of attributes that wait, by object; and the contents that
    have given way to a later one, which are *met* when that one is at the source."""

    def __init__(self, state: SourceState, files: FileUse) -> None:
        self._state = state
        self._files = files
        # By object, then by number.
        self._coming: dict[int, dict[int, Op]] = {}
        # Contents that have given way, by object, and of all objects.
        self._gave_way: dict[int, list[int]] = {}
        self._unmet: set[int] = set()
        # Since when an object has been put off.
        self._put_off_s: dict[int, float] = {}
        # Objects whose bytes an earlier mount has moved into a staged file at the source: contents
        # that were recorded before that come with those bytes.
        self._write_through: set[int] = set()
        # Paths of files whose bytes the tier has lost, by object.
        self.lost: dict[int, bytes] = {}

    def load(self, replay: Replay) -> None:
        """Take over what an earlier mount has left. Before any other call."""
        for seq, op in replay.ops:
            if op.kind == "through":
                self._write_through.add(op.object)
            if seq not in replay.done:
                self.expect(seq, op)

    def expect(self, seq: int, op: Op) -> None:
        """A change was put into the queue."""
        if op.object and op.kind in ("content", "rename", "attr"):
            self._coming.setdefault(op.object, {})[seq] = op

    def settle(self, entry: Entry) -> None:
        """A change was made, or does not need to be made."""
        op, number = entry.op, entry.op.object
        coming = self._coming.get(number)
        if coming is None or coming.pop(entry.seq, None) is None:
            return
        if not coming:
            del self._coming[number]
        if op.kind == "content" and entry.seq not in self._unmet:
            self._put_off_s.pop(number, None)
            self._unmet.difference_update(self._gave_way.pop(number, ()))

    def behind(self, entry: Entry) -> Iterator[Op]:
        """Contents, renames and changes of attributes of the same object that wait behind a
        content, in their order."""
        coming = self._coming.get(entry.op.object, {})
        return (op for seq, op in coming.items() if seq > entry.seq)

    def later(self, entry: Entry) -> Op | None:
        """The next content of the same object; None if there is none."""
        return next((op for op in self.behind(entry) if op.kind == "content"), None)

    def is_intact(self, entry: Entry) -> bool:
        """Whether the object begins with the bytes that were recorded: it was only appended to
        since."""
        size = entry.op.size
        return self._files.lowest(entry.op.object) >= size and all(
            op.intact >= size for op in self.behind(entry) if op.kind == "content"
        )

    def is_met(self, seq: int) -> bool:
        """Whether a change that was made has its bytes at the source as well."""
        return seq not in self._unmet

    def is_met_upto(self, seq: int) -> bool:
        """Whether all changes up to ``seq`` that were made have their bytes at the source."""
        return min(self._unmet, default=seq + 1) > seq

    def is_skipped(self, entry: Entry) -> bool:
        """Whether a content is left out for good: its file is gone, or comes in another way."""
        number = entry.op.object
        entry.skipped = (
            entry.skipped
            or entry.is_moot
            or number in self.lost
            or (number in self._write_through and not entry.op.through)
            or self._files.is_dead(number)
        )
        return entry.skipped

    def is_left_out(self, entry: Entry) -> bool:
        """As ``is_skipped``, of a content whose turn it is: also if it gives way to a later one."""
        if self.is_skipped(entry):
            return True
        if entry.is_staging or entry.is_ready or not self._gives_way(entry):
            return False
        self._put_off_s.setdefault(entry.op.object, trio.current_time())
        self.await_later(entry)
        # The changes behind it in the same turn depend on this.
        self._state.note(entry.op, None)
        entry.skipped = True
        return True

    def await_later(self, entry: Entry) -> None:
        """A change is met when the next content of its object is."""
        self._gave_way.setdefault(entry.op.object, []).append(entry.seq)
        self._unmet.add(entry.seq)

    def _gives_way(self, entry: Entry) -> bool:
        """Whether a content comes in the place of a later one of the same file.

        What the source has of the file stays there until then.
        """
        op, number = entry.op, entry.op.object
        later = self.later(entry)
        if op.same or op.through or later is None:
            return False
        if op.by != later.by or not set(op.also) <= {op.by, *later.also}:
            # The bytes of each user come with the rights of that user.
            return False
        if entry.was_tried and len(op.paths) > 1 and self._state.may_be_published(number):
            # Some of its names may lead to the new file already, and others to the old one.
            return False
        is_there = self._state.has_older(number)
        if is_there and self._is_renamed_first(entry):
            # It would have to leave its old name before its new bytes come.
            return False
        since_s = self._put_off_s.get(number, math.inf)
        is_due = not is_there or trio.current_time() - since_s >= _PUT_OFF_S
        return not (is_due and self.is_intact(entry))

    def _is_renamed_first(self, entry: Entry) -> bool:
        """Whether its file gets another name before its next content."""
        kinds = (op.kind for op in self.behind(entry) if op.kind != "attr")
        return next(kinds, "") == "rename"
