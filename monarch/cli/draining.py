"""What the verbs share that wait until written files are at the source: the waiting, and its words.

Nothing here changes what is written: who is interrupted, or gives up, leaves all as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from monarch.cli.output import age, progress_bar
from monarch.registry import MountRecord
from monarch.text import counted, escape_text
from monarch.units import format_bytes, parse_seconds

if TYPE_CHECKING:
    from monarch.report import DrainReport

# The daemon tells several times a second how far it is; this long without a word, it hangs.
SILENCE_S = 30.0


def seconds(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """A callback of an option whose value is written like 30s or 10m."""
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
    """Wait until all is at the source, with a bar, or for ``timeout_s``; None: as long as it takes.

    A daemon that says nothing for ``silence_s`` hangs.

    Raises NotMountedError if the daemon is dead or ends meanwhile, MonarchError if it is silent.
    """
    # Imported here: a mount that is only read has nothing to drain when it is unmounted.
    from monarch.cli.ask import ask
    from monarch.report import DrainProgress, DrainReport

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
