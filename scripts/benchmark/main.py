"""Measures Monarch against what it stands in front of, the source and the tier, and against others.

A subject is a module with ``run(options, work)``, which returns a title, the conditions, and the
results. Where it has ``SHOWN``, its results are shown as a matrix of contenders.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from scripts.benchmark.matrix import Matrix
from scripts.benchmark.options import parsed
from scripts.benchmark.rows import BenchError, Result
from scripts.benchmark.table import plot, published_table, report, table
from scripts.datasets.target import DatasetError
from scripts.tools.mount import MonarchFailed
from tests.equipment.mounts import mounts_below


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    # A request to end, like that of a scheduler, unmounts everything, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work = Path(tempfile.mkdtemp(prefix="monarch-bench-", dir=options.directory))
    try:
        subject = importlib.import_module(f"scripts.benchmark.{options.subject}")
        title, conditions, results = subject.run(options, work)
        _show(options, title, conditions, results, getattr(subject, "SHOWN", None))
    except (BenchError, DatasetError, MonarchFailed) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    finally:
        _remove(work)
    return 1 if any(result.verdict == "missed" for result in results) else 0


def _show(
    options: argparse.Namespace,
    title: str,
    conditions: dict[str, object],
    results: Sequence[Result[Any]],
    shown: dict[str, Any] | None,
) -> None:
    """``shown``: how a table of many contenders looks; None: each row has one other side."""
    console = Console(width=None if sys.stdout.isatty() else 220)
    if options.json:
        document = report(options.subject, conditions, results)
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if shown is None:
        is_published = any(result.row.published for result in results)
        console.print((published_table if is_published else table)(title, results))
        if options.plot:
            plot(title, results, options.plot)
        return
    matrix = Matrix(title, results, subject=options.subject, **shown)
    if options.markdown:
        sys.stdout.write(matrix.markdown())
    else:
        console.print(matrix.table())
        console.print(table("Bars", matrix.judged))
    if options.plot:
        matrix.plot(options.plot)


def _remove(work: Path) -> None:
    """Remove everything that was made, but never the contents of a mount that is still there."""
    if left := mounts_below(work):
        sys.stderr.write(f"bench: still mounted, so {work} stays: {', '.join(left)}\n")
        return
    shutil.rmtree(work, ignore_errors=True)
