"""How each change is made at the source."""

from __future__ import annotations

import stat
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from monarch.posix.credentials import Credentials
from monarch.types import Identity
from monarch.writeback.content_order import ContentOrder
from monarch.writeback.expected import Expected, is_time
from monarch.writeback.journal import Replay
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.op import Op
from monarch.writeback.queue_entry import Entry
from monarch.writeback.source_contents import Place, has_ended_rights, is_given_away
from monarch.writeback.source_directories import writer
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
    # Set-ID bits by object. The drain has withheld them from the file at the source until the next
    # content comes, ...
    _withheld: dict[int, int] = field(default_factory=dict, init=False)
    # ... or an earlier mount of a version that did not record that may have withheld them, and the
    # drain has changed nothing of the file since but other attributes.
    _doubtful: dict[int, int] = field(default_factory=dict, init=False)
    # Objects whose older version the drain itself has removed at the source, for a rename or unlink
    # on the mount, until their next content comes; and those that the journal does not mark yet.
    _removed: set[int] = field(default_factory=set, init=False)
    _removed_now: set[int] = field(default_factory=set, init=False)
    # Set-ID bits of objects that a staged file of an earlier mount may lack. It may have got the
    # name of the object without a mark.
    _lacking: dict[int, int] = field(default_factory=dict, init=False)
    # By object, those with a name that its file has taken on the mount, and not yet at the source.
    _replaced: dict[int, set[int]] = field(default_factory=dict, init=False)

    def load(self, replay: Replay) -> None:
        """Takes over the changes of an earlier mount. Must be called before all other methods."""
        # Objects whose file the source had, or has.
        there: set[int] = set()
        # Those that have no file there under their names: whether the drain or others have removed
        # the older version is not known.
        absent: set[int] = set()
        self._removed.update(replay.removed)
        if replay.known is not None:
            there |= replay.known.known.keys()
            absent |= there & replay.known.over.keys()
            self._doubtful.update(replay.known.set_id)
            self._withheld.update(replay.known.withheld)
        for seq, op in replay.ops:
            identity, number = replay.done.get(seq), op.object
            is_new = number not in there or (number in absent and not is_given_away(op))
            if op.kind == "take" or identity is not None:
                there.add(number)
                absent.discard(number)
            elif op.kind == "rename" and seq in replay.done:
                absent.add(number)
            if op.kind == "content" and seq not in replay.done:
                self._note_unmarked(op)
            if identity is None or not number:
                continue
            if op.kind not in ("attr", "xattr") or op.mode is not None:
                self._doubtful.pop(number, None)
            if (bits := replay.withheld.get(seq)) is not None:
                self._withheld[number] = bits
                continue
            if _is_noted(op):
                self._withheld.pop(number, None)
            if op.kind == "attr" and op.mode is not None:
                # The earlier mount may have withheld them. The time of change at the source shows
                # whether others have changed the file since.
                self._doubtful[number] = op.mode & _SET_ID
            elif op.kind == "content" and is_new:
                is_time_of = op.mtime_ns is None or is_time(identity.mtime_ns, op.mtime_ns)
                if identity.size != op.size or not is_time_of:
                    # It came with newer bytes, and so without these bits.
                    self._doubtful[number] = (op.mode or 0) & _SET_ID

    def _note_unmarked(self, op: Op) -> None:
        """Notes the staged files that an earlier mount may have published for the first content of
        an object that waits, without a mark."""
        files = self._state.unmarked(op.object)
        is_recorded = any((it.size, it.mtime_ns) == (op.size, op.mtime_ns) for it in files)
        if op.object not in self._lacking and files:
            self._lacking[op.object] = 0 if is_recorded else (op.mode or 0) & _SET_ID

    def set_id_of(self, objects: Collection[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Of ``objects``, after ``load``, the set-ID bits that earlier mounts may have withheld,
        and those that they have: ``Known.set_id`` and ``Known.withheld``."""
        doubtful = {each: held for each in objects if (held := self._doubtful.get(each, 0))}
        return doubtful, {each: self._withheld[each] for each in objects if each in self._withheld}

    def arrived(self, entry: Entry, identity: Identity | None) -> int | None:
        """A change is done at the source, where the file is ``identity`` now; None if there is no
        such file. Call this before the state of the source has the change.

        Returns the set-ID bits that are withheld from the file now, for the mark of the change;
        None if the next mount needs no mark of them.
        """
        op, number = entry.op, entry.op.object
        before = self._withheld.get(number)
        self._note_replaced(entry, identity)
        if number:
            self._note_arrived(entry, identity)
        after = self._withheld.get(number)
        is_noted = identity is not None and _is_noted(op) and (before, after) != (None, None)
        return after or 0 if is_noted else None

    def _note_arrived(self, entry: Entry, identity: Identity | None) -> None:
        op, number = entry.op, entry.op.object
        is_other = op.kind in ("attr", "xattr") and op.mode is None
        if op.kind == "unlink" or (identity is not None and not is_other):
            self._doubtful.pop(number, None)
        if op.kind in ("rename", "unlink"):
            if entry.place is not None and entry.place.kind == "over":
                self._note_removed([number])
        elif op.kind == "gone":
            self._removed.discard(number)
        if op.kind == "gone" or (op.kind == "attr" and op.mode is not None):
            self._withheld.pop(number, None)
        if identity is None:
            return
        if op.kind == "attr" and (op.mode or 0) & _SET_ID:
            self._withheld[number] = entry.withheld
        elif op.kind == "content" and entry.staged is not None and entry.withheld:
            assert entry.place is not None
            if entry.place.kind in ("new", "replace") or self._replaces_unmarked(entry):
                has_ended = has_ended_rights(op, entry.place, self.expected_now(entry))
                self._withheld[number] = 0 if has_ended else entry.withheld
        elif op.kind == "content":
            version = entry.staged or self._state.version(number)
            if self._is_as_recorded(entry, version):
                self._withheld.pop(number, None)
        if op.kind == "content":
            self._removed.discard(number)
            self._lacking.pop(number, None)

    def _replaces_unmarked(self, entry: Entry) -> bool:
        """Whether a content has replaced a staged file that was published without a mark."""
        target = entry.place.target if entry.place is not None else None
        return target is not None and self.expected_now(entry).is_unmarked(target)

    def _note_replaced(self, entry: Entry, identity: Identity | None) -> None:
        """Notes the objects whose older version has lost its last name to the file of a change."""
        op, number = entry.op, entry.op.object
        replaced: set[int] = set()
        if op.kind == "rename" and op.over_object:
            replaced = {op.over_object, *self._replaced.get(op.over_object, ())}
            if identity is None and number:
                # The source has the file under its new name when its next content comes.
                self._replaced.setdefault(number, set()).update(replaced)
        elif op.kind == "gone" or (op.kind == "content" and identity is not None):
            replaced = self._replaced.pop(number, set())
        if replaced and entry.place is not None and entry.place.replaced:
            known = ((each, self._state.identity(each)) for each in replaced)
            numbers = entry.place.replaced
            self._note_removed([each for each, it in known if it and it.source_ino in numbers])

    def _note_removed(self, objects: Iterable[int]) -> None:
        alive = {number for number in objects if not self._files.is_dead(number)}
        self._removed |= alive
        self._removed_now |= alive

    def removed_now(self) -> set[int]:
        """The objects whose older version the drain has removed at the source since the last call,
        for the mark of the changes that have ``arrived``."""
        removed, self._removed_now = self._removed_now & self._removed, set()
        return removed

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
            case "through":
                # Later changes of the same turn depend on this.
                state.note(op, None)
                return None
            case "gone":
                return None
            case "content":
                return self._of_content(entry)
            case "rename" if absent:
                # The entry under the new name stays until the content is drained, with that name.
                if op.object in self._order.lost:
                    return None
                place = entry.place = entry.place or Place()
                return partial(entries.unlink, op=op, expected=expected, place=place)
            case "rename":
                over, keep = state.expected_over(op), self._staged_in(op.to)
                # It may have been made before, and its directory could not be synced.
                place = entry.place = entry.place or Place()
                renames = partial(entries.rename, op=op, expected=expected, over=over, keep=keep)
                return partial(renames, place=place)
            case "link" if absent:
                return None
            case "unlink":
                place = entry.place = entry.place or Place()
                return partial(entries.unlink, op=op, expected=expected, place=place)
            case "rmdir":
                keep = self._staged_in(op.path)
                return partial(entries.rmdir, op=op, expected=expected, keep=keep)
            case "link":
                contents = (each for each in self._order.behind(entry) if each.kind == "content")
                will_come = any(not each.same for each in contents)
                return partial(entries.link, op=op, expected=expected, will_come=will_come)
            case "mkdir" | "symlink" | "mknod":
                changes = {
                    "mkdir": entries.mkdir,
                    "symlink": entries.symlink,
                    "mknod": entries.mknod,
                }
                return partial(changes[op.kind], op=op, expected=expected)
            case "attr" | "xattr":
                # A file whose content was left out keeps its older version at the source. If one of
                # its names was renamed since, the others still lead to that version.
                has_older = state.has_older(op.object)
                if absent and not has_older and state.identity(op.object) is None:
                    return None
                op = self._with_bits_that_stay(entry)
                entry.withheld = (entry.op.mode or 0) & _SET_ID & ~(op.mode or 0)
                if absent and not has_older:
                    return partial(entries.change_older, op=op, expected=expected)
                will_come = absent and self._order.later(entry) is not None
                change = entries.change_attributes
                return partial(change, op=op, expected=expected, will_come=will_come)

    def _of_content(self, entry: Entry) -> Step | None:
        op, publishing = entry.op, self._writer.publishing
        expected = self._expected(entry, entry.staged or self._state.version(op.object))
        if entry.skipped:
            is_ours = entry.was_tried and not op.through
            return partial(publishing.discard, op=op) if is_ours else None
        if entry.staged is not None:
            assert entry.place is not None
            staged, place = self._as_staged(entry, entry.staged), entry.place
            if place.kind == "conflict":
                staged = self._with_rights_now(entry, staged)
            size = entry.staged.size
            return partial(publishing.publish, op=staged, size=size, place=place, expected=expected)
        if entry.is_grown:
            return partial(publishing.grown, op=op, expected=expected, tried=entry.was_tried)
        return partial(publishing.look_at_same, op=op, expected=expected)

    def opening(self, entry: Entry, *, make: bool) -> Callable[[], tuple[int, Credentials | None]]:
        """Opens the empty staged file of a content; with ``make`` its directory is made. The call
        returns its descriptor, and the user with whose rights it is written, None for the daemon.
        """
        op, place, staged = entry.op, Place(), self._writer.staged
        entry.place = place
        expected = self._state.expected(entry.seq, op)

        def opened() -> tuple[int, Credentials | None]:
            return staged.open_place(op, place, expected, make=make), writer(op)

        return opened

    def applying(self, entry: Entry, staged: Identity) -> Callable[[int], None]:
        """Gives a staged file, by its descriptor, the attributes of the file."""
        assert entry.place is not None
        op = self._as_staged(entry, staged)
        entry.withheld = (self._with_bits_that_stay(entry).mode or 0) & ~(op.mode or 0)
        return partial(
            self._writer.staged.apply_attributes,
            op=op,
            place=entry.place,
            expected=self._expected(entry, staged),
        )

    def finishing(self, entry: Entry) -> Callable[[], tuple[int, Identity | None]]:
        """As ``StagedContents.finish_part``."""
        place = entry.place = Place()
        expected, finish = self._expected(entry, None), self._writer.staged.finish_part
        beside = self._state.staged_beside.get(entry.op.object)
        return partial(finish, entry.op, place, expected, beside=beside)

    def _staged_in(self, directory: bytes) -> set[int]:
        """The objects of files with a name whose staged files, in a directory that is to be
        removed, have the only bytes."""
        return {
            number
            for number, path in self._state.staged_beside.items()
            if path.rpartition(b"/")[0] == directory and not self._files.is_dead(number)
        }

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
        if not self._is_as_recorded(entry, version):
            # Other users may have written the newer bytes, which must not run with the rights of
            # the owner. Their own record, or a later change of the mode, sets the remaining bits.
            op = replace(op, mode=None if op.mode is None else op.mode & ~_SET_ID)
        return replace(op, mtime_ns=version.mtime_ns)

    def _with_rights_now(self, entry: Entry, op: Op) -> Op:
        """A content without the rights that later changes of the same file have taken away. They
        do not reach a file that is kept beside another one."""
        if op.mode is None:
            return op
        mode, gid = op.mode, op.gid
        for later in self._order.behind(entry):
            now = later.mode_from(mode)
            mode = mode if now is None else now
            gid = gid if later.gid is None else later.gid
        if gid != op.gid:
            # Another group has them.
            mode &= ~stat.S_IRWXG
        return replace(op, mode=op.mode & mode)

    def _is_as_recorded(self, entry: Entry, version: Identity | None) -> bool:
        """Whether the bytes of a version of an object are those of its content, as far as is known.

        A change of the times alone gives the object another version.
        """
        op, behind = entry.op, list(self._order.behind(entry))
        if op.through:
            # The newest bytes are at the source. A content that was recorded later is newer.
            return all(later.kind != "content" for later in behind)
        if version is None or version.size != op.size:
            return False
        if version.mtime_ns == op.mtime_ns:
            return True
        times = [later for later in behind if later.kind == "attr" and later.mtime_ns is not None]
        return (
            all(later.kind != "content" for later in behind)
            and all(later.same for later in times)
            and any(later.mtime_ns == version.mtime_ns for later in times)
        )

    def _expected(self, entry: Entry, version: Identity | None) -> Expected:
        """The file that a content may replace, for the ``version`` of its object that comes there.
        Set-ID bits come with the recorded bytes only."""
        op, number = entry.op, entry.op.object
        expected = replace(self.expected_now(entry), taken=self._taken(entry) & (op.mode or 0))
        if not self._is_as_recorded(entry, version):
            return expected
        stay = (op.mode or 0) & ~expected.taken
        return replace(
            expected,
            due=self._withheld.get(number, 0) & stay,
            kept=_SET_ID & stay,
            doubtful=self._doubtful.get(number, 0) & stay,
            lacking=self._lacking.get(number, 0) & stay,
        )

    def expected_now(self, entry: Entry) -> Expected:
        """The file that a content may replace. It was not removed by others if the drain has."""
        expected = self._state.expected(entry.seq, entry.op)
        is_removed = entry.op.object in self._removed
        return replace(expected, was_there=expected.was_there and not is_removed)

    def _with_bits_that_stay(self, entry: Entry) -> Op:
        """A change without the set-ID bits that a later change of the same file removes.

        A process that writes into a program removes these bits. The newest bytes are drained,
        perhaps before that change is, and they must not run with the rights of the owner.
        """
        op = entry.op
        if not op.object or op.mode is None or not op.mode & _SET_ID:
            return op
        mode = op.mode & ~self._taken(entry)
        if op.kind == "attr" and self._files.is_written(op.object):
            mode &= ~_SET_ID
        return replace(op, mode=mode)

    def _taken(self, entry: Entry) -> int:
        """The set-ID bits that a file does not have after the later changes of it."""
        stay = _SET_ID
        for later in self._order.behind(entry):
            if later.kind in ("content", "attr") and later.mode is not None:
                stay &= later.mode
        return _SET_ID & ~stay


def _is_noted(op: Op) -> bool:
    """Whether a change may give a file set-ID bits, or withhold them."""
    return op.kind == "content" or (op.kind == "attr" and op.mode is not None)


def with_rights_to_read(content: Op, *, is_lost: bool) -> Op:
    """A content that no process has written on the mount, by the owner of the file: the user who
    renames a file may lack the right to read its bytes.

    ``is_lost``: others have removed or replaced the file at the source. Its owner has ended the
    rights of its set-ID bits by that, and the other user could not give them again.
    """
    by = content.by
    if by is None or by.is_root or by.uid == content.uid:
        return content
    if is_lost and content.mode is not None:
        content = replace(content, mode=content.mode & ~_SET_ID)
    return replace(content, by=Credentials(content.uid or 0, content.gid or 0))
