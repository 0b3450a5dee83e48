"""Two jobs on one mount. One has announced what it reads, and is killed with its whole session: it
has not delayed the other, and nothing of it is left."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch.frameworks.announce import Announcement, announce
from tests.conftest import MonarchCommand, Mounted, Tree, contents
from tests.equipment.inotify import OpenCounter
from tests.equipment.processes import anonymous_bytes
from tests.equipment.slowfs import SlowSource
from tests.equipment.waiting import wait_until
from tests.mount.observe import account, epoch, resident, settled

NATIVE = ("relay", "passthrough", "no_open")
LARGE = 5_000_000


class Job:
    """A process in a session of its own that has called ``work`` and waits."""

    def __init__(self, work: Callable[[], object]) -> None:
        done, out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                kept = work()
                os.write(out, b"x")
                signal.pause()
                del kept
            finally:
                os._exit(1)
        os.close(out)
        assert os.read(done, 1) == b"x", "the job has ended"
        os.close(done)

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def shuffled(names: list[str], seed: int) -> list[str]:
    return random.Random(seed).sample(names, len(names))


def foresight(mounted: Mounted) -> dict[str, Any]:
    found: dict[str, Any] = account(mounted)["foresight"]
    return found


@pytest.mark.modes(*NATIVE)
def test_a_job_that_is_killed_while_its_fetches_hang_delays_nothing_and_leaves_nothing(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.allows_log("hangs|does not answer|has not answered")
    other = {f"other/{n:03}": contents(f"other{n}", 700) for n in range(300)}
    dead = {f"dead/{n:03}": contents(f"dead{n}", 700) for n in range(300)}
    tree({**other, **dead})
    mounted = monarch.mount(slow.path)
    epoch(mounted, {"other/000": other["other/000"]})
    settled(mounted)
    descriptors = psutil.Process(mounted.pid).num_fds()
    slow.rules("hang open ^/dead/")
    order = shuffled(list(dead), 1)
    job = Job(lambda: announce(mounted.path / name for name in order))
    try:
        wait_until(lambda: slow.counters()["hanging"] > 0, "fetches ahead hang")
        before = slow.counters()
        epoch(mounted, other, shuffled(list(other), 2))
        wait_until(lambda: len(resident(mounted, other)) == len(other), "it has its copies")
        after = slow.counters()
        assert after["hanging"] > 0, "the other job did not wait for them"
    finally:
        job.kill()
    begun = after["open"] - before["open"] - (len(other) - 1)
    wait_until(lambda: foresight(mounted)["announced"]["orders"] == 0, "the order has ended")
    hanging = slow.counters()["hanging"]
    assert 0 <= begun <= hanging
    opens = slow.counters()["open"]
    slow.rules()
    wait_until(lambda: slow.counters()["hanging"] == 0, "the calls have an answer")
    settled(mounted)
    assert slow.counters()["open"] == opens, "no further file of the dead job is fetched"
    assert len(resident(mounted, dead)) <= hanging
    assert foresight(mounted)["announced"]["bytes"] == 0
    wait_until(
        lambda: psutil.Process(mounted.pid).num_fds() <= descriptors + 2, "descriptors are closed"
    )
    # The other job continues with the files of the dead one.
    epoch(mounted, dead, order)


@pytest.mark.modes(*NATIVE)
def test_a_worker_that_is_killed_leaves_the_order_to_the_other_workers(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    """The worker of a loader is killed while it has a file open. Another one reads on."""
    content = {f"d/{n:03}": contents(f"{n}", 700) for n in range(300)}
    tree(content)
    mounted = monarch.mount(source)
    order = shuffled(list(content), 3)

    def read_some() -> object:
        epoch(mounted, content, order[:50])
        file = (mounted.path / order[50]).open("rb")
        file.read(1)
        return file

    def read_on() -> None:
        epoch(mounted, content, order[50:])

    with OpenCounter(source) as counter:
        announcement = announce(mounted.path / name for name in order)
        assert announcement is not None
        wait_until(lambda: settled(mounted)["residency"]["files"] == len(content), "all have come")
        assert set(counter.paths().values()) == {1}
        for work in (read_some, read_on):
            worker = Job(work)
            assert foresight(mounted)["announced"]["orders"] == 1
            worker.kill()
        wait_until(lambda: foresight(mounted)["announced"]["entries"] == 0, "all are read")
        assert set(counter.paths().values()) == {1}
    found = foresight(mounted)["announced"]
    assert (found["orders"], found["opened"], found["skipped"]) == (1, len(content), 0)
    announcement.close()
    assert foresight(mounted)["announced"]["orders"] == 0


@pytest.mark.modes(*NATIVE)
def test_large_files_of_a_job_that_was_killed_are_not_copied(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.allows_log("hangs|does not answer|has not answered")
    content = {f"dead/{n:02}": contents(f"{n}", LARGE) for n in range(12)}
    content["other"] = contents("other", LARGE)
    tree(content)
    mounted = monarch.mount(slow.path, tiers={"fast": "200MiB"})
    slow.rules("hang open ^/dead/")
    names = sorted(content)[:-1]
    job = Job(lambda: announce(mounted.path / name for name in names))
    try:
        wait_until(lambda: slow.counters()["hanging"] > 0, "large files are opened")
    finally:
        job.kill()
    wait_until(lambda: foresight(mounted)["announced"]["orders"] == 0, "the order has ended")
    opens = slow.counters()["open"]
    slow.rules()
    wait_until(lambda: slow.counters()["hanging"] == 0, "the calls have an answer")
    epoch(mounted, {"other": content["other"]})
    settled(mounted)
    assert len(resident(mounted, names)) <= 2
    assert slow.counters()["open"] <= opens + 2


@pytest.mark.modes(*NATIVE)
def test_many_jobs_that_are_killed_while_they_announce_leave_nothing(
    monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.allows_log("a hint of user 0")
    content = {f"d/{n:04}": contents(f"{n}", 300) for n in range(2000)}
    mounted = monarch.mount(tree(content))
    directory, names = mounted.path / "d", sorted(content)
    inos = [(mounted.path / name).stat().st_ino for name in names]

    def announces(seed: int) -> None:
        draw = random.Random(seed)
        while True:
            order = draw.sample(inos, draw.randrange(1, len(inos)))
            announcement = Announcement(directory, order)
            announcement.progress(draw.randrange(len(order)))

    rng, pids = random.Random(7), []
    for seed in range(60):
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                announces(seed)
            finally:
                os._exit(1)
        pids.append(pid)
        if len(pids) > 8:
            victim = pids.pop(rng.randrange(len(pids)))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    wait_until(lambda: foresight(mounted)["announced"]["orders"] == 0, "all orders have ended")
    report = foresight(mounted)["announced"]
    assert report["bytes"] == 0 and report["entries"] == 0
    epoch(mounted, content, shuffled(names, 3))
    assert anonymous_bytes(mounted.pid) < 150e6


# For each line of its input, a seed, it reads all files in that order, or for an empty line the
# first one only; and prints the digest of their bytes.
READER = """
import hashlib, pathlib, random, sys
paths = sorted(pathlib.Path(sys.argv[1]).iterdir())
for seed in sys.stdin:
    order = random.Random(int(seed)).sample(paths, len(paths)) if seed.strip() else paths[:1]
    content = {path: path.read_bytes() for path in order}
    read = b"".join(content[path] for path in sorted(content))
    print(hashlib.sha256(read).hexdigest(), flush=True)
