"""Monitors the tiers: runs the calls that wait for their disks and detects failures.

A tier that fails, hangs or whose directory has changed is out of service until a try succeeds. Each
tier has its own threads, so that a hanging tier delays only its own callers, and a call that takes
too long is detected while it runs. Time is counted in checks of the running calls: so no tier
counts as slow because the whole daemon was stopped or had no processor.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.config.settings import LimitSettings
from monarch.errors import MonarchError, TierError
from monarch.placement.ledger import Ledger
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.telemetry.metrics import Metrics
from monarch.text import MiB
from monarch.tiers.ownership import other_sources
from monarch.tiers.records import RecordsError
from monarch.tiers.tier import Tier
from monarch.transfer.outages import Outage, Outages
from monarch.transfer.source_load import CallTotals, DatapathView

log = logging.getLogger(__name__)

# Concurrent reads of copies for the event loop, for each tier.
_READ_THREADS = 8
# The number of checks of the running calls within the shortest time limit of a call.
_LOOKS = 5
# The time limit of a call grows by its base value for each such number of files or bytes.
_FILES_MORE = 40
_BYTES_MORE = 40 * MiB
# A tier is slow if its opens and reads take this share of the limit on average.
_MEAN_SHARE = 0.1
_ENOUGH = 4
# Greatest age of the known free space of a tier.
_SPACE_AGE_S = 1.0
# Time limit for running calls at the end of the daemon.
_LAST_CALLS_S = 5.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
# The errors of a copy that another program removed or changed; the disk is not to blame.
_TAMPERED = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)

Args = TypeVarTuple("Args")
T = TypeVar("T")


@runtime_checkable
class Closeable(Protocol):
    """The result of a call that must be closed."""

    def close(self) -> None: ...


class _Call:
    """A running call. ``looks`` is how many checks saw it, ``scope`` cancels its caller."""

    __slots__ = ("looks", "looks_allowed", "reads", "scope")

    def __init__(self, *, reads: bool, files: int, size: int) -> None:
        self.looks = 0
        self.looks_allowed = _LOOKS * (1 + files / _FILES_MORE + size / _BYTES_MORE)
        self.reads = reads
        # A cancelled caller waits for a call that writes, since its effect must be known.
        self.scope = trio.CancelScope(shield=not reads)


class _MonitoredTier:
    """The state of one monitored tier."""

    def __init__(self, tier: Tier, keep_free: int, writers: int) -> None:
        self.tier = tier
        self.keep_free = keep_free
        self.writing = ThreadPool(writers, f"{tier.name}-write", abandon=True)
        self.reading = ThreadPool(_READ_THREADS, f"{tier.name}-read", abandon=True, discard=_closed)
        self.looking = ThreadPool(1, f"{tier.name}-look", abandon=True)
        self.calls: set[_Call] = set()
        # Bytes that may be written, at the last check.
        self.room = 0
        self.looked_s = -math.inf
        # The time of readers' calls here, and the total at the last check.
        self.spent = CallTotals(0, 0.0)
        # The sources of other mounts with copies in the same path, at the last check.
        self.others: Sequence[str] = ()
        self.seen = CallTotals(0, 0.0)


class TierMonitor:
    """``keep_free`` has, per tier, the bytes of its file system that copies leave free.
    ``datapath`` reads copies, too, and is called when readers must bypass a tier."""

    def __init__(
        self,
        *,
        tiers: Sequence[Tier],
        keep_free: Sequence[int],
        ledger: Ledger,
        metrics: Metrics,
        limits: LimitSettings,
        datapath: DatapathView,
    ) -> None:
        # A thread for each large copy, one for small files, one for removals and the sweep.
        writers = limits.copy_workers + 2
        self._monitored = {
            tier.number: _MonitoredTier(tier, free, writers)
            for tier, free in zip(tiers, keep_free, strict=True)
        }
        self._outages = Outages(self._monitored, pause_s=limits.tier_probe)
        self._ledger = ledger
        self._metrics = metrics
        self._timeout_s = limits.tier_timeout
        self._probe_s = limits.tier_probe
        self._datapath = datapath
        self._on_outage: Callable[[int], None] = lambda tier: None
        self._limiter = Limiter(log)
        self._called = trio.Event()
        # The end of all waiting, by the clock of the event loop.
        self._deadline = math.inf
        self.is_stuck = False

    @property
    def tiers(self) -> Mapping[int, Tier]:
        return {number: monitored.tier for number, monitored in self._monitored.items()}

    def prepare(self) -> None:
        """Starts the threads that the tiers need for reads and writes."""
        for monitored in self._monitored.values():
            monitored.reading.prepare()
            monitored.writing.prepare()
            # A check without a thread would take a healthy tier out of service.
            monitored.looking.prepare()

    def others(self, number: int) -> Sequence[str]:
        """The sources of other mounts that have copies in the same tier path."""
        return self._monitored[number].others

    def out_of_service(self) -> Mapping[int, Outage]:
        return self._outages.current()

    def is_read(self, number: int) -> bool:
        """Whether copies in the tier may be read."""
        outage = self._outages.of(number)
        return outage is None or outage.is_read

    def is_responsive(self, number: int) -> bool:
        """Whether a call to the tier can be expected to end."""
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
        """Runs a function that changes a tier, with ``files`` files and ``size`` bytes, in a
        thread. A cancelled caller waits for its end. Raises TierError."""
        monitored = self._monitored[tier.number]
        call = _Call(reads=False, files=files, size=size)
        try:
            return await self._run(monitored, monitored.writing, call, function, *args)
        except OSError as error:
            raise tier_error(error) from error

    async def ask(
        self,
        number: int,
        function: Callable[[Unpack[Args]], T],
        *args: Unpack[Args],
        size: int = 0,
    ) -> T:
        """Runs a function that reads ``size`` bytes of a copy, in a thread. Raises OSError,
        ETIMEDOUT if the tier has not answered in time."""
        monitored = self._monitored[number]
        call = _Call(reads=True, files=0, size=size)
        seconds, result = await self._run(
            monitored, monitored.reading, call, _timed, function, *args
        )
        if size <= MiB:
            monitored.spent = CallTotals(
                monitored.spent.calls + 1, monitored.spent.seconds + seconds
            )
        return result

    async def _run(
        self,
        monitored: _MonitoredTier,
        threads: ThreadPool,
        call: _Call,
        function: Callable[[Unpack[Args]], T],
        *args: Unpack[Args],
    ) -> T:
        call.scope.deadline = self._deadline
        monitored.calls.add(call)
        self._called.set()
        try:
            with call.scope:
                return await threads.run(function, *args)
        finally:
            monitored.calls.discard(call)
        if not call.reads:
            # Its effect on the tier is unknown.
            self.is_stuck = True
        raise OSError(errno.ETIMEDOUT, "the tier does not answer")

    async def take_room(self, tier: Tier, size: int) -> bool:
        """Whether the disk keeps ``keep_free`` after ``size`` more bytes, which are then claimed.
        Raises TierError, ENOSPC if the disk has less than ``keep_free`` free now."""
        monitored = self._monitored[tier.number]
        now = trio.current_time()
        age_s = now - monitored.looked_s
        if age_s > _SPACE_AGE_S or (monitored.room < size and age_s > 0):
            self._see_room(monitored, (await self.call(tier, tier.space)).available)
        if monitored.room < 0:
            raise _no_room()
        if monitored.room < size:
            return False
        monitored.room -= size
        return True

    def _see_room(self, monitored: _MonitoredTier, available: int) -> None:
        monitored.looked_s = trio.current_time()
        monitored.room = available - monitored.keep_free
        self._ledger.see_room(monitored.tier.number, monitored.room)

    # -- what goes wrong -----------------------------------------------------------------------

    def failed(self, tier: Tier, error: TierError) -> None:
        """Begins an outage: the tier could not store a copy."""
        self._metrics.error(f"tier-{tier.name}")
        self._begin(self._monitored[tier.number], _outage(error))

    def copy_unreadable(self, number: int, error: OSError) -> None:
        """Records a copy that could not be read; many in a short time begin an outage."""
        if error.errno not in _TAMPERED and self._outages.copy_unreadable(
            number, now_s=trio.current_time()
        ):
            words = f"copies there cannot be read: {error.strerror}"
            self._is_out(self._monitored[number], _outage(words))

    def copy_arrived(self, number: int) -> None:
        self._outages.copy_arrived(number)

    def abort_at_deadline(self) -> None:
        """Limits the time of running calls; called when reading has ended."""
        now = trio.current_time()
        self._deadline = now + _LAST_CALLS_S
        for number, monitored in self._monitored.items():
            for call in monitored.calls:
                call.scope.deadline = self._deadline if self.is_responsive(number) else now

    def _begin(self, monitored: _MonitoredTier, outage: Outage) -> bool:
        number = monitored.tier.number
        if not self._outages.begin(number, outage, now_s=trio.current_time()):
            return False
        self._ledger.close(number)
        if not outage.is_read:
            self._datapath.bypass(number, True)
        self._on_outage(number)
        return True

    def _is_out(self, monitored: _MonitoredTier, outage: Outage) -> bool:
        """As ``_begin``, but also logs the outage."""
        begun = self._begin(monitored, outage)
        if begun:
            name = monitored.tier.name
            self._metrics.error(f"tier-{name}")
            self._limiter.warning(
                f"{name} {outage.slow} {outage.moved}",
                "tier %s is out of service: %s; %s",
                name,
                outage.why,
                "it stores no new copies, but its copies are still read"
                if outage.is_read
                else "reads bypass it",
            )
        return begun

    # -- checks ----------------------------------------------------------------------------------

    async def run(
        self,
        *,
        on_outage: Callable[[int], None],
        on_return: Callable[[Tier], Awaitable[None]],
    ) -> None:
        """Checks calls and tiers until cancelled.

        ``on_outage`` is called with the number of each tier that goes out of service, ``on_return``
        when the directory of a tier is back at its path, before the tier is used. It raises
        TierError.
        """
        self._on_outage = on_outage
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_calls)
            for monitored in self._monitored.values():
                nursery.start_soon(self._tend, monitored, on_return)

    async def _watch_calls(self) -> None:
        while True:
            if not any(monitored.calls for monitored in self._monitored.values()):
                self._called = trio.Event()
                await self._called.wait()
            await trio.sleep(self._timeout_s / _LOOKS)
            for monitored in self._monitored.values():
                self._watch_calls_of(monitored)

    def _watch_calls_of(self, monitored: _MonitoredTier) -> None:
        late = False
        for call in monitored.calls:
            call.looks += 1
            if call.looks > call.looks_allowed:
                late = True
                if call.reads:
                    call.scope.cancel()
        if late and self._is_out(
            monitored, _outage(f"no answer within {self._timeout_s:g} s", slow=True)
        ):
            # Callers that only read can read from the source.
            for call in monitored.calls:
                if call.reads:
                    call.scope.cancel()

    async def _tend(
        self, monitored: _MonitoredTier, on_return: Callable[[Tier], Awaitable[None]]
    ) -> None:
        number = monitored.tier.number
        while True:
            with suppress(OSError):
                monitored.others = await self._looking(
                    monitored, partial(other_sources, monitored.tier.own)
                )
            await trio.sleep(self._probe_s)
            if self._deadline < math.inf:
                # The mount ends: a call with this deadline says nothing about the tier.
                return
            if self._outages.of(number) is None:
                await self._look(monitored)
            elif self._outages.is_due(number, now_s=trio.current_time()):
                await self._try(monitored, on_return)

    async def _look(self, monitored: _MonitoredTier) -> None:
        """Checks a tier in service, even if it is not read or written now."""
        before, monitored.seen = monitored.seen, self._all_served(monitored)
        calls = monitored.seen.calls - before.calls
        mean_s = (monitored.seen.seconds - before.seconds) / max(1, calls)
        if calls >= _ENOUGH and mean_s > self._timeout_s * _MEAN_SHARE:
            words = f"opens and reads take {mean_s:.1f} s on average"
            self._is_out(monitored, _outage(words, slow=True))
            return
        try:
            if not await self._looking(monitored, monitored.tier.is_in_place):
                await self._detach(monitored)
                return
            await self._look_for_room(monitored)
        except OSError as error:
            self._is_out(monitored, _outage(error, full=False))
        except TierError as error:
            self._begin(monitored, _outage(error))

    async def _look_for_room(self, monitored: _MonitoredTier) -> None:
        """Raises OSError, and TierError if less than ``keep_free`` is free."""
        self._see_room(monitored, (await self._looking(monitored, monitored.tier.space)).available)
        if monitored.room < 0:
            raise _no_room()

    async def _detach(self, monitored: _MonitoredTier) -> None:
        """Closes a tier whose directory has left its path, so that its disk can be unmounted."""
        why = f"{os.fspath(monitored.tier.path)} is not the directory that was opened at mount"
        self._is_out(monitored, _outage(why, moved=True))
        await self._looking(monitored, monitored.tier.detach)
        await self._looking(monitored, self._datapath.move, monitored.tier)

    async def _try(
        self, monitored: _MonitoredTier, on_return: Callable[[Tier], Awaitable[None]]
    ) -> None:
        """Tries a tier, and returns it to service if all calls succeed."""
        tier, outage = monitored.tier, self._outages.current()[monitored.tier.number]
        if any(not call.reads for call in monitored.calls):
            # A hanging call may still change files there.
            self._outages.tried(tier.number, outage, now_s=trio.current_time())
            return
        slow, moved = outage.slow, outage.moved
        try:
            if not await self._looking(monitored, tier.is_in_place):
                if not moved:
                    moved = True
                    await self._detach(monitored)
                await self._looking(monitored, tier.reopen)
            if moved:
                await self._looking(monitored, self._datapath.move, tier)
            began = trio.current_time()
            await self._looking(monitored, tier.probe)
            if slow and trio.current_time() - began > self._timeout_s / _LOOKS:
                raise OSError(errno.ETIMEDOUT, "it answers, but too slowly")
            await self._look_for_room(monitored)
            if moved:
                await on_return(tier)
        except (OSError, MonarchError) as error:
            again = _outage(error, slow=slow or error.errno == errno.ETIMEDOUT, moved=moved)
            self._outages.tried(tier.number, again, now_s=trio.current_time())
            self._datapath.bypass(tier.number, not again.is_read)
            return
        self._outages.end(tier.number)
        self._ledger.open(tier.number)
        self._datapath.bypass(tier.number, False)
        monitored.seen = self._all_served(monitored)
        log.info("tier %s stores copies again", tier.name)

    def _all_served(self, monitored: _MonitoredTier) -> CallTotals:
        elsewhere = self._datapath.totals(monitored.tier.number)
        return CallTotals(
            elsewhere.calls + monitored.spent.calls, elsewhere.seconds + monitored.spent.seconds
        )

    async def _looking(
        self, monitored: _MonitoredTier, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]
    ) -> T:
        call = _Call(reads=True, files=0, size=0)
        return await self._run(monitored, monitored.looking, call, function, *args)


class StateError(TierError):
    """The disk of the state directory, and not that of the tier, has failed or is full."""

    def __init__(self, message: str, directory: str) -> None:
        super().__init__(message)
        self.directory = directory


def tier_error(error: OSError) -> TierError:
    """The error of a call that changes a tier, or the record of a copy."""
    words = error.strerror or "the tier failed"
    if isinstance(error, RecordsError):
        directory = os.path.dirname(os.fspath(error.filename))
        words = f"its copies cannot be recorded in the state directory {directory!r}: {words}"
        found: TierError = StateError(words, directory)
    else:
        found = TierError(words)
    found.errno = error.errno or errno.EIO
    return found


def _no_room() -> TierError:
    return tier_error(OSError(errno.ENOSPC, "no space beyond keep_free"))


def _outage(
    why: str | OSError | MonarchError, *, slow: bool = False, full: bool = True, moved: bool = False
) -> Outage:
    """An outage that begins now. With ``full`` the error tells whether only space is missing."""
    words = why.strerror if isinstance(why, OSError) else None
    is_full = full and not isinstance(why, str) and why.errno in _FULL
    state = why.directory if isinstance(why, StateError) else ""
    is_full = is_full and not state
    return Outage(
        words or str(why), time.time_ns(), slow=slow, full=is_full, moved=moved, state=state
    )


def _timed(function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> tuple[float, T]:
    began = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - began, result


def _closed(result: object) -> None:
    """Closes a copy that an abandoned call has opened."""
    match result:
        case (float(), int(fd)):
            os.close(fd)
        case (float(), Closeable() as opened):
            opened.close()
