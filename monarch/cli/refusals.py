"""The verbs of ``monarch ckpt`` for what the source refuses, or others have changed there."""

from __future__ import annotations

from pathlib import Path

import click

from monarch.cli.daemon_call import ask, inside
from monarch.cli.options import JSON, MOUNT, PATH
from monarch.cli.output import emit_json, say
from monarch.cli.wait_drained import SILENCE_S
from monarch.config.defaults import state_root
from monarch.control.registry import Registry
from monarch.telemetry.report import ConflictsReport, RefusalsReport
from monarch.text import counted, escape_text

_WRONG = 1


@click.command(
    epilog="""\b
Examples:
  monarch ckpt conflicts /mnt/data
  monarch ckpt conflicts /mnt/data --acknowledge
"""
)
@MOUNT
@click.option(
    "--acknowledge", is_flag=True, help="Mark the conflicts as known: `monarch status` is ok again."
)
@JSON
def conflicts(mountpoint: Path, acknowledge: bool, as_json: bool) -> int:
    """Show files that were written here and that other processes changed at the source as well.

    The source keeps the version of the others. The version written here is kept beside it, under
    the name after "kept as". Only the last conflicts of this mount are shown. The exit code is 1 if
    there are conflicts that are not acknowledged.
    """
    record = Registry(state_root()).find(mountpoint)
    params = {"acknowledge": acknowledge}
    report = ask(record, "conflicts", params, answer=ConflictsReport, timeout=SILENCE_S)
    if as_json:
        emit_json(report.to_dict())
    else:
        for each in report.conflicts:
            kept = f"; kept as {each.kept}" if each.kept else ""
            told = escape_text(f"{each.path}: {each.why}{kept}")
            say(told)
        if not report.conflicts:
            say("no conflicts")
    return _WRONG if report.conflicts and not report.acknowledged else 0


@click.command(
    name="set-aside",
    epilog="""\b
Examples:
  monarch ckpt set-aside /mnt/data
  monarch ckpt set-aside /mnt/data ckpt/new
  monarch ckpt set-aside /mnt/data --json | jq -r '.refused[].path'
""",
)
@MOUNT
@PATH
@JSON
def set_aside(mountpoint: Path, path: str | None, as_json: bool) -> int:
    """Show the changes that the source refuses, or let other changes overtake those of PATH.

    A refused change delays all later changes of the same user. A change that is set aside only
    delays changes that depend on its path or file. A change is set aside automatically after eight
    tries and ten minutes. It is kept, is tried again every minute, and stays set aside after
    unmount and mount. A change that the source refuses at PATH later is not set aside. The exit
    code is 1 if the source refuses any change.
    """
    if path is None:
        return _tell_refused(_asked(mountpoint, "refused", None, SILENCE_S), as_json=as_json)
    return _tell_refused(_asked(mountpoint, "set-aside", path), as_json=as_json)


@click.command(
    epilog="""\b
Examples:
  monarch ckpt retry /mnt/data
  monarch ckpt retry /mnt/data ckpt/new && echo taken
"""
)
@MOUNT
@PATH
@JSON
def retry(mountpoint: Path, path: str | None, as_json: bool) -> int:
    """Try again now the changes that the source refused: those of PATH, or all.

    The exit code is 0 if the source accepted them, 1 if it refuses one again, and 13 if it does not
    answer within a minute; then they are tried when the source answers.
    """
    return _tell_refused(_asked(mountpoint, "retry", path), as_json=as_json)


@click.command(
    epilog="""\b
Examples:
  cp -r /mnt/data/ckpt/new /scratch/ && monarch ckpt discard /mnt/data ckpt/new
"""
)
@MOUNT
@click.argument("path", type=click.Path(), metavar="PATH")
@JSON
def discard(mountpoint: Path, path: str, as_json: bool) -> None:
    """Discard the changes that the source refuses at PATH and beneath it. This cannot be undone.

    Files created there on the mount are removed with their bytes; one with another name elsewhere
    keeps that name and the bytes. A file that the source has is shown as it is there. Nothing is
    changed at the source. The exit code is 2 if no change is refused there, or if a file there is a
    file of the source under another name; 10 if a file is open; 13 if the source does not answer
    within a minute.
    """
    report = _asked(mountpoint, "discard", path)
    if as_json:
        emit_json(report.to_dict())
        return
    for name in report.removed:
        say(f"removed on the mount: {escape_text(name)}")
    words = counted(len(report.refused), "change is", "changes are")
    say(f"given up; {words} still refused" if report.refused else "given up")


def _asked(
    mountpoint: Path, verb: str, path: str | None, timeout: float | None = None
) -> RefusalsReport:
    """The answer of the daemon, which bounds the time of its calls to the source."""
    record = Registry(state_root()).find(mountpoint)
    params = {} if path is None else {"path": inside(record, [path])[0]}
    return ask(record, verb, params, answer=RefusalsReport, timeout=timeout)


def _tell_refused(report: RefusalsReport, *, as_json: bool) -> int:
    """Prints the refused changes; returns the exit code."""
    if as_json:
        emit_json(report.to_dict())
    elif not report.refused:
        say("the source refuses nothing")
    else:
        for each in report.refused:
            how = "set aside" if each.aside else "holds up its user"
            tries = counted(each.tries, "try", "tries")
            say(escape_text(f"{each.path}: {each.kind}: {each.why} ({how}, {tries})"))
    return _WRONG if report.refused else 0
