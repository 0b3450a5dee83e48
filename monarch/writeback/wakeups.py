"""The wake-ups between the tasks of the drain and the callers that wait for the source."""

from __future__ import annotations

from collections.abc import Callable

import trio

# The longest pause after a failure while a caller waits for a change, in seconds.
_WAITED_S = 5.0


class Wakeups:
    """``waiters`` is the number of callers that wait for the source.

    ``begin_pause`` begins a pause after a failure; ``end_pause`` ends it early.
    """

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
