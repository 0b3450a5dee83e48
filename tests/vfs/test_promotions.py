"""Which copies a file system has made and removed: on request, again, and by the datapath."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import trio
import trio.testing

from monarch.transfer.source_load import SourceTraffic
from monarch.types import Ino
from monarch.vfs.interfaces import ABANDONED, Tally
from tests.vfs.conftest import FILES, Rigs
from tests.vfs.rig import CAPACITY, FakeFastPath, Rig


async def test_an_evicted_copy_stays_out_while_the_file_is_open(
    rig: Rig, autojump_clock: trio.testing.MockClock
) -> None:
    ino = await rig.open("large")
    rig.engine.arrive(ino)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.read_side.promotions.run)
        assert rig.read_side.promotions.evict(ino) == 100_000
        assert rig.read_side.promotions.evict(ino) == 0
        await trio.sleep(3600)
        nursery.cancel_scope.cancel()
    assert rig.engine.flights == {} and rig.metrics.evictions == [0, 1]
    assert await rig.read(ino, 0, 5) == b"l" * 5
    rig.filesystem.release(ino)


async def test_a_file_that_stays_open_is_offered_again_less_and_less_often(
    rig: Rig, autojump_clock: trio.testing.MockClock
) -> None:
    ino = await rig.open("large")
    offered = []
    rig.engine.fail(ino)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.read_side.promotions.run)
        # Between two offers: tasks that wake at the same time run in any order.
        await trio.sleep(5)
        for _ in range(50):
            await trio.sleep(10)
            if ino in rig.engine.flights:
                offered.append(trio.current_time())
                rig.engine.fail(ino)
        nursery.cancel_scope.cancel()
    pauses = [later - earlier for earlier, later in pairwise(offered)]
    assert pauses == sorted(pauses) and pauses[0] <= 20 and pauses[-1] >= 80
    rig.filesystem.release(ino)


async def test_a_request_to_warm_needs_space_only(rig: Rig) -> None:
    promotions = rig.read_side.promotions
    small, large = rig.ino("small"), rig.ino("large")
    assert promotions.warm(small) and small in rig.engine.flights
    assert promotions.warm(small)
    rig.engine.flights[small].copied = 7
    assert promotions.bytes_copied(small) == 7 and promotions.bytes_copied(large) == 0
    assert rig.ledger.reserve(1, CAPACITY - 2000)
    assert not promotions.warm(large)


async def test_a_copy_leaves_before_the_source_has_answered(rig: Rig) -> None:
    small = rig.copy("small")
    assert rig.ledger.reserve(1, CAPACITY - 100_500)
    rig.threads.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.open, "large")
        await trio.testing.wait_all_tasks_blocked()
        assert rig.engine.removed_copies == [small]
        rig.threads.gate.set()
    rig.filesystem.release(rig.ino("large"))


async def test_a_file_that_is_written_now_loses_its_copy(rig: Rig) -> None:
    ino = rig.copy("small")
    rig.residency.want(ino)
    rig.read_side.promotions.copied_up(ino)
    assert rig.residency.tier_of(ino) == 0 and not rig.residency.is_wanted(ino)
    rig.read_side.promotions.copied_up(Ino(1 << 33))


async def test_the_events_of_the_datapath_are_counted_in_their_order(rigs: Rigs) -> None:
    fast = FakeFastPath()
    rig = rigs(fast=fast)
    copied, fetched, opened = rig.copy("small"), rig.ino("d/other"), rig.ino("large")
    await rig.open("large")
    content = memoryview(FILES["d/other"])
    fast.events = [
        (copied, 1, None, 0, 0, 0),
        (fetched, 0, content, 0, 0, 0),
        (opened, ABANDONED, None, 0, 0, 0),
    ]
    rig.filesystem.readers.catch_up()
    assert fast.kept == [fetched] and fetched in rig.engine.flights
    assert not rig.read_side.bindings.is_open(opened)
    assert rig.epochs.epochs()[-1].opens == 3
    rig.engine.arrive(fetched)
    assert rig.residency.tier_of(fetched) == 1


async def test_opens_are_foreseen_together_for_each_job_and_before_a_decision(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = FakeFastPath()
    rig = rigs(fast=fast)
    copied, fetched, readers = rig.copy("small"), rig.ino("d/other"), rig.filesystem.readers
    happened: list[object] = []
    monkeypatch.setattr(
        readers._foresight,
        "opened_all",
        lambda inos, job, processes: happened.append((job, [*inos], processes)),
    )
    monkeypatch.setattr(readers._promotions, "keep_fetched", lambda ino, *_: happened.append(ino))
    fast.events = [
        (copied, 1, None, 70, 7, 0),
        (copied, 1, None, 80, 8, 0),
        (copied, 1, None, 71, 7, 0),
        (fetched, 0, memoryview(FILES["d/other"]), 71, 7, 0),
        (copied, 1, None, 70, 7, 0),
    ]
    readers.catch_up()
    assert happened == [
        (7, [copied, copied], [70, 71]),
        (8, [copied], [80]),
        fetched,
        (7, [fetched, copied], [71, 70]),
    ]
    assert rig.epochs.epochs()[-1].opens == 5


async def test_unknown_processes_are_a_job_until_ten_minutes_without_an_open(
    rigs: Rigs, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = FakeFastPath()
    rig = rigs(fast=fast)
    copied, readers = rig.copy("small"), rig.filesystem.readers
    ended: list[float] = []
    monkeypatch.setattr(
        readers._foresight,
        "end_jobs",
        lambda sessions, with_unknown: ended.append(trio.current_time()) if with_unknown else None,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(readers.end_jobs)
        began = trio.current_time()
        for job in (0, 7):
            await trio.sleep(500)
            fast.events = [(copied, 1, None, job, job, 0)]
            readers.catch_up()
        assert not ended
        await trio.sleep(200)
        nursery.cancel_scope.cancel()
    assert 1100 < ended[0] - began < 1105


async def test_the_last_opens_of_a_job_are_recorded_before_it_ends(
    rigs: Rigs, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = FakeFastPath()
    rig = rigs(fast=fast)
    readers, fetched = rig.filesystem.readers, rig.ino("d/other")
    happened: list[object] = []

    monkeypatch.setattr(readers._sessions, "over", lambda sessions: {7})
    monkeypatch.setattr(readers._foresight, "end_jobs", lambda ended, **_: happened.append(ended))
    monkeypatch.setattr(readers._promotions, "keep_fetched", lambda ino, *_: happened.append(ino))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(readers.end_jobs)
        await trio.testing.wait_all_tasks_blocked()
        fast.events = [(fetched, 0, memoryview(FILES["d/other"]), 70, 7, 0)]
        await trio.sleep(1.5)
        nursery.cancel_scope.cancel()
    assert happened == [fetched, {7}]


async def test_fetched_bytes_of_a_file_that_another_node_keeps_become_no_copy(rigs: Rigs) -> None:
    fast = FakeFastPath()
    rig = rigs(fast=fast)
    theirs, wanted, own = rig.ino("small"), rig.ino("d/other"), rig.ino("large")
    rig.read_side.promotions.is_kept_elsewhere = lambda ino: ino != own
    rig.residency.want(wanted, forced=True)
    inos = {theirs: "small", wanted: "d/other", own: "large"}
    fast.events = [(ino, 0, memoryview(FILES[name]), 0, 0, 0) for ino, name in inos.items()]
    rig.filesystem.readers.catch_up()
    assert set(rig.engine.flights) == {wanted, own}
    assert fast.kept == list(inos)
    assert rig.epochs.epochs()[-1].opens == 3


async def test_fetched_bytes_of_an_old_version_become_no_copy(rigs: Rigs) -> None:
    fast = FakeFastPath()
    rig = rigs(fast=fast)
    ino = rig.ino("small")
    rig.residency.mark_changed(ino)
    fast.events = [(ino, 0, memoryview(b"old"), 0, 0, 0)]
    rig.filesystem.readers.catch_up()
    assert rig.engine.flights == {} and fast.kept == [ino]


async def test_the_totals_of_the_datapath_are_added_once(rigs: Rigs) -> None:
    fast = FakeFastPath()
    rig = rigs(fast=fast)
    zero, none = fast.tally[0], fast.tally[0].open_counts
    some = Tally(2, 3, 4096, [2, *none[1:]], 10, [3, *none[1:]], 20)
    fast.tally, fast.traffic = [zero, some], SourceTraffic(1, 2, 300, 0, 2, 0)
    for _ in range(2):
        rig.filesystem.readers.catch_up_all()
    assert (rig.metrics.opens, rig.metrics.reads, rig.metrics.read_bytes) == (
        [0, 2],
        [0, 3],
        [0, 4096],
    )
    totals = rig.metrics.source_totals().reader
    assert (totals.opens, totals.reads, totals.bytes) == (1, 2, 300)


@pytest.mark.parametrize("verify", ["open", "unclean"])
async def test_a_copy_is_compared_when_it_is_to_be_verified(rigs: Rigs, verify: str) -> None:
    rig = rigs(verify=verify)
    ino = rig.copy("small")
    path = rig.copy_path(ino)
    status = path.stat()
    path.write_bytes(b"X" * 1000)
    if verify == "open":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    # Without verification the seal shows that the copy was changed.
    assert await rig.content("small") == FILES["small"]
    assert rig.engine.removed_copies == [ino]
    # The kernel may have pages of the damaged copy: it drops them after the answer.
    assert rig.caches.stored == {}


@pytest.mark.parametrize("reads_copies", [False, True])
async def test_a_damaged_copy_is_taken_from_its_readers_unless_the_kernel_reads(
    rigs: Rigs, reads_copies: bool
) -> None:
    rig = rigs(reads_copies=reads_copies)
    ino = rig.copy("small")
    await rig.open("small")
    assert await rig.read_side.copies.drop_damaged(ino, 1, OSError(5, "found by scrub"))
    assert not await rig.read_side.copies.drop_damaged(ino, 1, OSError(5, "found by scrub"))
    binding = rig.read_side.bindings.get(ino)
    assert binding is not None and binding.fd >= 0
    assert await rig.read(ino) == FILES["small"]
    assert (binding.file is None) == reads_copies
    rig.filesystem.release(ino)


async def test_the_extended_attributes_of_a_file_show_its_state(rig: Rig) -> None:
    ino, xattrs = rig.ino("small"), rig.filesystem.xattrs
    assert await xattrs.get(ino, b"user.monarch.tier") == b"source"
    assert await xattrs.get(ino, b"user.monarch.state") == b"source"
    rig.residency.want(ino)
    assert await xattrs.get(ino, b"user.monarch.state") == b"wanted"
    assert await xattrs.get(ino, b"user.monarch.digest") is None
    rig.copy("small")
    assert await xattrs.get(ino, b"user.monarch.tier") == b"fast"
    assert await xattrs.get(ino, b"user.monarch.state") == b"resident"
    digest = await xattrs.get(ino, b"user.monarch.digest")
    assert digest is not None and len(digest) == 32
    assert await xattrs.get(ino, b"user.monarch.durable") == b"source"
    assert await xattrs.get(rig.ino("d"), b"user.monarch.tier") is None
    assert await xattrs.names(ino) == []
