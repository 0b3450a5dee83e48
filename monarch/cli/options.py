"""Options and tables that the commands of ``monarch simulate``, ``plan`` and ``analyze`` share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import click

from monarch.text import parse_bytes

Command = TypeVar("Command", bound=Callable[..., object])

# The type of an option or argument that is the path of a file.
FILE = click.Path(path_type=Path, dir_okay=False)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of a tier: ``size`` bytes, or ``share`` of the bytes of a data set."""

    size: int | None
    share: Fraction

    def of(self, total: int) -> int:
        """The capacity in bytes for a data set of ``total`` bytes."""
        return int(self.share * total) if self.size is None else self.size


def capacity_of(context: click.Context, parameter: click.Parameter, value: str) -> Capacity:
    """The callback of an option whose value is a size or a share, such as 800GiB or 35%."""
    match = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*%\s*", value)
    try:
        if match is not None:
            return Capacity(None, Fraction(match[1]) / 100)
        return Capacity(parse_bytes(value), Fraction(0))
    except ValueError as error:
        raise click.BadParameter(f"{error}, or like 35%", context, parameter) from error


def parse_rate(text: str) -> int:
    """The bytes in a second of a text such as 500MB or 2GB/s. Raises ValueError."""
    return parse_bytes(text.strip().removesuffix("/s"))


def rate(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """The callback of an option whose value is bytes in a second, such as 500MB or 2GB/s."""
    if value is None:
        return None
    try:
        parsed = parse_rate(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error
    if parsed <= 0:
        raise click.BadParameter("the rate must be above 0", context, parameter)
    return float(parsed)


def bandwidth(*names: str, help: str, default: str | None = None) -> Callable[[Command], Command]:
    """An option whose value is bytes in a second."""
    shows = default is not None
    return click.option(
        *names, default=default, show_default=shows, callback=rate, metavar="RATE", help=help
    )


def listed(
    parse: Callable[[str], int],
) -> Callable[[click.Context, click.Parameter, str | None], list[int]]:
    """The callback of an option that is a list of sizes or rates above 0. ``parse`` reads one of
    them, and raises ValueError."""

    def callback(
        context: click.Context, parameter: click.Parameter, value: str | None
    ) -> list[int]:
        texts = [] if value is None else value.split(",")
        try:
            found = [parse(text.strip()) for text in texts]
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from error
        if not all(found):
            raise click.BadParameter("a size is 0", context, parameter)
        return found

    return callback


def counts_of(context: click.Context, parameter: click.Parameter, value: str | None) -> list[int]:
    """The callback of an option that is a list of numbers of up to seven digits, such as 1,2,4."""
    texts = [] if value is None else value.split(",")
    if not all(re.fullmatch(r"\s*[0-9]{1,7}\s*", text) and int(text) for text in texts):
        raise click.BadParameter(f"{value!r} is no list like 1,2,4", context, parameter)
    return [int(text) for text in texts]


CAPACITY = click.option(
    "--capacity",
    required=True,
    callback=capacity_of,
    metavar="SIZE|PERCENT",
    help="The size of the tier of a node, like 800GiB, or relative to the data set, like 35%.",
)
EPOCHS = click.option(
    "--epochs",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="The number of epochs. Default: all of a trace, else 4.",
)
SEED = click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="The seed of the random orders: the same seed gives the same numbers.",
)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, with its columns to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def time_text(seconds: float) -> str:
    """A duration with three significant digits: times are compared."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
