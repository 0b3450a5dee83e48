"""Syncs of the tier's disk: the regular ones, and those after an fsync that has failed.

Commits sync at intervals the bytes that no process has fsynced, as a local file system does it.

A commit syncs all objects and then records in the journal which objects were synced. After a power
cut such an object holds the bytes that it had when the sync began. If it was written after that, it
may also hold some of the later bytes, as a file on a local disk may.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import trio

from monarch.errors import Refused
from monarch.namespace.namespace import Namespace
from monarch.posix import failpoints
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.text import errno_words
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.open_file import OpenFile, OpenTable
from monarch.writeback.source_files import DrainedObjects
from monarch.writeback.store import WriteStore
from monarch.writeback.tier_objects import TierObjects

log = logging.getLogger(__name__)

# The interval of checks for files with a failed fsync.
_LOOK_S = 0.5
# The pause before a file with a failed fsync is written anew, and the longest pause before the next
# try, in seconds.
_MEND_S = (1.0, 60.0)


class Commits:
    """``run`` commits every ``interval_s`` seconds, never if that is 0; ``commit`` commits now.
    Belongs to the event loop."""

    def __init__(self, place: WriteStore, object_table: ObjectTable, interval_s: float) -> None:
        self._journal, self._objects = place.journal, place.objects
        self._object_table = object_table
        self._interval_s = interval_s
        self._threads = ThreadPool(1, "commit", abandon=True)
        # Open from the start: ``syncfs`` reports only writes that failed after its descriptor was
        # opened.
        self._fd = os.open(place.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # The number of journal records at the last commit.
        self._records = 0
        # Objects that were unsynced when a sync of the tier failed: only an fsync of the object
        # itself shows whether its bytes are on the disk.
        self._suspect: frozenset[int] = frozenset()
        self._limiter = Limiter(log)

    async def run(self) -> None:
        """Commits in every interval, until cancelled."""
        if not self._interval_s:
            await trio.sleep_forever()
        while True:
            await trio.sleep(self._interval_s)
            await self.commit()

    async def commit(self) -> bool:
        """Syncs what was written by now; returns whether it is on the disk."""
        records, contents = self._journal.file.written, self._object_table.states.unsynced()
        objects = self._journal.doubtful
        is_new = records != self._records or self._object_table.is_being_written()
        if not (is_new or objects or contents):
            return True
        try:
            await self._threads.run(self._objects.sync_all, self._fd)
        except OSError as error:
            self._suspect |= objects | contents.keys()
            return self._failed(error)
        failpoints.failpoint("commit-synced")
        is_quiet = self._journal.file.written == records
        suspect = self._suspect | self._objects.failed
        try:
            self._journal.mark_durable(*((objects & self._journal.doubtful) - suspect))
            self._records = self._journal.file.written if is_quiet else records
            await self._threads.run(self._journal.sync)
        except OSError as error:
            return self._failed(error)
        failpoints.failpoint("commit-recorded")
        self._object_table.states.synced(
            {number: seq for number, seq in contents.items() if number not in suspect}
        )
        return True

    async def record(self, objects: Iterable[int]) -> bool:
        """Records that objects were synced at the source; returns whether that is on the disk."""
        try:
            self._journal.mark_durable(*objects)
            await self._threads.run(self._journal.sync)
        except OSError as error:
            return self._failed(error)
        return True

    def _failed(self, error: OSError) -> bool:
        self._limiter.warning(
            "commit",
            "what was written and not fsynced may not survive a power cut: %s",
            errno_words(error.errno),
        )
        return False

    def close(self) -> None:
        os.close(self._fd)


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
            log.error(
                "%s: fsync failed: %s; it fails until all processes that have the file open have"
                " closed it, and it could be written anew",
                self._names.path_text(file.ino, is_visible=True),
                errno_words(number),
            )

    def shown(self) -> list[str]:
        """The paths, as text, of the files whose fsync has failed, and which were not written anew
        since."""
        found = []
        for number in sorted(self._objects.on_disk.failed):
            try:
                node = self._object_table.node(number)
            except Refused:
                found.append(f"object {number}")
            else:
                if node is not None and node.names:
                    found.append(self._names.path_text(node.ino, is_visible=True))
        return found

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
            path = self._names.path_text(node.ino, is_visible=True)
            with self._opens.opening(node.ino):
                try:
                    await self._objects.run_sync(self._objects.on_disk.rewrite, number)
                except Refused as error:
                    log.warning("%s cannot be written anew: %s", path, errno_words(error.errno))
                else:
                    log.info("%s was written anew", path)
