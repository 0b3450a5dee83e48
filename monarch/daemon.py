"""The daemon: builds every object once, and owns the order in which they live and die.

    lock the state -> open or build the snapshot -> open tiers, load residency
        nursery "service": transfer engine, freshness watch, sweep, control socket, signals
            FUSE session                  ends by unmount, signal or ``stop``
        everything of the nursery ends; what was under way is given up and leaves nothing behind
    sync the tiers -> mark the records clean -> let the locks go

The process that calls ``run`` must have no threads and no event loop yet.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import trio

from monarch import ending, points, signals
from monarch import log as log_setup
from monarch.absorbing import WriteSide, absorbing, make_room
from monarch.checkup import Checkup
from monarch.control.server import Server
from monarch.errors import MonarchError, TierError
from monarch.fuse import mountpoint as mountpoints
from monarch.fuse.datapath import Datapath
from monarch.fuse.operations import Operations
from monarch.fuse.session import Session, answers
from monarch.log import Logbook
from monarch.lost import Lost
from monarch.metrics import Metrics
from monarch.modes import Abilities, agreed, check_possible, choose
from monarch.namespace.overlay import Namespace
from monarch.namespace.snapshot import Snapshot
from monarch.namespace.written import NAME_BYTES
from monarch.overlaps import check_apart, with_state_directory
from monarch.placement.controller import Controller
from monarch.placement.epochs import Epochs
from monarch.placement.ledger import Ledger
from monarch.placement.policies.first_come import FirstCome
from monarch.placement.policies.lru import Lru
from monarch.placement.policies.no_evict import NoEvict
from monarch.placement.policy import Policy
from monarch.placement.residency import Residency
from monarch.places import default_tier, state_directory, state_root
from monarch.registry import MountRecord, Registry, alive, process_started
from monarch.remarks import TierRoom, remarks
from monarch.report import Mode, Requests
from monarch.scrub import Scrub
from monarch.settings import MountSettings
from monarch.snapshots import snapshot_for, tell_unknown_acls, tell_unreadable
from monarch.state import hold_state, write_note
from monarch.status import Status
from monarch.supervision import Supervisor
from monarch.symptoms import Symptoms
from monarch.threads import Threads, batches
from monarch.tiers.directory import Tier
from monarch.tiers.doubts import Doubts, SourceClock
from monarch.tiers.hierarchy import Hierarchy, require_known
from monarch.tiers.source import Source, let_go
from monarch.transfer.engine import Engine
from monarch.transfer.readers import Readers
from monarch.transfer.ward import Served, Ward
from monarch.types import WRITTEN_INO, Ino, Progress
from monarch.units import KiB
from monarch.verbs import Verbs
from monarch.vfs.filesystem import FileSystem
from monarch.vfs.inquiry import Inquiry
from monarch.watch import SecondLook, Watch
from monarch.writeback import lease
from monarch.written_verbs import WrittenVerbs

if TYPE_CHECKING:
    from monarch.metrics_page import MetricsPage

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

log = logging.getLogger(__name__)

# How often at most the books are brought up to date with what the datapath serves. Seconds.
_NOTE_STEP_S = 0.1
# Files handled between two looks of the event loop at its other work.
_STRIDE = 64
# How long the end may wait for the tiers' disks. After that the copies are verified at the next
# mount instead. Seconds.
_SYNC_DEADLINE_S = 10.0
# How long the end may wait for copies whose bytes are already here. Seconds.
_LAST_COPIES_S = 10.0
# As conf/monarch@.service has it.
_OOM_SCORE_ADJUST = -500
# Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BLOCK_BYTES = 256 * KiB
# How long the end may wait for requests that are being answered. Seconds.
_LAST_ANSWERS_S = 1.0


def prepare(settings: MountSettings) -> MountSettings:
    """Check what can be checked without side effects and fill in the default tier.

    A mount that a dead daemon left behind is taken away. Raises MonarchError.
    """
    abilities = Abilities.here()
    check_possible(settings, abilities)
    limits = settings.limits.within(abilities.memory_bytes)
    names_max = settings.writeback.names_within(abilities.memory_bytes, each=NAME_BYTES)
    writeback = settings.writeback.model_copy(update={"names_max": names_max})
    settings = settings.model_copy(update={"limits": limits, "writeback": writeback})
    if not settings.tiers:
        settings = settings.model_copy(update={"tiers": (default_tier(settings),)})
    _clear_stale_mount(settings.mountpoint)
    mountpoints.check(settings.mountpoint, settings.source)
    for tier in settings.tiers:
        mountpoints.check_tier(tier.path, settings.source, settings.mountpoint)
    records = Registry(state_root()).all()
    settings = with_state_directory(settings, records)
    check_apart(settings, records)
    return settings


def _clear_stale_mount(mountpoint: Path) -> None:
    if mountpoints.mount_at(mountpoint) is not None and mountpoints.is_dead(mountpoint):
        # Processes with files open there keep the errors that they have.
        mountpoints.unmount(mountpoint, lazy=True)


def run(
    settings: MountSettings,
    *,
    refreshed: bool,
    foreground: bool,
    progress: Progress,
    ready: Callable[[list[str]], None],
) -> None:
    """Serve one mount until its end. ``ready`` is called with ``remarks`` when it answers.

    ``refreshed``: bring an existing snapshot up to date first. Raises MonarchError.
    """
    _allow_descriptors()
    _be_spared()
    _give_memory_back()
    state = state_directory(settings)
    with hold_state(settings, state), ExitStack() as cleanup:
        path = settings.log.file or state / "daemon.log"
        try:
            logbook = log_setup.setup(settings.log, path=path, foreground=foreground)
        except OSError as error:
            raise TierError(
                f"log file {os.fspath(path)!r}: {error.strerror}",
                hint="name one that you may write with -o log.file=FILE",
            ) from error
        log.info("mounting %s at %s", settings.source, settings.mountpoint)
        try:
            threads = Threads(
                settings.limits.source_concurrency, "source", abandon=True, discard=let_go
            )
            source = Source(os.fsencode(settings.source), lambda fd: threads.start(os.close, fd))
            cleanup.callback(source.close)
            require_known(settings.tiers, state)
            with signals.interruptible():
                if settings.absorbs:
                    lease.prepare(source)
                snapshot, just_built, put_off = snapshot_for(
                    settings, state, source, refreshed, progress
                )
            cleanup.callback(snapshot.close)
            tell_unreadable(snapshot)
            tell_unknown_acls(snapshot)
            parts = _Parts(settings, state, source, threads, snapshot, just_built, put_off, logbook)
            _run_loop(parts, ready)
        except MonarchError as error:
            log.error("%s", error)
            raise
        log.info("ended")


def _allow_descriptors() -> None:
    """Each file that readers hold open may take a descriptor: as many as we are given."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _be_spared() -> None:
    """Have the kernel kill others first when memory is short: jobs lose their reads with us.

    Only root may, and who started us may have said otherwise already.
    """
    with suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) == 0:
            file.seek(0)
            file.write(str(_OOM_SCORE_ADJUST))


