"""The plan of one measured run of a job, and what its process reports: texts between processes.

``monarch analyze run`` puts the plan into the environment of the job. ``monarch.watch`` reads it
there, and writes the report into a file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, TypeAlias

from monarch.telemetry.report import Report

# The variable of the environment with the plan, and that with the phase alone, for scripts.
VARIABLE = "MONARCH_ANALYZE"
PHASE_VARIABLE = "MONARCH_PHASE"

# fill: nothing is measured, files get copies. synthetic: batches that are in memory. cached: all
# files may be read from the tiers. real: a share of them.
Phase: TypeAlias = Literal["fill", "synthetic", "cached", "real"]

# The windows of a run, whose rates are compared.
WINDOWS = 5
# The durations of windows, in seconds, and the counts that a report may have: what is beyond them
# was not measured, and its quotients have no number.
LEAST_S, _MOST_S = 1e-9, 1e9
_MOST_COUNT = 1 << 63


@dataclass(frozen=True, slots=True)
class ProcessId(Report):
    """A process by its number, and by its start in clock ticks since boot, since the number may be
    used again. Both are valid in one ``space`` (``process_space``)."""

    number: int
    started: int
    space: str


@dataclass(frozen=True, slots=True)
class Plan(Report):
    """``share`` of the files may be read from tiers, and the source gives at most
    ``source_limit`` bytes/s (0: no limit). ``iterations`` batches are measured, after ``warmup``
    others, and twice as many until their windows agree, but at most ``most_iterations``.
    ``report`` is the path of the report. ``analysis`` is the process of the command."""

    phase: Phase
    mountpoint: str
    report: str
    share: float = 1.0
    source_limit: int = 0
    iterations: int = 100
    most_iterations: int = 0
    warmup: int = 5
    analysis: ProcessId | None = None

    @property
    def seen(self) -> str:
        """The path of an empty file that is made when a process begins to carry out the plan."""
        return f"{self.report}.seen"


@dataclass(frozen=True, slots=True)
class RunReport(Report):
    """The measured part of one run; durations in seconds.

    ``train_s`` are the durations of windows of ``window`` batches with the training, ``load_s``
    those without it. ``hits`` opens were served by tiers, ``misses`` by the source, which gave
    ``source_bytes``; they belong to ``batches`` batches. ``workers`` of the loader, 0: it runs
    within the training process, None: unknown. ``in_stages``: it fetches and prepares in separate
    stages. ``epoch_batches`` is the length of the loader, None if it is unknown.
    """

    window: int
    train_s: list[float]
    load_s: list[float]
    hits: int
    misses: int
    source_bytes: int
    batches: int
    workers: int | None
    in_stages: bool
    epoch_batches: int | None

    def train_rates(self) -> list[float]:
        """The rates of the windows with the training, in batches/s."""
        return [self.window / seconds for seconds in self.train_s]

    def load_rates(self) -> list[float]:
        """The rates of the windows without the training, in batches/s."""
        return [self.window / seconds for seconds in self.load_s]

    def is_possible(self) -> bool:
        """Whether all numbers are within the ranges of such numbers."""
        counts = (self.hits, self.misses, self.source_bytes, self.batches)
        lengths = (self.workers or 0, self.epoch_batches or 0)
        return (
            0 < self.window < _MOST_COUNT
            and all(0 <= each < _MOST_COUNT for each in (*counts, *lengths))
            and all(LEAST_S <= seconds <= _MOST_S for seconds in (*self.train_s, *self.load_s))
        )


def encode(value: Plan | RunReport) -> str:
    return json.dumps(value.to_dict())


def decode_plan(text: str) -> Plan:
    """Raises ValueError if ``text`` is not a plan."""
    plan = Plan.from_dict(json.loads(text))
    if plan.iterations < WINDOWS or plan.warmup < 1 or not 0 <= plan.share <= 1:
        raise ValueError("the plan has a number out of its range")
    return plan


def decode_report(text: str) -> RunReport:
    """Raises ValueError if ``text`` is not a report."""
    return RunReport.from_dict(json.loads(text))
