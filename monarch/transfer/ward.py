"""Watches over the tiers: makes the calls that wait for their disks and notices what goes wrong.

A tier that fails, hangs or is not where it was is out of service until it has been tried with
success. Each has threads of its own, so that one that hangs holds up nobody but who needs it, and a
call that lasts too long is noticed while it lasts. Time is counted in looks at the calls under way:
while the whole daemon was stopped, or had no processor, no tier was slow.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import MonarchError, TierError
from monarch.log import Limiter
from monarch.metrics import Metrics
from monarch.placement.ledger import Ledger
from monarch.settings import LimitSettings
from monarch.threads import Threads
from monarch.tiers.directory import Tier
from monarch.tiers.shared import other_sources
from monarch.transfer.outages import Outage, Outages
from monarch.units import MiB

log = logging.getLogger(__name__)

# Reads of copies that the event loop makes at the same time, for each tier.
_READ_THREADS = 8
# How often the calls under way are looked at within the time that the shortest may last.
_LOOKS = 5
# A call may last longer by its share for each of so many files, and of so many bytes.
_FILES_MORE = 40
_BYTES_MORE = 40 * MiB
# Opens and reads that last this share of it on average are slow, if there are enough to tell.
_MEAN_SHARE = 0.1
_ENOUGH = 4
# How often a tier's free space is asked for. Seconds.
_SPACE_AGE_S = 1.0
# How long the end of the daemon waits for calls that were made before. Seconds.
_LAST_CALLS_S = 5.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
# What a copy says that was removed or changed by somebody: nothing about the disk.
_TAMPERED = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)

Args = TypeVarTuple("Args")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """Opens and reads that a tier has answered beside the event loop so far."""

    calls: int
    seconds: float


@runtime_checkable
class Closeable(Protocol):
    """What a call may have opened."""

    def close(self) -> None: ...


class _Call:
    """One that is under way. ``looks`` is how often it was seen, ``scope`` who waits for it."""

    __slots__ = ("looks", "looks_allowed", "reads", "scope")

    def __init__(self, *, reads: bool, files: int, size: int) -> None:
        self.looks = 0
        self.looks_allowed = _LOOKS * (1 + files / _FILES_MORE + size / _BYTES_MORE)
        self.reads = reads
        # What writes is waited for, even by who is cancelled: only then is it known what it left.
        self.scope = trio.CancelScope(shield=not reads)


class _Ward:
    """One tier, as it is watched."""

    __slots__ = (
        *("calls", "keep_free", "looked_s", "others", "room", "seen", "spent", "tier"),
        *("looking", "reading", "writing"),
    )

    def __init__(self, tier: Tier, keep_free: int, writers: int) -> None:
        self.tier = tier
        self.keep_free = keep_free
        self.writing = Threads(writers, f"{tier.name}-write", abandon=True)
        self.reading = Threads(_READ_THREADS, f"{tier.name}-read", abandon=True, discard=_closed)
        self.looking = Threads(1, f"{tier.name}-look", abandon=True)
        self.calls: set[_Call] = set()
        # Bytes that may be written, as it was last seen.
        self.room = 0
        self.looked_s = -math.inf
        # What readers' calls have taken here, and what was seen of all at the last look.
        self.spent = Served(0, 0.0)
        # The sources of other mounts with copies in the same path, at the last look.
        self.others: Sequence[str] = ()
        self.seen = Served(0, 0.0)


class Ward:
    """``keep_free`` gives, per tier, the bytes of its file system that copies never use.

    ``shun`` is told which tiers readers must pass by, and again when that ends. ``moved`` is called
    when a tier's descriptors lead elsewhere, ``returned`` when a tier that was not where it was is
    back, before it is used. ``served`` tells of opens and reads elsewhere, by number of the tier.
    """

    def __init__(
        self,
        *,
        tiers: Sequence[Tier],
        keep_free: Sequence[int],
        ledger: Ledger,
        metrics: Metrics,
        limits: LimitSettings,
        shun: Callable[[int, bool], None] = lambda tier, shunned: None,
        moved: Callable[[Tier], None] = lambda tier: None,
        returned: Callable[[Tier], Awaitable[None]] | None = None,
        served: Callable[[int], Served] = lambda tier: Served(0, 0.0),
    ) -> None:
        # A thread for each copy under way, one for small files, one for what is removed or swept.
        writers = limits.copy_workers + 2
        self._wards = {
            tier.number: _Ward(tier, free, writers)
            for tier, free in zip(tiers, keep_free, strict=True)
        }
        self._outages = Outages(self._wards, pause_s=limits.tier_probe)
        self._ledger = ledger
        self._metrics = metrics
        self._timeout_s = limits.tier_timeout
        self._probe_s = limits.tier_probe
        self._shun = shun
        self._moved = moved
        self._returned = returned
        self._served = served
        self._on_outage: Callable[[int], None] = lambda tier: None
        self._limiter = Limiter(60.0)
        # When the end of the daemon waits no longer, of the loop's clock.
        self._deadline = math.inf
        self.is_stuck = False

    @property
    def tiers(self) -> Mapping[int, Tier]:
        return {number: ward.tier for number, ward in self._wards.items()}

    def prepare(self) -> None:
        """Have the threads without which no tier is read or written."""
        for ward in self._wards.values():
            ward.reading.prepare()
            ward.writing.prepare()
            # A look that gets no thread would take a sound tier out of service.
            ward.looking.prepare()

    def on_outage(self, told: Callable[[int], None]) -> None:
        """Have ``told`` called with the number of each tier that goes out of service."""
        self._on_outage = told

    def others(self, number: int) -> Sequence[str]:
        """The sources of other mounts that have copies in the same tier path."""
        return self._wards[number].others

    def out_of_service(self) -> Mapping[int, Outage]:
        return self._outages.current()

    def is_read(self, number: int) -> bool:
        """Whether copies there are to be tried."""
        outage = self._outages.of(number)
        return outage is None or outage.is_read

    def answers(self, number: int) -> bool:
        """Whether a call there can be expected to end."""
        outage = self._outages.of(number)
        return outage is None or not outage.slow

    # -- calls ---------------------------------------------------------------------------------

    async def call(
        self,
        tier: Tier,
        function: Callable[[Unpack[Args]], T],
        *args: Unpack[Args],
        files: int = 0,
        size: int = 0,
    ) -> T:
        """Run what changes a tier, with so many files and bytes, in a thread.

        Who is cancelled waits for its end all the same. Raises TierError.
        """
        ward = self._wards[tier.number]
        call = _Call(reads=False, files=files, size=size)
        try:
            return await self._run(ward, ward.writing, call, function, *args)
        except OSError as error:
            raise tier_error(error.errno, error.strerror) from error

    async def ask(
        self,
        number: int,
        function: Callable[[Unpack[Args]], T],
        *args: Unpack[Args],
        size: int = 0,
    ) -> T:
        """Run what reads so many bytes of a copy in a thread.

        Raises OSError, ETIMEDOUT if the tier has not answered in time.
        """
        ward = self._wards[number]
        call = _Call(reads=True, files=0, size=size)
        seconds, result = await self._run(ward, ward.reading, call, _timed, function, *args)
        if size <= MiB:
            ward.spent = Served(ward.spent.calls + 1, ward.spent.seconds + seconds)
        return result

    async def _run(
        self,
        ward: _Ward,
        threads: Threads,
        call: _Call,
        function: Callable[[Unpack[Args]], T],
        *args: Unpack[Args],
    ) -> T:
        call.scope.deadline = self._deadline
        ward.calls.add(call)
        try:
            with call.scope:
                return await threads.run(function, *args)
        finally:
            ward.calls.discard(call)
        if not call.reads:
            # Nobody knows what it will leave behind.
            self.is_stuck = True
        raise OSError(errno.ETIMEDOUT, "the tier does not answer")

    async def take_room(self, tier: Tier, size: int) -> bool:
        """Whether the disk keeps its free share after ``size`` more bytes, which are then taken.

        Raises TierError, ENOSPC if it does not keep it now.
        """
        ward = self._wards[tier.number]
        now = trio.current_time()
        age_s = now - ward.looked_s
        if age_s > _SPACE_AGE_S or (ward.room < size and age_s > 0):
            self._see_room(ward, (await self.call(tier, tier.space)).available)
        if ward.room < 0:
            raise _no_room()
        if ward.room < size:
            return False
        ward.room -= size
        return True

    def _see_room(self, ward: _Ward, available: int) -> None:
        ward.looked_s = trio.current_time()
        ward.room = available - ward.keep_free
        self._ledger.see_room(ward.tier.number, ward.room)

    # -- what goes wrong -----------------------------------------------------------------------

    def failed(self, tier: Tier, error: TierError) -> None:
        """A copy could not be made there, nor could any other."""
        self._metrics.error(f"tier-{tier.name}")
        full = error.errno in _FULL
        self._begin(
            self._wards[tier.number], Outage(str(error), time.time_ns(), slow=False, full=full)
        )

    def copy_unreadable(self, number: int, error: OSError) -> None:
        """A copy could not be read. Many of them in a short time are the disk's fault."""
        if error.errno not in _TAMPERED and self._outages.copy_unreadable(
            number, now_s=trio.current_time()
        ):
            why = f"copies there cannot be read: {error.strerror}"
            self._is_out(self._wards[number], Outage(why, time.time_ns(), slow=False))

    def copy_arrived(self, number: int) -> None:
        self._outages.copy_arrived(number)

    def hurry(self) -> None:
        """Nobody reads any more: let calls that hang keep the daemon no longer from its end."""
        now = trio.current_time()
        self._deadline = now + _LAST_CALLS_S
        for number, ward in self._wards.items():
            for call in ward.calls:
                call.scope.deadline = self._deadline if self.answers(number) else now

    def _begin(self, ward: _Ward, outage: Outage) -> bool:
        number = ward.tier.number
        if not self._outages.begin(number, outage, now_s=trio.current_time()):
            return False
        self._ledger.close(number)
        if not outage.is_read:
            self._shun(number, True)
        self._on_outage(number)
        return True

    def _is_out(self, ward: _Ward, outage: Outage) -> bool:
        """As ``_begin``, of what nobody else tells."""
        begun = self._begin(ward, outage)
        if begun:
            name = ward.tier.name
            self._metrics.error(f"tier-{name}")
            self._limiter.warning(
                log,
                f"{name} {outage.slow} {outage.gone}",
                "tier %s is out of service: %s; %s",
                name,
                outage.why,
                "it takes no copies, and those that it has are still tried"
                if outage.is_read
                else "all is read from below",
            )
        return begun

    # -- looking after them --------------------------------------------------------------------

    async def run(self) -> None:
        """Look at calls and tiers until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_calls)
            for ward in self._wards.values():
                nursery.start_soon(self._tend, ward)

    async def _watch_calls(self) -> None:
        while True:
            await trio.sleep(self._timeout_s / _LOOKS)
            for ward in self._wards.values():
                self._watch_calls_of(ward)

    def _watch_calls_of(self, ward: _Ward) -> None:
        late = False
        for call in ward.calls:
            call.looks += 1
            if call.looks > call.looks_allowed:
                late = True
                if call.reads:
                    call.scope.cancel()
        if late and self._is_out(ward, _slow(f"no answer within {self._timeout_s:g} s")):
            # Who waits only to read has the source.
            for call in ward.calls:
                if call.reads:
                    call.scope.cancel()

    async def _tend(self, ward: _Ward) -> None:
        number = ward.tier.number
        while True:
            with suppress(OSError):
                ward.others = await self._looking(ward, partial(other_sources, ward.tier.own))
            await trio.sleep(self._probe_s)
            if self._outages.of(number) is None:
                await self._look(ward)
            elif self._outages.is_due(number, now_s=trio.current_time()):
                await self._try(ward)

    async def _look(self, ward: _Ward) -> None:
        """Whether a tier in service is what it was; also if nothing is copied there or read."""
        before, ward.seen = ward.seen, self._all_served(ward)
        calls, seconds = ward.seen.calls - before.calls, ward.seen.seconds - before.seconds
        if calls >= _ENOUGH and seconds / calls > self._timeout_s * _MEAN_SHARE:
            self._is_out(ward, _slow(f"opens and reads take {seconds / calls:.1f} s on average"))
            return
        try:
            if not await self._looking(ward, ward.tier.is_in_place):
                await self._let_go(ward)
                return
            self._see_room(ward, (await self._looking(ward, ward.tier.space)).available)
        except OSError as error:
            self._is_out(ward, Outage(_words(error), time.time_ns(), slow=False))
            return
        if ward.room < 0:
            self._begin(ward, Outage(str(_no_room()), time.time_ns(), slow=False, full=True))

    async def _let_go(self, ward: _Ward) -> None:
        """Keep nothing of a tier whose directory is not at its path: somebody may want its disk."""
        why = f"{os.fspath(ward.tier.path)} is not what it was when it was mounted"
        self._is_out(ward, Outage(why, time.time_ns(), slow=False, gone=True))
        await self._looking(ward, ward.tier.let_go)
        await self._looking(ward, self._moved, ward.tier)

    async def _try(self, ward: _Ward) -> None:
        """Bring a tier back into service if it does all that is asked of it."""
        tier, outage = ward.tier, self._outages.current()[ward.tier.number]
        if any(not call.reads for call in ward.calls):
            # What hangs may still change what is there.
            self._outages.tried(tier.number, outage, now_s=trio.current_time())
            return
        slow, gone = outage.slow, outage.gone
        try:
            if not await self._looking(ward, tier.is_in_place):
                if not gone:
                    gone = True
                    await self._let_go(ward)
                await self._looking(ward, tier.reopen)
            if gone:
                await self._looking(ward, self._moved, tier)
            began = trio.current_time()
            await self._looking(ward, tier.probe)
            if slow and trio.current_time() - began > self._timeout_s / _LOOKS:
                raise OSError(errno.ETIMEDOUT, "it answers, but not as fast as it should")
            self._see_room(ward, (await self._looking(ward, tier.space)).available)
            if ward.room < 0:
                raise _no_room()
            if gone and self._returned is not None:
                await self._returned(tier)
        except (OSError, MonarchError) as error:
            number = getattr(error, "errno", None)
            again = Outage(
                _words(error),
                outage.since_ns,
                slow=slow or number == errno.ETIMEDOUT,
                full=number in _FULL,
                gone=gone,
            )
            self._outages.tried(tier.number, again, now_s=trio.current_time())
            self._shun(tier.number, not again.is_read)
            return
        self._outages.end(tier.number)
        self._ledger.open(tier.number)
        self._shun(tier.number, False)
        ward.seen = self._all_served(ward)
        log.info("tier %s takes copies again", tier.name)

    def _all_served(self, ward: _Ward) -> Served:
        elsewhere = self._served(ward.tier.number)
        return Served(elsewhere.calls + ward.spent.calls, elsewhere.seconds + ward.spent.seconds)

    async def _looking(
        self, ward: _Ward, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]
    ) -> T:
        call = _Call(reads=True, files=0, size=0)
        return await self._run(ward, ward.looking, call, function, *args)


def tier_error(number: int | None, words: str | None) -> TierError:
    error = TierError(words or "the tier failed")
    error.errno = number or errno.EIO
    return error


def _no_room() -> TierError:
    return tier_error(errno.ENOSPC, "no room beyond what is kept free")


def _slow(why: str) -> Outage:
    return Outage(why, time.time_ns(), slow=True)


def _words(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _timed(function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> tuple[float, T]:
    began = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - began, result


def _closed(result: object) -> None:
    """Close the copy that was opened for somebody who does not wait for it any more."""
    match result:
        case (float(), int(fd)):
            os.close(fd)
        case (float(), Closeable() as opened):
            opened.close()
