"""Composes the report of one daemon from the state of its parts."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import trio

from monarch import __version__
from monarch.daemon.health_checks import (
    Check,
    CopyCheck,
    HealthChecks,
    MountCheck,
    SnapshotCheck,
    SourceCheck,
)
from monarch.daemon.loss_alarm import LossAlarm
from monarch.daemon.process_checks import ProcessCheck
from monarch.daemon.subsystems import Parts, Tiers, Transfer, Upkeep
from monarch.daemon.write_status import WriteStatus
from monarch.fuse.datapath_mode import Serving
from monarch.placement.epochs import EpochCount
from monarch.telemetry.health import Health, health_of
from monarch.telemetry.metrics import Metrics
from monarch.telemetry.report import (
    Copies,
    EpochReport,
    Handles,
    Memory,
    Mode,
    Saved,
    SnapshotReport,
    State,
    StatusReport,
    TierReport,
    WarmProgress,
)
from monarch.telemetry.report import Residency as ResidencyReport
from monarch.vfs.filesystem import FileSystem
from monarch.writeback.drain import Drain
from monarch.writeback.setup import WriteBack

log = logging.getLogger(__name__)

# Interval of the daemon's own health checks.
_LOOK_S = 10.0
# Greatest age of the public figures.
_SUMMARY_S = 1.0


def _checks(
    parts: Parts,
    metrics: Metrics,
    tiers: Tiers,
    transfer: Transfer,
    upkeep: Upkeep,
    drain: Drain | None,
    serving: Serving,
) -> list[Check]:
    settings, monitor, mountpoint = parts.settings, transfer.monitor, parts.settings.mountpoint
    log_path, calls = parts.logbook.path, transfer.source_calls
    return [
        MountCheck(mountpoint),
        SourceCheck(settings, calls, monitor, metrics, serving.requests, log_path),
        CopyCheck(monitor, tiers.residency, metrics, mountpoint),
        ProcessCheck(parts.logbook),
        SnapshotCheck(upkeep.watch, metrics, mountpoint, parts.put_off, drain),
    ]


class Status:
    """Reports the state of the daemon. The daemon sets ``state`` as its life proceeds.

    ``warming`` lists the running requests of `monarch warm`; the object that runs them sets it.
    """

    def __init__(
        self,
        parts: Parts,
        tiers: Tiers,
        metrics: Metrics,
        transfer: Transfer,
        filesystem: FileSystem,
        write_back: WriteBack | None,
        upkeep: Upkeep,
        *,
        loss_alarm: LossAlarm,
        serving: Serving,
    ) -> None:
        self._settings = parts.settings
        self._serving = serving
        self._tiers = tiers
        self._monitor = transfer.monitor
        self._engine = transfer.engine
        self._filesystem = filesystem
        self._metrics = metrics
        self._upkeep = upkeep
        self._writing = WriteStatus(parts.settings, write_back, loss_alarm)
        drain = write_back.drain if write_back is not None else None
        checks = _checks(parts, metrics, tiers, transfer, upkeep, drain, serving)
        self._health_checks = HealthChecks([*checks, self._writing])
        # Kept open: a report is still possible when the process has no free descriptor.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._started_ns = time.time_ns()
        self.state: State = "starting"
        self._summary, self._summed_s = b"", -_SUMMARY_S
        self.warming: Callable[[], list[WarmProgress]] = list

    def close(self) -> None:
        """No report is possible afterwards."""
        os.close(self._statm)

    def health(self) -> Health:
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
        self._filesystem.readers.catch_up_all()
        metrics = self._metrics
        mode = self._serving.mode()
        tiers, snapshot = self._tier_reports(mode), self._upkeep.watch.report()
        epochs, latency = self._tiers.epochs.epochs(), metrics.latency()
        open_files = self._filesystem.bindings.open_files
        return StatusReport(
            version=__version__,
            pid=os.getpid(),
            mountpoint=os.fspath(self._settings.mountpoint),
            source=os.fspath(self._settings.source),
            state=self.state,
            started_ns=self._started_ns,
            health=self.health(),
            mode=mode,
            snapshot=snapshot,
            tiers=tiers,
            source_totals=metrics.source_totals(),
            residency=self._residency_report(tiers, snapshot),
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
                open_files if mode.counts_opens else None, self._filesystem.bindings.backing_ids
            ),
            requests=self._serving.requests(),
            scrub=self._upkeep.scrub.report(),
            writing=self._writing.report(),
            warming=self.warming(),
        )

    def _resident_bytes(self) -> int:
        return int(os.pread(self._statm, 256, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _tier_reports(self, mode: Mode) -> list[TierReport]:
        out = self._monitor.out_of_service()
        ledger, metrics = self._tiers.ledger, self._metrics
        return [
            TierReport(
                name=tier.name,
                path=os.fspath(tier.path),
                capacity=ledger.capacity(number),
                used=ledger.used(number),
                reserved=ledger.reserved(number),
                free=ledger.free(number),
                files=self._tiers.residency.resident_files(number),
                in_service=number not in out,
                opens=metrics.opens[number] if mode.counts_opens else None,
                reads=metrics.reads[number] if mode.counts_tier_reads else None,
                bytes=metrics.read_bytes[number] if mode.counts_tier_reads else None,
                out_why=out[number].why if number in out else "",
                others=list(self._monitor.others(number)),
            )
            for number, tier in self._monitor.tiers.items()
        ]

    def _residency_report(
        self, tiers: Sequence[TierReport], snapshot: SnapshotReport
    ) -> ResidencyReport:
        files = sum(tier.files for tier in tiers)
        size = sum(tier.used for tier in tiers)
        return ResidencyReport(
            files=files,
            bytes=size,
            wanted=self._tiers.residency.wanted,
            fraction_files=files / snapshot.files if snapshot.files else 1.0,
            fraction_bytes=size / snapshot.bytes if snapshot.bytes else 1.0,
        )


def _epoch_report(epoch: EpochCount) -> EpochReport:
    ratio = epoch.hits / epoch.opens if epoch.opens else None
    return EpochReport(epoch.number, epoch.opens, epoch.hits, ratio)
