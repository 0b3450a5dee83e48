"""Epoch 1 of many small files over a slow source: from a pack, the plain tree, and other formats.

Each round reads one epoch with each contender, in a new process and in a new order. A contender on
a mount begins with an empty tier. The source's file system has all bytes in memory, so the source
is as slow as its rules say. The calls and bytes at the source are counted by the source itself,
from the begin of an epoch until no copy is under way.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from scripts.benchmark.packs_readers import (
    BATCH,
    GROUP,
    PEERS,
    Epoch,
    Peer,
    Place,
    Read,
    available,
    by_chunks,
    by_files,
    epoch_of,
    import_all,
    versions,
)
from scripts.benchmark.packs_writers import WRITERS, tree
from scripts.benchmark.quantities import with_unit
from scripts.benchmark.requirements import ATTRIBUTES_EXPIRE_S, require_room
from scripts.benchmark.rows import BenchError, Result, Row, measure
from scripts.tools.loader import WORKERS
from scripts.tools.mount import Mount, monarch
from tests.equipment.slowfs import SlowSource

# Files of a run, and of a run with --quick, by their size in KB.
FILES = {10: (20_000, 3000), 110: (20_000, 800)}
# The least ratio to the plain tree at the source, by the size of the files in KB, and to the
# mounted tree, which reads files of 10 KB with two fifths of the bandwidth of the source.
BARS = {10: 3.0, 110: 0.98}
MOUNTED_BAR = 0.98
# Files that are read by their names after an epoch.
NAMED = 200
# Directories of the tree, the pack, and the formats of the peers, at the source.
_TREE, _PACK = "tree", "pack"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contender:
    """``place`` is a directory at the source; ``is_mounted``: it is mounted by Monarch."""

    name: str
    read: Read
    place: str
    is_mounted: bool = False


SOURCE = Contender("tree at the source", by_files, _TREE)
TREE = Contender("tree, mounted", by_files, _TREE, is_mounted=True)
# The plain tree, by a program that was changed as that of the packs with ``get_many``.
SOURCE_TOGETHER = Contender("tree at the source, get_many", partial(by_files, together=True), _TREE)
CHUNK_WISE = Contender("pack, chunk-wise", by_chunks, _PACK, is_mounted=True)
PACKS = (
    Contender("pack, file-wise", by_files, _PACK, is_mounted=True),
    CHUNK_WISE,
    Contender("pack, file-wise, get_many", partial(by_files, together=True), _PACK, True),
    Contender("pack, chunk-wise, get_many", partial(by_chunks, together=True), _PACK, True),
    # As few files are shuffled as by the other formats, or some more: 1,600 of 10 KB.
    Contender(
        "pack, one chunk a group, get_many",
        partial(by_chunks, group=1, together=True),
        _PACK,
        True,
    ),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """``calls`` and ``read_bytes`` at the source. ``named_s``: to read a file by its name after the
    epoch, in seconds; 0 where files have no names."""

    epoch: Epoch
    calls: int
    read_bytes: int
    named_s: float


class Lab:
    """One round: every contender once. Each round begins with another contender."""

    def __init__(self, bench: Bench) -> None:
        self.files, self.bytes = len(bench.names), bench.bytes
        self._of: dict[str, Measured] = {}
        for one in bench.in_turn():
            self._of[one.name] = bench.measured(one)
            words = with_unit(self.rate(one), "files/s")
            sys.stderr.write(f"{bench.size // 1000} KB, {one.name}: {words}\n")

    def rate(self, *contenders: Contender) -> float:
        """Files a second, of the fastest of ``contenders``."""
        return self.files / min(self._of[one.name].epoch.seconds for one in contenders)

    def first_batch(self, contender: Contender) -> float:
        """Milliseconds."""
        return self._of[contender.name].epoch.first_batch_s * 1e3

    def calls(self, contender: Contender) -> float:
        return self._of[contender.name].calls / self.files

    def read_share(self, contender: Contender) -> float:
        """The bytes that were read at the source over those of the files."""
        return self._of[contender.name].read_bytes / self.bytes

    def named(self, contender: Contender) -> float:
        """Milliseconds for each file that is read by its name."""
        return self._of[contender.name].named_s * 1e3


class Bench:
    """The files in all formats, and the slow source over them."""

    def __init__(
        self, work: Path, files: int, size: int, options: argparse.Namespace, stack: ExitStack
    ) -> None:
        self._work = work
        self._turn = self._epochs = 0
        self.size, self.bytes = size, files * size
        self.peers = _peers(available(options.peers))
        mounted = (1 + len(PACKS)) * options.rounds
        require_room(work.parent, (2 + 2 * len(self.peers) + mounted) * self.bytes)
        data = work / "data"
        self.names = tree(data / _TREE, files, size)
        monarch("pack", "build", data / _TREE, "-o", data / _PACK, "-q")
        self._write_formats(data)
        self._source = stack.enter_context(SlowSource(data, work / "slow"))
        self._source.rules(f"lat * {options.latency}", f"read_MBps {options.bandwidth}")

    def in_turn(self) -> list[Contender]:
        contenders = [SOURCE, SOURCE_TOGETHER, TREE, *PACKS, *self.peers]
        begin = self._turn % len(contenders)
        self._turn += 1
        return [*contenders[begin:], *contenders[:begin]]

    def measured(self, contender: Contender) -> Measured:
        """One epoch. The tiers stay until the end of the run: for a minute after many files were
        deleted, ext4 takes almost a millisecond to create one."""
        self._epochs += 1
        root = self._source.path / contender.place
        if not contender.is_mounted:
            return self._measured(contender, root, None)
        with Mount(
            root,
            self._work / "mnt",
            tier=self._work / f"tier{self._epochs}",
            capacity=str(2 * self.bytes + (64 << 20)),
            state=self._work / f"state{self._epochs}",
        ) as mounted:
            return self._measured(contender, mounted.path, mounted)

    def _measured(self, contender: Contender, root: Path, mounted: Mount | None) -> Measured:
        place = Place(
            root,
            self.names if contender.place in (_TREE, _PACK) else (),
            self._epochs,
            self._work / f"cache{self._epochs}",
            self._source.path / _PACK if contender.place == _PACK else None,
        )
        if place.names:  # the previous contender may have read the same files
            time.sleep(ATTRIBUTES_EXPIRE_S)
        calls, before = self._source.calls(), self._source.counters()["read_bytes"]
        epoch = in_a_process(epoch_of, contender.read, place)
        if (epoch.files, epoch.bytes) != (len(self.names), self.bytes):
            raise BenchError(f"{contender.name}: {epoch.files} files, {epoch.bytes} bytes")
        if mounted is not None:
            # Why an epoch was slow, if the mount knows.
            if why := mounted.status()["health"]["why"]:
                sys.stderr.write(f"{contender.name}: {why}\n")
            mounted.settle(0)
        calls = self._source.calls() - calls
        read_bytes = self._source.counters()["read_bytes"] - before
        return Measured(epoch, calls, read_bytes, self._read_by_name(place))

    def _read_by_name(self, place: Place) -> float:
        if not place.names:
            return 0.0
        chance = random.Random(-place.seed)
        paths = [f"{place.root}/{name}" for name in chance.sample(place.names, self._named())]
        begin = time.perf_counter()
        for path in paths:
            with open(path, "rb") as file:
                file.read()
        return (time.perf_counter() - begin) / len(paths)

    def _named(self) -> int:
        return min(NAMED, len(self.names))

    def _write_formats(self, data: Path) -> None:
        paths = [data / _TREE / name for name in self.names]
        random.Random(1).shuffle(paths)
        for peer in self.peers:
            (data / peer.place).mkdir()
            in_a_process(WRITERS[peer.place], paths, data / peer.place, self.bytes)


def in_a_process(function: Callable[..., T], *arguments: Any) -> T:
    """In a new process, since TensorFlow and PyTorch cannot fork once they have threads."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *arguments).result()