"""


@pytest.mark.promise(265)
@pytest.mark.modes("relay", "passthrough")
@pytest.mark.parametrize("window", [True, False])
def test_jobs_in_different_orders_fetch_once_what_no_tier_has(
    window: bool, slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    content = {f"d/{n:03}": contents(f"{n}", 3000) for n in range(100)}
    tree(content)
    # Slower than the daemon, which would keep nothing for others otherwise.
    slow.rules("lat open 4")
    options = [f"foresight.window={str(window).lower()}", "foresight.fill=false"]
    mounted = monarch.mount(slow.path, tiers={"fast": "40KiB"}, options=options)
    command = [sys.executable, "-c", READER, str(mounted.path / "d")]
    pipe = subprocess.PIPE
    jobs = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        for _ in range(2)
    ]

    def read(*seeds: str) -> tuple[int, int]:
        """The opens and the bytes at the source while the jobs read."""
        before = slow.counters()
        for job, seed in zip(jobs, seeds, strict=True):
            assert job.stdin is not None
            print(seed, file=job.stdin, flush=True)
        names = sorted(content) if seeds[0] else sorted(content)[:1]
        digest = hashlib.sha256(b"".join(content[name] for name in names)).hexdigest()
        for job in jobs:
            assert job.stdout is not None
            assert job.stdout.readline().strip() == digest
        settled(mounted)
        after = slow.counters()
        return after["open"] - before["open"], after["read_bytes"] - before["read_bytes"]

    try:
        # Both are known to the daemon then. They may fetch the file once more.
        read("", "")
        more, read_bytes = read("1", "2")
        if window:
            assert len(content) - 1 <= more <= len(content)
            assert read_bytes == 3000 * more
        else:
            assert more > 1.5 * len(content)
        missing = len(content) - len(resident(mounted, content))
        assert missing > len(content) // 2
        more, read_bytes = read("3", "4")
        if window:
            assert more <= missing and read_bytes <= 3000 * missing
        else:
            assert more > 1.5 * missing
    finally:
        for job in jobs:
            job.communicate()
