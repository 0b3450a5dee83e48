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
from monarch.control import ending
from monarch.control.registry import MountRecord, Registry, alive, process_started
from monarch.control.server import Server
from monarch.control.state_directory import write_note
from monarch.daemon.loss_alarm import LossAlarm
from monarch.daemon.remarks import remarks
from monarch.daemon.status import Status
from monarch.daemon.subsystems import (
    Door,
    Parts,
    Tiers,
    Transfer,
    Upkeep,
    build_transfer,
    build_upkeep,
    open_door,
    open_tiers,
)
from monarch.daemon.supervisor import Supervisor
from monarch.daemon.sweep import Sweep
from monarch.daemon.verbs import Verbs
from monarch.daemon.write_verbs import WrittenVerbs
from monarch.fuse.datapath_mode import Abilities, Choice, choose
from monarch.fuse.operations import Operations
from monarch.fuse.session import Session, wait_until_answered
from monarch.namespace.namespace import Namespace
from monarch.posix import failpoints, signals
from monarch.telemetry.metrics import Metrics
from monarch.types import WRITTEN_INO, Ino
from monarch.vfs.filesystem import FileSystem
from monarch.vfs.read_side import ReadSide, build_read_side
from monarch.writeback.front import Reading
from monarch.writeback.setup import WriteBack, build_write_back
from monarch.writeback.store import WriteStore, open_write_store

if TYPE_CHECKING:
    from monarch.telemetry.metrics_page import MetricsPage


log = logging.getLogger(__name__)

# Shortest interval between two updates of the counters from the events of the datapath.
_NOTE_STEP_S = 0.1
# Time limit at the end for copies whose bytes were already fetched.
_LAST_COPIES_S = 10.0
# Time limit at the end for requests that are being answered.
_LAST_ANSWERS_S = 1.0


def open_mount(parts: Parts) -> Mount:
    """Opens the tiers and builds all objects of a mount. Raises MonarchError."""
    settings = parts.settings
    tiers = open_tiers(parts)
    store = open_write_store(settings, tiers.hierarchy.tiers)
    names = Namespace(
        parts.snapshot,
        tiers.residency.mark_differing,
        first_ino=Ino(max(WRITTEN_INO, store.found.next_ino if store is not None else 0)),
        spill=parts.state / "names",
    )
    choice = choose(
        settings,
        parts.snapshot.info(),
        Abilities.here(),
        capacity=sum(room.capacity for room in tiers.rooms),
        holds_written=store is not None and bool(store.found.ops),
    )
    log.info("datapath %s, open %s: %s", choice.datapath, choice.open, choice.why)
    told = _remarks(parts, tiers, choice, store)
    metrics = Metrics([tier.name for tier in tiers.hierarchy.tiers])
    door = open_door(parts, tiers, names, choice, has_written=store is not None)
    transfer = build_transfer(parts, tiers, names, metrics, door.datapath)
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
        caches=door.caches,
        fast=door.datapath,
        sends_opens=door.sends_opens,
        reads_copies=choice.datapath == "passthrough",
        settings=settings,
        doubts=transfer.doubts,
        metrics=metrics,
    )
    loss_alarm, write_back = LossAlarm(parts.state), None
    if store is not None:
        loss_alarm.report(op.path for op in store.found.lost)
        write_back = _write_back(parts, store, tiers, names, door, transfer, read)
    filesystem = FileSystem(read, tiers.epochs, write_back)
    upkeep = build_upkeep(
        parts, tiers, names, metrics, transfer, read, write_back, sends_opens=door.sends_opens
    )
    status = Status(
        parts,
        tiers,
        metrics,
        transfer,
        filesystem,
        write_back,
        upkeep,
        loss_alarm=loss_alarm,
        serving=door.serving,
    )
    operations = Operations(filesystem, metrics.error, door.datapath, status.summary, door.serving)
    session = Session(
        operations=operations,
        mountpoint=settings.mountpoint,
        source=os.fsencode(settings.source),
        allow_other=settings.allow_other,
        writable=bool(settings.absorbs),
        datapath=door.datapath,
        caches=door.caches,
    )
    verbs = WrittenVerbs(names=names, write_back=write_back, loss_alarm=loss_alarm)
    control = Control(status, verbs, session, told)
    return Mount(
        parts, tiers, metrics, door, transfer, read, filesystem, write_back, upkeep, control
    )


