"""The quotas of jobs: the bytes of their copies, and the rate at which they read the source.

A job is here what the administrator names: the processes of a control group, those of a user, or
all others. A process of an ordinary user cannot leave any of these for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import PurePosixPath

from monarch.placement.quotas import MOST_JOBS, Quotas
from monarch.posix.cgroups import group_of, group_runs
from monarch.posix.processes import runs_any_of, user_of
from monarch.telemetry.report import QuotaReport
from monarch.transfer.source_calls import Caller
from monarch.types import Ino
from monarch.vfs.source_limit import SourceLimit

# The sessions whose control groups are known: those of the processes that were seen last.
_MOST_SESSIONS = 1024


@dataclass(eq=False)
class Quota:
    """A job, of a ``user`` by number or of a control group, None and None: all others. ``tier`` are
    the bytes of its copies, None: no limit."""

    name: str
    user: int | None = None
    group: PurePosixPath | None = None
    tier: int | None = None
    source: SourceLimit = field(default_factory=SourceLimit)

    @property
    def is_of_all_others(self) -> bool:
        return self.user is None and self.group is None

    def covers(self, user: int, group: Callable[[], PurePosixPath | None]) -> bool:
        """Whether a process of a user in a control group belongs to the job."""
        if self.group is None:
            return self.user in (None, user)
        return (found := group()) is not None and found.is_relative_to(self.group)

    def runs(self) -> bool:
        """Whether a process of the job may run."""
        if self.group is not None:
            return group_runs(self.group)
        return self.user is None or runs_any_of(self.user)


class JobQuotas:
    """Belongs to the event loop. The first of ``jobs`` that covers a process counts; a process that
    none covers gets no copies. ``copies`` has the bytes that each is charged for."""

    def __init__(self, jobs: Sequence[Quota], copies: Quotas) -> None:
        self._jobs = list(jobs)
        # The jobs after these were added later.
        self._configured = len(self._jobs)
        self.copies = copies
        self._groups: dict[int, PurePosixPath] = {}

    def of(self, user: int | None, group: PurePosixPath | None) -> Quota | None:
        """The quota of a job, None if it has none."""
        for job in self._jobs:
            if (job.user, job.group) == (user, group):
                return job
        return None

    def charged(self, quota: Quota) -> int:
        """The bytes of copies that the job of a quota is charged for."""
        return round(self.copies.charged(self._jobs.index(quota)))

    def room(self, wanted: Sequence[Quota]) -> int:
        """How many quotas can be added, if those in ``wanted`` are to have places."""
        return len(self._places(wanted))

    def change(self, *quotas: Quota) -> None:
        """Gives jobs other quotas, or ones at all. A job that was added and has ended leaves its
        place to them. Raises ValueError, and changes nothing, if there are too few places."""
        new = [each for each in quotas if self.of(each.user, each.group) is None]
        places = self._places(quotas)
        if len(new) > len(places):
            raise ValueError("there are too many quotas")
        for quota in quotas:
            if (known := self.of(quota.user, quota.group)) is not None:
                known.tier = quota.tier
                known.source.change(quota.source.rate)
                self.copies.change(self._jobs.index(known), quota.tier)
        for quota, number in zip(new, places, strict=False):
            if number < len(self._jobs):
                self.copies.ended(number)
            self._jobs[number : number + 1] = [quota]
            self.copies.change(number, quota.tier)

    def _places(self, wanted: Sequence[Quota]) -> list[int]:
        """The numbers that new jobs can have: free ones, and those of jobs that were added, have no
        process any more, and are not in ``wanted``."""
        kept = {(each.user, each.group) for each in wanted}
        over = [
            number
            for number, job in enumerate(self._jobs)
            if number >= self._configured and (job.user, job.group) not in kept and not job.runs()
        ]
        return [*range(len(self._jobs), MOST_JOBS), *over]

    def job_of(self, caller: Caller | None) -> int | None:
        """The number of the job that a process belongs to; None if there is none."""
        if caller is None:
            return None
        return self._number(caller.uid, cache(partial(group_of, caller.pid)))

    def opened(self, ino: Ino, size: int, *, user: int, pid: int, session: int) -> None:
        """Charges the job of a process of ``user`` for its part of a copy that it has opened. If
        the process has ended, its control group is that of the process of its session that was seen
        last. If that is not known, no job is charged unless one of the user comes first."""
        try:
            job = self._number(user, cache(partial(self._group_then, pid, session)))
        except ProcessLookupError:
            return
        if job is not None:
            self.copies.opened(ino, size, job)

    def _group_then(self, pid: int, session: int) -> PurePosixPath | None:
        """The control group of a process that may have ended; None if it is in none. Raises
        ProcessLookupError if that is not known."""
        group, groups = group_of(pid), self._groups
        if group is None:
            if session not in groups and user_of(pid) is None:
                raise ProcessLookupError
            return groups.get(session)
        if session and groups.get(session) != group:
            if len(groups) >= _MOST_SESSIONS:
                del groups[next(iter(groups))]
            groups[session] = group
        return group

    def source_of(self, caller: Caller | None) -> SourceLimit | None:
        """What limits the reads of a process from the source; None: nothing does."""
        job = self.job_of(caller)
        return None if job is None else self._jobs[job].source

    def end_jobs(self) -> None:
        """Charges jobs that have ended for nothing."""
        for number, job in enumerate(self._jobs):
            if self.copies.charged(number) and not job.runs():
                self.copies.ended(number)

    def report(self) -> list[QuotaReport]:
        return [
            QuotaReport(
                job.name,
                job.tier,
                round(self.copies.charged(number)),
                job.source.rate,
                job.source.nbytes,
            )
            for number, job in enumerate(self._jobs)
        ]

    def _number(self, user: int, group: Callable[[], PurePosixPath | None]) -> int | None:
        # The job of all others counts last: jobs may have been added after it.
        others = None
        for number, job in enumerate(self._jobs):
            if job.is_of_all_others:
                others = number
            elif job.covers(user, group):
                return number
        return others
