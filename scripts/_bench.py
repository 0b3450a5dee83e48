"""Measures Monarch against what it stands before: the source itself and the tier itself.

A subject is a module with a table of rows. A row is measured round by round next to what it is
compared with, in turns, so that a machine that slows down slows both; what counts is the ratio
within a round. Where those ratios scatter too much there is no verdict, whatever their median.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from _mounts import ROOT, MonarchFailed, monarch
from rich import box
from rich.console import Console
from rich.table import Table

# A coefficient of variation above which a ratio proves nothing.
SCATTER_LIMIT = 0.10

Lab = TypeVar("Lab")


class BenchError(Exception):
    """Why nothing can be measured, in one line."""


@dataclass(frozen=True, slots=True)
class Row(Generic[Lab]):
    """One line of a table: ``function`` measures once, in ``unit``.

    ``against`` measures what it is compared with; ``bar`` is the largest ratio that is good, or
    the smallest one where ``more_is_better``.
    """

    name: str
    function: Callable[[Lab], float]
    unit: str = "s"
    against: Callable[[Lab], float] | None = None
    against_name: str = ""
    bar: float | None = None
    more_is_better: bool = False


@dataclass(slots=True)
class Result(Generic[Lab]):
    """What the rounds gave for a row, in their order."""

    row: Row[Lab]
    values: list[float] = field(default_factory=list)
    against: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.values, self.against, strict=False)]

    @property
    def scatter(self) -> float:
        """The coefficient of variation of what the verdict is about."""
        return variation(self.ratios or self.values)

    @property
    def verdict(self) -> str:
        if self.row.bar is None or not self.ratios:
            return ""
        if len(self.ratios) < 3:
            return "no verdict: fewer than 3 rounds"
        if self.scatter > SCATTER_LIMIT:
            return f"no verdict: CV {self.scatter:.0%}"
        ratio = statistics.median(self.ratios)
        good = ratio >= self.row.bar if self.row.more_is_better else ratio <= self.row.bar
        return "good" if good else "missed"


def variation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    return statistics.stdev(values) / abs(statistics.mean(values))


def measure(rows: Sequence[Row[Lab]], lab: Callable[[], Lab], rounds: int) -> list[Result[Lab]]:
    """Every row once in each round. ``lab`` prepares a round and is closed by the caller."""
    results = [Result(row) for row in rows]
    for turn in range(rounds):
        here = lab()
        for result in results:
            row = result.row
            steps = [(row.function, result.values)]
            if row.against is not None:
                # In turns: who comes first finds another machine than who comes second.
                steps.insert(turn % 2, (row.against, result.against))
            for function, values in steps:
                values.append(function(here))
            latest = f"{row.name}: {show(result.values[-1], row.unit)}"
            sys.stderr.write(f"round {turn + 1} of {rounds}, {latest}\n")
    return results


# -- what comes out --------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three digits, as people say them: 0.0123, 1.23, 45.6, 140k."""
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def show(value: float, unit: str) -> str:
    return f"{number(value)} {unit}"


def spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{number(min(values))} - {number(max(values))}, {variation(values):.0%}"


def table(title: str, results: Sequence[Result[Lab]]) -> Table:
    made = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    made.add_column("what", no_wrap=True)
    for name in ("median", "min - max, CV", "against", "median", "min - max, CV"):
        made.add_column(name, justify="left" if name == "against" else "right")
    made.add_column("ratio", justify="right")
    made.add_column("bar", justify="right")
    made.add_column("verdict")
    styles = {"good": "green", "missed": "red"}
    for result in results:
        row, compared = result.row, bool(result.against)
        ratio = f"{statistics.median(result.ratios):.3g} ({result.scatter:.0%})" if compared else ""
        sign = "≥" if row.more_is_better else "≤"
        made.add_row(
            row.name,
            show(statistics.median(result.values), row.unit),
            spread(result.values),
            row.against_name,
            show(statistics.median(result.against), row.unit) if compared else "",
            spread(result.against),
            ratio,
            "" if row.bar is None else f"{sign} {row.bar:.2f}",
            result.verdict,
            style=styles.get(result.verdict),
        )
    made.caption = "ratio: the median of the ratios within a round (their CV)"
    return made


