"""A source that hangs, and four readers of resident files: what of their throughput is left?

In each round the readers go through resident files, first while the source answers and then while
every call of it hangs and as many other processes wait for files that have no copy. The kernel
keeps no page of what they read, so each file is asked of the daemon or of the tier again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from _bench import WAYS, BenchError, Result, Row, make, measure_once, slow_source_unavailable
from _mounts import Mount
from _readers import read_files

READERS = 4
WAITING = 8
# Until those that wait are seen to wait, and between two looks. Seconds.
PATIENCE_S = 10.0
LOOK_S = 0.05


class Lab:
    """A mount of which all files but those in ``cold`` are resident."""

    def __init__(self, mount: Mount, slow: object, seconds: float, files: list[str]) -> None:
        from tests.equipment.slowfs import SlowSource

        assert isinstance(slow, SlowSource)
        self._slow = slow
        self._mount = mount
        self._seconds = seconds
        self._files = files
        self._turn = 0

    def answering(self) -> float:
        """Files a second while the source answers."""
        return self._read()

    def hanging(self) -> float:
        with self._hang():
            return self._read()

    def _read(self) -> float:
        return read_files(self._files, READERS, seconds=self._seconds, again=True, forget=True).rate

    def _asked(self) -> int:
        """Calls that have reached the source; the first of each that waits is its last for now."""
        counters = self._slow.counters()
        return counters["getattr"] + counters["open"]

    @contextmanager
    def _hang(self) -> Iterator[None]:
        self._slow.rules("hang * .*")
        before = self._asked()
        names = [f"cold-{self._turn}-{number}" for number in range(WAITING)]
        self._turn += 1
        waiting = [
            subprocess.Popen(["cat", str(self._mount.path / name)], stdout=subprocess.DEVNULL)
            for name in names
        ]
        try:
            deadline = time.monotonic() + PATIENCE_S
            while self._asked() < before + WAITING:
                if time.monotonic() > deadline:
                    raise BenchError("nobody waits for the source that hangs")
                time.sleep(LOOK_S)
            yield
        finally:
            self._slow.rules()
            if sum(process.wait(PATIENCE_S) for process in waiting):
                raise BenchError("who waited for the source was told an error")


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
    for turn in range(options.rounds):
        for number in range(WAITING):
            (work / "source" / f"cold-{turn}-{number}").write_bytes(b"cold" * 1000)
    results = []
    for mode in options.modes:
        row = Row(
            name="files/s, 4 readers",
            who=mode,
            function=Lab.hanging,
            unit="files/s",
            against=Lab.answering,
            against_name="it answers",
            bar=0.9,
            more_is_better=True,
        )
        results.append(Result(row))
        with ExitStack() as stack:
            slow = stack.enter_context(SlowSource(work / "source", work / "slow"))
            mount = stack.enter_context(
                Mount(
                    slow.path,
                    work / "mnt",
                    tier=work / f"tier-{mode}",
                    capacity="8GiB",
                    state=work / f"state-{mode}",
                    options=WAYS[mode],
                )
            )
            mounted = [str(mount.path / name) for name in files]
            read_files(mounted, READERS)
            mount.settle(len(files))
            lab = Lab(mount, slow, options.seconds, mounted)
            for turn in range(options.rounds):
                measure_once(results[-1], lab, turn)
                sys.stderr.write(f"{mode}, round {turn + 1} of {options.rounds}\n")
    title = f"The source hangs for {options.seconds:g} s: {READERS} readers of resident files"
    conditions = {"files": len(files), "seconds": options.seconds, "waiting": WAITING}
    return title, conditions, results
