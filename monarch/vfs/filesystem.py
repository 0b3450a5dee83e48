"""What the mount means, free of FUSE types: opens, reads and attributes of files.

An open of a file that is not written binds the inode to the best place that holds it
(``opens.py``). A file that was changed through the mount belongs to ``writeback``. Names and
attributes never ask the source.

The file system is built here from what the daemon has: the read side first, then the write side,
which drops copies and asks the source through it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from monarch.config.settings import LimitSettings, MountSettings
from monarch.errors import Refused
from monarch.namespace.namespace import Namespace
from monarch.placement.controller import Controller
from monarch.placement.epochs import Epochs
from monarch.placement.residency import Residency
from monarch.posix.credentials import Credentials
from monarch.telemetry.metrics import Metrics
from monarch.tiers.doubts import Doubts
from monarch.tiers.records import Records
from monarch.tiers.tier import Space, Tier
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import SourceLoad
from monarch.types import Attributes, Ino, KernelCaches
from monarch.vfs.binding import Bindings
from monarch.vfs.copies import Copies
from monarch.vfs.interfaces import CopyEngine, FastPath, TierCalls
from monarch.vfs.kernel_view import KernelView
from monarch.vfs.open_counts import OpenCounts
from monarch.vfs.opens import Opens
from monarch.vfs.promotions import Promotions
from monarch.vfs.reads import Reads
from monarch.vfs.revalidation import Revalidation
from monarch.vfs.source_files import SourceFiles
from monarch.vfs.xattrs import ExtendedAttributes
from monarch.writeback.front import WriteFront
from monarch.writeback.others import Others
from monarch.writeback.setup import WriteBack


@dataclass(eq=False, repr=False)
class FileSystem:
    """One mount, as the FUSE handlers see it. Belongs to the event loop.

    ``writing`` makes the changes of a mount that can be written, ``others`` finds changes that
    other mounts and programs make at the source; both are None where they do not apply.
    """

    names: Namespace
    bindings: Bindings
    _opens: Opens
    _reads: Reads
    xattrs: ExtendedAttributes
    revalidation: Revalidation
    _kernel: KernelView
    counts: OpenCounts
    writing: WriteFront | None
    others: Others | None

    async def open(self, ino: Ino, flags: int, by: Credentials) -> bool:
        """Opens a file for one more user. Returns whether the kernel may keep its cached pages.

        ``flags`` as of open(2), ``by`` is the calling process. Raises SourceError with the source's
        errno if the file has to come from there and does not, ESTALE if it changes all the time;
        Refused if it cannot be written.
        """
        if self.names.is_forgotten(ino):
            # The caller looks the name up again: another file may have it.
            raise Refused(errno.ESTALE)
        is_written = self.writing is not None and self.writing.operations.has(ino)
        if is_written or flags & (os.O_ACCMODE | os.O_TRUNC):
            return await self._open_written(ino, flags, by, is_written=is_written)
        started = time.perf_counter()
        self.counts.catch_up()
        binding = await self._opens.open(ino)
        keep_pages = self._kernel.opened(ino)
        self.counts.add(binding, started)
        return keep_pages

    async def _open_written(
        self, ino: Ino, flags: int, by: Credentials, *, is_written: bool
    ) -> bool:
        if self.writing is None:
            raise Refused(errno.EROFS)
        is_bound = self.bindings.get(ino) is not None
        if (is_bound and not is_written) or self.bindings.is_read_by_kernel(ino):
            # Its readers read a copy, or the source, and would not see the written bytes.
            raise Refused(errno.ETXTBSY)
        await self.writing.operations.open(ino, flags, by)
        return not self.writing.files.is_outdated(ino)

    def release(self, ino: Ino) -> None:
        """Ends one open of a file."""
        self._opens.release(ino)

    def read(self, ino: Ino, offset: int, size: int) -> Awaitable[bytes | bytearray | memoryview]:
        """Up to ``size`` bytes from ``offset`` on of an open file; short only at its end.

        Raises SourceError.
        """
        if self.writing is not None and self.writing.files.is_open(ino):
            return self.writing.files.read(ino, offset, size)
        return self._reads.read(ino, offset, size)

    async def attributes(self, ino: Ino) -> Attributes:
        """The attributes for ``stat``; asks the source only for a file that was gone and is not
        open. Raises SourceError, ENOENT if it is still gone.
        """
        if (
            self.names.is_gone(ino)
            and self.bindings.get(ino) is None
            and not self.names.is_written(ino)
        ):
            await self.revalidation.find_again(ino)
        return self.latest(self.names.attributes(ino))

    def latest(self, attributes: Attributes) -> Attributes:
        """The same, with the present size and times of a file that is being written."""
        if self.writing is not None and self.writing.files.is_open(attributes.ino):
            return self.writing.attributes.of(attributes.ino)
        return attributes

    def room(self) -> Space | None:
        """The space for new data; None if the mount is read-only."""
        return self.writing.space.statfs() if self.writing is not None else None

    def tasks(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """The background tasks by name."""
        return {"visits": self._reads.run, "sizes": self._kernel.run}


# -- how it is built -------------------------------------------------------------------------------


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