def report(subject: str, conditions: dict[str, object], results: Sequence[Result[Lab]]) -> object:
    """Everything that a later reader needs to judge or repeat the numbers, for JSON."""
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
                "unit": result.row.unit,
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
    width = max(6.0, 2.2 * len(compared))
    figure, axes = pyplot.subplots(
        1, len(compared), figsize=(width, 4), layout="constrained", squeeze=False
    )
    for result, axis in zip(compared, axes[0], strict=True):
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
        axis.set_title(f"{result.row.name}\n{ratio:.2f} x", fontsize=9)
        axis.set_ylabel(result.row.unit, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(textwrap.fill(title, int(width * 13)), fontsize=9)
    figure.savefig(path, dpi=150)


# -- command line ----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measures Monarch against the source and the tier themselves.",
        epilog="examples:\n"
        "  scripts/bench epochs\n"
        "  scripts/bench epochs --quick --json epochs.json --plot epochs.png\n"
        "  scripts/bench snapshot --files 1000000\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")

    def subject(name: str, summary: str, files: int, quick_files: int) -> argparse.ArgumentParser:
        added = subjects.add_parser(name, help=summary, description=summary)
        added.add_argument("--files", type=int, help=f"how many ({files:,})")
        added.add_argument("--rounds", type=int, help="how often each row is measured (5)")
        added.add_argument("--quick", action="store_true", help="smaller, in a minute")
        added.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
        added.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the table")
        added.add_argument(
            "--directory",
            type=Path,
            default=Path(tempfile.gettempdir()),
            help="where the data and the tier lie while it runs (%(default)s)",
        )
        added.set_defaults(sizes=(files, quick_files))
        return added

    epochs = subject("epochs", "training epochs through a slow source", 600, 300)
    epochs.add_argument("--latency", type=float, default=1.0, help="ms a call of the source (1)")
    epochs.add_argument("--bandwidth", type=float, default=50.0, help="MB/s of the source (50)")
    epochs.add_argument(
        "--tier", type=Path, metavar="DIR", help="where the tier lies, like /dev/shm (--directory)"
    )
    snapshot = subject("snapshot", "what the names of a large tree cost", 1_000_000, 50_000)
    snapshot.add_argument("--latency", type=float, default=1.0, help="ms a call of the source (1)")
    snapshot.add_argument("--jobs", type=int, default=32, help="calls to the source at once (32)")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    options.files = options.files or options.sizes[options.quick]
    options.rounds = options.rounds or (3 if options.quick else 5)
    work = Path(tempfile.mkdtemp(prefix="monarch-bench-", dir=options.directory))
    console = Console(width=None if sys.stdout.isatty() else 180)
    try:
        if options.subject == "epochs":
            import _bench_epochs as subject
        else:
            import _bench_snapshot as subject  # type: ignore[no-redef]
        title, conditions, results = subject.run(options, work)
        console.print(table(title, results))
        if options.json:
            document = report(options.subject, conditions, results)
            options.json.write_text(json.dumps(document, indent=2) + "\n")
        if options.plot:
            plot(title, results, options.plot)
    except (BenchError, MonarchFailed) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    finally:
        _remove(work)
    return 1 if any(result.verdict == "missed" for result in results) else 0


def _remove(work: Path) -> None:
    """Everything that was made, but never through a mount that would not go."""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        left = [line.split(" ")[1] for line in mounts if f" {work}/" in line]
    if left:
        sys.stderr.write(f"bench: still mounted, so {work} stays: {', '.join(left)}\n")
        return
    shutil.rmtree(work, ignore_errors=True)


def make(kind: str, path: Path, *options: object) -> None:
    """Make a data set at ``path``, as scripts/dataset does."""
    import _dataset

    if _dataset.main([kind, str(path), *map(str, options)]) != 0:
        raise BenchError(f"the data set {path} could not be made")


def kind_of_file_system(path: Path) -> str:
    """Its name in the mount table: ext4, tmpfs."""
    where, kind = Path("/"), "unknown"
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            _, mountpoint, name = line.split(" ")[:3]
            here = Path(mountpoint)
            if path.resolve().is_relative_to(here) and len(here.parts) >= len(where.parts):
                where, kind = here, name
    return kind


def slow_source_unavailable() -> str | None:
    if not (ROOT / "tests" / "equipment" / "slowfs.py").exists():
        return "the slow source is test equipment and only in a checkout"
    from tests.equipment import slowfs

    return slowfs.unavailable()
