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
        assert made.join(number, number, position, len(positions), 0.0) == []
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
    assert made.kept.token(0) == 79


def test_a_job_prepares_no_batch_of_the_next_epoch() -> None:
    made = joined(8, 8, 8)
    assert made.want(0, 8, 0.0) == [Reply(0, Kind.PRODUCE, 8)]
    assert made.want(1, 8, 0.0) == [Reply(1, Kind.PRODUCE, 9)]
    assert made.want(2, 8, 0.0) == []


def test_the_slowest_job_holds_back_the_others() -> None:
    made = joined(0, 0)
    prepare(made, 0, range(4))
    assert made.want(0, 4, 1.0) == []
    assert (len(made.kept), made.kept.take_removed()) == (4, [])
    assert made.want(1, 0, 2.0) == [Reply(1, Kind.READY, 0)]
    assert set(made.want(1, 1, 3.0)) == {Reply(0, Kind.PRODUCE, 4), Reply(1, Kind.READY, 1)}
    assert made.kept.take_removed() == [0]


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
    assert (made.kept.take_removed(), len(made.kept)) == ([0, 1, 2, 3], 0)


def test_the_last_job_that_leaves_takes_all_batches_with_it() -> None:
    made = joined(0)
    prepare(made, 0, range(1))
    assert made.leave(0, 1.0) == []
    assert made.is_over
    assert (made.kept.take_removed(), len(made.kept), len(made)) == ([0], 0, 0)


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
    made.join(0, 0, 0, 3, 0.0)
    prepare(made, 0, range(4))
    assert made.want(0, 4, 1.0) == []
    assert made.members == 3
    assert made.join(1, 1, 0, 3, 2.0) == []
    assert made.join(2, 2, 0, 3, 3.0) == []
    assert made.want(2, 0, 4.0) == [Reply(2, Kind.READY, 0)]


def test_expected_jobs_that_do_not_come_are_waited_for_once() -> None:
    made = table(jobs=3)
    made.join(0, 0, 0, 3, 0.0)
    prepare(made, 0, range(4))
    made.want(0, 4, 1.0)
    assert made.next_deadline() == 51.0
    assert made.expire(100.0) == [Reply(0, Kind.PRODUCE, 4)]
    assert made.members == 1


def test_a_late_job_prepares_what_is_gone_and_delays_no_job() -> None:
    made = joined(0)
    prepare(made, 0, range(8))
    made.join(1, 1, 0, 2, 1.0)
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
    made.join(0, 0, 7, 2, 0.0)
    assert made.want(0, 7, 0.0) == [Reply(0, Kind.PRODUCE, 7)]
    made.publish(0, 7, 7, 0.0)
    # Two jobs are left of the four, as the first one reported.
    made.join(1, 1, 5, 4, 1.0)
    assert made.members == 2
    assert made.want(1, 5, 1.0) == [Reply(1, Kind.PRODUCE, 5)]
    made.publish(1, 5, 5, 1.0)
    made.want(1, 6, 1.0)
    assert made.want(0, 8, 2.0) == [Reply(0, Kind.PRODUCE, 8)]
    assert made.kept.take_removed() == [5]


def test_a_batch_that_its_job_has_not_claimed_is_not_kept() -> None:
    made = joined(0, 0)
    made.want(0, 0, 0.0)
    assert made.publish(1, 0, 5, 1.0) == []
    assert made.publish(1, 3, 6, 1.0) == []
    assert (made.kept.take_removed(), len(made.kept)) == ([5, 6], 0)


def test_a_new_broker_has_no_batch_prepared_before_those_of_the_old_one_have_come() -> None:
    made = table(jobs=1)
    made.await_members({10, 11, 12}, 0.0)
    made.join(0, 10, 3, 1, 0.0)
    assert made.want(0, 3, 0.0, prepare=False) == []
    assert made.attach(1, 11, 1.0) == []
    assert made.work(1, 0, 1.0) == []
    # The third process has batch 3, but not the one after it.
    assert made.attach(2, 12, 2.0) == []
    assert made.keep(2, 3, 77, 2.0) == [Reply(0, Kind.READY, 3)]
    assert made.work(2, 0, 2.0) == [Reply(1, Kind.PRODUCE, 4), Reply(2, Kind.PRODUCE, 5)]


