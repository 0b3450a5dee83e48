"""Collects the figures of a mount for `monarch report`, and keeps them when the mount ends."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from monarch.control.server import Send, Verb
from monarch.control.state_directory import write_figures
from monarch.placement.epochs import Epochs
from monarch.placement.ledger import Ledger
from monarch.telemetry.figures import VERSION, Figures, PlaceFigures
from monarch.telemetry.health import health_of
from monarch.telemetry.metrics import Metrics
from monarch.telemetry.report import Mode, StatusReport
from monarch.telemetry.timeline import Sample, Timeline

log = logging.getLogger(__name__)

# Where no event of the datapath comes, as with ``datapath: python``, and in an idle mount.
_STEP_S = 10.0
# How long the end of the mount waits for the disk of the state directory.
_LAST_S = 5.0
_JOB = re.compile(r"[0-9]{1,20}")


class FigureKeeper:
    """``report`` composes the report of the status, ``opens`` counts the opens of readers, None if
    they are not counted. ``environ`` is that of the command that has mounted."""

    def __init__(
        self,
        metrics: Metrics,
        epochs: Epochs,
        ledger: Ledger,
        *,
        mode: Callable[[], Mode],
        opens: Callable[[], int | None],
        report: Callable[[], StatusReport],
        environ: Mapping[str, str],
    ) -> None:
        self._metrics = metrics
        self._epochs = epochs
        self._ledger = ledger
        self._mode = mode
        self._opens = opens
        self._report = report
        job = environ.get("SLURM_JOB_ID", "")
        self._job = job if _JOB.fullmatch(job) else ""
        self._timeline = Timeline()
        self._begun_ns, self._begun_s = time.time_ns(), time.monotonic()

    def table(self) -> Mapping[str, Verb]:
        return {"figures": self._figures}

    async def _figures(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        return self.figures(is_ended=False).to_dict()

    async def run(self) -> None:
        while True:
            self.note()
            await trio.sleep(_STEP_S)

    def note(self) -> None:
        """Takes a sample if one is due. Called whenever counters may have changed."""
        time_s = time.monotonic() - self._begun_s
        if self._timeline.is_due(time_s, self._epochs.number):
            self._timeline.add(self._sample(time_s))

    def _sample(self, time_s: float) -> Sample:
        metrics, mode = self._metrics, self._mode()
        counts_reads = mode.counts_tier_reads
        return Sample(
            time_s=round(time_s, 3),
            epoch=self._epochs.number,
            opens=self._opens(),
            hits=metrics.hits() if mode.counts_opens else None,
            bytes=sum(metrics.read_bytes) if counts_reads else None,
            tier_bytes=sum(metrics.read_bytes[1:]) if counts_reads else None,
            source_opens=sum(metrics.source_opens),
            source_bytes=sum(metrics.source_bytes),
            resident_bytes=sum(self._ledger.used(tier) for tier in self._ledger.tiers),
        )

    def figures(self, *, is_ended: bool) -> Figures:
        report = self._report()
        if is_ended:
            # The mount point is gone at the end of every mount.
            problems = [each for each in report.health.problems if each.kind != "detached"]
            report = replace(report, health=health_of(problems))
        now = self._sample(time.monotonic() - self._begun_s)
        return Figures(
            monarch_figures=VERSION,
            begun_ns=self._begun_ns,
            until_ns=time.time_ns(),
            is_ended=is_ended,
            job=self._job,
            status=report,
            places=self._places(report.mode),
            samples=[*self._timeline.samples(), now],
            epoch_begins=self._timeline.epoch_begins(),
        )

    def _places(self, mode: Mode) -> list[PlaceFigures]:
        metrics = self._metrics
        return [
            PlaceFigures(
                name=name,
                opens=metrics.opens[tier] if mode.counts_opens else None,
                timed=sum(metrics.open_latency[tier].counts),
                open_s=metrics.open_latency[tier].total_s,
                reads=metrics.reads[tier] if tier == 0 or mode.counts_tier_reads else None,
                read_s=metrics.read_latency[tier].total_s,
                bytes=metrics.read_bytes[tier] if tier == 0 or mode.counts_tier_reads else None,
            )
            for tier, name in enumerate(metrics.names)
        ]

    async def keep(self, state: Path) -> None:
        """Writes the figures into the state directory, where `monarch report` finds them after the
        end of the mount."""
        figures = self.figures(is_ended=True)
        with trio.move_on_after(_LAST_S, shield=True) as limit:
            try:
                await trio.to_thread.run_sync(write_figures, state, figures, abandon_on_cancel=True)
            except OSError as error:
                log.info("the figures for `monarch report` are not kept: %s", error)
        if limit.cancelled_caught:
            log.info("the figures for `monarch report` are not kept: the disk does not answer")
