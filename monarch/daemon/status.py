"""Composes the report of one daemon from the state of its parts."""

from __future__ import annotations

import json
import logging
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import trio

from monarch import __version__
from monarch.daemon import health_checks
from monarch.daemon.subsystems import Parts, Tiers, Transfer, Upkeep
from monarch.daemon.write_status import LossAlarm, WriteStatus
from monarch.fuse.datapath_mode import Serving
from monarch.telemetry import report as reports
from monarch.telemetry.foresight_report import NextUseReport
from monarch.telemetry.health import Health, health_of
from monarch.telemetry.metrics import Metrics
from monarch.telemetry.peers_report import PeersReport
from monarch.telemetry.placement_report import AdmissionReport, PackReport, RuleReport
from monarch.vfs.filesystem import FileSystem
from monarch.vfs.open_watch import OpenWatch
from monarch.writeback.setup import WriteBack
from monarch.writeback.undrained import UndrainedNotes

log = logging.getLogger(__name__)

# Interval of the daemon's own health checks.
_LOOK_S = 10.0
# Greatest age of the public figures.
_SUMMARY_S = 1.0


def _no_peers() -> PeersReport | None:
    return None


@dataclass(eq=False)
class Status:
    """Reports the state of the daemon. The daemon sets ``state`` as its life proceeds.

    ``warming`` lists the running requests of `monarch warm`; the object that runs them sets it.
    """

    _parts: Parts
    _tiers: Tiers
    _metrics: Metrics
    _transfer: Transfer
    _filesystem: FileSystem
    _write_back: WriteBack | None
    _upkeep: Upkeep
    _loss_alarm: LossAlarm
    _serving: Serving
    _watch: OpenWatch | None

    def __post_init__(self) -> None:
        parts, metrics, write_back = self._parts, self._metrics, self._write_back
        pack = parts.pack
        settings, mountpoint = parts.settings, parts.settings.mountpoint
        monitor, calls = self._transfer.monitor, self._transfer.source_calls
        drain = write_back.drain if write_back is not None else None
        requests, log_path = self._serving.requests, parts.logbook.path
        self._writing = WriteStatus(settings, write_back, self._loss_alarm)
        self._health_checks = health_checks.HealthChecks(
            [
                health_checks.MountCheck(mountpoint),
                health_checks.SourceCheck(settings, calls, monitor, metrics, requests, log_path),
                health_checks.CopyCheck(monitor, self._tiers.residency, metrics, mountpoint),
                health_checks.RuleCheck(self._tiers.rules, self._tiers.ledger),
                health_checks.ProcessCheck(parts.logbook),
                health_checks.SnapshotCheck(
                    self._upkeep.watch, metrics, mountpoint, parts.put_off, drain
                ),
                self._writing,
                health_checks.PeersCheck(lambda: self.peers()),
                *([health_checks.PackCheck(pack.damage, settings.source)] if pack else []),
            ]
        )
        # Kept open: a report is still possible when the process has no free descriptor.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._started_ns = time.time_ns()
        self.state: reports.State = "starting"
        self._summary, self._summed_s = b"", -_SUMMARY_S
        self.warming: Callable[[], list[reports.WarmProgress]] = list
        # The report on the other nodes; it returns None without them.
        self.peers: Callable[[], PeersReport | None] = _no_peers

    def know_notes(self, notes: UndrainedNotes) -> None:
        """Registers the notes of undrained changes, whose failures are reported."""
        self._writing.notes = notes

    def close(self) -> None:
        """No report is possible afterwards."""
        os.close(self._statm)

    def health(self) -> Health:
        if self.state == "stopping":
            # Nothing is served any more, and no copy is made.
            return health_of([*self._writing.problems()])
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
            report = self.report()
            figures = {
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
            self._summed_s, self._summary = now, json.dumps(figures).encode()
        return self._summary

    def report(self) -> reports.StatusReport:
        self._filesystem.readers.catch_up_all()
        metrics, admission, belady = self._metrics, self._tiers.admission, self._tiers.belady
        mode = self._serving.mode()
        tiers, snapshot = self._tier_reports(mode), self._upkeep.watch.report()
        latency = metrics.latency()
        not_counted = self._not_counted(mode)
        open_files = self._filesystem.bindings.open_files
        return reports.StatusReport(
            version=__version__,
            pid=os.getpid(),
            mountpoint=os.fspath(self._parts.settings.mountpoint),
            source=os.fspath(self._parts.settings.source),
            state=self.state,
            started_ns=self._started_ns,
            health=self.health(),
            mode=mode,
            snapshot=snapshot,
            tiers=tiers,
            source_totals=metrics.source_totals(),
            residency=self._residency_report(tiers, snapshot),
            copies=reports.Copies(
                queued=self._transfer.engine.queued,
                running=self._transfer.engine.running + self._filesystem.parts.pending,
                done=sum(metrics.promotions),
                failed=sum(metrics.promotion_failures.values()),
                bytes=sum(metrics.promoted_bytes),
            ),
            epochs=None if not_counted else self._epoch_reports(mode),
            foresight=replace(
                self._tiers.foresight.report(counts_opens=not not_counted),
                window=self._transfer.engine.window.report(),
                next_use=belady.report() if belady is not None else NextUseReport(),
            ),
            opens=self.opens(),
            reads=sum(metrics.reads) if mode.counts_tier_reads else None,
            bytes=sum(metrics.read_bytes) if mode.counts_tier_reads else None,
            hit_ratio=metrics.hit_ratio() if mode.counts_opens else None,
            saved=reports.Saved(
                opens=metrics.hits() if mode.counts_opens else None,
                bytes=sum(metrics.read_bytes[1:]) if mode.counts_tier_reads else None,
            ),
            latency=latency if mode.counts_opens else replace(latency, open=None),
            errors=dict(metrics.errors),
            memory=reports.Memory(
                int(os.pread(self._statm, 256, 0).split()[1]) * resource.getpagesize()
            ),
            handles=reports.Handles(
                open_files if mode.counts_opens else None, self._filesystem.bindings.backing_ids
            ),
            requests=self._serving.requests(),
            scrub=self._upkeep.scrub.report(),
            opens_not_counted=not_counted,
            writing=self._writing.report(),
            warming=self.warming(),
            rules=self._rule_reports(),
            admission=AdmissionReport(admission.replaced, admission.refused, admission.spared),
            copied_per_wanted=metrics.copied_per_wanted() if mode.counts_tier_reads else None,
            pack=self._pack_report(),
            peers=self.peers(),
            measured=self._filesystem.measured.report(),
            quotas=quotas.report() if (quotas := self._filesystem.readers.quotas) else [],
        )

    def _pack_report(self) -> PackReport | None:
        pack, chunks = self._parts.pack, self._transfer.chunks
        if pack is None or chunks is None:
            return None
        info, damaged = pack.info, len(pack.damage.files())
        return PackReport(info.chunks, info.chunk_bytes, chunks.read, damaged)

    def _not_counted(self, mode: reports.Mode) -> str:
        """Why opens are not counted; empty if they are."""
        if mode.counts_opens:
            return ""
        if self._watch is None:
            return "foresight.count_opens is false"
        return self._watch.not_counted

    def opens(self) -> int | None:
        """The opens of readers; None if they are not counted."""
        mode = self._serving.mode()
        if self._not_counted(mode):
            return None
        if mode.counts_opens or self._watch is None:
            return sum(self._metrics.opens)
        return self._watch.opens

    def _epoch_reports(self, mode: reports.Mode) -> list[reports.EpochReport]:
        """Hits are known only of opens that the kernel reports to the daemon."""
        epochs = self._tiers.epochs.epochs()
        if not mode.counts_opens:
            return [reports.EpochReport(e.number, e.opens, None, None) for e in epochs]
        return [
            reports.EpochReport(e.number, e.opens, e.hits, e.hits / e.opens if e.opens else None)
            for e in epochs
        ]

    def _rule_reports(self) -> list[RuleReport]:
        rules = self._tiers.rules
        return [
            RuleReport(
                match=rule.match,
                action=rule.action([tier.name for tier in self._parts.settings.tiers]),
                files=count.files,
                bytes=count.bytes,
                resident_files=count.resident_files,
                resident_bytes=count.resident_bytes,
                counted=rules.is_measured,
            )
            for rule, count in zip(rules.rules, rules.counts, strict=True)
        ]

    def _tier_reports(self, mode: reports.Mode) -> list[reports.TierReport]:
        out = self._transfer.monitor.out_of_service()
        ledger, metrics = self._tiers.ledger, self._metrics
        parts = self._tiers.controller.parts
        return [
            reports.TierReport(
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
                others=list(self._transfer.monitor.others(number)),
                parts=len(parts.inos(number)),
                part_bytes=parts.bytes(number),
            )
            for number, tier in self._transfer.monitor.tiers.items()
        ]

    def _residency_report(
        self, tiers: Sequence[reports.TierReport], snapshot: reports.SnapshotReport
    ) -> reports.Residency:
        files = sum(tier.files for tier in tiers)
        size = sum(tier.used for tier in tiers)
        return reports.Residency(
            files=files,
            bytes=size,
            wanted=self._tiers.residency.wanted,
            fraction_files=files / snapshot.files if snapshot.files else 1.0,
            fraction_bytes=size / snapshot.bytes if snapshot.bytes else 1.0,
        )
