"""The daemon: builds every object once, and defines the order of their start and end.

lock the state -> open or build the snapshot -> open tiers, load residency
    nursery "service": transfer engine, freshness watch, sweep, control socket, signals
        FUSE session                  ends by unmount, signal or ``stop``
    all tasks of the nursery end; running copies are given up and leave no files
sync the tiers -> mark the records clean -> release the locks
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import trio

from monarch.config.defaults import state_root
from monarch.config.settings import MountSettings
from monarch.control import ending
from monarch.control.registry import MountRecord, Registry, alive, process_started
from monarch.control.server import Server
from monarch.control.state_directory import write_note
from monarch.daemon.freshness import ChangedInodes, FreshnessWatch, SecondLook
from monarch.daemon.fsck import OnlineFsck
from monarch.daemon.health_checks import (
    CopyCheck,
    HealthChecks,
    MountCheck,
    SnapshotCheck,
    SourceCheck,
)
from monarch.daemon.loss_alarm import LossAlarm
from monarch.daemon.process_checks import ProcessCheck
from monarch.daemon.remarks import TierRoom, remarks
from monarch.daemon.scrub import Scrub
from monarch.daemon.status import Status
from monarch.daemon.subsystems import Tiers, Upkeep
from monarch.daemon.supervisor import Supervisor
from monarch.daemon.verbs import Verbs
from monarch.daemon.write_status import WriteStatus
from monarch.daemon.write_verbs import WrittenVerbs
from monarch.errors import TierError
from monarch.fuse.abilities import Abilities
from monarch.fuse.datapath import Datapath, DatapathOptions
from monarch.fuse.datapath_mode import choose
from monarch.fuse.kernel_caches import MountCaches
from monarch.fuse.operations import Operations
from monarch.fuse.serving import Serving
from monarch.fuse.session import Session, wait_until_answered
from monarch.namespace.namespace import Namespace
from monarch.namespace.snapshot import Snapshot
from monarch.placement.controller import Controller
from monarch.placement.epochs import Epochs
from monarch.placement.ledger import Ledger
from monarch.placement.policies.first_come import FirstCome
from monarch.placement.policies.lru import Lru
from monarch.placement.policies.no_evict import NoEvict
from monarch.placement.policy import Policy
from monarch.placement.residency import Residency
from monarch.posix import failpoints, signals
from monarch.posix.thread_pool import ThreadPool, batches
from monarch.telemetry.log import Logbook
from monarch.telemetry.metrics import Metrics
from monarch.tiers.doubts import Doubts, SourceClock
from monarch.tiers.hierarchy import Hierarchy
from monarch.tiers.source import Source
from monarch.tiers.tier import Tier
from monarch.transfer.datapath_view import NoDatapath
from monarch.transfer.engine import Engine
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import SourceLoad
from monarch.transfer.source_reader import SourceReader
from monarch.transfer.tier_monitor import TierMonitor
from monarch.types import WRITTEN_INO, Ino
from monarch.vfs.setup import build_file_system, build_read_side
from monarch.writeback.setup import WriteBack
from monarch.writeback.store import make_room, open_write_store

if TYPE_CHECKING:
    from monarch.telemetry.metrics_page import MetricsPage


log = logging.getLogger(__name__)

# Shortest interval between two updates of the counters from the events of the datapath.
_NOTE_STEP_S = 0.1
# Files handled before the event loop runs other tasks.
_STRIDE = 64
# Time limit at the end for copies whose bytes were already fetched.
_LAST_COPIES_S = 10.0
# Time limit at the end for requests that are being answered.
_LAST_ANSWERS_S = 1.0


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a mount that exist before and after it. ``just_built``: the snapshot was made
    for this mount; ``put_off``: why it is not the requested one."""

    settings: MountSettings
    state: Path
    source: Source
    source_threads: ThreadPool
    snapshot: Snapshot
    just_built: bool
    put_off: str
    logbook: Logbook


