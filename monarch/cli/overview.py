"""The mounts of this node: each with its daemon's report, or what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monarch.cli.ask import ask
from monarch.errors import MonarchError
from monarch.node_mounts import SeenMount, seen_mounts
from monarch.registry import MountRecord, Registry
from monarch.report import StatusReport

# A daemon answers from memory; longer than this it is in trouble, and the other mounts wait.
ANSWER_SECONDS = 5.0
# Of a mount whose daemon gives no report: the word for it in the table, in JSON and of --check.
_STATE_WORDS = {
    "served": "not answering",
    "stale": "dead",
    "leftover": "ended",
    "foreign": "another user's",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A mount of the overview: its report, or what is wrong with it and what to do."""

    seen: SeenMount
    report: StatusReport | None
    trouble: str

    @property
    def state(self) -> str:
        """One word, the same wherever this mount is shown."""
        return self.report.state if self.report else _STATE_WORDS[self.seen.state]

    def to_dict(self) -> dict[str, Any]:
        """The report, as for this mount alone; of one without a daemon what is known of it."""
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
    """Asks the daemon. NotMountedError if it is dead, MonarchError if it does not answer."""
    return ask(record, "status", {}, answer=StatusReport, timeout=ANSWER_SECONDS)


def line_of(record: MountRecord) -> Line:
    return Line(SeenMount(record.mountpoint, "served", record), report_of(record), "")


def overview(records: Registry, *, only: str | None = None) -> list[Line]:
    """A line for each mount, or for the one at the mount point ``only``; all are asked."""
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
