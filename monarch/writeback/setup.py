"""Connects the parts of write-back for a mount that can be written, or that has written data."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import trio

from monarch.config.settings import MountSettings, WritebackSettings
from monarch.errors import TierError
from monarch.namespace.namespace import Namespace
from monarch.placement.ledger import Ledger
from monarch.posix.files import closing_fd
from monarch.posix.thread_pool import ThreadPool
from monarch.text import counted, counted_changes
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import SourceLoad
from monarch.types import KernelCaches, Progress, file_now_ns
from monarch.writeback.commits import Commits
from monarch.writeback.drain import Drain
from monarch.writeback.earlier import renumbered, unfinished
from monarch.writeback.front import Reading, WriteFront
from monarch.writeback.history import Numbered
from monarch.writeback.journal import Replay
from monarch.writeback.journal_found import collector_paused, no_progress
from monarch.writeback.lease import RENEW_S, Lease
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.open_file import FastWrites
from monarch.writeback.others import Others
from monarch.writeback.refusals import Refusals
from monarch.writeback.replay import replay
from monarch.writeback.source_writer import SourceWriter
from monarch.writeback.store import (
    WriteStore,
    forget_snapshot,
    know_snapshot,
    snapshot_known,
)
from monarch.writeback.tier_objects import FULL
from monarch.writeback.write_gate import WriteReserve

log = logging.getLogger(__name__)

# Time limit for the source to remove the lease at the end of the mount, in seconds.
_RELEASE_S = 5.0
# The interval of checks of the journal's length, and the pause after it could not be shortened,
# also on a full disk, in seconds.
_JOURNAL_CHECK_S = 5.0
_JOURNAL_PAUSE_S = 600.0
_JOURNAL_PAUSE_FULL_S = 30.0
# The least pause as a multiple of the time that the try has taken.
_PAUSE_TIMES = 20
# A pause for the event loop after a few records while the journal is shortened, in seconds.
_RECORDS_PAUSE_S = 0.0005
# The interval of checks whether the journal has accepted all contents at the end, in seconds.
_RECORD_STEP_S = 0.2
# Time limit for the tier's disk at the end of the mount, in seconds.
_LAST_COMMIT_S = 30.0


@dataclass(slots=True)
class WriteBack:
    """The parts of write-back for one mount, their tasks and their end. ``build_write_back`` makes
    it. ``others`` is None if nothing but this mount changes the source, or the mount cannot be
    written; ``lease`` if the mount cannot be written."""

    place: WriteStore
    settings: WritebackSettings
    lease: Lease | None
    drain: Drain
    front: WriteFront
    others: Others | None
    refusals: Refusals
    commits: Commits
    _lease_threads: ThreadPool = field(default_factory=lambda: ThreadPool(1, "lease", abandon=True))
    # Ends the wait for the drain at the end of the mount.
    _patience: trio.CancelScope = field(default_factory=lambda: trio.CancelScope(shield=True))
    _is_abandoned: bool = False
    _is_finished: bool = False

    def hidden(self) -> list[bytes]:
        """Paths of files that were written through earlier mounts and have no place in the tree of
        this one, until their bytes are at the source."""
        table, is_done = self.front.object_table, self.drain.progress.is_done
        return [
            path
            for number, path in table.unshown.items()
            if not (table.states.is_drained(number) and is_done(table.states.last(number)))
        ]

    async def discard(self, numbers: Sequence[int]) -> None:
        """Discards what a power cut left of objects. Raises TierError."""
        for number in numbers:
            try:
                await self.front.objects.threads.run(self.place.doubtful.discard, number)
            except OSError as error:
                raise TierError(
                    f"tier {self.place.tier.name!r}: {error.strerror}",
                    hint=f"what is kept lies in {os.fspath(self.place.doubtful.directory)}",
                ) from error

    def tasks(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        tasks = {
            "drain": self.drain.run,
            "writing": self.front.run,
            "mending": self.front.failures.run,
            "commits": self.commits.run,
            "room": self.front.space.run,
            "journal": self._keep_journal_short,
            "lease": self._renew_lease,
        }
        if self.others is not None:
            tasks["others"] = self.others.run
        return tasks

    async def _keep_journal_short(self) -> None:
        """Removes obsolete records from the journal, and replaces its file if that has failed,
        until cancelled."""
        journal, threads = self.place.journal, ThreadPool(1, "journal", abandon=True)
        while True:
            await trio.sleep(_JOURNAL_CHECK_S)
            if not (journal.is_long or journal.file.failed):
                continue
            # The shorter journal is written beside the old one. On a full disk it may fit into the
            # reserve, and then gives back the room of the old one.
            is_full, begun_s = not journal.has_room(), trio.current_time()
            try:
                await threads.run(journal.shorten, partial(time.sleep, _RECORDS_PAUSE_S))
            except OSError as error:
                journal.is_beyond_repair = bool(journal.file.failed)
                log.warning("the journal cannot be rewritten: %s", error.strerror)
                took_s = trio.current_time() - begun_s
                pause_s = max(_JOURNAL_PAUSE_FULL_S, _PAUSE_TIMES * took_s)
                await trio.sleep(pause_s if is_full else _JOURNAL_PAUSE_S)

    async def _renew_lease(self) -> None:
        while True:
            await trio.sleep(RENEW_S)
            if self.lease is not None:
                await self._lease_threads.run(self.lease.renew)

    async def is_in_force(self, token: str) -> bool:
        """Whether another mount has a lease in force. Raises OSError."""
        if self.lease is None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return await self._lease_threads.run(self.lease.is_in_force, token)

    @property
    def patience_s(self) -> float:
        """How long the end of the mount may wait, in seconds."""
        return 0.0 if self._is_abandoned else self.settings.end_timeout

    def abandon(self) -> None:
        """Makes ``finish`` not wait for the drain, even if it waits already."""
        self._is_abandoned = True
        self._patience.cancel()

    async def finish(self) -> None:
        """Waits for the drain, at most ``writeback.end_timeout``; then syncs the tier and releases
        the lease."""
        self._patience.deadline = trio.current_time() + self.settings.end_timeout
        if (backlog := self.drain.backlog()).ops and not self._is_abandoned:
            log.info(
                "written data is not at the source yet: %s; the end waits for the source for up to"
                " %g s%s; `monarch umount --abandon` ends the wait, and the next mount drains",
                counted_changes(backlog.ops, backlog.files, backlog.bytes),
                self.settings.end_timeout,
                f" ({backlog.trouble})" if backlog.trouble else "",
            )
        with self._patience:
            await self.drain.progress.settle()
            # A journal that has failed accepts nothing before the next mount.
            while self.front.object_table.refused() and not self.front.recorder.is_broken:
                await trio.sleep(_RECORD_STEP_S)
                await self.drain.progress.settle()
        if self._patience.cancelled_caught:
            backlog = self.drain.backlog()
            log.log(
                logging.INFO if self._is_abandoned else logging.WARNING,
                "not drained at the end: %s; kept in tier %s, and the next mount continues",
                counted_changes(backlog.ops, backlog.files, backlog.bytes),
                self.place.tier.name,
            )
        if refused := self.front.object_table.refused():
            log.warning(
                "%s in tier %s with bytes that its journal has not accepted: the next mount finds"
                " them",
                counted(len(refused), "file stays", "files stay"),
                self.place.tier.name,
            )
        # Data without an fsync must also survive a restart of the machine.
        with trio.move_on_after(_LAST_COMMIT_S, shield=True) as patience:
            await self.commits.commit()
        if patience.cancelled_caught:
            log.warning(
                "tier %s has not synced all written data within %d s: data without an fsync may not"
                " survive a restart of the machine",
                self.place.tier.name,
                _LAST_COMMIT_S,
            )
        await self._commit_at_source()
        if self.lease is not None:
            release = partial(self.lease.release, undrained=self.drain.queue.last_seq > 0)
            with trio.move_on_after(_RELEASE_S, shield=True):
                await self._lease_threads.run(release)
        self._is_finished = True

    async def _commit_at_source(self) -> None:
        """Has the files that went to the source directly survive a restart of the machine, too."""
        with trio.move_on_after(_LAST_COMMIT_S, shield=True) as patience:
            if synced := await self.front.source.sync_staged():
                await self.commits.record(synced)
        if patience.cancelled_caught:
            log.warning(
                "the source has not synced within %d s what was written there in full tiers: data"
                " without an fsync may not survive a restart of the machine",
                _LAST_COMMIT_S,
            )

    def close(self) -> None:
        self.commits.close()
        if self._is_finished and self.front.recorder.has_recorded_all:
            # Without the mark the next mount compares times as well.
            with suppress(OSError):
                self.place.journal.mark_ended()
        self.place.close()


def build_write_back(
    place: WriteStore,
    *,
    settings: MountSettings,
    names: Namespace,
    source_calls: SourceCalls,
    source_load: SourceLoad,
    ledger: Ledger,
    fast: FastWrites | None,
    read: Reading,
    kernel: KernelCaches,
    progress: Progress = no_progress,
) -> WriteBack:
    """Builds the parts, and replays the journal of earlier mounts into ``names``. ``fast`` is the
    datapath, if there is one. Raises TierError, and LockedError if another mount has the lease."""
    given, source = settings.writeback, source_calls.source
    lease = None
    if settings.absorbs:
        lease = Lease.acquire(
            source,
            token=place.journal.token,
            patterns=settings.absorbs,
            mountpoint=os.fspath(settings.mountpoint),
            shared=given.shared,
        )
    if fast is not None:
        if settings.absorbs:
            with closing_fd(os.open(place.directory, os.O_RDONLY | os.O_DIRECTORY)) as fd:
                fast.set_objects(fd, tier=place.tier.number)
        names.report_names(fast.name_given, fast.name_taken, fast.forget_attributes)
    table = ObjectTable(names, read.renewed, kernel.invalidate_attributes)
    reserve = WriteReserve(given.reserve, place.tier.number, ledger, table.states)
    drain = Drain(
        contents=table,
        journal=place.journal,
        objects=place.objects,
        writer=SourceWriter(source, place.journal.token),
        threads=ThreadPool(given.workers + 2, "drain", abandon=True),
        settings=given,
        busy=source_load.busy,
        is_urgent=reserve.is_short,
    )
    names.know_places(drain.queue.source_paths)
    front = WriteFront(
        place,
        settings=settings,
        names=names,
        object_table=table,
        reserve=reserve,
        drain=drain,
        source_calls=source_calls,
        fast=fast,
        read=read,
    )
    with collector_paused():
        _replay(place, front, drain, progress)
    others = Others(front, drain, source, kernel, read.is_open, waits=given.shared)
    # Other writers change the absorbed paths of a source that never changes otherwise.
    changes = given.shared or settings.snapshot.freshness != "never"
    return WriteBack(
        place,
        given,
        lease,
        drain,
        front,
        others if settings.absorbs and changes else None,
        Refusals(front, drain, kernel),
        Commits(place, table, given.commit),
    )


def _replay(place: WriteStore, front: WriteFront, drain: Drain, progress: Progress) -> None:
    """Shows what was written through earlier mounts, and continues to drain it. Raises
    TierError."""
    names, recorder = front.names, front.recorder
    snapshot_id = names.snapshot.id
    is_new = snapshot_known(place.directory) != snapshot_id
    found = renumbered(place.found) if is_new else place.found
    drain.load(found)
    ops = _rewritten(place, found, drain, snapshot_id) if is_new else list(found.ops)
    now_ns, state, done = file_now_ns(), drain.state, found.done
    changed = replay(names, ops, now_ns=now_ns, state=state, done=done, progress=progress)
    waiting = sum(seq not in done for seq, _ in ops)
    if waiting:
        log.info(
            "%s of earlier mounts %s for the drain",
            counted(waiting, "operation", "operations"),
            "waits" if waiting == 1 else "wait",
        )
    for node in recorder.take_up(ops, done, place.objects):
        # The daemon was killed before it could remove the object of an unlinked file.
        front.unlinked.leave(node)
    front.object_table.attributes.take_up(ops, done, changed)
    front.source.take_up()
    _release(front, found.damaged)
    # A file that is only to be removed at the source has no bytes to bring there.
    used = {op.object for _, op in ops if op.kind not in ("unlink", "gone")}
    place.objects.sweep(used | found.doubted.keys())
    recorder.record_unrecorded(found)
    place.found = found.without_history()
    place.journal.taken_up()


def _make_room_for(call: Callable[[], None], *frees: Callable[[], None]) -> None:
    """Makes a call on a full disk, with further tries after each of ``frees``. Raises OSError."""
    for free in frees:
        try:
            call()
        except OSError as error:
            if error.errno not in FULL:
                raise
            free()
        else:
            return
    call()


def _release(front: WriteFront, damaged: Collection[int]) -> None:
    """Has files read from the source that it has whole, and whose objects lack bytes."""
    for number in damaged:
        node = front.object_table.node(number)
        if node is not None:
            front.source.release_lost(node)


def _rewritten(place: WriteStore, found: Replay, drain: Drain, snapshot_id: str) -> list[Numbered]:
    """The changes from a new snapshot to the tree; the journal then has only these. The snapshot
    has all changes that the source has. Raises TierError."""
    ops = [*unfinished(found, place.objects)]
    try:
        if ops or found.done:
            known = drain.known_of(ops)
            # A crash before the last step leaves a journal that belongs to no earlier snapshot.
            know_snapshot(place.directory, "")
            file = place.journal.file
            _make_room_for(
                partial(place.journal.compact, ops, position=file.position, known=known),
                # The new journal has room of its own when it has replaced this one.
                file.free_ahead,
                # A disk that takes no more files takes one in the place of another.
                partial(forget_snapshot, place.directory),
            )
        know_snapshot(place.directory, snapshot_id)
    except OSError as error:
        raise TierError(
            f"tier {os.fspath(place.tier.path)!r}: the journal of written data cannot be"
            f" rewritten: {error.strerror}",
            hint="make room there: no written data is lost",
        ) from error
    return ops
