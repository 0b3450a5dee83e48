"""Looks at the source now and then: is what the tiers hold, and the snapshot, still true?

With ``freshness: mount`` once, in the background, after the mount: every resident file is compared
with the source, and every directory, so that a stale snapshot is known to the operator. With
``ttl`` again and again. It never holds anybody up and asks the source one small batch at a time.

Whatever ``freshness`` says, what changed just before it was fetched is looked at once more.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Sequence

import trio
import xxhash

from monarch.errors import MonarchError, SourceChanged, SourceError
from monarch.metrics import Metrics
from monarch.namespace.overlay import Namespace
from monarch.placement.residency import SOURCE, Residency
from monarch.text import counted
from monarch.threads import Threads, batches
from monarch.tiers.doubts import Doubt, Doubts
from monarch.tiers.records import Records
from monarch.tiers.source import Source, identity_of
from monarch.types import Identity, Ino
from monarch.vfs.filesystem import FileSystem

log = logging.getLogger(__name__)

# One hop to a thread pays for this many questions.
_BATCH = 64
# A source that has failed for so many files is asked again after this time. Seconds.
_MOST_FAILURES = 8
_PATIENCE_S = 60.0
# How often it is seen which young versions have rested, and which copies are made. Seconds.
_SECOND_LOOK_STEP_S = 0.25
_COPY_STEP_S = 0.5


class Watch:
    """``every_s`` is the pause between looks, None for one look only.

    ``just_built``: the snapshot was made for this very mount, its directories need no look.
    """

    def __init__(
        self,
        *,
        names: Namespace,
        source: Source,
        residency: Residency,
        filesystem: FileSystem,
        source_threads: Threads,
        every_s: float | None,
        just_built: bool,
    ) -> None:
        self._names = names
        self._source = source
        self._residency = residency
        self._filesystem = filesystem
        self._source_threads = source_threads
        self._every_s = every_s
        self._just_built = just_built
        self.checks = 0
        self.changed_directories = 0
        self.stale: bool | None = False if just_built else None

    async def run(self) -> None:
        """Look, and look again if told to."""
        while True:
            try:
                await self._look()
            except MonarchError as error:
                log.warning(
                    "could not compare with the source, will try again in %d s, and serves what"
                    " the tiers have: %s",
                    _PATIENCE_S,
                    error,
                )
                await trio.sleep(_PATIENCE_S)
                continue
            if self._every_s is None:
                return
            self._just_built = False
            await trio.sleep(self._every_s)

    def _is_ours(self, ino: Ino) -> bool:
        """Whether a directory was changed or removed through the mount."""
        return self._names.is_written(ino) or self._names.is_forgotten(ino)

    async def _look(self) -> None:
        changed = failed = 0
        if not self._just_built:
            for batch in batches(self._names.snapshot.directories(), _BATCH):
                differing = await self._differing(batch)
                # Where something was written through the mount, that changes the source.
                changed += sum(not self._is_ours(ino) for ino in differing)
            if changed and changed != self.changed_directories:
                told = counted(changed, "directory", "directories")
                log.warning(
                    "%s changed at the source since the snapshot; what is new there is shown by"
                    " `monarch mount --refresh` only",
                    told,
                )
            self.changed_directories = changed
        for tier in self._filesystem.tier_numbers:
            for batch in batches(self._residency.resident_in(tier), _BATCH):
                for ino in await self._differing(batch):
                    changed += 1
                    failed += await self._look_again(ino, last=failed + 1 >= _MOST_FAILURES)
        self.stale = changed > 0

    async def _look_again(self, ino: Ino, *, last: bool) -> bool:
        """Whether the source failed; with ``last`` that is raised, and the source left alone."""
        try:
            await self._filesystem.changes.look_again(ino)
        except SourceError as error:
            log.debug("%s", error)
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return False
            if last:
                raise
            return True
        return False

    async def _differing(self, batch: Sequence[Ino]) -> list[Ino]:
        questions = [
            (ino, self._names.path(ino), self._names.attributes(ino).identity) for ino in batch
        ]
        self.checks += len(questions)
        return await self._source_threads.run(_differing, self._source, questions)


class SecondLook:
    """Looks again at what changed just before it was fetched, when it has rested.

    ``inline_max`` is up to which size, in bytes, two versions are compared; a larger one is copied
    anew. ``opens_are_told`` as of ``FileSystem``.
    """

    def __init__(
        self,
        *,
        doubts: Doubts,
        names: Namespace,
        source: Source,
        records: Records,
        residency: Residency,
        filesystem: FileSystem,
        metrics: Metrics,
        source_threads: Threads,
        inline_max: int,
        opens_are_told: bool,
    ) -> None:
        self._doubts = doubts
        self._names = names
        self._source = source
        self._records = records
        self._residency = residency
        self._filesystem = filesystem
        self._metrics = metrics
        self._source_threads = source_threads
        self._inline_max = inline_max
        self._opens_are_told = opens_are_told

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await trio.sleep(_SECOND_LOOK_STEP_S)
            for batch in batches(self._doubts.due(time.monotonic_ns()), _BATCH):
                await self._look(batch)

    async def _look(self, batch: Sequence[tuple[Ino, Doubt]]) -> None:
        asked = [
            (ino, doubt)
            for ino, doubt in batch
            # Where the version is another by now, somebody has noticed.
            if not self._names.is_written(ino)
            and not self._names.is_gone(ino)
            and self._names.attributes(ino).identity == doubt.identity
        ]
        questions = [(ino, self._names.path(ino), doubt.identity) for ino, doubt in asked]
        differing = set(await self._source_threads.run(_differing, self._source, questions))
        for ino, doubt in batch:
            if (ino, doubt) not in asked or await self._is_settled(ino, doubt, ino in differing):
                self._doubts.settle(ino, doubt)

    async def _is_settled(self, ino: Ino, doubt: Doubt, differs: bool) -> bool:
        """Bring one up to date; False if it was put off."""
        try:
            if differs:
                await self._filesystem.changes.look_again(ino)
            elif doubt.by_bytes:
                if self._residency.is_copying(ino):
                    return self._put_off(ino, doubt, _COPY_STEP_S)
                await self._compare(ino, doubt)
        except (SourceError, OSError) as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return True
            log.debug("%s", error)
            return self._put_off(ino, doubt, _PATIENCE_S)
        return True

    async def _compare(self, ino: Ino, doubt: Doubt) -> None:
        """Compare the bytes of a copy with the source's. Raises SourceError, OSError."""
        held = self._residency.tier_of(ino) != SOURCE
        record = self._records.get(ino) if held else None
        if record is None or record.identity != doubt.identity:
            # At most the kernel has them.
            if self._opens_are_told:
                self._filesystem.distrust(ino, differs=False)
            return
        if doubt.identity.size > self._inline_max:
            self._filesystem.distrust(ino, differs=False)
            return
        path = self._names.path(ino)
        try:
            fetched = await self._source_threads.run(self._source.fetch, path, doubt.identity)
        except SourceChanged:
            await self._filesystem.changes.look_again(ino)
            return
        self._metrics.source_opened(copy=True)
        self._metrics.source_reads[1] += fetched.reads
        self._metrics.source_bytes[1] += len(fetched.data)
        if self._records.get(ino) != record:
            return
        if xxhash.xxh3_128_digest(fetched.data) == record.digest:
            self._records.settle(ino)
        else:
            self._filesystem.distrust(ino, differs=True)

    def _put_off(self, ino: Ino, doubt: Doubt, wait_s: float) -> bool:
        until_ns = time.monotonic_ns() + round(wait_s * 1e9)
        self._doubts.put_off(ino, doubt, until_ns=until_ns)
        return False


def _differing(source: Source, questions: Sequence[tuple[Ino, bytes, Identity]]) -> list[Ino]:
    found = []
    for ino, path, identity in questions:
        try:
            same = identity_of(source.status(path)) == identity
        except OSError:
            # Gone, or the source fails: whoever looks again finds out which.
            same = False
        if not same:
            found.append(ino)
    return found
