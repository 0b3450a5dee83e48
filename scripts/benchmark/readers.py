"""Reads as training does, in separate processes, and times it from the common start to the end.

The readers are forked and wait for each other at a barrier, so that the time includes neither the
start of a process nor the import of a library. A rate is what all readers have read, over the time
from the barrier to the end of the last reader.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Barrier
from typing import Generic, TypeVar

from scripts.benchmark.rows import BenchError

T = TypeVar("T")

BUFFER_BYTES = 1 << 20
RANDOM_READS = 20_000
# Reads between two reads of the clock: it must not cost what a read of 4 KiB costs.
RANDOM_BATCH = 64
BARRIER_S = 60.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read, in which time. ``count`` is of files, entries, reads or passes."""

    count: int
    bytes: int
    seconds: float

    def __add__(self, then: Reading) -> Reading:
        """Both, one after the other."""
        return Reading(
            self.count + then.count, self.bytes + then.bytes, self.seconds + then.seconds
        )

    @property
    def rate(self) -> float:
        return self.count / self.seconds

    @property
    def megabytes_per_s(self) -> float:
        return self.bytes / self.seconds / 1e6


Counts = tuple[int, int]


class Shared(Generic[T]):
    """The items of an order, of which each reader takes the next one when it has read its last one,
    as the workers of a DataLoader do with batches. Forked readers share the place in it."""

    def __init__(self, order: Sequence[T]) -> None:
        self._order = order
        self._taken = multiprocessing.get_context("fork").Value("q", 0)

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._taken.get_lock():
                place = self._taken.value
                self._taken.value += 1
            if place >= len(self._order):
                return
            yield self._order[place]


def _end(seconds: float | None) -> float:
    return math.inf if seconds is None else time.perf_counter() + seconds


def read_files(
    paths: Sequence[str],
    readers: int,
    *,
    seconds: float | None = None,
    again: bool = False,
    forget: bool = False,
) -> Reading:
    """Every file once, each reader its own share of them; at most for ``seconds``.

    ``again``: over and over until ``seconds`` are over. ``forget``: the kernel drops the pages of
    each file after it was read, so that the next read asks the file system again.
    """
    shares = [paths[number::readers] for number in range(readers)]
    return together(
        [partial(read_share, share, seconds, again=again, forget=forget) for share in shares]
    )


def read_lists(lists: Sequence[Sequence[str]]) -> Reading:
    """One reader for each list of files, which reads every file of it once."""
    return together([partial(read_share, each) for each in lists])


def read_share(
    paths: Iterable[str],
    seconds: float | None = None,
    *,
    again: bool = False,
    forget: bool = False,
) -> Counts:
    """Every file once, as ``read_files`` with one reader, in this process."""
    buffers = [bytearray(BUFFER_BYTES)]
    count = size = 0
    end = _end(seconds)
    while True:
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                while got := os.readv(fd, buffers):
                    size += got
                if forget:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
            count += 1
            if time.perf_counter() > end:
                return count, size
        if not again:
            return count, size


def read_through(path: Path, *, seconds: float | None = None, again: bool = False) -> Reading:
    """One file from the start to the end, in blocks of 1 MiB; at most for ``seconds``."""
    return together([partial(_read_through, path, seconds, again)])


def _read_through(path: Path, seconds: float | None, again: bool) -> Counts:
    buffers = [bytearray(BUFFER_BYTES)]
    size = 0
    end = _end(seconds)
    fd = os.open(path, os.O_RDONLY)
    try:
        while time.perf_counter() < end:
            if got := os.readv(fd, buffers):
                size += got
            elif again:
                os.lseek(fd, 0, os.SEEK_SET)
            else:
                break
    finally:
        os.close(fd)
    return 1, size


def read_randomly(path: Path, block: int, *, seconds: float, seed: int = 1) -> Reading:
    """Blocks of one file, over and over, at offsets that depend on the seed alone."""
    return together([partial(_read_randomly, path, block, seconds, seed)])


