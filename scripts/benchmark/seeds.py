"""The main figures of the papers that Monarch builds on, beside those of this program.

Each row has the published figure and says how the other one came about: ``simulated`` rows run the
package's own code in virtual time, with one seed for each round; ``run`` rows measure real mounts,
processes and files. The data is small and the source is a throttled one, so the shape of a figure
is what can be compared: which side is better, and by how much. Bars are for the shape.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from scripts.benchmark import (
    seeds_checkfreq,
    seeds_lmdbio,
    seeds_mounts,
    seeds_packs,
    seeds_page_cache,
    seeds_prep,
    seeds_simulated,
)
from scripts.benchmark.options import PAPERS
from scripts.benchmark.requirements import require_slow_source
from scripts.benchmark.rows import Result

Part = Callable[[argparse.Namespace, Path], Iterable[Result[Any]]]
# By paper: the order of the rows is that of the parts.
PARTS: dict[str, tuple[Part, ...]] = {
    "monarch": (seeds_mounts.of_monarch,),
    "coordl": (seeds_simulated.of_coordl, seeds_page_cache.of_coordl, seeds_mounts.of_coordl),
    "prep": (seeds_prep.of_coordl,),
    "diesel": (seeds_simulated.of_diesel, seeds_packs.of_diesel),
    "lmdbio": (seeds_lmdbio.of_lmdbio,),
    "checkfreq": (seeds_simulated.of_checkfreq, seeds_checkfreq.of_checkfreq),
    "synergy": (seeds_simulated.of_synergy,),
}
# Papers whose figures need no slow source.
_WITHOUT_SOURCE = {"checkfreq", "synergy"}


def run(
    options: argparse.Namespace, work: Path
) -> tuple[str, dict[str, object], list[Result[Any]]]:
    papers = PAPERS if options.only is None else (options.only,)
    if not _WITHOUT_SOURCE.issuperset(papers):
        require_slow_source()
    results: list[Result[Any]] = []
    for paper in papers:
        for number, part in enumerate(PARTS[paper]):
            sys.stderr.write(f"{paper}, part {number + 1} of {len(PARTS[paper])}\n")
            place = work / f"{paper}{number}"
            place.mkdir()
            results += part(options, place)
    conditions: dict[str, object] = {
        "files": options.files,
        "rounds": options.rounds,
        "latency_ms": options.latency,
        "bandwidth_MBps": options.bandwidth,
    }
    title = (
        f"Figures of papers; runs have a source of {options.latency:g} ms a call and"
        f" {options.bandwidth:g} MB/s"
    )
    return title, conditions, results
