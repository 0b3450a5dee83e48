"""Written files: open, read, write, truncate and fsync.

Each has an object in the absorbing tier. Its descriptor is kept while a process has the file open,
and the datapath, if there is one, reads and writes a duplicate of it. Where the tier has no room,
the file continues in a staged file at the source.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import Refused, SourceError
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.placement.residency import SOURCE
from monarch.posix.credentials import NOBODY, ROOT, Credentials, acting_as, least_of
from monarch.posix.files import closing_fd, copy_data
from monarch.tiers.source import SourceFile
from monarch.types import WRITTEN_INO, Ino, file_now_ns
from monarch.writeback.commits import FsyncFailures
from monarch.writeback.drain import Drain
from monarch.writeback.object_table import ObjectTable, mode_of
from monarch.writeback.objects import Objects
from monarch.writeback.op import Op
from monarch.writeback.open_file import (
    NO_FAST_WRITES,
    ObjectBytes,
    OpenFile,
    OpenTable,
    SourceBytes,
    StagedBytes,
    set_times,
)
from monarch.writeback.recorder import Recorder
from monarch.writeback.replication import Replication
from monarch.writeback.source_files import SourceFiles
from monarch.writeback.tier_objects import FULL, TierObjects
from monarch.writeback.unlinked import UnlinkedFiles
from monarch.writeback.write_gate import OBJECT_BYTES, SpaceReclaimer, WriteGate

Args = TypeVarTuple("Args")
T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class WrittenFiles:
    """Belongs to the event loop. Raises Refused with the errno of the tier's disk, or SourceError.

    Where the tier is full, objects that are drained and copies give way, and then the file
    continues at the source; ENOSPC means that neither has room.
    """

    _names: Namespace
    _object_table: ObjectTable
    _opens: OpenTable
    _objects: TierObjects
    _recorder: Recorder
    _unlinked: UnlinkedFiles
    _failures: FsyncFailures
    _source: SourceFiles
    _space: SpaceReclaimer
    _gate: WriteGate

    def is_open(self, ino: Ino) -> bool:
        return ino in self._opens.files

    def is_outdated(self, ino: Ino) -> bool:
        """Whether the kernel's pages of a file that was opened are to go; true only once."""
        if ino not in self._opens.outdated:
            return False
        self._opens.outdated.remove(ino)
        return True

    async def create(self) -> tuple[int, int]:
        """The number and the descriptor of a new object."""
        try:
            return await self._objects.create()
        except Refused as error:
            if error.errno not in FULL or not await self._space.make(OBJECT_BYTES):
                raise
        return await self._objects.create()

    async def stage(
        self, path_now: Callable[[], bytes], *, by: Credentials, is_new: bool
    ) -> tuple[int, int]:
        """The number and the descriptor of a file that is staged at the source. The arguments are
        those of ``SourceFiles.stage``."""
        number = await self._objects.spares.number()
        return number, await self._source.stage(path_now, number, by=(by,), is_new=is_new)

    def opened(self, node: Node, fd: int, *, created: bool, by: Credentials | None) -> None:
        """Take over the descriptor of an object that is now open for one more user; ``by``: the
        user who may write it. Processes that read the file at the source read the object from now
        on. No task may be opening the file."""
        place = ObjectBytes(fd, node.object, self._objects)
        file = OpenFile(node, place, self._opens.fast)
        if (earlier := self._opens.files.get(node.ino)) is not None:
            file.take_over(earlier)
        if by is not None:
            self._recorder.may_write(file, by)
        self._opens.files[node.ino] = self._object_table.open[node.object] = file
        self._object_table.own(node)
        self._opens.bind(file, created=created)

    async def open(self, node: Node, *, by: Credentials | None = None) -> bool:
        """One more user of a file that has an object; ``by``: the user who may write it.

        Returns False, and then the file is not open, if ``by`` is given and the tier has lost the
        object of a file that the source has: the file has no object any more."""
        file = await self._opens.get(node.ino)
        if file is None:
            with self._opens.opening(node.ino):
                return await self._open_first(node, by)
        file.users += 1
        if by is not None:
            self._recorder.may_write(file, by)
        if not file.place.is_from_source:
            self._opens.bind(file)
        return True

    async def _open_first(self, node: Node, by: Credentials | None) -> bool:
        there = await self._source.open_away(node, to_read=by is None)
        if there is None and node.object:
            try:
                fd = await self._objects.run(self._objects.on_disk.open, node.object)
            except Refused as error:
                if error.errno != errno.ENOENT:
                    raise
                there = await self._source.open_instead(node, to_read=by is None)
                if by is not None:
                    return False
            else:
                self.opened(node, fd, created=False, by=by)
                return True
        if there is None:
            there = await self._source.open(node.ino)
        self._opened_at_source(node, there)
        return True

    async def wait_for_opening(self, ino: Ino) -> None:
        """Wait until no task is opening a file, as ``opened`` requires."""
        await self._opens.wait_for_opening(ino)

    def _opened_at_source(self, node: Node, file: SourceFile) -> None:
        place = SourceBytes(file.fd, file, node.ino, self._names, self._source.calls)
        self._opens.files[node.ino] = OpenFile(node, place, NO_FAST_WRITES)
        self._opens.fast.bind(node.ino, file.fd, tier=SOURCE, size=file.status.st_size)

    def release(self, ino: Ino) -> None:
        """One user less; when the last one leaves, what was written is recorded."""
        file = self._opens.files[ino]
        file.users -= 1
        if file.users:
            return
        node, place = file.node, file.place
        if not place.is_from_source:
            # The next mount finds what is not recorded, and takes it as it is.
            with suppress(Refused):
                self._recorder.record(node)
            self._recorder.keep_status(file)
            del self._object_table.open[file.object]
            self._opens.fast.release_written(ino)
        file.close()
        del self._opens.files[ino]
        if not node.names:
            self._unlinked.leave(node)
        elif (
            ino >= WRITTEN_INO
            and isinstance(place, ObjectBytes)
            and not self._objects.on_disk.failure(file.object)
        ):
            self._opens.fast.know_object(ino, file.object)

    def close(self) -> None:
        """The mount is gone: record what was open, as its last close would have."""
        for ino in list(self._opens.files):
            self._opens.files[ino].users = 1
            self.release(ino)
        self._objects.close()
        # A name that cannot be read now is the next mount's.
        with suppress(Refused):
            self._unlinked.forget_at_end()

    @contextmanager
    def _kept_open(self, ino: Ino) -> Iterator[OpenFile]:
        """An open file, which stays open meanwhile: the release of a process that was killed may
        come before its call has ended."""
        file = self._opens.files[ino]
        file.users += 1
        try:
            yield file
        finally:
            self.release(ino)

    async def read(self, ino: Ino, offset: int, size: int) -> bytes:
        """Raises Refused or SourceError, depending on whose disk it is."""
        with self._kept_open(ino) as file:
            return await file.place.run(os.pread, size, offset)

    async def write(
        self, ino: Ino, offset: int, content: bytes, *, removes_set_id: bool = False
    ) -> int:
        """Raises Refused or SourceError; ENOSPC if neither the tier nor the source has room.

        ``removes_set_id``: a user writes, and the kernel has not removed the set-ID bits.
        """
        with self._kept_open(ino) as file:
            # Without a datapath the kernel leaves the bits to the file system and does not report
            # who writes. A process of a user may have inherited a descriptor that root has opened.
            if removes_set_id or not self._opens.has_datapath:
                await self._remove_set_id(file.node)
            by = least_of((file.writer, NOBODY if removes_set_id else None))
            async with self._changing(file, offset):
                written = await self._with_room(file, by, len(content), _write_all, content, offset)
                if file.is_write_through:
                    file.node.grow(offset + written, file_now_ns())
                return written

    async def truncate(self, node: Node, size: int, *, by: Credentials) -> None:
        """Set the size of a file. A user who is not root takes the set-ID bits from it."""
        await self.open(node, by=by)
        try:
            if not by.is_root:
                await self._remove_set_id(node)
            file = self._opens.files[node.ino]
            async with self._changing(file, size):
                await self._with_room(file, file.writer, 0, os.ftruncate, size)
                if size == 0:
                    self._objects.on_disk.forget_failure(file.object)
                if file.is_write_through:
                    node.set_content(0)
                    node.grow(size, file_now_ns())
        finally:
            self.release(node.ino)

    async def _remove_set_id(self, node: Node) -> None:
        """Removes the set-ID bits from the mode of an open file before a user changes its bytes.

        The new mode is a change of its own, as it is where the kernel removes the bits. So the
        drain removes them from the file at the source, also if root changes the bytes later.
        """
        if not node.set_id_to_remove:
            return
        if node.names:
            self._gate.require_journal()
            await self._gate.require_room()
        paths = tuple(self._names.visible_paths(node.ino)) if node.names else ()
        # Another write may have removed them meanwhile.
        has_set_id = bool(node.set_id_to_remove)
        node.drop_bits(node.set_id_to_remove)
        if paths and has_set_id:
            self._recorder.note(
                Op(
                    kind="attr",
                    path=paths[0],
                    paths=paths if len(paths) > 1 else (),
                    object=node.object,
                    mode=mode_of(node),
                    ino=node.ino,
                    by=Credentials(node.uid, node.gid),
                    ends_set_id=True,
                )
            )
        self.mode_changed(node)

    def mode_changed(self, node: Node) -> None:
        """Reports to the datapath whether a file has set-ID bits that a user's write removes."""
        self._opens.fast.know_set_id(node.ino, has_set_id=bool(node.set_id_to_remove))

    @asynccontextmanager
    async def _changing(self, file: OpenFile, offset: int) -> AsyncIterator[None]:
        """While bytes of it are changed from ``offset`` on."""
        async with file.turn:
            # Counted before and after: a task that asks meanwhile sees that it changes.
            file.touch(offset)
            try:
                yield
            except (Refused, SourceError) as error:
                if error.errno in FULL:
                    self._objects.count_failure(error.errno)
                raise
            finally:
                file.touch(offset)

    async def _with_room(
        self,
        file: OpenFile,
        by: Credentials | None,
        size: int,
        function: Callable[[int, Unpack[Args]], T],
        *args: Unpack[Args],
    ) -> T:
        """``function(fd, *args)`` where its bytes are, with the rights of ``by``. It needs room for
        ``size`` bytes: if the tier has none, room is made, or the file continues at the source."""

        def change(fd: int) -> T:
            with acting_as(by):
                return function(fd, *args)

        try:
            return await file.place.run(change)
        except Refused as error:
            if error.errno not in FULL or file.is_write_through:
                raise
        if await self._space.make(size):
            with suppress(Refused):
                return await file.place.run(change)
        await self._make_write_through(file)
        return await file.place.run(change)

    async def _make_write_through(self, file: OpenFile) -> None:
        """Continue in a staged file at the source, with what was written so far.

        Raises Refused, ENOSPC, if the file has no name any more, and SourceError.
        """
        node = file.node
        if not node.names:
            raise Refused(errno.ENOSPC)
        await self._objects.run(self._opens.fast.unbind, file.ino)
        path_now, by = partial(self._names.visible_path, file.ino), tuple(file.writers) or (ROOT,)
        number, is_new = file.object, not node.source_ino
        fd = await self._source.stage(path_now, number, by=by, is_new=is_new)
        try:
            size = await self._source.calls.call(
                file.ino, _copy_all, file.place.fd, fd, file.writer
            )
            source_ino = await self.sync_staged(file.ino, fd)
        except BaseException as error:
            # The source is full, too. The next try must not lose its staged file to this one.
            self._opens.fast.rebind(file.ino, file.place.fd, tier=self._opens.tier)
            if isinstance(error, SourceError):
                await self._source.discard(file.object, fd)
            else:
                self._unlinked.abandon_staged(file.object, fd)
            raise
        node.set_content(size)
        self._continue_at_source(node, fd, source_ino)

    async def sync_staged(self, ino: Ino, fd: int) -> int:
        """Sync a staged file, so that what was safe in the tier is safe there; its inode number.
        Raises SourceError."""
        return await self._source.calls.call(ino, _synced, fd)

    async def opened_staged(
        self, node: Node, fd: int, source_ino: int, *, created: bool, by: Credentials | None
    ) -> None:
        """As ``opened``, for a staged file at the source, in place of an object. It is synced and
        has the inode number ``source_ino``."""
        self.opened(node, fd, created=created, by=by)
        # At once: another process that opens the file may not take it for an object.
        self._continue_at_source(node, fd, source_ino)
        await self._objects.run(self._opens.fast.unbind, node.ino)
        if self._opens.fast.written(node.ino):
            # The datapath has served such a process, and does not tell the size.
            size = await self._source.calls.call(node.ino, _size_of, fd)
            self._opens.files[node.ino].touch(node.size)
            node.grow(size, file_now_ns())

    def _continue_at_source(self, node: Node, fd: int, source_ino: int) -> None:
        """The bytes of an open file are in its staged file at the source from now on. That is
        ``fd``, is synced and has the inode number ``source_ino``."""
        states = self._object_table.states
        path = states.staged_beside(node.object)
        assert path is not None
        self._recorder.note(Op(kind="through", path=path, object=node.object))
        states.set_write_through(node.object)
        file = self._opens.files[node.ino]
        before = file.place.fd if file.place.fd != fd else -1
        calls = self._source.calls
        file.place = StagedBytes(fd, node.ino, node.object, self._objects, calls, before)
        node.set_content(node.size, blocks=0)
        self._object_table.own(node)
        states.staged_inos[node.object] = source_ino
        self._recorder.start_removal(node.object)
        log.warning("%r goes to the source directly: the tier is full", os.fsdecode(path))

    async def set_times(self, node: Node, *, atime_ns: int, mtime_ns: int) -> None:
        """Set the times of a file's object, which may leave the tier meanwhile. Raises Refused or
        SourceError."""
        ino, number = node.ino, node.object
        if ino in self._opens.files:
            with self._kept_open(ino) as file:
                await file.place.set_times(atime_ns, mtime_ns)
        elif not self._object_table.states.is_write_through(number):
            on_disk = self._objects.on_disk
            try:
                await self._objects.run(_set_times_of, on_disk, number, atime_ns, mtime_ns)
            except Refused as error:
                # It may have been released meanwhile: the source has the file.
                now = self._names.node(ino)
                if now is None or now.object == number:
                    if error.errno != errno.ENOENT:
                        raise
                    await self._source.open_instead(node, to_read=False)

    def status(self, node: Node) -> None:
        """Bring size, blocks and times of an open file's node up to date."""
        if (file := self._opens.files.get(node.ino)) is not None:
            self._recorder.keep_status(file)

    async def sync(self, ino: Ino) -> int:
        """Make the bytes of an open file safe; the number in the journal of the content that says
        so, 0 if there is none.

        Raises Refused or SourceError, again and again once that was so.
        """
        with self._kept_open(ino) as file:
            if file.place.is_from_source:
                return 0
            count = file.count()
            try:
                size = await file.place.sync(file.node)
            except (Refused, SourceError) as error:
                self._failures.note(file, error.errno or errno.EIO)
                raise
            if not file.node.names or self._opens.files.get(ino) is not file:
                return 0
            seq, synced = self._object_table.states.content(file.object)
            if file.recorded == count and synced and not file.is_left_out:
                return seq
            # A later change is not safe; it is recorded at the next fsync, or at the end.
            return self._recorder.record_synced(file, count, size)

    def is_left_out(self, ino: Ino) -> bool:
        """Whether the last content of an open file was not published, since it was written."""
        file = self._opens.files.get(ino)
        return file is not None and file.is_left_out

    async def make_safe(self, node: Node) -> None:
        """Have the bytes of a file safe here that is to replace another one."""
        await self.open(node)
        try:
            await self.sync(node.ino)
        finally:
            self.release(node.ino)


