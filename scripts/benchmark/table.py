"""Tables, figures and JSON of rows that are compared with one other side each."""

from __future__ import annotations

import os
import platform
import statistics
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich import box
from rich.table import Table

from scripts.benchmark.quantities import spread, with_unit
from scripts.benchmark.rows import Lab, Result
from scripts.tools.mount import monarch

# Bars of a figure beside each other.
MOST_IN_A_LINE = 12
STYLES = {"good": "green", "missed": "red"}


def table(title: str, results: Sequence[Result[Lab]]) -> Table:
    made = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    made.add_column("what", no_wrap=True)
    for name in ("median", "min - max, CV", "against", "median", "min - max, CV"):
        made.add_column(name, justify="left" if name == "against" else "right")
    made.add_column("ratio", justify="right")
    made.add_column("bar", justify="right")
    made.add_column("verdict")
    for result in results:
        row, compared = result.row, bool(result.against)
        ratio = f"{statistics.median(result.ratios):.3g} ({result.scatter:.0%})" if compared else ""
        sign = "≥" if row.more_is_better else "≤"
        made.add_row(
            f"{row.name}: {row.contender}" if row.contender else row.name,
            with_unit(statistics.median(result.values), row.unit),
            spread(result.values),
            row.against_name,
            with_unit(statistics.median(result.against), row.unit) if compared else "",
            spread(result.against),
            ratio,
            "" if row.bar is None else f"{sign} {row.bar:.2f}",
            result.verdict,
            style=STYLES.get(result.verdict),
        )
    made.caption = "ratio: the median of the ratios within a round (their CV)"
    return made


def published_table(title: str, results: Sequence[Result[Lab]]) -> Table:
    """The rows beside the figures of the papers that they repeat."""
    made = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for name in ("paper", "what", "published", "median", "min - max, CV", "how", "bar", "verdict"):
        justify: Literal["left", "right"] = "right" if name in ("median", "bar") else "left"
        made.add_column(name, justify=justify)
    paper = ""
    for result in results:
        row, sign = result.row, "≥" if result.row.more_is_better else "≤"
        made.add_row(
            "" if row.contender == paper else row.contender,
            row.name,
            row.published,
            with_unit(statistics.median(result.values), row.unit),
            spread(result.values),
            row.how,
            "" if row.bar is None else f"{sign} {row.bar:g}",
            result.verdict,
            style=STYLES.get(result.verdict),
        )
        paper = row.contender
    return made


def report(subject: str, conditions: dict[str, object], results: Sequence[Result[Lab]]) -> object:
    """All that is needed to judge or repeat the numbers, for JSON."""
    return {
        "subject": subject,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "kernel": platform.release(),
            "python": platform.python_version(),
            "cpus": len(os.sched_getaffinity(0)),
            "monarch": monarch("--version").strip(),
        },
        "conditions": conditions,
        "rows": [
            {
                "name": result.row.name,
                "who": result.row.contender,
                "derived": result.row.derived,
                "unit": result.row.unit,
                "published": result.row.published,
                "how": result.row.how,
                "values": result.values,
                "against_name": result.row.against_name,
                "against": result.against,
                "median": statistics.median(result.values),
                "ratio": statistics.median(result.ratios) if result.ratios else None,
                "scatter": result.scatter,
                "bar": result.row.bar,
                "verdict": result.verdict,
            }
            for result in results
        ],
    }


def plot(title: str, results: Sequence[Result[Lab]], path: Path) -> None:
    """Bars of the compared rows, with whiskers from the fastest to the slowest round."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    compared = [result for result in results if result.against]
    lines = -(-len(compared) // MOST_IN_A_LINE)
    columns = -(-len(compared) // lines)
    width = max(6.0, 2.2 * columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(width, 4 * lines), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(compared) :]:
        axis.remove()
    for result, axis in zip(compared, axes.flat, strict=False):
        for place, values, colour in (
            (0, result.against, "#b8b8b8"),
            (1, result.values, "#e07b00"),
        ):
            middle = statistics.median(values)
            whiskers = [[middle - min(values)], [max(values) - middle]]
            axis.bar(place, middle, color=colour, yerr=whiskers, capsize=4, width=0.7)
        names = [textwrap.fill(result.row.against_name, 12), "Monarch"]
        axis.set_xticks([0, 1], names, fontsize=8)
        ratio = statistics.median(result.ratios)
        name = textwrap.fill(result.row.name, 26)
        axis.set_title(f"{name}\n{ratio:.2f} x", fontsize=9)
        axis.set_ylabel(result.row.unit, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(textwrap.fill(title, int(width * 13)), fontsize=9)
    figure.savefig(path, dpi=150)
