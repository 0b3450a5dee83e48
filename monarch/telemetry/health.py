"""The health of a mount in one word, and its problems: what is wrong, since when, what to do.

``ok``        there is no problem
``degraded``  all reads and writes are served, but something is wrong
``failing``   some reads or writes fail or wait now

Pure: no clock, no file. docs/operations.md describes for each kind its effect and its remedy.
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

# Every kind of problem with the state that it causes, the gravest first. A list of problems is in
# this order, and its first problem gives the reason.
_FAILING = (
    *("source-hangs", "source-errors", "pack-damaged", "requests-wait", "writes-refused"),
    *("written-names", "names-unreadable"),
)
_DEGRADED = (
    *("fsync-failed", "written-lost", "written-hidden", "drain-refused", "written-set-aside"),
    *("drain-conflict", "attributes-dropped", "other-writer", "undrained-unnoted"),
    *("lease-lost", "no-lease", "internal-error", "copies-damaged", "tier-out", "tier-full"),
    *("pins-too-large", "peers-out", "peers-engine"),
    *("detached", "tier-slow", "log-unwritable", "memory-scarce", "descriptors-scarce"),
    *("source-closed", "files-changed", "snapshot-behind", "snapshot-stale", "copies-unverified"),
)
KINDS: Mapping[str, State] = MappingProxyType[str, State](
    {**dict.fromkeys(_FAILING, "failing"), **dict.fromkeys(_DEGRADED, "degraded")}
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: ``kind`` is one of KINDS, ``what`` describes it, ``remedy`` says what to do.

    ``since_ns`` is 0 in the result of a check that does not record the start."""

    kind: str
    what: str
    since_ns: int = 0
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """``why`` describes the gravest problem and counts the others; it is empty in the state ok."""

    state: State
    why: str
    problems: list[Problem]


def health_of(problems: Sequence[Problem]) -> Health:
    """The health of a mount that has ``problems``."""
    grave = list(KINDS)
    ordered = sorted(problems, key=lambda p: (grave.index(p.kind), p.since_ns))
    if not ordered:
        return Health("ok", "", [])
    others = len(ordered) - 1
    why = ordered[0].what + (f" (and {others} more)" if others else "")
    return Health(worst([KINDS[p.kind] for p in ordered]), why, ordered)


def worst(states: Sequence[State]) -> State:
    """The gravest of ``states``; ok if ``states`` is empty."""
    return max(states, key=STATES.index, default="ok")


@dataclass(slots=True)
class Spell:
    """A period in which a count rises; it ends when the count was constant for ``quiet_s``."""

    _quiet_s: float
    _count: int = 0
    _last_s: float = -math.inf
    number: int = 0
    since_ns: int = 0

    def goes_on(self, count: int, *, now_s: float, wall_ns: int) -> bool:
        """Whether ``count`` rose in the last ``quiet_s`` seconds: by ``number`` since ``since_ns``.

        ``now_s`` is of a monotonic clock, ``wall_ns`` is the time of day.
        """
        if count > self._count:
            if now_s - self._last_s > self._quiet_s:
                self.since_ns, self.number = wall_ns, 0
            self.number += count - self._count
            self._count, self._last_s = count, now_s
        return now_s - self._last_s <= self._quiet_s
