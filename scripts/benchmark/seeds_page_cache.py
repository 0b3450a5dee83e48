"""The misses of the page cache of this kernel, for CoorDL (VLDB 2021).

A process in a control group whose memory holds a share of a data set reads its files, in a new
order in each epoch. What the kernel then reads from the disk is counted for the process
(``read_bytes`` in /proc/PID/io). The group needs root, and the files must be on a disk: where
either is missing, the rows are left out.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from scripts.benchmark.packs_trees import in_a_process
from scripts.benchmark.packs_writers import tree
from scripts.benchmark.rows import BenchError, Result, Row, measure

FILES, FILE_BYTES = 1000, 131_072
EPOCHS = 4
# Memory of the reader itself: most of its pages were allocated before it joined the group.
OWN_BYTES = 3 << 20
_ROOT = Path("/sys/fs/cgroup")
# The directories of both versions of control groups, and the file of their limit.
_PLACES = ((_ROOT / "memory", "memory.limit_in_bytes"), (_ROOT, "memory.max"))
_NAME = f"monarch-bench-{os.getpid()}"


@contextmanager
def limited_group(limit: int) -> Iterator[Path]:
    """A new control group with ``limit`` bytes of memory. Raises BenchError."""
    for place, name in _PLACES:
        group = place / _NAME
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / name).exists():
                (group / name).write_text(str(limit))
                yield group
                return
        finally:
            # Its processes have ended, but the kernel may still count their pages.
            with suppress(OSError):
                group.rmdir()
    raise BenchError("no control group can limit the memory of a process here")


def read_epochs(group: Path, paths: list[str], seed: int) -> list[int]:
    """The bytes that each epoch reads from the disk. For a process of its own."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    found = []
    for epoch in range(EPOCHS):
        before = _read_bytes()
        for path in random.Random(f"{seed} {epoch}").sample(paths, len(paths)):
            fd = os.open(path, os.O_RDONLY)
            try:
                # The kernel must not read ahead into other files' blocks, or beyond the end.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                os.read(fd, FILE_BYTES)
            finally:
                os.close(fd)
        found.append(_read_bytes() - before)
    return found


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


class Files:
    """The data set on the disk; no page of it is in memory when a round begins."""

    def __init__(self, work: Path) -> None:
        self._paths = [str(work / "data" / name) for name in tree(work / "data", FILES, FILE_BYTES)]
        self._seed = 0

    def misses(self, share: float) -> float:
        """The bytes that the later epochs read from the disk, in per cent of the data set. Raises
        BenchError if this machine cannot show them."""
        self._seed += 1
        self._drop()
        total = FILES * FILE_BYTES
        with limited_group(int(share * total) + OWN_BYTES) as group:
            epochs = in_a_process(read_epochs, group, self._paths, self._seed)
        if epochs[0] < total / 2:
            raise BenchError("the files are not read from a disk here")
        later = epochs[2:]
        return 100 * sum(later) / (len(later) * total)

    def _drop(self) -> None:
        for path in self._paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _misses(files: Files, *, share: float) -> float:
    return files.misses(share)


def of_coordl(options: argparse.Namespace, work: Path) -> list[Result[Files]]:
    figures = ((0.35, "85", 75.0), (0.65, "53 (DALI-shuffle), 66 (DALI-seq)", 45.0))
    rows = [
        Row(
            f"misses of the page cache, {share:.0%} of the bytes in memory",
            partial(_misses, share=share),
            "%",
            bar=bar,
            more_is_better=True,
            contender="CoorDL",
            published=published,
            how="run",
        )
        for share, published, bar in figures
    ]
    files = Files(work)
    try:
        return measure(rows, lambda: files, options.rounds)
    except BenchError as error:
        sys.stderr.write(f"left out, misses of the page cache: {error}\n")
        return []
