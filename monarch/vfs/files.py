"""The bytes of written files: open, read, write, cut and made safe, in the tier that absorbs them.

Each such file has an object there (``writeback/objects.py``). While somebody has it open its
descriptor is held here, and the fast path, if there is one, reads and writes through a duplicate.
What is whole is told to the journal as a content: at fsync, at the last close, before a name is
given to it, and when nobody has written for a while.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import Refused, SourceChanged
from monarch.namespace.overlay import Namespace
from monarch.namespace.written import Node
from monarch.placement.residency import SOURCE
from monarch.threads import Threads
from monarch.tiers.source import SourceFile
from monarch.types import Identity, Ino
from monarch.vfs.inquiry import Inquiry
from monarch.writeback.drain import Drain
from monarch.writeback.journal import Journal
from monarch.writeback.objects import Objects
from monarch.writeback.ops import Op

Args = TypeVarTuple("Args")
T = TypeVar("T")

# A file that is open and was not written for so long is recorded as it is. Seconds.
_QUIET_S = 2.0
_LOOK_S = 0.5


class FastWrites(Protocol):
    """What the native datapath does for written files, see ``fuse/datapath.py``."""

    def bind(self, ino: Ino, fd: int, *, tier: int, size: int) -> bool: ...
    def bind_written(self, ino: Ino, fd: int, *, tier: int, create: bool) -> bool: ...
    def written(self, ino: Ino) -> int: ...
    def release_written(self, ino: Ino) -> None: ...


class WrittenFile:
    """An open one. ``users`` are opens not released; the counts are of changes to its bytes.

    ``home`` is the file at the source that is read, if its object was let go of. ``changes`` are those made here, beside the fast path; ``recorded`` how many there were when
    its content was recorded last.
    """

    __slots__ = ("changes", "fd", "home", "ino", "object", "quiet_s", "recorded", "seen", "users")

    def __init__(self, node: Node, fd: int, home: SourceFile | None = None) -> None:
        self.ino = node.ino
        self.object = node.object
        self.fd = fd
        self.home = home
        self.users = 0
        self.changes = 0
        self.recorded = 0
        self.seen = 0
        self.quiet_s = 0.0


class WrittenFiles:
    """Belongs to the event loop; what may wait for the disk is done in ``threads``.

    ``tier`` is the number of the tier that absorbs. Raises Refused with the errno of the disk.
    """

    def __init__(
        self,
        *,
        names: Namespace,
        journal: Journal,
        objects: Objects,
        drain: Drain,
        inquiry: Inquiry,
        threads: Threads,
        tier: int,
        fast: FastWrites | None,
    ) -> None:
        self._names = names
        self._journal = journal
        self._objects = objects
        self._drain = drain
        self._inquiry = inquiry
        self._threads = threads
        self._tier = tier
        self._fast = fast
        self._open: dict[Ino, WrittenFile] = {}
        self._by_object: dict[int, WrittenFile] = {}
        self._opening: dict[Ino, trio.Event] = {}
        # The last content of each object: its number in the journal, and whether it was synced.
        self._contents: dict[int, tuple[int, bool]] = {}
        # Whose object it is, what it takes of the tier in bytes, and those that are at the source
        # as they are here, the longest first.
        self._inos: dict[int, Ino] = {}
        self._taken_bytes: dict[int, int] = {}
        self._drained: dict[int, Identity] = {}
        self.bytes = 0
        self.drained_bytes = 0
        self.largest = 0

    def is_open(self, ino: Ino) -> bool:
        return ino in self._open

    def is_written(self, number: int) -> bool:
        """Whether somebody has an object open and has changed it since it was recorded."""
        file = self._by_object.get(number)
        return file is not None and self._count(file) != file.recorded

    def durable(self, node: Node) -> bytes:
        """How safe the bytes are: ``none``, ``local`` or ``source``."""
        if not node.object:
            return b"source"
        seq, synced = self._contents.get(node.object, (0, False))
        file = self._open.get(node.ino)
        if seq == 0 or (file is not None and self._count(file) != file.recorded):
            return b"none"
        if self._drain.is_done(seq):
            return b"source"
        return b"local" if synced else b"none"

    # -- what the drain asks and tells -------------------------------------------------------------

    def is_dead(self, number: int) -> bool:
        """Whether no name leads to an object any more."""
        ino = self._inos.get(number)
        node = self._names.node(ino) if ino is not None else None
        return node is None or node.object != number or not node.names

    def published(self, number: int, path: bytes, identity: Identity) -> None:
        """An object is at the source, whole, as this version."""
        self._forget_drained(number)
        ino = self._inos.get(number)
        if ino is not None and not self.is_written(number):
            self._drained[number] = identity
            self.drained_bytes += self._taken_bytes.get(number, 0)

    def _forget_drained(self, number: int) -> None:
        if self._drained.pop(number, None) is not None:
            self.drained_bytes -= self._taken_bytes.get(number, 0)

    def let_drained_go(self, size: int) -> int:
        """Remove objects that are at the source and nobody has open, the oldest first.

        Until so many bytes are free; how many are. Their files are read from the source.
        """
        freed = 0
        for number in list(self._drained):
            if freed >= size:
                break
            node = self._names.node(self._inos[number])
            if node is None or node.ino in self._open or node.ino in self._opening:
                continue
            identity = self._drained[number]
            freed += self._taken_bytes.get(number, 0)
            self.remove(number)
            self._let_go(node, identity)
        return freed

    def _let_go(self, node: Node, identity: Identity) -> None:
        """The bytes of a file are the source's from now on."""
        self._inos.pop(node.object, None)
        self._drained.pop(node.object, None)
        node.object = 0
        node.size, node.mtime_ns = identity.size, identity.mtime_ns
        node.ctime_ns, node.source_ino = identity.ctime_ns, identity.source_ino

    def adopt(self, ops: Iterable[tuple[int, Op]], done: Mapping[int, Identity | None]) -> None:
        """Take over the objects of earlier mounts, of which ``ops`` tell, and ``done`` what the
        source has of them."""
        gone = set()
        for seq, op in ops:
            if op.kind == "content":
                self._contents[op.object] = (seq, op.synced)
                self._drained.pop(op.object, None)
                if (identity := done.get(seq)) is not None:
                    self._drained[op.object] = identity
            elif op.kind == "gone":
                gone.add(op.object)
        for node in self._names.nodes():
            if not node.object:
                continue
            self._inos[node.object] = node.ino
            if node.object in gone:
                self._let_go(node, self._drained[node.object])
            else:
                self._adopt(node)

    def _adopt(self, node: Node) -> None:
        try:
            status = self._objects.status(node.object)
        except OSError:
            # The drain tells of a record without its bytes.
            return
        node.size, node.blocks = status.st_size, status.st_blocks
        node.mtime_ns = status.st_mtime_ns
        self._count_bytes(node.object, node.size, node.blocks)
        if node.object in self._drained:
            self.drained_bytes += self._taken_bytes[node.object]

    def record_unrecorded(self, unpublished: Callable[[Iterable[int]], set[int]]) -> None:
        """A daemon that was killed has not recorded what was open then: it is as it is."""
        for number in sorted(unpublished(list(self._inos))):
            node = self._names.node(self._inos[number])
            if node is not None and node.names and node.object == number:
                self._record(node, size=node.size, synced=False)

    def _count_bytes(self, number: int, size: int, blocks: int) -> None:
        taken = blocks * 512
        more = taken - self._taken_bytes.get(number, 0)
        self._taken_bytes[number] = taken
        self.bytes += more
        if number in self._drained:
            self.drained_bytes += more
        self.largest = max(self.largest, size)

    # -- open and closed ---------------------------------------------------------------------------

    async def create(self, number: int) -> int:
        """The descriptor of a new object."""
        return await self._ask(self._objects.create, number)

    def opened(self, node: Node, fd: int, *, created: bool) -> None:
        """Take over the descriptor of an object that is now open for its first user."""
        file = self._open[node.ino] = self._by_object[node.object] = WrittenFile(node, fd)
        file.users = 1
        self._inos[node.object] = node.ino
        if self._fast is not None:
            self._fast.bind_written(node.ino, fd, tier=self._tier, create=created)

    async def open(self, node: Node) -> None:
        """One more user of a file that has an object."""
        ino = node.ino
        while (file := self._open.get(ino)) is None:
            if (opening := self._opening.get(ino)) is not None:
                await opening.wait()
                continue
            opening = self._opening[ino] = trio.Event()
            try:
                if node.object:
                    fd = await self._ask(self._objects.open, node.object)
                    self.opened(node, fd, created=False)
                else:
                    self._opened_home(node, await self._home(ino))
            finally:
                del self._opening[ino]
                opening.set()
            return
        file.users += 1
        if self._fast is not None and file.home is None:
            self._fast.bind_written(ino, file.fd, tier=self._tier, create=False)

    async def _home(self, ino: Ino) -> SourceFile:
        """What is at the source of a file whose object was let go of. Raises SourceError."""
        source = self._inquiry.source
        try:
            return await self._inquiry.ask(ino, source.open, self._names.path(ino))
        except SourceChanged:
            # A directory above may have got another name that the source does not know yet.
            await self._drain.settle()
        return await self._inquiry.ask(ino, source.open, self._names.path(ino))

    def _opened_home(self, node: Node, home: SourceFile) -> None:
        file = self._open[node.ino] = WrittenFile(node, home.fd, home)
        file.users = 1
        if self._fast is not None:
            self._fast.bind(node.ino, home.fd, tier=SOURCE, size=home.status.st_size)

    def is_open_at_source(self, ino: Ino) -> bool:
        file = self._open.get(ino)
        return file is not None and file.home is not None

    def release(self, ino: Ino) -> None:
        """One user less; the last one's end records what was written."""
        file = self._open[ino]
        file.users -= 1
        if file.users:
            return
        node = self._names.node(ino)
        assert node is not None
        if file.home is not None:
            file.home.release()
        else:
            self.record(node)
            self._keep_status(node, file)
            del self._by_object[file.object]
            if self._fast is not None:
                self._fast.release_written(ino)
            self._threads.start(os.close, file.fd)
        del self._open[ino]
        if not node.names:
            self._names.forget_node(ino)
            if file.object:
                self.remove(file.object)

    def remove(self, number: int) -> None:
        """An object that no name leads to and nobody has open."""
        self._forget_drained(number)
        self.bytes -= self._taken_bytes.pop(number, 0)
        self._contents.pop(number, None)
        self._inos.pop(number, None)
        self._journal.append(Op(kind="gone", object=number))
        self._threads.start(self._objects.remove, number)

    def close(self) -> None:
        """The mount is gone: record what was open, as its last close would have."""
        for ino in list(self._open):
            self._open[ino].users = 1
            self.release(ino)

    # -- bytes -------------------------------------------------------------------------------------

    async def read(self, ino: Ino, offset: int, size: int) -> bytes:
        """Raises Refused or SourceError, whose disk it is."""
        file = self._open[ino]
        if file.home is None:
            return await self._ask(os.pread, file.fd, size, offset)
        path, source = self._names.path(ino), self._inquiry.source
        return await self._inquiry.ask(ino, source.on, file.home, path, os.pread, size, offset)

    async def write(self, ino: Ino, offset: int, content: bytes) -> int:
        file = self._open[ino]
        # Counted before and after: who looks meanwhile sees that it changes.
        file.changes += 1
        try:
            return await self._ask(_write_all, file.fd, content, offset)
        finally:
            file.changes += 1

    async def truncate(self, node: Node, size: int) -> None:
        await self.open(node)
        try:
            file = self._open[node.ino]
            file.changes += 1
            await self._ask(os.ftruncate, file.fd, size)
            file.changes += 1
        finally:
            self.release(node.ino)

    async def set_times(self, node: Node, *, atime_ns: int, mtime_ns: int) -> None:
        file = self._open.get(node.ino)
        if file is None:
            node.atime_ns, node.mtime_ns = atime_ns, mtime_ns
            await self._ask(_set_times_of, self._objects, node.object, atime_ns, mtime_ns)
        else:
            await self._ask(_set_times, file.fd, atime_ns, mtime_ns)

    def status(self, node: Node) -> None:
        """Bring size, blocks and times of an open file's node up to date."""
        file = self._open.get(node.ino)
        if file is not None and file.home is None:
            self._keep_status(node, file)

    def _keep_status(self, node: Node, file: WrittenFile) -> None:
        status = os.fstat(file.fd)
        node.size, node.blocks = status.st_size, status.st_blocks
        self._count_bytes(file.object, node.size, node.blocks)
        if status.st_mtime_ns != node.mtime_ns:
            node.mtime_ns = status.st_mtime_ns
            node.ctime_ns = max(node.ctime_ns, status.st_mtime_ns)

    # -- safety ------------------------------------------------------------------------------------

    async def sync(self, ino: Ino) -> int:
        """Make the bytes of an open file safe; the number of the content that says so."""
        file = self._open[ino]
        if file.home is not None:
            return 0
        count = self._count(file)
        size = os.fstat(file.fd).st_size
        await self._ask(self._objects.sync, file.object, file.fd)
        node = self._names.node(ino)
        if node is None or not node.names or self._open.get(ino) is not file:
            return 0
        seq, synced = self._contents.get(file.object, (0, False))
        if file.recorded == count and synced:
            return seq
        # What came meanwhile is not safe, and is recorded when it is, or at the end.
        file.recorded = count
        self._keep_status(node, file)
        return self._record(node, size=size, synced=True)

    async def sync_journal(self) -> None:
        """Make safe what the journal holds by now."""
        await self._ask(self._journal.sync)

    def record(self, node: Node) -> None:
        """Record what is new in an open file that has a name; an empty new one is that, too."""
        file = self._open.get(node.ino)
        if file is None or file.home is not None or not node.names:
            return
        if self._count(file) != file.recorded or file.object not in self._contents:
            self._record_open(file, node)

    def _record_open(self, file: WrittenFile, node: Node) -> None:
        file.recorded = self._count(file)
        self._keep_status(node, file)
        self._record(node, size=node.size, synced=False)

    def _record(self, node: Node, *, size: int, synced: bool) -> int:
        op = Op(
            kind="content",
            path=self._names.visible_path(node.ino),
            object=node.object,
            mode=stat.S_IMODE(node.mode),
            uid=node.uid,
            gid=node.gid,
            atime_ns=node.atime_ns,
            mtime_ns=node.mtime_ns,
            size=size,
            paths=tuple(self._names.visible_paths(node.ino)),
            xattrs=dict(node.xattrs),
            synced=synced,
        )
        seq = self._journal.append(op)
        self._forget_drained(node.object)
        self._contents[node.object] = (seq, synced)
        self._drain.put(seq, op)
        return seq

    async def run(self) -> None:
        """Record what is open, was written and is quiet now, until cancelled."""
        while True:
            await trio.sleep(_LOOK_S)
            for file in list(self._by_object.values()):
                count = self._count(file)
                if count != file.seen:
                    file.seen, file.quiet_s = count, 0.0
                elif count != file.recorded:
                    file.quiet_s += _LOOK_S
                    node = self._names.node(file.ino)
                    if file.quiet_s >= _QUIET_S and node is not None and node.names:
                        self._record_open(file, node)

    def _count(self, file: WrittenFile) -> int:
        return file.changes + (self._fast.written(file.ino) if self._fast is not None else 0)

    async def _ask(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        try:
            return await self._threads.run(function, *args)
        except OSError as error:
            number = error.errno or errno.EIO
            raise Refused(number) from error


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