def test_a_new_broker_does_not_wait_for_processes_that_have_ended() -> None:
    made = table(jobs=1)
    made.await_members({10, 11}, 0.0)
    made.join(0, 10, 3, 1, 0.0)
    assert made.want(0, 3, 0.0) == []
    assert made.is_awaiting
    assert made.await_members({10}, 1.0) == [Reply(0, Kind.PRODUCE, 3)]
    assert not made.is_awaiting


def test_a_process_of_the_old_broker_that_hangs_is_waited_for_once() -> None:
    made = table(jobs=1)
    made.await_members({10, 11}, 0.0)
    made.join(0, 10, 3, 1, 0.0)
    made.want(0, 3, 0.0)
    assert made.expire(99.0)[1:] == []
    assert made.expire(100.0) == [Reply(0, Kind.PRODUCE, 3)]


def test_the_batches_of_a_worker_that_leaves_are_kept_by_another_process() -> None:
    made = joined(0, depth=3)
    made.want(0, 0, 0.0, prepare=False)
    for number in (1, 2):
        made.attach(number, number, 0.0)
    assert made.work(1, 0, 0.0) == [Reply(1, Kind.PRODUCE, 0)]
    made.publish(1, 0, 0, 0.0)
    assert made.leave(1, 1.0) == [Reply(2, Kind.HOLD, 0)]
    made.leave(2, 2.0)
    # The last process that is left is the job itself.
    assert made.kept.take_removed() == []


def test_workers_prepare_batches_ahead_up_to_the_depth_and_of_their_epoch() -> None:
    made = joined(8, depth=4)
    for number in (1, 2, 3):
        made.attach(number, number, 0.0)
    assert made.work(1, 0, 1.0) == [Reply(1, Kind.PRODUCE, 8)]
    assert made.work(2, 0, 1.0) == [Reply(2, Kind.PRODUCE, 9)]
    # There is room for more batches, but the epoch of these workers ends.
    assert made.work(3, 0, 1.0) == []
    assert made.work(3, 10, 1.0) == [Reply(3, Kind.PRODUCE, 10)]
    made.publish(3, 10, 10, 2.0)
    assert made.work(3, 10, 2.0) == [Reply(3, Kind.PRODUCE, 11)]
    made.publish(3, 11, 11, 2.0)
    assert made.work(3, 10, 2.0) == []
    made.publish(1, 8, 8, 3.0)
    assert made.want(0, 8, 3.0, prepare=False) == [Reply(0, Kind.READY, 8)]
    assert made.want(0, 9, 4.0, prepare=False) == [
        Reply(3, Kind.PRODUCE, 12),
    ]


def test_a_worker_learns_once_that_its_epoch_is_over_also_if_it_asks_later() -> None:
    made = joined(0)
    for worker in (1, 2):
        made.attach(worker, worker, 0.0)
        made.work(worker, 0, 0.0)
    made.publish(1, 0, 100, 0.0)
    made.publish(2, 1, 101, 0.0)
    assert made.work(1, 0, 0.0) == [Reply(1, Kind.PRODUCE, 2)]
    made.publish(1, 2, 102, 0.0)
    assert made.work(1, 0, 0.0) == [Reply(1, Kind.PRODUCE, 3)]
    # The job leaves the epoch while one worker prepares a batch, and the other one is slow.
    assert made.move(0, 10, 0.0) == []
    assert made.work(2, 0, 0.0) == [Reply(2, Kind.RELEASE, 10)]
    made.publish(1, 3, 103, 0.0)
    assert made.work(1, 0, 0.0) == [Reply(1, Kind.RELEASE, 10)]
    assert made.move(0, 11, 0.0) == []


def test_a_worker_that_hangs_is_expelled_and_another_one_prepares_its_batch() -> None:
    made = joined(0)
    made.want(0, 0, 0.0, prepare=False)
    made.attach(1, 1, 0.0)
    made.attach(2, 2, 0.0)
    assert made.work(1, 0, 0.0) == [Reply(1, Kind.PRODUCE, 0)]
    for position in (1, 2, 3):
        assert made.work(2, 0, 1.0) == [Reply(2, Kind.PRODUCE, position)]
        made.publish(2, position, position, 1.0)
    assert made.work(2, 0, 1.0) == []
    assert made.expire(99.0) == [Reply(0, Kind.WAIT, 0), Reply(2, Kind.WAIT, 0)]
    assert made.expire(100.0) == [Reply(1, Kind.EXPELLED, 0), Reply(2, Kind.PRODUCE, 0)]


