"""Where what is written goes: the tier that absorbs it, its journal, and what that tells.

    TIER/monarch/absorbed-SOURCE/      SOURCE: which source it is of, 16 hexadecimal digits
        lock                           held while a daemon uses it
        journal                        every operation, in its order (writeback/journal.py)
        XX/NUMBER                      the bytes of the files that were written
        reserve                        room for what must go on when the disk is full
        doubtful/                      what a power cut has left of some (writeback/doubtful.py)

What was not drained when a mount ended is found by the next one that has the tier, even if that
mount cannot be written any more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from heapq import merge
from operator import itemgetter
from pathlib import Path

import trio
import xxhash

from monarch.config.settings import MountSettings
from monarch.config.write_patterns import WritePatterns
from monarch.control.state_directory import read_note
from monarch.errors import TierError
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import NAME_BYTES
from monarch.placement.ledger import Ledger
from monarch.placement.residency import Residency
from monarch.posix.file_lock import Lock
from monarch.posix.private_directory import private_opener
from monarch.posix.thread_pool import ThreadPool
from monarch.text import counted
from monarch.tiers.ownership import PRIVATE
from monarch.tiers.tier import Space, Tier
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import SourceLoad
from monarch.types import WRITTEN_INO, Ino, KernelCaches, file_now_ns
from monarch.units import format_bytes
from monarch.writeback.changed import changed_in_place
from monarch.writeback.commits import Commits
from monarch.writeback.crash_losses import Numbered, names_of
from monarch.writeback.doubtful import Doubtful
from monarch.writeback.drain import Drain
from monarch.writeback.fast_writes import FastWrites
from monarch.writeback.inspect import inspect
from monarch.writeback.journal import Journal, Replay, Told, look
from monarch.writeback.lease import RENEW_S, Lease
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.objects import Objects
from monarch.writeback.op import Op
from monarch.writeback.open_files import WrittenFiles
from monarch.writeback.operations import WriteOperations
from monarch.writeback.others import Others
from monarch.writeback.refusals import Refusals
from monarch.writeback.replay import replay
from monarch.writeback.reserve import Reserve
from monarch.writeback.source_writer import SourceWriter
from monarch.writeback.space import SpaceReclaimer

log = logging.getLogger(__name__)

PREFIX = "absorbed-"
_SNAPSHOT = "snapshot"
# How long small files may wait for the drain while more of them come. Seconds.
_HOLD_S = 5.0
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


@dataclass(slots=True)
class WriteStore:
    """The tier that absorbs, and what it holds of earlier mounts: ``found``, without its history
    once a ``WriteBack`` has taken that up."""

    tier: Tier
    directory: Path
    lock: Lock
    journal: Journal
    objects: Objects
    found: Replay
    doubtful: Doubtful
    reserve: Reserve


def directory_of(tier: Path, source: Path) -> Path:
    """Where a tier keeps what is written for a source."""
    digest = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(source)))
    return tier / PRIVATE / f"{PREFIX}{digest}"


def open_write_store(
    settings: MountSettings, tiers: Sequence[Tier], state: Path
) -> WriteStore | None:
    """The place for what is written; None for a mount that is read-only and never was another.

    Raises TierError if it cannot be used, or if another tier than these has what was not drained,
    and LockedError if another mount of the source uses it.
    """
    kept = [tier for tier in tiers if directory_of(tier.path, settings.source).exists()]
    if not kept and not settings.absorbs:
        return None
    chosen = kept[0] if kept else _chosen(settings, tiers)
    if kept and settings.absorbs and (wanted := _chosen(settings, tiers)) is not chosen:
        log.warning(
            "tier %s still has what was written before, so it goes on absorbing instead of %s",
            chosen.name,
            wanted.name,
        )
    if chosen.in_memory and settings.absorbs:
        log.warning(
            "tier %s is memory: what is written there survives the daemon, not the machine",
            chosen.name,
        )
    directory = directory_of(chosen.path, settings.source)
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        lock = _locked(directory, settings)
    except OSError as error:
        raise TierError(
            f"tier {os.fspath(chosen.path)!r}: {error.strerror}",
            hint="make room there, or name another with writeback.tier",
        ) from error
    journal = Journal.open(directory, source=os.fsencode(settings.source))
    objects = Objects(directory, unsynced=journal.doubtful)
    found = journal.replay()
    doubtful = Doubtful(directory)
    doubtful.keep(found.doubted)
    reserve = Reserve(directory)
    reserve.make()
    return WriteStore(chosen, directory, lock, journal, objects, found, doubtful, reserve)


def make_room(settings: MountSettings) -> None:
    """Have what a mount needs of a full tier: the reserve of what is written there is given up."""
    for tier in settings.tiers:
        if Reserve(directory_of(tier.path, settings.source)).give_up_if_full():
            log.warning("tier %s is full: what it has in reserve is given up", tier.path)


def _locked(directory: Path, settings: MountSettings) -> Lock:
    """Raises OSError, LockedError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        what = f"what is written for {os.fspath(settings.source)!r} in {os.fspath(directory)!r}"
        another = "give this mount another tier with --tier PATH"
        return Lock(fd, what, os.fspath(settings.mountpoint), instead=another)
    finally:
        os.close(fd)


