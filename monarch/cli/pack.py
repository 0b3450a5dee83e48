"""``monarch pack``: puts a tree of small files into large chunks, and works on packs."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from monarch.cli.daemon_call import INTERRUPTED, JSON
from monarch.cli.output import escape, progress_bar, remark, show
from monarch.errors import SourceError
from monarch.packs.build import BuildReport, Parameters
from monarch.packs.build import build as build_pack
from monarch.packs.pack import Pack, PackSummary
from monarch.posix.signals import interruptible
from monarch.text import counted, escape_text, format_bytes, parse_bytes

_PACK = click.argument("pack", type=click.Path(path_type=Path))
_DIRECTORY = click.Path(path_type=Path)
_QUIET = click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
_JOBS = click.option(
    "-j",
    "--jobs",
    type=click.IntRange(1, 256),
    default=16,
    show_default=True,
    metavar="N",
    help="Maximum number of files that are read at once.",
)


class _WithBuild(click.Group):
    """A group whose command ``build`` may be left out: ``monarch pack SOURCE -o DIRECTORY``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["build", *args]
        return super().parse_args(ctx, args)


def _size(context: click.Context, parameter: click.Parameter, value: str) -> int:
    try:
        size = parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if not 4096 <= size <= 1 << 40:
        raise click.BadParameter("give a size from 4KiB to 1TiB")
    return size


@click.group(cls=_WithBuild)
def pack() -> None:
    """Put a tree of small files into large chunks, and work on such packs.

    `monarch pack SOURCE -o DIRECTORY` is short for `monarch pack build SOURCE -o DIRECTORY`. A
    SOURCE that has the name of a command is written ./NAME.
    """


@pack.command()
@click.argument("source", type=_DIRECTORY)
@click.option(
    "-o",
    "--output",
    type=_DIRECTORY,
    required=True,
    metavar="DIRECTORY",
    help="The pack to write: a new or empty directory, or one with an unfinished pack.",
)
@click.option(
    "--chunk",
    default="16MiB",
    show_default=True,
    metavar="SIZE",
    callback=_size,
    help="Bytes of the files of one chunk. A larger file is kept as a file of its own.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 64) - 1),
    default=0,
    show_default=True,
    metavar="N",
    help="The seed of the random order.",
)
@click.option(
    "--by",
    type=click.Choice(["random", "path"]),
    default="random",
    show_default=True,
    help="The order of the files in the chunks.",
)
@_JOBS
@JSON
@_QUIET
def build(
    source: Path,
    output: Path,
    chunk: int,
    seed: int,
    by: str,
    jobs: int,
    as_json: bool,
    quiet: bool,
) -> int:
    """Pack the tree SOURCE into DIRECTORY.

    The same tree, seed, order and chunk size give the same bytes. A run that was interrupted is
    continued by the same command: complete chunks are kept if their files have not changed. Files
    that cannot be read, or change meanwhile, are listed; there is no pack then, and the exit code
    is 4.

    \b
    Examples:
      monarch pack /pfs/imagenet -o /pfs/packs/imagenet
      monarch pack /pfs/imagenet -o /pfs/packs/imagenet --chunk 64MiB --seed 7 -j 64
    """
    name = escape_text(os.fspath(output))
    try:
        with interruptible(), progress_bar(quiet=quiet, of_bytes=True) as progress:
            report = build_pack(
                source, output, Parameters(seed, by, chunk), jobs=jobs, progress=progress
            )
    except KeyboardInterrupt:
        remark(f"monarch: interrupted: the same command continues the pack in {name}")
        return INTERRUPTED
    for failure in report.failures:
        remark(f"monarch: {escape_text(os.fspath(source))}/{escape(failure.path)}: {failure.what}")
    if report.pack is None:
        raise SourceError(
            f"{name}: no pack was made, because {_unread(report)}",
            hint="mend or remove what is listed above, and run the same command again: complete"
            " chunks are kept",
        )
    fields = asdict(report)
    show(fields, as_json, f"{name}: {_counts(report.pack)}", _speed(report))
    return 0


@pack.command()
@_PACK
@JSON
def info(pack: Path, as_json: bool) -> None:
    """Show the properties of PACK.

    \b
    Example:
      monarch pack info /pfs/packs/imagenet --json | jq .files
    """
    with Pack.open(os.fsencode(pack)) as opened:
        summary = opened.info
    rows: list[tuple[str, Any]] = [
        ("files", f"{summary.files:,}"),
        ("entries", f"{summary.entries:,}"),
        ("bytes", f"{summary.bytes:,} ({format_bytes(summary.bytes)})"),
        ("chunks", f"{summary.chunks:,} of up to {format_bytes(summary.chunk_bytes)}"),
        ("large files", f"{summary.large:,}"),
        ("order", f"{summary.order}, seed {summary.seed}"),
        ("identity", summary.identity),
    ]
    lines = (f"{label:15} {value}" for label, value in rows)
    show({"pack": os.fsencode(pack), **asdict(summary)}, as_json, *lines)


def _unread(report: BuildReport) -> str:
    return f"{counted(len(report.failures), 'entry', 'entries')} could not be read"


def _counts(summary: PackSummary) -> str:
    files = counted(summary.files, "file", "files")
    chunks = counted(summary.chunks, "chunk", "chunks")
    large = f" and {counted(summary.large, 'large file', 'large files')}" if summary.large else ""
    return f"{files}, {format_bytes(summary.bytes)}, in {chunks}{large}"


def _speed(report: BuildReport) -> str:
    speed = f"{format_bytes(report.bytes_read / max(report.seconds, 1e-3))}/s"
    read = f"{format_bytes(report.bytes_read)} read from the source in {report.seconds:.1f} s"
    kept = f"; {counted(report.kept_chunks, 'chunk', 'chunks')} kept" if report.kept_chunks else ""
    return f"{read} ({speed}){kept}"
