"""A training with checkpoints in virtual time, under several rules for their interval.

The run is the one that was used to choose between the rules: 1,200 iterations of 44 ms, a state
that is copied in 2 ms and written in 336, and storage that is four times slower from iteration 100
to 600.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from monarch.frameworks.interval import Interval

P = 0.035
ITERATIONS, ITERATION_S, COPY_S, WRITE_S, SLOWER = 1200, 0.044, 0.002, 0.336, 4
SLOW = range(100, 600)
HICCUP, HICCUP_S = 300, 1.2


@dataclass
class Static:
    """The interval of the first choice, for ever."""

    m: int = 1
    k: int = 8
    # A checkpoint was due while earlier ones were being written.
    late: bool = field(default=False, init=False)

    def waited(self, elapsed_s: float, iterations: int) -> None:
        """A checkpoint begins; ``elapsed_s`` since the one before was due."""

    def writing(self, write_s: float) -> None:
        """It begins to be written, which will take so long."""

    def written(self, write_s: float) -> None:
        """It is on storage."""

    def iterated(self, seconds: float, quiet: bool) -> None: ...


class Repository(Static):
    """CheckFreq's program: two more iterations when an interval cost more than was accepted."""

    def waited(self, elapsed_s: float, iterations: int) -> None:
        if elapsed_s > (1 + P) * iterations * ITERATION_S:
            self.k += 2


class InProportion(Static):
    def waited(self, elapsed_s: float, iterations: int) -> None:
        if elapsed_s > (1 + P) * iterations * ITERATION_S:
            self.k = math.ceil(self.k * elapsed_s / ((1 + P) * iterations * ITERATION_S))


@dataclass
class FeedForward(Static):
    """From the median of the last three writes, and as if each were known when it begins."""

    writes: list[float] = field(default_factory=list)

    def writing(self, write_s: float) -> None:
        self.writes = [*self.writes, write_s][-3:]
        self.k = max(1, math.ceil((COPY_S + median(self.writes)) / (self.m * ITERATION_S)))


class Ours(Static):
    """The package's, which knows what a write took when it is over."""

    def __init__(self, m: int = 1) -> None:
        self.interval = Interval(p=P, max_in_flight=m)
        self.late = False

    @property
    def k(self) -> int:  # type: ignore[override]
        return self.interval.iterations

    def waited(self, elapsed_s: float, iterations: int) -> None:
        self.interval.begun(late=self.late)
        self.late = False

    def written(self, write_s: float) -> None:
        self.interval.persisted(copy_s=COPY_S, write_s=write_s)

    def iterated(self, seconds: float, quiet: bool) -> None:
        self.interval.iterated(seconds, quiet=quiet)


@dataclass(frozen=True)
class Outcome:
    overhead: float  # per cent
    k: int
    checkpoints: int


def run(rule: Static, m: int = 1, *, hiccup: bool = False, postpone: bool = False) -> Outcome:
    """``postpone``: a checkpoint that is due while ``m`` are being written is taken when one of
    them is done, as the Checkpointer does; otherwise the training waits for it."""
    now_s = undisturbed_s = due_s = 0.0
    last = checkpoints = 0
    in_flight: list[tuple[float, float]] = []

    def land(until_s: float) -> None:
        while in_flight and in_flight[0][0] <= until_s:
            rule.written(in_flight.pop(0)[1])

    for iteration in range(ITERATIONS):
        land(now_s)
        if iteration - last >= rule.k and postpone and len(in_flight) >= m:
            rule.late = True
        elif iteration - last >= rule.k:
            began_s = now_s
            if len(in_flight) >= m:
                rule.late = True
                now_s = max(now_s, in_flight[0][0])
                land(now_s)
            rule.waited(now_s - due_s, iteration - last)
            write_s = WRITE_S * (SLOWER if iteration in SLOW else 1)
            in_flight.append((now_s + COPY_S + write_s, write_s))
            in_flight.sort()
            rule.writing(write_s)
            checkpoints += 1
            last, due_s = iteration, began_s
        took_s = ITERATION_S + (HICCUP_S if hiccup and iteration == HICCUP else 0.0)
        rule.iterated(took_s, not in_flight)
        now_s += took_s
        undisturbed_s += took_s
    overhead = 100 * (now_s - undisturbed_s) / (ITERATIONS * ITERATION_S)
    return Outcome(round(overhead, 1), rule.k, checkpoints)
