"""A measured job below the kernel: what it reads from the source, what it waits for, and what other
jobs notice."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio
from trio.testing import MockClock

from monarch.errors import Refused
from monarch.text import MiB
from monarch.tiers.partial import GRANULE
from monarch.transfer.source_calls import CALLER, Caller
from monarch.vfs import source_limit
from monarch.vfs.measured import MeasuredJob
from tests.vfs.conftest import FILES
from tests.vfs.part_rig import SIZE, Makes
from tests.vfs.rig import FakeFastPath, Rig

NAMES = ("small", "large", "d/other")


@contextmanager
def calling(caller: Caller) -> Iterator[None]:
    token = CALLER.set(caller)
    try:
        yield
    finally:
        CALLER.reset(token)


def begin(rig: Rig, us: Caller, share: float, source_limit: int = 0) -> MeasuredJob:
    """Measures the session of ``us``."""
    job = rig.filesystem.measured.begin(us.pid, us.uid)
    job.limit(share, source_limit)
    return job


@pytest.mark.promise(292)
async def test_hidden_files_are_read_from_the_source_and_keep_their_copies(
    rig: Rig, us: Caller
) -> None:
    inos = [rig.copy(name) for name in NAMES]
    opens = rig.metrics.source_opens[0]
    job = begin(rig, us, 0.0)
    with calling(us):
        for name in NAMES:
            assert await rig.content(name) == FILES[name]
    assert rig.metrics.source_opens[0] == opens + len(NAMES)
    assert (job.hits, job.misses) == (0, 3)
    assert job.source.nbytes == sum(len(FILES[name]) for name in NAMES)
    assert not rig.engine.flights
    assert all(rig.residency.tier_of(ino) == 1 for ino in inos)
    # Other jobs, and processes of other users in the same session, read the copies.
    for other in (Caller(0, 0, 0), Caller(us.pid, us.uid + 1, us.gid)):
        with calling(other):
            assert await rig.content("small") == FILES["small"]
    assert rig.metrics.source_opens[0] == opens + len(NAMES)
    rig.filesystem.measured.end(job.session)
    with calling(us):
        assert await rig.content("large") == FILES["large"]
    assert rig.metrics.source_opens[0] == opens + len(NAMES)
    assert job.misses == 3


@pytest.mark.promise(292)
async def test_a_share_is_that_of_a_smaller_tier(rig: Rig, us: Caller) -> None:
    for name in NAMES:
        rig.copy(name)
    places = {name: rig.names.stored(rig.ino(name)).source_ino for name in NAMES}
    measured = rig.filesystem.measured
    by_bucket = sorted(NAMES, key=lambda name: measured._bucket(places[name]))
    bound = measured._bucket(places[by_bucket[1]]) / 65536
    job = begin(rig, us, bound)
    with calling(us):
        for name in NAMES:
            await rig.content(name)
    # The file with the lowest bucket is the first that a tier admits.
    assert (job.hits, job.misses) == (1, 2)
    assert not measured.hides(job, rig.names.stored(rig.ino(by_bucket[0])))
    assert measured.hides(job, rig.names.stored(rig.ino(by_bucket[1])))


@pytest.mark.promise(292)
async def test_a_limit_of_the_source_delays_only_what_is_read_from_there(
    rig: Rig, us: Caller, autojump_clock: MockClock
) -> None:
    rig.copy("small")
    job = begin(rig, us, 1.0, 10_000)
    with calling(us):
        began = trio.current_time()
        await rig.content("small")
        assert trio.current_time() == began
        # 100,000 bytes, of which 20 pass at once.
        await rig.content("large")
        assert trio.current_time() - began == pytest.approx(10, abs=0.01)
    assert (job.hits, job.misses, job.source.nbytes) == (1, 1, 100_000)


@pytest.mark.promise(292)
async def test_a_job_saves_up_nothing_while_it_prepares_what_it_has_read(
    rig: Rig, us: Caller, autojump_clock: MockClock
) -> None:
    begin(rig, us, 0.0, 10_000)
    with calling(us):
        for _ in range(3):
            began = trio.current_time()
            await rig.content("small")
            assert trio.current_time() - began == pytest.approx(0.1, abs=0.005)
            await trio.sleep(1)


@pytest.mark.promise(293)
async def test_a_call_that_waits_for_a_limit_continues_when_the_limit_ends(
    rig: Rig, us: Caller, autojump_clock: MockClock
) -> None:
    job = begin(rig, us, 1.0, 1)
    with calling(us):
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.content, "large")
            await trio.sleep(5)
            rig.filesystem.measured.end(job.session)
        assert trio.current_time() - began < 6


@pytest.mark.promise(293, 299)
async def test_the_calls_that_wait_for_limits_are_bounded(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    for name, number in (("OWN", 2), ("MOST_SHARED", 3), ("MOST_WAITING", 4)):
        monkeypatch.setattr(source_limit, name, number)
    changes: list[int] = []
    calls = source_limit.LimitedCalls(changes.append)
    first, second = (source_limit.SourceLimit(1) for _ in range(2))

    async def call(limit: source_limit.SourceLimit) -> None:
        with calls.payment([limit]) as payment:
            await payment.pay(1000)

    async with trio.open_nursery() as nursery:
        for limit, count in ((first, 4), (second, 3)):
            for _ in range(count):
                nursery.start_soon(call, limit)
        await trio.testing.wait_all_tasks_blocked()
        assert changes == [1] * 7
        began = trio.current_time()
        # More calls of one job would not be limited, or take the tasks of others.
        with pytest.raises(Refused) as refused:
            await call(first)
        assert refused.value.errno == errno.EAGAIN
        # A job is not refused calls because of those of another one.
        await call(second)
        assert trio.current_time() == began
        for limit in (first, second):
            limit.change(0)
    assert trio.current_time() == began and sum(changes) == 0
    await call(first)
    assert trio.current_time() == began


@pytest.mark.promise(292)
async def test_a_file_that_is_fetched_for_several_opens_counts_once(rig: Rig, us: Caller) -> None:
    job = begin(rig, us, 0.0)
    with calling(us):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(rig.open, "small")
    assert (job.misses, job.source.nbytes) == (3, len(FILES["small"]))
    for _ in range(3):
        rig.filesystem.release(rig.ino("small"))


async def test_an_open_of_another_job_does_not_wait_for_a_limit(
    rig: Rig, us: Caller, autojump_clock: MockClock
) -> None:
    job = begin(rig, us, 1.0, 1)
    async with trio.open_nursery() as nursery:
        with calling(us):
            nursery.start_soon(rig.content, "small")
        await trio.sleep(1)
        began = trio.current_time()
        with calling(Caller(0, 0, 0)):
            assert await rig.content("small") == FILES["small"]
        assert trio.current_time() == began
        rig.filesystem.measured.end(job.session)


@pytest.mark.promise(292)
async def test_a_read_of_another_job_does_not_wait_for_a_limit(
    rig: Rig, us: Caller, autojump_clock: MockClock
) -> None:
    job = begin(rig, us, 1.0, 1)
    with calling(us):
        ino = await rig.open("large")
    with calling(Caller(0, 0, 0)):
        # It reads from the binding that the measured job has made.
        began = trio.current_time()
        assert await rig.open("large") == ino
        assert bytes(await rig.filesystem.read(ino, 0, 100_000)) == FILES["large"]
        assert trio.current_time() == began
    assert (job.source.nbytes, job.misses) == (0, 1)
    for _ in range(2):
        rig.filesystem.release(ino)
    rig.filesystem.measured.end(job.session)


@pytest.mark.promise(292)
async def test_a_measured_job_waits_for_its_limit_in_a_file_that_another_job_has_open(
    rig: Rig, us: Caller, autojump_clock: MockClock
) -> None:
    with calling(Caller(0, 0, 0)):
        await rig.open("large")
    job = begin(rig, us, 1.0, 10_000)
    with calling(us):
        began = trio.current_time()
        assert await rig.content("large") == FILES["large"]
        assert trio.current_time() - began == pytest.approx(10, abs=0.01)
    assert job.source.nbytes == 100_000


@pytest.mark.promise(292)
async def test_a_measured_job_pays_for_the_granules_that_a_partial_copy_lacks(
    make: Makes, us: Caller, autojump_clock: MockClock
) -> None:
    rig = make()
    async with rig.running():
        with calling(Caller(0, 0, 0)):
            ino = await rig.open("big")
            await rig.at(ino, 15 * MiB)
            await rig.stored()
        before = rig.source_bytes()
        job = begin(rig, us, 1.0, GRANULE)
        with calling(us):
            await rig.open("big")
            began = trio.current_time()
            await rig.at(ino, 15 * MiB)
            assert trio.current_time() == began and job.source.nbytes == 0
            # The bytes of a granule are those of a second, whatever is read of it.
            for number in range(1, 4):
                await rig.at(ino, (10 + number) * MiB)
                assert job.source.nbytes == number * GRANULE == rig.source_bytes() - before
        assert trio.current_time() - began == pytest.approx(2, abs=0.1)
        with calling(Caller(0, 0, 0)):
            began = trio.current_time()
            await rig.at(ino, 9 * MiB)
        assert trio.current_time() == began and job.source.nbytes == 3 * GRANULE
        rig.filesystem.measured.end(job.session)
        for _ in range(2):
            rig.filesystem.release(ino)


@pytest.mark.promise(292)
async def test_a_measured_job_is_limited_after_a_partial_copy_is_dropped(
    make: Makes, us: Caller
) -> None:
    fast = FakeFastPath()
    rig = make(fast=fast)
    async with rig.running():
        with calling(Caller(0, 0, 0)):
            ino = await rig.open("big")
            await rig.at(ino, 15 * MiB)
            await rig.stored()
        assert fast.parts == {ino: (1, SIZE)} and ino in fast.bound
        job = begin(rig, us, 1.0)
        with calling(us):
            await rig.open("big")
            rig.read_side.promotions.evict(ino)
            assert fast.parts == {}
            # The datapath has the file, and must not read it for the job.
            await rig.at(ino, 15 * MiB)
            assert fast.watched == {ino: 1} and job.source.nbytes == 4096
        rig.filesystem.measured.end(job.session)
        for _ in range(2):
            rig.filesystem.release(ino)
