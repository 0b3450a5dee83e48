"""Copies in the tiers, as readers use them: opened, verified, read, and dropped when damaged."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from monarch.namespace.namespace import Namespace
from monarch.placement.residency import SOURCE, Residency
from monarch.telemetry.log import Limiter
from monarch.telemetry.metrics import Metrics
from monarch.tiers.contents import BrokenSeal
from monarch.tiers.records import Record, Records
from monarch.tiers.tier import Tier
from monarch.types import Attributes, Identity, Ino
from monarch.vfs.binding import Binding, OpenCopy, read_fully, read_if_in_memory
from monarch.vfs.interfaces import FastPath, TierCalls
from monarch.vfs.kernel_view import KernelView
from monarch.vfs.promotions import Promotions

log = logging.getLogger(__name__)

# Errors by a lack of resources of this process or machine, or by a tier that does not answer. They
# say nothing about the copy.
_NOT_THE_COPY = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ETIMEDOUT})


@dataclass(eq=False, repr=False)
class Copies:
    """``verify`` is when a copy is compared with its digest (``config.MountSettings.verify``).
    ``fast`` registers open copies for the kernel."""

    _names: Namespace
    _tiers: Mapping[int, Tier]
    _records: Records
    _residency: Residency
    _promotions: Promotions
    _tier_calls: TierCalls
    _kernel: KernelView
    _fast: FastPath | None
    _metrics: Metrics
    _verify: Literal["unclean", "open", "never"]
    _limiter: Limiter = field(default_factory=lambda: Limiter(log), init=False)

    async def bind(self, attributes: Attributes) -> Binding | None:
        """Binds a file to its copy; None if it has none that can be used, or if the file has got
        another version meanwhile. A bad copy is dropped."""
        ino = attributes.ino
        number = self._residency.tier_of(ino)
        if number == SOURCE or not self._tier_calls.is_read(number):
            return None
        try:
            copy = await self._open(self._tiers[number], attributes)
        except OSError as error:
            # A copy that was evicted meanwhile is missing without a fault. One that was renewed
            # meanwhile, because the drain has changed attributes, has another version.
            is_same = self._names.stored(ino).identity == attributes.identity
            is_here = self._residency.tier_of(ino) == number
            if error.errno not in _NOT_THE_COPY and is_here and is_same:
                self.failed(ino, number, error)
                self._kernel.drop_pages(ino)
            return None
        known = self._names.stored(ino).identity
        if self._residency.tier_of(ino) != number or known != attributes.identity:
            # It was evicted meanwhile, or replaced by the copy of another version.
            copy.close()
            return None
        self._promotions.accessed(ino, number)
        return Binding(ino, attributes.size, tier=number, copy=copy)

    def places(self) -> bytes | None:
        """Where the daemon's user may open the copies of all files (datasets/copies.py); None if
        files must be opened through the mount: so that the daemon sees an open on which a decision
        depends, or verifies the copy."""
        resident = sum(map(self._residency.resident_files, self._tiers))
        is_complete = resident >= self._names.snapshot.files
        if self._kernel.sends_opens or self._verify == "open" or not is_complete:
            return None
        directories = {
            self._records.place_of(number): str(tier.own / tier.generation_name)
            for number, tier in self._tiers.items()
            if tier.seals and self._tier_calls.is_read(number)
        }
        found = {
            "records": str(self._records.path),
            "term": self._records.term,
            "acls": self._names.has_acls,
            "directories": directories,
        }
        return json.dumps(found).encode()

    async def _open(self, tier: Tier, attributes: Attributes) -> OpenCopy:
        """Opens a copy, and verifies it first if necessary. Raises OSError, ESTALE if it has
        another version."""
        ino, identity = attributes.ino, attributes.identity
        if self._verify != "open" and not self._residency.is_unverified(ino):
            with suppress(BrokenSeal):
                return await self._opened(tier, ino, identity)
        record = self._records.get(ino)
        if record is None or record.identity != identity:
            raise OSError(errno.ESTALE, "no record of this version")
        await self._tier_calls.ask(
            tier.number, tier.verify, ino, identity, record.digest, size=identity.size
        )
        self.confirm(ino, record)
        return await self._opened(tier, ino, identity)

    async def _opened(self, tier: Tier, ino: Ino, identity: Identity) -> OpenCopy:
        if tier.in_memory:
            return self._open_registered(tier, ino, identity)
        return await self._tier_calls.ask(tier.number, self._open_registered, tier, ino, identity)

    def _open_registered(self, tier: Tier, ino: Ino, identity: Identity) -> OpenCopy:
        """In a thread: the kernel reads the copy to find out whether it can."""
        fd = tier.open(ino, identity)
        if self._fast is None:
            return OpenCopy(fd, 0, lambda backing_id: None)
        return OpenCopy(fd, self._fast.register(fd, tier.number), self._fast.unregister)

    def confirm(self, ino: Ino, record: Record) -> None:
        """Records that the copy agrees with ``record``, for this mount and later ones."""
        self._residency.mark_verified(ino)
        # If the state cannot be written, the next mount compares once more.
        with suppress(OSError):
            self._records.confirm(ino, record)

    async def read(self, binding: Binding, offset: int, size: int) -> bytes | bytearray | None:
        """``size`` bytes of a bound copy, fewer only at its end; None if the caller must continue
        at the source."""
        size = min(size, max(0, binding.size - offset))
        # Another read may lose the copy meanwhile.
        tier, fd = binding.tier, binding.fd
        data: bytes | bytearray
        try:
            if self._tiers[tier].in_memory:
                data = os.pread(fd, size, offset)
            else:
                data = read_if_in_memory(fd, offset, size)
            if len(data) < size:
                data = await self._tier_calls.ask(tier, read_fully, fd, offset, size, size=size)
            if len(data) == size:
                return data
            failure = OSError(errno.ESTALE, "the copy is shorter than its record says")
        except OSError as error:
            failure = error
        if failure.errno not in _NOT_THE_COPY and self._has(binding, tier):
            self.failed(binding.ino, tier, failure)
        return None

    def _has(self, binding: Binding, tier: int) -> bool:
        """Whether a binding still reads the copy of its file in a tier."""
        return binding.fd >= 0 and self._residency.tier_of(binding.ino) == tier

    def failed(self, ino: Ino, tier: int, error: OSError) -> None:
        """Drops a copy that cannot be read: that is a miss and no error."""
        kind = errno.errorcode.get(error.errno or 0, "error")
        self._metrics.error(f"copy-{kind}")
        self._limiter.warning(
            f"copy {tier}",
            "tier %s: copy of %s dropped, and the source read instead: %s (%s)",
            self._metrics.names[tier],
            self._names.path_text(ino),
            error.strerror,
            kind,
        )
        self._promotions.forget_copy(ino)
        self._tier_calls.copy_unreadable(tier, error)

    async def drop_damaged(self, ino: Ino, tier: int, error: OSError) -> bool:
        """Drops a copy that differs from its record, though it may be open; False if it is gone.

        A process that has it open continues at the source, unless the kernel reads for that
        process: it would take an empty copy for the end of the file, so it keeps the damaged one
        until it closes the file.
        """
        fd = -1
        try:
            if not self._kernel.reads_copies:
                with suppress(OSError):
                    fd = await self._tier_calls.ask(tier, self._tiers[tier].open_to_empty, ino)
            if self._residency.tier_of(ino) != tier:
                return False
            self.failed(ino, tier, error)
            self._kernel.drop_pages(ino)
            emptied, fd = fd, -1
            if emptied >= 0:
                # A hanging disk keeps the descriptor: its number must not be used for another.
                with suppress(OSError):
                    await self._tier_calls.ask(tier, _empty, emptied)
            return True
        finally:
            if fd >= 0:
                os.close(fd)


def _empty(fd: int) -> None:
    try:
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)
