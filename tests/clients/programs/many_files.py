"""Many small files with one call of ``get_many`` for each batch, in a random order."""

from __future__ import annotations

import random
from pathlib import Path

from _protocol import digest, serve

import monarch

BATCH = 16


def epoch(root: Path, number: int) -> dict[str, str]:
    paths = (path for path in root.rglob("*") if path.is_file())
    names = sorted(str(path.relative_to(root)) for path in paths)
    random.Random(number).shuffle(names)
    with monarch.open_dataset(root) as dataset:
        batches = [names[start : start + BATCH] for start in range(0, len(names), BATCH)]
        return {
            name: digest(bytes(view))
            for batch in batches
            for name, view in zip(batch, dataset.get_many(batch), strict=True)
        }


if __name__ == "__main__":
    serve(epoch)
