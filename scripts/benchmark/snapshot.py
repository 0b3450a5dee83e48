"""The snapshot: how fast a tree is read, how large it becomes, and what a mount of it costs."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path

from scripts.benchmark.requirements import ATTRIBUTES_EXPIRE_S, require_slow_source
from scripts.benchmark.rows import BenchError, Result, Row, measure
from scripts.datasets.main import make
from scripts.tools.mount import Mount, monarch
from tests.equipment.processes import anonymous_bytes
from tests.equipment.slowfs import SlowSource

PER_DIRECTORY = 1000
# Behind a source of 1 ms a call a tenth of the files is walked in seconds, not in minutes. With
# fewer files than that the start of the interpreter would dominate.
SLOW_SHARE = 10
SLOW_FILES_LEAST = 20_000
SLOW_PER_DIRECTORY = 200
# find asks for one file after the other, so a few directories take long enough.
SLOW_LISTED = 10


class Lab:
    """The trees, and the snapshot of the large one."""

    def __init__(self, work: Path, files: int, jobs: int, *, slow: Path, slow_files: int) -> None:
        self._work, self._files, self._jobs = work, files, jobs
        self._slow, self._slow_files = slow, slow_files
        self._tree = work / "tree"
        self._snapshot = work / "tree.snapshot"
        self._mounts = 0

    def build(self) -> float:
        """Entries a second from a file system that is in memory."""
        return self._built(self._tree, self._snapshot, self._files)

    def build_slow(self) -> float:
        time.sleep(ATTRIBUTES_EXPIRE_S)
        return self._built(self._slow, self._work / "slow.snapshot", self._slow_files)

    def walk_slow(self) -> float:
        """The same tree, by as many threads, which call scandir and lstat only."""
        time.sleep(ATTRIBUTES_EXPIRE_S)
        begin = time.perf_counter()
        found = plain_walk(str(self._slow), self._jobs)
        if found != self._slow_files:
            raise BenchError(f"the plain walk found {found} of {self._slow_files} files")
        return found / (time.perf_counter() - begin)

    def size(self) -> float:
        return used_bytes(self._snapshot) / self._files

    def ready(self) -> float:
        """Seconds from the command to the first answer of a mount of the large tree."""
        with self._mount(self._tree, self._snapshot) as mounted:
            return mounted.seconds

    def find_mounted(self) -> float:
        """A cold listing of everything, by ``find``. Fails unless it equals that of the source."""
        with self._mount(self._tree, self._snapshot) as mounted:
            begin = time.perf_counter()
            ours = listing(mounted.path)
            seconds = time.perf_counter() - begin
        if ours != listing(self._tree):
            raise BenchError("the mount lists other entries than the source")
        return self._files / seconds

    def find_source(self) -> float:
        begin = time.perf_counter()
        listing(self._tree)
        return self._files / (time.perf_counter() - begin)

    def find_mounted_slow(self) -> float:
        """A cold listing of some directories of the slow source, through a mount of it."""
        with self._mount(self._slow, self._work / "slow.snapshot") as mounted:
            return self._found(mounted.path)

    def find_slow(self) -> float:
        time.sleep(ATTRIBUTES_EXPIRE_S)
        return self._found(self._slow)

    def _found(self, root: Path) -> float:
        begin = time.perf_counter()
        for number in range(SLOW_LISTED):
            listing(root / f"d{number:06d}")
        return SLOW_LISTED * SLOW_PER_DIRECTORY / (time.perf_counter() - begin)

    def memory(self) -> float:
        """Anonymous memory of the daemon for each file, in bytes, after a listing of all."""
        empty, of_empty = self._work / "nothing", self._work / "nothing.snapshot"
        empty.mkdir(exist_ok=True)
        self._built(empty, of_empty, 0)
        sizes = []
        for tree, snapshot in ((empty, of_empty), (self._tree, self._snapshot)):
            with self._mount(tree, snapshot) as mounted:
                listing(mounted.path)
                sizes.append(anonymous_bytes(mounted.status()["pid"]))
        return (sizes[1] - sizes[0]) / self._files

    def _built(self, tree: Path, snapshot: Path, files: int) -> float:
        remove(snapshot)
        begin = time.perf_counter()
        monarch("snapshot", "build", tree, "-o", snapshot, "-j", self._jobs)
        return files / (time.perf_counter() - begin)

    @contextmanager
    def _mount(self, tree: Path, snapshot: Path) -> Iterator[Mount]:
        self._mounts += 1
        state = self._work / f"state{self._mounts}"
        tier = self._work / f"tier{self._mounts}"
        mounted = Mount(
            tree, self._work / "mnt", tier=tier, capacity="1GiB", state=state, snapshot=snapshot
        )
        try:
            with mounted:
                yield mounted
        finally:
            for left in (state, tier):
                shutil.rmtree(left, ignore_errors=True)


def plain_walk(root: str, jobs: int) -> int:
    """The number of files below ``root``: ``jobs`` threads list directories and stat entries."""

    def visit(directory: str) -> tuple[list[str], int]:
        directories, files = [], 0
        with os.scandir(directory) as entries:
            for entry in entries:
                if stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode):
                    directories.append(entry.path)
                else:
                    files += 1
        return directories, files

    total = 0
    with ThreadPoolExecutor(jobs) as pool:
        pending: set[Future[tuple[list[str], int]]] = {pool.submit(visit, root)}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                directories, files = future.result()
                total += files
                pending |= {pool.submit(visit, directory) for directory in directories}
    return total


def listing(root: Path) -> str:
    """A digest of the output of ``find`` for every entry below ``root``, in any order."""
    command = ["find", ".", "-printf", r"%P\t%y\t%m\t%U\t%G\t%s\t%T@\n"]
    found = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    return hashlib.sha256(b"\n".join(sorted(found.splitlines()))).hexdigest()


def used_bytes(path: Path) -> int:
    """What ``path`` takes on disk, which is less than its size where LMDB's file has holes."""
    parts = [path, *path.rglob("*")] if path.is_dir() else [path]
    return sum(part.stat().st_blocks * 512 for part in parts if part.is_file())


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


