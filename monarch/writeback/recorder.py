"""Changes as they are made: each goes into the journal, and from there to the drain.

The content of a written file is recorded at fsync, at the last close, before the file gets a name,
and when an open file was not written for a while.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from monarch.errors import Refused
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.posix.credentials import Credentials, can_act_as_others
from monarch.text import errno_words
from monarch.types import Identity, Ino
from monarch.writeback.drain import Drain
from monarch.writeback.journal import Journal, Replay
from monarch.writeback.object_table import ObjectTable, content_of, xattrs_of
from monarch.writeback.objects import Objects
from monarch.writeback.op import Op
from monarch.writeback.open_file import UNTOUCHED, OpenFile
from monarch.writeback.tier_objects import FULL, TierObjects

log = logging.getLogger(__name__)

# How long an open file was not written when it is recorded as it is, in seconds.
_QUIET_S = 2.0


def _nothing() -> None: ...


def _ignore(op: Op) -> None: ...


@dataclass(eq=False, repr=False)
class Recorder:
    """Belongs to the event loop. Raises Refused where the journal takes nothing. ``is_broken``: the
    journal has failed, so nothing can be changed until the next mount. ``begins`` is called before
    each change that the source is to get, and before a process may write to a file; ``follow`` with
    each change behind its record."""

    _names: Namespace
    _object_table: ObjectTable
    _journal: Journal
    _drain: Drain
    _objects: TierObjects
    is_broken: bool = field(default=False, init=False)
    begins: Callable[[], None] = field(default_factory=lambda: _nothing, init=False)
    follow: Callable[[Op], None] = field(default_factory=lambda: _ignore, init=False)
    # Changes that were made and did not fit into the journal, in order, and files whose content
    # did not.
    _delayed: list[Op] = field(default_factory=list, init=False)
    _delayed_contents: dict[Ino, None] = field(default_factory=dict, init=False)
    # A daemon with one identity makes all changes as that: no record has to say whose it is.
    _acts_as_others: bool = field(default_factory=can_act_as_others, init=False)
    # The user who has last written the file of each object, or caused its copy up.
    _writers: dict[int, Credentials] = field(default_factory=dict, init=False)
    # Objects that were not opened for writing since the file was copied up.
    _unwritten: set[int] = field(default_factory=set, init=False)

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
            seq = self._append(op)
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

    def _append(self, op: Op) -> int:
        if op.kind != "gone":
            self.begins()
        return self._journal.append(op)

    def _noted(self, seq: int, op: Op) -> int:
        if op.object and op.kind != "gone":
            self._object_table.states.noted(op.object, seq)
        if op.kind in ("rename", "rmdir"):
            self._object_table.states.renamed(op)
        elif op.file:
            self._object_table.attributes.noted(Ino(op.ino), seq, op)
        self._drain.put(seq, op)
        self.follow(op)
        return seq

    @property
    def has_recorded_all(self) -> bool:
        """Whether all changes and contents are in the journal."""
        return not (self.is_broken or self._delayed or self._delayed_contents)

    def note_delayed(self) -> None:
        """Record the changes for which the disk had no room, as far as it has now."""
        while self._delayed:
            op = self._delayed[0]
            try:
                seq = self._append(op)
            except OSError:
                return
            del self._delayed[0]
            self._noted(seq, op)
            if op.kind == "gone":
                self.start_removal(op.object)

    def has_room(self) -> bool:
        """Whether the journal takes another change."""
        return not self._delayed and self._journal.has_room()

    def takes_removal(self) -> bool:
        """Whether the journal takes a removal, and then the marks of the drain."""
        return not self._delayed and self._journal.takes_removal()

    @property
    def is_draining(self) -> bool:
        """Whether the drain makes changes, which then need no room for their marks any more."""
        return len(self._drain.queue) > 0 and self._drain.stopped is None

    async def sync(self) -> None:
        """Make the changes so far safe. Raises Refused."""
        await self._objects.run_sync(self._journal.sync)

    def remove_object(self, number: int, *, is_at_source: bool = False) -> None:
        """Record that an object has no file any more, and remove it. ``is_at_source``: the source
        has its bytes."""
        self._writers.pop(number, None)
        self._unwritten.discard(number)
        # Its room is free once it is closed.
        self._objects.close_pending()
        try:
            self.note(Op(kind="gone", object=number))
        except Refused as error:
            # It stays, and the next mount removes it. But a full disk has room for the record only
            # when the object is removed: a mount that misses it reads the file from the source.
            if not (is_at_source and error.errno in FULL):
                return
        self.start_removal(number)

    def start_removal(self, number: int) -> None:
        """Remove an object that no file has, by the changes so far."""
        self._objects.sync_threads.start(_remove, self._journal, self._objects.on_disk, number)

    def copied_up(self, number: int, by: Credentials) -> None:
        """An object has the bytes of a file of the source, on behalf of ``by``."""
        self._writers[number] = by
        self._unwritten.add(number)

    def may_write(self, file: OpenFile, by: Credentials) -> None:
        """A user has opened a file for writing."""
        self.begins()
        file.writers[by] = None
        self._unwritten.discard(file.object)

    def keep_status(self, file: OpenFile) -> None:
        """Take over size, blocks and times of an open file."""
        if file.place.keep_status(file.node):
            self._object_table.own(file.node)

    def is_recorded(self, node: Node) -> bool:
        """Whether the last content that was recorded of a file has all bytes that it has now."""
        file = self._object_table.open.get(node.object)
        return file is None or not (file.is_changed or file.is_left_out)

    def is_awaited(self, node: Node) -> bool:
        """Whether no content was recorded yet of an open file that was created here: its last close
        records one, with all attributes."""
        number = node.object
        return (
            number in self._object_table.open and not self._object_table.states.content(number)[0]
        )

    def record(self, node: Node) -> None:
        """Record what is new in an open file that has a name; that an empty file is new counts."""
        file = self._object_table.open.get(node.object)
        if file is None or not node.names:
            return
        if file.is_changed or file.is_left_out or self.is_awaited(node):
            self._record_open(file)

    def record_of_others(self, node: Node) -> None:
        """Record what other users than the owner have written: after a change of its mode or owner
        the source may not let them write it."""
        file = self._object_table.open.get(node.object)
        if file is not None and any(by.uid not in (0, node.uid) for by in file.writers):
            # What the journal has no room for is recorded when it has.
            with suppress(Refused):
                self.record(node)

    def record_if_quiet(self, file: OpenFile, passed_s: float) -> None:
        """Record an open file that was not written for a while; the last look was ``passed_s``
        ago."""
        count = file.count()
        if count != file.seen:
            file.seen, file.quiet_s = count, 0.0
        elif count != file.recorded or file.is_left_out:
            file.quiet_s += passed_s
            if file.quiet_s >= _QUIET_S and file.node.names:
                with suppress(Refused):
                    self._record_open(file)

    def _record_open(self, file: OpenFile) -> None:
        self.record_synced(file, file.count(), None)

    def record_synced(self, file: OpenFile, count: int, size: int | None) -> int:
        """Record an open file after ``count`` changes; its number in the journal. ``size`` is the
        number of bytes that were synced, None if none were."""
        file.recorded = count
        file.is_left_out = False
        self.keep_status(file)
        node = file.node
        return self._record(node, size=node.size if size is None else size, synced=size is not None)

    def record_anew(self, node: Node) -> None:
        """Have the source get all of a file under the names that it has now."""
        self._unwritten.discard(node.object)
        with suppress(Refused):
            self._record(node, size=node.size)

    def record_delayed(self) -> None:
        """Record the contents for which the journal had no room, as far as it has now."""
        while self._delayed_contents and not self._delayed and self._journal.takes_content():
            ino = next(iter(self._delayed_contents))
            node = self._names.node(ino)
            try:
                if node is not None and node.object and node.names:
                    file = self._object_table.open.get(node.object)
                    if file is not None:
                        self._record_open(file)
                    else:
                        self._record(node, size=node.size)
            except Refused:
                return
            del self._delayed_contents[ino]

    def _record(self, node: Node, *, size: int, synced: bool = False) -> int:
        table, number = self._object_table, node.object
        file = table.open.get(number)
        writers = tuple(file.writers) if file is not None else ()
        if writers:
            self._writers[number] = writers[-1]
        try:
            paths = tuple(self._names.visible_paths(node.ino))
        except Refused:
            self._delayed_contents[node.ino] = None
            self._not_recorded(node, file, UNTOUCHED)
            raise
        # A file that was open when its daemon was killed may have been changed anywhere, and so may
        # one that was closed without a record.
        lowest = file.lowest(forget=True) if file is not None else 0
        if number in table.states.unrecorded:
            lowest = 0
        is_through = table.states.is_write_through(number)
        op = content_of(
            node,
            paths,
            size=size,
            xattrs=xattrs_of(self._names, node),
            intact=min(lowest, size),
            synced=synced,
            through=is_through,
            by=self._writers.get(number),
            also=writers[:-1],
            same=number in self._unwritten and not is_through,
        )
        try:
            seq = self.note(op)
        except Refused as error:
            if error.errno in FULL:
                self._delayed_contents[node.ino] = None
            self._not_recorded(node, file, lowest)
            raise
        table.states.record(number, seq, synced=synced, same=op.same)
        return seq

    def _not_recorded(self, node: Node, file: OpenFile | None, lowest: int) -> None:
        """The journal has no record of the bytes that were changed from ``lowest`` on."""
        self._object_table.states.not_recorded(node)
        if file is not None:
            file.touch(lowest)

    def take_up(
        self,
        ops: Sequence[tuple[int, Op]],
        done: Mapping[int, Identity | None],
        objects: Objects,
    ) -> list[Node]:
        """Take over the objects of earlier mounts, which ``ops`` are about; the files among them
        that no name leads to. ``done`` is what the source has of the changes that were drained."""
        copied: dict[int, Identity] = {}
        for _, op in ops:
            if op.by is not None and op.kind in ("create", "take", "content"):
                self._writers[op.object] = op.by
            if op.kind == "take" and op.was is not None:
                copied[op.object] = op.was
            elif op.kind == "content" and not op.same:
                copied.pop(op.object, None)
        found = self._object_table.take_up(ops, done)
        numbers = {node.object for node in found}
        self._writers = {number: by for number, by in self._writers.items() if number in numbers}
        for node in found:
            # The drain reports one that is missing.
            with suppress(OSError):
                status = objects.status(node.object)
                size, mtime_ns = status.st_size, status.st_mtime_ns
                node.set_content(size, blocks=status.st_blocks, mtime_ns=mtime_ns)
                was = copied.get(node.object)
                if was is not None and (was.size, was.mtime_ns) == (size, mtime_ns):
                    self._unwritten.add(node.object)
            self._object_table.own(node)
        return [node for node in found if not node.names]

    def record_unrecorded(self, found: Replay) -> None:
        """Record the files as they are that were open when their daemon was killed, and those for
        which the journal had no room. While it has none they wait, and the mount drains the others,
        which gives room. Raises Refused if the journal has failed."""
        nodes = {node.object: node for node in self._names.nodes() if node.object and node.names}
        recorded = found.versions()
        new = found.unpublished(nodes)
        for number, node in nodes.items():
            now = node.size, node.mtime_ns
            then = recorded.get(number, now)
            # The times of a staged file are set when it gets its name.
            is_through = self._object_table.states.is_write_through(number)
            is_recorded = then[0] == node.size if is_through else then == now
            if number in new or not is_recorded:
                try:
                    self._record(node, size=node.size)
                except Refused as error:
                    if error.errno not in FULL:
                        raise


def _remove(journal: Journal, objects: Objects, number: int) -> None:
    """Remove an object once the record is safe by which no file has it. Raises OSError."""
    journal.sync()
    objects.remove(number)
