"""Rows of a benchmark, how they are measured, and the verdict on the results.

A row is measured round by round next to what it is compared with, in turns, so that a machine that
slows down slows both; what counts is the ratio within a round. Where those ratios scatter too much
there is no verdict, whatever their median.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from scripts.benchmark.quantities import variation, with_unit

# A coefficient of variation above which a ratio proves nothing.
SCATTER_LIMIT = 0.10

Lab = TypeVar("Lab")


class BenchError(Exception):
    """Why nothing can be measured, in one line."""


@dataclass(frozen=True, slots=True)
class Row(Generic[Lab]):
    """One line of a table: ``function`` measures once, in ``unit``.

    ``against`` measures what it is compared with. ``bar`` is the largest ratio that is good, or the
    smallest one where ``more_is_better``; without ``against`` it is a bar for the value itself.
    ``contender``: the measured system, where a table has several. A ``derived`` row compares two.
    A round takes ``slices`` short measurements of each side in turns, and the median of each side.
    ``published`` is the figure of a paper, and ``how`` says whether the row is simulated or run.
    """

    name: str
    function: Callable[[Lab], float]
    unit: str = "s"
    against: Callable[[Lab], float] | None = None
    against_name: str = ""
    bar: float | None = None
    more_is_better: bool = False
    contender: str = ""
    derived: bool = False
    slices: int = 1
    published: str = ""
    how: str = ""

    def good(self, judged: float) -> bool:
        assert self.bar is not None
        return judged >= self.bar if self.more_is_better else judged <= self.bar


@dataclass(slots=True)
class Result(Generic[Lab]):
    """The values of a row, one for each round."""

    row: Row[Lab]
    values: list[float] = field(default_factory=list)
    against: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.values, self.against, strict=False)]

    @property
    def judged(self) -> list[float]:
        """What the verdict is about."""
        return self.ratios or self.values

    @property
    def scatter(self) -> float:
        return variation(self.judged)

    @property
    def verdict(self) -> str:
        if self.row.bar is None or not self.values:
            return ""
        if len(self.judged) < 3:
            return "no verdict: fewer than 3 rounds"
        # Absolute values that are all on one side of the bar prove enough, however they scatter.
        kept = not self.ratios and len({self.row.good(value) for value in self.values}) == 1
        if self.scatter > SCATTER_LIMIT and not kept:
            return f"no verdict: CV {self.scatter:.0%}"
        return "good" if self.row.good(statistics.median(self.judged)) else "missed"


def measure(rows: Sequence[Row[Lab]], lab: Callable[[], Lab], rounds: int) -> list[Result[Lab]]:
    """Every row once in each round. ``lab`` prepares a round and is closed by the caller."""
    results = [Result(row) for row in rows]
    for turn in range(rounds):
        here = lab()
        for result in results:
            measure_once(result, here, turn)
            latest = f"{result.row.name}: {with_unit(result.values[-1], result.row.unit)}"
            sys.stderr.write(f"round {turn + 1} of {rounds}, {latest}\n")
    return results


def measure_once(result: Result[Lab], lab: Lab, turn: int) -> None:
    """One more value of a row, and one of its baseline."""
    row = result.row
    ours: list[float] = []
    theirs: list[float] = []
    steps = [(row.function, ours)]
    if row.against is not None:
        # In turns: the first of two finds the machine in another state than the second.
        steps.insert(turn % 2, (row.against, theirs))
    for _ in range(row.slices):
        for function, values in steps:
            values.append(function(lab))
    result.values.append(statistics.median(ours))
    if theirs:
        result.against.append(statistics.median(theirs))