@dataclass(eq=False, repr=False)
class Fsyncs:
    """Belongs to the event loop. ``waits_for_source``: safe means at the source.

    ``user`` is the user who calls fsync, as for ``Drain.wait_for``. Raises Refused and SourceError.
    """

    _names: Namespace
    _files: WrittenFiles
    _recorder: Recorder
    _drain: Drain
    _waits_for_source: bool
    # What lets another node keep a file; None: no node does.
    replication: Replication | None = None

    async def sync(self, ino: Ino, user: int | None) -> None:
        """Have a file safe, and all that was done to names."""
        await self._sync_open(ino, user)
        if self.replication is not None:
            await self.replication.synced(ino)

    async def _sync_open(self, ino: Ino, user: int | None) -> None:
        node = self._names.node(ino)
        if node is None or not (node.names and node.object) or self._files.is_open(ino):
            await self._sync(ino, user)
            return
        # The process may have opened it without Python, to read.
        await self._files.open(node)
        try:
            await self._sync(ino, user)
        finally:
            self._files.release(ino)

    async def _sync(self, ino: Ino, user: int | None) -> None:
        while True:
            seq = await self._files.sync(ino) if self._files.is_open(ino) else 0
            await self._recorder.sync()
            if not self._waits_for_source:
                return
            if seq:
                await self._drain.progress.wait(seq)
            if not (seq and self._files.is_left_out(ino)):
                break
        await self._wait_for_names(ino, user)

    async def sync_directory(self, ino: Ino, user: int | None) -> None:
        """Have all that was done to names safe."""
        await self._recorder.sync()
        if self._waits_for_source:
            await self._wait_for_names(ino, user)
        if self.replication is not None:
            await self.replication.renamed()

    async def _wait_for_names(self, ino: Ino, user: int | None) -> None:
        path, node = self._names.visible_path(ino), self._names.node(ino)
        number = node.object if node is not None else 0
        await self._drain.progress.wait_for(path, object=number, user=user)


def _synced(fd: int) -> int:
    """Sync a file; its inode number."""
    os.fsync(fd)
    return os.fstat(fd).st_ino


def _size_of(fd: int) -> int:
    return os.fstat(fd).st_size


def _write_all(fd: int, content: bytes, offset: int) -> int:
    written = 0
    while written < len(content):
        written += os.pwrite(fd, memoryview(content)[written:], offset + written)
    return written


def _set_times_of(objects: Objects, number: int, atime_ns: int, mtime_ns: int) -> None:
    with closing_fd(objects.open(number)) as fd:
        set_times(fd, atime_ns, mtime_ns)


def _copy_all(object_fd: int, part_fd: int, by: Credentials | None) -> int:
    """Bring all bytes of an object into the staged file, with the rights of ``by``; how many.
    Raises OSError."""
    with acting_as(by):
        return copy_data(object_fd, part_fd, os.fstat(object_fd).st_size)
