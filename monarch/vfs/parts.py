"""Partial copies, as readers use them: begun, opened, read, completed and dropped.

A large file is relayed from the source at first, and watched. The first read behind its first
8 MiB decides: a reader that has come there in order gets the whole copy that follows readers, other
reads get a partial copy. Granules that it lacks are fetched in units (units.py), each once, and
written behind the answer. A partial copy that has all granules becomes the whole copy at its last
release.

The version at the source is compared after each fetch. If it has changed, the partial copy is
dropped, and its readers continue at the source.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

import trio

from monarch.errors import SourceChanged, SourceError, TierError
from monarch.namespace.namespace import Namespace
from monarch.placement.controller import Controller
from monarch.placement.policy import Item
from monarch.placement.residency import SOURCE
from monarch.telemetry.log import Limiter
from monarch.telemetry.metrics import Metrics
from monarch.text import MiB
from monarch.tiers.doubts import Doubts
from monarch.tiers.partial import DOUBTED, GRANULE, PRESENT, Layout, PartialFile, remove
from monarch.tiers.records import Record, Records
from monarch.tiers.source import identity_of
from monarch.tiers.tier import Tier
from monarch.types import Attributes, Ino
from monarch.vfs.binding import WATCHED_FROM, Binding, read_fully, read_if_in_memory
from monarch.vfs.interfaces import FastPath, TierMonitor
from monarch.vfs.promotions import Promotions
from monarch.vfs.source_files import SourceFiles
from monarch.vfs.source_limit import Payment
from monarch.vfs.unit_fetches import UnitFetches
from monarch.vfs.units import OpenPart, Unit

log = logging.getLogger(__name__)

# A reader in order has reached at least this far before that read: the kernel reads ahead.
_IN_ORDER = 4 * MiB
# Errors by a lack of resources of this process or machine, or by a tier that does not answer.
_NOT_THE_COPY = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ETIMEDOUT})
_STEP_S = 0.005
_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class PartOptions:
    """Files of at least ``least`` bytes may have partial copies; None: no file. ``most_held`` are
    the fetched bytes that may wait to be written. ``verify`` as in ``MountSettings``."""

    least: int | None
    most_held: int
    verify: Literal["unclean", "open", "never"]


@dataclass(eq=False, repr=False)
class PartialCopies:
    """Belongs to the event loop. ``run`` is its task. ``fast`` answers reads of granules that are
    present."""

    _names: Namespace
    _controller: Controller
    _promotions: Promotions
    _tiers: Mapping[int, Tier]
    _monitor: TierMonitor
    _source_files: SourceFiles
    _records: Records
    _doubts: Doubts
    _fast: FastPath | None
    _options: PartOptions

    def __post_init__(self) -> None:
        self.accounts = self._controller.parts
        self.accounts.on_drop = self._dropped
        self._metrics: Metrics = self._source_files.metrics
        self._limiter = Limiter(log)
        self._open: dict[Ino, OpenPart] = {}
        # Those whose files are being created.
        self._creating: set[Ino] = set()
        self._jobs: list[Callable[[], Awaitable[None]]] = []
        self._added = trio.Event()
        self._running = 0
        # Whether other nodes keep blocks of a file, too.
        self.is_shared: Callable[[Attributes], bool] = _never
        self._fetches = UnitFetches(
            self._source_files,
            self._doubts,
            self.accounts,
            self._options.most_held,
            arrived=lambda part, unit: self._put(partial(self._store, part, unit)),
            changed=self._changed,
            wake=self._wake,
        )

    # -- bindings ----------------------------------------------------------------------------------

    def watches(self, size: int) -> bool:
        """Whether the first reads of a file decide how it is copied."""
        return self._options.least is not None and size >= self._options.least

    async def bind(self, attributes: Attributes) -> Binding | None:
        """Binds a file to its partial copy; None if it has none that can be used. A partial copy
        that is bad, or of another version, is dropped."""
        ino = attributes.ino
        while (number := self.accounts.tier_of(ino)) and self._monitor.is_read(number):
            part = self._open.get(ino)
            if part is None:
                part = await self._opened(number, attributes)
                if part is None:
                    return None
            if part.settling is not None:
                # Not for longer than the tier is read.
                with trio.move_on_after(_AGAIN_S):
                    await part.settling.wait()
                continue
            binding = Binding(ino, attributes.size, part=part, users=1)
            binding.is_shared = self.is_shared(attributes)
            part.users += 1
            try:
                current = part.identity == attributes.identity and await self._is_current(binding)
                if not current or binding.has_dropped_part:
                    self._promotions.forget_copy(ino)
                    binding.close()
                    return None
            except BaseException:
                binding.close()
                raise
            binding.users = 0
            self.accounts.used(ino)
            return binding
        return None

    async def _is_current(self, binding: Binding) -> bool:
        """Opens the file at the source: if it is replaced, its readers continue with the version
        that they have opened. A source that fails is asked again for the first missing granule."""
        try:
            await self._source_files.continue_with(binding)
        except SourceChanged:
            return False
        except SourceError:
            return True
        return True

    async def _opened(self, number: int, attributes: Attributes) -> OpenPart | None:
        ino, identity = attributes.ino, attributes.identity
        call = partial(PartialFile.open, doubts=self._options.verify)
        try:
            file = await self._monitor.ask(
                number, call, self._tiers[number], ino, identity, self._records.term
            )
        except OSError as error:
            if error.errno not in _NOT_THE_COPY and self.accounts.tier_of(ino) == number:
                self._failed(ino, number, error)
            return None
        if self.accounts.tier_of(ino) != number:
            with suppress(OSError):
                await self._monitor.ask(number, file.close)
            return None
        return self._add(ino, file)

    def _add(self, ino: Ino, file: PartialFile) -> OpenPart:
        admission = self.accounts.admission(ino)
        part = OpenPart(ino, file.identity, admission, file, self._unused)
        self._open[ino] = part
        return part

    def decide(self, binding: Binding, offset: int) -> None:
        """Decides how a watched file is copied, at a read from ``offset`` on."""
        file = binding.file
        if not binding.is_watched or file is None or offset < WATCHED_FROM:
            return
        ino, binding.is_watched = binding.ino, False
        attributes = self._names.stored(ino)
        is_same = identity_of(file.status) == attributes.identity
        in_order = offset <= self._source_files.reached(ino, file) + _IN_ORDER
        whole = is_same and in_order and self._copy_whole(binding, attributes)
        if is_same and not whole:
            begun = self.begin(binding, attributes)
            if not begun and not in_order:
                self._copy_whole(binding, attributes)
        if not in_order:
            # It is not offered for a whole copy later.
            binding.offer_s = math.inf
        if self._fast is not None and binding.part is None and binding.job is None:
            self._fast.watch(ino, 0)

    def _copy_whole(self, binding: Binding, attributes: Attributes) -> bool:
        """Begins a whole copy behind the reader, if placement has a place for it."""
        file = binding.file
        promote = self._promotions.opened(attributes, quota=None)
        if promote is not None:
            self._promotions.submit(promote, attributes.identity, file=file)
        return promote is not None or self._controller.is_wanted(binding.ino)

    def begin(self, binding: Binding, attributes: Attributes) -> bool:
        """Begins a partial copy. Returns False if the file may not have one. No reader waits for
        the tier: the file is created behind the answer. That of a shared file begins at its first
        open, since this node reads only its own blocks from the source."""
        ino, identity = binding.ino, attributes.identity
        if ino in self._open or ino in self._creating:
            # An earlier one, which was dropped, has not ended.
            return True
        admission = self._controller.begin_part(
            Item.of(attributes), overhead=Layout(attributes.size).overhead
        )
        if admission is None:
            return False
        part = self._add(ino, PartialFile.not_created(ino, identity))
        part.created = trio.Event()
        part.users += 1
        # The read that decides is a user of the binding.
        binding.part = part
        part.storing += 1
        self._creating.add(ino)
        self._put(partial(self._create, part, part.created))
        return True

    async def _create(self, part: OpenPart, created: trio.Event) -> None:
        """Creates the file of a partial copy that has been begun."""
        ino, tier = part.ino, self._tiers[part.tier]
        try:
            # A file of that name may wait to be removed.
            await self._promotions.removed()
            if not part.is_dropped:
                part.file = await self._monitor.call(
                    tier, PartialFile.create, tier, ino, part.identity, self._records.term
                )
            if part.is_dropped and part.file.fd >= 0:
                # Its file was to be removed before it existed.
                await self._monitor.call(tier, remove, tier, ino)
        except TierError as error:
            self._monitor.failed(tier, error)
        finally:
            if part.file.fd < 0 and not part.is_dropped:
                self._promotions.forget_copy(ino)
            self._creating.discard(ino)
            part.storing -= 1
            created.set()
            if not part.is_used:
                self._unused(part)
        if part.users and not part.is_dropped and self._fast is not None:
            self._fast.bind_part(ino, part.file.fd, tier=tier.number, size=part.identity.size)

    # -- reads -------------------------------------------------------------------------------------

    async def read(
        self, binding: Binding, offset: int, size: int, payment: Payment
    ) -> tuple[bytes, int] | None:
        """``size`` bytes of a binding with a partial copy, fewer only at the end of the file, and
        the tier that has answered, SOURCE if it was not alone. None if the caller must continue at
        the source. Raises SourceError; Refused as ``Payment.pay``."""
        part = binding.part
        if part is None:
            return None
        end = min(offset + size, part.identity.size)
        pieces: list[bytes] = []
        tier = part.tier
        while offset < end:
            granule, stop = offset // GRANULE, -(-end // GRANULE)
            if part.is_dropped and self._fast is not None and binding.job is None:
                self._fast.watch(binding.ino, 0)
            if part.is_dropped or not self._monitor.is_read(part.tier):
                return None
            state = part.file.map[granule]
            unit = part.units.get(granule)
            if state == DOUBTED:
                await self._verify(part, granule, part.file.run(granule, stop))
                continue
            piece: bytes | None
            if state == PRESENT:
                stop = min(end, part.file.run(granule, stop) * GRANULE)
                piece = await self._from_copy(part, offset, stop - offset)
            elif unit is not None:
                tier = SOURCE
                piece = await self._fetches.join(binding, part, unit, offset, end)
                if piece is None and not part.is_dropped:
                    continue
            elif not payment.has_paid:
                # Not while the bytes are fetched: readers of other jobs may wait for them.
                await payment.pay(end - offset)
                continue
            else:
                tier = SOURCE
                piece = await self._fetches.read(binding, part, offset, end, payment)
            if piece is None:
                return None
            pieces.append(piece)
            offset += len(piece)
        return (pieces[0] if len(pieces) == 1 else b"".join(pieces)), tier

    async def _from_copy(self, part: OpenPart, offset: int, size: int) -> bytes | None:
        """Bytes of granules that are present; None if the copy cannot be read."""
        fd = part.file.fd
        try:
            if self._tiers[part.tier].in_memory:
                data = os.pread(fd, size, offset)
            else:
                data = bytes(read_if_in_memory(fd, offset, size))
            if len(data) < size:
                data = await self._monitor.ask(part.tier, read_fully, fd, offset, size, size=size)
            if len(data) == size:
                return data
            failure = OSError(errno.ESTALE, "the partial copy is shorter than its file")
        except OSError as error:
            failure = error
        if failure.errno not in _NOT_THE_COPY and not part.is_dropped:
            self._failed(part.ino, part.tier, failure)
        return None

    async def _verify(self, part: OpenPart, start: int, stop: int) -> None:
        """Compares doubted granules with their digests."""
        file = part.file
        try:
            states = await self._monitor.ask(
                part.tier, file.verify, start, stop, size=file.layout.length(start, stop)
            )
        except OSError as error:
            if not part.is_dropped:
                self._failed(part.ino, part.tier, error)
            return
        for granule, state in enumerate(states, start):
            if file.map[granule] == DOUBTED and not part.is_dropped:
                file.map[granule] = state
                if state != PRESENT:
                    self._metrics.error("part-ESTALE")
                    self.accounts.lost(part.ino, file.layout.length(granule, granule + 1))

    # -- what is written ---------------------------------------------------------------------------

    def _put(self, job: Callable[[], Awaitable[None]]) -> None:
        self._jobs.append(job)
        self._wake()

    def _wake(self) -> None:
        self._added.set()

    async def run(self) -> None:
        """Stores fetched granules, fetches others ahead, and completes and closes unused copies,
        until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._added.wait()
                self._added = trio.Event()
                for fetch in self._fetches.take_ahead():
                    nursery.start_soon(fetch)
                jobs, self._jobs = self._jobs, []
                for job in jobs:
                    self._running += 1
                    nursery.start_soon(self._do, job)

    async def _do(self, job: Callable[[], Awaitable[None]]) -> None:
        try:
            await job()
        finally:
            self._running -= 1

    @property
    def pending(self) -> int:
        """The number of units to be stored, and of partial copies to be completed or closed."""
        return len(self._jobs) + self._running

    async def finish(self) -> None:
        """Waits until all fetched granules are stored."""
        while self.pending:
            await trio.sleep(_STEP_S)

    async def _store(self, part: OpenPart, unit: Unit) -> None:
        """Writes a fetched unit, if there is room for it."""
        tier, data = self._tiers[part.tier], unit.data or b""
        size, stored, reserved = len(data), False, False
        try:
            if part.created is not None:
                await part.created.wait()
            if part.is_dropped or self._doubts.by_bytes(part.ino, part.identity):
                return
            reserved = self.accounts.reserve(part.ino, size)
            if reserved and await self._monitor.take_room(tier, size) and not part.is_dropped:
                await self._monitor.call(tier, part.file.store, unit.start, data, size=size)
                stored = not part.is_dropped
        except TierError as error:
            self._monitor.failed(tier, error)
        finally:
            if stored:
                self.accounts.stored(part.ino, size)
                part.file.map[unit.start : unit.stop] = bytes([PRESENT]) * (unit.stop - unit.start)
                self._metrics.part_stored(part.tier, size)
            elif reserved:
                self.accounts.cancel(part.tier, size)
            self._fetches.ended(part, unit)

    # -- how a partial copy ends -------------------------------------------------------------------

    def _changed(self, part: OpenPart) -> None:
        """The source has another version."""
        if not part.is_dropped:
            self._metrics.promotion_failed("source-changed")
            self._promotions.forget_copy(part.ino)

    def _unused(self, part: OpenPart) -> None:
        self._put(partial(self._settle, part))

    async def _settle(self, part: OpenPart) -> None:
        """Completes a copy that has all granules; closes one that is not used."""
        if not part.can_settle():
            return
        ino = part.ino
        complete = not part.is_dropped and part.file.is_complete
        if complete and part.digest is None and not await self._know_digest(part):
            complete = False
        if not part.can_settle():
            return
        part.settling = trio.Event()
        try:
            if complete and not part.is_dropped:
                await self._complete(part)
        finally:
            with trio.CancelScope(shield=True):
                try:
                    await self._monitor.ask(part.tier, part.file.close)
                except OSError:
                    # The tier does not answer, and the call may not have been made.
                    part.file.close(sealed=False)
            if self._open.get(ino) is part:
                del self._open[ino]
            part.settling.set()

    async def _know_digest(self, part: OpenPart) -> bool:
        """Verifies all granules. A copy with a damaged one is dropped."""
        try:
            part.digest = await self._monitor.ask(
                part.tier, part.file.whole_digest, size=part.identity.size
            )
        except OSError as error:
            if error.errno not in _NOT_THE_COPY and not part.is_dropped:
                self._failed(part.ino, part.tier, error)
            return False
        return True

    async def _complete(self, part: OpenPart) -> None:
        """Makes a complete copy the whole copy of its file."""
        ino, tier, digest = part.ino, self._tiers[part.tier], part.digest
        if digest is None or self._names.stored(ino).identity != part.identity:
            return
        record = Record(tier.number, part.identity, digest)
        young = self._doubts.by_bytes(ino, part.identity)
        try:
            await self._monitor.call(tier, _become_copy, part, tier, self._records, record, young)
        except TierError as error:
            # Otherwise its file may have been removed at the same time.
            if not part.is_dropped:
                self._monitor.failed(tier, error)
                self._promotions.forget_copy(ino)
            return
        if part.is_dropped:
            self._promotions.remove_file(ino, tier.number)
            return
        self._controller.part_completed(ino)
        self._metrics.promoted(tier.number, 0)

    def _dropped(self, ino: Ino) -> None:
        """Placement has dropped a partial copy; its file is removed by the caller."""
        part = self._open.pop(ino, None)
        if part is None:
            return
        part.is_dropped = True
        if self._fast is not None:
            self._fast.drop_part(ino)
        if not part.is_used:
            self._unused(part)

    def _failed(self, ino: Ino, tier: int, error: OSError) -> None:
        """Drops a partial copy that cannot be read: that is a miss and no error."""
        kind = errno.errorcode.get(error.errno or 0, "error")
        self._metrics.error(f"part-{kind}")
        self._limiter.warning(
            f"part {tier}",
            "tier %s: partial copy of %s dropped, and the source read instead: %s (%s)",
            self._metrics.names[tier],
            self._names.path_text(ino),
            error.strerror,
            kind,
        )
        self._promotions.forget_copy(ino)
        # Wrong bytes may have been read before they were found.
        self._source_files.drop_pages(ino)
        self._monitor.copy_unreadable(tier, error)

    async def settled(self, ino: Ino) -> None:
        """Waits while the file of a partial copy is being created, completed or closed: then it is
        not what it must be at other times."""
        part = self._open.get(ino)
        for event in (part.created, part.settling) if part is not None else ():
            if event is not None:
                await event.wait()

    def drop_damaged(self, ino: Ino, tier: int, error: OSError) -> bool:
        """Drops a partial copy that differs from its digests; False if it is gone."""
        if self.accounts.tier_of(ino) != tier:
            return False
        self._failed(ino, tier, error)
        return True

    def close(self) -> None:
        """Closes all partial copies, at the end of the mount."""
        for part in self._open.values():
            part.file.close()
        self._open.clear()


def _never(attributes: Attributes) -> bool:
    return False


def _become_copy(part: OpenPart, tier: Tier, records: Records, record: Record, young: bool) -> None:
    """In a thread: a crash leaves no record of a copy that is not whole. Raises OSError."""
    part.file.become_copy(tier)
    try:
        records.put(part.ino, record, young=young)
    except OSError:
        tier.remove(part.ino)
        raise