def _write_back(
    parts: Parts,
    store: WriteStore,
    tiers: Tiers,
    names: Namespace,
    door: Door,
    transfer: Transfer,
    read: ReadSide,
) -> WriteBack:
    return build_write_back(
        store,
        settings=parts.settings,
        names=names,
        source_calls=transfer.source_calls,
        source_load=transfer.source_load,
        ledger=tiers.ledger,
        residency=tiers.residency,
        fast=door.datapath,
        read=Reading(
            copied_up=read.promotions.copied_up,
            look_again=read.revalidation.look_again,
            evict=read.promotions.evict,
            evicted=read.promotions.removed,
            is_open=read.bindings.is_open,
        ),
        kernel=door.caches,
    )


def _remarks(parts: Parts, tiers: Tiers, choice: Choice, store: WriteStore | None) -> list[str]:
    """The remarks for the user; they are also logged."""
    told = remarks(
        parts.settings,
        choice.mode,
        nbytes=parts.snapshot.bytes_total,
        tiers=tiers.rooms,
        absorbs_in_memory=store is not None and store.tier.in_memory,
        served={record.state for record in Registry(state_root()).all() if alive(record)},
        state=parts.state,
    )
    for remark in told:
        log.info("%s", remark)
    return [*told, parts.put_off] if parts.put_off else told


@dataclass(frozen=True, slots=True)
class Control:
    """What the user and the kernel see of a mount. ``remarks`` are shown when it is ready."""

    status: Status
    written_verbs: WrittenVerbs
    session: Session
    remarks: list[str]


