"""``monarch lmdb``: makes the index of an LMDB file, and shows what is in one."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from monarch.cli.daemon_call import JSON
from monarch.cli.output import progress_bar, remark, show
from monarch.datasets.lmdb_compare import differences
from monarch.datasets.lmdb_file import LmdbFile
from monarch.datasets.lmdb_index import (
    Index,
    may_replace,
    read_index,
    require_current,
    write_index,
)
from monarch.datasets.lmdb_reader import LmdbReader
from monarch.errors import UsageError
from monarch.posix.signals import interruptible_at_once
from monarch.text import counted, escape_text, format_bytes

_DIFFERENT = 1
# The differences that are shown.
_MOST_SHOWN = 10

# What may not be read is no mistake of the command line, and has an exit code of its own.
_FILE = click.argument("file", type=click.Path(path_type=Path, readable=False))
_INDEX = click.Path(path_type=Path, dir_okay=False, readable=False)


@click.group()
def lmdb() -> None:
    """Make the index of an LMDB file, or show what is in the file.

    With the index a training reads the records of a batch with few large reads: see LmdbReader in
    docs/lmdb.md. FILE is data.mdb, or the directory of an environment.
    """


@lmdb.command(
    epilog="""\b
Examples:
  monarch lmdb index train.mdb -o train.mlx
  monarch lmdb index /pfs/imagenet/train_lmdb -o train.mlx --verify 1000
  monarch lmdb index train.mdb -o train.mlx --json | jq .records

\b
Exit codes: 0 the index was written; 1 FILE cannot be read, has a format that is not
supported, or --verify found a difference: nothing was written; 2 a mistake on the
command line."""
)
@_FILE
@click.option(
    "-o",
    "--output",
    required=True,
    type=_INDEX,
    metavar="FILE.mlx",
    help="The file to write.",
)
@click.option(
    "--verify",
    "sample",
    type=click.IntRange(1),
    metavar="N",
    help="Compare N random records with those that the lmdb module reads.",
)
@JSON
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def index(file: Path, output: Path, sample: int | None, as_json: bool, quiet: bool) -> int:
    """Write the places of all records of the LMDB file FILE to FILE.mlx.

    Only the branch and leaf pages of FILE are read, which is some 0.3 % of a file with values above
    2 KiB. Small values are in the leaf pages, so then nearly all of FILE is read. FILE.mlx has 16
    bytes and the key for each record. It is created or replaced only when it is complete. When FILE
    is written again, FILE.mlx is refused, and this command makes a new one.
    """
    if not may_replace(output):
        raise UsageError(
            f"{escape_text(str(output))} exists and is not an index of an LMDB file",
            hint="remove it, or name another file",
        )
    began = time.monotonic()
    with interruptible_at_once(), progress_bar(quiet=quiet) as progress:
        with LmdbReader(file, progress=progress) as reader:
            found = []
            if sample is not None:
                found = list(differences(reader, sample, progress))
            if found:
                _report(reader.path, found)
                return _DIFFERENT
            size = write_index(output, Index(reader.version, reader.table))
            records, of = len(reader), reader.path
    seconds = time.monotonic() - began
    compared = 0 if sample is None else min(sample, records)
    report: dict[str, Any] = {
        "file": os.fsencode(of),
        "index": os.fsencode(output),
        "records": records,
        "index_bytes": size,
        "seconds": seconds,
        "verified": compared,
    }
    line = f"{escape_text(str(output))}: {counted(records, 'record', 'records')} of"
    line += f" {escape_text(str(of))} in {seconds:.1f} s, {format_bytes(size)}"
    show(report, as_json, line + (f"; {compared:,} compared, all equal" if compared else ""))
    return 0


@lmdb.command(
    epilog="""\b
Examples:
  monarch lmdb info train.mdb
  monarch lmdb info train.mdb --index train.mlx
  monarch lmdb info /pfs/imagenet/train_lmdb --json | jq .entries

\b
Exit codes: 0 FILE can be read, and so can the index of --index; 1 it cannot, or the index
is stale; 2 a mistake on the command line."""
)
@_FILE
@click.option(
    "--index",
    "index_file",
    type=_INDEX,
    metavar="FILE.mlx",
    help="Check whether this index is of the present version of FILE.",
)
@JSON
def info(file: Path, index_file: Path | None, as_json: bool) -> None:
    """Show the properties of the LMDB file FILE, from its meta pages."""
    opened = LmdbFile.open(file)
    meta = opened.meta
    if index_file is not None:
        require_current(read_index(index_file), opened, index_file)
    tree = meta.branch_pages + meta.leaf_pages
    rows = [
        ("file", escape_text(str(opened.path))),
        ("records", f"{meta.entries:,}"),
        ("size", format_bytes(opened.version.size)),
        ("page size", format_bytes(meta.page_bytes)),
        ("transaction", f"{meta.transaction:,}"),
        ("levels", f"{meta.depth}"),
        ("tree", f"{counted(tree, 'page', 'pages')}, {format_bytes(tree * meta.page_bytes)}"),
        ("large values", counted(meta.overflow_pages, "page", "pages")),
        ("map size", format_bytes(meta.map_bytes)),
    ]
    if index_file is not None:
        rows.append(("index", f"{escape_text(str(index_file))}, of this version"))
    report = {"file": os.fsencode(opened.path), **asdict(opened.version), **asdict(meta)}
    show(report, as_json, *(f"{label:13} {value}" for label, value in rows))


def _report(file: Path, found: list[str]) -> None:
    for difference in found[:_MOST_SHOWN]:
        remark(f"{escape_text(str(file))} differs for lmdb: {escape_text(difference)}")
    if len(found) > _MOST_SHOWN:
        remark(f"and {len(found) - _MOST_SHOWN:,} more")
