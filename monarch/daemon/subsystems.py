"""The subsystems of a mount, each built by one function from those before it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from monarch.config.settings import ForesightSettings, MountSettings
from monarch.daemon.freshness import ChangedInodes, FreshnessWatch
from monarch.daemon.fsck import OnlineFsck
from monarch.daemon.hints import Hints
from monarch.daemon.measuring import Measuring
from monarch.daemon.remarks import TierRoom
from monarch.daemon.ruled_files import RuledFiles
from monarch.daemon.scrub import Scrub
from monarch.foresight.foresight import Foresight
from monarch.foresight.uses import KnownUses
from monarch.fuse.datapath import Datapath, DatapathOptions
from monarch.fuse.datapath_mode import Choice
from monarch.fuse.session import MountCaches
from monarch.namespace.namespace import Namespace
from monarch.namespace.snapshot import Snapshot
from monarch.packmount.chunks import PackChunks
from monarch.packmount.source import PackSource
from monarch.peers.membership import Membership
from monarch.placement.admission import Admission
from monarch.placement.belady import Belady
from monarch.placement.controller import Controller
from monarch.placement.epochs import Epochs
from monarch.placement.ledger import Ledger
from monarch.placement.policy import FirstCome, Item, Lru, NoEvict, Policy
from monarch.placement.quotas import Quotas
from monarch.placement.residency import Residency, differing
from monarch.placement.rules import Rule, Rules
from monarch.posix.buckets import bucket, buckets
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Logbook
from monarch.telemetry.metrics import Metrics
from monarch.tiers.doubts import Doubts, SourceClock
from monarch.tiers.hierarchy import Hierarchy
from monarch.tiers.partial import Found, Layout, remove
from monarch.tiers.source import Source
from monarch.tiers.tier import Tier
from monarch.transfer.ahead import FetchAhead
from monarch.transfer.chunks import ChunkReads
from monarch.transfer.engine import Engine
from monarch.transfer.queue import Buffer
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import DatapathView, NoDatapath, SourceLoad
from monarch.transfer.source_reader import SourceReader
from monarch.transfer.tier_monitor import TierMonitor
from monarch.transfer.window import Window
from monarch.types import Ino, Progress
from monarch.vfs.measured import MeasuredJobs
from monarch.vfs.open_watch import OpenWatch
from monarch.vfs.quotas import JobQuotas, Quota
from monarch.vfs.read_side import ReadSide
from monarch.vfs.readers import Readers
from monarch.vfs.source_limit import SourceLimit
from monarch.writeback.earlier import renewed_by_drain
from monarch.writeback.setup import WriteBack
from monarch.writeback.store import make_room

# The window of files that no tier admits may use this part of the buffer. All fetches ahead leave
# half of it to readers.
_WINDOW_SHARE = 4
# A time of the source that is behind the times of all files, in the year 2262.
_AFTER_ALL_NS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a mount that exist before and after it. ``just_built``: the snapshot was made
    for this mount; ``put_off``: why it is not the requested one. ``progress`` is shown until the
    mount answers. ``membership``: None without other nodes."""

    settings: MountSettings
    state: Path
    source: Source
    source_threads: ThreadPool
    snapshot: Snapshot
    just_built: bool
    put_off: str
    logbook: Logbook
    progress: Progress
    membership: Membership | None = None

    @property
    def pack(self) -> PackSource | None:
        """The source if it is a pack, else None."""
        return self.source if isinstance(self.source, PackSource) else None


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers, and the decisions on what they hold and will hold. ``rooms`` describes each tier
    at the time of the mount. ``belady`` is None if all files fit, or if it is switched off."""

    hierarchy: Hierarchy
    residency: Residency
    ledger: Ledger
    controller: Controller
    rules: Rules
    epochs: Epochs
    foresight: Foresight
    admission: Admission
    belady: Belady | None
    rooms: list[TierRoom]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The calls to tiers and source, and the copies from one to the other."""

    monitor: TierMonitor
    engine: Engine
    reader: SourceReader
    source_calls: SourceCalls
    source_load: SourceLoad
    doubts: Doubts
    changed: ChangedInodes
    chunks: ChunkReads | None


@dataclass(frozen=True, slots=True)
class Upkeep:
    """The comparisons of the copies and the snapshot with the source, and the checks of copies."""

    watch: FreshnessWatch
    scrub: Scrub
    online_fsck: OnlineFsck