def _give_memory_back() -> None:
    """Have what was freed go back to the machine, as far as the C library can be told to.

    Files pass through by the thousand, fetched by one thread and freed by another. An arena for
    each thread, and large blocks kept for the next, would hold several times what is in use.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda parameter, value: 0)
    mallopt(_M_ARENA_MAX, 2)
    mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _LARGE_BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a mount is made of and outlives it. ``just_built``: the snapshot is of this moment;
    ``put_off``: why it is not the one that was asked for."""

    settings: MountSettings
    state: Path
    source: Source
    source_threads: Threads
    snapshot: Snapshot
    just_built: bool
    put_off: str
    logbook: Logbook


def _run_loop(parts: _Parts, ready: Callable[[list[str]], None]) -> None:
    """``trio.run``, but what ended the mount comes out alone, not as a nursery's group of one."""
    try:
        trio.run(_serve, parts, ready)
    except BaseExceptionGroup as group:
        cause: BaseException = group
        while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
            cause = cause.exceptions[0]
        raise cause from None


async def _serve(parts: _Parts, ready: Callable[[list[str]], None]) -> None:
    mount = _Mount(parts)
    clean = False
    try:
        await mount.serve(ready)
        clean = True
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _SYNC_DEADLINE_S):
            await mount.close(clean=clean)


