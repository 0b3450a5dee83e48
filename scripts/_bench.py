"""Measures Monarch against what it stands before, the source and the tier, and against others.

A subject is a module with a table of rows. A row is measured round by round next to what it is
compared with, in turns, so that a machine that slows down slows both; what counts is the ratio
within a round. Where those ratios scatter too much there is no verdict, whatever their median.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from _mounts import ROOT, MonarchFailed, monarch
from rich import box
from rich.console import Console
from rich.table import Table

# A coefficient of variation above which a ratio proves nothing.
SCATTER_LIMIT = 0.10
STYLES = {"good": "green", "missed": "red"}

Lab = TypeVar("Lab")


class BenchError(Exception):
    """Why nothing can be measured, in one line."""


@dataclass(frozen=True, slots=True)
class Row(Generic[Lab]):
    """One line of a table: ``function`` measures once, in ``unit``.

    ``against`` measures what it is compared with; ``bar`` is the largest ratio that is good, or
    the smallest one where ``more_is_better``. Without ``against`` it is a bar for the value itself.
    ``who`` is measured, where a table has many of them; ``derived`` is said of two of them.
    A round takes ``slices`` short measurements of each side in turns, and the median of each side.
    """

    name: str
    function: Callable[[Lab], float]
    unit: str = "s"
    against: Callable[[Lab], float] | None = None
    against_name: str = ""
    bar: float | None = None
    more_is_better: bool = False
    who: str = ""
    derived: bool = False
    slices: int = 1

    def good(self, judged: float) -> bool:
        assert self.bar is not None
        return judged >= self.bar if self.more_is_better else judged <= self.bar


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
    def judged(self) -> list[float]:
        """What the verdict is about."""
        return self.ratios or self.values

    @property
    def scatter(self) -> float:
        return variation(self.judged)

    @property
    def verdict(self) -> str:
        if self.row.bar is None or not self.values:
            return ""
        if len(self.judged) < 3:
            return "no verdict: fewer than 3 rounds"
        # Something absolute that is far below its bar may scatter; it proves enough.
        kept = not self.ratios and len({self.row.good(value) for value in self.values}) == 1
        if self.scatter > SCATTER_LIMIT and not kept:
            return f"no verdict: CV {self.scatter:.0%}"
        return "good" if self.row.good(statistics.median(self.judged)) else "missed"


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
            measure_once(result, here, turn)
            latest = f"{result.row.name}: {show(result.values[-1], result.row.unit)}"
            sys.stderr.write(f"round {turn + 1} of {rounds}, {latest}\n")
    return results


def measure_once(result: Result[Lab], lab: Lab, turn: int) -> None:
    """One more value of a row, and one of what it is compared with."""
    row = result.row
    ours: list[float] = []
    theirs: list[float] = []
    steps = [(row.function, ours)]
    if row.against is not None:
        # In turns: who comes first finds another machine than who comes second.
        steps.insert(turn % 2, (row.against, theirs))
    for _ in range(row.slices):
        for function, values in steps:
            values.append(function(lab))
    result.values.append(statistics.median(ours))
    if theirs:
        result.against.append(statistics.median(theirs))


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
    for result in results:
        row, compared = result.row, bool(result.against)
        ratio = f"{statistics.median(result.ratios):.3g} ({result.scatter:.0%})" if compared else ""
        sign = "≥" if row.more_is_better else "≤"
        made.add_row(
            f"{row.name}: {row.who}" if row.who else row.name,
            show(statistics.median(result.values), row.unit),
            spread(result.values),
            row.against_name,
            show(statistics.median(result.against), row.unit) if compared else "",
            spread(result.against),
            ratio,
            "" if row.bar is None else f"{sign} {row.bar:.2f}",
            result.verdict,
            style=STYLES.get(result.verdict),
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
                "who": result.row.who,
                "derived": result.row.derived,
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


SUBJECTS = ("datapath", "epochs", "hang", "month", "snapshot", "write")


# The ways of reading, as options of a mount.
WAYS = {
    "python": "datapath=python",
    "relay": "datapath=relay,open=open",
    "passthrough": "datapath=passthrough,open=open",
    "no_open": "datapath=relay,open=none",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measures Monarch against the source, the tier and what one would pick instead."
        " Without a SUBJECT: datapath.",
        epilog="examples:\n"
        "  scripts/bench\n"
        "  scripts/bench --quick --peers rclone,juicefs --install-peers\n"
        "  scripts/bench epochs --quick --json epochs.json --plot epochs.png\n"
        "  scripts/bench hang --seconds 10 --modes relay\n"
        "  scripts/bench month --lines 20000\n"
        "  scripts/bench snapshot --files 1000000\n"
        "  scripts/bench write --quick --modes relay,auto\n"
        "  scripts/bench write --only small --quick --rounds 1 --modes auto\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")

    def subject(
        name: str,
        summary: str,
        files: int,
        quick_files: int,
        rounds: int = 5,
        *,
        count: str = "--files",
    ) -> argparse.ArgumentParser:
        added = subjects.add_parser(name, help=summary, description=summary)
        added.add_argument(count, dest="files", type=int, help=f"how many ({files:,})")
        added.add_argument("--rounds", type=int, help=f"how often each row is measured ({rounds})")
        added.add_argument("--quick", action="store_true", help="smaller, in a few minutes")
        added.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
        added.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the table")
        added.add_argument(
            "--directory",
            type=Path,
            default=Path(tempfile.gettempdir()),
            help="where the data and the tier lie while it runs (%(default)s)",
        )
        added.set_defaults(sizes=(files, quick_files), default_rounds=rounds)
        return added

    datapath = subject("datapath", "reading, next to the tier itself and to others", 5000, 500, 3)
    datapath.add_argument("--size-mb", type=int, help="MB of the large file (2,000)")
    datapath.add_argument("--entries", type=int, help="names of the large tree (1,000,000)")
    datapath.add_argument(
        "--modes", type=_names, help="python,relay,passthrough,no_open,auto (all)"
    )
    datapath.add_argument(
        "--peers", type=_names, help="rclone,mergerfs,juicefs (the installed ones), or none"
    )
    datapath.add_argument(
        "--no-drop", action="store_true", help="leave the page cache of this machine alone"
    )
    epochs = subject("epochs", "training epochs through a slow source", 600, 300)
    epochs.add_argument(
        "--tier", type=Path, metavar="DIR", help="where the tier lies, like /dev/shm (--directory)"
    )
    for added in (datapath, epochs):
        added.add_argument("--latency", type=float, default=1.0, help="ms a call of the source (1)")
        added.add_argument(
            "--bandwidth", type=float, default=50.0, help="MB/s of the slow source (50)"
        )
    hang = subject("hang", "readers of copies while the source hangs", 2000, 500, 3)
    hang.add_argument(
        "--seconds", type=float, default=60.0, help="how long it hangs in each round (60)"
    )
    hang.add_argument(
        "--waiters",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[600, 2000],
        metavar="N,...",
        help="requests that wait for the source meanwhile (600,2000)",
    )
    hang.add_argument("--modes", type=_names, default=list(WAYS), help=f"{','.join(WAYS)} (all)")
    month = subject(
        "month", "a month of fsynced lines and checkpoints", 2_600_000, 20_000, 1, count="--lines"
    )
    month.add_argument("--checkpoints", type=int, help="how many (one for each 260 lines)")
    month.add_argument(
        "--latency", type=float, default=1.0, help="virtual s a call of the drain to the source (1)"
    )
    month.set_defaults(directory=Path("/dev/shm"))
    snapshot = subject("snapshot", "what the names of a large tree cost", 1_000_000, 50_000)
    snapshot.add_argument("--latency", type=float, default=1.0, help="ms a call of the source (1)")
    snapshot.add_argument("--jobs", type=int, default=32, help="calls to the source at once (32)")
    write = subject("write", "checkpoints and small files on a slow source", 2000, 200, 3)
    write.add_argument("--size-mb", type=int, help="MB of a checkpoint (1,000)")
    write.add_argument("--modes", type=_names, help="python,relay,passthrough,auto (all)")
    write.add_argument(
        "--peers", type=_names, help="rclone,juicefs,passthrough_hp (the installed ones), or none"
    )
    write.add_argument(
        "--only", choices=("slow", "small"), help="a slow source, or small files on a local one"
    )
    write.add_argument("--latency", type=float, default=0.0, help="ms a call of the source (0)")
    write.add_argument(
        "--bandwidth", type=float, default=100.0, help="MB/s that the source takes (100)"
    )
    for added in (datapath, write):
        added.add_argument(
            "--install-peers", action="store_true", help="install them: from Debian and from PyPI"
        )
        added.add_argument("--markdown", action="store_true", help="print tables for a document")
    return parser


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name and name != "none"]


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = [SUBJECTS[0], *arguments]
    options = _parser().parse_args(arguments)
    options.files = options.files or options.sizes[options.quick]
    options.rounds = options.rounds or (3 if options.quick else options.default_rounds)
    return options


def main(arguments: Sequence[str]) -> int:
    options = _parsed(arguments)
    # A request to end, like that of a scheduler, unmounts all as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work = Path(tempfile.mkdtemp(prefix="monarch-bench-", dir=options.directory))
    try:
        subject = importlib.import_module(f"_bench_{options.subject}")
        title, conditions, results = subject.run(options, work)
        _show(options, title, conditions, results, getattr(subject, "SHOWN", None))
    except (BenchError, MonarchFailed) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    finally:
        _remove(work)
    return 1 if any(result.verdict == "missed" for result in results) else 0


def _show(
    options: argparse.Namespace,
    title: str,
    conditions: dict[str, object],
    results: Sequence[Result[Lab]],
    shown: dict[str, Any] | None,
) -> None:
    """``shown``: how a table of many contenders looks; None: each row has one other side."""
    console = Console(width=None if sys.stdout.isatty() else 220)
    if options.json:
        document = report(options.subject, conditions, results)
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if shown is None:
        console.print(table(title, results))
        if options.plot:
            plot(title, results, options.plot)
        return
    from _matrix import Matrix

    matrix = Matrix(title, results, subject=options.subject, **shown)
    if options.markdown:
        sys.stdout.write(matrix.markdown())
    else:
        console.print(matrix.table())
        console.print(table("Bars", matrix.judged))
    if options.plot:
        matrix.plot(options.plot)


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