def open_tiers(parts: Parts) -> Tiers:
    """Opens the tiers and loads which copies they hold. Raises TierError, LockedError."""
    settings, snapshot, pack = parts.settings, parts.snapshot, parts.pack
    make_room(settings)
    hierarchy = Hierarchy(
        settings.tiers,
        parts.state,
        generation=snapshot.id,
        # Another pack may have other bytes under the same number, size and time. The snapshot of
        # the same pack always has the same id, so its copies need no adoption.
        inodes=snapshot.records if pack is None else lambda: iter(()),
        columns=snapshot.columns,
        renewed=renewed_by_drain(settings, snapshot.id),
        mountpoint=os.fspath(settings.mountpoint),
        source=os.fspath(settings.source),
    )
    rooms, partial_copies = [], []
    for tier, given in zip(hierarchy.tiers, settings.tiers, strict=True):
        partial_copies.append(hierarchy.parts(tier, snapshot.entries))
        space = tier.space()
        held = hierarchy.held(tier).bytes + sum(part.nbytes for part in partial_copies[-1])
        capacity = given.capacity_within(space.available, held=held)
        rooms.append(TierRoom(tier, capacity, space, held, hierarchy.forgotten(tier)))
    capacities = [room.capacity for room in rooms]
    residency, ledger = Residency(snapshot.entries), Ledger(capacities)
    names = [tier.name for tier in settings.tiers]
    rules = Rules(
        [Rule.of(rule, names) for rule in settings.rules],
        snapshot,
        residency,
        buckets if pack is None else pack.files.buckets,
    )
    foreseeing = _foresight(settings)
    if pack is not None:
        # A chunk that is admitted is read as a whole; another one must not be.
        foreseeing = foreseeing.model_copy(update={"fill": False})
    foresight = Foresight(
        snapshot, foreseeing, lambda ino: controller.is_placed(ino), residency.have_copies
    )
    policy = _policy(settings, snapshot, capacities, bucket if pack is None else pack.files.bucket)
    belady = None
    # Of a pack the tiers keep whole chunks, and a quota decides alone.
    may_exchange = foreseeing.belady and pack is None and not settings.quotas
    if may_exchange and snapshot.bytes_total > sum(capacities):
        # A fixed share is as good for an order that is the same in each epoch.
        uses = KnownUses(foresight, with_learned=settings.placement.policy == "lru")
        policy = belady = Belady(policy, uses, lambda ino: snapshot.attributes(ino).size)
        foresight.announced.awaits_entries = True
    controller = Controller(residency, ledger, policy, rules if settings.rules else None)
    admission = Admission(
        foresight,
        snapshot.entries,
        by_frequency=settings.foresight.frequency,
        spares_copies=settings.foresight.scans,
    )
    controller.admit_by(admission)
    foresight.on_skewed(admission.opened)
    for room, found in zip(rooms, partial_copies, strict=True):
        kept = hierarchy.keep_within(room.tier, room.capacity)
        controller.load(kept.inos, kept.sizes, tier=room.tier.number)
        room_for_parts = room.capacity - kept.bytes if settings.foresight.parts else -1
        _load_parts(controller, room.tier, found, room_for_parts)
    if settings.verify != "never":
        for inos in hierarchy.records.unverified():
            residency.mark_unverified(inos)
    return Tiers(
        hierarchy,
        residency,
        ledger,
        controller,
        rules,
        Epochs(snapshot.entries),
        foresight,
        admission,
        belady,
        rooms,
    )


def _load_parts(controller: Controller, tier: Tier, found: Sequence[Found], room: int) -> None:
    """Registers the partial copies of a tier that fit into ``room`` bytes; removes the others."""
    for part in found:
        allowed = tier.number in controller.tiers_for_part(part.ino)
        if part.nbytes > room or not allowed:
            with suppress(OSError):
                remove(tier, part.ino)
            continue
        room -= part.nbytes
        identity = part.header.identity
        controller.parts.load(
            Item(part.ino, identity.size, identity.source_ino),
            tier=tier.number,
            overhead=Layout(identity.size).overhead,
            held=part.nbytes,
        )


def _foresight(settings: MountSettings) -> ForesightSettings:
    """A file that no process has opened has no caller: with ``source_identity: caller``, and with
    quotas of jobs, nothing is fetched ahead."""
    if settings.source_identity == "caller" or settings.quotas:
        off = {"announced": False, "ahead": False, "fill": False, "window": False}
        return settings.foresight.model_copy(update=off)
    return settings.foresight


def _policy(
    settings: MountSettings,
    snapshot: Snapshot,
    capacities: list[int],
    bucket: Callable[[int], int],
) -> Policy:
    match settings.placement.policy:
        case "no_evict":
            return NoEvict(snapshot.curve(), capacities, bucket)
        case "first_come":
            return FirstCome()
        case "lru":
            return Lru()


