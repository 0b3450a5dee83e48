"""Quotas of jobs below the kernel: which processes belong to a job, and what it gets."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from monarch.placement.quotas import Quotas
from monarch.transfer.source_calls import Caller
from monarch.vfs import quotas as module
from monarch.vfs.quotas import JobQuotas, Quota
from monarch.vfs.source_limit import LimitedCalls, SourceLimit
from tests.vfs.conftest import FILES, Rigs
from tests.vfs.rig import FakeFastPath, Rig
from tests.vfs.test_measured import begin, calling

MB = 1_000_000
ALICE, BOB = Caller(os.getpid(), 1001, 1001), Caller(os.getpid(), 1002, 1002)


def give(rig: Rig, *jobs: Quota) -> JobQuotas:
    copies = Quotas([job.tier for job in jobs], rig.snapshot.entries)
    rig.controller.quotas = copies
    rig.filesystem.readers.quotas = made = JobQuotas(jobs, copies)
    return made


@pytest.fixture
def rig(rigs: Rigs) -> Rig:
    made = rigs()
    assert FILES["large"] == b"l" * 100_000
    return made


@pytest.mark.promise(298)
async def test_only_opens_of_a_job_within_its_quota_bring_copies(
    rig: Rig,
) -> None:
    given = give(rig, Quota("alice", ALICE.uid, tier=1200), Quota("bob", BOB.uid, tier=600))
    with calling(BOB):
        await rig.content("small")
        assert not rig.engine.flights, "1000 bytes of 600"
        await rig.content("d/other")
        rig.engine.arrive(rig.ino("d/other"))
    with calling(ALICE):
        await rig.content("large")
        assert not rig.engine.flights, "100,000 bytes of 1200"
        await rig.content("small")
        rig.engine.arrive(rig.ino("small"))
        # They share this one.
        assert await rig.content("d/other") == FILES["d/other"]
    with calling(Caller(os.getpid(), 1003, 1003)):
        await rig.content("large")
        assert not rig.engine.flights, "a process without a quota"
    assert [each.charged for each in given.report()] == [1000, 500]
    rig.filesystem.readers.quotas = None


@pytest.mark.promise(298)
async def test_an_open_of_a_shared_copy_is_charged_in_equal_parts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = give(rig, Quota("alice", ALICE.uid, tier=2000), Quota("bob", BOB.uid, tier=600))
    with calling(ALICE):
        await rig.content("small")
        rig.engine.arrive(rig.ino("small"))
    with calling(BOB):
        await rig.content("small")
    assert [each.charged for each in given.report()] == [500, 500]
    # One that has ended is charged for nothing, and the other for the whole copy.
    monkeypatch.setattr(module, "runs_any_of", lambda user: user != BOB.uid)
    given.end_jobs()
    assert [each.charged for each in given.report()] == [1000, 0]


@pytest.mark.promise(298)
async def test_an_open_is_charged_for_no_copy_that_has_left_before_it_is_counted(
    rigs: Rigs,
) -> None:
    fast = FakeFastPath()
    rig = rigs(fast=fast)
    given = give(rig, Quota("alice", ALICE.uid, tier=2000))
    ino = rig.ino("small")
    with calling(ALICE):
        await rig.content("small")
    rig.engine.arrive(ino)
    for charged in (1000, 0):
        fast.events = [(ino, 1, None, ALICE.pid, 0, ALICE.uid)]
        rig.filesystem.readers.catch_up()
        assert [each.charged for each in given.report()] == [charged]
        rig.controller.dropped(ino, len(FILES["small"]))


@pytest.mark.promise(298)
async def test_opens_of_processes_that_have_ended_are_charged_to_their_jobs(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = FakeFastPath()
    rig = rigs(fast=fast)
    step, gone, session = PurePosixPath("/job_7/step_0"), 1 << 30, 41
    given = give(
        rig,
        Quota("root", 0),
        Quota("job 7", group=PurePosixPath("/job_7")),
        Quota("alice", ALICE.uid),
    )
    group_of = module.group_of
    monkeypatch.setattr(
        module, "group_of", lambda pid: step if pid == os.getpid() else group_of(pid)
    )
    ino = rig.copy("small")

    def charged(pid: int, session: int, user: int) -> list[int]:
        fast.events = [(ino, 1, None, pid, session, user)]
        rig.filesystem.readers.catch_up()
        found = [each.charged for each in given.report()]
        given.copies.removed(ino, len(FILES["small"]))
        return found

    assert charged(gone, 0, 0) == [1000, 0, 0], "the user is known"
    assert charged(gone, session, ALICE.uid) == [0, 0, 0], "it may be one of job 7"
    assert charged(os.getpid(), session, ALICE.uid) == [0, 1000, 0]
    assert charged(gone, session, ALICE.uid) == [0, 1000, 0], "its session is one of job 7"
    assert charged(gone, session + 1, ALICE.uid) == [0, 0, 0]


@pytest.mark.promise(299)
async def test_a_rate_of_20_mb_s_is_kept_for_a_job_and_delays_no_other(
    rig: Rig, autojump_clock: MockClock
) -> None:
    given = give(rig, Quota("alice", ALICE.uid, source=SourceLimit(20 * MB)), Quota("others"))
    ino = await rig.open("large")
    read = 0

    async def read_for_3_s() -> None:
        nonlocal read
        while trio.current_time() - began < 3:
            data = await rig.filesystem.read(ino, 0, 100_000)
            read += len(data)

    with calling(BOB):
        began = trio.current_time()
        for _ in range(100):
            await rig.filesystem.read(ino, 0, 100_000)
        assert trio.current_time() == began
    with calling(ALICE):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(read_for_3_s)
    assert 0.9 * 60 * MB <= read <= 1.1 * 60 * MB
    assert [each.source_bytes for each in given.report()] == [read, 10 * MB]
    rig.filesystem.release(ino)


@pytest.mark.promise(299)
async def test_calls_that_come_at_once_keep_the_rate_of_their_job(
    rig: Rig, autojump_clock: MockClock
) -> None:
    given = give(rig, Quota("alice", ALICE.uid, source=SourceLimit(MB)))
    with calling(ALICE):
        ino = await rig.open("large")
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(rig.filesystem.read, ino, 0, 100_000)
            for second in (1, 2, 3):
                await trio.sleep(1)
                read = given.report()[0].source_bytes
                assert 0.9 * second * MB <= read <= (second + 0.05) * MB
    assert given.report()[0].source_bytes == 3 * MB
    rig.filesystem.release(ino)


@pytest.mark.promise(299)
async def test_opens_that_come_at_once_keep_the_rate_of_their_job(
    rig: Rig, autojump_clock: MockClock
) -> None:
    give(rig, Quota("alice", ALICE.uid, source=SourceLimit(100)))
    with calling(ALICE):
        async with trio.open_nursery() as nursery:
            for name in ("d/other", "small"):
                nursery.start_soon(rig.content, name)
                await trio.testing.wait_all_tasks_blocked()
            # 500 bytes and 1000, of which 5 pass at once.
            for second, fetched in ((4.9, 0), (5, 500), (14.9, 500), (15, 1500)):
                await trio.sleep_until(second)
                assert rig.metrics.source_bytes[0] == fetched, second


@pytest.mark.promise(299)
async def test_a_call_that_is_cancelled_gives_back_what_it_has_not_read(
    rig: Rig, autojump_clock: MockClock
) -> None:
    limit = SourceLimit(100)
    give(rig, Quota("alice", ALICE.uid, source=limit))
    with calling(ALICE):
        with trio.move_on_after(1):
            await rig.content("small")
        assert limit.nbytes == 0
        began = trio.current_time()
        await rig.content("d/other")
        assert trio.current_time() - began == pytest.approx(4.95, abs=0.01)


@pytest.mark.promise(299)
async def test_a_job_with_many_readers_keeps_its_rate(autojump_clock: MockClock) -> None:
    calls, limit = LimitedCalls(), SourceLimit(MB // 5)

    async def read_for_3_s() -> None:
        # Calls that do not wait would stop the clock.
        while trio.current_time() - began < 3 and limit.nbytes < MB:
            with calls.payment([limit]) as payment:
                await payment.pay(100)
                payment.read(100)

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(400):
            nursery.start_soon(read_for_3_s)
    assert 0.9 * 0.6 * MB <= limit.nbytes <= 1.1 * 0.6 * MB


@pytest.mark.promise(299)
async def test_a_call_that_waits_for_its_limit_does_not_count_as_one_that_needs_the_source(
    rigs: Rigs, autojump_clock: MockClock
) -> None:
    fast = FakeFastPath()
    rig = rigs(fast=fast)
    limit = SourceLimit(1)
    give(rig, Quota("alice", ALICE.uid, source=limit))
    with calling(ALICE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.content, "small")
            await trio.sleep(1)
            assert fast.waiting == 1
            limit.change(0)
    assert fast.waiting == 0


@pytest.mark.promise(299)
async def test_a_small_file_that_is_fetched_at_its_open_counts_too(
    rig: Rig, autojump_clock: MockClock
) -> None:
    give(rig, Quota("alice", ALICE.uid, source=SourceLimit(100)))
    with calling(ALICE):
        began = trio.current_time()
        await rig.content("small")
        # 1000 bytes, of which 5 pass at once.
        assert trio.current_time() - began == pytest.approx(9.95, abs=0.01)


@pytest.mark.promise(299)
async def test_a_job_that_has_itself_measured_waits_for_its_rate_as_well(
    rig: Rig, us: Caller, autojump_clock: MockClock
) -> None:
    rig.copy("small")
    give(rig, Quota("user", us.uid, source=SourceLimit(100)))
    begin(rig, us, 0.0)
    with calling(us):
        began = trio.current_time()
        await rig.content("small")
        assert trio.current_time() - began == pytest.approx(9.95, abs=0.01)


@pytest.mark.promise(298)
def test_a_process_belongs_to_the_first_job_that_covers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = (
        Quota("job 7", group=PurePosixPath("/slurm/job_7")),
        Quota("alice", ALICE.uid),
        Quota("others"),
    )
    group = "/slurm/job_7/step_0"
    monkeypatch.setattr(module, "group_of", lambda pid: PurePosixPath(group))
    given = JobQuotas(jobs, Quotas([None] * 3, 10))
    assert given.job_of(ALICE) == 0
    group = "/slurm/job_70"
    assert given.job_of(ALICE) == 1 and given.job_of(BOB) == 2
    assert given.job_of(None) is None
    assert JobQuotas(jobs[:2], Quotas([None] * 2, 10)).job_of(BOB) is None
