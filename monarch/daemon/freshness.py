"""Compares the copies and the snapshot with the source in the background.

With ``freshness: mount`` once after the mount: every resident file and every directory is compared,
so that the operator sees a stale snapshot. With ``ttl`` repeatedly. Readers do not wait for it, and
it asks the source one small batch at a time.

With any ``freshness``, a file that changed just before it was fetched is compared once more. A file
whose attributes the drain may be changing is compared when that change is recorded.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import trio
import xxhash

from monarch.config.settings import SnapshotSettings
from monarch.errors import MonarchError, SourceChanged, SourceError
from monarch.namespace.namespace import Namespace
from monarch.namespace.refresh import names_differ, without_proof
from monarch.namespace.scan import settled_ns
from monarch.namespace.snapshot import Snapshot
from monarch.placement.residency import SOURCE, Residency
from monarch.posix.thread_pool import ThreadPool, batches
from monarch.telemetry.metrics import Metrics
from monarch.telemetry.report import SnapshotReport
from monarch.text import counted
from monarch.tiers.doubts import Doubt, Doubts
from monarch.tiers.hierarchy import Hierarchy
from monarch.tiers.source import Source, at_one_of, identity_of
from monarch.types import Identity, Ino
from monarch.vfs.revalidation import Revalidation

log = logging.getLogger(__name__)

# Files that one hop to a thread compares.
_BATCH = 64
# After this many failures of the source a comparison pauses; the pause in seconds.
_MOST_FAILURES = 8
_PATIENCE_S = 60.0
# How often the second look checks its files, in seconds.
_SECOND_LOOK_STEP_S = 0.25
_COPY_STEP_S = 0.5


@dataclass(kw_only=True)
class FreshnessWatch:
    """``settings`` has the pause between comparisons, if there is to be more than one.

    ``just_built``: the snapshot was made for this mount, so its directories need no comparison.
    ``inline_max``: larger files, in bytes, are copied again instead of compared in a second look.
    ``sends_opens`` as in ``KernelView``.
    """

    names: Namespace
    source: Source
    source_threads: ThreadPool
    hierarchy: Hierarchy
    residency: Residency
    revalidation: Revalidation
    doubts: Doubts
    metrics: Metrics
    settings: SnapshotSettings
    just_built: bool
    inline_max: int
    sends_opens: bool

    def __post_init__(self) -> None:
        # The files that other nodes of the job have given: they are opened there, not at the
        # source.
        self.given: Callable[[], Iterator[Ino]] = lambda: iter(())
        self.checks = self.changed_directories = 0
        self.stale = False if self.just_built else None

    async def run(self) -> None:
        """Compares once, or repeatedly with ``freshness: ttl``."""
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
            if self.settings.ttl_s is None:
                return
            self.just_built = False
            await trio.sleep(self.settings.ttl_s)

    def report(self) -> SnapshotReport:
        """The snapshot, and the results of the comparisons so far."""
        info, path = self.names.info(), self.names.snapshot.file
        size = 0
        with suppress(OSError):
            size = path.stat().st_size
        return SnapshotReport(
            file=os.fspath(self.settings.file or path),
            id=info.id,
            entries=info.entries,
            files=info.files,
            bytes=info.bytes_total,
            size_bytes=size,
            created_ns=info.created_ns,
            age_s=max(0.0, (time.time_ns() - info.created_ns) / 1e9),
            stale=self.stale,
            freshness=self.settings.freshness,
            checks=self.checks,
        )

    async def _look(self) -> None:
        changed = failed = 0
        if not self.just_built:
            snapshot = self.names.snapshot
            settled = await self.source_threads.run(settled_ns, snapshot)
            for batch in batches(snapshot.directories(), _BATCH):
                differing = {ino for ino, _ in await self._differing(batch)}
                same = [ino for ino in batch if ino not in differing]
                for ino in without_proof(snapshot, same, settled):
                    if await self.source_threads.run(_lists_others, self.source, snapshot, ino):
                        differing.add(ino)
                for ino in differing:
                    # Directories that were changed or removed through the mount do not count.
                    is_ours = self.names.is_written(ino) or self.names.is_forgotten(ino)
                    changed += not is_ours
            if changed and changed != self.changed_directories:
                log.warning(
                    "%s changed at the source since the snapshot; new files there are shown by"
                    " `monarch mount --refresh` only",
                    counted(changed, "directory", "directories"),
                )
            self.changed_directories = changed
        copies = [self.residency.resident_in(tier.number) for tier in self.hierarchy.tiers]
        for batch in batches(chain(*copies, self.given()), _BATCH):
            for ino, found in await self._differing(batch):
                if self.revalidation.may_be_drained(ino, found):
                    until_ns = time.monotonic_ns() + round(_PATIENCE_S * 1e9)
                    identity = self.names.stored(ino).identity
                    self.doubts.postpone(ino, identity, until_ns=until_ns)
                    continue
                changed += 1
                try:
                    await self.revalidation.look_again(ino)
                except SourceError as error:
                    log.debug("%s", error)
                    failed += error.errno not in (errno.ENOENT, errno.ESTALE)
                    if failed >= _MOST_FAILURES:
                        raise
        self.stale = changed > 0

    async def _differing(self, batch: Sequence[Ino]) -> list[tuple[Ino, Identity | None]]:
        questions = [
            (ino, self.names.source_paths(ino), self.names.stored(ino).identity) for ino in batch
        ]
        self.checks += len(questions)
        return await self.source_threads.run(_differing, self.source, questions)

    # -- files that changed just before they were fetched -----------------------------------------

    async def run_second_look(self) -> None:
        """Compares again files that changed just before they were fetched, after a resting time.
        Until cancelled."""
        while True:
            if self.doubts.is_empty():
                added = trio.Event()
                self.doubts.on_added = added.set
                await added.wait()
            await trio.sleep(_SECOND_LOOK_STEP_S)
            for batch in batches(self.doubts.due(time.monotonic_ns()), _BATCH):
                await self._look_twice(batch)

    async def _look_twice(self, batch: Sequence[tuple[Ino, Doubt]]) -> None:
        asked = [
            (ino, doubt)
            for ino, doubt in batch
            # If the version is another by now, the change was noticed.
            if not self.names.is_rewritten(ino)
            and not self.names.is_gone(ino)
            and self.names.stored(ino).identity == doubt.identity
        ]
        questions = [(ino, self.names.source_paths(ino), doubt.identity) for ino, doubt in asked]
        differing = dict(await self.source_threads.run(_differing, self.source, questions))
        for ino, doubt in batch:
            if (ino, doubt) not in asked:
                self.doubts.settle(ino, doubt)
            elif self.revalidation.may_be_drained(ino, differing.get(ino)):
                self._put_off(ino, doubt, _PATIENCE_S)
            elif await self._is_settled(ino, doubt, ino in differing):
                self.doubts.settle(ino, doubt)

    async def _is_settled(self, ino: Ino, doubt: Doubt, differs: bool) -> bool:
        """Handles one file; returns False if it was postponed."""
        try:
            if differs:
                await self.revalidation.look_again(ino)
            elif doubt.by_bytes:
                if self.residency.is_copying(ino):
                    return self._put_off(ino, doubt, _COPY_STEP_S)
                await self._compare(ino, doubt)
        except (SourceError, OSError) as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return True
            log.debug("%s", error)
            return self._put_off(ino, doubt, _PATIENCE_S)
        return True

    async def _compare(self, ino: Ino, doubt: Doubt) -> None:
        """Compares the bytes of a copy with those of the source. Raises SourceError, OSError."""
        held = self.residency.tier_of(ino) != SOURCE
        record = self.hierarchy.records.get(ino) if held else None
        if record is None or record.identity != doubt.identity:
            # No copy: only the page cache of the kernel can have the bytes.
            if self.sends_opens:
                self.revalidation.distrust(ino, differs=False)
            return
        if doubt.identity.size > self.inline_max:
            self.revalidation.distrust(ino, differs=False)
            return
        paths, fetch = self.names.source_paths(ino), self.source.fetch
        try:
            fetched = await self.source_threads.run(at_one_of, paths, fetch, doubt.identity)
        except SourceChanged:
            await self.revalidation.look_again(ino)
            return
        self.metrics.source_opened(copy=True)
        self.metrics.source_reads[1] += fetched.reads
        self.metrics.source_bytes[1] += len(fetched.data)
        if self.hierarchy.records.get(ino) != record:
            return
        if xxhash.xxh3_128_digest(fetched.data) == record.digest:
            self.hierarchy.records.settle(ino)
        else:
            self.revalidation.distrust(ino, differs=True)

    def _put_off(self, ino: Ino, doubt: Doubt, wait_s: float) -> bool:
        until_ns = time.monotonic_ns() + round(wait_s * 1e9)
        self.doubts.put_off(ino, doubt, until_ns=until_ns)
        return False


class ChangedInodes:
    """Inodes with an open that has found another version at the source; ``run`` compares them."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Ino](1024)

    def add(self, ino: Ino) -> None:
        """Never waits. Beyond a limit inodes are left out: their next opens notice the change."""
        with suppress(trio.WouldBlock):
            self._send.send_nowait(ino)

    async def run(self, look_again: Callable[[Ino], Awaitable[None]]) -> None:
        """Calls ``look_again`` with each inode, until cancelled."""
        async for ino in self._receive:
            try:
                await look_again(ino)
            except MonarchError as error:
                # The readers get the error, and the log has the first of many.
                log.debug("%s", error)


def _differing(
    source: Source, questions: Sequence[tuple[Ino, Sequence[bytes], Identity]]
) -> list[tuple[Ino, Identity | None]]:
    """The entries that differ, with their present identity."""
    found = []
    for ino, paths, identity in questions:
        now: Identity | None = None
        # If it is missing or the source fails, the next comparison finds out which.
        with suppress(OSError):
            now = identity_of(at_one_of(paths, source.status))
        if now != identity:
            found.append((ino, now))
    return found


def _lists_others(source: Source, snapshot: Snapshot, directory: Ino) -> bool:
    """Whether the source has other entries in a directory than the snapshot."""
    with suppress(OSError):
        return bool(source.at_root(names_differ, snapshot, directory, math.inf))
    return True
