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
    kernel = KernelView(
        caches,
        names=names,
        residency=residency,
        fast=fast,
        sends_opens=sends_opens,
        reads_copies=reads_copies,
    )
    promotions = Promotions(
        names=names,
        residency=residency,
        controller=controller,
        engine=engine,
        bindings=bindings,
        doubts=doubts,
        metrics=metrics,
        retry_s=settings.limits.tier_probe,
    )
    copies = Copies(
        names=names,
        tiers=tiers,
        records=records,
        residency=residency,
        promotions=promotions,
        tier_calls=tier_calls,
        kernel=kernel,
        fast=fast,
        metrics=metrics,
        verify=settings.verify,
    )
    revalidation = Revalidation(
        names=names,
        source_calls=source_calls,
        bindings=bindings,
        residency=residency,
        promotions=promotions,
        kernel=kernel,
        metrics=metrics,
    )
    source_files = SourceFiles(
        names=names,
        source_calls=source_calls,
        source_load=source_load,
        revalidation=revalidation,
        residency=residency,
        kernel=kernel,
        doubts=doubts,
        metrics=metrics,
    )
    parts = bindings, kernel, promotions, revalidation, copies, source_files
    return ReadSide(*parts, names, residency, records, settings.limits, metrics, fast)


def build_file_system(read: ReadSide, epochs: Epochs, write_back: WriteBack | None) -> FileSystem:
    """``write_back`` is None if the mount is read-only and has nothing to drain."""
    writing = write_back.front if write_back is not None else None
    opens = Opens(
        names=read.names,
        bindings=read.bindings,
        copies=read.copies,
        promotions=read.promotions,
        source_files=read.source_files,
        revalidation=read.revalidation,
        kernel=read.kernel,
        limits=read.limits,
        written=writing,
    )
    counts = OpenCounts(
        read.fast, opens=opens, promotions=read.promotions, epochs=epochs, metrics=read.metrics
    )
    reads = Reads(
        names=read.names,
        bindings=read.bindings,
        opens=opens,
        copies=read.copies,
        source_files=read.source_files,
        revalidation=read.revalidation,
        residency=read.residency,
        kernel=read.kernel,
        counts=counts,
        metrics=read.metrics,
    )
    xattrs = ExtendedAttributes(
        names=read.names,
        residency=read.residency,
        records=read.records,
        counts=counts,
        metrics=read.metrics,
        writing=writing.attributes if writing is not None else None,
    )
    return FileSystem(
        names=read.names,
        bindings=read.bindings,
        opens=opens,
        reads=reads,
        xattrs=xattrs,
        revalidation=read.revalidation,
        kernel=read.kernel,
        counts=counts,
        writing=writing,
        others=write_back.others if write_back is not None else None,
    )
