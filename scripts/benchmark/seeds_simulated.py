"""Figures of papers that the package's own decisions give in virtual time, without a mount."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import numpy.typing as npt

from monarch.analysis.allocation import allocate, bound
from monarch.analysis.replay import Files, Order, replay, shuffled
from monarch.order import chunkwise_order, distinct_labels, epoch_permutation
from scripts.benchmark.rows import Result, Row, measure
from tests.equipment.checkpoint_runs import Ours, Repository, Static
from tests.equipment.checkpoint_runs import run as run_checkpoints
from tests.equipment.clusters import SERVERS, mixed, speedups

SIMULATED = "simulated"
_FIRST_KEY = 1 << 57
_FILE_BYTES = 110_000

# CoorDL: files, and epochs, of which the first two fill the cache.
_FILES, _FILES_QUICK, _EPOCHS = 20_000, 4000, 4
# DIESEL: files, chunks of as many files, classes, and files in a batch.
_PACKED, _IN_A_CHUNK, _CLASSES, _BATCH = 20_000, 50, 100, 128
# Synergy: shares of image, language and speech jobs, and the number of instances of each mix.
MIXES = ((20, 70, 10), (33, 33, 33), (50, 0, 50))
_INSTANCES = 8


class Turn:
    """One round: its number is the seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed


def simulated(rows: Sequence[Row[Turn]], rounds: int) -> list[Result[Turn]]:
    """Each row once for each seed."""
    seeds = iter(range(1, rounds + 1))
    return measure(rows, lambda: Turn(next(seeds)), rounds)


def _row(
    paper: str,
    name: str,
    published: str,
    function: Callable[[Turn], float],
    unit: str,
    bar: float,
    *,
    more_is_better: bool = False,
) -> Row[Turn]:
    return Row(
        name,
        function,
        unit,
        bar=bar,
        more_is_better=more_is_better,
        contender=paper,
        published=published,
        how=SIMULATED,
    )


# -- CoorDL ----------------------------------------------------------------------------------------


def misses(turn: Turn, *, policy: str, share: float, count: int) -> float:
    """The misses of an epoch in per cent, if a cache holds ``share`` of ``count`` files."""
    files = _equal(count, _FILE_BYTES)
    orders = shuffled(count, _EPOCHS, turn.seed)
    capacity = int(share * count) * _FILE_BYTES
    epochs = [*replay(policy, files, orders, capacity, seed=turn.seed)][2:]
    return 100 - 100 * sum(each.hits for each in epochs) / sum(each.opens for each in epochs)


def _equal(count: int, size: int) -> Files:
    keys = np.arange(_FIRST_KEY, _FIRST_KEY + count).astype(np.uint64)
    return Files(np.full(count, size, np.int64), keys)


def of_coordl(options: argparse.Namespace, work: Path) -> list[Result[Turn]]:
    row = partial(_row, "CoorDL", unit="%")
    count = _FILES_QUICK if options.quick else _FILES
    named = (("no_evict", "MinIO"), ("lru", "LRU"), ("random", "random eviction"))
    # (share, policy): the published figure, the bar, and whether more misses are the shape.
    figures = {
        (0.35, "no_evict"): ("65", 65.1, False),
        (0.35, "lru"): ("85 (page cache)", 85.0, True),
        (0.35, "random"): ("85 (page cache)", 80.0, True),
        (0.65, "no_evict"): ("35", 35.1, False),
        (0.65, "lru"): ("66 (page cache, DALI-seq)", 66.0, True),
        (0.65, "random"): ("53 (page cache, DALI-shuffle)", 50.0, True),
    }
    rows = [
        row(
            f"misses, {share:.0%} cached, {name}",
            figures[share, policy][0],
            partial(misses, policy=policy, share=share, count=count),
            bar=figures[share, policy][1],
            more_is_better=figures[share, policy][2],
        )
        for share in (0.35, 0.65)
        for policy, name in named
    ]
    return simulated(rows, options.rounds)


# -- DIESEL ----------------------------------------------------------------------------------------


def loads(turn: Turn, *, order: Literal["files", "chunks"], held: int, group: int = 1) -> float:
    """How often a chunk is loaded in an epoch, in the mean of all chunks, if ``held`` chunks are in
    memory and the least recently used leaves."""
    chunks = _PACKED // _IN_A_CHUNK
    opens = [_chunk_of()[each] for each in _orders(turn, order, group)]
    epochs = replay("lru", _equal(chunks, _IN_A_CHUNK), opens, held * _IN_A_CHUNK)
    last = [*epochs][-1]
    return (last.opens - last.hits) / chunks


def labels(turn: Turn, *, order: Literal["files", "chunks"], packed: str, group: int) -> float:
    """The classes in a batch, if the files were packed at random or class by class."""
    classes = np.arange(_PACKED) * _CLASSES // _PACKED
    if packed == "random":
        classes = classes[epoch_permutation(turn.seed + 1000, 0, _PACKED)]
    found = [distinct_labels(each, classes, _BATCH) for each in _orders(turn, order, group)]
    return fmean(found)


