"""Which job prepares which batch, and how long a prepared batch is kept.

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

# A job that waits gets a reply at least once in this share of the stall timeout.
_REMIND = 0.5


class Kind(IntEnum):
    """The kinds of replies, and what the job must do."""

    # The batch is attached.
    READY = 1
    # Prepare and publish the batch of the position, which may be a later one than the job asked
    # for. Then ask again.
    PRODUCE = 2
    # Prepare the batch that was asked for, and do not publish it.
    ALONE = 3
    # Another reply follows.
    WAIT = 4
    # The job held others up for longer than the stall timeout. It may join again.
    EXPELLED = 5


class Reply(NamedTuple):
    job: int
    kind: Kind
    position: int


@dataclass(slots=True)
class _Job:
    """``position`` is the next batch that it uses, ``active`` the time of the last message to it or
    from it, ``waiting`` the time since which it waits for a reply, None if it does not wait."""

    position: int
    active: float
    waiting: float | None = None


class StagingTable:
    """The state of one area, from its first job to its last.

    An epoch has ``count`` batches. At most ``depth`` prepared batches are kept, beginning with the
    next batch of the job that is furthest behind (the floor). ``jobs`` jobs are expected: until so
    many have joined, at most ``stall_s`` seconds, nothing is removed. A job that others wait for is
    expelled if it sends nothing for ``stall_s`` seconds.

    A job before the floor, or more than an epoch behind what is kept, does not count: it prepares
    its batches for itself, and no job waits for it.
    """

    def __init__(self, *, count: int, depth: int, jobs: int, stall_s: float) -> None:
        self.count = count
        self._depth = depth
        self._expected = jobs
        self._stall_s = stall_s
        self._jobs: dict[int, _Job] = {}
        self._claims: dict[int, int] = {}
        # A token of the caller for each batch that is kept.
        self._ready: dict[int, int] = {}
        self._removed: list[int] = []
        self._floor = 0
        self._arrived = 0
        self._gathering_until: float | None = None
        self.published = 0
        self.most_kept = 0

    def __len__(self) -> int:
        """The number of jobs."""
        return len(self._jobs)

    @property
    def members(self) -> int:
        """The number of jobs, or of those that are expected, while these are waited for."""
        return len(self._jobs) if self._gathering_until is None else self._expected

    @property
    def kept(self) -> int:
        """The number of batches that are kept."""
        return len(self._ready)

    def token(self, position: int) -> int:
        """The token of a batch of a READY reply; valid until the next event."""
        return self._ready[position]

    def take_removed(self) -> list[int]:
        """The tokens of the batches that are not kept any more, each once."""
        removed, self._removed = self._removed, []
        return removed

    # -- events ------------------------------------------------------------------------------------

    def join(self, number: int, position: int, jobs: int, now: float) -> list[Reply]:
        """A new job ``number`` begins at ``position``. It knows of ``jobs`` jobs: fewer are
        expected if some have ended, before the broker was started again."""
        if not self._arrived:
            self._floor = position
            self._gathering_until = now + self._stall_s
        self._arrived += 1
        self._jobs[number] = _Job(position, now)
        self._expected = min(self._expected, jobs)
        if self._gathering_until is not None:
            self._floor = min(self._floor, position)
            if self._arrived >= self._expected:
                self._gathering_until = None
        return self._settle(now)

    def want(self, number: int, position: int, now: float) -> list[Reply]:
        """The job has used all batches before ``position`` and waits for that one."""
        self._jobs[number].waiting = now
        return self.move(number, position, now)

    def move(self, number: int, position: int, now: float) -> list[Reply]:
        """The job has used all batches before ``position``, and will publish no batch that it has
        claimed."""
        job = self._jobs[number]
        job.position, job.active = position, now
        self._release_claims(number)
        return self._settle(now)

    def publish(self, number: int, position: int, token: int, now: float) -> list[Reply]:
        """The job has prepared a batch. It is kept if the job has claimed it, and if it is still of
        use; otherwise its token is removed."""
        self._jobs[number].active = now
        if self._claims.get(position) == number:
            del self._claims[position]
            self._ready[position] = token
            self.published += 1
        else:
            self._removed.append(token)
        replies = self._settle(now)
        self.most_kept = max(self.most_kept, len(self._ready))
        return replies

    def leave(self, number: int, now: float) -> list[Reply]:
        """The job has ended, or died."""
        del self._jobs[number]
        self._release_claims(number)
        if not self._jobs:
            self._remove(list(self._ready))
        return self._settle(now)

    def expire(self, now: float) -> list[Reply]:
        """The time has come to ``now``: expels jobs that hold others up, and reminds."""
        if self._gathering_until is not None and now >= self._gathering_until:
            self._gathering_until = None
        replies = self._settle(now)
        stalled = {number for number, deadline in self._deadlines() if deadline <= now}
        for number in sorted(stalled):
            replies.append(Reply(number, Kind.EXPELLED, self._jobs[number].position))
            replies += self.leave(number, now)
        for number, job in self._jobs.items():
            if job.waiting is not None and job.active + self._stall_s * _REMIND <= now:
                job.active = now
                replies.append(Reply(number, Kind.WAIT, job.position))
        return replies

    def next_deadline(self) -> float | None:
        """The time at which ``expire`` must be called next, None if no job waits."""
        deadlines = [deadline for _, deadline in self._deadlines()]
        deadlines += [
            job.active + self._stall_s * _REMIND
            for job in self._jobs.values()
            if job.waiting is not None
        ]
        if self._gathering_until is not None:
            deadlines.append(self._gathering_until)
        return min(deadlines, default=None)

    # -- rules -------------------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Reply]:
        """Removes batches that all jobs have used, and gives the replies that are possible now."""
        if not self._jobs:
            return []
        self._move_floor()
        end = self._floor + self._depth
        self._remove([at for at in self._ready if not self._floor <= at < end])
        replies = []
        for number, job in sorted(self._jobs.items(), key=lambda item: item[1].position):
            if job.waiting is not None and (reply := self._reply(number, job)) is not None:
                job.waiting, job.active = None, now
                replies.append(reply)
        return replies

    def _move_floor(self) -> None:
        if self._gathering_until is None:
            positions = [job.position for job in self._jobs.values()]
            # If no job counts, the jobs begin anew at the lowest position.
            self._floor = min(filter(self._counts, positions), default=min(positions))

    def _counts(self, position: int) -> bool:
        return self._floor <= position < self._floor + self._depth + self.count

    def _reply(self, number: int, job: _Job) -> Reply | None:
        wanted = job.position
        if not self._counts(wanted):
            return Reply(number, Kind.ALONE, wanted)
        if wanted in self._ready:
            return Reply(number, Kind.READY, wanted)
        # The job can prepare batches of this epoch only.
        epoch_end = (wanted // self.count + 1) * self.count
        for position in range(wanted, min(self._floor + self._depth, epoch_end)):
            if position not in self._claims and position not in self._ready:
                self._claims[position] = number
                return Reply(number, Kind.PRODUCE, position)
        return None

    def _deadlines(self) -> Iterator[tuple[int, float]]:
        """The jobs that other jobs wait for, each with the time at which it is expelled."""
        for job in self._jobs.values():
            if job.waiting is None:
                continue
            for number in self._waited_for(job):
                since = max(self._jobs[number].active, job.waiting)
                yield number, since + self._stall_s

    def _waited_for(self, job: _Job) -> Iterator[int]:
        if job.position in self._claims:
            yield self._claims[job.position]
        elif job.position >= self._floor + self._depth and self._gathering_until is None:
            for number, other in self._jobs.items():
                if other.position == self._floor and other.waiting is None:
                    yield number

    def _release_claims(self, number: int) -> None:
        for position in [at for at, by in self._claims.items() if by == number]:
            del self._claims[position]

    def _remove(self, positions: list[int]) -> None:
        self._removed += [self._ready.pop(position) for position in positions]
