"""A status report of a daemon with two tiers in its third epoch; one tier is out of service."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from monarch.telemetry.foresight_report import (
    AnnouncedReport,
    ForesightReport,
    NextUseReport,
    StreamReport,
    WindowReport,
)
from monarch.telemetry.health import Problem, health_of
from monarch.telemetry.placement_report import AdmissionReport, RuleReport
from monarch.telemetry.report import (
    Copies,
    EpochReport,
    Handles,
    Latency,
    Memory,
    Mode,
    Quantiles,
    Requests,
    Residency,
    Saved,
    ScrubReport,
    SnapshotReport,
    SourceTotals,
    StatusReport,
    TierReport,
    Traffic,
    WritingReport,
)
from monarch.text import GiB, MiB


def a_problem(**changes: Any) -> Problem:
    problem = Problem(
        kind="tier-out",
        what="tier nvme is out of service: Input/output error",
        since_ns=1_700_000_000_000_000_000,
        remedy="repair /local/m; it comes back by itself",
    )
    return dataclasses.replace(problem, **changes)


def a_report(**changes: Any) -> StatusReport:
    report = StatusReport(
        version="1.0",
        pid=os.getpid(),
        mountpoint="/mnt/data",
        source="/pfs/imagenet",
        state="serving",
        started_ns=1_700_000_000_000_000_000,
        health=health_of([a_problem()]),
        mode=Mode("relay", "open", "the data set, 150 MiB, does not fit into the tiers"),
        snapshot=SnapshotReport(
            file="/state/snapshot.lmdb",
            id="5f0c",
            entries=1111,
            files=1000,
            bytes=150 * MiB,
            size_bytes=1 * MiB,
            created_ns=1_699_999_000_000_000_000,
            age_s=1000.0,
            stale=None,
            freshness="mount",
            checks=10,
        ),
        tiers=[
            TierReport("ram", "/dev/shm/m", GiB, 60 * MiB, MiB, GiB // 2, 400, True, 9, 9, 9000),
            TierReport("nvme", "/local/m", GiB, 0, 0, 0, 0, False, 0, 0, 0, "Input/output error"),
        ],
        source_totals=SourceTotals(
            700, 800, 99 * MiB, Traffic(600, 650, 90 * MiB), Traffic(100, 150, 9 * MiB)
        ),
        residency=Residency(400, 60 * MiB, 50, 0.4, 0.4),
        copies=Copies(queued=40, running=4, done=400, failed=3, bytes=60 * MiB),
        epochs=[EpochReport(1, 1000, 0, 0.0), EpochReport(2, 400, 300, 0.75)],
        foresight=ForesightReport(
            [
                StreamReport("train", "shuffled", 1000, 3, 0.42, 0),
                StreamReport("val", "skewed", 100, None, None, 0),
            ],
            AnnouncedReport(1, 900, 300_000, 100, 0, 0, 0, 0, 0),
            *(400, 40 * MiB, 10, MiB),
            WindowReport(20, 2 * MiB, 64 * MiB, 300, 30 * MiB, 1, 100_000),
            NextUseReport(12, MiB),
        ),
        opens=1400,
        reads=1500,
        bytes=200 * MiB,
        hit_ratio=300 / 1400,
        saved=Saved(300, 60 * MiB),
        latency=Latency(
            open={"source": Quantiles(1100, 0.002, None), "ram": Quantiles(300, 1e-5, 5e-5)},
            read={"source": Quantiles(0, None, None), "ram": Quantiles(300, 1e-5, 2e-5)},
        ),
        errors={"tier:nvme:EIO": 10},
        memory=Memory(64 * MiB),
        handles=Handles(3, 1),
        requests=Requests(2, 0.25),
        scrub=ScrubReport(True, 100, 400, 90 * MiB, 2, 1, 1_700_000_000_000_000_000, 0),
        writing=WritingReport(
            tier="nvme",
            directory="/local/m/monarch/absorbed-5f0c",
            fsync="local",
            files=3,
            bytes=5 * GiB,
            operations=7,
            oldest_ns=1_700_000_000_000_000_000,
            drained_files=20,
            drained_bytes=60 * GiB,
            errors=2,
            trouble="",
            reserve=10 * GiB,
            held=8 * GiB,
            lost=["ckpt/gone"],
            lost_files=1,
            names=1500,
            names_max=100000,
        ),
    )
    rules = [
        RuleReport("val/**", "pin: true", 50, 5 * MiB, 40, 4 * MiB, True),
        RuleReport("raw/**", "admit: never", 20, MiB, 0, 0, False),
    ]
    report = dataclasses.replace(report, rules=rules, admission=AdmissionReport(12, 300, 1000))
    return dataclasses.replace(report, **changes)
