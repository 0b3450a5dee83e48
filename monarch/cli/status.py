"""``monarch status``: the state of the mounts of this node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from monarch.cli.daemon_call import MAYBE_MOUNTPOINT
from monarch.cli.output import emit_json, show
from monarch.cli.overview import (
    Line,
    elsewhere,
    overview,
    public_lines,
    public_status,
    report_of,
)
from monarch.config.defaults import state_root
from monarch.control.registry import Registry, SeenMount
from monarch.errors import NotMountedError, UsageError
from monarch.telemetry.health import State, worst
from monarch.text import escape_text

# The exit codes of --check for mounts that a daemon serves.
CHECK_CODES: Mapping[State, int] = {"ok": 0, "degraded": 11, "failing": 12}


@click.command(
    epilog="""\b
Examples:
  monarch status
  monarch status /mnt/data --watch
  monarch status /mnt/data --json | jq .residency.fraction_files
  monarch status --json | jq -r '.mounts[] | [.mountpoint, .state] | @tsv'
  monarch status --check
"""
)
@MAYBE_MOUNTPOINT
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object: the report of MOUNTPOINT, or {mounts: [...]} with all reports.",
)
@click.option("--watch", is_flag=True, help="Refresh every two seconds, with rates, until Ctrl-C.")
@click.option(
    "--check",
    is_flag=True,
    help="Print only the health, and exit with 0 for ok, 11 for degraded, 12 for failing, 9 for"
    " dead or not answering; with several mounts, the worst of them.",
)
def status(mountpoint: Path | None, as_json: bool, watch: bool, check: bool) -> int:
    """Show what mounts hold, serve and copy.

    Without MOUNTPOINT one line for each mount of this user; with it, or with any path inside,
    everything about that mount.
    """
    if watch and (as_json or check):
        raise UsageError(
            f"--watch and {'--json' if as_json else '--check'} exclude each other",
            hint="call `monarch status --json` repeatedly",
        )
    records = Registry(state_root())
    if mountpoint is not None and not watch and not _is_ours(records, mountpoint):
        return _public(mountpoint, as_json=as_json, check=check)
    if check:
        return _check(records, mountpoint, as_json=as_json)
    if as_json:
        if mountpoint is None:
            shown: dict[str, Any] = {"mounts": [line.to_dict() for line in overview(records)]}
            if others := elsewhere(records):
                shown["elsewhere"] = others
            emit_json(shown)
        else:
            record = records.find(mountpoint)
            seen = SeenMount(record.mountpoint, "served", record)
            emit_json(Line(seen, report_of(record), "").to_dict())
        return 0

    # Imported here: a script does not need the terminal libraries and must not wait for them.
    from monarch.cli.status_screen import print_status

    print_status(records, mountpoint, watch=watch)
    return 0


def _is_ours(records: Registry, place: Path) -> bool:
    try:
        records.find(place)
    except NotMountedError:
        return False
    return True


def _public(place: Path, *, as_json: bool, check: bool) -> int:
    """Shows a mount of another user, or of another state directory, by its public figures."""
    mountpoint, figures = public_status(place)
    lines = public_lines(mountpoint, figures)
    show({"mountpoint": mountpoint, **figures}, as_json, *(lines[:1] if check else lines))
    return CHECK_CODES[figures["health"]] if check else 0


def _check(records: Registry, mountpoint: Path | None, *, as_json: bool) -> int:
    """Prints the health of all mounts, or of one; returns the exit code of the worst.

    Raises NotMountedError if there is no mount at ``mountpoint``."""
    only = None if mountpoint is None else records.find(mountpoint).mountpoint
    lines = [line for line in overview(records, only=only) if line.seen.state != "foreign"]
    shown = []
    for line in lines:
        word = line.report.health.state if line.report else line.state
        why = line.report.health.why if line.report else line.trouble
        shown.append(escape_text(f"{line.seen.mountpoint}: {word}{f': {why}' if why else ''}"))
    show({"mounts": [line.to_dict() for line in lines]}, as_json, *shown)
    found = [line.report.health.state for line in lines if line.report is not None]
    return CHECK_CODES[worst(found)] if len(found) == len(lines) else NotMountedError.exit_code
