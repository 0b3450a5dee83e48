"""Two jobs on one mount, in virtual time. One has announced its order, and the other has not:
neither takes what the other one needs, and nothing of a job that was killed is left."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from monarch.foresight.announced import Announcer
from monarch.foresight.foresight import Foresight
from monarch.foresight.messages import Piece
from monarch.transfer.ahead import FetchAhead
from monarch.types import Ino
from tests.transfer.ahead_rig import AheadRig, until
from tests.transfer.sources import Latency
from tests.transfer.test_ahead import Rigs, clock, rigs

__all__ = ["clock", "rigs"]

SIZE = 100
CALL_S = 0.01
FILES = 320
# The sessions of the two jobs.
ANNOUNCED, OTHER = 1000, 2000


class Jobs(Foresight):
    """Records the files that were fetched ahead, in their order."""

    fetched_inos: list[Ino]

    def pinned(self, most: int) -> list[Ino]:
        return []

    def fetched(self, ino: Ino, nbytes: int) -> None:
        if nbytes:
            self.fetched_inos.append(ino)
        super().fetched(ino, nbytes)


@dataclass
class Beside:
    """A directory for each of the two jobs, and what they have read."""

    rig: AheadRig
    jobs: Jobs
    seconds: dict[int, float] = field(default_factory=dict)

    def announce(self, names: Sequence[str]) -> None:
        me, announced = Announcer(0, ANNOUNCED, 1), self.jobs.announced
        announced.begin(me, 1)
        for start in range(0, len(names), 2000):
            inos = array("I", map(self.rig.ino, names[start : start + 2000]))
            announced.extend(me, Piece(1, start, inos))
        self.jobs.wake()

    def kill(self) -> None:
        """As the daemon does when the process of the order has ended."""
        announced = self.jobs.announced
        announced.end(announced.key_of(Announcer(0, ANNOUNCED, 1), 1))
        self.jobs.end_jobs({ANNOUNCED})

    async def read(self, job: int, names: Sequence[str], *, think_s: float = 0.001) -> None:
        """Four processes read the files in turn."""
        remaining, began = iter(names), trio.current_time()

        async def process(number: int) -> None:
            for name in remaining:
                ino = self.rig.ino(name)
                assert await self.rig.content(ino) == name.encode() * SIZE
                self.jobs.opened(ino, job, job + number)
                await trio.sleep(think_s)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(process, number)
        self.seconds[job] = trio.current_time() - began

    def fetched_of(self, names: Sequence[str], first: int) -> int:
        """How many of the first fetches ahead were of these files."""
        inos = set(map(self.rig.ino, names))
        return sum(ino in inos for ino in self.jobs.fetched_inos[:first])


def names_of(directory: str, seed: int, count: int = FILES) -> list[str]:
    """The files of a directory in a random order."""
    return random.Random(seed).sample([f"{directory}/{n}" for n in range(count)], count)


def make(rigs: Rigs, source: Path, *names: str, **settings: object) -> Beside:
    for directory in {name.split("/")[0] for name in names}:
        (source / directory).mkdir(exist_ok=True)
    rig = rigs({name: name.encode() * SIZE for name in names}, **settings)
    jobs = Jobs(rig.snapshot, rig.foreseeing, rig.controller.is_placed)
    jobs.fetched_inos = []
    rig.ahead = FetchAhead(
        jobs,
        rig.names,
        rig.controller,
        rig.engine,
        rig.reader,
        rig.load,
        rig.read_side.bindings.is_open,
        None,
    )
    jobs.on_more(rig.ahead.wake)
    return Beside(rig, jobs)


async def both(
    beside: Beside, first: Sequence[str], other: Sequence[str], *, think_s: float = 0.001
) -> None:
    """Each job reads its files, and the first one thinks for so long about each."""
    async with beside.rig.running(), trio.open_nursery() as nursery:
        nursery.start_soon(partial(beside.read, ANNOUNCED, first, think_s=think_s))
        nursery.start_soon(beside.read, OTHER, other)


@pytest.mark.parametrize("threads", [128, 16])
async def test_an_announced_order_takes_nothing_from_a_job_beside_it(
    rigs: Rigs, clock: MockClock, source: Path, threads: int
) -> None:
    """Each job is compared with itself beside the same job without an announcement."""
    first, other = names_of("a", 1), names_of("b", 2)
    found: dict[bool, dict[int, float]] = {}
    for is_announced in (False, True):
        beside = make(rigs, source, *first, *other, model=Latency(CALL_S), threads=threads)
        if is_announced:
            beside.announce(first)
        await both(beside, first, other)
        found[is_announced] = beside.seconds
        assert set(beside.rig.source.opens.values()) == {1}, "each file is opened once"
        assert len(beside.rig.source.opens) == 2 * FILES
    assert found[True][ANNOUNCED] < 0.75 * found[False][ANNOUNCED]
    assert found[True][OTHER] <= 1.02 * found[False][OTHER]


async def test_an_order_far_ahead_of_its_slow_readers_takes_turns_with_another_job(
    rigs: Rigs, clock: MockClock, source: Path
) -> None:
    """The announced job needs a thirtieth of the source, so the other one is as fast as alone."""
    first, other = names_of("a", 1, 3 * FILES), names_of("b", 2)
    alone = make(rigs, source, *other, model=Latency(CALL_S), threads=16)
    async with alone.rig.running():
        await alone.read(OTHER, other)
    beside = make(rigs, source, *first, *other, model=Latency(CALL_S), threads=16)
    beside.announce(first)
    async with beside.rig.running() as nursery:
        nursery.start_soon(partial(beside.read, ANNOUNCED, first, think_s=0.1))
        await beside.read(OTHER, other)
        fetched = beside.fetched_of(other, len(beside.jobs.fetched_inos))
        nursery.cancel_scope.cancel()
    assert fetched >= 0.75 * alone.fetched_of(other, FILES)
    assert beside.seconds[OTHER] <= 1.2 * alone.seconds[OTHER]


async def test_nothing_is_left_of_a_job_that_is_killed(
    rigs: Rigs, clock: MockClock, source: Path
) -> None:
    first, other = names_of("a", 1), names_of("b", 2)
    beside = make(rigs, source, *first, *other, model=Latency(CALL_S), threads=16)
    rig = beside.rig
    async with rig.running() as nursery:
        beside.announce(first)
        with trio.CancelScope() as life:
            async with trio.open_nursery() as job:
                nursery.start_soon(beside.read, OTHER, other)
                job.start_soon(beside.read, ANNOUNCED, first)
                await until(lambda: len(beside.jobs.fetched_inos) > 100)
                life.cancel()
        beside.kill()
        running = rig.ahead.running
        opened = beside.fetched_of(first, FILES)
        await until(lambda: OTHER in beside.seconds)
        assert rig.ahead.running == 0 and rig.load.totals().running == 0
        assert beside.fetched_of(first, 2 * FILES) <= opened + running
        assert beside.fetched_of(other, 2 * FILES) > 0, "its own files came ahead of it"
        assert set(rig.source.opens.values()) == {1}
        assert beside.jobs.announced.report().bytes == 0
        assert not list(beside.jobs.streams_with(rig.ino(first[0])))
