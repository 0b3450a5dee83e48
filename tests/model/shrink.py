"""Shortens a plan that fails: removes operations while the plan still fails."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from tests.model.plan import Operation, Plan
from tests.model.play import Failure, play
from tests.model.rig import Workers

# How often a plan is played that failed once: what depends on chance may need a few.
_TRIES = 4
_LOG_LINES = 12


@dataclass(frozen=True, slots=True)
class Found:
    """A failure, the shortest plan that shows it, and how many of ``_TRIES`` plays did."""

    plan: Plan
    failure: Failure
    again: int

    def report(self) -> str:
        log = "\n".join(self.failure.log.splitlines()[-_LOG_LINES:])
        return (
            f"{self.failure}\nshown by {self.again} of {_TRIES} plays;"
            " the last lines of the daemon's log:\n"
            f"{log}\nfor python -m tests.model.replay FILE:\n{self.plan.dumps()}"
        )


def shrink(
    plan: Plan, failure: Failure, directory: Path, workers: Workers, *, seconds: float
) -> Found:
    """Delta debugging, for at most ``seconds``."""
    deadline = time.monotonic() + seconds
    kept = list(plan.operations)[: max(failure.number + 1, 0)]
    last = failure

    def fails(operations: list[Operation]) -> bool:
        nonlocal last
        for _ in range(2):
            found = play(replace(plan, operations=tuple(operations)), directory, workers)
            if found is not None:
                last = found
                return True
        return False

    if not fails(kept):
        kept = list(plan.operations)
    size = max(1, len(kept) // 2)
    while time.monotonic() < deadline:
        start, shorter = 0, False
        while start < len(kept) and time.monotonic() < deadline:
            without = kept[:start] + kept[start + size :]
            if fails(without):
                kept, shorter = without, True
            else:
                start += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2)
    short = replace(plan, operations=tuple(kept))
    again = 0
    for _ in range(_TRIES):
        found = play(short, directory, workers)
        if found is not None:
            again, last = again + 1, found
    return Found(short, last, again)
