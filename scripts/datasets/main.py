"""Makes data sets of the kinds that training reads: seeded, of any size, in seconds.

The same arguments give the same bytes (with the same Pillow).
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from monarch.text import parse_bytes
from scripts.datasets.containers import hdf5, lmdb_records, sqlite, webdataset
from scripts.datasets.images import SMALLEST_JPEG, image_folder
from scripts.datasets.target import DatasetError
from scripts.datasets.tfrecord import tfrecord
from scripts.datasets.trees import empty, git

EXAMPLES = """\
examples:
  scripts/dataset imagefolder /tmp/images --files 5000 --classes 100
  scripts/dataset imagefolder /tmp/thumbnails --files 1000 --mean 12KB --seed 7
  scripts/dataset tfrecord /tmp/records --shards 8 --records 1000
  scripts/dataset webdataset /tmp/shards --shards 8 --samples 1000
  scripts/dataset hdf5 /tmp/train.h5 --samples 2000 --side 64
  scripts/dataset lmdb /tmp/train.lmdb --records 1000
  scripts/dataset sqlite /tmp/train.sqlite --records 1000
  scripts/dataset git /tmp/repository --files 300
  scripts/dataset empty /tmp/million --files 1000000 --directories 1000
"""


def _size(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < SMALLEST_JPEG:
        raise argparse.ArgumentTypeError(f"an image needs {SMALLEST_JPEG} bytes or more")
    return size


def _count(text: str) -> int:
    try:
        count = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return count


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/dataset",
        description="Makes data sets of the kinds that training reads. "
        "The same arguments give the same bytes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    def kind(
        name: str, function: Callable[[argparse.Namespace], None], summary: str
    ) -> argparse.ArgumentParser:
        examples = [line for line in EXAMPLES.splitlines() if f"scripts/dataset {name} " in line]
        added = kinds.add_parser(
            name,
            help=summary,
            description=f"Makes {summary}.",
            epilog="\n".join(["examples:", *examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument(
            "path", type=Path, help="path of the data set; must not exist, or be an empty directory"
        )
        added.add_argument(
            "--seed", type=int, default=1, help="seed; each seed gives other bytes (1)"
        )
        added.set_defaults(make=function)
        return added

    def counted(added: argparse.ArgumentParser, name: str, default: int, meaning: str = "") -> None:
        added.add_argument(
            f"--{name}",
            type=_count,
            default=default,
            metavar="N",
            help=f"{meaning or f'number of {name}'} ({default:,})",
        )

    def images(added: argparse.ArgumentParser) -> None:
        counted(added, "classes", 10)
        added.add_argument(
            "--mean",
            type=_size,
            default=110_000,
            metavar="SIZE",
            help="mean size of an image (110KB)",
        )

    folder = kind("imagefolder", image_folder, "JPEGs in a directory per class, like ImageNet")
    counted(folder, "files", 1000)
    images(folder)
    records = kind("tfrecord", tfrecord, "TFRecord shards of tf.train.Example with JPEGs")
    counted(records, "shards", 8)
    counted(records, "records", 1000)
    images(records)
    shards = kind("webdataset", webdataset, "tar shards with .jpg and .cls pairs")
    counted(shards, "shards", 8)
    counted(shards, "samples", 1000)
    images(shards)
    array = kind("hdf5", hdf5, "one HDF5 file with chunked images and labels")
    counted(array, "samples", 2000)
    counted(array, "side", 64, "side of an image in pixels")
    counted(array, "classes", 10)
    for name, function, summary in (
        ("lmdb", lmdb_records, "an LMDB directory of labelled JPEGs"),
        ("sqlite", sqlite, "an SQLite file with a table of labelled JPEGs"),
    ):
        table = kind(name, function, summary)
        counted(table, "records", 1000)
        images(table)
    counted(kind("git", git, "a small git repository with history"), "files", 300)
    tree = kind("empty", empty, "many empty files, to measure the cost of names")
    counted(tree, "files", 1_000_000)
    counted(tree, "directories", 1000)
    return parser


def main(arguments: Sequence[str]) -> int:
    try:
        _make(_parser().parse_args(arguments))
    except DatasetError as error:
        sys.stderr.write(f"dataset: {error}\n")
        return 1
    return 0


def make(kind: str, path: Path, *options: object) -> None:
    """Make a data set at ``path``, as scripts/dataset does. Raises DatasetError."""
    _make(_parser().parse_args([kind, str(path), *map(str, options)]))


def _make(options: argparse.Namespace) -> None:
    try:
        options.make(options)
    except OSError as error:
        message = f"{error.filename or options.path}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message += "; make a smaller data set, or choose another path"
        raise DatasetError(message) from error
