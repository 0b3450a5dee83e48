"""Begins and ends the measurement of jobs, at the request of their own processes.

A process may only have its own session measured, so no user can slow down the job of another one.
The limits of a session end when the last process that has asked for them ends, also if it is
killed, or leaves the session.
/proc is read for this, since an ioctl leaves nothing that a dead process would close.
"""

from __future__ import annotations

import errno
from collections import Counter

import trio

from monarch.control.registry import process_started
from monarch.errors import Refused
from monarch.foresight.messages import HITS, MISSES, MOST_COUNTED, WHOLE, Count, Limit
from monarch.posix.processes import Sessions
from monarch.text import KiB
from monarch.transfer.source_calls import Caller
from monarch.vfs.measured import MeasuredJob, MeasuredJobs

# Limits must end within a second of their process.
_LOOK_S = 0.5
# Measured sessions of all users (MAX_MEASURED of the datapath), and of one user.
_MOST, _MOST_OF_USER = 16, 4
# The processes that may limit one session: the ranks of a job on a node.
_MOST_PROCESSES = 64


class Measuring:
    """Belongs to the event loop. Without ``sends_opens`` the kernel opens files without a request,
    so nothing can be measured."""

    def __init__(self, jobs: MeasuredJobs, *, sends_opens: bool) -> None:
        self._jobs = jobs
        self._sends_opens = sends_opens
        self._sessions = Sessions()
        # The user of each process that has limited a session: by number, start and session, since a
        # process may leave its session for a new one.
        self._asked: dict[tuple[int, int, int], int] = {}
        self._begun = trio.Event()

    def receive(self, message: Limit | Count, caller: Caller, process: int) -> int:
        """Answers a message of ``process``: 0 for a limit, else what was counted. Raises Refused:
        EOPNOTSUPP if nothing can be measured here, ESRCH if the session of the process cannot be
        seen, ENOSPC for too many, EPERM if another user has the session measured, EINVAL for a
        count of a session that is not."""
        if not self._sends_opens:
            raise Refused(errno.EOPNOTSUPP)
        session = self._sessions.of(process)
        started = process_started(process) if session else None
        if started is None:
            raise Refused(errno.ESRCH)
        if isinstance(message, Count):
            job = self._jobs.of(session)
            if job is None:
                raise Refused(errno.EINVAL)
            return _counted(job, message.counted)
        asking = (process, started, session)
        if asking not in self._asked:
            self._require_room(session, caller.uid)
        job = self._jobs.begin(session, caller.uid)
        if job.uid != caller.uid:
            raise Refused(errno.EPERM)
        self._asked[asking] = caller.uid
        job.limit(message.share / WHOLE, message.source_limit)
        self._begun.set()
        return 0

    def _require_room(self, session: int, uid: int) -> None:
        sessions = {of: user for (_, _, of), user in self._asked.items()}
        users, processes = Counter(sessions.values()), Counter(of for _, _, of in self._asked)
        is_full = len(sessions) >= _MOST or users[uid] >= _MOST_OF_USER
        if (session not in sessions and is_full) or processes[session] >= _MOST_PROCESSES:
            raise Refused(errno.ENOSPC)

    async def run(self) -> None:
        """Ends the limits of processes that have ended or left their session, until cancelled."""
        while True:
            await self._begun.wait()
            await trio.sleep(_LOOK_S)
            for asked in list(self._asked):
                process, started, session = asked
                is_over = process_started(process) != started
                if is_over or self._sessions.of(process) != session:
                    del self._asked[asked]
                    if all(session != other for _, _, other in self._asked):
                        self._jobs.end(session)
            if not self._asked:
                self._begun = trio.Event()


def _counted(job: MeasuredJob, what: int) -> int:
    counts = {HITS: job.hits, MISSES: job.misses}
    return min(counts.get(what, job.source.nbytes // KiB), MOST_COUNTED)
