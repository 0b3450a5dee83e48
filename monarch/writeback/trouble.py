"""The pauses of the drain while the source accepts no changes, and the reason."""

from __future__ import annotations

import errno
import logging

from monarch.telemetry.log import Limiter
from monarch.writeback.wakeups import Wakeups

log = logging.getLogger(__name__)

# The pause doubles with each failure, from the first value to the second, in seconds.
BACKOFF_S = (1.0, 60.0)


class Trouble:
    """``reason`` describes the present failure, None if there is none. ``stops`` counts the pauses,
    and ``answer`` is the errno of the last one."""

    def __init__(self, wakeups: Wakeups) -> None:
        self.reason: str | None = None
        self.stops = 0
        self.answer = errno.EIO
        self._wakeups = wakeups
        self._pause_s = BACKOFF_S[0]
        self._limiter = Limiter(60.0)

    async def rest(self, error: Exception, words: str, *, what: str, waiting: int) -> None:
        """Pauses after an error of ``what``, while ``waiting`` changes are in the queue."""
        self.reason = f"{what}: {words}"
        self.stops += 1
        number = error.errno if isinstance(error, OSError) else None
        self.answer = number or errno.EIO
        self._wakeups.wake_all()
        self._limiter.warning(
            log,
            f"drain {type(error).__name__} {words}",
            "draining to the source has stopped and will be tried again; %d changes are kept in the"
            " tier: %s: %s",
            waiting,
            what,
            words,
        )
        await self._wakeups.pause(self._pause_s)
        self._pause_s = min(2 * self._pause_s, BACKOFF_S[1])

    def end(self) -> None:
        """Ends the trouble: the source has accepted a change."""
        if self.reason is not None:
            log.info("draining to the source continues")
            self.reason = None
            self._wakeups.wake_all()
        self._pause_s = BACKOFF_S[0]
