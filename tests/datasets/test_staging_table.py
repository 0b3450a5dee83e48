"""Jobs share prepared batches, in virtual time: each batch is prepared once and used once by each
job, whichever jobs die, hang or come late, and whenever the broker is started again."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from monarch.datasets.staging_table import Kind, Reply, StagingTable

STALL_S = 100.0


def table(*, count: int = 10, depth: int = 4, jobs: int = 2) -> StagingTable:
    return StagingTable(count=count, depth=depth, jobs=jobs, stall_s=STALL_S)


def joined(*positions: int, depth: int = 4, count: int = 10) -> StagingTable:
    """A table of jobs 0, 1, ... at these positions; no other job is expected."""
    made = table(depth=depth, count=count, jobs=len(positions))
    for number, position in enumerate(positions):
        assert made.join(number, position, len(positions), 0.0) == []
    return made


def prepare(made: StagingTable, number: int, positions: range, now: float = 0.0) -> None:
    """The job uses these batches, which it prepares."""
    for position in positions:
        assert made.want(number, position, now) == [Reply(number, Kind.PRODUCE, position)]
        made.publish(number, position, position, now)


# -- single rules ----------------------------------------------------------------------------------


def test_jobs_that_want_the_same_batch_prepare_different_ones() -> None:
    made = joined(0, 0, 0)
    assert [made.want(number, 0, 1.0)[0][1:] for number in range(3)] == [
        (Kind.PRODUCE, 0),
        (Kind.PRODUCE, 1),
        (Kind.PRODUCE, 2),
    ]
    assert made.publish(1, 1, 77, 2.0) == []
    assert made.want(1, 0, 2.0) == [Reply(1, Kind.PRODUCE, 3)]
    made.publish(1, 3, 78, 2.0)
    # All four are claimed or ready.
    assert made.want(1, 0, 3.0) == []
    assert made.publish(0, 0, 79, 4.0) == [Reply(1, Kind.READY, 0)]
    assert made.token(0) == 79


def test_a_job_prepares_no_batch_of_the_next_epoch() -> None:
    made = joined(8, 8, 8)
    assert made.want(0, 8, 0.0) == [Reply(0, Kind.PRODUCE, 8)]
    assert made.want(1, 8, 0.0) == [Reply(1, Kind.PRODUCE, 9)]
    assert made.want(2, 8, 0.0) == []


def test_the_slowest_job_holds_back_the_others() -> None:
    made = joined(0, 0)
    prepare(made, 0, range(4))
    assert made.want(0, 4, 1.0) == []
    assert (made.kept, made.take_removed()) == (4, [])
    assert made.want(1, 0, 2.0) == [Reply(1, Kind.READY, 0)]
    assert set(made.want(1, 1, 3.0)) == {Reply(0, Kind.PRODUCE, 4), Reply(1, Kind.READY, 1)}
    assert made.take_removed() == [0]


def test_the_claim_of_a_job_that_dies_passes_to_a_waiting_job() -> None:
    made = joined(0, 0, depth=1)
    assert made.want(0, 0, 0.0) == [Reply(0, Kind.PRODUCE, 0)]
    assert made.want(1, 0, 0.0) == []
    assert made.leave(0, 1.0) == [Reply(1, Kind.PRODUCE, 0)]


def test_batches_that_only_a_dead_job_had_not_used_are_removed() -> None:
    made = joined(0, 0)
    prepare(made, 0, range(4))
    made.want(0, 4, 0.0)
    assert made.leave(1, 1.0) == [Reply(0, Kind.PRODUCE, 4)]
    assert (made.take_removed(), made.kept) == ([0, 1, 2, 3], 0)


def test_the_last_job_that_leaves_takes_all_batches_with_it() -> None:
    made = joined(0)
    prepare(made, 0, range(1))
    assert made.leave(0, 1.0) == []
    assert (made.take_removed(), made.kept, len(made)) == ([0], 0, 0)


def test_a_job_that_hangs_is_expelled_and_its_claim_passes_on() -> None:
    made = joined(0, 0, depth=1)
    made.want(0, 0, 0.0)
    made.want(1, 0, 30.0)
    assert made.expire(129.9)[1:] == []
    assert made.next_deadline() == 130.0
    assert made.expire(130.0)[:2] == [
        Reply(0, Kind.EXPELLED, 0),
        Reply(1, Kind.PRODUCE, 0),
    ]
    assert len(made) == 1


def test_a_job_that_uses_no_batches_is_expelled_when_the_others_must_wait() -> None:
    made = joined(0, 0)
    prepare(made, 0, range(4))
    assert made.expire(1000.0) == []
    assert made.next_deadline() is None
    made.want(0, 4, 1000.0)
    assert made.expire(1050.0) == [Reply(0, Kind.WAIT, 4)]
    assert made.expire(1100.0) == [Reply(1, Kind.EXPELLED, 0), Reply(0, Kind.PRODUCE, 4)]


def test_a_job_that_waits_is_not_expelled() -> None:
    made = joined(0, 0, 0, depth=1)
    made.want(0, 0, 0.0)
    made.want(1, 0, 0.0)
    for now in range(10, 1000, 10):
        made.move(0, 0, now)
        made.want(0, 0, now)
        made.expire(now)
    assert len(made) == 3


def test_nothing_is_removed_before_the_expected_jobs_are_there() -> None:
    made = table(jobs=3)
    made.join(0, 0, 3, 0.0)
    prepare(made, 0, range(4))
    assert made.want(0, 4, 1.0) == []
    assert made.members == 3
    assert made.join(1, 0, 3, 2.0) == []
    assert made.join(2, 0, 3, 3.0) == []
    assert made.want(2, 0, 4.0) == [Reply(2, Kind.READY, 0)]


def test_expected_jobs_that_do_not_come_are_waited_for_once() -> None:
    made = table(jobs=3)
    made.join(0, 0, 3, 0.0)
    prepare(made, 0, range(4))
    made.want(0, 4, 1.0)
    assert made.next_deadline() == 51.0
    assert made.expire(100.0) == [Reply(0, Kind.PRODUCE, 4)]
    assert made.members == 1


def test_a_late_job_prepares_what_is_gone_and_delays_no_job() -> None:
    made = joined(0)
    prepare(made, 0, range(8))
    made.join(1, 0, 2, 1.0)
    for position in range(7):
        assert made.want(1, position, 2.0) == [Reply(1, Kind.ALONE, position)]
    assert made.want(0, 8, 3.0) == [Reply(0, Kind.PRODUCE, 8)]
    made.publish(0, 8, 8, 3.0)
    assert made.want(1, 8, 4.0) == [Reply(1, Kind.READY, 8)]


def test_a_job_far_ahead_works_for_itself() -> None:
    made = joined(0, 200)
    assert made.want(1, 200, 0.0) == [Reply(1, Kind.ALONE, 200)]
    assert made.want(0, 0, 0.0) == [Reply(0, Kind.PRODUCE, 0)]


def test_a_single_job_may_begin_again() -> None:
    made = joined(0)
    prepare(made, 0, range(20))
    prepare(made, 0, range(3))
    prepare(made, 0, range(500, 503))


def test_the_first_jobs_after_a_restart_of_the_broker_may_be_at_different_batches() -> None:
    made = table(jobs=4)
    made.join(0, 7, 2, 0.0)
    assert made.want(0, 7, 0.0) == [Reply(0, Kind.PRODUCE, 7)]
    made.publish(0, 7, 7, 0.0)
    # Two jobs are left of the four, as the first one reported.
    made.join(1, 5, 4, 1.0)
    assert made.members == 2
    assert made.want(1, 5, 1.0) == [Reply(1, Kind.PRODUCE, 5)]
    made.publish(1, 5, 5, 1.0)
    made.want(1, 6, 1.0)
    assert made.want(0, 8, 2.0) == [Reply(0, Kind.PRODUCE, 8)]
    assert made.take_removed() == [5]


def test_a_batch_that_its_job_has_not_claimed_is_not_kept() -> None:
    made = joined(0, 0)
    made.want(0, 0, 0.0)
    assert made.publish(1, 0, 5, 1.0) == []
    assert made.publish(1, 3, 6, 1.0) == []
    assert (made.take_removed(), made.kept) == ([5, 6], 0)


# -- random histories ------------------------------------------------------------------------------


@dataclass
class Job:
    """A training process. ``number`` is that of its connection, None without one."""

    position: int
    end: int
    number: int | None = None
    used: list[int] = field(default_factory=list)
    is_alive: bool = True
    is_waiting: bool = False


class History:
    """Jobs, each with one event in the future, unless it waits for a reply."""

    def __init__(self, seed: int, *, faults: float) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.count = self.rng.randrange(1, 9)
        self.depth = self.rng.randrange(1, 7)
        self.epochs = self.rng.randrange(1, 4)
        self.jobs = [Job(0, self.count * self.epochs) for _ in range(self.rng.randrange(1, 6))]
        self.numbers: dict[int, Job] = {}
        self.last_number = 0
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0
        self.prepared: Counter[int] = Counter()
        # The batch of each token that the broker has.
        self.tokens: dict[int, int] = {}
        self.last_token = 0
        self.alone = self.expelled = 0
        self.table = self._table()

    def _table(self) -> StagingTable:
        return table(count=self.count, depth=self.depth, jobs=len(self.jobs))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + seconds, self.order, action))

    def play(self) -> None:
        for job in self.jobs:
            self.after(self.rng.random() * 20, lambda job=job: self.want(job))
            if self.rng.random() < self.faults:
                self.after(self.rng.random() * 60, lambda job=job: self.die(job))
        while self.rng.random() < self.faults:
            self.after(self.rng.random() * 60, self.restart_broker)
        idle = 0
        while any(job.is_alive and job.position < job.end for job in self.jobs):
            deadline = self.table.next_deadline()
            if self.events and (deadline is None or self.events[0][0] < deadline):
                self.now, _, action = heapq.heappop(self.events)
                action()
                idle = 0
            else:
                assert deadline is not None, "all jobs wait"
                idle += 1
                assert idle < 200, "the jobs wait without end"
                self.now = max(self.now, deadline)
                self.answer(self.table.expire(self.now))
            self.check()

    def check(self) -> None:
        for token in self.table.take_removed():
            del self.tokens[token]
        assert len(self.tokens) == self.table.kept <= self.depth
        assert self.table.most_kept <= self.depth

    def delay(self) -> float:
        """The time of one step, in seconds: sometimes the job hangs."""
        if self.rng.random() < self.faults * 0.05:
            return STALL_S * self.rng.choice((0.9, 1.1, 5.0))
        return self.rng.random() * 3

    # -- jobs --------------------------------------------------------------------------------------

    def want(self, job: Job) -> None:
        if not job.is_alive:
            return
        if job.position == job.end:
            if job.number is not None:
                self.answer(self.table.move(job.number, job.position, self.now))
                self.disconnect(job)
            return
        if job.number is None:
            self.last_number += 1
            job.number = self.last_number
            self.numbers[job.number] = job
            known = len(self.jobs)
            self.answer(self.table.join(job.number, job.position, known, self.now))
        job.is_waiting = True
        self.answer(self.table.want(job.number, job.position, self.now))

    def answer(self, replies: list[Reply]) -> None:
        for number, kind, position in replies:
            job = self.numbers[number]
            job.is_waiting = kind is Kind.WAIT
            if kind is Kind.READY:
                assert self.tokens[self.table.token(position)] == position == job.position
                self.use(job)
            elif kind is Kind.ALONE:
                self.alone += 1
                self.after(self.delay(), lambda job=job: self.use(job))
            elif kind is Kind.PRODUCE:
                assert position // self.count == job.position // self.count
                self.after(self.delay(), lambda job=job, at=position: self.publish(job, at))
            elif kind is Kind.EXPELLED:
                self.expelled += 1
                del self.numbers[number]
                job.number = None

    def publish(self, job: Job, position: int) -> None:
        if not job.is_alive:
            return
        self.prepared[position] += 1
        if job.number is not None:
            self.last_token += 1
            self.tokens[self.last_token] = position
            self.answer(self.table.publish(job.number, position, self.last_token, self.now))
        if position == job.position:
            self.use(job)
        else:
            self.want(job)

    def use(self, job: Job) -> None:
        if job.is_alive:
            job.used.append(job.position)
            job.position += 1
            self.after(self.delay(), lambda: self.want(job))

    # -- faults ------------------------------------------------------------------------------------

    def die(self, job: Job) -> None:
        job.is_alive = job.is_waiting = False
        self.disconnect(job)

    def disconnect(self, job: Job) -> None:
        if job.number is not None:
            del self.numbers[job.number]
            number, job.number = job.number, None
            self.answer(self.table.leave(number, self.now))
            if not len(self.table):
                self.check()
                self.table = self._table()

    def restart_broker(self) -> None:
        """The jobs that wait notice it at once, the others at their next request."""
        waiting = [job for job in self.jobs if job.is_waiting]
        self.table, self.tokens = self._table(), {}
        self.numbers.clear()
        for job in self.jobs:
            job.number = None
        for job in waiting:
            self.want(job)


@pytest.mark.promise(255)
@pytest.mark.promise(256)
def test_each_batch_is_prepared_once_and_used_once_by_each_job() -> None:
    for seed in range(2000):
        history = History(seed, faults=0.0)
        history.play()
        everything = list(range(history.count * history.epochs))
        assert all(job.used == everything for job in history.jobs), seed
        assert history.expelled == 0, seed
        # A job that has ended before another began leaves nothing.
        if history.count * history.epochs > history.depth:
            assert history.prepared == dict.fromkeys(everything, 1), seed
            assert history.alone == 0, seed


@pytest.mark.promise(255)
@pytest.mark.promise(258)
def test_no_batch_is_lost_or_used_twice_if_jobs_and_brokers_die_or_hang() -> None:
    expelled = alone = 0
    for seed in range(4000):
        history = History(seed, faults=0.5)
        history.play()
        for job in history.jobs:
            assert job.used == list(range(job.position)), seed
            assert not job.is_alive or job.position == job.end, seed
        expelled += history.expelled
        alone += history.alone
    # The histories have what they are about.
    assert expelled > 50
    assert alone > 50
