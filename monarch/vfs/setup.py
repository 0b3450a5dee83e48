"""Builds the file system of a mount from what the daemon has.

The read side exists before the write side, which drops copies and asks the source through it. The
file system needs both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monarch.config.settings import LimitSettings, MountSettings
from monarch.namespace.namespace import Namespace
from monarch.placement.controller import Controller
from monarch.placement.epochs import Epochs
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
from monarch.vfs.filesystem import FileSystem
from monarch.vfs.interfaces import CopyEngine, FastPath, TierCalls
from monarch.vfs.kernel_view import KernelView
from monarch.vfs.open_counts import OpenCounts
from monarch.vfs.opens import Opens
from monarch.vfs.promotions import Promotions
from monarch.vfs.reads import Reads
from monarch.vfs.revalidation import Revalidation
from monarch.vfs.source_files import SourceFiles
from monarch.vfs.xattrs import ExtendedAttributes
from monarch.writeback.setup import WriteBack


@dataclass(frozen=True, slots=True)
class ReadSide:
    """The parts that only read, and what the rest is built from."""

    bindings: Bindings
    kernel: KernelView
    promotions: Promotions
    revalidation: Revalidation
    copies: Copies
    source_files: SourceFiles
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
    tier_calls: TierCalls,
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
    copies = Copies(
        names, tiers, records, residency, promotions, tier_calls, kernel, fast, metrics, verify
    )
    revalidation = Revalidation(
        names, source_calls, bindings, residency, promotions, kernel, metrics
    )
    source_files = SourceFiles(
        names, source_calls, source_load, revalidation, residency, kernel, doubts, metrics
    )
    parts = bindings, kernel, promotions, revalidation, copies, source_files
    return ReadSide(*parts, names, residency, records, settings.limits, metrics, fast)


def build_file_system(read: ReadSide, epochs: Epochs, write_back: WriteBack | None) -> FileSystem:
    """``write_back`` is None if the mount is read-only and has nothing to drain."""
    writing = attributes = others = None
    if write_back is not None:
        writing, others = write_back.front, write_back.others
        attributes = writing.attributes
    names, bindings, kernel, metrics = read.names, read.bindings, read.kernel, read.metrics
    places = read.copies, read.promotions, read.source_files, read.revalidation
    opens = Opens(names, bindings, *places, kernel, read.limits, writing)
    counts = OpenCounts(read.fast, opens, read.promotions, epochs, metrics)
    reads = Reads(
        names,
        bindings,
        opens,
        read.copies,
        read.source_files,
        read.revalidation,
        read.residency,
        kernel,
        counts,
        metrics,
    )
    xattrs = ExtendedAttributes(names, read.residency, read.records, counts, metrics, attributes)
    return FileSystem(
        names, bindings, opens, reads, xattrs, read.revalidation, kernel, counts, writing, others
    )