def _peers(peers: Sequence[Peer]) -> tuple[Contender, ...]:
    return tuple(Contender(peer.title, peer.read, peer.name) for peer in peers)


def rows_of(kilobytes: int, peers: Sequence[Contender]) -> Iterator[Row[Lab]]:
    size, unit = f"{kilobytes} KB", "files/s"
    for contender in PACKS:
        ours = partial(_rate, contenders=(contender,))
        for other, bar in (
            (SOURCE, BARS[kilobytes]),
            (SOURCE_TOGETHER, None),
            (TREE, MOUNTED_BAR),
        ):
            theirs = partial(_rate, contenders=(other,))
            yield Row(f"{size}, {contender.name}", ours, unit, theirs, other.name, bar, True)
        if peers:
            theirs = partial(_rate, contenders=tuple(peers))
            name = "the best other format"
            yield Row(f"{size}, {contender.name}", ours, unit, theirs, name, 1.0, True)
    everyone = (SOURCE, SOURCE_TOGETHER, TREE, *PACKS, *peers)
    for contender in (SOURCE_TOGETHER, TREE, *peers):
        yield Row(f"{size}, {contender.name}", partial(_rate, contenders=(contender,)), unit)
    for contender in everyone:
        first = partial(_first_batch, contender=contender)
        yield Row(f"{size}, first batch, {contender.name}", first, "ms")
    for contender in everyone:
        calls = partial(_calls, contender=contender)
        yield Row(f"{size}, calls at the source, {contender.name}", calls, "a file")
    for contender in everyone:
        share = partial(_read_share, contender=contender)
        yield Row(f"{size}, read at the source, {contender.name}", share, "of the bytes")
    at_source = partial(_named, contender=SOURCE)
    for contender in (TREE, *PACKS):
        yield Row(
            f"{size}, by name after the epoch, {contender.name}",
            partial(_named, contender=contender),
            "ms",
            at_source,
            SOURCE.name,
        )


def _rate(lab: Lab, *, contenders: Sequence[Contender]) -> float:
    return lab.rate(*contenders)


def _first_batch(lab: Lab, *, contender: Contender) -> float:
    return lab.first_batch(contender)


def _calls(lab: Lab, *, contender: Contender) -> float:
    return lab.calls(contender)


def _read_share(lab: Lab, *, contender: Contender) -> float:
    return lab.read_share(contender)


def _named(lab: Lab, *, contender: Contender) -> float:
    return lab.named(contender)


def measured(
    options: argparse.Namespace, work: Path
) -> tuple[list[Result[Lab]], dict[str, object]]:
    peers = available(options.peers)
    import_all(peers)
    results: list[Result[Lab]] = []
    counts: dict[str, int] = {}
    with ExitStack() as stack:
        for kilobytes in FILES if options.file_kb is None else (options.file_kb,):
            files = options.files or FILES[kilobytes][options.quick]
            place = work / f"{kilobytes}KB"
            place.mkdir(parents=True)
            bench = Bench(place, files, kilobytes * 1000, options, stack)
            rows = list(rows_of(kilobytes, bench.peers))
            results += measure(rows, partial(Lab, bench), options.rounds)
            counts[f"{kilobytes} KB"] = files
    conditions: dict[str, object] = {
        "files": counts,
        "workers": WORKERS,
        "batch": BATCH,
        "group": GROUP,
        "libraries": versions(peers),
        "left_out": [peer.name for peer in PEERS if peer not in peers],
    }
    return results, conditions
