"""Connects the parts of write-back for a mount that can be written, or that has written data."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import trio

from monarch.config.settings import MountSettings
from monarch.errors import TierError
from monarch.namespace.namespace import Namespace
from monarch.placement.ledger import Ledger
from monarch.placement.residency import Residency
from monarch.posix.thread_pool import ThreadPool
from monarch.text import counted
from monarch.tiers.tier import Space
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import SourceLoad
from monarch.types import Ino, KernelCaches, file_now_ns
from monarch.units import format_bytes
from monarch.writeback.commits import Commits
from monarch.writeback.crash_losses import Numbered
from monarch.writeback.drain import Drain, DrainOptions
from monarch.writeback.earlier import renumbered, unfinished
from monarch.writeback.fast_writes import FastWrites
from monarch.writeback.front import build_front
from monarch.writeback.journal import Replay
from monarch.writeback.lease import RENEW_S, Lease
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.open_file import OpenTable
from monarch.writeback.others import Others
from monarch.writeback.refusals import Refusals
from monarch.writeback.replay import replay
from monarch.writeback.source_writer import SourceWriter
from monarch.writeback.space import SpaceReclaimer
from monarch.writeback.store import WriteStore, know_snapshot, snapshot_known
from monarch.writeback.tier_objects import TierObjects

log = logging.getLogger(__name__)

# How long the end of a mount waits for a source to take the lease back. Seconds.
_RELEASE_S = 5.0
# Calls of the absorbing tier at the same time: opening, writing beside the fast path; fsync.
_TIER_THREADS = 16
_SYNC_THREADS = 32
# How often the journal's length is looked at, and when again after it could not be written anew.
# Seconds.
_JOURNAL_LOOK_S = 5.0
_JOURNAL_PAUSE_S = 600.0
# How long the end waits for the tier's disk. Seconds.
_LAST_COMMIT_S = 30.0


def _tell_objects(fast: FastWrites, place: WriteStore) -> None:
    fd = os.open(place.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fast.set_objects(fd, tier=place.tier.number)
    finally:
        os.close(fd)


class WriteBack:
    """Everything of a mount that can be written, wired: what ``daemon`` runs and asks."""

    def __init__(
        self,
        place: WriteStore,
        *,
        settings: MountSettings,
        snapshot_id: str,
        names: Namespace,
        source_calls: SourceCalls,
        source_load: SourceLoad,
        ledger: Ledger,
        residency: Residency,
        fast: FastWrites | None,
        taken: Callable[[Ino], None],
        look_again: Callable[[Ino], Awaitable[None]],
        evict: Callable[[Ino], int],
        evicted: Callable[[], Awaitable[None]],
        kernel: KernelCaches,
        is_open: Callable[[Ino], bool],
    ) -> None:
        self.place = place
        self._names = names
        self._settings = settings.writeback
        # Who ends the mount may not want to wait.
        self._patience = trio.CancelScope(shield=True)
        self._is_abandoned = False
        # Of their own, for what they wait for must hold up nobody who reads.
        self._threads = ThreadPool(_TIER_THREADS, "absorb", abandon=True)
        self._lease_threads = ThreadPool(1, "lease", abandon=True)
        # A mount that is read-only brings what earlier ones have left, and absorbs nothing new.
        self.lease = (
            Lease.acquire(
                source_calls.source,
                token=place.journal.token,
                patterns=settings.absorbs,
                mountpoint=os.fspath(settings.mountpoint),
                shared=settings.writeback.shared,
            )
            if settings.absorbs
            else None
        )
        writer = SourceWriter(source_calls.source, place.journal.token)
        if fast is not None and settings.absorbs:
            _tell_objects(fast, place)
        if fast is not None:
            names.tell_names(fast.name_given, fast.name_taken, fast.forget_attributes)
        object_table = self.object_table = ObjectTable(names)
        self.drain = Drain(
            contents=object_table,
            journal=place.journal,
            objects=place.objects,
            writer=writer,
            threads=ThreadPool(settings.writeback.workers + 2, "drain", abandon=True),
            options=DrainOptions(
                bandwidth=settings.writeback.bandwidth,
                verify=settings.writeback.verify,
                workers=settings.writeback.workers,
            ),
            busy=source_load.busy,
            demand=self._is_pressed,
        )
        opens = OpenTable(fast, place.tier.number)
        sync_threads = ThreadPool(_SYNC_THREADS, "fsync", abandon=True)
        objects = TierObjects(place.objects, self._threads, sync_threads, place.found.next_object)
        front = self.front = build_front(
            settings=settings,
            names=names,
            object_table=object_table,
            opens=opens,
            objects=objects,
            journal=place.journal,
            drain=self.drain,
            staged=writer.staged,
            source_calls=source_calls,
            revalidate=look_again,
            taken=taken,
            make_space=lambda drained: SpaceReclaimer(
                tier=place.tier,
                reserve=settings.writeback.reserve,
                drained=drained,
                states=object_table.states,
                ledger=ledger,
                residency=residency,
                look=self._look,
                evict=evict,
                evicted=evicted,
                kept=lambda: place.doubtful.held,
            ),
        )
        self.reclaimer = front.space
        is_new = snapshot_known(place.directory) != snapshot_id
        found = renumbered(place.found) if is_new else place.found
        self.drain.load(found)
        ops = self._unfinished(found, snapshot_id) if is_new else list(found.ops)
        self._take_up(found, ops)
        place.found = found.without_history()
        place.journal.taken_up()
        # Where the source never changes there is nothing to look for.
        self.others = (
            Others(
                front=front,
                states=object_table.states,
                drain=self.drain,
                source=source_calls.source,
                kernel=kernel,
                is_open=is_open,
            )
            if settings.absorbs and settings.snapshot.freshness != "never"
            else None
        )
        self.refusals = Refusals(
            front=front,
            object_table=object_table,
            drain=self.drain,
            kernel=kernel,
        )
        self._commits = Commits(
            place.directory,
            journal=place.journal,
            objects=place.objects,
            contents=object_table,
            interval_s=settings.writeback.commit,
        )

    def _unfinished(self, found: Replay, snapshot_id: str) -> list[Numbered]:
        """What leads from a new snapshot to the tree: it knows what the source has got."""
        place = self.place
        ops = [*unfinished(found, place.objects)]
        if ops or found.done:
            known = self.drain.known_of(ops)
            try:
                # Whoever ends in between leaves a journal that belongs to no snapshot before.
                know_snapshot(place.directory, "")
                place.journal.compact(ops, position=place.journal.position, known=known)
            except OSError as error:
                raise TierError(
                    f"tier {os.fspath(place.tier.path)!r}: the journal of written data cannot"
                    f" be written anew: {error.strerror}",
                    hint="make room there: nothing that was written is lost",
                ) from error
        know_snapshot(place.directory, snapshot_id)
        return ops

    def _take_up(self, found: Replay, ops: list[Numbered]) -> None:
        """Show what was written in earlier mounts, and go on draining it."""
        place = self.place
        replay(self._names, ops, now_ns=file_now_ns())
        waiting = [(seq, op) for seq, op in ops if seq not in found.done]
        if waiting:
            log.info(
                "%s of earlier mounts %s on the way to the source",
                counted(len(waiting), "operation", "operations"),
                "is" if len(waiting) == 1 else "are",
            )
        for node in self.front.recorder.take_up(ops, found.done, place.objects):
            # The daemon was killed before it could remove the object of an unlinked file.
            self.front.unlinked.leave(node)
        place.objects.sweep({op.object for _, op in ops} | found.doubted.keys())
        self.front.recorder.record_unrecorded(found)

    def hidden(self) -> list[bytes]:
        """Paths of files that earlier mounts have written, and that have no place in this one's
        tree; their bytes are on the way to the source."""
        table, is_done = self.object_table, self.drain.progress.is_done
        return [
            path
            for number, path in table.unshown.items()
            if not (table.states.is_drained(number) and is_done(table.states.last(number)))
        ]

    def _is_pressed(self) -> bool:
        """Whether what waits takes so much that it goes before readers of the source."""
        return self.drain.queue.waiting_bytes > self.reclaimer.reserve / 2

    async def _look(self) -> Space:
        return await self._threads.run(self.place.space)

    async def _keep_journal_short(self) -> None:
        """Have what does not matter any more left out of the journal, until cancelled."""
        journal, threads = self.place.journal, ThreadPool(1, "journal", abandon=True)
        while True:
            await trio.sleep(_JOURNAL_LOOK_S)
            # It is no help to a disk that is full: it needs room first.
            if not (journal.is_long and journal.has_room()):
                continue
            try:
                await threads.run(journal.shorten)
            except OSError as error:
                log.warning("the journal cannot be shortened: %s", error.strerror)
                await trio.sleep(_JOURNAL_PAUSE_S)

    async def discard(self, numbers: Sequence[int]) -> None:
        """Give up what a power cut has left of objects. Raises TierError."""
        for number in numbers:
            try:
                await self._threads.run(self.place.doubtful.discard, number)
            except OSError as error:
                raise TierError(
                    f"tier {self.place.tier.name!r}: {error.strerror}",
                    hint=f"what is kept lies in {os.fspath(self.place.doubtful.directory)}",
                ) from error

    def tasks(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """What goes on beside the answers."""
        tasks = {
            "drain": self.drain.run,
            "writing": self.front.run,
            "mending": self.front.failures.run,
            "commits": self._commits.run,
            "room": self.reclaimer.run,
            "journal": self._keep_journal_short,
            "lease": self._renew_lease,
        }
        if self.others is not None:
            tasks["others"] = self.others.run
        return tasks

    async def _renew_lease(self) -> None:
        while True:
            await trio.sleep(RENEW_S)
            if self.lease is not None:
                await self._lease_threads.run(self.lease.renew)

    def abandon(self) -> None:
        """Have ``finish`` end now, or, if it has not begun, at once."""
        self._is_abandoned = True
        self._patience.cancel()

    async def finish(self) -> None:
        """Wait until the source has all, but for no longer than configured."""
        self._patience.deadline = trio.current_time() + self._settings.end_timeout
        with self._patience:
            await self.drain.progress.settle()
        if self._patience.cancelled_caught:
            backlog = self.drain.backlog()
            log.log(
                logging.INFO if self._is_abandoned else logging.WARNING,
                "%s with %s were not drained; they stay in tier %s, and the next mount goes on",
                counted(backlog.files, "file", "files"),
                format_bytes(backlog.bytes),
                self.place.tier.name,
            )
        # What nobody has fsynced is to be there when the machine starts again.
        with trio.move_on_after(_LAST_COMMIT_S, shield=True) as patience:
            await self._commits.commit()
        if patience.cancelled_caught:
            log.warning(
                "tier %s has not synced all that was written within %d s: what was not fsynced may"
                " not survive the machine",
                self.place.tier.name,
                _LAST_COMMIT_S,
            )
        if self.lease is not None:
            release = partial(self.lease.release, undrained=self.drain.queue.last_seq > 0)
            with trio.move_on_after(_RELEASE_S, shield=True):
                await self._lease_threads.run(release)

    def close(self) -> None:
        self._commits.close()
        self.place.close()
