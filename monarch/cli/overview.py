"""The mounts of this node: each with the report of its daemon, or a description of its trouble; of
a mount of another user, its public figures."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.cli.daemon_call import ask
from monarch.control.registry import MountRecord, Registry, SeenMount, real_path, seen_mounts
from monarch.errors import MonarchError, NotMountedError, Unanswered
from monarch.posix.bounded_calls import call_within
from monarch.telemetry.report import StatusReport
from monarch.text import counted, escape_text, format_bytes
from monarch.types import XATTR_STATUS

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


def elsewhere(records: Registry) -> list[dict[str, str]]:
    """The mounts that other nodes have recorded in the same state directory, which these share. A
    record does not say whether the daemon runs."""
    names = ("mountpoint", "node", "source", "log")
    return [{name: getattr(each, name) for name in names} for each in records.elsewhere()]


# -- a mount of another user -----------------------------------------------------------------------


def public_status(place: Path) -> tuple[str, dict[str, Any]]:
    """The mount point of the Monarch mount above ``place``, and its public figures.

    Raises NotMountedError if there is no mount or its daemon is dead; MonarchError if the daemon
    does not answer or denies access.
    """
    from monarch.fuse.mountpoint import monarch_above
    from monarch.posix.mounts import MONARCH_TYPE, mount_table

    ours = [str(mounted.mount_point) for mounted in mount_table() if mounted.kind == MONARCH_TYPE]
    mountpoint = monarch_above(real_path(place, ours))
    if not mountpoint:
        raise NotMountedError(
            f"{escape_text(os.fspath(place))} is not in a Monarch mount",
            hint="`monarch status` lists the mounts",
        )
    where = escape_text(mountpoint)
    try:
        answer = call_within(ANSWER_SECONDS, os.getxattr, mountpoint, XATTR_STATUS)
        return mountpoint, json.loads(answer)
    except Unanswered:
        raise MonarchError(f"{where} does not answer", hint="ask the owner of the mount") from None
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            raise NotMountedError(f"the daemon of {where} is dead", hint="mount it again") from None
        raise MonarchError(
            f"{where} is a Monarch mount of another user: {error.strerror}",
            hint="run the command as the owner of the mount; with allow_other every user may ask",
        ) from error
    except ValueError as error:
        raise MonarchError(f"{where}: its daemon is of another version: {error}") from error


def public_lines(mountpoint: str, figures: dict[str, Any]) -> list[str]:
    """One line for each subject, as text for a person."""
    state = f"{figures['health']}, {figures['state']}, pid {figures['pid']}"
    resident, total = format_bytes(figures["resident_bytes"]), format_bytes(figures["bytes"])
    lines = [
        f"{escape_text(mountpoint)}: {state}; a mount of another user, or of another state"
        " directory",
        f"  {figures['datapath']}, open: {figures['open']}, version {figures['version']}",
        f"  {figures['resident_files']:,} of {counted(figures['files'], 'file', 'files')} resident,"
        f" {resident} of {total}",
    ]
    for tier in figures["tiers"]:
        used, capacity = format_bytes(tier["used"]), format_bytes(tier["capacity"])
        lines.append(f"  tier {tier['name']}: {used} of {capacity} used")
    return lines