class Mount:
    """All objects of one mount, connected."""

    def __init__(self, parts: Parts) -> None:
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
        place = open_write_store(settings, tiers, state)
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
            # A tier with a smaller capacity than before keeps the copies that fit.
            fits = np.cumsum(copies.sizes) <= capacity
            for ino in copies.inos[~fits].tolist():
                self._hierarchy.records.clear(Ino(ino))
                tier.remove(Ino(ino))
            self._controller.load(copies.inos[fits], copies.sizes[fits], tier=tier.number)
        if settings.verify != "never":
            for inos in self._hierarchy.records.unverified():
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
                options=DatapathOptions(
                    passthrough=choice.datapath == "passthrough",
                    no_open=choice.open == "none",
                    decide_opens=settings.verify == "open",
                    cache_listings=choice.cache_listings,
                    ask_names=bool(settings.absorbs),
                    ask_xattrs=place is not None,
                    as_caller=settings.source_identity == "caller",
                ),
            )
        )
        caches = MountCaches(settings.mountpoint, names.path, self._datapath)
        view = self._datapath or NoDatapath()
        source_load = SourceLoad(view)
        doubts = Doubts(SourceClock(snapshot.newest_ns(), time.monotonic_ns()))
        self._monitor = TierMonitor(
            tiers=tiers,
            keep_free=[
                tier.keep_free_within(space.total)
                for tier, space in zip(settings.tiers, spaces, strict=True)
            ],
            ledger=ledger,
            metrics=metrics,
            limits=settings.limits,
            datapath=view,
        )
        self._changed = ChangedInodes()
        self._engine = Engine(
            monitor=self._monitor,
            records=self._hierarchy.records,
            names=names,
            controller=self._controller,
            metrics=metrics,
            limits=settings.limits,
            reader=SourceReader(
                source=source,
                names=names,
                threads=source_threads,
                source_load=source_load,
                metrics=metrics,
                limits=settings.limits,
                doubts=doubts,
            ),
            doubts=doubts,
            changed=self._changed.add,
        )
        source_calls = self._source_calls = SourceCalls(
            source,
            source_threads,
            names=names,
            metrics=metrics,
            timeout_s=settings.limits.source_timeout,
            datapath=view,
            as_caller=settings.source_identity == "caller",
        )
        read = self._read = build_read_side(
            names=names,
            source_calls=source_calls,
            source_load=source_load,
            tiers=tiers,
            records=self._hierarchy.records,
            residency=self._residency,
            controller=self._controller,
            engine=self._engine,
            tier_calls=self._monitor,
            caches=caches,
            fast=self._datapath,
            sends_opens=choice.open == "open",
            reads_copies=choice.datapath == "passthrough",
            settings=settings,
            doubts=doubts,
            metrics=metrics,
        )
        self._writing = (
            None
            if place is None
            else WriteBack(
                place,
                settings=settings,
                snapshot_id=snapshot.id,
                names=names,
                source_calls=source_calls,
                source_load=source_load,
                ledger=ledger,
                residency=self._residency,
                fast=self._datapath,
                taken=read.promotions.copied_up,
                look_again=read.revalidation.look_again,
                evict=read.promotions.evict,
                evicted=read.promotions.removed,
                kernel=caches,
                is_open=read.bindings.is_open,
            )
        )
        self.filesystem = build_file_system(read, epochs, self._writing)
        self._scrub = Scrub(
            tiers=tiers,
            is_read=self._monitor.is_read,
            records=self._hierarchy.records,
            residency=self._residency,
            copies=read.copies,
            # Its own: a disk that does not answer must not delay other work.
            threads=ThreadPool(1, "scrub", abandon=True),
            bandwidth=settings.limits.scrub_bandwidth,
        )
        self._online_fsck = OnlineFsck(
            state=state,
            mountpoint=settings.mountpoint,
            hierarchy=self._hierarchy,
            names=names,
            residency=self._residency,
            ledger=ledger,
            engine=self._engine,
            copies=read.copies,
            writing=self._writing,
            # More than one: a call at a hanging disk occupies its thread after its client has gone.
            threads=ThreadPool(4, "fsck", abandon=True),
        )
        self._watch = FreshnessWatch(
            names=names,
            source=source,
            residency=self._residency,
            revalidation=read.revalidation,
            tiers=[tier.number for tier in tiers],
            source_threads=source_threads,
            settings=settings.snapshot,
            just_built=parts.just_built,
        )
        self._second_look = SecondLook(
            doubts=doubts,
            names=names,
            source=source,
            records=self._hierarchy.records,
            residency=self._residency,
            revalidation=read.revalidation,
            metrics=metrics,
            source_threads=source_threads,
            inline_max=settings.limits.inline_max,
            sends_opens=choice.open == "open",
        )
        loss_alarm = LossAlarm(state)
        if place is not None:
            loss_alarm.report(op.path for op in place.found.lost)
        self._written_verbs = WrittenVerbs(
            names=names, write_back=self._writing, loss_alarm=loss_alarm
        )
        writing = WriteStatus(settings, self._writing, loss_alarm)
        serving = Serving(choice, self._datapath)
        mountpoint = settings.mountpoint
        self._status = Status(
            settings=settings,
            serving=serving,
            tiers=Tiers(self._hierarchy, self._residency, ledger, self._controller, epochs),
            monitor=self._monitor,
            engine=self._engine,
            filesystem=self.filesystem,
            metrics=metrics,
            upkeep=Upkeep(self._watch, self._second_look, self._scrub, self._online_fsck),
            writing=writing,
            health_checks=HealthChecks(
                [
                    MountCheck(mountpoint),
                    SourceCheck(
                        settings,
                        source_calls,
                        self._monitor,
                        metrics,
                        requests=serving.requests,
                        log=parts.logbook.path,
                    ),
                    CopyCheck(self._monitor, self._residency, metrics, mountpoint),
                    writing,
                    ProcessCheck(parts.logbook),
                    SnapshotCheck(
                        self._watch,
                        metrics,
                        mountpoint,
                        put_off=parts.put_off,
                        drain=self._writing.drain if self._writing is not None else None,
                    ),
                ]
            ),
        )
        operations = Operations(
            self.filesystem, metrics.error, self._datapath, self._status.summary, serving
        )
        self._session = Session(
            operations,
            settings.mountpoint,
            os.fsencode(settings.source),
            allow_other=settings.allow_other,
            writable=bool(settings.absorbs),
            datapath=self._datapath,
            caches=caches,
        )
        self._metrics = metrics
        self._page: MetricsPage | None = None
        self._supervisor = Supervisor(metrics.error)
        self._timed_out = 0
        self._answering = trio.CancelScope()
        # The steps that remain when the last task is cancelled.
        self._end = ExitStack()

    async def serve(self, ready: Callable[[list[str]], None]) -> None:
        write_note(self._state, self._settings, self.filesystem.names.snapshot.file)
        registry = Registry(state_root())
        mountpoint = os.fspath(self._settings.mountpoint)
        socket = self._state / "control.sock"
        self._source_threads.prepare()
        self._monitor.prepare()
        async with trio.open_nursery() as service:
            verbs = Verbs(
                names=self.filesystem.names,
                promotions=self._read.promotions,
                residency=self._residency,
                status=self._status,
                online_fsck=self._online_fsck,
                background=lambda task: service.start_soon(self._supervisor.attempt, "warm", task),
                stop=self._stop,
                abandon=self._abandon,
            )
            table = {**verbs.table(), **self._written_verbs.table()}
            await service.start(Server(socket, table).serve)
            self._session.mount()
            failpoints.failpoint("mount-made")
            try:
                registry.add(self._record(socket))
                try:
                    service.start_soon(self._announce, ready)
                    for name, task in self._tasks().items():
                        service.start_soon(self._supervisor.keep, name, task)
                    self._show_metrics(service)
                    # Objects made so far live to the end: the collector need not visit them.
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
        """The background tasks by name; each runs until it returns or the mount ends."""
        tasks: dict[str, Callable[[], Awaitable[None]]] = {
            "signals": self._signals,
            "engine": partial(self._engine.run, on_return=self._returned),
            "changes": partial(self._changed.run, self._read.revalidation.look_again),
            "inquiry": self._source_calls.run,
            "offers": self._read.promotions.run,
            **self.filesystem.tasks(),
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
        """Ends the mount. A request that waits for a hanging source is not answered."""
        self._session.stop()
        self._answering.deadline = trio.current_time() + _LAST_ANSWERS_S

    def _abandon(self) -> None:
        """Makes the end not wait for written data that is not at the source."""
        if self._writing is not None:
            self._writing.abandon()

    async def _announce(self, ready: Callable[[list[str]], None]) -> None:
        await wait_until_answered(self._settings.mountpoint)
        self._status.state = "serving"
        # The first check, with which later ones are compared.
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
        """Reads the events of the datapath: what it served, and the end of the session."""
        while self._datapath is not None:
            await trio.lowlevel.wait_readable(self._datapath.fileno())
            self.filesystem.counts.catch_up_all()
            state = self._datapath.state()
            self._source_calls.timed_out_elsewhere(state.timed_out - self._timed_out)
            self._timed_out = state.timed_out
            if state.ended:
                self._session.stop()
                return
            await trio.sleep(_NOTE_STEP_S)

    async def _sweep(self) -> None:
        for tier in self._hierarchy.tiers:
            try:
                await self._sweep_tier(tier, before_ns=self._started_ns)
            except TierError as error:
                log.warning(
                    "tier %s: not swept: %s; files without a record stay until the next mount",
                    tier.name,
                    error,
                )

    async def _sweep_tier(self, tier: Tier, *, before_ns: int) -> None:
        """Makes the tier and its records agree. Raises TierError."""
        files = self._residency.resident_files(tier.number)
        sweep = partial(self._hierarchy.sweep, tier, before_ns=before_ns)
        missing = await self._monitor.call(tier, sweep, files=files)
        # An emptied tier may miss a million copies: readers are served between the batches.
        for batch in batches(missing, _STRIDE):
            # A reader may have missed the copy first, and it may be resident again.
            asked = [ino for ino in batch if self._residency.tier_of(ino) == tier.number]
            for ino in await self._monitor.call(tier, _missing, tier, asked):
                if self._residency.tier_of(ino) == tier.number:
                    self._read.promotions.evict(ino)

    async def _returned(self, tier: Tier) -> None:
        """Handles the return of a tier, perhaps after its disk lost power. Raises TierError."""
        files = self._residency.resident_files(tier.number)
        inos = await self._monitor.call(tier, self._hierarchy.doubt, tier, files=files)
        if self._settings.verify != "never":
            self._residency.mark_unverified(inos)
        await self._sweep_tier(tier, before_ns=time.time_ns())

    def _show_metrics(self, service: trio.Nursery) -> None:
        settings = self._settings.metrics
        if settings.enabled:
            # Imported here: most mounts do not serve metrics and need not load the modules.
            from monarch.telemetry.metrics_page import MetricsPage

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
        self._status.close()
        self._read.bindings.close()
        if self._writing is not None:
            self._writing.close()
        if self._monitor.is_stuck:
            # A hanging call keeps its descriptors, and may still write a record.
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
