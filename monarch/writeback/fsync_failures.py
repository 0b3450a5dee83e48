"""Files whose fsync has failed: it fails again until all bytes were written anew."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass, field

import trio

from monarch.errors import Refused
from monarch.namespace.namespace import Namespace
from monarch.text import errno_words
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.open_file import OpenFile, OpenTable
from monarch.writeback.source_files import DrainedObjects
from monarch.writeback.tier_objects import TierObjects

log = logging.getLogger(__name__)

_LOOK_S = 0.5
# The pause before a file with a failed fsync is written anew, and the longest pause before the next
# try, in seconds.
_MEND_S = (1.0, 60.0)


@dataclass(eq=False, repr=False)
class FsyncFailures:
    """Belongs to the event loop."""

    _names: Namespace
    _object_table: ObjectTable
    _objects: TierObjects
    _opens: OpenTable
    _drained: DrainedObjects
    # When each object is written anew, and how long after that again.
    _due_s: dict[int, tuple[float, float]] = field(default_factory=dict, init=False)

    def note(self, file: OpenFile, number: int) -> None:
        """An fsync has failed with an errno: what the disk has of the file is unknown.

        The kernel reports it once, and from then on counts the lost bytes as written.
        """
        if number == errno.ENOMEM:
            # There was no thread for it.
            return
        self._objects.on_disk.note_failure(file.object, number)
        if file.object not in self._due_s:
            self._due_s[file.object] = (trio.current_time(), _MEND_S[0])
            path = os.fsdecode(self._names.visible_path(file.ino))
            log.error(
                "%r: fsync failed: %s; it fails until all processes that have the file open have"
                " closed it, and it could be written anew",
                path,
                errno_words(number),
            )

    def paths(self) -> list[bytes]:
        """Paths of the files whose fsync has failed, and which were not written anew since."""
        failed = sorted(self._objects.on_disk.failed)
        nodes = (self._object_table.node(number) for number in failed)
        return [self._names.visible_path(node.ino) for node in nodes if node and node.names]

    async def run(self) -> None:
        """Write these files anew, until cancelled."""
        while True:
            await trio.sleep(_LOOK_S)
            if self._objects.on_disk.failed or self._due_s:
                await self._mend()

    async def _mend(self) -> None:
        """Write closed files anew that are due. One that is at the source is read from there."""
        now = trio.current_time()
        failed = self._objects.on_disk.failed
        for number in self._due_s.keys() - failed:
            del self._due_s[number]
        for number in failed:
            node = self._object_table.node(number)
            at_s, pause_s = self._due_s.get(number, (now, _MEND_S[0]))
            if (
                node is None
                or not node.names
                or now < at_s
                or self._object_table.states.is_write_through(number)
                or self._opens.is_open(node.ino)
            ):
                continue
            if self._drained.is_clean(node):
                self._drained.release(node)
                continue
            self._due_s[number] = (now + pause_s, min(2 * pause_s, _MEND_S[1]))
            path = os.fsdecode(self._names.visible_path(node.ino))
            with self._opens.opening(node.ino):
                try:
                    await self._objects.run_sync(self._objects.on_disk.rewrite, number)
                except Refused as error:
                    log.warning("%r cannot be written anew: %s", path, errno_words(error.errno))
                else:
                    log.info("%r was written anew", path)
