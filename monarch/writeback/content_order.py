"""Decides which recorded contents are drained, and which are replaced by a later content.

An object holds the newest bytes only. Suppose that a file is written again before an earlier
content is drained. If the newer bytes were drained in its place, they would be at the source before
other files that they refer to. So the earlier content is left out, and the bytes are drained with
the later one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import trio

from monarch.writeback.journal import Replay
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.op import Op
from monarch.writeback.queue_entry import Entry
from monarch.writeback.source_state import SourceState

# How long a content of a file that is appended to and synced repeatedly waits for the last one, in
# seconds.
_PUT_OFF_S = 10.0


class ContentOrder:
    """The contents, renames and changes of attributes that wait, by object.

    A content that was left out for a later one is *met* when that one is at the source; ``unmet``
    are the numbers of the changes that were made whose bytes the source lacks.
    """

    def __init__(self, state: SourceState, files: ObjectTable) -> None:
        self._state = state
        self._files = files
        # The waiting changes by object, then by sequence number.
        self._coming: dict[int, dict[int, Op]] = {}
        # Sequence numbers of contents that were left out for a later one: by object, and of all
        # objects.
        self._gave_way: dict[int, list[int]] = {}
        self.unmet: set[int] = set()
        # The time since when contents of an object have been left out.
        self._put_off_s: dict[int, float] = {}
        # Objects whose bytes were moved to a staged file at the source: contents that were recorded
        # before come with those bytes.
        self._write_through: set[int] = set()
        # Paths of files whose bytes the tier has lost, by object.
        self.lost: dict[int, bytes] = {}

    def load(self, replay: Replay) -> None:
        """Takes over the changes of an earlier mount. Must be called before all other methods."""
        for seq, op in replay.ops:
            if seq not in replay.done or op.kind == "through":
                self.expect(seq, op)

    def expect(self, seq: int, op: Op) -> None:
        """Adds a change that was put into the queue."""
        if op.kind == "through":
            self._write_through.add(op.object)
        if op.object and op.kind in ("content", "rename", "attr"):
            self._coming.setdefault(op.object, {})[seq] = op

    def settle(self, entry: Entry) -> None:
        """Removes a change that was made, or need not be made."""
        op, number = entry.op, entry.op.object
        coming = self._coming.get(number)
        if coming is None or coming.pop(entry.seq, None) is None:
            return
        if not coming:
            del self._coming[number]
        if op.kind == "content" and entry.seq not in self.unmet:
            self._put_off_s.pop(number, None)
            self.unmet.difference_update(self._gave_way.pop(number, ()))

    def behind(self, entry: Entry) -> Iterator[Op]:
        """The expected changes of the same object behind ``entry``, in their order."""
        coming = self._coming.get(entry.op.object, {})
        return (op for seq, op in coming.items() if seq > entry.seq)

    def later(self, entry: Entry) -> Op | None:
        """The next content of the same object; None if there is none."""
        return next((op for op in self.behind(entry) if op.kind == "content"), None)

    def is_intact(self, entry: Entry) -> bool:
        """Whether the object still begins with the recorded bytes."""
        size = entry.op.size
        return self._files.lowest(entry.op.object) >= size and all(
            op.intact >= size for op in self.behind(entry) if op.kind == "content"
        )

    def is_skipped(self, entry: Entry) -> bool:
        """Whether a content is left out for good: of a removed file, or drained in another way."""
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
        """Whether a content is left out in its turn: as ``is_skipped``, or for a later content."""
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
        """Marks a change as met only when the next content of its object is."""
        self._gave_way.setdefault(entry.op.object, []).append(entry.seq)
        self.unmet.add(entry.seq)

    def _gives_way(self, entry: Entry) -> bool:
        """Whether a content is left out for a later one of the same file. Until then the source
        keeps the bytes that it has of the file."""
        op, number = entry.op, entry.op.object
        later = self.later(entry)
        if op.same or op.through or later is None:
            return False
        if op.by != later.by or not set(op.also) <= {op.by, *later.also}:
            # The bytes of each user are drained with the rights of that user.
            return False
        if entry.was_tried and len(op.paths) > 1 and self._state.unmarked(number):
            # Some of the file's names may be those of the new file already, others those of the old
            # one.
            return False
        is_there = self._state.has_older(number)
        if is_there and self._is_renamed_first(entry):
            # The file would lose its old name before its new bytes are there.
            return False
        since_s = self._put_off_s.get(number, math.inf)
        is_due = not is_there or trio.current_time() - since_s >= _PUT_OFF_S
        return not (is_due and self.is_intact(entry))

    def _is_renamed_first(self, entry: Entry) -> bool:
        """Whether the file is renamed before its next content."""
        kinds = (op.kind for op in self.behind(entry) if op.kind != "attr")
        return next(kinds, "") == "rename"
