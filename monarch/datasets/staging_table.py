"""Which process prepares which batch, and how long a prepared batch is kept.

This is the coordinated prep of CoorDL (Mohan et al., VLDB 2021): jobs that train on the same data
prepare each batch once together, and each job uses it once. A batch has a position, its number
since the first epoch. Each job uses positions in ascending order, so one number for each job, its
next position, says which batches it has used. All functions get the time, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from monarch.datasets.staging_kept import KeptBatches

# A process that waits gets a reply at least once in this share of the stall timeout.
_REMIND = 0.5


class Kind(IntEnum):
    """The kinds of replies, and what the process must do."""

    # The batch is attached.
    READY = 1
    # Prepare and publish the batch of the position, which may be a later one than the job asked
    # for. Then ask again.
    PRODUCE = 2
    # Prepare the batch that was asked for, and do not publish it.
    ALONE = 3
    # Another reply follows.
    WAIT = 4
    # The process held others up for longer than the stall timeout. It may join again.
    EXPELLED = 5
    # Batches that the process keeps are not needed any more. Another reply follows.
    RELEASE = 6
    # Keep the batch that is attached: the process that kept it has left. Another reply follows.
    HOLD = 7


class Reply(NamedTuple):
    """``number`` is that of a job or a worker."""

    number: int
    kind: Kind
    position: int


class _Claim(NamedTuple):
    number: int
    since: float


@dataclass(slots=True)
class _Process:
    """A job or a worker. ``position`` is the next batch that the job uses, or the first one of the
    epoch of the worker. ``active`` is the time of the last message to it or from it, ``waiting``
    the time since which it waits for a reply, None if it does not wait. The process has arrived
    when it has said which batches it keeps. A job lacks workers if none of them has asked for a
    batch for a stall timeout, while the job waited for it. A worker knows the end of its epoch when
    it has got a reply after it."""

    member: int
    position: int
    active: float
    waiting: float | None = None
    may_prepare: bool = True
    has_arrived: bool = False
    lacks_workers: bool = False
    knows_end: bool = False


class StagingTable:
    """The state of one area, from its first job to its last.

    An epoch has ``count`` batches. At most ``depth`` prepared batches are kept, beginning with the
    next batch of the job that is furthest behind (the floor). ``jobs`` jobs are expected: until so
    many have joined, and all awaited members have come, at most ``stall_s`` seconds, nothing is
    removed. A process that others wait for is expelled if it sends nothing for ``stall_s`` seconds.

    A job prepares batches while it waits, and its workers prepare batches of its epoch ahead. A job
    before the floor, or more than an epoch behind what is kept, does not count: it prepares its
    batches for itself, and no job waits for it.
    """

    def __init__(self, *, count: int, depth: int, jobs: int, stall_s: float) -> None:
        self.count = count
        self._depth = depth
        self._expected = jobs
        self._stall_s = stall_s
        self._jobs: dict[int, _Process] = {}
        self._workers: dict[int, _Process] = {}
        self._claims: dict[int, _Claim] = {}
        self.kept = KeptBatches()
        self._floor = 0
        # The jobs that have joined so far.
        self._joined = 0
        # Members of an earlier broker that are still to come, and may have batches.
        self._awaited: set[int] = set()
        self._gathering_until: float | None = None
        self.published = 0
        self.most_kept = 0

    def __len__(self) -> int:
        """The number of jobs."""
        return len(self._jobs)

    @property
    def members(self) -> int:
        """The number of jobs, or of those that are expected, while these are waited for."""
        return len(self._jobs) if self.has_all else max(self._expected, len(self._jobs))

    @property
    def has_all(self) -> bool:
        """Whether no further jobs are waited for."""
        return bool(self._joined) and self._gathering_until is None

    @property
    def is_over(self) -> bool:
        """Whether all jobs have left, or all workers, if no job has joined; and none is to come."""
        has_ended = bool(self._joined) or not self._workers
        return has_ended and not self._jobs and not self._awaited

    @property
    def is_awaiting(self) -> bool:
        """Whether members of an earlier broker are still to come."""
        return bool(self._awaited)

    @property
    def floor(self) -> int:
        """No job needs a batch before this one."""
        return self._floor if self.has_all else 0

    # -- events ------------------------------------------------------------------------------------

    def await_members(self, members: set[int], now: float) -> list[Reply]:
        """Of the processes of an earlier broker these are alive. Those that have not come, and said
        which batches they keep, are waited for: meanwhile no batch is prepared."""
        present = {process.member for process in self._all().values() if process.has_arrived}
        self._awaited = members - present
        return self._settle(now)

    def join(self, number: int, member: int, position: int, jobs: int, now: float) -> list[Reply]:
        """A new job ``number`` begins at ``position``. It expects ``jobs`` jobs: 1 if it has met
        the others already, at an earlier broker."""
        if not self._joined:
            self._floor = position
        self._joined += 1
        self._jobs[number] = _Process(member, position, now)
        self._expected = min(self._expected, jobs)
        if not self.has_all:
            self._floor = min(self._floor, position)
        return self._begin(now)

    def attach(self, number: int, member: int, now: float) -> list[Reply]:
        """A new worker ``number``."""
        self._workers[number] = _Process(member, 0, now)
        return self._begin(now)

    def keep(self, number: int, position: int, token: int, now: float) -> list[Reply]:
        """The process has a batch that was prepared for an earlier broker. It is kept if it is of
        use; otherwise its token is removed."""
        is_full = self.is_awaiting and len(self.kept) >= 2 * self._depth
        if position in self.kept or is_full:
            self.kept.reject(token)
        else:
            self._claims.pop(position, None)
            self.kept.add(position, token, number)
        return self._settle(now)

    def want(self, number: int, position: int, now: float, *, prepare: bool = True) -> list[Reply]:
        """The job has used all batches before ``position`` and waits for that one. ``prepare``: it
        may be asked to prepare one meanwhile."""
        job = self._jobs[number]
        job.waiting, job.may_prepare = now, prepare or job.lacks_workers
        return self.move(number, position, now)

    def work(self, number: int, first: int, now: float) -> list[Reply]:
        """The worker waits for a batch to prepare, of the epoch that begins with ``first``."""
        worker = self._workers[number]
        worker.position, worker.active, worker.waiting = first, now, now
        worker.knows_end = False
        for job in self._jobs.values():
            job.lacks_workers = False
        self._note_arrival(worker)
        self._release_claims(number)
        return self._settle(now)

    def move(self, number: int, position: int, now: float) -> list[Reply]:
        """The job has used all batches before ``position``, and will publish no batch that it has
        claimed."""
        job = self._jobs[number]
        job.position, job.active = position, now
        self._note_arrival(job)
        self._release_claims(number)
        return self._settle(now)

    def publish(self, number: int, position: int, token: int, now: float) -> list[Reply]:
        """The process has prepared a batch. It is kept if the process has claimed it, and if it is
        still of use; otherwise its token is removed."""
        self._all()[number].active = now
        if position in self._claims and self._claims[position].number == number:
            del self._claims[position]
            self.kept.add(position, token, number)
            self.published += 1
        else:
            self.kept.reject(token)
        return self._settle(now)

    def leave(self, number: int, now: float) -> list[Reply]:
        """The job or the worker has ended, or died."""
        self._jobs.pop(number, None)
        self._workers.pop(number, None)
        self._release_claims(number)
        return self._settle(now)

    def expire(self, now: float) -> list[Reply]:
        """The time has come to ``now``: expels processes that hold others up, and reminds. A job
        that no worker works for may prepare its batches."""
        if self._gathering_until is not None and now >= self._gathering_until:
            self._gathering_until = None
            self._awaited.clear()
        replies = self._settle(now)
        everyone = self._all()
        stalled = {number for number, deadline in self._deadlines() if deadline <= now}
        lacking = {number for number in stalled if everyone[number].waiting is not None}
        for number in sorted(stalled):
            process = everyone[number]
            if number in lacking:
                process.may_prepare = process.lacks_workers = True
                replies += self._settle(now)
                continue
            replies.append(Reply(number, Kind.EXPELLED, process.position))
            replies += self.leave(number, now)
        for number, process in self._all().items():
            if process.waiting is not None and process.active + self._stall_s * _REMIND <= now:
                process.active = now
                replies.append(Reply(number, Kind.WAIT, process.position))
        return replies

    def next_deadline(self) -> float | None:
        """The time at which ``expire`` must be called next, None if no process waits."""
        deadlines = [deadline for _, deadline in self._deadlines()]
        deadlines += [
            process.active + self._stall_s * _REMIND
            for process in self._all().values()
            if process.waiting is not None
        ]
        if self._gathering_until is not None:
            deadlines.append(self._gathering_until)
        return min(deadlines, default=None)

    # -- rules -------------------------------------------------------------------------------------

    def _all(self) -> dict[int, _Process]:
        return self._jobs | self._workers

    def _note_arrival(self, process: _Process) -> None:
        process.has_arrived = True
        self._awaited.discard(process.member)

    def _begin(self, now: float) -> list[Reply]:
        if self._gathering_until is None and self._joined + len(self._workers) == 1:
            self._gathering_until = now + self._stall_s
        return self._settle(now)

    def _settle(self, now: float) -> list[Reply]:
        """Removes batches that all jobs have used, and gives the replies that are possible now."""
        if self._joined >= self._expected and self._jobs and not self._awaited:
            self._gathering_until = None
        if self.is_over:
            self.kept.remove_outside(0, 0)
        if not self._jobs:
            return list(self._hand_over())
        self._move_floor()
        if not self._awaited:
            self.kept.remove_outside(self._floor, self._floor + self._depth)
        self.most_kept = max(self.most_kept, len(self.kept))
        replies: list[Reply] = []
        for number, job in _waiting(self._jobs):
            replies += self._reply(number, job, now)
        for number, worker in _waiting(self._workers):
            replies += self._work_for(number, worker, worker.position, now)
        over = self.floor - self.count
        replies += _released(self._workers, self.kept.outdated, over, self._floor)
        return [*replies, *self._hand_over()]

    def _move_floor(self) -> None:
        if self.has_all:
            positions = [job.position for job in self._jobs.values()]
            # If no job counts, the jobs begin anew at the lowest position.
            self._floor = min(filter(self._counts, positions), default=min(positions))

    def _counts(self, position: int) -> bool:
        return self._floor <= position < self._floor + self._depth + self.count

    def _reply(self, number: int, job: _Process, now: float) -> Iterator[Reply]:
        wanted = job.position
        if self._counts(wanted) and wanted not in self.kept:
            if job.may_prepare:
                yield from self._work_for(number, job, wanted // self.count * self.count, now)
            return
        job.waiting, job.active = None, now
        yield Reply(number, Kind.READY if wanted in self.kept else Kind.ALONE, wanted)

    def _work_for(self, number: int, process: _Process, first: int, now: float) -> Iterator[Reply]:
        """The first batch that no process has, from the position of the process on. It can prepare
        batches of the epoch that begins with ``first`` only."""
        begin = max(process.position, self._floor)
        end = min(self._floor + self._depth, first + self.count)
        for position in range(begin, end):
            if position not in self._claims and position not in self.kept and not self._awaited:
                self._claims[position] = _Claim(number, now)
                process.waiting, process.active = None, now
                yield Reply(number, Kind.PRODUCE, position)
                return

    def _deadlines(self) -> Iterator[tuple[int, float]]:
        """The processes that jobs wait for, each with the time at which it is expelled. A job that
        waits for workers, and has none that prepares a batch, is one of them: it prepares its
        batches from then on."""
        for number, job in self._jobs.items():
            if job.waiting is not None:
                for other, since in self._waited_for(number, job):
                    yield other, max(since, job.waiting) + self._stall_s

    def _waited_for(self, job_number: int, job: _Process) -> Iterator[tuple[int, float]]:
        """Each process, and the time since which it has sent nothing that the job waits for."""
        if job.position in self._claims:
            yield self._claims[job.position]
        elif job.position < self._floor + self._depth:
            # A process that has claimed another batch could prepare this one next.
            yield from self._claims.values()
            if not self._claims and not job.may_prepare:
                yield job_number, 0.0
        elif self.has_all:
            for number, other in self._jobs.items():
                if other.position == self._floor and other.waiting is None:
                    yield number, other.active

    def _hand_over(self) -> Iterator[Reply]:
        """The batches that a process has kept for the next broker until it left are kept by others:
        by workers that read the reply at once, if there are any."""
        idle = [other for other, worker in self._workers.items() if worker.waiting is not None]
        candidates = idle or self._workers or self._jobs
        for other, position in self.kept.hand_over(self._all(), candidates):
            yield Reply(other, Kind.HOLD, position)

    def _release_claims(self, number: int) -> None:
        for position in [at for at, by in self._claims.items() if by.number == number]:
            del self._claims[position]


def _released(
    workers: dict[int, _Process], outdated: set[int], over: int, floor: int
) -> Iterator[Reply]:
    """The replies to workers that keep batches which are not needed, and to those whose epoch, with
    its first batch at ``over`` or before, has ended. A worker that prepares a batch gets its reply
    when it asks for the next one."""
    outdated.intersection_update(workers)
    for number, worker in sorted(workers.items()):
        is_over = worker.position <= over
        is_new = number in outdated or (is_over and not worker.knows_end)
        if worker.waiting is not None and is_new:
            worker.knows_end = is_over
            outdated.discard(number)
            yield Reply(number, Kind.RELEASE, floor)


def _waiting(processes: dict[int, _Process]) -> list[tuple[int, _Process]]:
    """Those that wait for a reply: first those that are furthest behind, or wait longest."""
    waiting = [
        (process.position, process.waiting, number)
        for number, process in processes.items()
        if process.waiting is not None
    ]
    return [(number, processes[number]) for _, _, number in sorted(waiting)]
