"""What a daemon answers to a change of its quotas."""

from __future__ import annotations

from dataclasses import dataclass

from monarch.telemetry.report import Report


@dataclass(frozen=True, slots=True)
class QuotaChange:
    """The quota of a job after a change, and before it: ``tier`` in bytes (None: no limit),
    ``source_limit`` in bytes/s (0: no limit). ``is_new``: the job had no quota. It is charged for
    ``charged`` bytes."""

    job: str
    is_new: bool
    charged: int
    tier: int | None
    source_limit: int
    tier_before: int | None
    source_limit_before: int


@dataclass(frozen=True, slots=True)
class QuotaChanges(Report):
    changes: list[QuotaChange]