class _Mount:
    """All objects of one mount, wired."""

    def __init__(self, parts: _Parts) -> None:
        settings, state, snapshot = parts.settings, parts.state, parts.snapshot
        source, source_threads = parts.source, parts.source_threads
        self._source_threads = source_threads
        self._settings = settings
        self._state = state
        self._started_ns = time.time_ns()
        make_room(settings)
        self._hierarchy = Hierarchy(
            settings.tiers,
            state,
            generation=snapshot.id,
            inodes=snapshot.records,
            columns=snapshot.columns,
            mountpoint=os.fspath(settings.mountpoint),
            source=os.fspath(settings.source),
        )
        tiers = self._hierarchy.tiers
        held = [self._hierarchy.held(tier) for tier in tiers]
        spaces = [tier.space() for tier in tiers]
        capacities = [
            tier.capacity_within(space.available, held=copies.bytes)
            for tier, space, copies in zip(settings.tiers, spaces, held, strict=True)
        ]
        self._residency = Residency(snapshot.entries)
        place = absorbing(settings, tiers, state)
        first_ino = place.found.next_ino if place is not None else 0
        names = Namespace(
            snapshot,
            self._residency.mark_differing,
            first_ino=Ino(max(WRITTEN_INO, first_ino)),
            spill=state / "names",
        )
        ledger = Ledger(capacities)
        self._controller = Controller(
            self._residency, ledger, _policy(settings, snapshot, capacities)
        )
        for tier, copies, capacity in zip(tiers, held, capacities, strict=True):
            # A tier that was made smaller keeps what still fits.
            fits = np.cumsum(copies.sizes) <= capacity
            for ino in copies.inos[~fits].tolist():
                self._hierarchy.records.clear(Ino(ino))
                tier.remove(Ino(ino))
            self._controller.load(copies.inos[fits], copies.sizes[fits], tier=tier.number)
        if settings.verify != "never":
            for inos in self._hierarchy.records.doubted():
                self._residency.mark_unverified(inos)
        metrics = Metrics([tier.name for tier in tiers])
        epochs = Epochs(snapshot.entries)
        choice = self._choice = choose(
            settings,
            snapshot.info(),
            Abilities.here(),
            capacity=sum(capacities),
            holds_written=place is not None and bool(place.found.ops),
        )
        log.info("datapath %s, open %s: %s", choice.datapath, choice.open, choice.why)
        self._remarks = remarks(
            settings,
            choice.mode,
            nbytes=snapshot.bytes_total,
            tiers=[
                TierRoom(tier, capacity, space, copies.bytes, self._hierarchy.forgotten(tier))
                for tier, capacity, space, copies in zip(
                    tiers, capacities, spaces, held, strict=True
                )
            ],
            absorbs_in_memory=place is not None and place.tier.in_memory,
            served={record.state for record in Registry(state_root()).all() if alive(record)},
            state=state,
        )
        for remark in self._remarks:
            log.info("%s", remark)
        if parts.put_off:
            self._remarks.append(parts.put_off)
        self._datapath = (
            None
            if choice.datapath == "python"
            else Datapath(
                snapshot=snapshot,
                source=source,
                limits=settings.limits,
                residency=self._residency,
                tiers=tiers,
                passthrough=choice.datapath == "passthrough",
                no_open=choice.open == "none",
                decide_opens=settings.verify == "open",
                cache_listings=choice.cache_listings,
                ask_names=bool(settings.absorbs),
                as_caller=settings.source_identity == "caller",
            )
        )
        readers = Readers(self._datapath)
        doubts = Doubts(SourceClock(snapshot.newest_ns(), time.monotonic_ns()))
        self._ward = Ward(
            tiers=tiers,
            keep_free=[
                tier.keep_free_within(space.total)
                for tier, space in zip(settings.tiers, spaces, strict=True)
            ],
            ledger=ledger,
            metrics=metrics,
            limits=settings.limits,
            shun=self._shun,
            moved=self._moved,
            returned=self._returned,
            served=self._served,
        )
        self._engine = Engine(
            source=source,
            ward=self._ward,
            records=self._hierarchy.records,
            names=names,
            controller=self._controller,
            metrics=metrics,
            limits=settings.limits,
            readers=readers,
            source_threads=source_threads,
            doubts=doubts,
            changed=self._changed,
        )
        inquiry = self._inquiry = Inquiry(
            source,
            source_threads,
            names=names,
            metrics=metrics,
            timeout_s=settings.limits.source_timeout,
            oldest_elsewhere_s=self._oldest_source_call_s,
            as_caller=settings.source_identity == "caller",
        )
        self._writing = (
            None
            if place is None
            else WriteSide(
                place,
                settings=settings,
                snapshot_id=snapshot.id,
                names=names,
                inquiry=inquiry,
                readers=readers,
                ledger=ledger,
                residency=self._residency,
                fast=self._datapath,
                taken=self._taken,
                look_again=self._look_again_at,
                evict=self._evict,
                evicted=self._engine.removed,
                names_changed=self._names_changed,
                attributes_changed=self._attributes_changed,
            )
        )
        self.filesystem = FileSystem(
            names=names,
            inquiry=inquiry,
            tiers=tiers,
            records=self._hierarchy.records,
            residency=self._residency,
            controller=self._controller,
            epochs=epochs,
            movement=self._engine,
            metrics=metrics,
            limits=settings.limits,
            readers=readers,
            verify=settings.verify,
            attributes_changed=self._attributes_changed,
            names_changed=self._names_changed,
            store_pages=self._store_pages,
            forget_pages=self._forget_pages,
            fast=self._datapath,
            opens_are_told=choice.open == "open",
            kernel_reads=choice.datapath == "passthrough",
            doubts=doubts,
            writing=self._writing.writing if self._writing is not None else None,
            others=self._writing.others if self._writing is not None else None,
        )
        # Of its own: a disk that does not answer must hold up nothing else.
        self._scrub_threads = Threads(1, "scrub", abandon=True)
        self._scrub = Scrub(
            tiers=tiers,
            is_read=self._engine.is_read,
            records=self._hierarchy.records,
            residency=self._residency,
            filesystem=self.filesystem,
            threads=self._scrub_threads,
            bandwidth=settings.limits.scrub_bandwidth,
        )
        self._checkup = Checkup(
            state=state,
            mountpoint=settings.mountpoint,
            hierarchy=self._hierarchy,
            names=names,
            residency=self._residency,
            ledger=ledger,
            engine=self._engine,
            filesystem=self.filesystem,
            writing=self._writing,
            # More than one: where a disk hangs, those who asked are gone and a thread is not.
            threads=Threads(4, "fsck", abandon=True),
        )
        self._watch = Watch(
            names=names,
            source=source,
            residency=self._residency,
            filesystem=self.filesystem,
            source_threads=source_threads,
            every_s=settings.snapshot.ttl_s,
            just_built=parts.just_built,
        )
        self._second_look = SecondLook(
            doubts=doubts,
            names=names,
            source=source,
            records=self._hierarchy.records,
            residency=self._residency,
            filesystem=self.filesystem,
            metrics=metrics,
            source_threads=source_threads,
            inline_max=settings.limits.inline_max,
            opens_are_told=choice.open == "open",
        )
        self._operations = Operations(
            self.filesystem, metrics.error, self._datapath, lambda: self._status.summary()
        )
        self._session = Session(
            self._operations,
            settings.mountpoint,
            os.fsencode(settings.source),
            allow_other=settings.allow_other,
            writable=bool(settings.absorbs),
            datapath=self._datapath,
        )
        lost = Lost(state)
        if place is not None:
            lost.hear(op.path for op in place.found.lost)
        self._written_verbs = WrittenVerbs(names=names, side=self._writing, lost=lost)
        self._status = Status(
            settings=settings,
            mode=self._mode,
            names=names,
            tiers=tiers,
            residency=self._residency,
            ledger=ledger,
            epochs=epochs,
            engine=self._engine,
            filesystem=self.filesystem,
            metrics=metrics,
            watch=self._watch,
            scrub=self._scrub,
            writing=self._writing,
            lost=lost,
            symptoms=Symptoms(
                settings=settings,
                tiers=tiers,
                residency=self._residency,
                engine=self._engine,
                inquiry=inquiry,
                metrics=metrics,
                watch=self._watch,
                logbook=parts.logbook,
                writing=self._writing,
                lost=lost,
                requests=self._requests,
                put_off=parts.put_off,
            ),
            requests=self._requests,
        )
        self._metrics = metrics
        self._page: MetricsPage | None = None
        self._supervisor = Supervisor(metrics.error)
        self._timed_out = 0
        self._answering = trio.CancelScope()
        # What is left of the end when its last task is cancelled.
        self._end = ExitStack()
        self._changes, self._changed_inos = trio.open_memory_channel[Ino](1024)

    def _mode(self) -> Mode:
        """How reads are served now: as chosen, unless the kernel turned out not to agree."""
        state = self._datapath.state() if self._datapath is not None else None
        return self._choice.mode if state is None else agreed(self._choice, state)

    def _taken(self, ino: Ino) -> None:
        """A file of the source is written: its copy, and one under way, is of another version."""
        if ino <= self.filesystem.names.entries:
            self._residency.unwant(ino)
            self.filesystem.changes.forget_copy(ino)

    async def _look_again_at(self, ino: Ino) -> None:
        await self.filesystem.changes.look_again(ino)

    def _evict(self, ino: Ino) -> int:
        return self.filesystem.evict(ino)

    def _requests(self) -> Requests:
        if self._datapath is None:
            return self._operations.requests()
        state = self._datapath.state()
        return Requests(state.waiting, state.oldest_request_s)

    def _oldest_source_call_s(self) -> float:
        return self._datapath.state().oldest_wait_s if self._datapath is not None else 0.0

    def _changed(self, ino: Ino) -> None:
        """A copy found the source changed; ``_look_again`` refreshes the entry."""
        with suppress(trio.WouldBlock):
            self._changes.send_nowait(ino)

    def _attributes_changed(self, ino: Ino) -> None:
        self._session.attributes_changed(ino)

    def _names_changed(self, directory: Ino) -> None:
        self._session.names_changed(directory)

    def _forget_pages(self, ino: Ino) -> None:
        self._scrub_threads.start(self._session.forget_pages, self.filesystem.names.path(ino))

    def _store_pages(self, ino: Ino, content: bytes) -> None:
        self._session.store_pages(ino, content)

    async def serve(self, ready: Callable[[list[str]], None]) -> None:
        write_note(self._state, self._settings, self.filesystem.names.snapshot.file)
        registry = Registry(state_root())
        mountpoint = os.fspath(self._settings.mountpoint)
        socket = self._state / "control.sock"
        self._source_threads.prepare()
        self._ward.prepare()
        async with trio.open_nursery() as service:
            verbs = Verbs(
                filesystem=self.filesystem,
                residency=self._residency,
                status=self._status,
                checkup=self._checkup,
                background=lambda task: service.start_soon(self._supervisor.attempt, "warm", task),
                stop=self._stop,
                abandon=self._abandon,
            )
            table = {**verbs.table(), **self._written_verbs.table()}
            await service.start(Server(socket, table).serve)
            self._session.mount()
            points.reached("mount-made")
            try:
                registry.add(self._record(socket))
                try:
                    service.start_soon(self._announce, ready)
                    for name, task in self._tasks().items():
                        service.start_soon(self._supervisor.keep, name, task)
                    self._show_metrics(service)
                    # What the start has made stays: the collector need not look at it again.
                    gc.collect()
                    gc.freeze()
                    with self._answering:
                        await self._session.serve()
                    log.info("the mount has ended")
                finally:
                    registry.remove(mountpoint)
            finally:
                self._status.state = "stopping"
                with ending.step("requests"):
                    self._session.close()
                with (
                    ending.step("copies"),
                    trio.move_on_after(_LAST_COPIES_S, shield=True),
                ):
                    await self._engine.finish()
                if self._writing is not None:
                    with ending.step("written"):
                        self._writing.files.close()
                        await self._writing.finish()
                self._end.enter_context(ending.step("tasks"))
                service.cancel_scope.cancel()

    def _tasks(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """What goes on beside the answers, by name: each until it returns or the mount ends."""
        tasks: dict[str, Callable[[], Awaitable[None]]] = {
            "signals": self._signals,
            "engine": self._engine.run,
            "changes": self._look_again,
            "inquiry": self._inquiry.run,
            "visits": self.filesystem.expire_visits,
            "offers": self.filesystem.offer_again,
            "sizes": self.filesystem.tell_sizes,
            "books": self._note_served,
            "sweep": self._sweep,
            "scrub": self._scrub.run,
            "health": self._status.watch_health,
            "second look": self._second_look.run,
        }
        if self._settings.snapshot.freshness != "never":
            tasks["watch"] = self._watch.run
        if self._writing is not None:
            tasks.update(self._writing.tasks())
        return tasks

    def _stop(self) -> None:
        """End the mount. A request that waits for a source that hangs gets no answer any more."""
        self._session.stop()
        self._answering.deadline = trio.current_time() + _LAST_ANSWERS_S

    def _abandon(self) -> None:
        """Have the end wait for nothing that was written and is not at the source."""
        if self._writing is not None:
            self._writing.abandon()

    async def _announce(self, ready: Callable[[list[str]], None]) -> None:
        await answers(self._settings.mountpoint)
        self._status.state = "serving"
        # The first look: what changes after it is noticed.
        self._status.health()
        log.info("ready")
        self._session.widen_readahead()
        self._session.widen_background()
        ready(self._remarks)

    async def _signals(self) -> None:
        with trio.open_signal_receiver(*signals.ending()) as received:
            async for number in received:
                log.info("ending on %s", signal.Signals(number).name)
                self._stop()

    async def _note_served(self) -> None:
        """Hear from the datapath what it has served, and that the kernel has ended the session."""
        while self._datapath is not None:
            await trio.lowlevel.wait_readable(self._datapath.fileno())
            self.filesystem.note_served()
            state = self._datapath.state()
            self._inquiry.timed_out_elsewhere(state.timed_out - self._timed_out)
            self._timed_out = state.timed_out
            if state.ended:
                self._session.stop()
                return
            await trio.sleep(_NOTE_STEP_S)

    async def _look_again(self) -> None:
        async for ino in self._changed_inos:
            try:
                await self.filesystem.changes.look_again(ino)
            except MonarchError as error:
                # Its readers are told, and the first of many like it is in the log.
                log.debug("%s", error)

    async def _sweep(self) -> None:
        for tier in self._hierarchy.tiers:
            try:
                await self._sweep_tier(tier, before_ns=self._started_ns)
            except TierError as error:
                log.warning(
                    "tier %s: not swept: %s; what no record knows stays until the next mount",
                    tier.name,
                    error,
                )

    async def _sweep_tier(self, tier: Tier, *, before_ns: int) -> None:
        """Make the tier and the books agree. Raises TierError."""
        files = self._residency.resident_files(tier.number)
        sweep = partial(self._hierarchy.sweep, tier, before_ns=before_ns)
        missing = await self._ward.call(tier, sweep, files=files)
        # A tier that somebody has emptied may miss a million copies: readers come between.
        for batch in batches(missing, _STRIDE):
            # A reader may have missed it before us, and it may be back by now.
            asked = [ino for ino in batch if self._residency.tier_of(ino) == tier.number]
            for ino in await self._ward.call(tier, _missing, tier, asked):
                if self._residency.tier_of(ino) == tier.number:
                    self.filesystem.evict(ino)

    async def _returned(self, tier: Tier) -> None:
        """A tier is back where it was, perhaps after a power cut of its own. Raises TierError."""
        files = self._residency.resident_files(tier.number)
        inos = await self._ward.call(tier, self._hierarchy.doubt, tier, files=files)
        if self._settings.verify != "never":
            self._residency.mark_unverified(inos)
        await self._sweep_tier(tier, before_ns=time.time_ns())

    def _moved(self, tier: Tier) -> None:
        if self._datapath is not None:
            self._datapath.move(tier)

    def _shun(self, tier: int, shunned: bool) -> None:
        if self._datapath is not None:
            self._datapath.shun(tier, shunned)

    def _served(self, tier: int) -> Served:
        if self._datapath is None:
            return Served(0, 0.0)
        tally = self._datapath.tallies()[tier]
        return Served(tally.opens + tally.reads, (tally.open_ns + tally.read_ns) / 1e9)

    def _show_metrics(self, service: trio.Nursery) -> None:
        settings = self._settings.metrics
        if settings.enabled:
            # Imported here: most mounts have no page, and need nothing of what makes one.
            from monarch.metrics_page import MetricsPage

            self._page = MetricsPage(settings.address, self._metrics, self._status.report)
            log.info("metrics at http://%s/metrics", self._page.address)
            service.start_soon(self._supervisor.keep, "metrics", self._page.serve)

    def _record(self, socket: Path) -> MountRecord:
        pid = os.getpid()
        return MountRecord(
            mountpoint=os.fspath(self._settings.mountpoint),
            source=os.fspath(self._settings.source),
            pid=pid,
            pid_started=process_started(pid) or 0,
            socket=os.fspath(socket),
            state=os.fspath(self._state),
            log=os.fspath(self._settings.log.file or self._state / "daemon.log"),
            started_ns=self._started_ns,
            absorbs=os.fspath(self._writing.place.directory) if self._writing is not None else "",
        )

    async def close(self, *, clean: bool) -> None:
        self._end.close()
        with ending.step("tiers"):
            await self._close(clean=clean)

    async def _close(self, *, clean: bool) -> None:
        if self._page is not None:
            self._page.close()
        self.filesystem.close()
        if self._writing is not None:
            self._writing.close()
        if self._engine.is_stuck:
            # What still hangs in a tier holds its descriptors, and may yet write a record.
            log.warning("a tier hangs: copies will be verified at the next mount")
            return
        await trio.to_thread.run_sync(
            partial(self._hierarchy.close, clean=clean), abandon_on_cancel=True
        )


def _missing(tier: Tier, inos: list[Ino]) -> list[Ino]:
    return [ino for ino in inos if not tier.has(ino)]


def _policy(settings: MountSettings, snapshot: Snapshot, capacities: list[int]) -> Policy:
    match settings.placement.policy:
        case "no_evict":
            return NoEvict(snapshot.curve(), capacities)
        case "first_come":
            return FirstCome()
        case "lru":
            return Lru()
