"""``monarch snapshot``: builds, shows, verifies, compares and refreshes snapshots."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from monarch.cli.daemon_call import JSON
from monarch.cli.output import Scanning, emit_json, escape, progress_bar, remark, show
from monarch.errors import UsageError
from monarch.namespace.build import build as build_snapshot
from monarch.namespace.compare import Difference
from monarch.namespace.compare import diff as diff_snapshots
from monarch.namespace.compare import verify as verify_snapshot
from monarch.namespace.refresh import refresh as refresh_snapshot
from monarch.namespace.schema import SnapshotSummary
from monarch.namespace.snapshot import Snapshot
from monarch.namespace.trailer import may_replace
from monarch.posix.signals import interruptible
from monarch.text import counted, escape_text, format_bytes
from monarch.types import Progress

_DIFFERENT = 1

_FILE = click.Path(path_type=Path, dir_okay=False)
_SOURCE = click.Path(path_type=Path)
_JOBS = click.option(
    "-j",
    "--jobs",
    type=click.IntRange(1, 1024),
    default=32,
    show_default=True,
    metavar="N",
    help="Maximum number of concurrent calls to the source.",
)
_QUIET = click.option("-q", "--quiet", is_flag=True, help="Show no progress.")


def _file_mode(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """The mode of a file in octal."""
    if value is not None and re.fullmatch(r"(0o?)?[0-7]{3}", value) is None:
        raise click.BadParameter(f"{value!r} is no mode; give three octal digits such as 0644")
    return None if value is None else int(value[-3:], 8)


@click.group()
def snapshot() -> None:
    """Build, show, verify or diff snapshots of the names and attributes of a source.

    A mount builds its snapshot itself. Build one by hand to share it between nodes, to choose the
    time of the scan, or to compare two states of the source.
    """


@snapshot.command()
@click.argument("source", type=_SOURCE)
@click.option(
    "-o", "--output", type=_FILE, required=True, metavar="FILE", help="The file to write."
)
@click.option("--one-file-system", is_flag=True, help="Do not enter other file systems.")
@click.option(
    "--mode",
    callback=_file_mode,
    metavar="MODE",
    help="The mode of FILE in octal, such as 0640 or 0644. Default: the mode of an existing FILE,"
    " else 0600.",
)
@_JOBS
@JSON
@_QUIET
def build(
    source: Path,
    output: Path,
    one_file_system: bool,
    mode: int | None,
    jobs: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Scan SOURCE and write its snapshot.

    No file is opened and no symbolic link followed. FILE is created or replaced only when the
    snapshot is complete. It has the names, sizes and owners of all files that you may list, also in
    directories that are closed to other users.

    \b
    Examples:
      monarch snapshot build /pfs/imagenet -o imagenet.snapshot
      monarch snapshot build /pfs/imagenet -o /pfs/shared/imagenet.snapshot --mode 0644
      monarch snapshot build /pfs/imagenet -o imagenet.snapshot -j 128
    """
    if not may_replace(output):
        raise UsageError(
            f"{_name(output)} exists and is not a snapshot",
            hint="remove it, or name another file",
        )
    with _scanning(source, output, quiet=quiet) as progress:
        made = build_snapshot(
            source,
            output,
            jobs=jobs,
            one_file_system=one_file_system,
            mode=mode,
            progress=progress,
        )
    speed = f"{made.entries / max(made.scan_seconds, 1e-3):,.0f} entries/s"
    line = f"{_name(output)}: {_counts(made)} in {made.scan_seconds:.1f} s ({speed})"
    show(_info_as_json(output, made), as_json, line)
    if not as_json:
        _warn_unreadable(made)


@snapshot.command()
@click.argument("file", type=_FILE)
@JSON
def info(file: Path, as_json: bool) -> None:
    """Show the properties of the snapshot FILE.

    \b
    Example:
      monarch snapshot info imagenet.snapshot --json | jq .files
    """
    with Snapshot.open(file) as opened:
        summary = opened.info()
    created = datetime.fromtimestamp(summary.created_ns / 1e9, tz=timezone.utc).astimezone()
    rows = [
        ("source", escape(summary.source)),
        ("built", f"{created:%Y-%m-%d %H:%M:%S %z} in {summary.scan_seconds:.1f} s"),
        ("identity", summary.id),
        ("entries", f"{summary.entries:,}"),
        ("files", f"{summary.files:,}"),
        ("directories", f"{summary.directories:,}"),
        ("symbolic links", f"{summary.symlinks:,}"),
        ("hard links", f"{summary.aliases:,} further names"),
        ("others", f"{summary.others:,}"),
        ("unreadable", f"{summary.unreadable:,}"),
        ("bytes", f"{summary.bytes_total:,} ({format_bytes(summary.bytes_total)})"),
        ("largest file", format_bytes(summary.largest)),
        ("median file", f"below {format_bytes(_median_bound(summary))}"),
        ("this file", format_bytes(file.stat().st_size)),
    ]
    lines = (f"{label:15} {value}" for label, value in rows)
    show(_info_as_json(file, summary), as_json, *lines)
    if not as_json:
        _warn_unreadable(summary)


