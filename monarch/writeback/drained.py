"""What the source has of written files, and objects that are not needed any more for that."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from monarch.errors import Refused
from monarch.namespace.overlay import Node
from monarch.writeback.drain import Drain
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.objects import Objects
from monarch.writeback.open_file import OpenTable
from monarch.writeback.recorder import ChangeLog, Recorder
from monarch.writeback.unlinked import UnlinkedFiles


@dataclass(eq=False, repr=False)
class DrainedObjects:
    """Belongs to the event loop. A file whose object is *released* is read from the source."""

    _object_table: ObjectTable
    _on_disk: Objects
    _drain: Drain
    _opens: OpenTable
    _changes: ChangeLog
    _recorder: Recorder
    _unlinked: UnlinkedFiles

    def durable(self, node: Node) -> bytes:
        """How safe the bytes are: ``none``, ``local`` or ``source``."""
        if not node.object:
            return b"source"
        seq, synced = self._object_table.states.content(node.object)
        file = self._opens.files.get(node.ino)
        if seq == 0 or (file is not None and file.is_changed):
            return b"none"
        is_done = self._drain.progress.is_done(self._object_table.states.last(node.object))
        if is_done and not (file is not None and file.is_write_through):
            return b"source"
        if self._on_disk.failure(node.object):
            return b"none"
        return b"local" if synced else b"none"

    def is_only_here(self, node: Node) -> bool:
        """Whether bytes of a file were made safe here that the source lacks under its name.

        Later writes to it may not be safe.
        """
        number = node.object
        if self._object_table.states.is_safe_only_here(number):
            return True
        is_synced = self._object_table.states.content(number)[1]
        return is_synced and not self._drain.progress.is_done(
            self._object_table.states.last(number)
        )

    def is_clean(self, node: Node) -> bool:
        """Whether the source has all of a file that has an object."""
        last = self._object_table.states.last(node.object)
        return self._drain.progress.is_done(last) and self._object_table.states.is_drained(
            node.object
        )

    def is_settled(self, node: Node) -> bool:
        """Whether the source gets no more of a file that has an object.

        It may lack a file that others have removed, if nothing was written here.
        """
        states = self._object_table.states
        is_done = self._drain.progress.is_done(states.last(node.object))
        return is_done and (states.is_drained(node.object) or states.is_unwritten(node.object))

    def is_away(self, node: Node) -> bool:
        """Whether a file went to the source directly, and no process has it open."""
        return (
            self._object_table.states.is_write_through(node.object)
            and node.ino not in self._opens.files
        )

    async def arrive(self, node: Node) -> None:
        """Wait until a file that went to the source directly is there, and then the source's.

        Raises Refused with what the source answers to the drain, and EIO if the bytes are lost.
        """
        try:
            await self._drain.progress.wait_or_fail(self._object_table.states.last(node.object))
        except OSError as error:
            raise Refused(error.errno or errno.EIO) from error
        if not node.object or not self.is_away(node):
            return
        if not self._object_table.states.is_drained(node.object):
            raise Refused(errno.EIO)
        self.release(node)

    def release(self, node: Node) -> int:
        """Read a file from the source from now on; how many bytes are free."""
        number = node.object
        self._opens.fast.forget_object(node.ino)
        freed = self._object_table.leave(node)
        self._recorder.forget(number)
        self._changes.remove_object(number)
        return freed

    def release_if_clean(self, node: Node) -> bool:
        """Release the object of a file; False if the source lacks something of it, or a process
        has it open."""
        if not self.is_clean(node) or self._opens.is_in_use(node.ino):
            return False
        self.release(node)
        return True

    def release_oldest(self, size: int, *, count: int = 0) -> int:
        """Release objects that the source has and no process has open, the oldest first.

        Ends when ``size`` bytes are free and ``count`` objects are gone; how many bytes are free.
        """
        if size > 0:
            self._unlinked.forget_objects()
        # A process that reads one without Python keeps its bytes.
        busy, is_done = self._opens.busy(), self._drain.progress.is_done
        leaving = self._object_table.leaving(size, count=count, busy=busy, is_done=is_done)
        return sum(self.release(node) for node in leaving)

    def release_arrived(self) -> None:
        """Release the files that went to the source directly and are there. Raises Refused."""
        busy, is_done = self._opens.busy(), self._drain.progress.is_done
        for node in self._object_table.arrived(busy=busy, is_done=is_done):
            self.release(node)
