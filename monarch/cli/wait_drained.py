"""Waiting until written files are at the source, and the words for it; shared by the verbs.

Nothing here changes data: an interrupt or a timeout leaves everything unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from monarch.cli.output import age, progress_bar
from monarch.control.registry import MountRecord
from monarch.text import counted, escape_text
from monarch.units import format_bytes, parse_seconds

if TYPE_CHECKING:
    from monarch.telemetry.report import DrainReport

# The daemon reports progress several times a second; after this silence it counts as hanging.
SILENCE_S = 30.0


def seconds(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """The callback of an option whose value is a duration such as 30s or 10m."""
    try:
        return None if value is None else parse_seconds(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def drain(
    record: MountRecord,
    params: Mapping[str, Any],
    *,
    timeout_s: float | None,
    quiet: bool,
    silence_s: float = SILENCE_S,
) -> DrainReport:
    """Waits, with a progress bar, until all files are at the source, or ``timeout_s`` has passed.

    None is no limit. Raises NotMountedError if the daemon is dead or ends meanwhile, MonarchError
    if
    it is silent for ``silence_s``.
    """
    # Imported here to save time: a mount that is only read has nothing to drain.
    from monarch.cli.daemon_call import ask
    from monarch.telemetry.report import DrainProgress, DrainReport

    with progress_bar(quiet=quiet, of_bytes=True) as advance:

        def on_progress(raw: dict[str, Any]) -> None:
            at = DrainProgress.from_dict(raw)
            if not at.files_total and not at.trouble:
                return
            words = f"draining, {at.files_done:,} of {at.files_total:,} files"
            if at.trouble:
                words += f" ({at.trouble})"
            advance(at.bytes_done, at.bytes_total, words)

        return ask(
            record,
            "drain",
            {**params, "timeout": timeout_s},
            answer=DrainReport,
            timeout=silence_s,
            on_progress=on_progress,
        )


def waiting(report: DrainReport) -> str:
    """``3 files, 12 GiB, the oldest written 5 min ago, are not at the source: why``."""
    told = f"{counted(report.files, 'file', 'files')}, {format_bytes(report.bytes)}"
    if not report.files:
        told = "changes of names and attributes"
    if report.oldest_ns:
        told += f", the oldest written {age(report.oldest_ns)} ago,"
    verb = "is" if report.files == 1 else "are"
    why = f": {escape_text(report.trouble)}" if report.trouble else ""
    return f"{told} {verb} not at the source yet{why}"
