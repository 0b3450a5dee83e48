"""What a simulation reads: the files of a snapshot, or the files and opens of a trace."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from monarch.analysis.replay import Files, Order
from monarch.errors import UsageError
from monarch.namespace.snapshot import Snapshot
from monarch.namespace.trailer import may_replace
from monarch.placement.epochs import Epochs
from monarch.telemetry.trace import GZIP, read_trace
from monarch.text import escape_text
from monarch.types import ROOT_INO, Ino, Progress

# Entries of a snapshot, and opens of a trace, between two reports of the progress.
_REPORTED = 1 << 16
# The sums of sizes have 64 bits.
MOST_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Recorded:
    """The files of a data set. Of a trace also the opens of each epoch, the hits that the mount had
    in each (None if the tiers are unknown), and the number of opens that are missing."""

    files: Files
    orders: list[Order] | None = None
    hits: list[int] | None = None
    lost: int = 0
    is_cut_off: bool = False


def read(path: Path, progress: Progress) -> Recorded:
    """Reads a snapshot or a trace. Raises OSError, MonarchError, and UsageError if it has no file
    with bytes."""
    name = escape_text(os.fspath(path))
    if not stat.S_ISREG(path.stat().st_mode):
        raise UsageError(f"{name} is not a regular file", hint="write a trace into a file first")
    with path.open("rb") as file:
        head = file.read(2)
    is_trace = head == GZIP or head[:1] == b"{"
    if not is_trace and not may_replace(path):
        raise UsageError(
            f"{name} is neither a snapshot nor a trace",
            hint="`monarch snapshot build` makes the one, and `monarch trace` the other",
        )
    found = _read_trace(path, progress) if is_trace else _read_snapshot(path, progress)
    if not found.files.bytes:
        raise UsageError(f"{name} has no file with bytes: there is nothing to simulate")
    return found


def _read_snapshot(path: Path, progress: Progress) -> Recorded:
    snapshot = Snapshot.open_checked(path)
    try:
        sizes, keys = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        end = snapshot.entries + 1
        for start in range(ROOT_INO, end, _REPORTED):
            _, size, key = snapshot.files_in(range(start, min(start + _REPORTED, end)))
            sizes.append(size)
            keys.append(key)
            progress(min(start + _REPORTED, end) - 1, snapshot.entries, "reading the snapshot")
    finally:
        snapshot.close()
    return Recorded(Files(np.concatenate(sizes).astype(np.int64), np.concatenate(keys)))


def _read_trace(path: Path, progress: Progress) -> Recorded:
    """The keys of files are their numbers in the trace, which has no inode numbers."""
    numbers: dict[str, int] = {}
    sizes: list[int] = []
    opens: list[int] = []
    epochs: list[int | None] = []
    hits: list[bool | None] = []
    with read_trace(path) as trace:
        for each in trace:
            number = numbers.setdefault(each.path, len(sizes))
            if number == len(sizes):
                sizes.append(each.bytes)
            sizes[number] = max(sizes[number], each.bytes)
            opens.append(number)
            epochs.append(each.epoch)
            hits.append(None if each.tier is None else each.tier != trace.header.tiers[0])
            if len(opens) % _REPORTED == 0:
                progress(len(opens), None, "reading the trace")
        lost, is_cut_off = trace.lost, trace.end is None
    if sum(sizes) >= MOST_BYTES:
        raise UsageError(f"{escape_text(os.fspath(path))} has files of impossible sizes")
    files = Files(np.array(sizes, np.int64), np.arange(1, len(sizes) + 1).astype(np.uint64))
    starts = _starts(opens, epochs, len(sizes))
    order = np.array(opens, np.int64)
    known = np.array([bool(hit) for hit in hits], bool)
    is_known = len(hits) > 0 and None not in hits
    return Recorded(
        files,
        np.split(order, starts[1:]) if opens else [],
        [int(part.sum()) for part in np.split(known, starts[1:])] if is_known else None,
        lost,
        is_cut_off,
    )


def _starts(opens: list[int], epochs: list[int | None], files: int) -> list[int]:
    """The positions at which epochs begin: as the mount counted them, or else as it would have."""
    if None not in epochs:
        return [
            position
            for position, epoch in enumerate(epochs)
            if not position or epoch != epochs[position - 1]
        ]
    starts = [0]
    counts = Epochs(files)
    for position, number in enumerate(opens):
        before = counts.number
        counts.opened(Ino(number + 1), hit=False)
        if counts.number != before:
            # The opens by which the new epoch was recognised belong to it.
            starts.append(position + 1 - counts.epochs()[-1].opens)
    return starts


def sampled(found: Recorded, most: int, seed: int) -> Recorded:
    """A random sample of at most ``most`` files, with their opens. With the capacity in proportion
    it has about the same hit ratio (Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC
    construction with SHARDS", FAST 2015). Raises UsageError if none of them has bytes."""
    count = len(found.files)
    if count <= most:
        return found
    chosen = np.sort(np.random.default_rng(seed).choice(count, most, replace=False))
    places: npt.NDArray[np.int64] = np.full(count, -1, np.int64)
    places[chosen] = np.arange(most)
    files = found.files.chosen(chosen)
    if not files.bytes:
        raise UsageError(
            f"none of the {most:,} files of the sample has bytes", hint="give a larger --sample"
        )
    orders = None
    if found.orders is not None:
        orders = [mapped[mapped >= 0] for mapped in (places[order] for order in found.orders)]
    return Recorded(files, orders, None, found.lost, found.is_cut_off)