class Mount:
    """All objects of one mount, connected; ``open_mount`` makes it."""

    def __init__(
        self,
        parts: Parts,
        tiers: Tiers,
        metrics: Metrics,
        door: Door,
        transfer: Transfer,
        read: ReadSide,
        filesystem: FileSystem,
        write_back: WriteBack | None,
        upkeep: Upkeep,
        control: Control,
    ) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._tiers = tiers
        self._metrics = metrics
        self._datapath = door.datapath
        self._transfer = transfer
        self._read = read
        self._filesystem = filesystem
        self._write_back = write_back
        self._upkeep = upkeep
        self._control = control
        self._status = control.status
        self._session = control.session
        self._sweep = Sweep(
            tiers.hierarchy,
            tiers.residency,
            transfer.monitor,
            evict=read.promotions.evict,
            doubts=parts.settings.verify != "never",
        )
        self._started_ns = time.time_ns()
        self._page: MetricsPage | None = None
        self._supervisor = Supervisor(metrics.error)
        self._timed_out = 0
        self._answering = trio.CancelScope()
        # The steps that remain when the last task is cancelled.
        self._end = ExitStack()

    async def serve(self, ready: Callable[[list[str]], None]) -> None:
        """Serves the mount until its end. ``ready`` is called with the remarks when it answers."""
        parts = self._parts
        write_note(parts.state, self._settings, parts.snapshot.file)
        registry = Registry(state_root())
        socket = parts.state / "control.sock"
        parts.source_threads.prepare()
        self._transfer.monitor.prepare()
        async with trio.open_nursery() as service:
            verbs = Verbs(
                names=self._filesystem.names,
                promotions=self._read.promotions,
                residency=self._tiers.residency,
                status=self._status,
                online_fsck=self._upkeep.online_fsck,
                background=lambda task: service.start_soon(self._supervisor.attempt, "warm", task),
                stop=self._stop,
                abandon=self._abandon,
            )
            table = {**verbs.table(), **self._control.written_verbs.table()}
            await service.start(Server(socket, table).serve)
            self._session.mount()
            failpoints.failpoint("mount-made")
            try:
                record = self._record(socket)
                registry.add(record)
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
                    registry.remove(record.mountpoint)
            finally:
                await self._finish()
                self._end.enter_context(ending.step("tasks"))
                service.cancel_scope.cancel()

    async def _finish(self) -> None:
        """Ends the session, then the copies, then the drain, each within its time limit."""
        self._status.state = "stopping"
        with ending.step("requests"):
            self._session.close()
        with ending.step("copies"), trio.move_on_after(_LAST_COPIES_S, shield=True):
            await self._transfer.engine.finish()
        if self._write_back is not None:
            with ending.step("written"):
                self._write_back.front.files.close()
                await self._write_back.finish()

    def _tasks(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """The background tasks by name; each runs until it returns or the mount ends."""
        transfer, upkeep = self._transfer, self._upkeep
        tasks: dict[str, Callable[[], Awaitable[None]]] = {
            "signals": self._signals,
            "engine": partial(transfer.engine.run, on_return=self._sweep.returned),
            "changes": partial(transfer.changed.run, self._read.revalidation.look_again),
            "inquiry": transfer.source_calls.run,
            "offers": self._read.promotions.run,
            **self._filesystem.tasks(),
            "books": self._note_served,
            "sweep": self._sweep.run,
            "scrub": upkeep.scrub.run,
            "health": self._status.watch_health,
            "second look": upkeep.second_look.run,
        }
        if self._settings.snapshot.freshness != "never":
            tasks["watch"] = upkeep.watch.run
        if self._write_back is not None:
            tasks.update(self._write_back.tasks())
        return tasks

    def _stop(self) -> None:
        """Ends the mount. A request that waits for a hanging source is not answered."""
        self._session.stop()
        self._answering.deadline = trio.current_time() + _LAST_ANSWERS_S

    def _abandon(self) -> None:
        """Makes the end not wait for written data that is not at the source."""
        if self._write_back is not None:
            self._write_back.abandon()

    async def _announce(self, ready: Callable[[list[str]], None]) -> None:
        await wait_until_answered(self._settings.mountpoint)
        self._status.state = "serving"
        # The first check, with which later ones are compared.
        self._status.health()
        log.info("ready")
        self._session.raise_limits()
        ready(self._control.remarks)

    async def _signals(self) -> None:
        with trio.open_signal_receiver(*signals.ending()) as received:
            async for number in received:
                log.info("ending on %s", signal.Signals(number).name)
                self._stop()

    async def _note_served(self) -> None:
        """Reads the events of the datapath: what it served, and the end of the session."""
        while self._datapath is not None:
            await trio.lowlevel.wait_readable(self._datapath.fileno())
            self._filesystem.readers.catch_up_all()
            state = self._datapath.state()
            self._transfer.source_calls.timed_out_elsewhere(state.timed_out - self._timed_out)
            self._timed_out = state.timed_out
            if state.ended:
                self._session.stop()
                return
            await trio.sleep(_NOTE_STEP_S)

    def _show_metrics(self, service: trio.Nursery) -> None:
        settings = self._settings.metrics
        if settings.enabled:
            # Imported here: most mounts do not serve metrics and need not load the modules.
            from monarch.telemetry.metrics_page import MetricsPage

            self._page = MetricsPage(settings.address, self._metrics, self._status.report)
            log.info("metrics at http://%s/metrics", self._page.address)
            service.start_soon(self._supervisor.keep, "metrics", self._page.serve)

    def _record(self, socket: Path) -> MountRecord:
        pid, written = os.getpid(), self._write_back
        return MountRecord(
            mountpoint=os.fspath(self._settings.mountpoint),
            source=os.fspath(self._settings.source),
            pid=pid,
            pid_started=process_started(pid) or 0,
            socket=os.fspath(socket),
            state=os.fspath(self._parts.state),
            log=os.fspath(self._settings.log.file or self._parts.state / "daemon.log"),
            started_ns=self._started_ns,
            absorbs=os.fspath(written.place.directory) if written is not None else "",
        )

    async def close(self, *, clean: bool) -> None:
        """Closes what was opened; ``clean``: ``serve`` returned. Syncs the tiers then."""
        self._end.close()
        with ending.step("tiers"):
            if self._page is not None:
                self._page.close()
            self._status.close()
            self._read.bindings.close()
            if self._write_back is not None:
                self._write_back.close()
            if self._transfer.monitor.is_stuck:
                # A hanging call keeps its descriptors, and may still write a record.
                log.warning("a tier hangs: copies will be verified at the next mount")
                return
            close = partial(self._tiers.hierarchy.close, clean=clean)
            await trio.to_thread.run_sync(close, abandon_on_cancel=True)
