"""Commits: what nobody fsyncs is on the tier's disk soon all the same, as of a local file system.

From time to time all that was written by then is synced, and then the journal says that it was: the
objects that it names are as they were when the sync began, or newer. One that is written meanwhile
holds after a power cut what it held then, with some of what was written since, as a file on a local
disk does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import trio

from monarch.posix import failpoints
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.text import errno_words
from monarch.writeback.journal import Journal
from monarch.writeback.objects import Objects

log = logging.getLogger(__name__)


class Unsynced(Protocol):
    """What commits ask the file system of absorbed files. Called on the event loop."""

    def unsynced(self) -> Mapping[int, int]:
        """The last content of each object that is not known to be on the tier's disk."""
        ...

    def is_being_written(self) -> bool:
        """Whether bytes have changed that no record tells of yet."""
        ...

    def synced(self, contents: Mapping[int, int]) -> None:
        """These contents are on the disk by now."""
        ...


class Commits:
    """``run`` makes one every ``interval_s``, none if that is 0; ``commit`` makes one now.

    Belongs to the event loop; what waits for the disk waits in a thread of its own.
    """

    def __init__(
        self,
        directory: Path,
        *,
        journal: Journal,
        objects: Objects,
        contents: Unsynced,
        interval_s: float,
    ) -> None:
        self._journal = journal
        self._objects = objects
        self._contents = contents
        self._interval_s = interval_s
        self._threads = ThreadPool(1, "commit", abandon=True)
        # Open from the start: the kernel tells a failed write to who had the file system open.
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._records = 0
        # Written when the tier failed to write something: only their own fsync can tell.
        self._suspect: frozenset[int] = frozenset()
        self._limiter = Limiter(60.0)

    async def run(self) -> None:
        """Until cancelled."""
        if not self._interval_s:
            await trio.sleep_forever()
        while True:
            await trio.sleep(self._interval_s)
            await self.commit()

    async def commit(self) -> bool:
        """Have on the disk what was written by now; whether it is."""
        records, contents = self._journal.written, self._contents.unsynced()
        objects = self._journal.doubtful
        is_new = records != self._records or self._contents.is_being_written()
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
        self._contents.synced(
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
