"""Compares records as this package reads them with those that LMDB reads."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import lmdb

from monarch.datasets.lmdb_reader import LmdbReader
from monarch.errors import LmdbError
from monarch.types import Progress

_TOGETHER = 256


def differences(reader: LmdbReader, sample: int, progress: Progress | None = None) -> Iterator[str]:
    """What differs between ``sample`` random records of ``reader``, or all if it has fewer, and
    those of the lmdb module, in words. Raises LmdbError, also if that module fails, and OSError."""
    chosen = sorted(random.sample(range(len(reader)), min(sample, len(reader))))
    try:
        yield from _compared(reader, chosen, progress)
    except lmdb.Error as error:
        raise LmdbError(f"{reader.path} cannot be read by lmdb: {error}") from None


def _compared(reader: LmdbReader, chosen: list[int], progress: Progress | None) -> Iterator[str]:
    environment = lmdb.open(os.fsencode(reader.path), subdir=False, readonly=True, lock=False)
    try:
        with environment.begin(buffers=True) as transaction:
            entries = transaction.stat()["entries"]
            if entries != len(reader):
                yield f"{len(reader)} records instead of {entries}"
            for start in range(0, len(chosen), _TOGETHER):
                together = chosen[start : start + _TOGETHER]
                for place, value in zip(together, reader.get_many(together), strict=True):
                    key = reader.keys[place]
                    expected = transaction.get(key)
                    if expected is None or value != expected:
                        yield f"record {place}, key {key!r}"
                if progress is not None:
                    progress(start + len(together), len(chosen), "records compared")
    finally:
        environment.close()
