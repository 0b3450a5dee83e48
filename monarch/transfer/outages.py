"""The tiers that are out of service: why, since when, and when each is tried again. Pure.

A tier that takes no new copies still serves its copies. Only a tier that is slow, or whose
directory has changed, is not used at all until a try succeeds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

# If this many copies cannot be read within the time below, the disk is to blame.
_BAD_COPIES = 8
_BAD_COPIES_S = 10.0
# The pause between two tries doubles up to this value, in seconds.
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Outage:
    """One outage: ``why`` as text; ``since_ns`` since the epoch. ``slow``: it answers late or not
    at all. ``full``: only space is missing. ``moved``: its directory is not at its path. ``state``:
    the state directory, if its disk has failed and not that of the tier; else empty."""

    why: str
    since_ns: int
    slow: bool
    full: bool = False
    moved: bool = False
    state: str = ""

    @property
    def is_read(self) -> bool:
        """Whether copies in the tier are still read."""
        return not (self.slow or self.moved)


@dataclass(slots=True)
class _Tries:
    """The time of the next try of a tier, and the recent failures to read it."""

    pause_s: float
    next_s: float = -math.inf
    bad_s: deque[float] = field(default_factory=lambda: deque(maxlen=_BAD_COPIES))


class Outages:
    """The outages of ``tiers``. ``pause_s`` is the time from the first outage to the first try.

    Each outage lasts longer than the one before until the tier has stored a copy in between, so
    that a tier that fails at every use is rarely used. ``now_s`` is of a monotonic clock.
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
        """Begins an outage, or makes it worse; returns False if it was known already."""
        known = self._current.get(tier)
        if known is not None:
            if not known.is_read or outage.is_read:
                return False
            outage = replace(outage, since_ns=known.since_ns)
        self._current[tier] = outage
        self._postpone(tier, now_s)
        return True

    def tried(self, tier: int, outage: Outage, *, now_s: float) -> None:
        """Records a failed try; ``outage`` is the current problem."""
        self._current[tier] = replace(outage, since_ns=self._current[tier].since_ns)
        self._postpone(tier, now_s)

    def is_due(self, tier: int, *, now_s: float) -> bool:
        return now_s >= self._tries[tier].next_s

    def end(self, tier: int) -> None:
        del self._current[tier]
        self._tries[tier].bad_s.clear()

    def copy_arrived(self, tier: int) -> None:
        self._tries[tier].pause_s = self._pause_s

    def copy_unreadable(self, tier: int, *, now_s: float) -> bool:
        """Records a copy that could not be read; returns whether the limit is exceeded."""
        bad_s = self._tries[tier].bad_s
        bad_s.append(now_s)
        return len(bad_s) == _BAD_COPIES and now_s - bad_s[0] <= _BAD_COPIES_S

    def _postpone(self, tier: int, now_s: float) -> None:
        tries = self._tries[tier]
        tries.next_s = now_s + tries.pause_s
        tries.pause_s = min(2 * tries.pause_s, max(_LONGEST_PAUSE_S, self._pause_s))
