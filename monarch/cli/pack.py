"""``monarch pack``: puts a tree of small files into large chunks, and works on packs."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from monarch.cli.daemon_call import INTERRUPTED, JSON
from monarch.cli.output import escape, progress_bar, remark, show
from monarch.errors import SourceError
from monarch.order import chunkwise_order, distinct_labels
from monarch.packs import mixing
from monarch.packs.build import BuildReport, Parameters
from monarch.packs.build import build as build_pack
from monarch.packs.format import MOST_CHUNK
from monarch.packs.pack import Pack, PackSummary
from monarch.packs.rebuild import Damage
from monarch.packs.rebuild import rebuild as rebuild_pack
from monarch.packs.unpack import unpack as unpack_pack
from monarch.packs.verify import verify as verify_pack
from monarch.posix.signals import interruptible_at_once
from monarch.text import counted, escape_text, format_bytes, parse_bytes

_DAMAGED = 1
# The sizes of groups of chunks for which `info` shows figures.
_GROUPS = (1, 8, 40, 100)

# What may not be read is no mistake of the command line, and has an exit code of its own.
_DIRECTORY = click.Path(path_type=Path, readable=False)
_PACK = click.argument("pack", type=_DIRECTORY)
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
    if not 4096 <= size <= MOST_CHUNK:
        raise click.BadParameter("give a size from 4KiB to 1GiB")
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
        with interruptible_at_once(), progress_bar(quiet=quiet, of_bytes=True) as progress:
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
@click.option(
    "--batch",
    type=click.IntRange(2, 1 << 20),
    default=128,
    show_default=True,
    metavar="N",
    help="The size of a batch, for the figures of the mixing of labels.",
)
@JSON
def info(pack: Path, batch: int, as_json: bool) -> None:
    """Show the properties of PACK, and how well a chunk-wise order of it mixes labels.

    The order visits the chunks in groups of G, and shuffles the files inside a group; `all` is a
    shuffle of all files. `labels` is the mean number of distinct labels in a batch, and `shared`
    the probability that two files of a batch are in one chunk. The label of a file is the first
    directory of its path that not all files share.

    \b
    Examples:
      monarch pack info /pfs/packs/imagenet --batch 256
      monarch pack info /pfs/packs/imagenet --json | jq .mixing
    """
    with Pack.open(os.fsencode(pack)) as opened:
        opened.require_sound()
        summary = opened.info
        figures = _mixing(opened, batch)
    rows: list[tuple[str, str]] = [
        ("files", f"{summary.files:,}"),
        ("entries", f"{summary.entries:,}"),
        ("bytes", f"{summary.bytes:,} ({format_bytes(summary.bytes)})"),
        ("chunks", f"{summary.chunks:,} of up to {format_bytes(summary.chunk_bytes)}"),
        ("large files", f"{summary.large:,}"),
        ("order", f"{summary.order}, seed {summary.seed}"),
        ("identity", summary.identity),
    ]
    lines = [f"{label:15} {value}" for label, value in rows]
    fields = {"pack": os.fsencode(pack), **asdict(summary), "mixing": figures}
    show(fields, as_json, *lines, *_mixing_lines(figures))


@pack.command()
@_PACK
@_JOBS
@JSON
@_QUIET
def verify(pack: Path, jobs: int, as_json: bool, quiet: bool) -> int:
    """Read all files of PACK and compare them with their digests. Exit code 1: PACK is damaged.

    \b
    Example:
      monarch pack verify /pfs/packs/imagenet -j 32
    """
    with interruptible_at_once(), progress_bar(quiet=quiet, of_bytes=True) as progress:
        report = verify_pack(pack, jobs=jobs, progress=progress)
    read = f"{counted(report.files, 'file', 'files')}, {format_bytes(report.bytes)} read"
    damaged = counted(report.damaged, "fault", "faults")
    outcome = f"{read}: {damaged if report.damaged else 'nothing is wrong'}"
    show(report, as_json, *map(_damage_line, report.damage), outcome)
    return _DAMAGED if report.damaged else 0


@pack.command()
@_PACK
@click.option(
    "-o",
    "--output",
    type=_DIRECTORY,
    required=True,
    metavar="DIRECTORY",
    help="The tree to write: a new or empty directory.",
)
@click.option(
    "--set-id",
    is_flag=True,
    help="Set the set-user-ID and set-group-ID bits of files that belong to you.",
)
@JSON
@_QUIET
def unpack(pack: Path, output: Path, set_id: bool, as_json: bool, quiet: bool) -> int:
    """Write the original tree of PACK to DIRECTORY.

    DIRECTORY appears when all files are complete and their digests are right. Owners are set if
    you are root. Device files are left out.

    \b
    Example:
      monarch pack unpack /pfs/packs/imagenet -o /pfs/imagenet-again
    """
    name = escape_text(os.fspath(output))
    try:
        with interruptible_at_once(), progress_bar(quiet=quiet, of_bytes=True) as progress:
            report = unpack_pack(pack, output, set_id=set_id, progress=progress)
    except KeyboardInterrupt:
        remark(f"monarch: interrupted: nothing was written to {name}")
        return INTERRUPTED
    files = counted(report.files, "file", "files")
    show(report, as_json, f"{name}: {files}, {format_bytes(report.bytes)}")
    for path, what in report.left_out:
        remark(f"monarch: {name}/{escape(path)}: {what}")
    if report.incomplete > len(report.left_out):
        remark(f"monarch: and {report.incomplete - len(report.left_out):,} more")
    return 0


@pack.command()
@_PACK
@click.option("--rebuild", is_flag=True, help="Write the index again, from the chunks.")
@JSON
@_QUIET
def index(pack: Path, rebuild: bool, as_json: bool, quiet: bool) -> int:
    """Check the index of PACK, or write it again from the chunks.

    The new index has the same bytes as the first one. If a chunk is damaged, it is named and the
    exit code is 1; the index then lists the files of all other chunks. An index that is sound is
    not replaced by one that knows less.

    \b
    Example:
      monarch pack index --rebuild /pfs/packs/imagenet
    """
    if not rebuild:
        with Pack.open(os.fsencode(pack)) as opened:
            opened.require_sound()
            entries = counted(opened.info.entries, "entry", "entries")
            show(opened.info, as_json, f"{entries}: the index is sound")
        return 0
    with interruptible_at_once(), progress_bar(quiet=quiet) as progress:
        report = rebuild_pack(pack, progress=progress)
    if report.is_changed:
        outcome = "the index was written again"
    elif report.is_kept:
        outcome = "the index is sound and was kept: it lists the files of the damaged chunks, too"
    else:
        outcome = "the index is sound; nothing was changed"
    entries = counted(report.pack.entries, "entry", "entries")
    show(report, as_json, *map(_damage_line, report.damage), f"{entries}: {outcome}")
    return _DAMAGED if report.damage else 0


def _damage_line(damage: Damage) -> str:
    entry = f"{escape(damage.path)}: " if damage.path is not None else ""
    return f"{escape(damage.file)}: {entry}{damage.what}"


def _mixing(opened: Pack, batch: int) -> dict[str, Any]:
    """The figures of the mixing for each size of a group."""
    numbers = mixing.numbers_with_bytes(opened)
    chunks = mixing.chunk_of_each(opened, numbers)
    directory, labels = mixing.labels(opened, numbers)
    figures = []
    for group in (*_GROUPS, None):
        order = chunkwise_order(0, 0, chunks, group or max(1, len(numbers)))
        figures.append(
            {
                "group": group,
                "labels": _known(distinct_labels(order, labels, batch), digits=3),
                "shared": _known(mixing.shared_chunks(order, chunks, batch), digits=6),
            }
        )
    return {
        "batch": batch,
        "directory": directory,
        "labels": len(set(labels.tolist())),
        "groups": figures,
    }


def _mixing_lines(figures: dict[str, Any]) -> list[str]:
    where = f"/{escape(figures['directory'])}"
    lines = [
        "",
        f"labels: {figures['labels']:,}, by the directories in {where}; batches of"
        f" {figures['batch']:,} files; one epoch of each order",
        f"{'G':>6} {'labels':>8} {'shared':>9}",
    ]
    for row in figures["groups"]:
        labels = "-" if row["labels"] is None else f"{row['labels']:.1f}"
        shared = "-" if row["shared"] is None else f"{row['shared']:.4f}"
        lines.append(f"{row['group'] or 'all':>6} {labels:>8} {shared:>9}")
    if figures["groups"][0]["labels"] is None:
        lines.append(f"-: fewer than {figures['batch']:,} files have bytes; give a smaller --batch")
    return lines


def _known(figure: float, *, digits: int) -> float | None:
    return None if math.isnan(figure) else round(figure, digits)


def _unread(report: BuildReport) -> str:
    return f"{counted(len(report.failures), 'entry', 'entries')} could not be read"


def _counts(summary: PackSummary) -> str:
    files = counted(summary.files, "file", "files")
    chunks = counted(summary.chunks, "chunk", "chunks")
    large = f" and {counted(summary.large, 'large file', 'large files')}" if summary.large else ""
    return f"{files}, {format_bytes(summary.bytes)}, in {chunks}{large}"


def _speed(report: BuildReport) -> str:
    if report.kept_chunks and not report.bytes_read:
        return "complete already: no file was read from the source"
    speed = f"{format_bytes(report.bytes_read / max(report.seconds, 1e-3))}/s"
    read = f"{format_bytes(report.bytes_read)} read from the source in {report.seconds:.1f} s"
    kept = f"; {counted(report.kept_chunks, 'chunk', 'chunks')} kept" if report.kept_chunks else ""
    return f"{read} ({speed}){kept}"