def open_datapath(
    parts: Parts, tiers: Tiers, choice: Choice, *, has_written: bool
) -> Datapath | None:
    """``has_written``: files were, or can be, written through the mount."""
    if choice.datapath == "python":
        return None
    settings = parts.settings
    return Datapath(
        snapshot=parts.snapshot,
        source=parts.source,
        # With quotas each fetch must be counted for its job.
        limits=settings.limits.model_copy(update={"inline_max": 0} if settings.quotas else {}),
        residency=tiers.residency,
        tiers=tiers.hierarchy.tiers,
        options=DatapathOptions(
            passthrough=choice.datapath == "passthrough",
            no_open=choice.open == "none",
            decide_opens=settings.verify == "open",
            cache_listings=choice.cache_listings,
            ask_names=bool(settings.absorbs),
            ask_xattrs=has_written or (parts.pack is not None and parts.pack.has_xattrs),
            as_caller=settings.source_identity == "caller",
        ),
    )


def build_measured(parts: Parts, datapath: Datapath | None) -> MeasuredJobs:
    """The sessions that read as with smaller tiers: none before a process asks for it."""
    of = bucket if parts.pack is None else parts.pack.files.bucket
    return MeasuredJobs(of, None if datapath is None else datapath.measure)


def build_quotas(parts: Parts, tiers: Tiers) -> JobQuotas | None:
    """The quotas of jobs, by which placement decides from now on; None if there are none."""
    settings = parts.settings.quotas
    if not settings:
        return None
    capacity = sum(tiers.ledger.capacity(tier) for tier in tiers.ledger.tiers)
    limits = [each.tier_within(capacity) for each in settings]
    jobs = [
        Quota(
            each.job,
            each.user_number(),
            None if each.cgroup is None else PurePosixPath(each.cgroup),
            limit,
            SourceLimit(each.source_bandwidth),
        )
        for each, limit in zip(settings, limits, strict=True)
    ]
    tiers.controller.quotas = Quotas(limits, parts.snapshot.entries)
    return JobQuotas(jobs, tiers.controller.quotas)


def build_hints(
    parts: Parts,
    tiers: Tiers,
    measured: MeasuredJobs,
    catch_up: Callable[[], None],
    datapath: Datapath | None,
    *,
    sends_opens: bool,
) -> Hints:
    measuring, foresight = Measuring(measured, sends_opens=sends_opens), tiers.foresight
    refused = datapath.refused_hints if datapath is not None else lambda: (0, 0, 0)
    return Hints(parts.snapshot, foresight.announced, measuring, foresight.wake, catch_up, refused)


def build_transfer(
    parts: Parts, tiers: Tiers, names: Namespace, metrics: Metrics, datapath: Datapath | None
) -> Transfer:
    settings, limits = parts.settings, parts.settings.limits
    view: DatapathView = datapath or NoDatapath()
    source_load = SourceLoad(view)
    # The files of a pack never change, so none is young.
    newest_ns = parts.snapshot.newest_ns() if parts.pack is None else _AFTER_ALL_NS
    doubts = Doubts(SourceClock(newest_ns, time.monotonic_ns()))
    monitor = TierMonitor(
        tiers=tiers.hierarchy.tiers,
        keep_free=[
            tier.keep_free_within(room.space.total)
            for tier, room in zip(settings.tiers, tiers.rooms, strict=True)
        ],
        ledger=tiers.ledger,
        metrics=metrics,
        limits=limits,
        datapath=view,
    )
    changed = ChangedInodes()
    reader = SourceReader(
        parts.source, names, parts.source_threads, source_load, metrics, limits, doubts
    )
    window = _window(settings, tiers, reader, is_pack=parts.pack is not None)
    engine = Engine(monitor, tiers.hierarchy.records, tiers.controller, reader, changed.add, window)
    source_calls = SourceCalls(
        parts.source,
        parts.source_threads,
        names=names,
        metrics=metrics,
        timeout_s=limits.source_timeout,
        datapath=view,
        as_caller=settings.source_identity == "caller",
    )
    chunks = None
    if parts.pack is not None:
        chunks = ChunkReads(
            PackChunks(parts.pack, parts.snapshot, tiers.residency),
            tiers.controller,
            engine,
            reader,
            tiers.foresight.announced,
        )
        chunks.looks_ahead = _foresight(settings).announced
    return Transfer(monitor, engine, reader, source_calls, source_load, doubts, changed, chunks)


