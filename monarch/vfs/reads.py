"""Reads of files that are not written, with an open and without one.

The first read that no open precedes (``open: none``, or a copy that the datapath had open and could
not read) binds the file as an open would. That binding is kept until as many bytes as the file has
were read, or no read has come for a while.
"""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass, field

import trio

from monarch.errors import SourceError
from monarch.namespace.namespace import Namespace
from monarch.placement.residency import Residency
from monarch.telemetry.metrics import Metrics
from monarch.types import Ino
from monarch.vfs.binding import Binding, Bindings
from monarch.vfs.copies import Copies
from monarch.vfs.kernel_view import KernelView
from monarch.vfs.open_counts import OpenCounts
from monarch.vfs.opens import Opens
from monarch.vfs.revalidation import Revalidation
from monarch.vfs.source_files import SourceFiles

# How long a binding that no open made is kept after the last read, in seconds, and the interval of
# checks.
_VISIT_S = 1.0
_VISIT_STEP_S = 0.25


@dataclass(eq=False, repr=False)
class Reads:
    """Belongs to the event loop. ``run`` ends the bindings that no open made."""

    _names: Namespace
    _bindings: Bindings
    _opens: Opens
    _copies: Copies
    _source_files: SourceFiles
    _revalidation: Revalidation
    _residency: Residency
    _kernel: KernelView
    _counts: OpenCounts
    _metrics: Metrics
    # The bindings that no open made, and when each ends.
    _visits: dict[Ino, float] = field(default_factory=dict, init=False)
    _visited: trio.Event = field(default_factory=trio.Event, init=False)

    async def read(self, ino: Ino, offset: int, size: int) -> bytes | bytearray | memoryview:
        """Up to ``size`` bytes from ``offset`` on; short only at the end of the file.

        Raises SourceError.
        """
        started = time.perf_counter()
        binding = self._bindings.get(ino) or await self._visit(ino)
        if self._kernel.is_size_stale(ino):
            raise self._revalidation.changed_while_read(ino)
        if offset == 0 and not self._kernel.sends_opens:
            self._counts.catch_up()
            self._counts.add(binding, started)
        # The file may be released while its bytes are read, if the reader is killed.
        binding.users += 1
        try:
            data = await self._read_from(binding, offset, size)
        finally:
            self._opens.leave(ino)
        self._metrics.read(binding.tier, len(data), time.perf_counter() - started)
        if ino in self._visits:
            binding.unread_bytes -= len(data)
            self._visits[ino] = trio.current_time() + _VISIT_S
            if binding.unread_bytes <= 0:
                self._end_visit(ino)
        return data

    async def _read_from(
        self, binding: Binding, offset: int, size: int
    ) -> bytes | bytearray | memoryview:
        if binding.content is not None:
            return binding.content[offset : offset + size]
        if binding.fd >= 0:
            data = await self._copies.read(binding, offset, size)
            if data is not None:
                return data
            # The copy is lost, the reader is not: it continues at the source.
            if binding.fd >= 0:
                file = await self._source_files.open(self._names.attributes(binding.ino))
                if binding.fd < 0:
                    file.release()
                else:
                    binding.fall_back(file)
        return await self._source_files.read(binding, offset, size)

    async def _visit(self, ino: Ino) -> Binding:
        """Binds an inode for reads that no open precedes. Raises SourceError.

        A process may have the file open and have read a part of it. If the source has another
        version now, such reads fail with ESTALE: the two versions are never mixed.
        """
        seen = self._kernel.sends_opens or self._kernel.was_read(ino)
        if seen and self._residency.is_changed(ino):
            raise self._revalidation.changed_while_read(ino)
        try:
            binding = await self._opens.enter(ino, renew=not seen, store=False)
        except SourceError as error:
            if error.errno == errno.ESTALE:
                # Its owner and mode may not be those by which the kernel has admitted the reader.
                self._residency.mark_served(ino)
            raise
        if not seen:
            self._residency.unmark_changed(ino)
        if self._kernel.is_size_stale(ino):
            self._opens.leave(ino)
            raise self._revalidation.changed_while_read(ino)
        if ino in self._visits:
            binding.users -= 1  # another read was faster
        self._residency.mark_served(ino)
        self._visits[ino] = trio.current_time() + _VISIT_S
        self._visited.set()
        return binding

    def _end_visit(self, ino: Ino) -> None:
        del self._visits[ino]
        self._opens.leave(ino)

    async def run(self) -> None:
        """Ends the bindings that no open made and that are not read any more, until cancelled."""
        while True:
            await self._visited.wait()
            await trio.sleep(_VISIT_STEP_S)
            now = trio.current_time()
            for ino in [ino for ino, until in self._visits.items() if until < now]:
                self._end_visit(ino)
            if not self._visits:
                self._visited = trio.Event()
