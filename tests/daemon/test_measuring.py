"""A process has its own session measured, and no longer than it lives."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import trio
import trio.testing

from monarch.daemon import measuring
from monarch.daemon.measuring import Measuring
from monarch.errors import Refused
from monarch.foresight.messages import HITS, MISSES, SOURCE_KIB, Count, Limit
from monarch.transfer.source_calls import Caller
from monarch.vfs.measured import MeasuredJobs
from tests.equipment.processes import is_running
from tests.equipment.waiting import wait_until

ALICE, BOB = 1001, 1002
HALF = Limit(500_000, 1 << 20)


class Rig:
    def __init__(self, *, sends_opens: bool = True) -> None:
        self.notified: list[tuple[int, ...]] = []
        self.jobs = MeasuredJobs(lambda ino: ino, self.notified.append)
        self.measuring = Measuring(self.jobs, sends_opens=sends_opens)

    def send(self, message: Limit | Count, pid: int, *, uid: int = ALICE) -> int:
        return self.measuring.receive(message, Caller(pid, uid, uid), pid)

    def refused(self, message: Limit | Count, pid: int, *, uid: int = ALICE) -> int:
        with pytest.raises(Refused) as refusal:
            self.send(message, pid, uid=uid)
        return refusal.value.errno


@contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own."""
    wait = "import sys; sys.stdin.read()"
    started = subprocess.Popen(
        [sys.executable, "-S", "-c", wait], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


async def test_the_session_of_a_process_is_limited_and_counted() -> None:
    rig = Rig()
    with process() as mine:
        assert rig.refused(Count(HITS), mine.pid) == errno.EINVAL
        assert rig.send(HALF, mine.pid) == 0
        job = rig.jobs.of(mine.pid)
        assert job is not None and (job.share, job.source.rate) == (0.5, 1 << 20)
        assert rig.notified == [(mine.pid,)]
        job.hits, job.misses, job.source.nbytes = 5, 7, 2500
        assert [rig.send(Count(each), mine.pid) for each in (HITS, MISSES, SOURCE_KIB)] == [5, 7, 2]
        job.hits = 1 << 40
        assert rig.send(Count(HITS), mine.pid) == (1 << 31) - 1
        # The limits change, the counts do not.
        assert rig.send(Limit(1_000_000, 0), mine.pid) == 0
        assert (job.share, job.source.rate, job.misses) == (1.0, 0, 7)
        assert [job.session for job in rig.jobs.report()] == [mine.pid]


@pytest.mark.promise(293)
@pytest.mark.parametrize("is_killed", [False, True])
async def test_limits_end_within_a_second_of_their_process(
    is_killed: bool, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig()
    with process() as mine, process() as other:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.measuring.run)
            rig.send(HALF, mine.pid)
            rig.send(HALF, other.pid)
            await trio.sleep(5)
            assert len(rig.jobs.report()) == 2
            if is_killed:
                mine.kill()
            mine.communicate()
            await trio.sleep(1)
            assert [job.session for job in rig.jobs.report()] == [other.pid]
            assert rig.notified[-1] == (other.pid,)
            nursery.cancel_scope.cancel()


@pytest.mark.promise(293)
async def test_a_later_process_of_the_same_number_and_session_keeps_no_limits(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    with process() as mine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.measuring.run)
            rig.send(HALF, mine.pid)
            await trio.sleep(5)
            assert [job.session for job in rig.jobs.report()] == [mine.pid]
            # The kernel gives no number twice at will.
            monkeypatch.setattr(measuring, "process_started", lambda _: 1)
            await trio.sleep(1)
            assert not rig.jobs.report()
            nursery.cancel_scope.cancel()


# Starts a child in the session of its parent. The session of the tests themselves has no number if
# it was begun outside their PID namespace.
_FORK = (
    "import os, signal, sys\nchild = os.fork()\nif child:\n    sys.stdin.read()\n    os._exit(0)\n"
)


@contextmanager
def session(child: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The leader of a new session, and the number of its child, which runs ``child``."""
    code = f"{_FORK}print(os.getpid(), flush=True)\n{child}"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as leader:
        assert leader.stdout is not None
        started = int(leader.stdout.readline())
        try:
            yield leader, started
        finally:
            # Without its leader it may have been waited for.
            with suppress(ProcessLookupError):
                os.kill(started, signal.SIGKILL)
            leader.kill()


async def test_the_limits_of_a_session_end_with_the_last_process_that_asked(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig()
    with session("signal.pause()") as (leader, rank):
        rig.send(HALF, rank)
        rig.send(HALF, leader.pid)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.measuring.run)
            os.kill(rank, signal.SIGKILL)
            wait_until(lambda: not is_running(rank), "the rank has ended")
            await trio.sleep(2)
            assert rig.jobs.of(leader.pid) is not None
            os.kill(leader.pid, signal.SIGKILL)
            wait_until(lambda: not is_running(leader.pid), "the leader has ended")
            await trio.sleep(2)
            assert rig.jobs.report() == []
            nursery.cancel_scope.cancel()


async def test_the_limits_of_a_session_end_when_the_process_that_asked_has_left_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig()
    leave = (
        "signal.sigwait({signal.SIGUSR1}); os.setsid(); print('left', flush=True); signal.pause()"
    )
    block = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}); print('blocked', flush=True)"
    )
    with session(f"{block}\n{leave}") as (leader, mover):
        assert leader.stdout is not None
        assert leader.stdout.readline() == "blocked\n"
        rig.send(HALF, mover)
        os.kill(mover, signal.SIGUSR1)
        assert leader.stdout.readline() == "left\n"
        rig.send(HALF, mover)
        assert list(rig.notified[-1]) == [leader.pid, mover]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.measuring.run)
            await trio.sleep(2)
            assert list(rig.notified[-1]) == [mover]
            nursery.cancel_scope.cancel()


@pytest.mark.promise(294)
async def test_a_process_cannot_measure_what_is_not_its_own() -> None:
    """The session is that of the caller; no message names another one."""
    rig = Rig()
    with process() as alices:
        rig.send(HALF, alices.pid)
        # Another user in the same session, such as after su.
        assert rig.refused(HALF, alices.pid, uid=BOB) == errno.EPERM
        job = rig.jobs.of(alices.pid)
        assert job is not None and job.uid == ALICE
    assert rig.refused(HALF, 0) == errno.ESRCH
    assert rig.refused(HALF, alices.pid, uid=BOB) == errno.ESRCH


@pytest.mark.promise(294)
async def test_the_sessions_of_a_user_and_of_all_are_bounded() -> None:
    rig = Rig()
    with ExitStack() as stack:
        pids = [stack.enter_context(process()).pid for _ in range(17)]
        for pid in pids[:4]:
            rig.send(HALF, pid)
        assert rig.refused(HALF, pids[4]) == errno.ENOSPC
        rig.send(HALF, pids[0])
        for number, pid in enumerate(pids[4:16]):
            rig.send(HALF, pid, uid=BOB + number // 4)
        assert rig.refused(HALF, pids[16], uid=5000) == errno.ENOSPC
        assert len(rig.notified[-1]) == 16


async def test_nothing_is_measured_where_opens_are_not_seen() -> None:
    rig = Rig(sends_opens=False)
    assert rig.refused(HALF, os.getpid()) == errno.EOPNOTSUPP
    assert rig.notified == []
