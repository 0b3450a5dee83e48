"""``monarch warm``: bring files into the tiers before a job needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from monarch.cli.ask import ask, inside
from monarch.cli.output import emit_json, progress_bar, stderr, stdout
from monarch.places import state_root
from monarch.registry import Registry
from monarch.report import WarmProgress, WarmReport
from monarch.units import format_bytes

INTERRUPTED = 130


@click.command(
    epilog="""\b
Examples:
  monarch warm /mnt/data --wait
  monarch warm /mnt/data train val/index
"""
)
@click.argument("mountpoint", type=click.Path(path_type=Path))
@click.argument("paths", nargs=-1, type=click.Path(), metavar="[PATH]...")
@click.option("--wait", is_flag=True, help="Wait, with a progress bar, until all are resident.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object.")
def warm(mountpoint: Path, paths: tuple[str, ...], wait: bool, as_json: bool) -> int:
    """Copy files into the tiers before a job starts.

    PATHs are files and directories inside the mount, or relative to it; without any, everything.
    The copies are made in the background, no more than fit. Ctrl-C ends the waiting, not the
    copies. The exit code is 1 if something waited for did not fit or could not be copied.
    """
    record = Registry(state_root()).find(mountpoint)
    params = {"paths": inside(record, paths), "wait": wait}
    try:
        with progress_bar(quiet=not wait) as advance:

            def on_progress(raw: dict[str, Any]) -> None:
                at = WarmProgress.from_dict(raw)
                amount = f"{format_bytes(at.bytes_done)} of {format_bytes(at.bytes_total)}"
                advance(at.done, at.total, f"warming, {amount}; files")

            # Walking a large tree and copying a large file both take their time.
            report = ask(
                record,
                "warm",
                params,
                answer=WarmReport,
                timeout=None,
                on_progress=on_progress,
            )
    except KeyboardInterrupt:
        stderr().print("the copies go on; `monarch status MOUNTPOINT` shows them", markup=False)
        return INTERRUPTED
    if as_json:
        emit_json(report.to_dict())
    else:
        stdout().print(_told(report, wait=wait), markup=False, soft_wrap=True)
    return 1 if wait and report.refused else 0


def _told(report: WarmReport, *, wait: bool) -> str:
    asked = f"{report.files:,} files, {format_bytes(report.bytes)}"
    if not wait:
        return f"{asked}: copying in the background; `monarch status MOUNTPOINT` shows how far"
    resident = f"{asked}: {report.files - report.refused:,} resident"
    if not report.refused:
        return resident
    return f"{resident}; {report.refused:,} are not: the tiers are full, or the log says why"
