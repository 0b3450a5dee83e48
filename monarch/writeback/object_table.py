"""What the absorbing tier holds of written files: whose it is, how much, and what may go.

Belongs to the event loop; nothing here waits. The drain asks it about objects and tells it what has
come to the source.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace

from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.types import ROOT_INO, Identity, Ino
from monarch.writeback.crash_losses import names_of
from monarch.writeback.fast_writes import UNTOUCHED
from monarch.writeback.op import Op
from monarch.writeback.open_file import OpenFile

log = logging.getLogger(__name__)

_BLOCK = 512


class ObjectTable:
    """``bytes`` is what all objects take of the tier's disk, ``drained_bytes`` those among them
    that the source has as well; ``largest`` the longest file so far."""

    def __init__(self, names: Namespace) -> None:
        self._names = names
        self.open: dict[int, OpenFile] = {}
        self._inos: dict[int, Ino] = {}
        self._sizes: dict[int, int] = {}
        # The last content of each object: its number in the journal, and whether it was synced.
        self._contents: dict[int, tuple[int, bool]] = {}
        # Those that were not synced.
        self._unsynced: dict[int, int] = {}
        # What was done last to the file of each, by its number in the journal.
        self._last: dict[int, int] = {}
        # Those that had no room here any more: beside which path they are staged at the source.
        self._through: dict[int, bytes] = {}
        # The source's numbers of these staged files.
        self.staged_inos: dict[int, int] = {}
        # Those of which bytes were synced that the source has not got.
        self._safe_only_here: set[int] = set()
        # Those that are at the source as they are here, and as what, the longest there first.
        self._drained: dict[int, Identity] = {}
        # What earlier mounts have left and the tree does not show: objects that have a name by the
        # journal, with it, and numbers of what has none. Their records are drained all the same.
        self.unshown: dict[int, bytes] = {}
        # Of those, whose bytes the source has got since.
        self._brought: set[int] = set()
        self._unshown_inos: frozenset[int] = frozenset()
        self.bytes = 0
        self.drained_bytes = 0
        self.largest = 0

    # -- what the drain asks and tells -------------------------------------------------------------

    def is_dead(self, object: int) -> bool:
        """Whether it has no name any more: by the journal, for the tree may not know it."""
        node = self.node(object)
        if node is None:
            return object not in self.unshown
        return not node.names

    def is_removed(self, ino: int) -> bool:
        """Whether an inode that was made or changed here has no name any more."""
        node = self._names.node(Ino(ino))
        if node is None:
            return ino > 0 and ino not in self._unshown_inos
        return not node.names

    def is_written(self, object: int) -> bool:
        """Whether somebody has it open and has changed it since it was recorded.

        What goes to the source directly is not whole before it is closed.
        """
        file = self.open.get(object)
        return file is not None and (file.is_changed or file.is_write_through)

    def lowest(self, object: int) -> int:
        """The lowest offset at which its bytes were changed since its content was recorded."""
        file = self.open.get(object)
        return UNTOUCHED if file is None else file.lowest()

    def left_out(self, object: int) -> None:
        """A content of it was not published since somebody writes: there must be another one."""
        if (file := self.open.get(object)) is not None:
            file.is_left_out = True

    def published(self, object: int, path: bytes, identity: Identity) -> None:
        """The source has its bytes as they were recorded last."""
        self._forget_drained(object)
        self._safe_only_here.discard(object)
        if object in self.unshown:
            self._brought.add(object)
        if object in self._sizes:
            self._drained[object] = identity
            self.drained_bytes += self._sizes[object]

    def whole(self, number: int) -> Op | None:
        """A content of the file as it is now, for a source that has lost it; None if it has no name
        any more, or its bytes are not here."""
        node = self.node(number)
        if node is None or not node.names or self.is_write_through(number):
            return None
        paths = tuple(self._names.visible_paths(node.ino))
        return Op(
            kind="content",
            path=paths[0],
            paths=paths,
            object=number,
            ino=node.ino,
            mode=stat.S_IMODE(node.mode),
            uid=node.uid,
            gid=node.gid,
            atime_ns=node.atime_ns,
            mtime_ns=node.mtime_ns,
            size=node.size,
            xattrs=dict(node.xattrs),
            strict=True,
        )

    def recorded(self, number: int, seq: int) -> None:
        """That was recorded."""
        self.record(number, seq, synced=False)

    def changed(self, object: int, identity: Identity) -> None:
        """The source's file of it is known as that now, with the same bytes."""
        if object in self._drained:
            # In its place: the order is that in which they came to the source.
            self._drained[object] = identity

    def unrecorded(self) -> set[Ino]:
        """Open files that have a name and were changed since the journal was told of them."""
        return {
            file.ino
            for number, file in self.open.items()
            if (file.is_changed or number not in self._contents) and not self.is_dead(number)
        }

    @property
    def drained_count(self) -> int:
        """How many objects there are that the source has as well."""
        return len(self._drained)

    def is_drained(self, number: int) -> bool:
        """Whether the source has its bytes as they were recorded last."""
        return number in self._drained or number in self._brought

    def source_ino(self, number: int) -> int:
        """The source's number of the file that it has of an object; 0 if that is older, or none."""
        identity = self._drained.get(number)
        return identity.source_ino if identity is not None else 0

    def is_write_through(self, number: int) -> bool:
        """Whether its bytes are in a staged file at the source, or came from one."""
        return number in self._through

    def set_write_through(self, number: int, path: bytes) -> None:
        """There was no room for an object any more: it is staged at the source, by ``path``."""
        self._through[number] = path

    def staged_beside(self, number: int) -> bytes | None:
        """The path beside which an object's bytes are at the source; None if they are not."""
        return self._through.get(number)

    def arrived(self, *, busy: Container[Ino], is_done: Callable[[int], bool]) -> list[Node]:
        """Files that went to the source directly and are there under their names by now.

        ``is_done`` as of ``leaving``.
        """
        numbers = [number for number in self._through if number in self._drained]
        nodes = [self.node(number) for number in numbers if is_done(self.last(number))]
        return [node for node in nodes if node is not None and node.ino not in busy]

    # -- what is kept ------------------------------------------------------------------------------

    def node(self, number: int) -> Node | None:
        """The file of an object."""
        ino = self._inos.get(number)
        node = self._names.node(ino) if ino is not None else None
        return node if node is not None and node.object == number else None

    def content(self, number: int) -> tuple[int, bool]:
        """The number of its last content in the journal, 0 if there is none; whether synced."""
        return self._contents.get(number, (0, False))

    def last(self, number: int) -> int:
        """The number in the journal of what was done last to the file of an object."""
        return self._last.get(number, 0)

    def record(self, number: int, seq: int, *, synced: bool) -> None:
        """A content was recorded: what the source has is older."""
        self._forget_drained(number)
        self._hold_content(number, seq, synced=synced)
        self._last[number] = seq
        if synced:
            self._safe_only_here.add(number)

    def is_safe_only_here(self, number: int) -> bool:
        """Whether bytes of it were synced that the source has not got, whatever came after them."""
        return number in self._safe_only_here

    def _hold_content(self, number: int, seq: int, *, synced: bool) -> None:
        self._contents[number] = (seq, synced)
        if synced:
            self._unsynced.pop(number, None)
        else:
            self._unsynced[number] = seq

    # -- what the commits ask and tell -------------------------------------------------------------

    def unsynced(self) -> dict[int, int]:
        """The last content of each object that is not known to be on the tier's disk."""
        return {
            number: seq for number, seq in self._unsynced.items() if number not in self._through
        }

    def is_being_written(self) -> bool:
        """Whether somebody has changed bytes that no record tells of yet."""
        return any(file.is_changed for file in self.open.values())

    def synced(self, contents: Mapping[int, int]) -> None:
        """These contents are on the disk by now."""
        for number, seq in contents.items():
            if number in self._contents and number not in self._drained:
                self._safe_only_here.add(number)
            if self._unsynced.get(number) == seq:
                self._hold_content(number, seq, synced=True)

    def own(self, node: Node) -> None:
        """The object of a file, with its size as it is now."""
        number, taken = node.object, node.blocks * _BLOCK
        self._inos[number] = node.ino
        more = taken - self._sizes.get(number, 0)
        self._sizes[number] = taken
        self.bytes += more
        if number in self._drained:
            self.drained_bytes += more
        self.largest = max(self.largest, node.size)

    def forget(self, number: int) -> None:
        """The object is gone."""
        self._forget_drained(number)
        self.bytes -= self._sizes.pop(number, 0)
        self._contents.pop(number, None)
        self._unsynced.pop(number, None)
        self._last.pop(number, None)
        self._through.pop(number, None)
        self.staged_inos.pop(number, None)
        self._safe_only_here.discard(number)
        self._inos.pop(number, None)

    def _forget_drained(self, number: int) -> None:
        if self._drained.pop(number, None) is not None:
            self.drained_bytes -= self._sizes.get(number, 0)

    def noted(self, number: int, seq: int) -> None:
        """Something was done to the file of an object."""
        self._last[number] = seq

    def leaving(
        self, size: int, *, count: int, busy: Container[Ino], is_done: Callable[[int], bool]
    ) -> Iterator[Node]:
        """Files whose objects may go to free so many bytes, and ``count`` at least, the oldest
        first, none of ``busy``.

        ``is_done`` tells whether the source has what was noted by that number.
        """
        freed = gone = 0
        for number in list(self._drained):
            if freed >= size and gone >= count:
                return
            node = self.node(number)
            if node is not None and node.ino not in busy and is_done(self.last(number)):
                freed += self._sizes[number]
                gone += 1
                yield node

    def leave(self, node: Node) -> int:
        """The bytes of a file are the source's from now on; how many are free."""
        number = node.object
        identity = self._drained[number]
        freed = self._sizes[number]
        self.forget(number)
        self._read_at_source(node, identity)
        return freed

    def _read_at_source(self, node: Node, identity: Identity) -> None:
        node.object = 0
        now = replace(
            node.attributes,
            size=identity.size,
            mtime_ns=identity.mtime_ns,
            ctime_ns=identity.ctime_ns,
            source_ino=identity.source_ino,
        )
        self._names.refresh(node.ino, now)

    def take_up(
        self, ops: Sequence[tuple[int, Op]], done: Mapping[int, Identity | None]
    ) -> list[Node]:
        """What earlier mounts have left: the files that have objects by what ``ops`` tell.

        ``done`` is what the source has of it.
        """
        gone = set()
        had: dict[int, Identity] = {}
        for seq, op in ops:
            if op.object:
                self._last[op.object] = seq
            if op.kind == "content":
                self._hold_content(op.object, seq, synced=op.synced)
                self._drained.pop(op.object, None)
                if op.synced:
                    self._safe_only_here.add(op.object)
                if (identity := done.get(seq)) is not None:
                    self._drained[op.object] = had[op.object] = identity
                    self._safe_only_here.discard(op.object)
            elif op.kind == "attr" and op.object in self._drained and op.mtime_ns is not None:
                before, now = self._drained[op.object], done.get(seq)
                if now is not None and (now.source_ino, now.size) == (
                    before.source_ino,
                    before.size,
                ):
                    self._drained[op.object] = had[op.object] = now
            elif op.kind == "through":
                self._through[op.object] = op.path
            elif op.kind == "gone":
                gone.add(op.object)
        found = []
        for node in self._names.nodes():
            if node.object in gone and node.names:
                there = self._names.at_source(node.ino)
                identity = had.get(node.object) or (there.identity if there is not None else None)
                if identity is not None:
                    self._read_at_source(node, identity)
            if node.object in gone:
                # It was removed, maybe before the source had anything of it.
                node.object = 0
            if node.object:
                self._inos[node.object] = node.ino
                found.append(node)
            elif not node.names and node.ino != ROOT_INO:
                # Nobody has it open.
                self._names.forget_node(node.ino)
        known = {node.object for node in found}
        for number in self._drained.keys() - known:
            del self._drained[number]
        self._know_unshown(ops, known | gone)
        self._safe_only_here &= known
        for table in (self._contents, self._unsynced, self._last, self._through):
            for number in table.keys() & gone:
                del table[number]
        return found

    def _know_unshown(self, ops: Sequence[tuple[int, Op]], known: Container[int]) -> None:
        """Find what has a name by the journal and not in the tree."""
        objects = {op.object for _, op in ops if op.object not in known} - {0}
        self.unshown = {number: names[0] for number, names in names_of(ops, objects).items()}
        for number in self.unshown:
            log.warning(
                "%r, which an earlier mount has written, has no place among the names of the source"
                " now: it is brought there all the same",
                os.fsdecode(self.unshown[number]),
            )
        count: Counter[int] = Counter()
        for _, op in ops:
            if not op.object and op.kind in ("mkdir", "symlink", "mknod", "link"):
                count[op.ino] += 1
            elif op.kind in ("unlink", "rmdir") and not op.object:
                count[op.ino] -= 1
            elif op.kind == "rename" and not op.over_object:
                count[op.over_ino] -= 1
        self._unshown_inos = frozenset(ino for ino in +count if self._names.node(Ino(ino)) is None)
