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
from contextlib import suppress
from typing import TypeVar

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import Refused, SourceChanged
from monarch.namespace.overlay import Namespace
from monarch.namespace.written import Node
from monarch.placement.residency import SOURCE
from monarch.text import errno_words
from monarch.threads import Threads
from monarch.tiers.source import SourceFile
from monarch.types import Identity, Ino
from monarch.vfs.inquiry import Inquiry
from monarch.vfs.served import FastWrites
from monarch.vfs.stock import Stock, WrittenFile
from monarch.writeback.drain import Drain
from monarch.writeback.journal import Journal
from monarch.writeback.objects import Objects
from monarch.writeback.ops import Op

Args = TypeVarTuple("Args")
T = TypeVar("T")

# A file that is open and was not written for so long is recorded as it is. Seconds.
_QUIET_S = 2.0
_LOOK_S = 0.5
# What the disk is to blame for, and not who asks.
_OF_THE_DISK = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EUCLEAN})


class WrittenFiles:
    """Belongs to the event loop; what may wait for the disk is done in ``threads``.

    ``tier`` is the number of the tier that absorbs. Raises Refused with the errno of the disk.
    """

    def __init__(
        self,
        *,
        names: Namespace,
        stock: Stock,
        journal: Journal,
        objects: Objects,
        drain: Drain,
        inquiry: Inquiry,
        threads: Threads,
        tier: int,
        fast: FastWrites | None,
    ) -> None:
        self._names = names
        self._stock = stock
        self._journal = journal
        self._objects = objects
        self._drain = drain
        self._inquiry = inquiry
        self._threads = threads
        self._tier = tier
        self._fast = fast
        self._open: dict[Ino, WrittenFile] = {}
        self._opening: dict[Ino, trio.Event] = {}
        # How often the tier's disk has refused something, and with what the last time.
        self.failures = 0
        self.failure = ""

    def is_open(self, ino: Ino) -> bool:
        return ino in self._open

    def noted(self, number: int, seq: int) -> None:
        """Something was done to the file of an object, and recorded."""
        self._stock.noted(number, seq)

    def durable(self, node: Node) -> bytes:
        """How safe the bytes are: ``none``, ``local`` or ``source``."""
        if not node.object:
            return b"source"
        seq, synced = self._stock.content(node.object)
        if seq == 0 or self._stock.is_written(node.object):
            return b"none"
        if self._drain.is_done(seq):
            return b"source"
        return b"local" if synced else b"none"

    def take_up(self, ops: Iterable[tuple[int, Op]], done: Mapping[int, Identity | None]) -> None:
        """Take over the objects of earlier mounts, of which ``ops`` tell, and ``done`` what the
        source has of them."""
        for node in self._stock.take_up(ops, done):
            # Of one that is missing the drain tells.
            with suppress(OSError):
                status = self._objects.status(node.object)
                node.size, node.blocks = status.st_size, status.st_blocks
                node.mtime_ns = status.st_mtime_ns
            self._stock.own(node)

    def record_unrecorded(self, unpublished: Callable[[Iterable[int]], set[int]]) -> None:
        """A daemon that was killed has not recorded what was open then: it is as it is."""
        nodes = {node.object: node for node in self._names.nodes() if node.object and node.names}
        for number in sorted(unpublished(nodes)):
            self._record(nodes[number], size=nodes[number].size, synced=False)

    def let_drained_go(self, size: int) -> int:
        """Remove objects that are at the source and nobody has open, the oldest first.

        Until so many bytes are free; how many are. Their files are read from the source.
        """
        freed = 0
        busy = self._open.keys() | self._opening.keys()
        for node in self._stock.leaving(size, busy=busy, is_done=self._drain.is_done):
            number = node.object
            freed += self._stock.leave(node)
            self._remove(number)
        return freed

    # -- open and closed ---------------------------------------------------------------------------

    async def create(self, number: int) -> int:
        """The descriptor of a new object."""
        return await self._ask(self._objects.create, number)

    def opened(self, node: Node, fd: int, *, created: bool) -> None:
        """Take over the descriptor of an object that is now open for its first user."""
        file = WrittenFile(node, fd, fast=self._fast)
        self._open[node.ino] = self._stock.open[node.object] = file
        self._stock.own(node)
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
            return await self._inquiry.ask(ino, source.open, self._names.visible_path(ino))
        except SourceChanged:
            # A directory above may have got another name that the source does not know yet.
            await self._drain.settle()
        return await self._inquiry.ask(ino, source.open, self._names.visible_path(ino))

    def _opened_home(self, node: Node, home: SourceFile) -> None:
        self._open[node.ino] = WrittenFile(node, home.fd, fast=None, home=home)
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
            del self._stock.open[file.object]
            if self._fast is not None:
                self._fast.release_written(ino)
            self._threads.start(os.close, file.fd)
        del self._open[ino]
        if not node.names:
            self.forget(node)

    def forget(self, node: Node) -> None:
        """A file that no name leads to and nobody has open."""
        number, node.object = node.object, 0
        self._names.forget_node(node.ino)
        if number:
            self.remove(number)

    def remove(self, number: int) -> None:
        """An object that is nobody's."""
        self._stock.forget(number)
        self._remove(number)

    def _remove(self, number: int) -> None:
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
        path, source = self._names.visible_path(ino), self._inquiry.source
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
        self._stock.own(node)
        if status.st_mtime_ns != node.mtime_ns:
            node.mtime_ns = status.st_mtime_ns
            node.ctime_ns = max(node.ctime_ns, status.st_mtime_ns)

    # -- safety ------------------------------------------------------------------------------------

    async def sync(self, ino: Ino) -> int:
        """Make the bytes of an open file safe; the number of the content that says so."""
        file = self._open[ino]
        if file.home is not None:
            return 0
        count = file.count()
        size = os.fstat(file.fd).st_size
        await self._ask(self._objects.sync, file.object, file.fd)
        node = self._names.node(ino)
        if node is None or not node.names or self._open.get(ino) is not file:
            return 0
        seq, synced = self._stock.content(file.object)
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
        if file.is_changed or self._stock.content(file.object)[0] == 0:
            self._record_open(file, node)

    def _record_open(self, file: WrittenFile, node: Node) -> None:
        file.recorded = file.count()
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
        self._stock.record(node.object, seq, synced=synced)
        self._drain.put(seq, op)
        return seq

    async def run(self) -> None:
        """Record what is open, was written and is quiet now, until cancelled."""
        while True:
            await trio.sleep(_LOOK_S)
            for file in list(self._stock.open.values()):
                count = file.count()
                if count != file.seen:
                    file.seen, file.quiet_s = count, 0.0
                elif count != file.recorded:
                    file.quiet_s += _LOOK_S
                    node = self._names.node(file.ino)
                    if file.quiet_s >= _QUIET_S and node is not None and node.names:
                        self._record_open(file, node)

    async def _ask(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        try:
            return await self._threads.run(function, *args)
        except OSError as error:
            number = error.errno or errno.EIO
            if number in _OF_THE_DISK:
                self.failures += 1
                self.failure = errno_words(number)
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
