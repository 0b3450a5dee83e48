"""Figures of the commands that simulate, drawn by matplotlib, which is an optional library."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from monarch.cli.written_files import replace_whole, require_writable
from monarch.errors import MonarchError, UsageError
from monarch.text import escape_text

_SUFFIXES = (".png", ".svg", ".pdf")

PLOT = click.option(
    "-o",
    "--output",
    "plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help=f"Draw a figure into FILE, whose name ends with {', '.join(_SUFFIXES)}.",
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a figure. ``is_formula``: it is drawn dashed, without points."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int
    is_formula: bool = False


def require_plot(path: Path | None) -> None:
    """Raises UsageError if a figure of this name cannot be made, MonarchError without matplotlib,
    and OSError if the file cannot be written: before a long simulation."""
    if path is None:
        return
    if path.suffix not in _SUFFIXES:
        raise UsageError(
            f"{escape_text(str(path))}: a figure is a file of {', '.join(_SUFFIXES)}",
            hint="--json prints the numbers",
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise MonarchError(
            "matplotlib, which draws the figure, is not installed",
            hint="install it: pip install matplotlib",
        )
    require_writable(path)


def draw(
    path: Path,
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    is_logarithmic: bool = False,
) -> None:
    """Writes a figure of ``lines``. Raises OSError; a figure that exists is then unchanged."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for line in lines:
        style = "--" if line.is_formula else "o-"
        xs, ys = zip(*line.points, strict=True)
        axis.plot(
            xs, ys, style, color=f"C{line.colour}", markersize=4, linewidth=1.2, label=line.label
        )
    if is_logarithmic:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(ScalarFormatter())
    else:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylim(bottom=0)
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.set_title(title, fontsize=9)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=path.suffix.removeprefix("."))
    pyplot.close(figure)
    replace_whole(path, drawn.getvalue())
