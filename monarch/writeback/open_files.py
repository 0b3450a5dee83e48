"""The bytes of written files: open, read, write, cut and made safe, in the tier that absorbs them.

Each such file has an object there (``writeback/objects.py``). While somebody has it open its
descriptor is held here, and the fast path, if there is one, reads and writes through a duplicate.
What is whole is told to the journal as a content: at fsync, at the last close, before a name is
given to it, and when nobody has written for a while.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import Refused, SourceChanged, SourceError
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.placement.residency import SOURCE
from monarch.posix.credentials import ROOT, Credentials, can_act_as_others
from monarch.posix.sparse import copy_data
from monarch.posix.thread_pool import ThreadPool
from monarch.text import errno_words
from monarch.tiers.source import SourceFile, identity_of
from monarch.transfer.source_calls import SourceCalls
from monarch.types import ROOT_INO, WRITTEN_INO, Identity, Ino, file_now_ns
from monarch.units import KiB
from monarch.writeback.drain import Drain
from monarch.writeback.fast_writes import FastWrites
from monarch.writeback.journal import Journal, Replay
from monarch.writeback.object_table import ObjectTable, WrittenFile
from monarch.writeback.objects import Objects
from monarch.writeback.op import Op
from monarch.writeback.source_writer import SourceWriter
from monarch.writeback.spares import Spares

Args = TypeVarTuple("Args")
T = TypeVar("T")

log = logging.getLogger(__name__)

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# An empty object, and what its directory may need.
_OBJECT_BYTES = 64 * KiB
# A file that is open and was not written for so long is recorded as it is. Seconds.
_QUIET_S = 2.0
_LOOK_S = 0.5
# How long the bytes of a file stay that no name leads to, for who was about to open it. Seconds.
_NAMELESS_S = 1.0
# When a file whose fsync has failed is written anew, and how long after that once more, up to the
# second. Seconds.
_MEND_S = (1.0, 60.0)
# So often a file that changes at the source is opened there.
_LOOKS_AT_SOURCE = 3
# When names are put away again after that was not possible. Seconds.
_PUT_AWAY_PAUSE_S = 60.0
# So many directories and other files without bytes here are known when their names are gone.
_BARE_KEPT = 4096
# So many objects are closed in one hop to a thread, at the latest when files are looked at next.
_CLOSED_AT_ONCE = 16
# What the disk is to blame for, and not who asks.
_OF_THE_DISK = frozenset({errno.EIO, errno.EROFS, errno.EUCLEAN})


class WrittenFiles:
    """Belongs to the event loop; what may wait for the disk is done in ``threads``.

    ``tier`` is the number of the tier that absorbs; ``make_room`` lets go of what may leave it, and
    answers whether there was any. Raises Refused with the errno of the disk.
    """

    def __init__(
        self,
        *,
        names: Namespace,
        object_table: ObjectTable,
        journal: Journal,
        objects: Objects,
        drain: Drain,
        writer: SourceWriter,
        source_calls: SourceCalls,
        make_room: Callable[[int], Awaitable[bool]],
        threads: ThreadPool,
        sync_threads: ThreadPool,
        tier: int,
        fast: FastWrites | None,
        look_again: Callable[[Ino], Awaitable[None]],
        next_object: int,
    ) -> None:
        self._names = names
        self._object_table = object_table
        self._journal = journal
        self._objects = objects
        self._drain = drain
        self._writer = writer
        self._make_room = make_room
        self._source_calls = source_calls
        self._threads = threads
        self._spares = Spares(objects, threads, next_object)
        # Descriptors of objects that nobody has open any more.
        self._closing: list[int] = []
        # Of their own: as many fsyncs as there are threads would hold up all that opens a file.
        self._sync_threads = sync_threads
        self._tier = tier
        self._fast = fast
        self._look_again = look_again
        # Of which the kernel may have pages of another version than the source has.
        self._outdated: set[Ino] = set()
        # A daemon with one identity does all as that: no change has to say by whom it was made.
        self._acts_as_others = can_act_as_others()
        # Who has written last to the file of each object, or taken it.
        self._writers: dict[int, Credentials] = {}
        # Staged files at the source that have the bytes of an object alone, by their numbers there.
        self._staged_inos: dict[int, int] = {}
        # Objects that nobody has opened for writing since the file was taken from the source.
        self._unwritten: set[int] = set()
        self._open: dict[Ino, WrittenFile] = {}
        self._opening: dict[Ino, trio.Event] = {}
        # Files that no name leads to, and that are still read past us.
        self._read_past: set[Ino] = set()
        # What no name leads to: files and since when, and what has no object, the longest first.
        self._unlinked: dict[Ino, float] = {}
        self._bare: dict[Ino, None] = {}
        # How often something written was refused, and with what the last time.
        self.failures = 0
        self.failure = ""
        # When objects whose sync has failed are written anew, and how long after that once more.
        self._mend_s: dict[int, tuple[float, float]] = {}
        self._put_away_s = -math.inf
        # What was done and the journal had no room for, in order; files whose bytes are to be
        # recorded when it has.
        self._unnoted: list[Op] = []
        self._unrecorded: dict[Ino, None] = {}
        # Whether the journal has failed: nothing can be changed until the next mount.
        self.is_broken = False

    def is_open(self, ino: Ino) -> bool:
        return ino in self._open

    def note(self, op: Op) -> int:
        """Write down what was done, and have the source told; its number in the journal.

        Raises Refused if the journal does not take it: the tree is one change ahead of what is
        known of it then. Of a full disk it is noted when there is room, before all that comes
        behind it; after another failure nothing more is done to names.
        """
        # To copy one takes longer than to make it.
        if not self._acts_as_others and (op.by is not None or op.also):
            op = replace(op, strict=True, by=None, also=())
        elif not op.strict:
            op = replace(op, strict=True)
        if self._unnoted:
            self.note_unnoted()
        try:
            if self._unnoted:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            seq = self._journal.append(op)
        except OSError as error:
            number = error.errno or errno.EIO
            if number in FULL:
                # What comes later is noted behind it; what the bytes are, as they are by then.
                if op.kind == "content":
                    self._unrecorded[Ino(op.ino)] = None
                else:
                    self._unnoted.append(op)
            elif not self.is_broken:
                log.error("the journal cannot be written: %s; remount", errno_words(number))
                self.is_broken = True
            self._note_failure(number)
            raise Refused(number) from error
        return self._noted(seq, op)

    def _noted(self, seq: int, op: Op) -> int:
        if op.object and op.kind != "gone":
            self._object_table.noted(op.object, seq)
        self._drain.put(seq, op)
        return seq

    def note_unnoted(self) -> None:
        """Write down what a full disk did not take, as far as it does now."""
        while self._unnoted:
            op = self._unnoted[0]
            try:
                seq = self._journal.append(op)
            except OSError:
                return
            del self._unnoted[0]
            self._noted(seq, op)
            if op.kind == "gone":
                self._sync_threads.start(_remove, self._journal, self._objects, op.object)
        while self._unrecorded and self._journal.has_room():
            ino = next(iter(self._unrecorded))
            try:
                node = self._names.node(ino)
                if node is not None and node.object and node.names:
                    file = self._open.get(ino)
                    if file is not None:
                        self._record_open(file, node)
                    else:
                        self._record(node, size=node.size, synced=False)
            except Refused:
                return
            del self._unrecorded[ino]

    async def require_room(self) -> None:
        """Before a change that takes room of the journal's disk. Raises Refused, ENOSPC."""
        if not self._unnoted and self._journal.has_room():
            return
        if await self._make_room(_OBJECT_BYTES):
            self.note_unnoted()
            if not self._unnoted and self._journal.has_room():
                return
        self._note_failure(errno.ENOSPC)
        raise Refused(errno.ENOSPC)

    def tier_of(self, node: Node) -> int:
        """The tier that has the bytes of a file."""
        is_here = node.object and not self._object_table.is_write_through(node.object)
        return self._tier if is_here else SOURCE

    def durable(self, node: Node) -> bytes:
        """How safe the bytes are: ``none``, ``local`` or ``source``."""
        if not node.object:
            return b"source"
        seq, synced = self._object_table.content(node.object)
        file = self._open.get(node.ino)
        if seq == 0 or (file is not None and file.is_changed):
            return b"none"
        is_done = self._drain.progress.is_done(self._object_table.last(node.object))
        if is_done and not (file is not None and file.is_write_through):
            return b"source"
        if self._objects.failure(node.object):
            return b"none"
        return b"local" if synced else b"none"

    def take_up(self, ops: Iterable[tuple[int, Op]], done: Mapping[int, Identity | None]) -> None:
        """Take over the objects of earlier mounts, of which ``ops`` tell, and ``done`` what the
        source has of them."""
        ops = list(ops)
        taken: dict[int, Identity] = {}
        for _, op in ops:
            if op.by is not None and op.kind in ("create", "take", "content"):
                self._writers[op.object] = op.by
            if op.kind == "take" and op.was is not None:
                taken[op.object] = op.was
            elif op.kind == "content" and not op.same:
                taken.pop(op.object, None)
        found = self._object_table.take_up(ops, done)
        objects = {node.object for node in found}
        self._writers = {number: by for number, by in self._writers.items() if number in objects}
        for node in found:
            # Of one that is missing the drain tells.
            with suppress(OSError):
                status = self._objects.status(node.object)
                node.size, node.blocks = status.st_size, status.st_blocks
                node.mtime_ns = status.st_mtime_ns
                was = taken.get(node.object)
                if was is not None and (was.size, was.mtime_ns) == (node.size, node.mtime_ns):
                    self._unwritten.add(node.object)
            self._object_table.own(node)
            if not node.names:
                # The daemon was killed before it could remove what nobody has a name of.
                self.leave(node)

    def record_unrecorded(self, found: Replay) -> None:
        """A daemon that was killed has not recorded what was open then: it is as it is."""
        nodes = {node.object: node for node in self._names.nodes() if node.object and node.names}
        told = found.told()
        new = found.unpublished(nodes)
        for number, node in nodes.items():
            now = node.size, node.mtime_ns
            is_told = told.get(number, now) == now
            if number in new or not (is_told or self._object_table.is_write_through(number)):
                self._record(node, size=node.size, synced=False)

    async def make_safe(self, node: Node) -> None:
        """Have the bytes of a file safe here that is to replace another one."""
        await self.open(node)
        try:
            await self.sync(node.ino)
        finally:
            self.release(node.ino)

    def is_only_here(self, node: Node) -> bool:
        """Whether bytes of a file were made safe here that the source has not got under its name.

        What was written to it since then may not be safe.
        """
        number = node.object
        if self._object_table.is_safe_only_here(number):
            return True
        return self._object_table.content(number)[1] and not self._drain.progress.is_done(
            self._object_table.last(number)
        )

    def release_drained(self, size: int, *, count: int = 0) -> int:
        """Remove objects that are at the source and nobody has open, the oldest first.

        Until so many bytes are free, and ``count`` are gone; how many bytes are. Their files are
        read from the source.
        """
        if size > 0:
            self._forget_unlinked(math.inf)
        freed = 0
        # Who reads one past us goes on reading it.
        busy = self._open.keys() | self._opening.keys()
        is_done = self._drain.progress.is_done
        for node in self._object_table.leaving(size, count=count, busy=busy, is_done=is_done):
            freed += self._leave(node)
        return freed

    def is_in_use(self, ino: Ino) -> bool:
        """Whether a process has a file open, or is about to. If not, all opens come here."""
        if ino in self._open or ino in self._opening:
            return True
        if self._fast is None:
            return False
        if not self._fast.is_open(ino):
            self._forget_object(ino)
        # A reader may have come past us in between.
        return self._fast.is_open(ino)

    def is_clean(self, node: Node) -> bool:
        """Whether the source has all of a file that has an object."""
        last = self._object_table.last(node.object)
        return self._drain.progress.is_done(last) and self._object_table.is_drained(node.object)

    def release_object(self, node: Node) -> bool:
        """Read a file that has an object from the source from now on; whether that can be."""
        if not self.is_clean(node) or self.is_in_use(node.ino):
            return False
        self._leave(node)
        return True

    def _leave(self, node: Node) -> int:
        """A file is read from the source from now on; the bytes that are free."""
        number = node.object
        self._forget_object(node.ino)
        freed = self._object_table.leave(node)
        self._writers.pop(number, None)
        self._staged_inos.pop(number, None)
        self._unwritten.discard(number)
        self._remove(number)
        return freed

    def record_anew(self, node: Node) -> None:
        """Have the source get all of a file under the names that it has now."""
        self._unwritten.discard(node.object)
        with suppress(Refused):
            self._record(node, size=node.size, synced=False)

    async def give_back(self, node: Node) -> None:
        """Show a file that nobody has open as the source has it: what was written here is given
        up, and the drain brings no more of it."""
        number, node.object = node.object, 0
        self._names.have_xattrs(node, {})
        self.remove(number)
        with suppress(Refused, SourceError):
            await self.look_again(node.ino)

    async def arrive(self, node: Node) -> None:
        """Wait until a file that went to the source directly is there, and then the source's.

        Raises Refused with what the source answers to the drain, and EIO if the bytes are lost.
        """
        try:
            await self._drain.progress.wait_or_fail(self._object_table.last(node.object))
        except OSError as error:
            raise Refused(error.errno or errno.EIO) from error
        if not node.object or not self.is_away(node):
            return
        if not self._object_table.is_drained(node.object):
            raise Refused(errno.EIO)
        self._leave(node)

    def is_away(self, node: Node) -> bool:
        """Whether it went to the source directly, and nobody has it open."""
        return self._object_table.is_write_through(node.object) and node.ino not in self._open

    # -- open and closed ---------------------------------------------------------------------------

    async def create(self) -> tuple[int, int]:
        """The number and the descriptor of a new object. Raises Refused, ENOSPC if there is no room
        for it."""
        try:
            return await self._spares.take()
        except OSError as error:
            if error.errno not in FULL or not await self._make_room(_OBJECT_BYTES):
                raise self._refused(error) from error
        try:
            return await self._spares.take()
        except OSError as error:
            raise self._refused(error) from error

    async def number(self) -> int:
        """That of an object for which there is no room here."""
        return await self._spares.number()

    async def sync_object(self, number: int, fd: int) -> None:
        """Until the bytes of an object are safe that nobody has open yet."""
        await self._ask_sync(self._objects.sync, number, fd)

    async def stage(
        self, path: bytes, number: int, *, by: tuple[Credentials, ...], is_new: bool
    ) -> int:
        """The descriptor of a staged file at the source, in the place of an object that has no
        room; ``is_new``: the source has no such file. Raises SourceError."""
        op = Op(kind="through", path=path, object=number, through=True, by=by[0], also=by[1:])
        if not self._acts_as_others:
            op = replace(op, by=None, also=())
        part = partial(self._writer.open_part, op, make=True, is_new=is_new)
        return await self._source_calls.call(ROOT_INO, part)

    async def go_on_there(self, node: Node, fd: int) -> None:
        """The bytes of a file are in its staged file at the source, ``fd``, from now on."""
        if self._fast is not None:
            await self._ask(self._fast.unbind, node.ino)
        path = self._names.visible_path(node.ino)
        self.note(Op(kind="through", path=path, object=node.object))
        self._object_table.set_write_through(node.object, path)
        file = self._open[node.ino]
        if file.fd != fd:
            file.left_fd, file.fd = file.fd, fd
        file.is_write_through = True
        node.blocks = 0
        self._object_table.own(node)
        # What of it was safe here is safe there.
        self._staged_inos[node.object] = await self._source_calls.call(node.ino, _synced, fd)
        self._sync_threads.start(_remove, self._journal, self._objects, node.object)
        log.warning("%r goes to the source directly: the tier is full", os.fsdecode(path))

    def opened(self, node: Node, fd: int, *, created: bool, by: Credentials | None) -> None:
        """Take over the descriptor of an object that is now open for its first user; ``by``: who
        may write it."""
        file = WrittenFile(node, fd, fast=self._fast)
        if by is not None:
            self._may_write(file, by)
        self._open[node.ino] = self._object_table.open[node.object] = file
        self._object_table.own(node)
        if self._fast is not None:
            self._fast.bind_written(node.ino, fd, tier=self._tier, create=created)

    def copied_up(self, node: Node, by: Credentials) -> None:
        """A file of the source has an object with its bytes, on behalf of ``by``."""
        self._writers[node.object] = by
        self._unwritten.add(node.object)

    def _may_write(self, file: WrittenFile, by: Credentials) -> None:
        file.writers[by] = None
        self._unwritten.discard(file.object)

    async def open(self, node: Node, *, by: Credentials | None = None) -> None:
        """One more user of a file that has an object; ``by``: who may write it."""
        ino = node.ino
        while (file := self._open.get(ino)) is None:
            if (opening := self._opening.get(ino)) is not None:
                await opening.wait()
                continue
            opening = self._opening[ino] = trio.Event()
            self._forget_object(ino)
            try:
                if self.is_away(node):
                    if by is None and (staged := await self._opened_away(node)) is not None:
                        self._opened_from_source(node, staged)
                        return
                    # It is read where it will be: the drain has little to do for it.
                    try:
                        await self.arrive(node)
                    except Refused as error:
                        if by is None and error.errno in FULL:
                            # No reader lacks room.
                            raise Refused(errno.EIO) from error
                        raise
                if node.object:
                    fd = await self._ask(self._objects.open, node.object)
                    self.opened(node, fd, created=False, by=by)
                else:
                    self._opened_from_source(node, await self._opened_at_source(ino))
            finally:
                del self._opening[ino]
                opening.set()
            return
        file.users += 1
        if by is not None:
            self._may_write(file, by)
        if self._fast is not None and file.at_source is None:
            self._fast.bind_written(ino, file.fd, tier=self._tier, create=False)

    async def _opened_away(self, node: Node) -> SourceFile | None:
        """What went to the source directly and is not under its name there, for who reads it: the
        source may have no room for that name. None if it is there. Raises SourceError."""
        number, source = node.object, self._source_calls.source
        if self._drain.progress.is_done(self._object_table.last(number)):
            return None
        beside, source_ino = (
            self._object_table.staged_beside(number),
            self._staged_inos.get(number, 0),
        )
        assert beside is not None
        with suppress(SourceChanged):
            staged = self._writer.open_staged
            return await self._source_calls.call(node.ino, staged, beside, number, source_ino)
        # It has a name by now, which another change is to follow.
        path, source_ino = self._drain.queue.path_of(number), self._object_table.source_ino(number)
        if path is None or not source_ino:
            return None
        with suppress(SourceChanged):
            return await self._source_calls.call(node.ino, source.open_known, path, source_ino)
        return None

    async def _opened_at_source(self, ino: Ino) -> SourceFile:
        """What is at the source of a file whose object was let go of: the version that it is now.

        Raises SourceError, ENOENT if others have removed it.
        """
        source = self._source_calls.source
        for _ in range(_LOOKS_AT_SOURCE):
            with suppress(SourceChanged):
                file = await self._source_calls.call(
                    ino, source.open, self._names.visible_path(ino)
                )
                known = self._names.at_source(ino)
                if known is None or identity_of(file.status) == known.identity:
                    return file
                file.release()
            await self.look_again(ino)
        raise SourceChanged("changes all the time")

    async def look_again(self, ino: Ino) -> None:
        """The source has another version of a file than is known. Raises SourceError, as
        ``Revalidation.look_again``."""
        if self._names.is_written(ino):
            # It, or a directory above, may have got a name that the source does not know yet.
            await self._drain.progress.settle_path(self._names.visible_path(ino))
            self._outdated.add(ino)
        try:
            await self._look_again(ino)
        except SourceError as error:
            node = self._names.node(ino)
            if node is not None and not node.names:
                self.leave(node)
            if error.errno == errno.ENOENT:
                # Whoever found its name looks it up anew, and may make it.
                raise Refused(errno.ESTALE) from error
            raise

    def is_outdated(self, ino: Ino) -> bool:
        """Whether the kernel's pages of a file that was opened are to go. Asked once."""
        try:
            self._outdated.remove(ino)
        except KeyError:
            return False
        return True

    def _opened_from_source(self, node: Node, at_source: SourceFile) -> None:
        self._open[node.ino] = WrittenFile(node, at_source.fd, fast=None, at_source=at_source)
        if self._fast is not None:
            self._fast.bind(node.ino, at_source.fd, tier=SOURCE, size=at_source.status.st_size)

    def is_open_at_source(self, ino: Ino) -> bool:
        file = self._open.get(ino)
        return file is not None and file.at_source is not None

    def release(self, ino: Ino) -> None:
        """One user less; the last one's end records what was written."""
        file = self._open[ino]
        file.users -= 1
        if file.users:
            return
        node = file.node
        if file.at_source is not None:
            file.at_source.release()
        else:
            # What is not recorded is found as it is by the next mount.
            with suppress(Refused):
                self.record(node)
            self._keep_status(node, file)
            del self._object_table.open[file.object]
            if self._fast is not None:
                self._fast.release_written(ino)
            for fd in (file.fd, file.left_fd):
                if fd >= 0:
                    self._close_with_others(fd)
        del self._open[ino]
        if not node.names:
            self.leave(node)
        elif self._fast is not None and ino >= WRITTEN_INO and self._is_readable(file):
            self._fast.know_object(ino, file.object)

    def _is_readable(self, file: WrittenFile) -> bool:
        """Whether all bytes of a file that was closed are in its object."""
        is_here = file.at_source is None and not file.is_write_through
        return is_here and not self._objects.failure(file.object)

    def _forget_object(self, ino: Ino) -> None:
        """Nobody opens it past us from now on."""
        if self._fast is not None:
            self._fast.forget_object(ino)

    def read_past(self, ino: Ino) -> None:
        """Whoever has read a file past us has closed it."""
        if ino in self._read_past:
            self._read_past.remove(ino)
            self._unlinked[ino] = trio.current_time()

    def leave(self, node: Node) -> None:
        """What no name leads to any more and nobody has open is gone after a while.

        Somebody may have found the name just before and is about to open it. Directories, and what
        is read from the source, may be open all the same: the last of them are kept.
        """
        if node.object:
            self._forget_object(node.ino)
            if self._fast is not None and self._fast.outdate(node.ino):
                self._read_past.add(node.ino)
            else:
                self._unlinked[node.ino] = trio.current_time()
            return
        self._bare[node.ino] = None
        while len(self._bare) > _BARE_KEPT:
            oldest = next(iter(self._bare))
            try:
                self._names.forget_node(oldest)
            except Refused:
                break
            del self._bare[oldest]

    def forget_unlinked(self) -> None:
        """Keep nothing any more that no name leads to and nobody has open, as far as is known."""
        self._forget_unlinked(math.inf)
        for ino in self._bare:
            self._names.forget_node(ino)
        self._bare.clear()

    def _forget_unlinked(self, before: float) -> None:
        for ino, since in list(self._unlinked.items()):
            if since > before:
                break
            node = self._names.node(ino)
            del self._unlinked[ino]
            if node is None or node.names or ino in self._open:
                continue
            if ino in self._opening:
                self._unlinked[ino] = trio.current_time()
                continue
            self.forget(node)

    def forget(self, node: Node) -> None:
        """A file that no name leads to and nobody has open."""
        number, node.object = node.object, 0
        self._forget_object(node.ino)
        self._outdated.discard(node.ino)
        self._names.forget_node(node.ino)
        if number:
            self.remove(number)

    def close_later(self, fd: int) -> None:
        """Close a file of the tier or of the source in a thread: even that may wait for either."""
        self._threads.start(os.close, fd)

    def _close_with_others(self, fd: int) -> None:
        """Close a file of the tier when there are more of them: one hop to a thread is for many."""
        self._closing.append(fd)
        if len(self._closing) >= _CLOSED_AT_ONCE:
            self._close_others()

    def _close_others(self) -> None:
        if self._closing:
            self._threads.start(_close_all, self._closing)
            self._closing = []

    def remove(self, number: int) -> None:
        """An object that is nobody's."""
        if (path := self._object_table.staged_beside(number)) is not None:
            self._threads.start(self._writer.discard_part, path, number)
        self._object_table.forget(number)
        self._writers.pop(number, None)
        self._staged_inos.pop(number, None)
        self._unwritten.discard(number)
        self._remove(number)

    def _remove(self, number: int) -> None:
        # The room of what is removed is free when nobody has it open.
        self._close_others()
        # Without that it stays, and the next mount sweeps it.
        with suppress(Refused):
            self.note(Op(kind="gone", object=number))
            self._sync_threads.start(_remove, self._journal, self._objects, number)

    def close(self) -> None:
        """The mount is gone: record what was open, as its last close would have."""
        for ino in list(self._open):
            self._open[ino].users = 1
            self.release(ino)
        self._close_others()
        self._spares.close()
        self._unlinked |= dict.fromkeys(self._read_past, 0.0)
        # A name that cannot be read now is the next mount's.
        with suppress(Refused):
            self._forget_unlinked(math.inf)

    # -- bytes -------------------------------------------------------------------------------------

    async def read(self, ino: Ino, offset: int, size: int) -> bytes:
        """Raises Refused or SourceError, whose disk it is."""
        file = self._open[ino]
        if file.at_source is not None:
            path, source = self._names.visible_path(ino), self._source_calls.source
            return await self._source_calls.call(
                ino, source.on, file.at_source, path, os.pread, size, offset
            )
        return await self._on(file, os.pread, size, offset)

    async def write(self, ino: Ino, offset: int, content: bytes) -> int:
        """Raises Refused or SourceError; ENOSPC if neither the tier nor the source has room."""
        file = self._open[ino]
        node = self._names.node(ino)
        if self._fast is None and node is not None:
            # The kernel leaves that to us, and does not say who writes.
            node.drop_privileges()
        async with self._changing(file, offset):
            written = await self._with_room(file, len(content), _write_all, content, offset)
            if file.is_write_through:
                self._grown(file, offset + written)
            return written

    async def truncate(self, node: Node, size: int, *, by: Credentials) -> None:
        await self.open(node, by=by)
        try:
            file = self._open[node.ino]
            async with self._changing(file, size):
                await self._with_room(file, 0, os.ftruncate, size)
                if size == 0:
                    self._objects.forget_failure(file.object)
                if file.is_write_through:
                    node.size = 0
                    self._grown(file, size)
        finally:
            self.release(node.ino)

    @asynccontextmanager
    async def _changing(self, file: WrittenFile, offset: int) -> AsyncIterator[None]:
        """While bytes of it are changed from ``offset`` on."""
        async with file.turn:
            # Counted before and after: who looks meanwhile sees that it changes.
            file.touch(offset)
            file.changes += 1
            try:
                yield
            except (Refused, SourceError) as error:
                if error.errno in FULL:
                    self._note_failure(error.errno)
                raise
            finally:
                file.touch(offset)
                file.changes += 1

    def _note_failure(self, number: int) -> None:
        self.failures += 1
        self.failure = errno_words(number)

    async def _on(
        self, file: WrittenFile, function: Callable[[int, Unpack[Args]], T], *args: Unpack[Args]
    ) -> T:
        """``function(fd, *args)`` where its bytes are. Raises Refused or SourceError."""
        if file.is_write_through:
            return await self._source_calls.call(file.ino, function, file.fd, *args)
        return await self._ask(function, file.fd, *args)

    async def _with_room(
        self,
        file: WrittenFile,
        size: int,
        function: Callable[[int, Unpack[Args]], T],
        *args: Unpack[Args],
    ) -> T:
        """The same for what needs room: if the tier has none, there is room made or it goes on at
        the source."""
        try:
            return await self._on(file, function, *args)
        except Refused as error:
            if error.errno not in FULL or file.is_write_through:
                raise
        if await self._make_room(size):
            with suppress(Refused):
                return await self._on(file, function, *args)
        await self._make_write_through(file)
        return await self._on(file, function, *args)

    async def _make_write_through(self, file: WrittenFile) -> None:
        """Go on in a staged file at the source, with what was written so far.

        Raises Refused, ENOSPC, if the file has no name any more, and SourceError.
        """
        node = self._names.node(file.ino)
        if node is None or not node.names:
            raise Refused(errno.ENOSPC)
        if self._fast is not None:
            await self._ask(self._fast.unbind, file.ino)
        path, by = self._names.visible_path(file.ino), tuple(file.writers) or (ROOT,)
        fd = await self.stage(path, file.object, by=by, is_new=not node.source_ino)
        try:
            node.size = await self._source_calls.call(file.ino, _copy_all, file.fd, fd)
        except BaseException:
            self.close_later(fd)
            if self._fast is not None:
                self._fast.rebind(file.ino, file.fd, tier=self._tier)
            raise
        await self.go_on_there(node, fd)

    def _grown(self, file: WrittenFile, size: int) -> None:
        node = self._names.node(file.ino)
        if node is not None:
            node.size = max(node.size, size)
            node.touch(file_now_ns())

    async def set_times(self, node: Node, *, atime_ns: int, mtime_ns: int) -> None:
        """Set those of a file's object. Raises Refused or SourceError."""
        ino, number = node.ino, node.object
        if (file := self._open.get(ino)) is not None:
            # Whoever closes it meanwhile would close the descriptor.
            file.users += 1
            try:
                await self._on(file, _set_times, atime_ns, mtime_ns)
            finally:
                self.release(ino)
        elif not self._object_table.is_write_through(number):
            try:
                await self._ask(_set_times_of, self._objects, number, atime_ns, mtime_ns)
            except Refused:
                # It may have been let go of meanwhile: the source has the file.
                now = self._names.node(ino)
                if now is None or now.object == number:
                    raise

    def status(self, node: Node) -> None:
        """Bring size, blocks and times of an open file's node up to date."""
        file = self._open.get(node.ino)
        if file is not None and file.at_source is None:
            self._keep_status(node, file)

    def _keep_status(self, node: Node, file: WrittenFile) -> None:
        if file.is_write_through:
            return
        status = os.fstat(file.fd)
        node.size, node.blocks = status.st_size, status.st_blocks
        self._object_table.own(node)
        if status.st_mtime_ns != node.mtime_ns:
            node.mtime_ns = status.st_mtime_ns
            node.ctime_ns = max(node.ctime_ns, status.st_mtime_ns)

    # -- safety ------------------------------------------------------------------------------------

    def is_left_out(self, ino: Ino) -> bool:
        """Whether the last content of an open file was not published, since it was written."""
        file = self._open.get(ino)
        return file is not None and file.is_left_out

    def is_recorded(self, node: Node) -> bool:
        """Whether the last content that was recorded of a file has all bytes that it has now."""
        file = self._open.get(node.ino)
        return file is None or not (file.is_changed or file.is_left_out)

    async def sync(self, ino: Ino) -> int:
        """Make the bytes of an open file safe; the number of the content that says so."""
        file = self._open[ino]
        if file.at_source is not None:
            return 0
        count = file.count()
        try:
            size = await self._sync_bytes(file)
        except (Refused, SourceError) as error:
            self._note_unsynced(file, error.errno or errno.EIO)
            raise
        node = self._names.node(ino)
        if node is None or not node.names or self._open.get(ino) is not file:
            return 0
        seq, synced = self._object_table.content(file.object)
        if file.recorded == count and synced and not file.is_left_out:
            return seq
        # What came meanwhile is not safe, and is recorded when it is, or at the end.
        file.recorded = count
        file.is_left_out = False
        self._keep_status(node, file)
        return self._record(node, size=size, synced=True)

    async def _sync_bytes(self, file: WrittenFile) -> int:
        """Its size. Raises Refused or SourceError, again and again once that was so."""
        if not file.is_write_through:
            size = os.fstat(file.fd).st_size
            await self._ask_sync(self._objects.sync, file.object, file.fd)
            return size
        if failure := self._objects.failure(file.object):
            raise Refused(failure)
        node = self._names.node(file.ino)
        size = node.size if node is not None else 0
        await self._on(file, os.fsync)
        return size

    def _note_unsynced(self, file: WrittenFile, number: int) -> None:
        """Nobody knows what the disk has of a file: that stays so until all of it is written anew.

        The kernel tells of it once and counts as written then what it could not write.
        """
        if number == errno.ENOMEM:
            # There was no thread for it.
            return
        self._objects.note_failure(file.object, number)
        if file.object not in self._mend_s:
            self._mend_s[file.object] = (trio.current_time(), _MEND_S[0])
            path = os.fsdecode(self._names.visible_path(file.ino))
            log.error(
                "%r: fsync failed: %s; it fails until all who have the file open have closed"
                " it, and it could be written anew",
                path,
                errno_words(number),
            )

    def unsynced(self) -> list[bytes]:
        """Paths of files whose fsync has failed, and which were not written anew since."""
        nodes = (self._object_table.node(number) for number in sorted(self._objects.failed))
        return [self._names.visible_path(node.ino) for node in nodes if node and node.names]

    async def mend(self) -> None:
        """Have files whose fsync has failed written anew, until cancelled."""
        while True:
            await trio.sleep(_LOOK_S)
            if self._objects.failed or self._mend_s:
                await self._mend()

    async def _mend(self) -> None:
        """Have objects whose sync has failed, and that nobody has open, written anew.

        What is at the source is read from there.
        """
        now = trio.current_time()
        failed = self._objects.failed
        for number in self._mend_s.keys() - failed:
            del self._mend_s[number]
        for number in failed:
            node = self._object_table.node(number)
            at_s, pause_s = self._mend_s.get(number, (now, _MEND_S[0]))
            if (
                node is None
                or not node.names
                or now < at_s
                or self._object_table.is_write_through(number)
            ):
                continue
            ino = node.ino
            if ino in self._open or ino in self._opening:
                continue
            if self._object_table.is_drained(number) and self._drain.progress.is_done(
                self._object_table.last(number)
            ):
                self._leave(node)
                continue
            self._mend_s[number] = (now + pause_s, min(2 * pause_s, _MEND_S[1]))
            # Who opens it meanwhile waits.
            opening = self._opening[ino] = trio.Event()
            self._forget_object(ino)
            try:
                await self._ask_sync(self._objects.rewrite, number)
            except Refused as error:
                log.warning(
                    "%r cannot be written anew: %s",
                    os.fsdecode(self._names.visible_path(ino)),
                    errno_words(error.errno),
                )
            else:
                log.info("%r was written anew", os.fsdecode(self._names.visible_path(ino)))
            finally:
                del self._opening[ino]
                opening.set()

    async def sync_journal(self) -> None:
        """Make safe what the journal holds by now."""
        await self._ask_sync(self._journal.sync)

    def record(self, node: Node) -> None:
        """Record what is new in an open file that has a name; an empty new one is that, too."""
        file = self._open.get(node.ino)
        if file is None or file.at_source is not None or not node.names:
            return
        is_new = self._object_table.content(file.object)[0] == 0
        if file.is_changed or file.is_left_out or is_new:
            self._record_open(file, node)

    def _record_open(self, file: WrittenFile, node: Node) -> None:
        file.recorded = file.count()
        file.is_left_out = False
        self._keep_status(node, file)
        self._record(node, size=node.size, synced=False)

    def _record(self, node: Node, *, size: int, synced: bool) -> int:
        file = self._open.get(node.ino)
        writers = tuple(file.writers) if file is not None else ()
        if writers:
            self._writers[node.object] = writers[-1]
        by = self._writers.get(node.object)
        try:
            path = self._names.visible_path(node.ino)
            paths = tuple(self._names.visible_paths(node.ino))
        except Refused:
            self._unrecorded[node.ino] = None
            raise
        # What was open when its daemon was killed may have been changed anywhere.
        intact = min(file.lowest(forget=True), size) if file is not None else 0
        op = Op(
            strict=True,
            kind="content",
            path=path,
            object=node.object,
            mode=stat.S_IMODE(node.mode),
            uid=node.uid,
            gid=node.gid,
            atime_ns=node.atime_ns,
            mtime_ns=node.mtime_ns,
            size=size,
            intact=intact,
            paths=paths,
            xattrs=dict(node.xattrs),
            synced=synced,
            through=self._object_table.is_write_through(node.object),
            ino=node.ino,
            by=by,
            also=writers[:-1],
            same=node.object in self._unwritten
            and not self._object_table.is_write_through(node.object),
        )
        seq = self.note(op)
        self._object_table.record(node.object, seq, synced=synced)
        return seq

    async def run(self) -> None:
        """Record what is open, was written and is quiet now, until cancelled."""
        while True:
            await trio.sleep(_LOOK_S)
            self._close_others()
            self.note_unnoted()
            with suppress(Refused):
                self._forget_unlinked(trio.current_time() - _NAMELESS_S)
                busy = self._open.keys() | self._opening.keys()
                is_done = self._drain.progress.is_done
                for node in self._object_table.arrived(busy=busy, is_done=is_done):
                    self._leave(node)
            for file in list(self._object_table.open.values()):
                if not file.is_write_through:
                    self._record_if_quiet(file)
            await self._put_names_away()

    def _record_if_quiet(self, file: WrittenFile) -> None:
        count = file.count()
        if count != file.seen:
            file.seen, file.quiet_s = count, 0.0
        elif count != file.recorded or file.is_left_out:
            file.quiet_s += _LOOK_S
            if file.quiet_s >= _QUIET_S and file.node.names:
                with suppress(Refused):
                    self._record_open(file, file.node)

    async def _put_names_away(self) -> None:
        """Have names that nobody uses out of memory, a few in one turn of the loop."""
        if trio.current_time() < self._put_away_s:
            return
        try:
            while self._names.put_away():
                await trio.lowlevel.checkpoint()
        except (OSError, Refused) as error:
            self._put_away_s = trio.current_time() + _PUT_AWAY_PAUSE_S
            log.warning("names of written files stay in memory: %s", errno_words(error.errno))

    async def _ask(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        return await self._ask_in(self._threads, function, *args)

    async def _ask_sync(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        return await self._ask_in(self._sync_threads, function, *args)

    async def _ask_in(
        self, threads: ThreadPool, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]
    ) -> T:
        try:
            return await threads.run(function, *args)
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> Refused:
        """What the tier's disk has answered, for who asks."""
        number = error.errno or errno.EIO
        # That the tier is full is no failure before the source is full as well.
        if number in _OF_THE_DISK:
            self._note_failure(number)
        return Refused(number)


def _remove(journal: Journal, objects: Objects, number: int) -> None:
    """Remove an object once it is certain that nobody will look for it. Raises OSError."""
    journal.sync()
    objects.remove(number)


def _synced(fd: int) -> int:
    """Sync a file; its number there."""
    os.fsync(fd)
    return os.fstat(fd).st_ino


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)


def _write_all(fd: int, content: bytes, offset: int) -> int:
    written = 0
    while written < len(content):
        written += os.pwrite(fd, memoryview(content)[written:], offset + written)
    return written


def _set_times(fd: int, atime_ns: int, mtime_ns: int) -> None:
    os.utime(fd, ns=(atime_ns, mtime_ns))


def _set_times_of(objects: Objects, number: int, atime_ns: int, mtime_ns: int) -> None:
    fd = objects.open(number)
    try:
        _set_times(fd, atime_ns, mtime_ns)
    finally:
        os.close(fd)


def _copy_all(object_fd: int, part_fd: int) -> int:
    """Bring all bytes of an object into the staged file; how many. Raises OSError."""
    return copy_data(object_fd, part_fd, os.fstat(object_fd).st_size)
