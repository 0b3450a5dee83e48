"""Processes share prepared batches: with jobs and brokers that are killed or stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.brokers import brokers, kill_brokers
from tests.datasets.staging_job import SIZE
from tests.equipment.waiting import wait_until

ROOT = Path(__file__).parents[2]
# Longer than any test: no job is expelled.
_LONG_S = 600.0


class Jobs:
    """Jobs of one area, by name, and what they log."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "area"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self,
        *names: str,
        stop: tuple[str, int] | None = None,
        count: int = 50,
        epochs: int = 1,
        closes: bool = True,
        **area: Any,
    ) -> None:
        options = {
            "area": {"jobs": 4, "workers": 0, "stall_timeout": _LONG_S, **area},
            "count": count,
            "epochs": epochs,
            "stop": stop,
            "closes": closes,
        }
        for name in names:
            self.processes[name] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.datasets.staging_job"),
                    *(str(self.root), name, json.dumps(options)),
                ],
                cwd=ROOT,
            )

    def lines(self, name: str, event: str) -> list[list[int]]:
        """The numbers of each event of this kind that a job has logged."""
        path = self.root / f"{name}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [list(map(int, line[1:].split())) for line in lines if line[0] == event]

    def wait_for_stop(self, name: str) -> None:
        wait_until(lambda: bool(self.lines(name, "H")), f"{name} stops", timeout_s=100)

    def go(self, name: str) -> None:
        (self.root / f"{name}.go").touch()

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def wait(self, *names: str) -> None:
        """Waits for the ends of these jobs, or of all."""
        for name in names or self.processes:
            assert self.processes[name].wait(100) == 0

    def used(self, name: str) -> list[int]:
        return [number for line in self.lines(name, "U") for number in line]

    def prepared(self, *names: str) -> Counter[tuple[int, ...]]:
        return Counter(tuple(line) for name in names for line in self.lines(name, "P"))

    def brokers(self) -> list[int]:
        return brokers(self.directory)

    def kill_brokers(self) -> None:
        kill_brokers(self.directory)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.kill_brokers()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    yield made
    made.close()


def ids(count: int = 50, epochs: int = 1) -> list[int]:
    return list(range(count * SIZE)) * epochs


@pytest.mark.promise(255)
@pytest.mark.promise(256)
@pytest.mark.promise(259)
@pytest.mark.parametrize("workers", [0, 1])
def test_four_jobs_prepare_each_batch_once_and_use_each_once(jobs: Jobs, workers: int) -> None:
    names = ("a", "b", "c", "d")
    jobs.start(*names, workers=workers)
    jobs.wait()
    assert jobs.prepared(*names) == {(0, number): 1 for number in range(50)}
    for name in names:
        assert jobs.used(name) == ids()
        ((_, expulsions, before, after, most_kept, _),) = jobs.lines(name, "D")
        assert (expulsions, after) == (0, before)
        assert most_kept <= 16
    assert sum(jobs.lines(name, "D")[0][0] for name in names) == 50
    assert not [entry for entry in os.listdir("/dev/shm") if "staging" in entry]


def test_jobs_of_different_areas_prepare_every_batch_each(tmp_path: Path) -> None:
    """The preparations of the test before are counted one by one."""
    areas = [Jobs(tmp_path / name) for name in "ab"]
    try:
        for area in areas:
            area.root.mkdir()
            area.start("job", count=20, jobs=1)
        for area in areas:
            area.wait()
            assert area.prepared("job") == {(0, number): 1 for number in range(20)}
            assert area.used("job") == ids(20)
    finally:
        for area in areas:
            area.close()


def test_a_job_that_does_not_close_its_area_has_more_descriptors(jobs: Jobs) -> None:
    """Those that the tests beside this one count."""
    jobs.start("job", count=20, jobs=1, closes=False)
    jobs.wait()
    ((_, _, before, after, *_),) = jobs.lines("job", "D")
    assert after > before


@pytest.mark.promise(258)
@pytest.mark.promise(259)
def test_a_job_that_is_killed_while_it_prepares_a_batch_leaves_it_to_the_others(
    jobs: Jobs,
) -> None:
    # The first job is alone when it begins to prepare its third batch.
    jobs.start("victim", stop=("P", 3))
    jobs.wait_for_stop("victim")
    jobs.start("a", "b", "c")
    wait_until(lambda: all(len(jobs.lines(name, "U")) == 2 for name in "abc"), "all have two")
    jobs.kill("victim")
    jobs.wait()
    prepared = jobs.prepared("a", "b", "c", "victim")
    assert prepared.pop((0, 2)) == 2
    assert prepared == {(0, number): 1 for number in range(50) if number != 2}
    for name in ("a", "b", "c"):
        assert jobs.used(name) == ids()
        ((_, _, before, after, _, _),) = jobs.lines(name, "D")
        assert after == before


