"""DIESEL's chunks (ICPP 2020) on a real mount of a pack, against the tree of small files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from scripts.benchmark.packs_readers import import_all
from scripts.benchmark.packs_trees import CHUNK_WISE, SOURCE, Bench, Measured
from scripts.benchmark.rows import Result, Row, measure

FILE_BYTES = 10_000
# Files for each one of --files, which are larger.
_MORE = 5


class Lab:
    """One round: an epoch of the pack, shuffled by chunks, and one of the tree at the source."""

    def __init__(self, bench: Bench) -> None:
        self._pack, self._tree = bench.measured(CHUNK_WISE), bench.measured(SOURCE)

    def ratio(self, value: Callable[[Measured], float]) -> float:
        return value(self._pack) / value(self._tree)


def of_diesel(options: argparse.Namespace, work: Path) -> list[Result[Lab]]:
    import_all([])

    def row(name: str, published: str, value: Callable[[Measured], float], bar: float) -> Row[Lab]:
        return Row(
            f"epoch 1, pack by chunks against the tree, {name}",
            partial(_ratio, value=value),
            "",
            bar=bar,
            contender="DIESEL",
            published=published,
            how="run",
        )

    rows = [
        row("calls at the source", "-", lambda found: found.calls, 0.1),
        row("bytes of the source", "1", lambda found: found.read_bytes, 1.05),
        row("time", "0.5", lambda found: found.epoch.seconds, 0.5),
    ]
    with ExitStack() as stack:
        # The pack is compared with the tree, and with no other format.
        chosen = argparse.Namespace(**{**vars(options), "peers": []})
        bench = Bench(work, _MORE * options.files, FILE_BYTES, chosen, stack)
        return measure(rows, partial(Lab, bench), options.rounds)


def _ratio(lab: Lab, *, value: Callable[[Measured], float]) -> float:
    return lab.ratio(value)