def _window(
    settings: MountSettings, tiers: Tiers, reader: SourceReader, *, is_pack: bool
) -> Window:
    """The window. That of a pack holds whole chunks, and has memory of its own."""
    limits = settings.limits
    if not _foresight(settings).window:
        return Window(tiers.controller, reader.buffer, 0)
    if is_pack:
        return Window(tiers.controller, Buffer(limits.pack_window), limits.pack_window)
    return Window(tiers.controller, reader.buffer, limits.buffer_max // _WINDOW_SHARE)


def build_ruled_files(parts: Parts, tiers: Tiers, names: Namespace, read: ReadSide) -> RuledFiles:
    inline_max = parts.settings.limits.inline_max
    tiers.controller.sizes_by(lambda ino: names.attributes(ino).size)
    return RuledFiles(
        tiers.rules,
        tiers.foresight,
        tier_of=tiers.residency.tier_of,
        is_large=lambda ino: names.attributes(ino).size > inline_max,
        evict=read.promotions.evict,
        counted=lambda: tiers.controller.draw(parts.snapshot.curve()),
    )


def build_fetch_ahead(
    tiers: Tiers, names: Namespace, transfer: Transfer, read: ReadSide, ruled: RuledFiles
) -> FetchAhead:
    """Fetches what ``tiers.foresight`` foresees, and then pinned files."""
    fetch_ahead = FetchAhead(
        ruled,
        names,
        tiers.controller,
        transfer.engine,
        transfer.reader,
        transfer.source_load,
        is_open=read.bindings.is_open,
        _chunks=transfer.chunks,
        has_pages=read.kernel.may_be_half_read,
    )
    if transfer.chunks is not None:
        read.promotions.chunks = transfer.chunks
        transfer.chunks.leave_to_readers(read.bindings.is_open, read.kernel.may_be_half_read)
    tiers.foresight.on_more(fetch_ahead.wake)
    ruled.wake = fetch_ahead.wake
    read.promotions.is_expected_again = tiers.foresight.is_expected_again
    if read.kernel.sends_opens:
        # Otherwise another job gets the file from the pages of the kernel.
        read.promotions.stage = fetch_ahead.stage
    return fetch_ahead


def follow_removals(readers: Readers, read: ReadSide, tiers: Tiers) -> None:
    """Has the epochs and the rules leave out the files that are removed or written through the
    mount, or gone from the source. Those of an earlier mount are known from the journal."""
    names = read.names

    def left(ino: Ino) -> None:
        # An open before that may not be counted yet.
        readers.catch_up()
        tiers.epochs.left(ino)
        tiers.foresight.left(ino)
        tiers.rules.left(ino)

    before = [
        ino for ino in differing(tiers.residency) if names.is_gone(ino) or names.is_rewritten(ino)
    ]
    tiers.foresight.left_before(before)
    for ino in before:
        tiers.rules.left(ino)
    read.promotions.left = left


def build_open_watch(
    parts: Parts, choice: Choice, datapath: Datapath | None, caches: MountCaches
) -> OpenWatch | None:
    """Counts the opens that the kernel does not report; None if it reports all, or if they are not
    to be counted."""
    settings = parts.settings
    if choice.open != "none" or datapath is None or not settings.foresight.count_opens:
        return None
    watch = OpenWatch(parts.snapshot, datapath, settings.mountpoint)
    caches.before_drop = watch.expect_own
    return watch


def build_upkeep(
    parts: Parts,
    tiers: Tiers,
    names: Namespace,
    metrics: Metrics,
    transfer: Transfer,
    read: ReadSide,
    write_back: WriteBack | None,
    *,
    sends_opens: bool,
) -> Upkeep:
    settings, hierarchy, residency = parts.settings, tiers.hierarchy, tiers.residency
    watch = FreshnessWatch(
        names=names,
        source=parts.source,
        source_threads=parts.source_threads,
        hierarchy=hierarchy,
        residency=residency,
        revalidation=read.revalidation,
        doubts=transfer.doubts,
        metrics=metrics,
        settings=settings.snapshot,
        just_built=parts.just_built,
        inline_max=settings.limits.inline_max,
        sends_opens=sends_opens,
    )
    scrub = Scrub(
        tiers=hierarchy.tiers,
        is_read=transfer.monitor.is_read,
        records=hierarchy.records,
        residency=residency,
        copies=read.copies,
        parts=read.parts,
        # Its own: a disk that does not answer must not delay other work.
        threads=ThreadPool(1, "scrub", abandon=True),
        bandwidth=settings.limits.scrub_bandwidth,
    )
    online_fsck = OnlineFsck(
        state=parts.state,
        mountpoint=settings.mountpoint,
        hierarchy=hierarchy,
        names=names,
        residency=residency,
        ledger=tiers.ledger,
        monitor=transfer.monitor,
        engine=transfer.engine,
        copies=read.copies,
        parts=read.parts,
        renewals=read.renewals,
        writing=write_back,
        # More than one: a call at a hanging disk occupies its thread after its client has gone.
        threads=ThreadPool(4, "fsck", abandon=True),
    )
    return Upkeep(watch, scrub, online_fsck)