def require_former_tiers_drained(settings: MountSettings, state: Path) -> None:
    """Refuses a mount without a tier of the last mount that has changes the source lacks.

    Called before the snapshot is chosen: the changes belong to the current one. Raises TierError.
    """
    try:
        before = read_note(state).tiers
    except TierError:
        return
    now = {os.path.realpath(tier.path) for tier in settings.tiers}
    for tier in before:
        directory = directory_of(Path(tier.path), settings.source)
        if os.path.realpath(tier.path) in now or not (directory / "journal").exists():
            continue
        left = inspect(directory)
        if left.operations:
            words = f"{counted(len(left.waiting), 'file', 'files')}, {format_bytes(left.bytes)},"
            raise TierError(
                f"tier {tier.path!r} is not used any more, but still has {words} not at the source",
                hint="mount with it until they are drained, or give them up by removing"
                f" {os.fspath(directory)}",
            )


def _chosen(settings: MountSettings, tiers: Sequence[Tier]) -> Tier:
    name = settings.writeback.tier
    if name is None:
        return next((tier for tier in tiers if not tier.in_memory), tiers[0])
    for tier in tiers:
        if tier.name == name:
            return tier
    known = ", ".join(tier.name for tier in tiers)
    raise TierError(f"writeback.tier: there is no tier {name!r}", hint=f"there are: {known}")


def snapshot_known(directory: Path) -> str:
    """The id of the snapshot over which the journal leads to the tree; empty if none is known."""
    with suppress(OSError):
        return (directory / _SNAPSHOT).read_text().strip()
    return ""


def know_snapshot(directory: Path, snapshot_id: str) -> None:
    """Raises OSError."""
    staged = directory / f"{_SNAPSHOT}.part"
    with open(staged, "w", encoding="ascii", opener=private_opener) as file:
        file.write(snapshot_id)
        file.flush()
        os.fsync(file.fileno())
    staged.rename(directory / _SNAPSHOT)


@dataclass(frozen=True, slots=True)
class Earlier:
    """What earlier mounts have left in the tiers. ``undone``: how many changes the source has not
    got; ``snapshot_id``: over which snapshot the journal of these leads to the tree. ``changed``:
    paths of what they have changed where it stands, at the source by now or not."""

    undone: int
    snapshot_id: str
    changed: frozenset[bytes]


def earlier(settings: MountSettings) -> Earlier:
    """What earlier mounts have left in the tiers of a mount.

    Raises TierError if a journal cannot be read.
    """
    undone, snapshot_id = 0, ""
    changed: set[bytes] = set()
    for tier in settings.tiers:
        directory = directory_of(tier.path, settings.source)
        with suppress(OSError):
            if not (directory / "journal").exists():
                continue
            found = look(directory).replay()
            changed |= changed_in_place(found.ops)
            left = [op for _, op in unfinished(found, Objects(directory)) if op.kind != "gone"]
            if left and not undone:
                undone, snapshot_id = len(left), snapshot_known(directory)
    return Earlier(undone, snapshot_id, frozenset(changed))


def _renumbered(found: Replay) -> Replay:
    """``found`` with numbers below 0 for what an older snapshot had, by which a new one has others.

    Those of what was made on a mount are never given again.
    """
    numbers: dict[int, int] = {}
    ops = []
    for seq, op in found.ops:
        if 0 < op.ino < WRITTEN_INO:
            op = replace(op, ino=numbers.setdefault(op.ino, -2 * seq))
        if 0 < op.over_ino < WRITTEN_INO:
            op = replace(op, over_ino=numbers.setdefault(op.over_ino, -2 * seq - 1))
        ops.append((seq, op))
    return replace(found, ops=tuple(ops))


def unfinished(found: Replay, objects: Objects) -> Iterator[Numbered]:
    """What leads to the tree from what the source has: the changes that it has not got, and before
    them the files whose bytes it lacks, under the names that they had when the first of these was
    made. Of files that were open when their daemon was killed nothing need be recorded."""
    ops = found.ops
    undone = [op for _, op in _undone(found)]
    made = {op.object for _, op in ops if op.kind in ("create", "take")}
    # One that has a name all the same is read from the source.
    made -= {op.object for _, op in ops if op.kind == "gone"}
    told = found.told()
    new = found.unpublished(made) | {n for n in made & told.keys() if _differs(objects, n, told[n])}
    new |= {op.object for op in undone if op.kind == "content"}
    # Those that are to get another name may have lost the one that they have at the source.
    renamed = {op.object for op in undone if op.kind in ("rename", "link")} - new
    names = names_of([(seq, op) for seq, op in ops if seq in found.done], new | renamed)
    first: dict[int, tuple[int, Op]] = {}
    published: dict[int, tuple[int, Op]] = {}
    for seq, op in ops:
        if seq not in found.done or op.object not in names:
            continue
        paths = names[op.object]
        if op.kind in ("create", "take"):
            more = tuple(paths) if len(paths) > 1 else ()
            first[op.object] = seq, replace(op, path=paths[0], paths=more)
        elif op.kind in ("attr", "xattr", "content") and op.object in first:
            at, made_as = first[op.object]
            given = {name: getattr(op, name) for name in ("mode", "uid", "gid")}
            now = {name: value for name, value in given.items() if value is not None}
            known = dict(op.xattrs)
            if op.kind != "content":
                known = {**made_as.xattrs, **known}
            xattrs = {name: value for name, value in known.items() if value is not None}
            first[op.object] = at, replace(made_as, **now, xattrs=xattrs)
        if op.kind == "content" and op.object in renamed:
            published[op.object] = seq, replace(op, path=paths[0], paths=tuple(paths))
    done = [*first.values(), *published.values()]
    yield from merge(sorted(done, key=itemgetter(0)), _undone(found), key=itemgetter(0))


