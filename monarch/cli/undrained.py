"""The verbs of ``monarch ckpt`` for written data that is lost, or in conflict with or refused by
the source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from monarch.cli.daemon_call import JSON, MOUNT, PATH, SILENCE_S, ask, inside, mount_of
from monarch.cli.output import age, say, show
from monarch.cli.written_files import copy_to_new, or_unchanged
from monarch.control.registry import MountRecord
from monarch.errors import TierError, UsageError
from monarch.posix.files import closing_fd
from monarch.posix.private_directory import open_private
from monarch.telemetry.report import ConflictsReport, KeptReport, LostReport, RefusalsReport
from monarch.text import counted, escape_text, format_bytes

_WRONG = 1


@click.command(
    epilog="""\b
Examples:
  monarch ckpt lost /mnt/data
  monarch ckpt lost /mnt/data --recover ckpt/step-100 --to /scratch/step-100
  monarch ckpt lost /mnt/data --discard ckpt/step-100
  monarch ckpt lost /mnt/data --acknowledge
"""
)
@MOUNT
@click.option(
    "--acknowledge", is_flag=True, help="Mark the loss as known: `monarch status` is ok again."
)
@click.option(
    "--recover",
    metavar="PATH|NUMBER",
    help="Copy the kept bytes of this file to FILE of --to; of several versions, the newest.",
)
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file that --recover writes; it must not exist.",
)
@click.option("--discard", metavar="PATH|NUMBER", help="Delete the kept bytes of this file.")
@click.option("--discard-all", is_flag=True, help="Delete all kept bytes.")
@JSON
def lost(
    mountpoint: Path,
    acknowledge: bool,
    recover: str | None,
    to: Path | None,
    discard: str | None,
    discard_all: bool,
    as_json: bool,
) -> int:
    """Show written files whose bytes were lost, and the bytes that remain of them.

    A power cut loses data that was never fsynced; a failing disk can lose more. The source still
    has the version from before the write. Bytes that survived are kept in the tier, complete or
    not: --recover copies them, --discard deletes them. Files that this mount cannot show and writes
    to the source are listed as well. The exit code is 1 if lost files are not acknowledged.
    """
    if (recover is None) != (to is None):
        raise UsageError("--recover needs --to, and --to needs --recover")
    record = mount_of(mountpoint)
    params: dict[str, Any] = {"acknowledge": acknowledge}
    report = _ask_lost(record, params)
    if recover is not None and to is not None:
        kept = _kept_of(report, record, recover)[-1]
        count = _recover(kept, to)
        if not as_json:
            say(f"{format_bytes(count)} of {_kept_name(kept)} are in {escape_text(os.fspath(to))}")
    if discard_all:
        params["discard_all"] = True
    if discard is not None:
        params["discard"] = [kept.number for kept in _kept_of(report, record, discard)]
    if discard_all or discard is not None:
        # No timeout: the removal of large files may take long.
        report = _ask_lost(record, params, timeout=None)
    if as_json or recover is None:
        hidden = "not shown, waits to be written to the source: "
        lines = [
            *map(escape_text, report.files),
            *map(_kept_line, report.kept),
            *(f"{hidden}{escape_text(name)}" for name in report.hidden),
        ]
        show(report, as_json, *(lines or ["nothing is lost"]))
    return _WRONG if report.files and not report.acknowledged else 0


def _ask_lost(
    record: MountRecord, params: dict[str, Any], timeout: float | None = SILENCE_S
) -> LostReport:
    """The answer of the daemon, which comes in parts."""
    parts: list[LostReport] = []
    last = ask(
        record,
        "lost",
        params,
        answer=LostReport,
        timeout=timeout,
        on_progress=lambda raw: parts.append(LostReport.from_dict(raw)),
    )
    parts.append(last)
    return LostReport(
        files=[name for part in parts for name in part.files],
        acknowledged=last.acknowledged,
        kept=[kept for part in parts for kept in part.kept],
        hidden=[name for part in parts for name in part.hidden],
    )


def _kept_line(kept: KeptReport) -> str:
    short = f" of {format_bytes(kept.recorded)}" if kept.recorded > kept.size else ""
    size = f"{format_bytes(kept.size)}{short}"
    when = f"written {age(kept.written_ns)} ago, lost {age(kept.found_ns)} ago"
    return f"kept: {kept.number}  {_kept_name(kept)}  {size}, {when}"


def _kept_name(kept: KeptReport) -> str:
    return escape_text(kept.path) or "a file whose name is not known"


def _kept_of(report: LostReport, record: MountRecord, wanted: str) -> list[KeptReport]:
    """The kept versions of a file, by its path or number, the oldest first. Raises UsageError."""
    (path,) = inside(record, [wanted])
    # A file whose name is not known has an empty path, as the root of the mount.
    named = [kept for kept in report.kept if kept.path == path != ""]
    numbered = [kept for kept in report.kept if str(kept.number) == wanted]
    if named and numbered and named != numbered:
        raise UsageError(
            f"{escape_text(wanted)} is the path of one kept file and the number of another",
            hint=f"name the path as ./{escape_text(wanted)}; the number is free without that file",
        )
    found = named or numbered
    if not found:
        hint = f"`monarch ckpt lost {escape_text(record.mountpoint)}` lists what is kept"
        raise UsageError(f"nothing is kept of {escape_text(wanted)}", hint=hint)
    return found


def _recover(kept: KeptReport, to: Path) -> int:
    """Copy kept bytes to a new file; returns their number. Raises UsageError, TierError."""
    try:
        content = open_private(kept.file, os.O_RDONLY)
    except OSError as error:
        words = f"{escape_text(kept.file)}: {error.strerror}"
        raise TierError(words, hint="run this command as the user of the daemon") from error
    with closing_fd(content):
        try:
            with or_unchanged(to):
                return copy_to_new(content, to)
        except OSError as error:
            raise UsageError(
                f"{escape_text(os.fspath(to))} is not made: {error.strerror}",
                hint=f"name with --to a new file where there is space; if {escape_text(kept.file)}"
                " cannot be read, `dmesg` names its disk",
            ) from error


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
    record = mount_of(mountpoint)
    report = ask(record, "conflicts", {"acknowledge": acknowledge}, answer=ConflictsReport)
    lines = [
        f"{each.path}: {each.why}" + (f"; kept as {each.kept}" if each.kept else "")
        for each in report.conflicts
    ]
    show(report, as_json, *(map(escape_text, lines) if lines else ["no conflicts"]))
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
    unmount and mount. A change that the source refuses at PATH later is not set aside. While the
    source accepts no change at all (it is full, read-only, or does not answer), none can be set
    aside: the order of the changes is kept. The exit code is 1 if the source refuses any change.
    """
    if path is None:
        return _show_refused(_asked(mountpoint, "refused", None, SILENCE_S), as_json)
    return _show_refused(_asked(mountpoint, "set-aside", path), as_json)


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
    """Try again now all changes that the source refused; with PATH, show only those of PATH.

    The exit code is 0 if the source refuses none that are shown any more, 1 if it refuses one
    again, and 13 if it does not answer within a minute; then they are tried when the source
    answers.
    """
    where = "" if path is None else f" at {escape_text(path)}"
    return _show_refused(_asked(mountpoint, "retry", path), as_json, where)


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

    Files created there on the mount are removed with their bytes, as by rm, also while they are
    open; one with another name elsewhere keeps that name and the bytes. A file that the source has
    is shown as it is there. Nothing is changed at the source. The exit code is 2 if no change is
    refused there, or if a file there is a file of the source under another name; 10 if a file that
    the source has is open; 13 if the source does not answer within a minute.
    """
    report = _asked(mountpoint, "discard", path)
    removed = [f"removed on the mount: {escape_text(name)}" for name in report.removed]
    still = counted(len(report.refused), "change is", "changes are")
    last = f"given up; {still} still refused" if report.refused else "given up"
    show(report, as_json, *removed, last)


def _asked(
    mountpoint: Path, verb: str, path: str | None, timeout: float | None = None
) -> RefusalsReport:
    """The answer of the daemon, which bounds the time of its calls to the source."""
    record = mount_of(mountpoint)
    params = {} if path is None else {"path": inside(record, [path])[0]}
    return ask(record, verb, params, answer=RefusalsReport, timeout=timeout)


def _show_refused(report: RefusalsReport, as_json: bool, where: str = "") -> int:
    """Prints the refused changes; returns the exit code. ``where`` names the path that the report
    is limited to, after a preposition."""
    lines = []
    if report.stopped:
        changes = counted(report.waiting, "change waits", "changes wait")
        lines.append(f"{escape_text(report.stopped)}; {changes}")
    for each in report.refused:
        how = "set aside" if each.aside else "holds up its user"
        tries = counted(each.tries, "try", "tries")
        lines.append(escape_text(f"{each.path}: {each.kind}: {each.why} ({how}, {tries})"))
    show(report, as_json, *(lines or [f"the source refuses nothing{where}"]))
    return _WRONG if report.refused or report.stopped else 0
