"""The plan that ``monarch plan allocate`` makes, as a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from monarch.cli.json_files import read_json
from monarch.errors import UsageError
from monarch.telemetry.report import Report
from monarch.text import escape_text

# The version of the format; it changes if a reader of the earlier version would misread a plan.
VERSION = 1
_MADE_BY = "monarch plan allocate"


@dataclass(frozen=True, slots=True)
class GrantReport:
    """What a job gets. Rates are in files or batches a second, as in the file of the job, and
    ``source`` is in bytes a second; the source gives the job at most ``source_limit`` (None: no
    limit is needed). ``tier_bytes`` is for each node, and so is ``mount``, which is missing without
    a tier: then the job reads the source itself."""

    job: str
    gpus: dict[str, int]
    cores: int
    tier_bytes: dict[str, int]
    rate: float
    fair_rate: float
    speedup: float
    source: float
    source_limit: float | None
    sbatch: str
    mount: dict[str, str]


@dataclass(frozen=True, slots=True)
class PlanReport(Report):
    """``speedup`` is the mean over all jobs that run; no division has more than ``bound``."""

    monarch_plan: int
    policy: str
    nodes: int
    gpus: int
    jobs: list[GrantReport]
    waiting: list[str]
    speedup: float
    bound: float


def whole_limit(source_limit: float | None) -> int:
    """The limit of the source in whole bytes a second, as a configuration has it: 0 is no limit."""
    return 0 if source_limit is None else max(1, int(source_limit))


def read_plan(path: Path) -> PlanReport:
    """Raises OSError, and UsageError if the file has no plan of this version."""
    raw = read_json(path, made_by=_MADE_BY)
    try:
        if not isinstance(raw, dict) or "monarch_plan" not in raw:
            raise ValueError("it has no key monarch_plan")
        # Before the fields: those of another version may have other types.
        if raw["monarch_plan"] != VERSION:
            raise ValueError(f"its format has version {raw['monarch_plan']!r}, not {VERSION}")
        plan = PlanReport.from_dict(raw)
        for each in plan.jobs:
            amounts = (*each.tier_bytes.values(), each.source_limit or 0)
            if not all(0 <= amount < 1 << 63 for amount in amounts):
                raise ValueError(f"{each.job} has a number out of its range")
        return plan
    except ValueError as error:
        raise UsageError(
            f"{escape_text(os.fspath(path))} is not a plan: {escape_text(str(error))}",
            hint=f"`{_MADE_BY} -o` writes one",
        ) from error