def _undone(found: Replay) -> Iterator[Numbered]:
    return ((seq, op) for seq, op in found.ops if seq not in found.done)


def _differs(objects: Objects, number: int, told: Told) -> bool:
    """Whether an object was written since ``told`` was recorded of it."""
    try:
        status = objects.status(number)
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) != told


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
        drain_threads = ThreadPool(settings.writeback.workers + 2, "drain", abandon=True)
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
            threads=drain_threads,
            bandwidth=settings.writeback.bandwidth,
            verify=settings.writeback.verify,
            workers=settings.writeback.workers,
            busy=source_load.busy,
            demand=self._is_pressed,
            hold_s=_HOLD_S,
        )
        self.files = WrittenFiles(
            names=names,
            object_table=object_table,
            journal=place.journal,
            objects=place.objects,
            drain=self.drain,
            writer=writer,
            source_calls=source_calls,
            make_room=self._make_room,
            threads=self._threads,
            sync_threads=ThreadPool(_SYNC_THREADS, "fsync", abandon=True),
            tier=place.tier.number,
            fast=fast,
            look_again=look_again,
            next_object=place.found.next_object,
        )
        self.reclaimer = SpaceReclaimer(
            tier=place.tier,
            reserve=settings.writeback.reserve,
            files=self.files,
            object_table=object_table,
            ledger=ledger,
            residency=residency,
            look=self._look,
            evict=evict,
            evicted=evicted,
            kept=lambda: place.doubtful.held,
        )
        is_new = snapshot_known(place.directory) != snapshot_id
        found = _renumbered(place.found) if is_new else place.found
        self.drain.load(found)
        ops = self._unfinished(found, snapshot_id) if is_new else list(found.ops)
        patterns = WritePatterns(settings.absorbs)
        self.writing = WriteOperations(
            names=names,
            patterns=patterns,
            drain=self.drain,
            files=self.files,
            source_calls=source_calls,
            waits_for_source=settings.writeback.fsync == "source",
            names_max=settings.writeback.names_within(0, each=NAME_BYTES),
            taken=taken,
            space=self.reclaimer.statfs,
        )
        self._take_up(found, ops)
        place.found = found.without_history()
        place.journal.taken_up()
        # Where the source never changes there is nothing to look for.
        self.others = (
            Others(
                writing=self.writing,
                patterns=patterns,
                object_table=object_table,
                drain=self.drain,
                source=source_calls.source,
                kernel=kernel,
                is_open=is_open,
            )
            if settings.absorbs and settings.snapshot.freshness != "never"
            else None
        )
        self.refusals = Refusals(
            writing=self.writing,
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
                    f"tier {os.fspath(place.tier.path)!r}: the journal of what was written cannot"
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
        self.files.take_up(ops, found.done)
        place.objects.sweep({op.object for _, op in ops} | found.doubted.keys())
        self.files.record_unrecorded(found)

    def hidden(self) -> list[bytes]:
        """Paths of files that earlier mounts have written, and that have no place in this one's
        tree; their bytes are on the way to the source."""
        object_table = self.object_table
        return [
            path
            for number, path in object_table.unshown.items()
            if not (
                object_table.is_drained(number) and self.drain.is_done(object_table.last(number))
            )
        ]

    def _is_pressed(self) -> bool:
        """Whether what waits takes so much that it goes before readers of the source."""
        return self.drain.waiting_bytes > self.reclaimer.reserve / 2

    async def _make_room(self, size: int) -> bool:
        return await self.reclaimer.make(size)

    async def _look(self) -> Space:
        return await self._threads.run(self._look_at_disk)

    def _look_at_disk(self) -> Space:
        self.place.reserve.make()
        return self.place.tier.space()

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
            "writing": self.files.run,
            "mending": self.files.mend,
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
            await self.drain.settle()
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
            release = partial(self.lease.release, undrained=self.drain.last_seq > 0)
            with trio.move_on_after(_RELEASE_S, shield=True):
                await self._lease_threads.run(release)

    def close(self) -> None:
        with suppress(OSError):
            self.place.journal.sync()
        self._commits.close()
        self.place.journal.close()
        self.place.lock.release()
