"""Composes the report of one daemon from the state of its parts."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import trio

from monarch import __version__
from monarch.config.settings import MountSettings
from monarch.daemon.freshness import FreshnessWatch
from monarch.daemon.health_checks import HealthChecks
from monarch.daemon.loss_alarm import LossAlarm
from monarch.daemon.scrub import Scrub
from monarch.namespace.namespace import Namespace
from monarch.placement.epochs import EpochCount, Epochs
from monarch.placement.ledger import Ledger
from monarch.placement.residency import Residency
from monarch.telemetry.health import Health, health_of
from monarch.telemetry.metrics import Metrics
from monarch.telemetry.report import (
    Copies,
    EpochReport,
    Handles,
    Memory,
    Mode,
    Requests,
    Saved,
    SnapshotReport,
    State,
    StatusReport,
    TierReport,
    WarmProgress,
    WritingReport,
)
from monarch.telemetry.report import Residency as ResidencyReport
from monarch.tiers.tier import Tier
from monarch.transfer.engine import Engine
from monarch.vfs.filesystem import FileSystem
from monarch.writeback.setup import WriteBack

log = logging.getLogger(__name__)

# Interval of the daemon's own health checks.
_LOOK_S = 10.0
# Greatest age of the public figures.
_SUMMARY_S = 1.0
# A report names at most this many lost files.
_NAMED = 1000


class Status:
    """Reports the state of the daemon. The daemon sets ``state`` as its life proceeds.

    ``warming`` lists the running requests of `monarch warm`; the object that runs them sets it.
    """

    def __init__(
        self,
        *,
        settings: MountSettings,
        mode: Callable[[], Mode],
        names: Namespace,
        tiers: Sequence[Tier],
        residency: Residency,
        ledger: Ledger,
        epochs: Epochs,
        engine: Engine,
        filesystem: FileSystem,
        metrics: Metrics,
        watch: FreshnessWatch,
        scrub: Scrub,
        writing: WriteBack | None,
        loss_alarm: LossAlarm,
        health_checks: HealthChecks,
        requests: Callable[[], Requests],
    ) -> None:
        self._settings = settings
        self._mode = mode
        self._names = names
        self._tiers = tiers
        self._residency = residency
        self._ledger = ledger
        self._epochs = epochs
        self._engine = engine
        self._filesystem = filesystem
        self._metrics = metrics
        self._watch = watch
        self._scrub = scrub
        self._writing = writing
        self._loss_alarm = loss_alarm
        self._health_checks = health_checks
        self._requests = requests
        # Kept open: a report is still possible when the process has no free descriptor.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._started_ns = time.time_ns()
        self.state: State = "starting"
        self._summary, self._summed_s = b"", -_SUMMARY_S
        self.warming: Callable[[], list[WarmProgress]] = list

    def health(self) -> Health:
        if self._writing is not None:
            self._loss_alarm.report(self._writing.drain.backlog().lost)
        return health_of(self._health_checks.problems())

    async def watch_health(self) -> None:
        """Logs each change of the health."""
        known: set[str] = set()
        while True:
            health = self.health()
            for problem in health.problems:
                if problem.kind not in known:
                    log.info("%s: %s; %s", health.state, problem.what, problem.remedy)
            if known and not health.problems:
                log.info("the mount is healthy again")
            known = {problem.kind for problem in health.problems}
            await trio.sleep(_LOOK_S)

    def summary(self) -> bytes:
        """Public figures as JSON, without names of files: every user of the mount may read them."""
        now = time.monotonic()
        # Cached: any user may ask, even in a loop.
        if now - self._summed_s > _SUMMARY_S:
            self._summed_s, self._summary = now, self._summarised()
        return self._summary

    def _summarised(self) -> bytes:
        report = self.report()
        told = {
            "pid": report.pid,
            "version": report.version,
            "state": report.state,
            "health": report.health.state,
            "datapath": report.mode.datapath,
            "open": report.mode.open,
            "files": report.snapshot.files,
            "bytes": report.snapshot.bytes,
            "resident_files": report.residency.files,
            "resident_bytes": report.residency.bytes,
            "tiers": [
                {"name": tier.name, "used": tier.used, "capacity": tier.capacity}
                for tier in report.tiers
            ],
        }
        return json.dumps(told).encode()

    def report(self) -> StatusReport:
        self._filesystem.note_served()
        metrics = self._metrics
        mode = self._mode()
        tiers = self._tier_reports(mode)
        epochs, latency = self._epochs.epochs(), metrics.latency()
        open_files = self._filesystem.open_files
        return StatusReport(
            version=__version__,
            pid=os.getpid(),
            mountpoint=os.fspath(self._settings.mountpoint),
            source=os.fspath(self._settings.source),
            state=self.state,
            started_ns=self._started_ns,
            health=self.health(),
            mode=mode,
            snapshot=self._snapshot_report(),
            tiers=tiers,
            source_totals=metrics.source_totals(),
            residency=self._residency_report(tiers),
            copies=Copies(
                queued=self._engine.queued,
                running=self._engine.running,
                done=sum(metrics.promotions),
                failed=sum(metrics.promotion_failures.values()),
                bytes=sum(metrics.promoted_bytes),
            ),
            epochs=[_epoch_report(epoch) for epoch in epochs] if mode.counts_opens else None,
            opens=sum(metrics.opens) if mode.counts_opens else None,
            reads=sum(metrics.reads) if mode.counts_tier_reads else None,
            bytes=sum(metrics.read_bytes) if mode.counts_tier_reads else None,
            hit_ratio=metrics.hit_ratio() if mode.counts_opens else None,
            saved=Saved(
                opens=metrics.hits() if mode.counts_opens else None,
                bytes=sum(metrics.read_bytes[1:]) if mode.counts_tier_reads else None,
            ),
            latency=latency if mode.counts_opens else replace(latency, open=None),
            errors=dict(metrics.errors),
            memory=Memory(self._resident_bytes()),
            handles=Handles(
                open_files if mode.counts_opens else None, self._filesystem.backing_ids
            ),
            requests=self._requests(),
            scrub=self._scrub.report(),
            writing=self._writing_report(),
            warming=self.warming(),
        )

    def _writing_report(self) -> WritingReport | None:
        write_back = self._writing
        if write_back is None:
            return None
        backlog = write_back.drain.backlog()
        return WritingReport(
            tier=write_back.place.tier.name,
            directory=os.fspath(write_back.place.directory),
            fsync=self._settings.writeback.fsync,
            files=backlog.files,
            bytes=backlog.bytes,
            operations=backlog.ops,
            oldest_ns=backlog.oldest_ns,
            drained_files=backlog.drained_files,
            drained_bytes=backlog.drained_bytes,
            errors=backlog.failures,
            trouble=backlog.trouble or "",
            reserve=write_back.reclaimer.reserve,
            held=write_back.object_table.bytes + write_back.place.doubtful.held,
            lost=[os.fsdecode(name) for name in self._loss_alarm.names[:_NAMED]],
            in_memory=write_back.place.tier.in_memory,
            names=write_back.writing.names_held,
            names_max=write_back.writing.names_max,
            aside=[os.fsdecode(refusal.path) for refusal in backlog.aside[:_NAMED]],
            aside_operations=backlog.aside_ops,
        )

    def _resident_bytes(self) -> int:
        return int(os.pread(self._statm, 256, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _tier_reports(self, mode: Mode) -> list[TierReport]:
        out = self._engine.out_of_service()
        return [
            TierReport(
                name=tier.name,
                path=os.fspath(tier.path),
                capacity=self._ledger.capacity(tier.number),
                used=self._ledger.used(tier.number),
                reserved=self._ledger.reserved(tier.number),
                free=self._ledger.free(tier.number),
                files=self._residency.resident_files(tier.number),
                in_service=tier.number not in out,
                opens=self._metrics.opens[tier.number] if mode.counts_opens else None,
                reads=self._metrics.reads[tier.number] if mode.counts_tier_reads else None,
                bytes=self._metrics.read_bytes[tier.number] if mode.counts_tier_reads else None,
                out_why=out[tier.number].why if tier.number in out else "",
                others=list(self._engine.others(tier.number)),
            )
            for tier in self._tiers
        ]

    def _residency_report(self, tiers: Sequence[TierReport]) -> ResidencyReport:
        files = sum(tier.files for tier in tiers)
        size = sum(tier.used for tier in tiers)
        info = self._names.info()
        return ResidencyReport(
            files=files,
            bytes=size,
            wanted=self._residency.wanted,
            fraction_files=files / info.files if info.files else 1.0,
            fraction_bytes=size / info.bytes_total if info.bytes_total else 1.0,
        )

    def _snapshot_report(self) -> SnapshotReport:
        info = self._names.info()
        path = self._names.snapshot.file
        return SnapshotReport(
            file=os.fspath(self._settings.snapshot.file or path),
            id=info.id,
            entries=info.entries,
            files=info.files,
            bytes=info.bytes_total,
            size_bytes=_size_of(path),
            created_ns=info.created_ns,
            age_s=max(0.0, (time.time_ns() - info.created_ns) / 1e9),
            stale=self._watch.stale,
            freshness=self._settings.snapshot.freshness,
            checks=self._watch.checks,
        )


def _epoch_report(epoch: EpochCount) -> EpochReport:
    ratio = epoch.hits / epoch.opens if epoch.opens else None
    return EpochReport(epoch.number, epoch.opens, epoch.hits, ratio)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