@pytest.mark.promise(258)
def test_the_death_of_a_job_is_noticed_while_a_forked_process_has_its_connection(
    jobs: Jobs, tmp_path: Path
) -> None:
    program = (
        "import os, sys, time\n"
        "from monarch.datasets.staging import StagingArea\n"
        f"area = StagingArea('test', stall_timeout={_LONG_S}, directory=sys.argv[1])\n"
        "def produce(number):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        time.sleep(1000)\n"
        "    print(child, flush=True)\n"
        "    time.sleep(1000)\n"
        "next(area.epoch(0, 50, produce))\n"
    )
    victim = subprocess.Popen(
        [sys.executable, "-c", program, str(jobs.directory)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert victim.stdout is not None
    child = int(victim.stdout.readline())
    try:
        jobs.start("a", "b", "c")
        wait_until(lambda: bool(jobs.prepared("a", "b", "c")), "the others work", timeout_s=100)
        victim.kill()
        victim.wait()
        jobs.wait()
        assert all(jobs.used(name) == ids() for name in "abc")
    finally:
        os.kill(child, signal.SIGKILL)
        victim.kill()
        victim.wait()
        victim.stdout.close()


@pytest.mark.promise(260)
def test_a_job_that_is_stopped_is_expelled_and_continues_later(jobs: Jobs) -> None:
    jobs.start("victim", stop=("P", 3), stall_timeout=2.0, jobs=1)
    jobs.wait_for_stop("victim")
    victim = jobs.processes["victim"]
    victim.send_signal(signal.SIGSTOP)
    jobs.start("a", "b", "c", stall_timeout=2.0)
    jobs.wait("a", "b", "c")
    assert all(jobs.used(name) == ids() for name in "abc")
    assert jobs.used("victim") == ids(2)
    jobs.go("victim")
    victim.send_signal(signal.SIGCONT)
    jobs.wait()
    assert jobs.used("victim") == ids()
    ((_, expulsions, *_),) = jobs.lines("victim", "D")
    assert expulsions == 1


@pytest.mark.promise(261)
def test_jobs_continue_with_another_broker_when_theirs_is_killed(jobs: Jobs) -> None:
    jobs.start("a", stop=("U", 10), epochs=2, jobs=3)
    # It is at most 16 batches ahead of the first job.
    jobs.start("b", stop=("U", 60), epochs=2, jobs=3)
    jobs.start("c", epochs=2, jobs=3)
    jobs.wait_for_stop("a")
    first = jobs.brokers()
    assert len(first) == 1
    jobs.kill_brokers()
    jobs.go("a")
    jobs.wait_for_stop("b")
    wait_until(lambda: len(jobs.brokers()) == 1, "one broker runs")
    assert jobs.brokers() != first
    jobs.go("b")
    jobs.wait()
    assert all(jobs.used(name) == ids(epochs=2) for name in "abc")


@pytest.mark.promise(257)
def test_a_late_job_prepares_for_itself_what_is_gone(jobs: Jobs) -> None:
    # The first job is in its second epoch, and the late one is not waited for.
    jobs.start("a", stop=("U", 60), epochs=2, jobs=1)
    jobs.wait_for_stop("a")
    jobs.start("late", epochs=2, jobs=1, stop=("P", 50))
    jobs.wait_for_stop("late")
    assert jobs.lines("late", "P") == jobs.lines("a", "P")[:50] == [[0, n] for n in range(50)]
    jobs.go("a")
    jobs.go("late")
    jobs.wait()
    assert jobs.used("late") == jobs.used("a") == ids(epochs=2)


@pytest.mark.promise(258)
@pytest.mark.promise(261)
@pytest.mark.timeout(900)
def test_jobs_and_brokers_are_killed_at_any_moment(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    kills = 50 if pytestconfig.getoption("--soak") else 3
    for seed in range(kills):
        root = tmp_path / str(seed)
        root.mkdir()
        jobs = Jobs(root)
        try:
            kill_one_of_four(jobs, seed)
        finally:
            jobs.close()


def kill_one_of_four(jobs: Jobs, seed: int) -> None:
    """Kills a job or the broker in the middle of a batch of the first job. The other jobs are up to
    16 batches ahead then. No time limit ends a wait."""
    rng = random.Random(seed)
    workers = rng.randrange(3)
    stop = (rng.choice("PU"), rng.randrange(2, 6))
    # The first job is alone when it gets to this batch, so it prepares it. Batch 0 is ready then.
    jobs.start("a", stop=stop, count=24, workers=workers)
    jobs.wait_for_stop("a")
    jobs.start("b", "c", "d", count=24, workers=workers)
    uses = {"b": rng.randrange(1, stop[1]), "c": 1, "d": 1}
    for name, number in uses.items():
        wait_until(
            lambda name=name, number=number: len(jobs.lines(name, "U")) >= number,
            f"{name} works",
            timeout_s=100,
        )
    victim = rng.choice(("a", "b", "broker"))
    if victim == "broker":
        jobs.kill_brokers()
    else:
        jobs.kill(victim)
    jobs.go("a")
    jobs.wait()
    assert all(jobs.used(name) == ids(24) for name in jobs.processes), seed
    twice = jobs.prepared("a", "b", "c", "d") - Counter((0, number) for number in range(24))
    # Only what the victim was preparing.
    assert sum(twice.values()) <= (0 if victim == "broker" else max(workers, 1)), seed