@snapshot.command()
@click.argument("source", type=_SOURCE)
@click.argument("file", type=_FILE)
@click.option(
    "--sample",
    type=click.IntRange(1),
    metavar="N",
    help="Check N random entries, the other names of their directories, and their own names.",
)
@_JOBS
@JSON
@_QUIET
def verify(
    source: Path, file: Path, sample: int | None, jobs: int, as_json: bool, quiet: bool
) -> int:
    """Report how SOURCE differs from the snapshot FILE. Exit code 1: it differs.

    \b
    Examples:
      monarch snapshot verify /pfs/imagenet imagenet.snapshot
      monarch snapshot verify /pfs/imagenet imagenet.snapshot --sample 1000
    """
    with Snapshot.open_checked(file) as opened, progress_bar(quiet=quiet) as progress:
        found = verify_snapshot(source, opened, sample=sample, jobs=jobs, progress=progress)
    return _show_differences(found, as_json=as_json)


@snapshot.command()
@click.argument("before", metavar="A", type=_FILE)
@click.argument("after", metavar="B", type=_FILE)
@JSON
def diff(before: Path, after: Path, as_json: bool) -> int:
    """Report the changes from snapshot A to snapshot B. Exit code 1: there are changes.

    \b
    Example:
      monarch snapshot diff monday.snapshot tuesday.snapshot
    """
    with Snapshot.open_checked(before) as old, Snapshot.open_checked(after) as new:
        return _show_differences(diff_snapshots(old, new), as_json=as_json)


@snapshot.command()
@click.argument("source", type=_SOURCE)
@click.argument("file", type=_FILE)
@click.option(
    "--quick",
    is_flag=True,
    help="Check only directories: files that were written in place are missed.",
)
@_JOBS
@JSON
@_QUIET
def refresh(source: Path, file: Path, quick: bool, jobs: int, as_json: bool, quiet: bool) -> None:
    """Bring the snapshot FILE up to date with SOURCE.

    Directories whose times have not changed are not listed again; their entries are checked.
    Running mounts keep their names: the next mount with FILE has the new ones. `monarch mount
    --refresh` does the same for the snapshot of a mount, and the setting `snapshot.freshness` says
    when a mount checks for changes itself.

    \b
    Examples:
      monarch snapshot refresh /pfs/imagenet imagenet.snapshot
      monarch snapshot refresh /pfs/imagenet imagenet.snapshot --quick
    """
    with _scanning(source, file, quiet=quiet) as progress:
        report = refresh_snapshot(source, file, jobs=jobs, quick=quick, progress=progress)
    show(
        {**asdict(report), "info": _info_as_json(file, report.info)},
        as_json,
        f"{_name(file)}: {_counts(report.info)}; {report.added:,} added,"
        f" {report.removed:,} removed, {report.changed:,} changed",
        f"{counted(report.unlisted, 'directory', 'directories')} not listed again,"
        f" {counted(report.reused, 'entry', 'entries')} not checked,"
        f" {report.info.scan_seconds:.1f} s",
    )
    if not as_json:
        _warn_unreadable(report.info)


@contextmanager
def _scanning(source: Path, file: Path, *, quiet: bool) -> Iterator[Progress]:
    """Shows the progress of a scan that writes ``file``, and what an interrupt leaves."""
    scanning = Scanning(source)
    try:
        with interruptible(), progress_bar(quiet=quiet) as scanning.bar:
            yield scanning
    except KeyboardInterrupt:
        remark(f"monarch: interrupted: {_name(file)} is unchanged; {scanning.interrupted()}")
        raise


def _show_differences(found: Iterable[Difference], *, as_json: bool) -> int:
    if as_json:
        differences = list(found)
        emit_json(differences)
        return _DIFFERENT if differences else 0
    counts: Counter[str] = Counter()
    for difference in found:
        counts[difference.kind] += 1
        what = f"  ({difference.what})" if difference.what else ""
        click.echo(f"{difference.kind:13} {escape(difference.path) or '.'}{what}")
    if not counts:
        click.echo("no difference")
        return 0
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))
    remark(f"{counted(counts.total(), 'difference', 'differences')}: {kinds}")
    return _DIFFERENT


def _name(file: Path) -> str:
    return escape_text(str(file))


def _info_as_json(file: Path, summary: SnapshotSummary) -> dict[str, Any]:
    return {"file": os.fsencode(file), **asdict(summary), "snapshot_bytes": file.stat().st_size}


def _counts(summary: SnapshotSummary) -> str:
    files = counted(summary.files, "file", "files")
    directories = counted(summary.directories, "directory", "directories")
    return f"{files}, {directories}, {format_bytes(summary.bytes_total)}"


def _warn_unreadable(summary: SnapshotSummary) -> None:
    if not summary.unreadable:
        return
    unread = counted(summary.unreadable, "entry", "entries")
    click.echo(f"{unread} could not be read; opening fails there:", err=True)
    for path in summary.unreadable_paths:
        click.echo(f"  {path}", err=True)
    if summary.unreadable > len(summary.unreadable_paths):
        click.echo("  ...", err=True)


def _median_bound(summary: SnapshotSummary) -> int:
    seen = 0
    for bits, count in summary.sizes:
        seen += count
        if seen * 2 >= summary.files:
            return 1 << bits
    return 0
