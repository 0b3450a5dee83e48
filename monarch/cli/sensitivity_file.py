"""The file of a job for ``monarch plan``: its options, its table, and how it is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from monarch.analysis.sensitivity import Sensitivity
from monarch.cli.options import FILE, Capacity, aligned, capacity_of
from monarch.cli.output import show
from monarch.cli.written_files import replace_whole
from monarch.text import escape_text, format_bytes


def _sizes(context: click.Context, parameter: click.Parameter, value: str) -> list[Capacity]:
    return [capacity_of(context, parameter, part) for part in value.split(",")]


TIERS = click.option(
    "--tiers",
    default="0%,10%,25%,50%,75%,100%",
    show_default=True,
    callback=_sizes,
    metavar="SIZES",
    help="The sizes of the tier, as sizes or shares of the data set.",
)
GPUS = click.option(
    "--gpus",
    type=click.IntRange(1, 1_000_000),
    default=1,
    show_default=True,
    metavar="N",
    help="The GPUs of the job.",
)
OUTPUT = click.option(
    "-o",
    "--output",
    required=True,
    type=FILE,
    metavar="FILE",
    help="The JSON file to write; a file that exists is replaced.",
)


def write_matrix(found: Sensitivity, output: Path, unit: str, as_json: bool, *remarks: str) -> None:
    """Prints the rates, as a table in ``unit`` a second, and then ``remarks``; and writes the file,
    also if nothing reads what is printed. Raises OSError; a file that exists is then unchanged."""
    rows = [["cores", *map(format_bytes, found.tier_bytes)]]
    for number, row in zip(found.cores, found.rates, strict=True):
        rows.append([str(number), *map(rate_text, row)])
    where = escape_text(os.fspath(output))
    head = f"{where}: {unit} a second by cores and size of the tier"
    try:
        show(found, as_json, head, *aligned(rows), *remarks)
    finally:
        replace_whole(output, json.dumps(found.to_dict(), indent=2) + "\n")


def rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
