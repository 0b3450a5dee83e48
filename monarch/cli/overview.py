"""The mounts of this node: each with the report of its daemon, or a description of its trouble."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monarch.cli.daemon_call import ask
from monarch.control.node_mounts import SeenMount, seen_mounts
from monarch.control.registry import MountRecord, Registry
from monarch.errors import MonarchError
from monarch.telemetry.report import StatusReport

# Time limit for an answer, in seconds: a daemon answers from memory, and other mounts wait.
ANSWER_SECONDS = 5.0
# The state of a mount whose daemon gives no report, in the table, in JSON and for --check.
_STATE_WORDS = {
    "served": "not answering",
    "stale": "dead",
    "leftover": "ended",
    "foreign": "another user's",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A mount of the overview: its report, or its trouble and a remedy."""

    seen: SeenMount
    report: StatusReport | None
    trouble: str

    @property
    def state(self) -> str:
        """The state of the mount in one word."""
        return self.report.state if self.report else _STATE_WORDS[self.seen.state]

    def to_dict(self) -> dict[str, Any]:
        """The report of the daemon; without a daemon, the known facts about the mount."""
        record = self.seen.record
        known = {
            "mountpoint": self.seen.mountpoint,
            "state": self.state,
            "source": record.source if record else None,
            "pid": record.pid if record else None,
            "log": record.log if record else None,
            "trouble": self.trouble,
            "health": None,
        }
        return {**known, **(self.report.to_dict() if self.report else {})}


def report_of(record: MountRecord) -> StatusReport:
    """The report of the daemon. Raises NotMountedError if it is dead, MonarchError on a timeout."""
    return ask(record, "status", {}, answer=StatusReport, timeout=ANSWER_SECONDS)


def line_of(record: MountRecord) -> Line:
    return Line(SeenMount(record.mountpoint, "served", record), report_of(record), "")


def overview(records: Registry, *, only: str | None = None) -> list[Line]:
    """A line for each mount, or for the one at ``only``; each daemon is asked for its report."""
    lines = []
    for seen in seen_mounts(records):
        if only is not None and seen.mountpoint != only:
            continue
        report, trouble = None, seen.advice
        if seen.state == "served" and seen.record is not None:
            try:
                report = report_of(seen.record)
            except MonarchError as error:
                trouble = str(error)
        lines.append(Line(seen, report, trouble))
    return lines
