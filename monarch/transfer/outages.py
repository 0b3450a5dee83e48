"""Which tiers are out of service, why, since when, and when each is tried again. Pure.

A tier that takes no copies still gives those that it has. Only one that is slow, or is not where it
was, is left alone altogether until it has been tried with success.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

# So many copies that cannot be read within so many seconds are the disk's fault, not theirs.
_BAD_COPIES = 8
_BAD_COPIES_S = 10.0
# The pause between two tries doubles up to this. Seconds.
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Outage:
    """``why`` in words; ``since_ns`` since the epoch. ``slow``: it answers late or not at all.

    ``full``: nothing is wrong with it but that it has no room. ``gone``: its directory is not where
    it was.
    """

    why: str
    since_ns: int
    slow: bool
    full: bool = False
    gone: bool = False

    @property
    def is_read(self) -> bool:
        """Whether copies there are still tried."""
        return not (self.slow or self.gone)


class _Tries:
    """When a tier is tried again, and how often it failed to be read of late."""

    __slots__ = ("bad_s", "next_s", "pause_s")

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.next_s = -math.inf
        self.bad_s: deque[float] = deque(maxlen=_BAD_COPIES)


class Outages:
    """Those of ``tiers``. ``pause_s`` is how long the first one lasts until the tier is tried.

    Each ends later than the one before, until the tier has taken a copy in between: one that fails
    whenever it is used must not be used all the time. ``now_s`` is of a clock that never jumps.
    """

    def __init__(self, tiers: Iterable[int], *, pause_s: float) -> None:
        self._pause_s = pause_s
        self._tries = {number: _Tries(pause_s) for number in tiers}
        self._current: dict[int, Outage] = {}

    def current(self) -> dict[int, Outage]:
        return dict(self._current)

    def of(self, tier: int) -> Outage | None:
        return self._current.get(tier)

    def begin(self, tier: int, outage: Outage, *, now_s: float) -> bool:
        """The tier is out, or out for a worse reason than before; False if that was known."""
        known = self._current.get(tier)
        if known is not None:
            if not known.is_read or outage.is_read:
                return False
            outage = Outage(outage.why, known.since_ns, outage.slow, outage.full, outage.gone)
        self._current[tier] = outage
        self._postpone(tier, now_s)
        return True

    def tried(self, tier: int, outage: Outage, *, now_s: float) -> None:
        """It was tried in vain; ``outage`` is what is wrong now."""
        since_ns = self._current[tier].since_ns
        self._current[tier] = Outage(outage.why, since_ns, outage.slow, outage.full, outage.gone)
        self._postpone(tier, now_s)

    def is_due(self, tier: int, *, now_s: float) -> bool:
        return now_s >= self._tries[tier].next_s

    def end(self, tier: int) -> None:
        del self._current[tier]
        self._tries[tier].bad_s.clear()

    def copy_arrived(self, tier: int) -> None:
        self._tries[tier].pause_s = self._pause_s

    def copy_unreadable(self, tier: int, *, now_s: float) -> bool:
        """Whether that is one too many."""
        bad_s = self._tries[tier].bad_s
        bad_s.append(now_s)
        return len(bad_s) == _BAD_COPIES and now_s - bad_s[0] <= _BAD_COPIES_S

    def _postpone(self, tier: int, now_s: float) -> None:
        tries = self._tries[tier]
        tries.next_s = now_s + tries.pause_s
        tries.pause_s = min(2 * tries.pause_s, max(_LONGEST_PAUSE_S, self._pause_s))
