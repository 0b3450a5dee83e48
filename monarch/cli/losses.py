"""``monarch ckpt lost``: written files whose bytes were lost, and the bytes that remain."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import click

from monarch.cli.daemon_call import ask, inside
from monarch.cli.options import JSON, MOUNT
from monarch.cli.output import age, emit_json, say
from monarch.cli.wait_drained import SILENCE_S
from monarch.config.defaults import state_root
from monarch.control.registry import MountRecord, Registry
from monarch.errors import TierError, UsageError
from monarch.telemetry.report import KeptReport, LostReport
from monarch.text import escape_text
from monarch.units import MiB, format_bytes

_WRONG = 1
_COPY_BYTES = 8 * MiB


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
    record = Registry(state_root()).find(mountpoint)

    params: dict[str, Any] = {"acknowledge": acknowledge}
    report = ask(record, "lost", params, answer=LostReport, timeout=SILENCE_S)
    if recover is not None and to is not None:
        kept = _kept_of(report, record, recover)[-1]
        count = _recover(kept, to)
        if not as_json:
            say(f"{format_bytes(count)} of {_kept_name(kept)} are in {escape_text(os.fspath(to))}")
    given_up = report.kept if discard_all else []
    if discard is not None:
        given_up = _kept_of(report, record, discard)
    if given_up:
        params["discard"] = [kept.number for kept in given_up]
        # No timeout: the removal of large files may take long.
        report = ask(record, "lost", params, answer=LostReport, timeout=None)
    if as_json:
        emit_json(report.to_dict())
    elif recover is None:
        for name in report.files:
            say(escape_text(name))
        for kept in report.kept:
            short = f" of {format_bytes(kept.recorded)}" if kept.recorded > kept.size else ""
            when = f"written {age(kept.written_ns)} ago, lost {age(kept.found_ns)} ago"
            say(
                f"kept: {kept.number}  {_kept_name(kept)}  {format_bytes(kept.size)}{short}, {when}"
            )
        for name in report.hidden:
            say(f"not shown, waits to be written to the source: {escape_text(name)}")
        if not (report.files or report.kept or report.hidden):
            say("nothing is lost")
    return _WRONG if report.files and not report.acknowledged else 0


def _kept_name(kept: KeptReport) -> str:
    return escape_text(kept.path) or "a file whose name is not known"


def _kept_of(report: LostReport, record: MountRecord, wanted: str) -> list[KeptReport]:
    """The kept versions of a file, by its path or number, the oldest first. Raises UsageError."""
    found = [kept for kept in report.kept if str(kept.number) == wanted]
    if not found:
        (path,) = inside(record, [wanted])
        found = [kept for kept in report.kept if kept.path == path]
    if not found:
        hint = f"`monarch ckpt lost {escape_text(record.mountpoint)}` lists what is kept"
        raise UsageError(f"nothing is kept of {escape_text(wanted)}", hint=hint)
    return found


def _recover(kept: KeptReport, to: Path) -> int:
    """Copy kept bytes to a new file; returns their number. Raises UsageError, TierError."""
    try:
        source = os.open(kept.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        words = f"{escape_text(kept.file)}: {error.strerror}"
        raise TierError(words, hint="run this command as the user of the daemon") from error
    with open(source, "rb") as kept_file:
        try:
            with to.open("xb") as file:
                shutil.copyfileobj(kept_file, file, _COPY_BYTES)
                file.flush()
                os.fsync(file.fileno())
                return file.tell()
        except OSError as error:
            words = f"{escape_text(os.fspath(to))}: {error.strerror}"
            raise UsageError(
                words, hint="name with --to a new file where there is space"
            ) from error
