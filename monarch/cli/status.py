"""``monarch status``: what the mounts of this node hold, serve and copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from monarch.cli import complete
from monarch.cli.output import emit_json, say
from monarch.cli.overview import Line, line_of, overview
from monarch.errors import NotMountedError, UsageError
from monarch.health import State, worst
from monarch.places import state_root
from monarch.registry import Registry
from monarch.text import escape_text

# What --check ends with, beside that of a mount that nobody serves.
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
@click.argument(
    "mountpoint",
    required=False,
    type=click.Path(path_type=Path),
    shell_complete=complete.mount_points,
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object: that of MOUNTPOINT, or {mounts: [...]} with the same of each.",
)
@click.option(
    "--watch", is_flag=True, help="Show it anew every two seconds, with rates, until Ctrl-C."
)
@click.option(
    "--check",
    is_flag=True,
    help="Tell the health only, and by the exit code: 0 ok, 11 degraded, 12 failing, 9 dead or not"
    " answering; of several mounts the worst.",
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
        return _check(_chosen(records, mountpoint), as_json=as_json)
    if as_json:
        if mountpoint is None:
            emit_json({"mounts": [line.to_dict() for line in overview(records)]})
        else:
            emit_json(line_of(records.find(mountpoint)).to_dict())
        return 0

    # Imported here, with all that draws on a terminal, so that a script does not wait for it.
    from monarch.cli.status_screen import show

    show(records, mountpoint, watch=watch)
    return 0


def _is_ours(records: Registry, place: Path) -> bool:
    try:
        records.find(place)
    except NotMountedError:
        return False
    return True


def _public(place: Path, *, as_json: bool, check: bool) -> int:
    """Of a mount that another user's daemon serves, or that is in another state directory."""
    from monarch.cli.public_status import public_status, words

    mountpoint, told = public_status(place)
    if as_json:
        emit_json({"mountpoint": mountpoint, **told})
    else:
        lines = words(mountpoint, told)
        for line in lines[:1] if check else lines:
            say(line)
    return CHECK_CODES[told["health"]] if check else 0


def _chosen(records: Registry, mountpoint: Path | None) -> list[Line]:
    """The lines of all mounts, or of the one that ``mountpoint`` is in. NotMountedError if none."""
    only = None if mountpoint is None else records.find(mountpoint).mountpoint
    return [line for line in overview(records, only=only) if line.seen.state != "foreign"]


def _check(lines: Sequence[Line], *, as_json: bool) -> int:
    """Tell the health of each mount on a line of its own; the exit code says the worst."""
    found = [line.report.health for line in lines if line.report is not None]
    if as_json:
        emit_json({"mounts": [line.to_dict() for line in lines]})
    for line in [] if as_json else lines:
        word = line.report.health.state if line.report else line.state
        why = line.report.health.why if line.report else line.trouble
        told = f"{line.seen.mountpoint}: {word}{f': {why}' if why else ''}"
        say(escape_text(told))
    if len(found) < len(lines):
        return NotMountedError.exit_code
    return CHECK_CODES[worst([health.state for health in found])]
