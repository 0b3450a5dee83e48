"""How a mount is, in one word, and the problems behind it: what is wrong, since when, what to do.

``ok``        all is as it should be
``degraded``  everything is served; something is not as it should be
``failing``   some reads or writes fail or wait now

Pure: no clock, no file. docs/operations.md says for each kind what readers see and what to type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

State = Literal["ok", "degraded", "failing"]

# Mildest first.
STATES: tuple[State, ...] = ("ok", "degraded", "failing")

# Every kind of problem with the state that it means, the gravest first: a list of problems is in
# this order, and the first gives the reason.
KINDS: Mapping[str, State] = MappingProxyType[str, State](
    {
        "source-hangs": "failing",
        "source-errors": "failing",
        "requests-wait": "failing",
        "writes-refused": "failing",
        "written-names": "failing",
        "fsync-failed": "degraded",
        "written-lost": "degraded",
        "written-hidden": "degraded",
        "drain-refused": "degraded",
        "written-set-aside": "degraded",
        "drain-conflict": "degraded",
        "attributes-dropped": "degraded",
        "other-writer": "degraded",
        "lease-lost": "degraded",
        "no-lease": "degraded",
        "internal-error": "degraded",
        "copies-damaged": "degraded",
        "tier-out": "degraded",
        "tier-full": "degraded",
        "detached": "degraded",
        "tier-slow": "degraded",
        "log-unwritable": "degraded",
        "memory-scarce": "degraded",
        "descriptors-scarce": "degraded",
        "source-closed": "degraded",
        "files-changed": "degraded",
        "snapshot-behind": "degraded",
        "snapshot-stale": "degraded",
        "copies-unverified": "degraded",
    }
)


@dataclass(frozen=True, slots=True)
class Problem:
    """``kind`` is one of KINDS, for programs; ``what`` says it in words, ``remedy`` what to do."""

    kind: str
    what: str
    since_ns: int
    remedy: str


@dataclass(frozen=True, slots=True)
class Health:
    """``why`` is what the gravest problem says, and how many others there are; empty if ok."""

    state: State
    why: str
    problems: list[Problem]


def health_of(problems: Sequence[Problem]) -> Health:
    """What ``problems`` add up to."""
    grave = list(KINDS)
    ordered = sorted(problems, key=lambda p: (grave.index(p.kind), p.since_ns))
    if not ordered:
        return Health("ok", "", [])
    others = len(ordered) - 1
    why = ordered[0].what + (f" (and {others} more)" if others else "")
    return Health(worst([KINDS[p.kind] for p in ordered]), why, ordered)


def worst(states: Sequence[State]) -> State:
    """The gravest of ``states``; ok if there are none."""
    return max(states, key=STATES.index, default="ok")


class Spell:
    """A count that should not rise: when it began to, until it has not for ``quiet_s`` seconds."""

    __slots__ = ("_count", "_last_s", "_quiet_s", "number", "since_ns")

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s
        self._count = 0
        self._last_s = -math.inf
        self.number = 0
        self.since_ns = 0

    def goes_on(self, count: int, *, now_s: float, wall_ns: int) -> bool:
        """Whether ``count`` has risen lately, by ``number`` since ``since_ns``.

        ``now_s`` is of a clock that never jumps, ``wall_ns`` the time of day.
        """
        if count > self._count:
            if now_s - self._last_s > self._quiet_s:
                self.since_ns, self.number = wall_ns, 0
            self.number += count - self._count
            self._count, self._last_s = count, now_s
        return now_s - self._last_s <= self._quiet_s
