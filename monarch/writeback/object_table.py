"""Which file each object belongs to, which of them are open, and which objects may leave the tier.

Belongs to the event loop; nothing here waits. Objects are named by their numbers. Where their bytes
survive is a matter of ``ObjectStates``.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.posix import acl
from monarch.types import ROOT_INO, WRITTEN_INO, Identity, Ino
from monarch.writeback.history import Numbered, names_of
from monarch.writeback.object_states import ObjectStates
from monarch.writeback.op import Op
from monarch.writeback.open_file import UNTOUCHED, OpenFile
from monarch.writeback.undrained_attributes import UndrainedAttributes

log = logging.getLogger(__name__)

_BLOCK = 512


def mode_of(node: Node) -> int:
    """The permission bits for the source, with those that are not shown."""
    return stat.S_IMODE(node.mode) | node.hidden_bits


def xattrs_of(names: Namespace, node: Node) -> dict[bytes, bytes]:
    """The extended attributes of a file with its access control list, which the source may have to
    give to a new file: others may have removed or replaced the one that has it."""
    if acl.ACCESS not in node.xattrs and (access := names.acls(node.ino).access):
        return {**node.xattrs, acl.ACCESS: access}
    return dict(node.xattrs)


def content_of(
    node: Node,
    paths: tuple[bytes, ...],
    *,
    size: int,
    xattrs: Mapping[bytes, bytes] | None = None,
    **more: Any,
) -> Op:
    """A content of the first ``size`` bytes of a file, with its attributes and all its ``paths``;
    ``more`` are other fields of the record."""
    return Op(
        strict=True,
        kind="content",
        path=paths[0],
        paths=paths,
        object=node.object,
        ino=node.ino,
        mode=mode_of(node),
        uid=node.uid,
        gid=node.gid,
        atime_ns=node.atime_ns,
        mtime_ns=node.mtime_ns,
        size=size,
        xattrs=dict(node.xattrs if xattrs is None else xattrs),
        **more,
    )


class ObjectTable:
    """``open`` has the open files by object.

    ``unshown``: objects of files that earlier mounts have left and that have a name by the journal,
    but not in the tree: that name. Their changes are drained all the same. ``attributes``: the
    changes of files without an object; ``renewed`` and ``unset`` as of ``UndrainedAttributes``.
    """

    def __init__(
        self,
        names: Namespace,
        renewed: Callable[[Ino, Identity, Identity], None] = lambda ino, before, now: None,
        unset: Callable[[Ino], None] = lambda ino: None,
    ) -> None:
        self._names = names
        self.states = ObjectStates()
        self.attributes = UndrainedAttributes(names, renewed, unset)
        self.open: dict[int, OpenFile] = {}
        self._inos: dict[int, Ino] = {}
        self.unshown: dict[int, bytes] = {}
        # The inode numbers of entries without an object that are not shown either.
        self._unshown_inos: frozenset[int] = frozenset()

    def node(self, number: int) -> Node | None:
        """The file of an object."""
        ino = self._inos.get(number)
        node = self._names.node(ino) if ino is not None else None
        return node if node is not None and node.object == number else None

    def is_dead(self, number: int) -> bool:
        """Whether the file has no name any more, in the tree or, if that lacks it, in the
        journal."""
        node = self.node(number)
        if node is None:
            return number not in self.unshown
        return not node.names

    def is_removed(self, ino: int) -> bool:
        """Whether an entry that was made or changed on the mount has no name any more."""
        node = self._names.node(Ino(ino))
        if node is None:
            return ino > 0 and ino not in self._unshown_inos
        return not node.names

    def is_written(self, number: int) -> bool:
        """Whether the file is open and has changed since its last content was recorded.

        A file that is written through is not whole before it is closed.
        """
        file = self.open.get(number)
        return file is not None and (file.is_changed or file.is_write_through)

    def is_being_written(self) -> bool:
        """Whether any bytes have changed that no record has yet."""
        return any(file.is_changed for file in self.open.values())

    def lowest(self, number: int) -> int:
        """The lowest offset at which bytes were changed since the last content was recorded; more
        than any size if none were."""
        if number in self.states.unrecorded:
            return 0
        file = self.open.get(number)
        return UNTOUCHED if file is None else file.lowest()

    def left_out(self, number: int) -> None:
        """A content was not published since the file is being written: its close must record
        another one, even if nothing more is written."""
        if (file := self.open.get(number)) is not None:
            file.is_left_out = True

    def whole(self, number: int) -> Op | None:
        """A content of the whole file, for a source that has lost it; None if it has no name any
        more, or its bytes are not in the tier."""
        node = self.node(number)
        if node is None or not node.names or self.states.is_write_through(number):
            return None
        paths, xattrs = tuple(self._names.visible_paths(node.ino)), xattrs_of(self._names, node)
        return content_of(node, paths, size=node.size, xattrs=xattrs)

    def drop_bits(self, number: int, bits: int) -> None:
        """Shows a file without these bits of its mode: the source will not get them."""
        if (node := self.node(number)) is not None:
            node.drop_bits(bits)

    def own(self, node: Node) -> None:
        """The file has this object, with its present size."""
        self._inos[node.object] = node.ino
        self.states.resize(node.object, node.blocks * _BLOCK, length=node.size)

    def forget(self, number: int) -> None:
        """The object is gone."""
        self.states.forget(number)
        self._inos.pop(number, None)

    def writable(self) -> set[Ino]:
        """Files with a name whose bytes the journal may lack: open ones that a process may write or
        has written, and those of ``refused``."""
        return {node.ino for node in self.refused()} | {
            file.ino
            for number, file in self.open.items()
            if (file.writers or file.is_changed) and not self.is_dead(number)
        }

    def unrecorded(self) -> set[Ino]:
        """Open files that have a name and have changed since the journal recorded them."""
        return {
            file.ino
            for number, file in self.open.items()
            if (file.is_changed or not self.states.content(number)[0]) and not self.is_dead(number)
        }

    def refused(self) -> list[Node]:
        """Files with a name whose last content the journal has not accepted."""
        nodes = map(self.node, sorted(self.states.unrecorded))
        return [node for node in nodes if node is not None and node.names]

    def arrived(self, *, busy: Container[Ino], is_done: Callable[[int], bool]) -> list[Node]:
        """Files that were written through and that the source has under their names.

        ``busy`` and ``is_done`` as of ``leaving``.
        """
        found = (self._idle(number, busy, is_done) for number in self.states.arrived())
        return [node for node in found if node is not None]

    def leaving(
        self, size: int, *, count: int, busy: Container[Ino], is_done: Callable[[int], bool]
    ) -> Iterator[Node]:
        """Files whose objects may leave the tier, to free ``size`` bytes and ``count`` objects at
        least, the longest at the source first.

        Files in ``busy`` stay. ``is_done`` returns whether the source has the change with that seq.
        """
        freed = count_freed = 0
        for number in list(self.states.drained):
            if freed >= size and count_freed >= count:
                return
            if (node := self._idle(number, busy, is_done)) is not None:
                freed += self.states.size(number)
                count_freed += 1
                yield node

    def _idle(
        self, number: int, busy: Container[Ino], is_done: Callable[[int], bool]
    ) -> Node | None:
        """The file of an object, if it is not busy and the source has all changes of it."""
        node = self.node(number) if is_done(self.states.last(number)) else None
        return node if node is not None and node.ino not in busy else None

    def leave(self, node: Node) -> int:
        """The bytes of a file are read at the source from now on; how many are free in the tier."""
        number = node.object
        identity, freed = self.states.drained[number], self.states.size(number)
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

    def take_up(self, ops: Sequence[Numbered], done: Mapping[int, Identity | None]) -> list[Node]:
        """Take up the changes of earlier mounts, which the tree shows already; the files that have
        objects.

        ``done``: those that the source has, with what was published.
        """
        had = self.states.take_up(ops, done)
        removed = {op.object for _, op in ops if op.kind == "gone"}
        inos = {op.object: op.ino for _, op in ops if op.object in removed and op.kind == "content"}
        found = []
        for node in self._names.nodes():
            if node.object in removed and node.names:
                self._show_drained(node, had.get(node.object), inos.get(node.object))
            if node.object in removed:
                # The file was removed, maybe before the source had anything of it.
                node.object = 0
            if node.object:
                self._inos[node.object] = node.ino
                found.append(node)
            elif not node.names and node.ino != ROOT_INO:
                # No process has it open.
                self._names.forget_node(node.ino)
        known = {node.object for node in found}
        self._know_unshown(ops, known | removed)
        self.states.keep(known, removed)
        return found

    def _show_drained(self, node: Node, had: Identity | None, ino: int | None) -> None:
        """Has a file read at the source that was drained as ``had``. ``ino`` is its inode number in
        the journal. A newer snapshot may have what others have written since."""
        names, there = self._names, self._names.at_source(node.ino)
        is_newer = node.ino != ino
        if there is None and had is not None:
            # It was created here: a newer snapshot has the same file under its name.
            parent, name = next(iter(node.names))
            found = names.snapshot.lookup(parent, name) if parent < WRITTEN_INO else None
            there = None if found is None else names.snapshot.attributes(found)
            is_newer = there is not None and there.source_ino == had.source_ino
        if had is not None and not (is_newer and there and had.ctime_ns < there.ctime_ns):
            self._read_at_source(node, had)
        elif there is not None:
            node.keeps_times = False
            self._read_at_source(node, there.identity)

    def _know_unshown(self, ops: Sequence[Numbered], known: Container[int]) -> None:
        """Find what has a name by the journal and not in the tree."""
        objects = {op.object for _, op in ops if op.object not in known} - {0}
        self.unshown = {number: names[0] for number, names in names_of(ops, objects).items()}
        for path in self.unshown.values():
            log.warning(
                "%r, which an earlier mount has written, has no place among the names of the source"
                " now: it is brought there all the same",
                os.fsdecode(path),
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
