"""Where the bytes of each object survive: recorded, synced in the tier, at the source.

Belongs to the event loop; nothing here waits. Objects are named by their numbers. The *seq* of a
change is its number in the journal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from monarch.namespace.overlay import Node
from monarch.types import Identity
from monarch.writeback.history import Numbered, followed
from monarch.writeback.op import Op


class ObjectStates:
    """``bytes`` is the size of all objects on the tier's disk, ``drained_bytes`` of those that the
    source has as well, ``largest`` the length of the longest file so far. ``drained`` has the
    source's version of the objects that it has, the longest there first.

    ``staged_inos``: the inode numbers of the staged files of objects that are written through.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        # The seq of the last content of each object, and whether it was synced.
        self._contents: dict[int, tuple[int, bool]] = {}
        # The same seqs of those that were not synced.
        self._unsynced: dict[int, int] = {}
        # Objects whose last content has the source's bytes: nothing was written here.
        self._unwritten: set[int] = set()
        # The seq of the last change of the file of each object.
        self._last: dict[int, int] = {}
        # The staged files at the source of objects without room in the tier: the path on the mount
        # beside which each lies. Objects whose bytes are there.
        self._staged: dict[int, bytes] = {}
        self._through: set[int] = set()
        self.staged_inos: dict[int, int] = {}
        # Objects with bytes that were synced and that the source does not have.
        self._safe_only_here: set[int] = set()
        self.drained: dict[int, Identity] = {}
        # The files, by object, whose last content the journal has not accepted. This reference
        # keeps their inodes in memory.
        self.unrecorded: dict[int, Node] = {}
        # Objects of files that the tree does not show, and that the source has got.
        self._drained_unshown: set[int] = set()
        self.bytes = 0
        self.drained_bytes = 0
        self.largest = 0

    def content(self, number: int) -> tuple[int, bool]:
        """The seq of the last content, 0 if there is none, and whether it was synced."""
        return self._contents.get(number, (0, False))

    def last(self, number: int) -> int:
        """The seq of the last change of the object's file, 0 if there is none."""
        return self._last.get(number, 0)

    def noted(self, number: int, seq: int) -> None:
        self._last[number] = seq

    def record(self, number: int, seq: int, *, synced: bool, same: bool = False) -> None:
        """A content was recorded: the source's version is older, or has the ``same`` bytes."""
        self._forget_drained(number)
        self.unrecorded.pop(number, None)
        self._hold_content(number, seq, synced=synced, same=same)
        self._last[number] = seq
        if synced:
            self._safe_only_here.add(number)

    def not_recorded(self, node: Node) -> None:
        """The journal has not accepted a content: the object alone has these bytes until it does,
        whatever the drain publishes meanwhile."""
        number = node.object
        self._forget_drained(number)
        self.unrecorded[number] = node
        self._contents.pop(number, None)
        self._unsynced.pop(number, None)
        self._unwritten.discard(number)

    def _hold_content(self, number: int, seq: int, *, synced: bool, same: bool) -> None:
        self._contents[number] = (seq, synced)
        (self._unwritten.add if same else self._unwritten.discard)(number)
        if synced:
            self._unsynced.pop(number, None)
        else:
            self._unsynced[number] = seq

    def unsynced(self) -> dict[int, int]:
        """The seq of the last content of each object that may not be on the tier's disk."""
        return {
            number: seq for number, seq in self._unsynced.items() if number not in self._through
        }

    def unsynced_staged(self) -> list[int]:
        """The objects with a staged file that may not be on the disk of the source, though their
        last content is recorded and waits."""
        return [
            number
            for number in self._unsynced
            if number in self._through and not self.is_drained(number)
        ]

    def synced(self, contents: Mapping[int, int]) -> None:
        """Contents, by object, are on the tier's disk."""
        for number, seq in contents.items():
            if number in self._contents and number not in self.drained:
                self._safe_only_here.add(number)
            if self._unsynced.get(number) == seq:
                self._hold_content(number, seq, synced=True, same=number in self._unwritten)

    def is_safe_only_here(self, number: int) -> bool:
        """Whether bytes were synced that the source does not have, whatever was recorded since."""
        return number in self._safe_only_here

    def size(self, number: int) -> int:
        """The size of an object on the tier's disk, in bytes."""
        return self._sizes.get(number, 0)

    def resize(self, number: int, size: int, *, length: int) -> None:
        """``size`` on the tier's disk, and ``length`` of the file, in bytes."""
        self.largest = max(self.largest, length)
        more = size - self.size(number)
        self._sizes[number] = size
        self.bytes += more
        if number in self.drained:
            self.drained_bytes += more

    def is_write_through(self, number: int) -> bool:
        """Whether the bytes are in a staged file at the source, or came from one."""
        return number in self._through

    def stage(self, number: int, path: bytes) -> None:
        """The tier has no room for an object: a file is staged at the source, beside ``path``."""
        self._staged[number] = path

    def unstage(self, number: int) -> bytes | None:
        """The staged file is not needed any more; the path beside which it lies, None if there is
        none."""
        return self._staged.pop(number, None)

    def set_write_through(self, number: int) -> None:
        """The bytes of an object are in its staged file. What the source has under the file's name
        is older."""
        self._forget_drained(number)
        self._through.add(number)

    def staged_beside(self, number: int) -> bytes | None:
        """The path on the mount beside which the staged file lies; None if there is none."""
        return self._staged.get(number)

    def renamed(self, op: Op) -> None:
        """An entry was renamed or removed on the mount: a directory may have staged files."""
        if self._staged:
            self._staged = {number: followed(path, op) for number, path in self._staged.items()}

    def published(self, number: int, identity: Identity) -> None:
        """The source has the bytes of the last content."""
        self._forget_drained(number)
        if number in self.unrecorded:
            return
        self._safe_only_here.discard(number)
        if number in self._sizes:
            self.drained[number] = identity
            self.drained_bytes += self._sizes[number]
        else:
            self._drained_unshown.add(number)

    def changed(self, number: int, identity: Identity) -> None:
        """The source's file has another version, with the same bytes."""
        if number in self.drained:
            # It keeps its place in the order in which objects came to the source.
            self.drained[number] = identity

    def is_drained(self, number: int) -> bool:
        """Whether the source has the bytes of the last content."""
        return number in self.drained or number in self._drained_unshown

    def is_unwritten(self, number: int) -> bool:
        """Whether the last content has the bytes that the source had at the copy-up."""
        return number in self._unwritten

    def source_ino(self, number: int) -> int:
        """The inode number of the source's file; 0 if that is older, or missing."""
        identity = self.drained.get(number)
        return identity.source_ino if identity is not None else 0

    def arrived(self) -> list[int]:
        """Objects that were written through and that the source has under their names."""
        return [number for number in self._through if number in self.drained]

    def _forget_drained(self, number: int) -> None:
        if self.drained.pop(number, None) is not None:
            self.drained_bytes -= self.size(number)

    def forget(self, number: int) -> None:
        """The object is gone."""
        self._forget_drained(number)
        self.bytes -= self._sizes.pop(number, 0)
        self.unrecorded.pop(number, None)
        self._safe_only_here.discard(number)
        self._drained_unshown.discard(number)
        self._contents.pop(number, None)
        self._unsynced.pop(number, None)
        self._unwritten.discard(number)
        self._last.pop(number, None)
        self._staged.pop(number, None)
        self._through.discard(number)
        self.staged_inos.pop(number, None)

    def take_up(
        self, ops: Iterable[Numbered], done: Mapping[int, Identity | None]
    ) -> dict[int, Identity]:
        """Take up the changes of earlier mounts, before there are sizes.

        ``done``: those that the source has, with what was published. Returns the last version of
        each object that the source ever had.
        """
        had: dict[int, Identity] = {}
        for seq, op in ops:
            number = op.object
            if number:
                self._last[number] = seq
            if op.kind == "content":
                self._hold_content(number, seq, synced=op.synced, same=op.same)
                self.drained.pop(number, None)
                if op.synced:
                    self._safe_only_here.add(number)
                if (identity := done.get(seq)) is not None:
                    self.drained[number] = had[number] = identity
                    self._safe_only_here.discard(number)
            elif op.kind == "attr" and number in self.drained and op.mtime_ns is not None:
                before, now = self.drained[number], done.get(seq)
                if now is not None and (now.source_ino, now.size) == (
                    before.source_ino,
                    before.size,
                ):
                    self.drained[number] = had[number] = now
            elif op.kind == "through":
                self.stage(number, op.path)
                self.set_write_through(number)
            elif op.kind in ("rename", "rmdir"):
                self.renamed(op)
        return had

    def keep(self, known: Collection[int], removed: Collection[int]) -> None:
        """Keep nothing of objects that are ``removed``; only ``known`` ones may leave the tier."""
        for number in self.drained.keys() - known:
            del self.drained[number]
        self._safe_only_here.intersection_update(known)
        for number in removed:
            self.forget(number)
