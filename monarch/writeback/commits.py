"""Commits: regular syncs of bytes that no process has fsynced, as a local file system does them.

A commit syncs all objects and then records in the journal which objects were synced. After a power
cut such an object holds the bytes that it had when the sync began. If it was written after that, it
may also hold some of the later bytes, as a file on a local disk may.
"""

from __future__ import annotations

import logging
import os

import trio

from monarch.posix import failpoints
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.text import errno_words
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.store import WriteStore

log = logging.getLogger(__name__)


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
        self._limiter = Limiter(60.0)

    async def run(self) -> None:
        """Commits in every interval, until cancelled."""
        if not self._interval_s:
            await trio.sleep_forever()
        while True:
            await trio.sleep(self._interval_s)
            await self.commit()

    async def commit(self) -> bool:
        """Syncs what was written by now; returns whether it is on the disk."""
        records, contents = self._journal.written, self._object_table.states.unsynced()
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
        is_quiet = self._journal.written == records
        suspect = self._suspect | self._objects.failed
        try:
            self._journal.mark_durable(*((objects & self._journal.doubtful) - suspect))
            self._records = self._journal.written if is_quiet else records
            await self._threads.run(self._journal.sync)
        except OSError as error:
            return self._failed(error)
        failpoints.failpoint("commit-recorded")
        self._object_table.states.synced(
            {number: seq for number, seq in contents.items() if number not in suspect}
        )
        return True

    def _failed(self, error: OSError) -> bool:
        self._limiter.warning(
            log,
            "commit",
            "what was written to the tier and not fsynced may not survive a power cut: %s",
            errno_words(error.errno),
        )
        return False

    def close(self) -> None:
        os.close(self._fd)