def _read_randomly(path: Path, block: int, seconds: float, seed: int) -> Counts:
    chance = random.Random(seed)
    blocks = os.stat(path).st_size // block
    offsets = [chance.randrange(blocks) * block for _ in range(RANDOM_READS)]
    buffers = [bytearray(block)]
    count = 0
    fd = os.open(path, os.O_RDONLY)
    try:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            begin = count % RANDOM_READS
            for offset in offsets[begin : begin + RANDOM_BATCH]:
                os.preadv(fd, buffers, offset)
                count += 1
    finally:
        os.close(fd)
    return count, count * block


def read_pieces(path: str, places: Iterable[int]) -> Counts:
    """The pieces of 1 MiB that begin at these places of a file, in this process."""
    buffers = [bytearray(BUFFER_BYTES)]
    count = size = 0
    fd = os.open(path, os.O_RDONLY)
    try:
        for place in places:
            size += os.preadv(fd, buffers, place)
            count += 1
    finally:
        os.close(fd)
    return count, size


def scan_mapped(path: Path, *, seconds: float) -> Reading:
    """One file through a mapping, copied out 1 MiB at a time; mapped again for each pass."""
    return together([partial(_scan_mapped, path, seconds)])


def _scan_mapped(path: Path, seconds: float) -> Counts:
    target = memoryview(bytearray(BUFFER_BYTES))
    count = size = 0
    end = time.perf_counter() + seconds
    with open(path, "rb") as file:
        while time.perf_counter() < end:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                with memoryview(mapped) as view:
                    for offset in range(0, len(view), BUFFER_BYTES):
                        part = view[offset : offset + BUFFER_BYTES]
                        target[: len(part)] = part
                        size += len(part)
                        part.release()
            count += 1
    return count, size


def list_and_stat(
    directories: Sequence[str], *, seconds: float | None = None
) -> tuple[Reading, int]:
    """scandir, and stat of every entry; also how many of the directories were done in time."""
    reading = together([partial(_list_and_stat, directories, seconds)])
    # The second count of this task is of directories, not of bytes.
    return Reading(reading.count, 0, reading.seconds), reading.bytes


def _list_and_stat(directories: Sequence[str], seconds: float | None) -> Counts:
    count = done = 0
    end = _end(seconds)
    for directory in directories:
        with os.scandir(directory) as entries:
            for entry in entries:
                entry.stat(follow_symlinks=False)
                count += 1
        done += 1
        if time.perf_counter() > end:
            break
    return count, done


def together(tasks: Sequence[Callable[[], Counts]]) -> Reading:
    """Run each task in a separate process, all of them from the same moment on."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(tasks))
    processes, ends = [], []
    try:
        for task in tasks:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_reader, args=(task, barrier, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(ours)
        answers = [_answer(end) for end in ends]
    finally:
        for end in ends:
            end.close()
        for process in processes:
            # A process that has answered is about to end; one that has not is killed.
            process.join(0.5)
            if process.is_alive():
                process.kill()
            process.join()
    return Reading(
        sum(count for _, _, (count, _) in answers),
        sum(size for _, _, (_, size) in answers),
        max(end for _, end, _ in answers) - min(begin for begin, _, _ in answers),
    )


def _reader(task: Callable[[], Counts], barrier: Barrier, end: Connection) -> None:
    try:
        barrier.wait(BARRIER_S)
        begin = time.perf_counter()
        counts = task()
        end.send((begin, time.perf_counter(), counts))
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        end.send(str(error))


def _answer(end: Connection) -> tuple[float, float, Counts]:
    try:
        answer = end.recv()
    except EOFError:
        raise BenchError("a reader ended without an answer") from None
    if isinstance(answer, str):
        raise BenchError(f"a reader failed: {answer}")
    times: tuple[float, float, Counts] = answer
    return times