def _chunk_of() -> Order:
    return np.arange(_PACKED) // _IN_A_CHUNK


def _orders(turn: Turn, order: str, group: int) -> list[npt.NDArray[np.int64]]:
    if order == "files":
        return [epoch_permutation(turn.seed, epoch, _PACKED) for epoch in range(2)]
    return [chunkwise_order(turn.seed, epoch, _chunk_of(), group) for epoch in range(2)]


def of_diesel(options: argparse.Namespace, work: Path) -> list[Result[Turn]]:
    row = partial(_row, "DIESEL")
    rows = [
        row(
            f"loads of a chunk, shuffled files, {held} of 400 chunks in memory",
            "many: the reason for the order",
            partial(loads, order="files", held=held),
            "an epoch",
            bar,
            more_is_better=True,
        )
        for held, bar in ((8, 40.0), (100, 30.0))
    ]
    rows += [
        row(
            f"loads of a chunk, shuffled by chunks, G = {group}",
            "1",
            partial(loads, order="chunks", held=group + 1, group=group),
            "an epoch",
            1.0,
        )
        for group in (8, 40)
    ]
    rows += [
        row(
            f"classes in a batch, packed {words}, G = 1",
            published,
            partial(labels, order="chunks", packed=packed, group=1),
            "",
            bar,
            more_is_better=packed == "random",
        )
        for packed, words, published, bar in (
            ("random", "at random", "accuracy as with shuffled files", 70.0),
            ("class", "class by class", "-", 10.0),
        )
    ]
    rows.append(
        row(
            "classes in a batch, shuffled files",
            "-",
            partial(labels, order="files", packed="random", group=1),
            "",
            70.0,
            more_is_better=True,
        )
    )
    return simulated(rows, options.rounds)


# -- CheckFreq -------------------------------------------------------------------------------------


def overhead(turn: Turn, *, rule: Callable[[], Static], postpone: bool = False) -> float:
    """Per cent that the training takes longer, while storage is four times slower for 500 of 1,200
    iterations. Every second round has a pause of the machine as well."""
    return run_checkpoints(rule(), hiccup=turn.seed % 2 == 0, postpone=postpone).overhead


def of_checkfreq(options: argparse.Namespace, work: Path) -> list[Result[Turn]]:
    row = partial(_row, "CheckFreq", unit="%")
    slower = "overhead, storage 4 times slower for a while"
    rows = [
        row(
            f"{slower}, fixed interval",
            "35 (with interference)",
            partial(overhead, rule=Static),
            bar=35.0,
            more_is_better=True,
        ),
        row(
            f"{slower}, interval grows by 2",
            "5 (adaptive)",
            partial(overhead, rule=Repository),
            bar=5.0,
            more_is_better=True,
        ),
        row(
            f"{slower}, Checkpointer's interval, training waits",
            "5 (adaptive)",
            partial(overhead, rule=Ours),
            bar=5.0,
        ),
        row(
            f"{slower}, Checkpointer",
            "3.5",
            partial(overhead, rule=Ours, postpone=True),
            bar=3.5,
        ),
    ]
    return simulated(rows, options.rounds)


# -- Synergy ---------------------------------------------------------------------------------------


def tuned(turn: Turn, *, weights: tuple[int, int, int], to_bound: bool) -> float:
    """The mean speed-up of 32 jobs on four servers, relative to the bound or to fair shares."""
    found = []
    for instance in range(_INSTANCES):
        jobs = mixed(weights, turn.seed * 100 + instance)
        gains = speedups(allocate("tune", jobs, SERVERS))
        divisor = bound(jobs, SERVERS) if to_bound else len(jobs)
        found.append(sum(gains) / divisor)
    return fmean(found)


def waiting(turn: Turn) -> float:
    """The jobs of 32 for which greedy placement finds no room although GPUs are free."""
    found = []
    for instance in range(_INSTANCES):
        jobs = mixed((33, 33, 33), turn.seed * 100 + instance)
        found.append(len(allocate("greedy", jobs, SERVERS).waiting))
    return fmean(found)


def of_synergy(options: argparse.Namespace, work: Path) -> list[Result[Turn]]:
    row = partial(_row, "Synergy", more_is_better=True)
    rows = [
        row(
            f"TUNE, image/language/speech {'/'.join(map(str, weights))}, {words}",
            published,
            partial(tuned, weights=weights, to_bound=to_bound),
            "",
            bar=bar,
        )
        for weights, of_fair in zip(MIXES, (1.1, 1.05, 1.0), strict=True)
        for to_bound, words, published, bar in (
            (True, "of the bound", "0.9 or more", 0.85),
            (False, "of fair shares", "1.4 to 1.5 (makespan, mean time of a job)", of_fair),
        )
    ]
    rows.append(row("greedy: jobs of 32 without a place", "GPUs stay idle", waiting, "", bar=1.0))
    return simulated(rows, options.rounds)