def test_a_worker_that_hangs_with_a_later_batch_is_expelled_too() -> None:
    made = joined(0)
    made.want(0, 0, 0.0, prepare=False)
    for number in (1, 2):
        made.attach(number, number, 0.0)
        made.work(number, 0, 0.0)
    # The worker with batch 0 dies, and the other one is busy with batch 1.
    assert made.leave(1, 1.0) == []
    assert Reply(2, Kind.EXPELLED, 0) in made.expire(101.0)


def test_a_job_whose_workers_do_not_come_prepares_its_batches() -> None:
    made = joined(0)
    made.attach(1, 1, 0.0)
    assert made.want(0, 0, 10.0, prepare=False) == []
    assert made.expire(109.9) == [Reply(0, Kind.WAIT, 0)]
    assert made.next_deadline() == 110.0
    assert made.expire(110.0) == [Reply(0, Kind.PRODUCE, 0)]
    made.publish(0, 0, 0, 110.0)
    assert made.want(0, 1, 110.0, prepare=False) == [Reply(0, Kind.PRODUCE, 1)]
    made.publish(0, 1, 1, 110.0)
    # From now on the worker prepares them.
    assert made.work(1, 0, 110.0) == [Reply(1, Kind.PRODUCE, 2)]
    assert made.want(0, 2, 110.0, prepare=False) == []


# -- random histories ------------------------------------------------------------------------------


@dataclass
class Process:
    """``number`` is that of its connection, None without one. ``kept`` are the batches that it has
    published, which it gives to the next broker."""

    member: int
    number: int | None = None
    kept: set[int] = field(default_factory=set)
    is_alive: bool = True
    is_waiting: bool = False


@dataclass
class Job(Process):
    """A training process. It prepares batches itself if it has no workers."""

    position: int = 0
    end: int = 0
    used: list[int] = field(default_factory=list)
    has_left: bool = False
    workers: list[Worker] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return not self.is_alive or self.position == self.end


@dataclass
class Worker(Process):
    job: Job = field(default_factory=lambda: Job(0))


