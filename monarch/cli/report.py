"""``monarch report``: the figures of a mount, or of one that has ended, as a page or JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click

from monarch.analysis.profile import result_of
from monarch.analysis.summary import summary_of
from monarch.cli.daemon_call import JSON, ask, last_state
from monarch.cli.output import emit_json, remark
from monarch.cli.profile_file import read_profile
from monarch.cli.report_page import page
from monarch.cli.written_files import replace_whole
from monarch.config.defaults import state_root
from monarch.control.registry import MountRecord, Registry, alive
from monarch.control.state_directory import read_figures, read_note
from monarch.errors import MonarchError, NotMountedError, UsageError
from monarch.telemetry.figures import Figures
from monarch.text import escape_text, format_bytes

_OUTPUT = Path("report.html")


@click.command(
    epilog="""\b
Examples:
  monarch report /mnt/data                       writes report.html
  monarch report /mnt/data -o job.html --profile profile.json
  monarch report 4711 -o job-4711.html           the mount that the Slurm job 4711 has made
  monarch report /mnt/data --json | jq .spared.bytes
"""
)
@click.argument("place", metavar="MOUNT|STATE|JOB")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help=f"The HTML page. Default: {_OUTPUT} in this directory; with --json none.",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The profile of `monarch analyze run`, for the stalls of the training.",
)
@JSON
def report(place: str, output: Path | None, profile: Path | None, as_json: bool) -> None:
    """Write a page about a mount: what it served, and what the source was spared.

    The page is one file without scripts, and needs no network. It has the epochs, a timeline, what
    served the readers, and how they read. A figure that is not known is called unknown. After the
    end of a mount its figures stay in the state directory until the end of the next mount there.
    """
    figures = _figures(place)
    summary = summary_of(figures)
    found = None if profile is None else result_of(read_profile(profile))
    if output is None and not as_json:
        output = _OUTPUT
    if output is not None:
        text = page(summary, found, "" if profile is None else os.fspath(profile))
        replace_whole(output, text)
        size = format_bytes(len(text.encode()))
        remark(f"monarch: {escape_text(os.fspath(output))}, {size}: open it in a browser")
    if as_json:
        emit_json({**summary.to_dict(), "stalls": None if found is None else found.to_dict()})


def _figures(place: str) -> Figures:
    """The figures of a mount or of a Slurm job. Raises NotMountedError, MonarchError."""
    if place.isdecimal() and place.isascii() and not os.path.exists(place):
        return _of_job(place)
    try:
        record = Registry(state_root()).find(Path(place))
    except NotMountedError:
        return _of_ended(Path(place))
    return _asked(record) if alive(record) else _kept(Path(record.state))


def _of_ended(place: Path) -> Figures:
    """The figures of the last mount at ``place``, or with this state directory."""
    state = last_state(place)
    if os.path.abspath(place) == os.fspath(state):
        return _kept(state)
    # Several sources may have been mounted there, one after the other.
    mountpoint = read_note(state).mountpoint
    there = [each for each in _all() if each.status.mountpoint == mountpoint]
    return max(there, key=lambda each: each.until_ns) if there else _kept(state)


def _asked(record: MountRecord) -> Figures:
    return ask(record, "figures", {}, answer=Figures)


def _kept(state: Path) -> Figures:
    """The figures that the last mount left in its state directory."""
    where = escape_text(os.fspath(state))
    try:
        found = read_figures(state)
    except ValueError as error:
        raise MonarchError(
            f"the figures in {where} cannot be read: {error}",
            hint="use the version of Monarch that has mounted",
        ) from error
    if found is None:
        raise NotMountedError(
            f"{where} has no figures: no mount has ended there in an orderly way",
            hint="a daemon that was killed leaves none; `monarch status` lists the mounts",
        )
    return found


def _of_job(job: str) -> Figures:
    found = [each for each in _all() if each.job == job]
    if not found:
        raise NotMountedError(
            f"no mount of Slurm job {job} is known on this node",
            hint="name the mount or its state directory",
        )
    if len(found) > 1:
        places = ", ".join(escape_text(each.status.mountpoint) for each in found)
        raise UsageError(
            f"Slurm job {job} has {len(found)} mounts: {places}", hint="name one of them"
        )
    return found[0]


def _all() -> Iterator[Figures]:
    """The figures of all mounts of this user, and of those that have ended."""
    registry = Registry(state_root())
    served = set()
    for record in registry.all():
        with suppress(MonarchError):
            if alive(record):
                yield _asked(record)
                served.add(record.state)
    root = state_root()
    for state in sorted(root.iterdir()) if root.is_dir() else ():
        # What cannot be read belongs to another user or to no mount.
        with suppress(OSError, ValueError):
            found = None if os.fspath(state) in served else read_figures(state)
            if found is not None:
                yield found
