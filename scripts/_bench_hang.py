"""A source that hangs, and readers of resident files: what is left of their speed?

In each round the readers go through resident files, first while the source answers and then while
every call of it hangs and many other requests wait for files that have no copy: half of them open
one small file, the others read large ones. The kernel keeps no page of what the readers read, so
each file is asked of the daemon or of the tier again. The same is done for names (a listing, the
numbers of the file system) and for the daemon's status. Its memory and threads are bounded.
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

from _bench import WAYS, BenchError, Result, Row, make, slow_source_unavailable
from _mounts import Mount
from _readers import read_files

READERS = 4
# Until the requests that wait are seen to wait, and between two looks. Seconds.
PATIENCE_S = 60.0
LOOK_S = 0.05
LARGE = 4
LARGE_BYTES = 1 << 30
# Anonymous memory and threads of the daemon that requests which wait may take. What a thread may
# need at most: its buffers and stack, for each of the calls of the source that may be under way.
MEMORY_BAR_MIB = 64.0
THREADS_BAR = 200.0
# Each thread waits in one call: an open of the small file, or a read of a page that no other reads.
_WAIT = f"""
import os, sys, threading
threading.stack_size(65536)
root, turn, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
large = [os.open(f"{{root}}/large-{{turn}}-{{n}}", os.O_RDONLY) for n in range({LARGE})]
for fd in large:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
failed = []
def wait(number):
    try:
        if number % 2:
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
    """A mount of which all files but the cold ones are resident."""

    def __init__(
        self,
        mount: Mount,
        slow: object,
        options: argparse.Namespace,
        files: list[str],
        waiters: int,
    ) -> None:
        from tests.equipment.slowfs import SlowSource

        assert isinstance(slow, SlowSource)
        self._slow = slow
        self._mount = mount
        self._seconds = options.seconds
        self._files = files
        self._directories = sorted({os.path.dirname(path) for path in files})
        self._waiters = waiters
        self.turn = 0
        self._pid = int(str(self._status()["pid"]))
        self._before = self._taken()

    # -- what is measured ----------------------------------------------------------------------

    def reads(self) -> float:
        """Files a second."""
        return read_files(self._files, READERS, seconds=self._seconds, again=True, forget=True).rate

    def names(self) -> float:
        """Directories listed, with one look at the file system each, a second."""

        def look(number: int) -> None:
            os.listdir(self._directories[number % len(self._directories)])
            os.statvfs(self._mount.path)

        return self._rate(look)

    def status(self) -> float:
        """Answers a second of the daemon to ``status``."""
        return self._rate(lambda number: self._status())

    def memory(self) -> float:
        """MiB of anonymous memory more than before the first round."""
        return (self._taken()[0] - self._before[0]) / 1024

    def threads(self) -> float:
        return float(self._taken()[1])

    def _rate(self, call: Callable[[int], object]) -> float:
        count, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < min(self._seconds, 10.0):
            call(count)
            count += 1
        return count / took

    def _status(self) -> dict[str, object]:
        from monarch.control.client import call

        return dict(call(self._mount.state / "control.sock", "status", {}))

    def _taken(self) -> tuple[int, int]:
        """KiB of anonymous memory, and threads."""
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        told = dict(line.split(":", 1) for line in lines)
        return int(told["RssAnon"].split()[0]), int(told["Threads"])

    # -- the hang ------------------------------------------------------------------------------

    @contextmanager
    def hang(self) -> Iterator[None]:
        """Every call of the source hangs, and as many requests as there are to be wait."""
        number = f"{self._waiters}-{self.turn}"
        arguments = [str(self._mount.path), number, str(self._waiters)]
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
                told = waiting.stdout.read()
                if waiting.wait(PATIENCE_S):
                    raise BenchError(f"who waited for the source was told an error: {told.strip()}")

    def _until_all_wait(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            requests = self._status()["requests"]
            assert isinstance(requests, dict)
            # Two that read neighbouring pages may be one request of the kernel's.
            if requests["waiting"] >= self._waiters * 0.9:
                return
            if time.monotonic() > deadline:
                raise BenchError(f"only {requests['waiting']} requests wait for the source")
            time.sleep(LOOK_S)


def rows(mode: str, waiters: int) -> list[Row[Lab]]:
    told = f"{mode}, {waiters:,} wait"

    def against(name: str, unit: str, function: Callable[[Lab], float]) -> Row[Lab]:
        return Row(
            name=name,
            who=told,
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
        Row(name="more memory", who=told, function=Lab.memory, unit="MiB", bar=MEMORY_BAR_MIB),
        Row(name="threads", who=told, function=Lab.threads, unit="threads", bar=THREADS_BAR),
    ]


def _round(lab: Lab, results: list[Result[Lab]], turn: int) -> None:
    """Each row once, while the source answers and while it hangs; in turns which comes first."""
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


def run(
    options: argparse.Namespace, work: Path
) -> tuple[str, dict[str, object], list[Result[Lab]]]:
    """All rounds of all ways of reading."""
    if reason := slow_source_unavailable():
        raise BenchError(f"there is no slow source: {reason}")
    from tests.equipment.slowfs import SlowSource

    if unknown := set(options.modes) - set(WAYS):
        raise BenchError(f"no such mode: {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    make("imagefolder", work / "source", "--files", options.files)
    files = sorted(
        str(path.relative_to(work / "source"))
        for path in (work / "source").rglob("*")
        if path.is_file()
    )
    numbers = [f"{waiters}-{turn}" for waiters in options.waiters for turn in range(options.rounds)]
    for number in numbers:
        (work / "source" / f"small-{number}").write_bytes(b"cold" * 1000)
        for large in range(LARGE):
            with (work / "source" / f"large-{number}-{large}").open("wb") as file:
                file.truncate(LARGE_BYTES)
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
                    # So the large files, for which there is no room, stay at the source.
                    options=f"{WAYS[mode]},placement.policy=first_come",
                )
            )
            mounted = [str(mount.path / name) for name in files]
            read_files(mounted, READERS)
            mount.settle(len(files))
            for waiters in options.waiters:
                ours = [Result(row) for row in rows(mode, waiters)]
                results += ours
                lab = Lab(mount, slow, options, mounted, waiters)
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