ROWS: tuple[Row[Lab], ...] = (
    Row("build, local and warm", Lab.build, "files/s", more_is_better=True),
    Row(
        "build, slow source",
        Lab.build_slow,
        "files/s",
        against=Lab.walk_slow,
        against_name="scandir + lstat",
        more_is_better=True,
    ),
    Row("size on disk", Lab.size, "B/file"),
    Row("mount is ready", Lab.ready, "s"),
    Row(
        "find, local source",
        Lab.find_mounted,
        "files/s",
        against=Lab.find_source,
        against_name="the source",
        more_is_better=True,
    ),
    Row(
        "find, slow source",
        Lab.find_mounted_slow,
        "files/s",
        against=Lab.find_slow,
        against_name="the source",
        more_is_better=True,
    ),
    Row("memory of the daemon", Lab.memory, "B/file"),
)


def run(
    options: argparse.Namespace, work: Path
) -> tuple[str, dict[str, object], list[Result[Lab]]]:
    require_slow_source()
    directories = max(1, options.files // PER_DIRECTORY)
    make("empty", work / "tree", "--files", options.files, "--directories", directories)
    slow_files = max(SLOW_FILES_LEAST, options.files // SLOW_SHARE)
    slow_directories = slow_files // SLOW_PER_DIRECTORY
    make("empty", work / "few", "--files", slow_files, "--directories", slow_directories)
    with ExitStack() as stack:
        slow = stack.enter_context(SlowSource(work / "few", work / "slow"))
        slow.rules(f"lat * {options.latency}")
        lab = Lab(work, options.files, options.jobs, slow=slow.path, slow_files=slow_files)
        results = measure(ROWS, lambda: lab, options.rounds)
    conditions = {
        "files": options.files,
        "rounds": options.rounds,
        "jobs": options.jobs,
        "latency_ms": options.latency,
        "slow_files": slow_files,
    }
    title = (
        f"{options.files:,} files in {directories:,} directories; slow source: {slow_files:,} "
        f"files, {options.latency:g} ms a call, {options.jobs} calls at once"
    )
    return title, conditions, results