class History:
    """Processes, each with one event in the future, unless it waits for a reply. ``deaths`` and
    ``restarts`` say how often jobs die or hang, and how often the broker is killed."""

    def __init__(self, seed: int, *, deaths: float = 0.0, restarts: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.deaths, self.restarts = deaths, restarts
        self.count = self.rng.randrange(1, 9)
        self.depth = self.rng.randrange(1, 7)
        self.epochs = self.rng.randrange(1, 4)
        self.members = 0
        self.jobs = [self._job() for _ in range(self.rng.randrange(1, 6))]
        self.numbers: dict[int, Process] = {}
        self.last_number = 0
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0
        self.prepared: Counter[int] = Counter()
        # The batch of each token that the broker has.
        self.tokens: dict[int, int] = {}
        self.last_token = 0
        self.alone = self.expelled = self.timeouts = 0
        self.has_met = False
        # The members of all brokers so far.
        self.known: set[int] = set()
        self.table = self._table()

    def _job(self) -> Job:
        job = Job(self._member(), end=self.count * self.epochs)
        job.workers = [Worker(self._member(), job=job) for _ in range(self.rng.randrange(3))]
        return job

    def _member(self) -> int:
        self.members += 1
        return self.members

    def _table(self) -> StagingTable:
        return table(count=self.count, depth=self.depth, jobs=self._expected())

    def _expected(self) -> int:
        return 1 if self.has_met else len(self.jobs)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + seconds, self.order, action))

    def play(self) -> None:
        for job in self.jobs:
            self.after(self.rng.random() * 20, lambda job=job: self.begin(job))
            if self.rng.random() < self.deaths:
                self.after(self.rng.random() * 60, lambda job=job: self.die(job))
            for worker in job.workers:
                if self.rng.random() < self.deaths / 4:
                    self.after(self.rng.random() * 60, lambda worker=worker: self.replace(worker))
        while self.rng.random() < self.restarts:
            self.after(self.rng.random() * 60, self.restart_broker)
        idle = 0
        while not all(job.is_done for job in self.jobs):
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
                replies = self.table.expire(self.now)
                self.timeouts += any(reply.kind is not Kind.WAIT for reply in replies)
                self.answer(replies)
            self.check()

    def check(self) -> None:
        for token in self.table.kept.take_removed():
            del self.tokens[token]
        assert len(self.tokens) == len(self.table.kept)
        is_complete = len(self.table) and not self.table.is_awaiting
        assert len(self.table.kept) <= self.depth * (1 if is_complete else 2)
        self.has_met = self.has_met or self.table.has_all

    def delay(self) -> float:
        """The time of one step, in seconds: sometimes the job hangs."""
        if self.rng.random() < self.deaths * 0.05:
            return STALL_S * self.rng.choice((0.9, 1.1, 5.0))
        return self.rng.random() * 3

    # -- jobs and workers --------------------------------------------------------------------------

    def begin(self, job: Job) -> None:
        self.want(job)
        for worker in job.workers:
            self.after(self.rng.random(), lambda worker=worker: self.work(worker))

    def connect(self, process: Process) -> None:
        """The process comes to the broker, with the batches that it keeps."""
        if process.number is not None:
            return
        self.last_number += 1
        number = process.number = self.last_number
        self.numbers[number] = process
        if isinstance(process, Job):
            position, jobs = process.position, self._expected()
            self.answer(self.table.join(number, process.member, position, jobs, self.now))
        else:
            self.answer(self.table.attach(number, process.member, self.now))
        for position in sorted(process.kept):
            if process.number == number:
                token = self.token(position)
                self.answer(self.table.keep(number, position, token, self.now))

    def want(self, job: Job) -> None:
        if not job.is_alive:
            return
        if job.position == job.end:
            if job.kept:
                # Otherwise the batches of a job that ends before it has noticed would be lost.
                self.connect(job)
            if job.number is not None:
                self.answer(self.table.move(job.number, job.position, self.now))
            self.leave(job)
            return
        self.connect(job)
        if job.number is not None and not job.is_waiting:
            job.is_waiting = True
            prepare = not job.workers
            self.answer(self.table.want(job.number, job.position, self.now, prepare=prepare))

    def work(self, worker: Worker) -> None:
        if not worker.is_alive:
            return
        self.connect(worker)
        if worker.number is not None and not worker.is_waiting:
            worker.is_waiting = True
            first = min(worker.job.position, worker.job.end - 1) // self.count * self.count
            self.answer(self.table.work(worker.number, first, self.now))

    def answer(self, replies: list[Reply]) -> None:
        for number, kind, position in replies:
            process = self.numbers[number]
            floor = self.table.floor
            process.kept = {kept for kept in process.kept if kept >= floor}
            if kind is Kind.HOLD:
                process.kept.add(position)
            elif kind not in (Kind.WAIT, Kind.RELEASE):
                process.is_waiting = False
            if kind is Kind.EXPELLED:
                self.expelled += 1
                del self.numbers[number]
                process.number = None
                if isinstance(process, Worker):
                    self.after(self.delay(), lambda worker=process: self.work(worker))
            elif kind is Kind.PRODUCE:
                self.after(self.delay(), lambda by=process, at=position: self.publish(by, at))
            elif isinstance(process, Job):
                if kind is Kind.READY:
                    assert (
                        self.tokens[self.table.kept.token(position)] == position == process.position
                    )
                    self.use(process)
                elif kind is Kind.ALONE:
                    self.alone += 1
                    self.after(self.delay(), lambda job=process: self.use(job))

    def token(self, position: int) -> int:
        self.last_token += 1
        self.tokens[self.last_token] = position
        return self.last_token

    def publish(self, process: Process, position: int) -> None:
        if not process.is_alive:
            return
        self.prepared[position] += 1
        process.kept.add(position)
        if process.number is not None:
            token = self.token(position)
            self.answer(self.table.publish(process.number, position, token, self.now))
        if isinstance(process, Worker):
            self.work(process)
        elif isinstance(process, Job):
            if position == process.position:
                self.use(process)
            else:
                self.want(process)

    def use(self, job: Job) -> None:
        if not job.is_alive:
            return
        job.used.append(job.position)
        job.position += 1
        self.after(self.delay(), lambda: self.want(job))
        if job.position % self.count == 0:
            for worker in job.workers:
                # Those that wait are replaced by workers of the next epoch.
                if worker.number is not None and worker.is_waiting:
                    self.after(0.0, lambda worker=worker: self.next_epoch(worker))

    def next_epoch(self, worker: Worker) -> None:
        worker.is_waiting = False
        self.work(worker)

    # -- faults ------------------------------------------------------------------------------------

    def die(self, job: Job) -> None:
        job.is_alive = job.is_waiting = False
        self.leave(job)

    def replace(self, worker: Worker) -> None:
        """The worker dies, and its job starts another one."""
        worker.is_alive = worker.is_waiting = False
        self.disconnect(worker)
        another = Worker(self._member(), job=worker.job)
        worker.job.workers[worker.job.workers.index(worker)] = another
        self.after(self.rng.random() * 3, lambda: self.work(another))

    def leave(self, job: Job) -> None:
        job.has_left = True
        for process in (job, *job.workers):
            process.is_alive = process.is_alive and process is job
            process.is_waiting = False
            self.disconnect(process)

    def disconnect(self, process: Process) -> None:
        process.kept = set()
        if process.number is not None:
            del self.numbers[process.number]
            number, process.number = process.number, None
            self.answer(self.table.leave(number, self.now))
        self.end_table()

    def end_table(self) -> None:
        if self.table.is_over:
            self.check()
            self.table = self._table()
            for each in list(self.numbers.values()):
                each.number, each.is_waiting = None, False
                if isinstance(each, Worker):
                    self.after(self.rng.random(), lambda worker=each: self.work(worker))
            self.numbers.clear()

    def living(self) -> set[int]:
        """The members of the broker before this one that have not left."""
        present = [job for job in self.jobs if not job.has_left and job.member in self.known]
        return {each.member for job in present for each in (job, *job.workers) if each.is_alive}

    def restart_broker(self) -> None:
        """The processes that wait notice it at once, the others at their next request."""
        if not self.deaths and not self.has_met:
            # A job that has never come is not waited for by another broker.
            self.after(10.0, self.restart_broker)
            return
        waiting = [process for process in self.numbers.values() if process.is_waiting]
        self.known |= {process.member for process in self.numbers.values()}
        self.check()
        self.table, self.tokens = self._table(), {}
        for process in self.numbers.values():
            process.number, process.is_waiting = None, False
        self.numbers.clear()
        self.answer(self.table.await_members(self.living(), self.now))
        self.rng.shuffle(waiting)
        for process in waiting:
            if isinstance(process, Job):
                self.want(process)
            elif isinstance(process, Worker):
                self.work(process)
        self.look()

    def look(self) -> None:
        """A broker that waits for members looks whether they are still there."""
        if self.table.is_awaiting:
            self.answer(self.table.await_members(self.living(), self.now))
            self.end_table()
            self.after(1.0, self.look)


