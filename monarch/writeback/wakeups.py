"""The wake-ups between the tasks of the drain and the callers that wait for the source, and the
pauses of the drain while the source accepts no changes."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Literal

import trio

from monarch.telemetry.log import Limiter
from monarch.text import counted, errno_words
from monarch.writeback.objects import SCARCE, TierCallError

log = logging.getLogger(__name__)

# The longest pause after a failure while a caller waits for a change, in seconds.
_WAITED_S = 5.0
# The pause doubles with each failure, from the first value to the second, in seconds.
BACKOFF_S = (1.0, 60.0)


_WHERE = {"source": "", "tier": "the tier's disk: ", "daemon": "the daemon or the machine: "}


class Wakeups:
    """``waiters`` is the number of callers that wait for the source."""

    def __init__(self) -> None:
        self.waiters = 0
        self._changed = trio.lowlevel.ParkingLot()
        self._idle_stagers = trio.lowlevel.ParkingLot()
        self._hurry = trio.Event()

    def wake_all(self) -> None:
        """Wakes all tasks: each checks again what it can do."""
        self._changed.unpark_all()
        self._idle_stagers.unpark_all()

    def wake_stager(self) -> None:
        """Wakes one task for one more content to stage."""
        self._idle_stagers.unpark()

    async def change(self) -> None:
        """Waits for the next ``wake_all`` or ``end_pause``."""
        await self._changed.park()

    async def content(self) -> None:
        """Waits for the next ``wake_all``, or for one content to stage."""
        await self._idle_stagers.park()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits, as a caller, until ``holds`` returns true; a pause after a failure ends now."""
        self.waiters += 1
        try:
            self.end_pause()
            while not holds():
                await self.change()
        finally:
            self.waiters -= 1

    def end_pause(self) -> None:
        """Ends the current pause."""
        if not self._hurry.is_set():
            self._hurry.set()
            self._changed.unpark_all()

    @property
    def is_hurried(self) -> bool:
        """Whether the last pause has to end."""
        return self._hurry.is_set()

    def begin_pause(self, pause_s: float) -> float:
        """Begins a pause; returns its length in seconds, which is shorter while a caller waits."""
        self._hurry = trio.Event()
        return min(pause_s, _WAITED_S) if self.waiters else pause_s

    async def pause(self, pause_s: float) -> None:
        """Begins a pause and waits for its end."""
        with trio.move_on_after(self.begin_pause(pause_s)):
            await self._hurry.wait()


Cause = Literal["source", "room", "tier", "daemon"]


class Trouble:
    """``reason`` describes the present failure, None if there is none, and ``cause`` is the part
    that has failed: the source, or only the room there, the disk of the tier, or the daemon, which
    lacks descriptors or memory. ``stops`` counts the pauses, and ``answer`` is the errno of the
    last one."""

    def __init__(self, wakeups: Wakeups) -> None:
        self.reason: str | None = None
        self.cause: Cause = "source"
        self.stops = 0
        self.answer = errno.EIO
        self._wakeups = wakeups
        self._pause_s = BACKOFF_S[0]
        self._limiter = Limiter(log)

    async def rest(self, error: Exception, words: str, *, what: str, waiting: int) -> None:
        """Pauses after an error of ``what``, while ``waiting`` changes are in the queue."""
        number = error.errno if isinstance(error, OSError) else None
        cause: Cause = "tier" if isinstance(error, TierCallError) else "source"
        if number in SCARCE:
            cause = "daemon"
        self._begin(cause, number, f"{what}: {words}")
        self._limiter.warning(
            f"drain {type(error).__name__} {words}",
            "draining to the source has stopped and will be tried again; %s kept in the tier:"
            " %s: %s%s",
            counted(waiting, "change is", "changes are"),
            what,
            _WHERE[cause],
            words,
        )
        await self._wakeups.pause(self._pause_s)
        self._pause_s = min(2 * self._pause_s, BACKOFF_S[1])

    def note_full(self, error: OSError, *, what: str, waiting: int) -> None:
        """The source has no room for ``what``, while ``waiting`` changes are in the queue."""
        words = errno_words(error.errno)
        self._begin("room", error.errno, f"{what}: {words}")
        self._limiter.warning(
            "drain full",
            "the source is full: only removals are drained until it has room; %s kept in the tier:"
            " %s: %s",
            counted(waiting, "change is", "changes are"),
            what,
            words,
        )

    def _begin(self, cause: Cause, number: int | None, reason: str) -> None:
        self.reason, self.cause, self.answer = reason, cause, number or errno.EIO
        self.stops += 1
        self._wakeups.wake_all()

    def answered(self) -> None:
        """The source has refused one change: that is the reason now."""
        if self.reason is not None:
            self.reason = None
            self._wakeups.wake_all()

    def end(self) -> None:
        """Ends the trouble: the source has accepted a change."""
        if self.reason is not None:
            if self.cause != "room":
                # The queue logs it when nothing is held any more.
                log.info("draining to the source continues")
            self.reason = None
            self._wakeups.wake_all()
        self._pause_s = BACKOFF_S[0]
