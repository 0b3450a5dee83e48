"""``python -m tests.model SEED COUNT``: plays the plans of many seeds, two at a time."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

from tests.model.plan import MODES, generate
from tests.model.play import play
from tests.model.rig import Workers
from tests.model.shrink import shrink


class SeedRunner:
    """Plays seeds in several threads, each with workers and a directory of its own."""

    def __init__(self, directory: Path, *, mode: str, shrink_s: float) -> None:
        self._directory = directory
        self._mode = mode
        self._shrink_s = shrink_s
        self._own = threading.local()
        self._cleanup = ExitStack()

    def __enter__(self) -> SeedRunner:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._cleanup.close()

    def run(self, seed: int) -> tuple[int, float, str]:
        """The seed, the seconds it took, and what to print if it failed."""
        if not hasattr(self._own, "workers"):
            self._own.workers = self._cleanup.enter_context(Workers())
        where = self._directory / str(threading.get_native_id())
        began = time.monotonic()
        plan = generate(seed, mode=self._mode, may_have_disk=os.geteuid() == 0)
        failure = play(plan, where, self._own.workers)
        took = time.monotonic() - began
        if failure is None:
            return seed, took, ""
        found = shrink(plan, failure, where, self._own.workers, seconds=self._shrink_s)
        return seed, took, f"{failure}\nshort: {found.report()}"

    def all(self, seeds: range, jobs: int) -> Iterator[tuple[int, float, str]]:
        with ThreadPoolExecutor(jobs) as pool:
            for future in as_completed([pool.submit(self.run, seed) for seed in seeds]):
                yield future.result()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("seed", type=int, help="the first seed")
    parser.add_argument("count", type=int, nargs="?", default=1, help="how many seeds (default 1)")
    parser.add_argument("--mode", choices=MODES, default="", help="not each in its turn")
    parser.add_argument("--jobs", type=int, default=2, help="plans at the same time (default 2)")
    parser.add_argument("--shrink", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--directory", help="where mounts are made (default: the temporary one)")
    options = parser.parse_args(arguments)
    seeds = range(options.seed, options.seed + options.count)
    failed: list[int] = []
    slowest = (0.0, 0)
    began = time.monotonic()
    living = sys.stderr.isatty()
    with (
        tempfile.TemporaryDirectory(prefix="model-", dir=options.directory) as directory,
        SeedRunner(Path(directory), mode=options.mode, shrink_s=options.shrink) as runner,
    ):
        for done, (seed, took, failure_text) in enumerate(runner.all(seeds, options.jobs), start=1):
            slowest = max(slowest, (took, seed))
            if failure_text:
                failed.append(seed)
                print(f"\nseed {seed} failed: {failure_text}", flush=True)
            if living or done % 25 == 0 or done == options.count:
                rate = done / (time.monotonic() - began)
                line = f"{done} of {options.count} seeds, {len(failed)} failed, {rate:.2f} a second"
                print(line, end="\r" if living else "\n", file=sys.stderr, flush=True)
    print(
        f"{options.count} seeds in {time.monotonic() - began:.0f} s,"
        f" slowest {slowest[1]} ({slowest[0]:.1f} s), failed: {sorted(failed) or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
