"""A training job for ``scripts/bench stalls``: images with augmentations, and pauses as a GPU.

Arguments are the directory of the images, the workers of the loader, and the time of a step of the
training in seconds. With ``load`` as the last argument it prints the time of a batch of the loader
alone instead.
"""

from __future__ import annotations

import sys
import time
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


def seconds_of_a_batch(loader: Any) -> float:
    begin = 0.0
    for number, _ in enumerate(loader, 1):
        if number == _FIRST:
            begin = time.perf_counter()
        if number == _FIRST + _MEASURED:
            break
    else:
        raise ValueError("there are too few batches")
    return (time.perf_counter() - begin) / _MEASURED


def main(root: str, workers: str, step_s: str, *rest: str) -> None:
    loader = loader_of(root, int(workers))
    if rest == ("load",):
        sys.stdout.write(f"{seconds_of_a_batch(loader)}\n")
        return
    while True:
        for _ in monarch.watch(loader):
            time.sleep(float(step_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
