"""Jobs that are measured: of a share of the files they read no copies, and the source is slowed
down for them (docs/analyze.md). No copy is removed, and other jobs are not affected.

A job is a session of processes. The files that it may read from the tiers are those with the lowest
buckets, the same that a smaller tier would admit under the policy ``no_evict``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from monarch.posix.buckets import BUCKETS
from monarch.telemetry.report import MeasuredReport
from monarch.types import Attributes
from monarch.vfs.source_limit import MEASURED_BURST_S, SourceLimit


@dataclass(eq=False)
class MeasuredJob:
    """Belongs to the event loop. ``share`` of the files may be read from tiers. ``hits`` counts its
    opens that tiers have served, ``misses`` the others. ``source`` limits what it reads from
    there."""

    session: int
    uid: int
    share: float = 1.0
    hits: int = 0
    misses: int = 0
    source: SourceLimit = field(default_factory=partial(SourceLimit, 0, MEASURED_BURST_S))

    def limit(self, share: float, source_limit: int) -> None:
        """Changes the limits; ``source_limit`` in bytes/s, 0: no limit. Calls that wait for the
        former one continue."""
        self.share = share
        self.source.change(source_limit)

    def hides(self, bucket: int) -> bool:
        """Whether a file with this bucket is read from the source although a tier has it."""
        return bucket >= self.share * BUCKETS

    def opened(self, tier: int | None) -> None:
        """Counts an open."""
        if tier:
            self.hits += 1
        else:
            self.misses += 1


class MeasuredJobs:
    """Belongs to the event loop. ``bucket`` is that of a file by its inode number at the source;
    ``notify`` is called with the sessions that are measured when they change."""

    def __init__(
        self,
        bucket: Callable[[int], int],
        notify: Callable[[tuple[int, ...]], None] | None = None,
    ) -> None:
        self._bucket = bucket
        self._notify = notify or (lambda sessions: None)
        self._jobs: dict[int, MeasuredJob] = {}
        self.of = self._jobs.get

    @property
    def is_empty(self) -> bool:
        """Whether no job is measured now."""
        return not self._jobs

    def begin(self, session: int, uid: int) -> MeasuredJob:
        """The job of a user in a session, which is measured from now on."""
        job = self._jobs.get(session)
        if job is None:
            job = self._jobs[session] = MeasuredJob(session, uid)
            self._notify(tuple(self._jobs))
        return job

    def end(self, session: int) -> None:
        """Ends the limits of a session."""
        job = self._jobs.pop(session)
        job.limit(1.0, 0)
        self._notify(tuple(self._jobs))

    def hides(self, job: MeasuredJob, attributes: Attributes) -> bool:
        """Whether a file is read from the source by this job although a tier may have it."""
        return job.hides(self._bucket(attributes.source_ino))

    def opened(self, session: int, tier: int | None) -> None:
        """Counts an open by a session."""
        if (job := self._jobs.get(session)) is not None:
            job.opened(tier)

    def report(self) -> list[MeasuredReport]:
        return [
            MeasuredReport(
                job.session, job.share, job.source.rate, job.hits, job.misses, job.source.nbytes
            )
            for job in self._jobs.values()
        ]
