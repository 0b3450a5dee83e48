"""The parts of a mount that only read, built from what the daemon has.

The read side comes first: the write side drops copies and asks the source through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monarch.config.settings import LimitSettings, MountSettings
from monarch.namespace.namespace import Namespace
from monarch.placement.controller import Controller
from monarch.placement.residency import Residency
from monarch.telemetry.metrics import Metrics
from monarch.tiers.doubts import Doubts
from monarch.tiers.records import Records
from monarch.tiers.tier import Tier
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import SourceLoad
from monarch.types import KernelCaches
from monarch.vfs.binding import Bindings
from monarch.vfs.copies import Copies
from monarch.vfs.interfaces import CopyEngine, FastPath, TierMonitor
from monarch.vfs.kernel_view import KernelView
from monarch.vfs.parts import PartialCopies, PartOptions
from monarch.vfs.promotions import Promotions
from monarch.vfs.renewals import Renewals
from monarch.vfs.revalidation import Revalidation
from monarch.vfs.source_files import SourceFiles


@dataclass(frozen=True, slots=True)
class ReadSide:
    """The parts that only read, and what the rest is built from."""

    bindings: Bindings
    kernel: KernelView
    promotions: Promotions
    revalidation: Revalidation
    copies: Copies
    source_files: SourceFiles
    renewals: Renewals
    parts: PartialCopies
    names: Namespace
    residency: Residency
    records: Records
    limits: LimitSettings
    metrics: Metrics
    fast: FastPath | None


def build_read_side(
    *,
    names: Namespace,
    source_calls: SourceCalls,
    source_load: SourceLoad,
    tiers: Sequence[Tier],
    records: Records,
    residency: Residency,
    controller: Controller,
    engine: CopyEngine,
    tier_calls: TierMonitor,
    caches: KernelCaches,
    fast: FastPath | None,
    sends_opens: bool,
    reads_copies: bool,
    settings: MountSettings,
    doubts: Doubts,
    metrics: Metrics,
) -> ReadSide:
    """``fast`` is the datapath, None if there is none. ``sends_opens`` and ``reads_copies`` are of
    KernelView."""
    bindings = Bindings(fast)
    kernel = KernelView(caches, names, residency, fast, sends_opens, reads_copies)
    retry_s, verify = settings.limits.tier_probe, settings.verify
    promotions = Promotions(
        names, residency, controller, engine, bindings, doubts, metrics, retry_s
    )
    by_number = {tier.number: tier for tier in tiers}
    copies = Copies(
        names, by_number, records, residency, promotions, tier_calls, kernel, fast, metrics, verify
    )
    revalidation = Revalidation(
        names, source_calls, bindings, residency, promotions, kernel, metrics
    )
    source_files = SourceFiles(
        names, source_calls, source_load, revalidation, residency, kernel, doubts, metrics
    )
    renewals = Renewals(by_number, records, residency, promotions, tier_calls, doubts)
    limits = settings.limits
    options = PartOptions(
        # A part of a file has no fixed size that could be charged to a job.
        least=limits.range_min if settings.foresight.parts and not settings.quotas else None,
        most_held=limits.buffer_max // 4,
        verify=verify,
    )
    partial = PartialCopies(
        names,
        controller,
        promotions,
        by_number,
        tier_calls,
        source_files,
        records,
        doubts,
        fast,
        options,
    )
    parts = bindings, kernel, promotions, revalidation, copies, source_files, renewals, partial
    return ReadSide(*parts, names, residency, records, settings.limits, metrics, fast)
