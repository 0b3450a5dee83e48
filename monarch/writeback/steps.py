"""How each change is made at the source."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from monarch.posix.credentials import Credentials
from monarch.types import Identity
from monarch.writeback.content_order import ContentOrder
from monarch.writeback.drain_queue import Entry
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.op import Op
from monarch.writeback.source_contents import Place
from monarch.writeback.source_state import SourceState
from monarch.writeback.source_writer import SourceWriter, Step

T = TypeVar("T")

_SET_ID = stat.S_ISUID | stat.S_ISGID


@dataclass(eq=False, repr=False)
class Steps:
    """Each method returns a call to the source as a function, to be run in a worker thread."""

    _writer: SourceWriter
    _state: SourceState
    _order: ContentOrder
    _files: ObjectTable

    def of(self, entry: Entry) -> Step | None:
        """The call that makes a change; None if nothing has to be done at the source."""
        op, entries, state = entry.op, self._writer.entries, self._state
        absent = bool(op.object) and not state.is_present(op.object)
        expected = state.expected(entry.seq, op)
        if op.kind == "content" and entry.is_moot:
            return partial(self._writer.publishing.discard, op=op) if entry.was_tried else None
        if entry.is_moot or state.is_given_up(op):
            return None
        match op.kind:
            case "create" | "take":
                # Later changes of the same turn depend on this.
                state.note(op, None)
                return None
            case "through" | "gone":
                return None
            case "content":
                return self._of_content(entry)
            case "rename" if absent:
                # The entry under the new name stays until the content is drained, with that name.
                is_lost = op.object in self._order.lost
                return None if is_lost else partial(entries.unlink, op=op, expected=expected)
            case "rename":
                over = state.expected_over(op)
                return partial(entries.rename, op=op, expected=expected, over=over)
            case "link" if absent:
                return None
            case "mkdir" | "symlink" | "mknod" | "unlink" | "rmdir" | "link":
                changes = {
                    "mkdir": entries.mkdir,
                    "symlink": entries.symlink,
                    "mknod": entries.mknod,
                    "unlink": entries.unlink,
                    "rmdir": entries.rmdir,
                    "link": entries.link,
                }
                return partial(changes[op.kind], op=op, expected=expected)
            case "attr" | "xattr":
                # A file whose content was left out keeps its older version at the source.
                if absent and not state.has_older(op.object):
                    return None
                op = self._with_bits_that_stay(entry)
                will_come = absent and self._order.later(entry) is not None
                change = entries.change_attributes
                return partial(change, op=op, expected=expected, will_come=will_come)

    def _of_content(self, entry: Entry) -> Step | None:
        op, publishing = entry.op, self._writer.publishing
        expected = self._state.expected(entry.seq, op)
        if entry.skipped:
            is_ours = entry.was_tried and not op.through
            return partial(publishing.discard, op=op) if is_ours else None
        if entry.staged is not None:
            assert entry.place is not None
            staged, place = self._as_staged(entry, entry.staged), entry.place
            size = entry.staged.size
            return partial(publishing.publish, op=staged, size=size, place=place, expected=expected)
        if entry.is_grown:
            return partial(publishing.grown, op=op, expected=expected, tried=entry.was_tried)
        return partial(publishing.look_at_same, op=op, expected=expected)

    def opening(self, entry: Entry, *, make: bool) -> Callable[[], int]:
        """Opens the empty staged file of a content; with ``make`` its directory is made."""
        place = entry.place = Place()
        expected = self._state.expected(entry.seq, entry.op)
        return partial(self._writer.staged.open_place, entry.op, place, expected, make=make)

    def applying(self, entry: Entry, staged: Identity) -> Callable[[int], None]:
        """Gives a staged file, by its descriptor, the attributes of the file."""
        assert entry.place is not None
        return partial(
            self._writer.staged.apply_attributes,
            op=self._as_staged(entry, staged),
            place=entry.place,
            expected=self._state.expected(entry.seq, entry.op),
        )

    def finishing(self, entry: Entry) -> Callable[[], tuple[int, Identity | None]]:
        """As ``StagedContents.finish_part``."""
        place = entry.place = Place()
        expected = self._state.expected(entry.seq, entry.op)
        return partial(self._writer.staged.finish_part, entry.op, place, expected)

    def opening_to_grow(
        self, entry: Entry, base: int
    ) -> Callable[[], tuple[int, Credentials | None] | None]:
        """As ``Publishing.open_to_grow``."""
        expected = self._state.expected(entry.seq, entry.op)
        return partial(self._writer.publishing.open_to_grow, entry.op, expected, base)

    def lacks_its_file(self, entry: Entry, step: Step | None) -> bool:
        """Whether the source has no file that a rename or link could give its name.

        ``step`` was made, and has left no entry at the source. Others have removed that file, or
        its directory. Either the change found no file, or an earlier mount marked the file's last
        content as drained without one.
        """
        op, number = entry.op, entry.op.object
        if op.kind not in ("rename", "link") or not number:
            return False
        if self._state.is_present(number):
            return step is not None
        return not (
            entry.is_moot
            or self._state.is_given_up(op)
            or number in self._order.lost
            or self._order.later(entry) is not None
            # The close of a file that is being written records a content.
            or self._files.is_written(number)
        )

    def _as_staged(self, entry: Entry, version: Identity) -> Op:
        """A content in the version that was staged: its bytes may be newer than the record."""
        op = self._with_bits_that_stay(entry)
        if (version.size, version.mtime_ns) == (op.size, op.mtime_ns):
            return op
        # Other users may have written the newer bytes, which must not run with the rights of the
        # owner. Their own record, or a later change of the mode, sets the remaining bits.
        mode = None if op.mode is None else op.mode & ~_SET_ID
        return replace(op, mtime_ns=version.mtime_ns, mode=mode)

    def _with_bits_that_stay(self, entry: Entry) -> Op:
        """A change without the set-ID bits that a later change of the same file removes.

        A process that writes into a program removes these bits. The newest bytes are drained,
        perhaps before that change is, and they must not run with the rights of the owner.
        """
        op = entry.op
        if not op.object or op.mode is None or not op.mode & _SET_ID:
            return op
        mode = op.mode
        if op.kind == "attr" and self._files.is_written(op.object):
            mode &= ~_SET_ID
        for later in self._order.behind(entry):
            if later.kind in ("content", "attr") and later.mode is not None:
                mode &= later.mode | ~_SET_ID
        return replace(op, mode=mode)


def with_rights_to_read(content: Op) -> Op:
    """A content that no process has written on the mount, by the owner of the file: the user who
    renames a file may lack the right to read its bytes."""
    by = content.by
    if by is None or by.is_root or by.uid == content.uid:
        return content
    return replace(content, by=Credentials(content.uid or 0, content.gid or 0))
