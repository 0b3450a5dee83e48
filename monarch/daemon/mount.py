"""The daemon: connects the subsystems of a mount, and defines the order of their start and end.

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

import trio

from monarch.config.defaults import state_root
from monarch.config.settings import MountSettings
from monarch.control import ending
from monarch.control.registry import MountRecord, Registry, alive, process_started
from monarch.control.server import Server
from monarch.control.state_directory import write_note
from monarch.daemon import subsystems
from monarch.daemon.figures import FigureKeeper
from monarch.daemon.hints import Hints
from monarch.daemon.peers import Sharing, build_sharing
from monarch.daemon.quota_verbs import QuotaVerbs
from monarch.daemon.remarks import remarks
from monarch.daemon.replicas import recovery_of_left
from monarch.daemon.ruled_files import RuledFiles
from monarch.daemon.status import Status
from monarch.daemon.supervisor import Supervisor
from monarch.daemon.sweep import Sweep
from monarch.daemon.trace import Traces
from monarch.daemon.verbs import Verbs
from monarch.daemon.write_status import LossAlarm
from monarch.daemon.write_verbs import WrittenVerbs
from monarch.fuse.datapath import Datapath
from monarch.fuse.datapath_mode import Abilities, Choice, Serving, choose
from monarch.fuse.operations import Operations
from monarch.fuse.session import MountCaches, Session, wait_until_answered
from monarch.namespace.namespace import Namespace
from monarch.posix import failpoints, signals
from monarch.telemetry.metrics import Metrics
from monarch.transfer.ahead import FetchAhead
from monarch.types import WRITTEN_INO, Ino
from monarch.vfs.filesystem import FileSystem
from monarch.vfs.open_watch import OpenWatch
from monarch.vfs.peer_reads import PeerReads
from monarch.vfs.read_side import ReadSide, build_read_side
from monarch.writeback.front import Reading
from monarch.writeback.setup import WriteBack, build_write_back
from monarch.writeback.store import WriteStore, open_write_store
from monarch.writeback.undrained import UndrainedNotes

if TYPE_CHECKING:
    from monarch.telemetry.metrics_page import MetricsPage


log = logging.getLogger(__name__)

# Shortest interval between two updates of the counters from the events of the datapath.
_NOTE_STEP_S = 0.1
# Time limit at the end for copies whose bytes were already fetched.
_LAST_COPIES_S = 10.0
# Time limit at the end for requests that are being answered.
_LAST_ANSWERS_S = 1.0


def open_mount(parts: subsystems.Parts) -> Mount:
    """Opens the tiers and builds all objects of a mount. Raises MonarchError."""
    settings = parts.settings
    tiers = subsystems.open_tiers(parts)
    store = open_write_store(settings, tiers.hierarchy.tiers)
    names = Namespace(
        parts.snapshot,
        tiers.residency.mark_differing,
        first_ino=Ino(max(WRITTEN_INO, store.found.next_ino if store is not None else 0)),
        spill=parts.state / "names",
    )
    choice = _choice(parts, tiers, store)
    log.info("datapath %s, open %s: %s", choice.datapath, choice.open, choice.why)
    metrics = Metrics([tier.name for tier in tiers.hierarchy.tiers])
    datapath = subsystems.open_datapath(parts, tiers, choice, has_written=store is not None)
    caches = MountCaches(settings.mountpoint, names.path, datapath)
    serving, sends_opens = Serving(choice, datapath), choice.open == "open"
    transfer = subsystems.build_transfer(parts, tiers, names, metrics, datapath)
    read = build_read_side(
        names=names,
        source_calls=transfer.source_calls,
        source_load=transfer.source_load,
        tiers=tiers.hierarchy.tiers,
        records=tiers.hierarchy.records,
        residency=tiers.residency,
        controller=tiers.controller,
        engine=transfer.engine,
        tier_calls=transfer.monitor,
        caches=caches,
        fast=datapath,
        sends_opens=sends_opens,
        reads_copies=choice.datapath == "passthrough",
        settings=settings,
        doubts=transfer.doubts,
        metrics=metrics,
    )
    loss_alarm, write_back = LossAlarm(parts.state), None
    if store is not None:
        loss_alarm.report(op.path for op in store.found.lost)
        write_back = _write_back(parts, store, tiers, names, datapath, caches, transfer, read)
    watch = subsystems.build_open_watch(parts, choice, datapath, caches)
    measured = subsystems.build_measured(parts, datapath)
    filesystem = FileSystem(read, tiers.epochs, tiers.foresight, write_back, watch, measured)
    filesystem.readers.quotas = subsystems.build_quotas(parts, tiers)
    subsystems.follow_removals(filesystem.readers, read, tiers)
    upkeep = subsystems.build_upkeep(
        parts, tiers, names, metrics, transfer, read, write_back, sends_opens=sends_opens
    )
    catch_up = filesystem.readers.catch_up
    hints = subsystems.build_hints(
        parts, tiers, measured, catch_up, datapath, sends_opens=sends_opens
    )
    status = Status(
        parts, tiers, metrics, transfer, filesystem, write_back, upkeep, loss_alarm, serving, watch
    )
    operations = Operations(
        filesystem, metrics.error, datapath, status.summary, serving, hints.receive
    )
    ruled_files = subsystems.build_ruled_files(parts, tiers, names, read)
    return Mount(
        parts=parts,
        tiers=tiers,
        metrics=metrics,
        datapath=datapath,
        transfer=transfer,
        read=read,
        filesystem=filesystem,
        watch=watch,
        serving=serving,
        write_back=write_back,
        upkeep=upkeep,
        hints=hints,
        ruled_files=ruled_files,
        ahead=subsystems.build_fetch_ahead(tiers, names, transfer, read, ruled_files),
        status=status,
        session=_session(settings, operations, datapath, caches),
        written_verbs=WrittenVerbs(names=names, write_back=write_back, loss_alarm=loss_alarm),
        remarks=_remarks(parts, tiers, choice, store),
    )


def _choice(parts: subsystems.Parts, tiers: subsystems.Tiers, store: WriteStore | None) -> Choice:
    return choose(
        parts.settings,
        parts.snapshot.info(),
        Abilities.here(),
        capacity=sum(room.capacity for room in tiers.rooms),
        holds_written=store is not None and bool(store.found.ops),
    )


def _sharing(
    parts: subsystems.Parts,
    tiers: subsystems.Tiers,
    filesystem: FileSystem,
    reads: PeerReads,
    datapath: Datapath | None,
    status: Status,
    write_back: WriteBack | None,
) -> Sharing | None:
    """The connection with the other nodes of the job; None if there are none."""
    if parts.membership is None:
        return None
    names, written = filesystem.names, write_back
    made = build_sharing(parts, parts.membership, tiers, names, reads, datapath, written)
    status.peers = made.report
    return made


def _write_back(
    parts: subsystems.Parts,
    store: WriteStore,
    tiers: subsystems.Tiers,
    names: Namespace,
    datapath: Datapath | None,
    caches: MountCaches,
    transfer: subsystems.Transfer,
    read: ReadSide,
) -> WriteBack:
    return build_write_back(
        store,
        settings=parts.settings,
        names=names,
        source_calls=transfer.source_calls,
        source_load=transfer.source_load,
        ledger=tiers.ledger,
        fast=datapath,
        read=Reading(
            copied_up=read.promotions.copied_up,
            look_again=read.revalidation.look_again,
            copies=tiers.controller.copies,
            evict=read.promotions.evict,
            evicted=read.promotions.removed,
            is_open=read.bindings.is_open,
            renewed=read.renewals.renewed,
        ),
        kernel=caches,
        progress=parts.progress,
    )


def _session(
    settings: MountSettings, operations: Operations, datapath: Datapath | None, caches: MountCaches
) -> Session:
    return Session(
        operations=operations,
        mountpoint=settings.mountpoint,
        source=os.fsencode(settings.source),
        allow_other=settings.allow_other,
        writable=bool(settings.absorbs),
        datapath=datapath,
        caches=caches,
    )


def _remarks(
    parts: subsystems.Parts, tiers: subsystems.Tiers, choice: Choice, store: WriteStore | None
) -> list[str]:
    """The remarks for the user; they are also logged."""
    shown = remarks(
        parts.settings,
        choice.mode,
        nbytes=parts.snapshot.bytes_total,
        tiers=tiers.rooms,
        absorbs_in_memory=store is not None and store.tier.in_memory,
        served={record.state for record in Registry(state_root()).all() if alive(record)},
        state=parts.state,
    )
    for remark in shown:
        log.info("%s", remark)
    return [*shown, parts.put_off] if parts.put_off else shown


@dataclass(kw_only=True)
class Mount:
    """All objects of one mount, connected; ``open_mount`` makes it. ``remarks`` are shown when it
    is ready."""

    parts: subsystems.Parts
    tiers: subsystems.Tiers
    metrics: Metrics
    datapath: Datapath | None
    transfer: subsystems.Transfer
    read: ReadSide
    filesystem: FileSystem
    watch: OpenWatch | None
    serving: Serving
    write_back: WriteBack | None
    upkeep: subsystems.Upkeep
    hints: Hints
    ruled_files: RuledFiles
    ahead: FetchAhead
    status: Status
    session: Session
    written_verbs: WrittenVerbs
    remarks: list[str]

    def __post_init__(self) -> None:
        self._settings = self.parts.settings
        reads = PeerReads(self.filesystem.readers, self.read, self.transfer.monitor)
        self.sharing = _sharing(
            *(self.parts, self.tiers, self.filesystem, reads, self.datapath, self.status),
            self.write_back,
        )
        if self.sharing is not None:
            self.read.promotions.is_kept_elsewhere = self.sharing.is_kept_elsewhere
            self.read.parts.is_shared = self.sharing.shares_parts
            self.upkeep.watch.given = self.sharing.given
        self._replicas = None if self.sharing is None else self.sharing.replicas
        self._left = (
            recovery_of_left(self.parts, self.write_back) if self._replicas is None else None
        )
        if (pack := self.parts.pack) is not None:
            stored = self.filesystem.names.stored
            self.filesystem.xattrs.of_source = lambda ino: pack.user_xattrs(stored(ino).source_ino)
        self._sweep = Sweep(
            self.tiers.hierarchy,
            self.tiers.residency,
            self.transfer.monitor,
            evict=self.read.promotions.evict,
            parts=self.tiers.controller.parts,
            doubts=self._settings.verify != "never",
        )
        self._started_ns = time.time_ns()
        self._page: MetricsPage | None = None
        self._supervisor = Supervisor(self.metrics.error)
        self._undrained: UndrainedNotes | None = None
        if (written := self.write_back) is not None:
            table = written.front.object_table
            self._undrained = UndrainedNotes(self.parts.state, written.place, written.drain, table)
            written.front.recorder.begins = self._undrained.begin
            self.status.know_notes(self._undrained)
        self._timed_out = 0
        readers, epochs = self.filesystem.readers, self.tiers.epochs
        self._traces = Traces(self.filesystem.names, readers, epochs, self.status.report)
        self._figures = FigureKeeper(
            self.metrics,
            epochs,
            self.tiers.ledger,
            mode=self.serving.mode,
            opens=self.status.opens,
            report=self.status.report,
            environ=os.environ,
        )
        self._answering = trio.CancelScope()
        # The steps that remain when the last task is cancelled.
        self._end = ExitStack()

    async def serve(self, ready: Callable[[list[str]], None]) -> None:
        """Serves the mount until its end. ``ready`` is called with the remarks when it answers."""
        state = self.parts.state
        write_note(state, self._settings, self.parts.snapshot.file)
        registry = Registry(state_root())
        socket = state / "control.sock"
        self.parts.source_threads.prepare()
        self.transfer.monitor.prepare()
        async with trio.open_nursery() as service:
            verbs = Verbs(
                names=self.filesystem.names,
                promotions=self.read.promotions,
                residency=self.tiers.residency,
                status=self.status,
                online_fsck=self.upkeep.online_fsck,
                background=lambda task: service.start_soon(self._supervisor.attempt, "warm", task),
                stop=self._stop,
                abandon=self._abandon,
            )
            table = {**verbs.table(), **self.written_verbs.table(), **self._traces.table()}
            table.update(self._figures.table())
            table.update(self._quota_verbs().table())
            await service.start(Server(socket, table).serve)
            self.session.mount()
            failpoints.failpoint("mount-made")
            record = self._record(socket)
            try:
                registry.add(record)
                service.start_soon(self._announce, ready)
                for name, task in self._tasks().items():
                    service.start_soon(self._supervisor.keep, name, task)
                self._show_metrics(service)
                # Objects made so far live to the end: the collector need not visit them.
                gc.collect()
                gc.freeze()
                with self._answering:
                    await self.session.serve()
                log.info("the mount has ended")
            finally:
                try:
                    await self._finish()
                finally:
                    # Not earlier: `monarch status` and `umount --abandon` find a long end by it.
                    registry.remove_own(record)
                self._end.enter_context(ending.step("tasks"))
                service.cancel_scope.cancel()

    async def _finish(self) -> None:
        """Ends the session, then the copies, then the drain, each within its time limit."""
        self.status.state = "stopping"
        await self._traces.finish()
        if self.watch is not None:
            self.watch.close()
        with ending.step("requests"):
            self.session.close()
        with ending.step("copies"), trio.move_on_after(_LAST_COPIES_S, shield=True):
            await self.read.parts.finish()
            await self.transfer.engine.finish()
        if self.write_back is not None:
            with ending.step("written"):
                self.write_back.front.files.close()
                await self.write_back.finish()
                for held in (self._replicas, self._left):
                    if held is not None:
                        await held.finish(self.write_back.patience_s)
                if self._undrained is not None:
                    await self._undrained.finish()
        keep = partial(self._figures.keep, self.parts.state)
        await self._supervisor.attempt("figures", keep)

    def _tasks(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """The background tasks by name; each runs until it returns or the mount ends."""
        transfer, upkeep = self.transfer, self.upkeep
        tasks: dict[str, Callable[[], Awaitable[None]]] = {
            "signals": self._signals,
            "engine": partial(transfer.engine.run, on_return=self._sweep.returned),
            "ahead": self.ahead.run,
            "rules": self.ruled_files.run,
            "changes": partial(transfer.changed.run, self.read.revalidation.look_again),
            "inquiry": transfer.source_calls.run,
            "offers": self.read.promotions.run,
            **self.filesystem.tasks(),
            "books": self._note_served,
            "parts": self.read.parts.run,
            "sweep": self._sweep.run,
            "scrub": upkeep.scrub.run,
            "health": self.status.watch_health,
            "figures": self._figures.run,
            "hints": self.hints.run,
            "measured jobs": self.hints.measuring.run,
            "second look": upkeep.watch.run_second_look,
        }
        if transfer.chunks is not None:
            tasks["chunks"] = transfer.chunks.run
        if self.sharing is not None:
            tasks.update(self.sharing.tasks())
        if self._left is not None:
            tasks["recovery"] = self._left.run
        if self.watch is not None:
            tasks["open watch"] = partial(self.watch.run, self.filesystem.readers.catch_up)
        if self._settings.snapshot.freshness != "never":
            tasks["watch"] = upkeep.watch.run
        if self.write_back is not None:
            tasks.update(self.write_back.tasks())
        if self._undrained is not None:
            tasks["undrained"] = self._undrained.run
        return tasks

    def _quota_verbs(self) -> QuotaVerbs:
        ledger = self.tiers.ledger
        return QuotaVerbs(
            self.filesystem.readers.quotas, lambda: sum(map(ledger.capacity, ledger.tiers))
        )

    def _stop(self) -> None:
        """Ends the mount. A request that waits for a hanging source is not answered."""
        self.session.stop()
        self._answering.deadline = trio.current_time() + _LAST_ANSWERS_S

    def _abandon(self) -> None:
        """Makes the end not wait for written data that is not at the source."""
        if self.write_back is not None:
            self.write_back.abandon()

    async def _announce(self, ready: Callable[[list[str]], None]) -> None:
        await wait_until_answered(self._settings.mountpoint)
        if self.watch is not None and self.serving.mode().open == "none":
            # Before the mount is ready: all opens since then are counted.
            await self.watch.begin()
        if self.sharing is not None:
            await self.sharing.started()
        self.status.state = "serving"
        # The first check, with which later ones are compared.
        self.status.health()
        log.info("ready")
        self.session.raise_limits()
        ready(self.remarks)

    async def _signals(self) -> None:
        with trio.open_signal_receiver(*signals.ending()) as received:
            async for number in received:
                log.info("ending on %s", signal.Signals(number).name)
                self._stop()

    async def _note_served(self) -> None:
        """Reads the events of the datapath: what it served, and the end of the session."""
        while self.datapath is not None:
            await trio.lowlevel.wait_readable(self.datapath.fileno())
            self.filesystem.readers.catch_up_all()
            self._figures.note()
            state = self.datapath.state()
            self.transfer.source_calls.timed_out_elsewhere(state.timed_out - self._timed_out)
            self._timed_out = state.timed_out
            if state.ended:
                self._stop()
                return
            await trio.sleep(_NOTE_STEP_S)

    def _show_metrics(self, service: trio.Nursery) -> None:
        settings = self._settings.metrics
        if settings.enabled:
            # Imported here: most mounts do not serve metrics and need not load the modules.
            from monarch.telemetry.metrics_page import MetricsPage

            self._page = MetricsPage(settings.address, self.metrics, self.status.report)
            log.info("metrics at http://%s/metrics", self._page.address)
            service.start_soon(self._supervisor.keep, "metrics", self._page.serve)

    def _record(self, socket: Path) -> MountRecord:
        pid, written = os.getpid(), self.write_back
        return MountRecord(
            mountpoint=os.fspath(self._settings.mountpoint),
            source=os.fspath(self._settings.source),
            pid=pid,
            pid_started=process_started(pid) or 0,
            socket=os.fspath(socket),
            state=os.fspath(self.parts.state),
            log=os.fspath(self._settings.log.file or self.parts.state / "daemon.log"),
            started_ns=self._started_ns,
            absorbs=os.fspath(written.place.directory) if written is not None else "",
            node=os.uname().nodename,
        )

    async def close(self, *, clean: bool) -> None:
        """Closes what was opened; ``clean``: ``serve`` returned. Syncs the tiers then."""
        self._end.close()
        with ending.step("tiers"):
            if self._page is not None:
                self._page.close()
            self.status.close()
            if self.sharing is not None:
                self.sharing.close()
            self.read.bindings.close()
            self.read.parts.close()
            if self.write_back is not None:
                self.write_back.close()
            if self.transfer.monitor.is_stuck:
                # A hanging call keeps its descriptors, and may still write a record.
                log.warning("a tier hangs: copies will be verified at the next mount")
                return
            close = partial(self.tiers.hierarchy.close, clean=clean)
            await trio.to_thread.run_sync(close, abandon_on_cancel=True)
