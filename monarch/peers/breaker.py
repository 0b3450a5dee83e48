"""How long a member may take to answer, and whether it is asked. Pure: the time is an argument.

A member that is cut off never answers, and its connections never end by themselves. So each wait
has a limit that follows the latencies of the member. A member that does not answer is left out for
a time that doubles (circuit breaker; Nygard, "Release It!", 2007).

A member may also answer each call, but late. So the time that calls take beyond a fair one is
limited to a budget, of which a part of the time is given back (token bucket).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

# The limit is this many times the 99th percentile of the latencies, and at most this, in seconds.
_TIMES_P99 = 4
_MOST_S = 1.0
# Latencies that count, and new ones after which the limit is computed again.
_LATENCIES = 256
_EACH = 32
# Failures in a row after which the member is left out, for how long at first and at most, in
# seconds.
_FAILURES = 3
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0
# The time in seconds that all calls together may take beyond a fair one, and what is given back of
# it in a second. A member that used it up is asked again when it has this much.
_BUDGET_S = 10.0
_GIVEN_BACK = 0.01
_ENOUGH_S = 1.0
# The waits of a call are limited. What it took longer than this, in seconds, or than so many times
# the least limit, this process was stopped.
_LONGEST_S = 8.0
_TIMES_LEAST = 160


@dataclass(slots=True)
class SourceTime:
    """What a read of the source takes, in seconds: an answer of any member within this time is not
    late."""

    seconds: float = _MOST_S


class Breaker:
    """What is known of one member. ``least_s`` is the least limit of a wait, in seconds. Threads
    may use it at the same time: a lost update only delays a decision by one call."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
        self._new = 0
        self._failures = 0
        # Whether the last bytes of the member were wrong: then answers prove nothing.
        self._is_damaged = False
        # Whether the member has answered a hello since it was left out: one call is to try it.
        self._is_back = False
        self._pause_s = _FIRST_PAUSE_S
        self._out_until_s: float | None = None
        # What is left of the budget, less than 0 after it was used up, and when that was computed.
        self._budget_s = _BUDGET_S
        self._counted_s: float | None = None
        # The end of the last late call.
        self._late_to_s = -math.inf
        # Those of one node have the same one.
        self.source = SourceTime()
        # The limit of the wait for the first byte, and for each further MiB, in seconds. Until the
        # latencies are known it is the greatest one.
        self.limit_s = max(least_s, _MOST_S)

    @property
    def fair_s(self) -> float:
        """What a call, and each MiB of its answer, may take without being late, in seconds."""
        return max(self._least_s, self.source.seconds)

    def is_out(self, now: float) -> bool:
        """Whether the member is left out at ``now``."""
        return self._out_until_s is not None and now < self._out_until_s

    @property
    def is_failing(self) -> bool:
        """Whether the member has been left out, and has not answered since."""
        return self._out_until_s is not None and not self._is_back

    @property
    def is_damaged(self) -> bool:
        """Whether the last bytes of the member were wrong."""
        return self._is_damaged

    def admits(self, now: float) -> bool:
        """Whether the member is asked at ``now``. After a pause one call tries it, and the others
        wait for the result of this call."""
        if self._out_until_s is None:
            return True
        if now < self._out_until_s:
            return False
        self._give_back(now)
        self._out_until_s = now + self._pause_s
        return True

    def late(self, now: float, seconds: float) -> None:
        """Records that a call, answered or not, has taken ``seconds`` longer than a fair time. Of
        calls at the same time each second counts once: no reader has waited for it twice."""
        longest_s = max(_LONGEST_S, _TIMES_LEAST * self._least_s)
        late_s = min(seconds, now - self._late_to_s, longest_s)
        if late_s <= 0:
            return
        self._late_to_s = now
        self._give_back(now)
        self._budget_s -= late_s
        if self._budget_s < 0:
            self._leave_out(now + (_ENOUGH_S - self._budget_s) / _GIVEN_BACK)

    def _give_back(self, now: float) -> None:
        if self._counted_s is not None:
            given_s = _GIVEN_BACK * (now - self._counted_s)
            self._budget_s = min(_BUDGET_S, self._budget_s + given_s)
        self._counted_s = now

    def greeted(self, now: float) -> None:
        """Records that the member answered a hello, for which ``admits`` was asked. That proves
        less than an answer to a request: one call tries the member, and the pause stays as long."""
        if self._out_until_s is not None and self._budget_s >= 0:
            self._out_until_s, self._is_back = now, not self._is_damaged

    def _leave_out(self, until_s: float) -> None:
        self._is_back = False
        self._out_until_s = max(self._out_until_s or until_s, until_s)

    def answered(self, latency_s: float) -> None:
        """Records that the member answered a call after ``latency_s``."""
        if not self._is_damaged:
            self._forgive()
        self._latencies.append(latency_s)
        self._new += 1
        if self._new >= _EACH:
            self._new = 0
            ordered = sorted(self._latencies.copy())
            p99_s = ordered[(99 * len(ordered) - 1) // 100]
            self.limit_s = max(self._least_s, min(_TIMES_P99 * p99_s, _MOST_S))

    def right(self) -> None:
        """Records that the bytes of an answer were right."""
        if self._is_damaged:
            self._is_damaged = False
            self._forgive()

    def _forgive(self) -> None:
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        if self._budget_s >= 0:
            self._out_until_s = None

    def damaged(self, now: float) -> None:
        """Records that the bytes of an answer were wrong."""
        self._is_damaged = True
        self.failed(now)

    def failed(self, now: float) -> None:
        """Records that the member did not answer a call, or broke it off."""
        self._failures += 1
        if self._out_until_s is not None:
            # It was tried after a pause.
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        elif self._failures < _FAILURES:
            return
        self._leave_out(now + self._pause_s)
