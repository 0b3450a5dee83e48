"""A source that hangs: how fast readers of resident files still are.

In each round the readers go through resident files, first while the source answers, and then while
every call of it hangs and many other requests wait for files that have no copy: half of them open
one small file, the others read large ones; with ``no_open`` all read. The kernel drops the pages
that the readers read, so that each read asks the daemon or the tier again. The same is done for
names (a listing, statvfs) and for the daemon's status. The memory and the threads of the daemon
have bars.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from monarch.control.client import call
from scripts.benchmark.readers import read_files
from scripts.benchmark.requirements import require_slow_source
from scripts.benchmark.rows import BenchError, Result, Row
from scripts.datasets.main import make
from scripts.tools.mount import Mount
from tests.equipment.modes import MODES
from tests.equipment.processes import status_field
from tests.equipment.slowfs import SlowSource
from tests.equipment.waiting import becomes_true

READERS = 4
# Until all requests are waiting, and until all have ended.
PATIENCE_S = 60.0
LARGE = 4
LARGE_BYTES = 1 << 30
# Anonymous memory and threads of the daemon while requests wait: buffers and a stack for each call
# of the source that may be under way.
MEMORY_BAR_MIB = 64.0
# The control files of FUSE, through which the daemon raises the kernel's limit of 12 background
# requests in mode python. Without them so many requests can wait in this mode.
CONTROL_FILES = Path("/sys/fs/fuse/connections")
FEW_WAITERS = 8
THREADS_BAR = 200.0
# Each thread waits in one call: an open of the small file, or a read of a page of its own. All read
# where the kernel sends no opens (``opens`` is 0).
_WAIT = f"""
import os, sys, threading
threading.stack_size(65536)
root, turn, count, opens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
large = [os.open(f"{{root}}/large-{{turn}}-{{n}}", os.O_RDONLY) for n in range({LARGE})]
for fd in large:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
failed = []
def wait(number):
    try:
        if opens and number % 2:
            os.close(os.open(f"{{root}}/small-{{turn}}", os.O_RDONLY))
        else:
            os.pread(large[number % {LARGE}], 4096, number // {LARGE} * 8192)
    except OSError as error:
        failed.append(error)
print("ready", flush=True)
sys.stdin.readline()
threads = [threading.Thread(target=wait, args=(n,)) for n in range(count)]
for thread in threads:
    thread.start()
print("waiting", flush=True)
for thread in threads:
    thread.join()
print(failed[:1] or "", flush=True)
sys.exit(bool(failed))
"""


class Lab:
    """A mount on which all files but the cold ones are resident."""

    def __init__(
        self,
        mount: Mount,
        slow: SlowSource,
        options: argparse.Namespace,
        files: list[str],
        waiters: int,
        *,
        sends_opens: bool,
    ) -> None:
        self._slow = slow
        self._mount = mount
        self._seconds = options.seconds
        self._files = files
        self._directories = sorted({os.path.dirname(path) for path in files})
        self._waiters = waiters
        self._opens = int(sends_opens)
        self.turn = 0
        self._pid: int = self._status()["pid"]
        self._memory_kib = status_field(self._pid, "RssAnon")

    # -- what is measured ----------------------------------------------------------------------

    def reads(self) -> float:
        """Files a second."""
        return read_files(self._files, READERS, seconds=self._seconds, again=True, forget=True).rate

    def names(self) -> float:
        """Directories listed a second, with one statvfs each."""

        def look(number: int) -> None:
            os.listdir(self._directories[number % len(self._directories)])
            os.statvfs(self._mount.path)

        return self._rate(look)

    def status(self) -> float:
        """Answers of the daemon to ``status`` a second."""
        return self._rate(lambda number: self._status())

    def memory(self) -> float:
        """MiB of anonymous memory more than before the first round."""
        return (status_field(self._pid, "RssAnon") - self._memory_kib) / 1024

    def threads(self) -> float:
        return float(status_field(self._pid, "Threads"))

    def _rate(self, function: Callable[[int], object]) -> float:
        count, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < min(self._seconds, 10.0):
            function(count)
            count += 1
        return count / took

    def _status(self) -> dict[str, Any]:
        return call(self._mount.state / "control.sock", "status", {})

    # -- the hang ------------------------------------------------------------------------------

    @contextmanager
    def hang(self) -> Iterator[None]:
        """Every call of the source hangs, and the requests of all waiters wait."""
        number = f"{self._waiters}-{self.turn}"
        arguments = [str(self._mount.path), number, str(self._waiters), str(self._opens)]
        with subprocess.Popen(
            [sys.executable, "-c", _WAIT, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as waiting:
            assert waiting.stdin is not None
            assert waiting.stdout is not None
            if waiting.stdout.readline() != "ready\n":
                raise BenchError("the cold files cannot be opened")
            self._slow.rules("hang * .*")
            try:
                waiting.stdin.write("\n")
                waiting.stdin.flush()
                waiting.stdout.readline()
                self._until_all_wait()
                yield
            finally:
                self._slow.rules()
                errors = waiting.stdout.read().strip()
                if waiting.wait(PATIENCE_S):
                    raise BenchError(f"a request that waited for the source failed: {errors}")

    def _until_all_wait(self) -> None:
        def waiting() -> int:
            count: int = self._status()["requests"]["waiting"]
            return count

        # The kernel may merge two reads of neighbouring pages into one request.
        least = self._waiters * 0.9
        if not becomes_true(lambda: waiting() >= least, timeout_s=PATIENCE_S, step_s=0.05):
            raise BenchError(f"only {waiting()} requests wait for the source")


def rows(mode: str, waiters: int) -> list[Row[Lab]]:
    contender = f"{mode}, {waiters:,} wait"

    def against(name: str, unit: str, function: Callable[[Lab], float]) -> Row[Lab]:
        return Row(
            name=name,
            contender=contender,
            function=function,
            unit=unit,
            against=function,
            against_name="it answers",
            bar=0.9,
            more_is_better=True,
        )

    return [
        against("files/s, 4 readers", "files/s", Lab.reads),
        against("names/s, 1 lister", "names/s", Lab.names),
        against("status/s", "status/s", Lab.status),
        Row(
            name="more memory",
            contender=contender,
            function=Lab.memory,
            unit="MiB",
            bar=MEMORY_BAR_MIB,
        ),
        Row(
            name="threads",
            contender=contender,
            function=Lab.threads,
            unit="threads",
            bar=THREADS_BAR,
        ),
    ]


def waiters_in(mode: str, options: argparse.Namespace) -> list[int]:
    """The numbers of requests that wait in a mode."""
    is_limited = mode == "python" and not CONTROL_FILES.is_mount()
    least: int = min(FEW_WAITERS, *options.waiters) if is_limited else 0
    return [least] if least else list(options.waiters)


def _round(lab: Lab, results: list[Result[Lab]], turn: int) -> None:
    """Each row once, while the source answers and while it hangs; which is first alternates."""
    lab.turn = turn

    def answering() -> None:
        for result in results:
            if result.row.against is not None:
                result.against.append(result.row.against(lab))

    if turn % 2 == 0:
        answering()
    with lab.hang():
        for result in results:
            result.values.append(result.row.function(lab))
    if turn % 2:
        answering()


def _make_source(source: Path, options: argparse.Namespace) -> list[str]:
    """The images, whose names are returned, and for each round files that were never read."""
    make("imagefolder", source, "--files", options.files)
    files = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
    for waiters in {each for mode in options.modes for each in waiters_in(mode, options)}:
        for turn in range(options.rounds):
            (source / f"small-{waiters}-{turn}").write_bytes(b"cold" * 1000)
            for large in range(LARGE):
                with (source / f"large-{waiters}-{turn}-{large}").open("wb") as file:
                    file.truncate(LARGE_BYTES)
    return files


def run(
    options: argparse.Namespace, work: Path
) -> tuple[str, dict[str, object], list[Result[Lab]]]:
    """All rounds in all modes."""
    require_slow_source()
    if unknown := set(options.modes) - set(MODES):
        known = ", ".join(MODES)
        raise BenchError(f"no such mode: {', '.join(sorted(unknown))}; there are {known}")
    files = _make_source(work / "source", options)
    results: list[Result[Lab]] = []
    for mode in options.modes:
        with ExitStack() as stack:
            slow = stack.enter_context(SlowSource(work / "source", work / "slow"))
            mount = stack.enter_context(
                Mount(
                    slow.path,
                    work / "mnt",
                    tier=work / f"tier-{mode}",
                    capacity="900MiB",
                    state=work / f"state-{mode}",
                    # There is no room for the large files, so they stay at the source.
                    options=f"{MODES[mode]},placement.policy=first_come",
                )
            )
            mounted = [str(mount.path / name) for name in files]
            read_files(mounted, READERS)
            mount.settle(len(files))
            for waiters in waiters_in(mode, options):
                ours = [Result(row) for row in rows(mode, waiters)]
                results += ours
                opens = mode != "no_open"
                lab = Lab(mount, slow, options, mounted, waiters, sends_opens=opens)
                for turn in range(options.rounds):
                    _round(lab, ours, turn)
                    sys.stderr.write(
                        f"{mode}, {waiters} wait, round {turn + 1} of {options.rounds}\n"
                    )
    title = f"The source hangs for {options.seconds:g} s: readers of resident files, names, status"
    conditions = {
        "files": len(files),
        "seconds": options.seconds,
        "waiters": options.waiters,
    }
    return title, conditions, results
