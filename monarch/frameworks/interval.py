"""The number of iterations between two checkpoints: the least that the accepted overhead allows.

``choose_interval`` is the algorithm of CheckFreq (Mohan, Phanishayee and Chidambaram, FAST 2021)
on measured costs. ``Interval`` repeats it after each checkpoint with the cost of that checkpoint:
so it follows storage that becomes slower or faster at once.

Pure: times are arguments, in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

# The first checkpoint comes early, to measure its cost.
FIRST_INTERVAL = 10

# A slow write counts at once, for as long as it is among this many last writes.
_WRITES = 3
# The time of an iteration without a write is the median of this many.
_QUIET_ITERATIONS = 32

# Interference in this many intervals in a row lengthens the interval.
_WINDOWS = 3
_STRETCH = 1.25
_MOST_STRETCH = 8.0

# The tolerance for quotients of times that are whole numbers but for rounding.
_ROUNDING = 1e-9


def choose_interval(
    *,
    iteration_s: float,
    update_s: float,
    copy_s: float,
    write_s: float,
    visible_s: float | None,
    p: float,
    max_in_flight: int,
) -> int:
    """CheckFreq's choice, in iterations: the checkpoints before are on storage by then, and the
    delay of training is the share ``p`` of the time, such as 0.035, or less.

    ``update_s``: the part of an iteration in which the weights change. ``copy_s``: a copy of the
    state to host memory; ``write_s``: from there to storage. ``visible_s``: the time in which a
    copy delays training, None if it was not measured: it then runs during the next iteration, until
    the update of the weights.
    """
    if visible_s is None:
        visible_s = max(0.0, copy_s - (iteration_s - update_s))
    by_write = _ceil((copy_s + write_s - visible_s) / (max_in_flight * iteration_s))
    by_budget = _ceil(visible_s / (p * iteration_s))
    return max(1, by_write, by_budget)


class Interval:
    """The current interval, ``iterations``, updated from measurements of the run."""

    def __init__(self, *, p: float, max_in_flight: int = 1) -> None:
        """``p`` as in ``choose_interval``. Raises ValueError if one of them is not positive."""
        if not p > 0 or max_in_flight < 1:
            raise ValueError("p must be above 0 and max_in_flight at least 1")
        self._p = p
        self._max_in_flight = max_in_flight
        self.iterations = FIRST_INTERVAL
        self._fed = 0
        self._stretch = 1.0
        self._noisy = 0
        self._quiet: deque[float] = deque(maxlen=_QUIET_ITERATIONS)
        self._writes: deque[float] = deque(maxlen=_WRITES)
        self._visibles: deque[float] = deque(maxlen=_WRITES)
        self._window: list[float] = []
        self._updates: list[float] = []
        self._last: tuple[list[float], list[float]] = ([], [])
        self._visible_s = 0.0

    def iterated(
        self, seconds: float, *, update_s: float = 0.0, visible_s: float = 0.0, quiet: bool = True
    ) -> None:
        """Records an iteration of ``seconds``, of which ``update_s`` for its update; a checkpoint
        delayed it by another ``visible_s``. ``quiet``: nothing was written meanwhile.
        """
        self._window.append(seconds)
        self._updates.append(update_s)
        self._visible_s += visible_s
        if quiet:
            self._quiet.append(seconds)

    def begun(self, *, late: bool = False) -> None:
        """Records that a checkpoint begins, and with it a window; ``late``: an earlier one was due,
        but the ones before were still being written."""
        if self._window:
            self._visibles.append(self._visible_s)
            if self._quiet and not late:
                self._look_at(self._window)
            self._last = (self._window, self._updates)
        self._window, self._updates, self._visible_s = [], [], 0.0

    def persisted(self, *, copy_s: float, write_s: float) -> None:
        """Records that a checkpoint is on storage, with the times of its copy and its write."""
        self._writes.append(write_s)
        window, updates = (self._window, self._updates) if self._window else self._last
        if not window:
            return
        self._fed = choose_interval(
            iteration_s=max(median(window), _ROUNDING),
            update_s=median(updates),
            copy_s=copy_s,
            # The median alone would react only after two more late writes.
            write_s=max(write_s, median(self._writes)),
            visible_s=median(self._visibles) if self._visibles else None,
            p=self._p,
            max_in_flight=self._max_in_flight,
        )
        self._apply()

    def _look_at(self, window: list[float]) -> None:
        """The second criterion: the delay of iterations by writes that are not late."""
        undisturbed = median(self._quiet) * len(window)
        overhead = (sum(window) + self._visible_s) / max(undisturbed, _ROUNDING) - 1
        self._noisy = self._noisy + 1 if overhead > self._p else 0
        if self._noisy == _WINDOWS:
            self._noisy = 0
            self._stretch = min(self._stretch * _STRETCH, _MOST_STRETCH)
            self._apply()
        elif overhead * _STRETCH <= self._p and self._stretch > 1:
            # A shorter interval would also be within the budget.
            self._stretch = max(1.0, self._stretch / _STRETCH)
            self._apply()

    def _apply(self) -> None:
        if self._fed:
            self.iterations = _ceil(self._fed * self._stretch)


def _ceil(value: float) -> int:
    return math.ceil(value - _ROUNDING)