def everything_is_used(history: History, seed: int) -> None:
    for job in history.jobs:
        assert job.used == list(range(job.position)), seed
        assert not job.is_alive or job.position == job.end, seed


@pytest.mark.promise(255)
@pytest.mark.promise(256)
def test_each_batch_is_prepared_once_and_used_once_by_each_job() -> None:
    for seed in range(300):
        history = History(seed)
        history.play()
        everything_is_used(history, seed)
        assert history.expelled == 0, seed
        # A job that has ended before another began leaves nothing.
        if history.count * history.epochs > history.depth:
            everything = list(range(history.count * history.epochs))
            assert history.prepared == dict.fromkeys(everything, 1), seed
            assert history.alone == 0, seed


@pytest.mark.promise(261)
def test_a_batch_is_prepared_once_although_brokers_are_killed() -> None:
    for seed in range(300):
        history = History(seed, restarts=0.7)
        history.play()
        everything_is_used(history, seed)
        assert (history.expelled, history.alone) == (0, 0), seed
        if history.count * history.epochs > history.depth:
            assert set(history.prepared.values()) == {1}, seed
            assert history.timeouts == 0, seed


@pytest.mark.promise(255)
@pytest.mark.promise(258)
def test_no_batch_is_lost_or_used_twice_if_jobs_and_brokers_die_or_hang() -> None:
    expelled = alone = 0
    for seed in range(600):
        history = History(seed, deaths=0.5, restarts=0.5)
        history.play()
        everything_is_used(history, seed)
        expelled += history.expelled
        alone += history.alone
    # The histories have what they are about.
    assert expelled > 50
    assert alone > 50
