"""``monarch warm``: copies files into the tiers before a job needs them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import click

from monarch.cli import complete
from monarch.cli.daemon_call import INTERRUPTED, JSON, PATHS, ask, mount_and_paths, mount_of
from monarch.cli.output import progress_bar, remark, show
from monarch.control.messages import MAX_LINE_BYTES
from monarch.errors import UsageError
from monarch.telemetry.report import WarmCancelled, WarmProgress, WarmReport
from monarch.text import counted, escape_text, format_bytes

# The size of one request. JSON may use six characters for one byte of a name.
_BATCH_BYTES = MAX_LINE_BYTES // 8


@click.command(
    epilog="""\b
Examples:
  monarch warm /mnt/data --wait
  monarch warm /mnt/data train val/index
  head -1000 order.txt | monarch warm /mnt/data --files-from -
  monarch warm /mnt/data --cancel
"""
)
@click.argument("mountpoint", type=click.Path(path_type=Path), shell_complete=complete.mount_points)
@PATHS
@click.option(
    "--files-from",
    type=click.File("rb"),
    metavar="FILE",
    help="Read further PATHs from the lines of FILE; - is the standard input.",
)
@click.option("--wait", is_flag=True, help="Wait, with a progress bar, until all are resident.")
@click.option("--cancel", is_flag=True, help="Stop all earlier requests of `monarch warm`.")
@JSON
def warm(
    mountpoint: Path,
    paths: tuple[str, ...],
    files_from: IO[bytes] | None,
    wait: bool,
    cancel: bool,
    as_json: bool,
) -> int:
    """Copy files into the tiers before a job starts.

    PATHs are files and directories inside the mount, or relative to it; without PATH, all files. A
    PATH inside the mount can be given without MOUNTPOINT. The copies are made in the background, as
    many as fit; `monarch status MOUNTPOINT` shows the progress. Ctrl-C ends only the waiting;
    --cancel ends the copies. The exit code is 1 if a file did not fit, could not be copied, or was
    cancelled while the command waited.
    """
    if cancel:
        record = mount_of(mountpoint)
        if paths or files_from is not None or wait:
            raise UsageError("--cancel stops all requests", hint="give it without --wait and paths")
        stopped = ask(record, "warm", {"cancel": True}, answer=WarmCancelled, timeout=10.0)
        calls = counted(stopped.cancelled, "call", "calls")
        show(stopped, as_json, f"{calls} of `monarch warm` stopped")
        return 0
    listed = [*paths, *_lines(files_from)]
    if not listed and files_from is not None:
        raise UsageError("--files-from names no file", hint="one path a line")
    record, relative = mount_and_paths(mountpoint, listed)
    report = WarmReport(0, 0, 0)
    try:
        with progress_bar(quiet=not wait, of_bytes=True) as advance:

            def on_progress(raw: dict[str, Any]) -> None:
                """Shows the progress over all requests; ``report`` sums those already answered."""
                at = WarmProgress.from_dict(raw)
                files = counted(report.files + at.total, "file", "files")
                words = f"warming, {report.files + at.done:,} of {files}"
                advance(report.bytes + at.bytes_done, report.bytes + at.bytes_total, words)

            for batch in _batches(relative):
                # No timeout: a large tree or a large file may take long.
                answer = ask(
                    record,
                    "warm",
                    {"paths": batch, "wait": wait},
                    answer=WarmReport,
                    timeout=None,
                    on_progress=on_progress,
                )
                report = replace(
                    answer,
                    files=report.files + answer.files,
                    bytes=report.bytes + answer.bytes,
                    refused=report.refused + answer.refused,
                )
                if answer.cancelled:
                    break
    except KeyboardInterrupt:
        where = escape_text(record.mountpoint)
        remark(
            f"the copies continue; `monarch status {where}` shows them, and `monarch warm {where}"
            " --cancel` stops them"
        )
        return INTERRUPTED
    show(report, as_json, _outcome(report, wait=wait))
    return 1 if wait and (report.refused or report.cancelled) else 0


def _lines(file: IO[bytes] | None) -> Iterator[str]:
    for line in file or ():
        if path := line.rstrip(b"\r\n"):
            yield os.fsdecode(path)


def _batches(paths: Sequence[str]) -> Iterator[list[str]]:
    """The paths in lists that each fit into one request."""
    batch: list[str] = []
    room = _BATCH_BYTES
    for path in paths:
        room -= len(os.fsencode(path)) + 4
        if room < 0 and batch:
            yield batch
            batch, room = [], _BATCH_BYTES
        batch.append(path)
    yield batch


def _outcome(report: WarmReport, *, wait: bool) -> str:
    asked = f"{counted(report.files, 'file', 'files')}, {format_bytes(report.bytes)}"
    if not wait:
        return f"{asked}: copying in the background; `monarch status MOUNTPOINT` shows the progress"
    if report.cancelled:
        return f"{asked}: stopped by `monarch warm --cancel`"
    resident = f"{asked}: {report.files - report.refused:,} resident"
    if not report.refused:
        return resident
    why = "the tiers are full, a rule excludes them, or see the log"
    return f"{resident}; {report.refused:,} are not: {why}"
