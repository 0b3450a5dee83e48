"""LMDB: random records of a database that is mapped into memory."""

from __future__ import annotations

import random
from pathlib import Path

import lmdb
from _protocol import digest, serve


def epoch(root: Path, number: int) -> dict[str, str]:
    # A mount that cannot be written has no place for LMDB's lock file.
    with (
        lmdb.open(str(root / "train"), readonly=True, lock=False, readahead=False) as environment,
        environment.begin(buffers=True) as transaction,
    ):
        keys = [bytes(key) for key in transaction.cursor().iternext(values=False)]
        random.Random(number).shuffle(keys)
        return {key.decode(): digest(bytes(transaction.get(key))) for key in keys}


if __name__ == "__main__":
    serve(epoch)
