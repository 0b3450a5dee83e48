"""Data sets in large files, against plain files, over a slow source.

``--only`` chooses a part. The function of a part returns its results and its conditions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmark import packs_lmdb, packs_many, packs_trees
from scripts.benchmark.options import PARTS_OF_PACKS
from scripts.benchmark.requirements import require_slow_source
from scripts.benchmark.rows import Result

Part = Callable[[argparse.Namespace, Path], tuple[Sequence[Result[Any]], dict[str, object]]]
PARTS: dict[str, Part] = {
    "lmdb": packs_lmdb.measured,
    "trees": packs_trees.measured,
    "many": packs_many.measured,
}


def run(
    options: argparse.Namespace, work: Path
) -> tuple[str, dict[str, object], list[Result[Any]]]:
    parts = PARTS_OF_PACKS if options.only is None else (options.only,)
    if parts != ("many",):
        require_slow_source()
    results: list[Result[Any]] = []
    conditions: dict[str, object] = {
        "rounds": options.rounds,
        "latency_ms": options.latency,
        "bandwidth_MBps": options.bandwidth,
    }
    for name in parts:
        found, more = PARTS[name](options, work / name)
        results += found
        conditions[name] = more
    title = f"Source with {options.latency:g} ms a call, {options.bandwidth:g} MB/s"
    if parts == ("many",):
        title = "Files of 110 KB in memory, read by one process"
    return title, conditions, results
