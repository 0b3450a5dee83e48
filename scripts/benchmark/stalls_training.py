"""A training job for ``scripts/bench stalls``: images with augmentations, and pauses as a GPU.

Arguments are the directory of the images, the workers of the loader, and the time of a step of the
training in seconds. With ``load`` as the last argument it prints the time of a batch of the loader
alone instead. With ``pairs DIRECTORY COUNT`` it trains passes over the same samples, in the same
order and with the same augmentations, alternately from both directories, and prints the times of
each pair.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import monarch
from scripts.benchmark.hpsearch_job import BATCH, Images

# Batches before the measured ones, which the workers may have ready, and those measured.
_FIRST, _MEASURED = 8, 24


def command(root: Path, workers: int, step_s: float) -> list[str]:
    """The command that runs the job."""
    return [
        sys.executable,
        "-m",
        "scripts.benchmark.stalls_training",
        str(root),
        str(workers),
        str(step_s),
    ]


def loader_of(root: str, workers: int) -> Any:
    import torch.utils.data

    torch.set_num_threads(1)
    return torch.utils.data.DataLoader(
        Images(root), batch_size=BATCH, shuffle=True, num_workers=workers, drop_last=True
    )


def seconds_of_a_batch(batches: Iterable[Any], count: int) -> float:
    """The mean of those among the first ``count`` that the workers did not have ready."""
    begin = 0.0
    for number, _ in enumerate(batches, 1):
        if number == _FIRST:
            begin = time.perf_counter()
        if number == count:
            break
    else:
        raise ValueError("there are too few batches")
    return (time.perf_counter() - begin) / (count - _FIRST)


def pairs(roots: Sequence[str], workers: int, step_s: float, count: int) -> list[list[float]]:
    """The times of a batch in ``count`` pairs of passes, in the order A, B, B, A."""
    import torch

    loaders = [loader_of(root, workers) for root in roots]
    found = []
    for number in range(count):
        times = [0.0, 0.0]
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            torch.manual_seed(number)
            times[which] = seconds_of_a_batch(_trained(loaders[which], step_s), len(loaders[which]))
        found.append(times)
    return found


def _trained(loader: Any, step_s: float) -> Iterator[Any]:
    for batch in loader:
        yield batch
        time.sleep(step_s)


def main(root: str, workers: str, step_s: str, *rest: str) -> None:
    loader = loader_of(root, int(workers))
    if rest == ("load",):
        sys.stdout.write(f"{seconds_of_a_batch(loader, _FIRST + _MEASURED)}\n")
        return
    if rest:
        _, other, count = rest
        found = pairs((root, other), int(workers), float(step_s), int(count))
        sys.stdout.write(json.dumps(found) + "\n")
        return
    while True:
        for _ in monarch.watch(loader):
            time.sleep(float(step_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
