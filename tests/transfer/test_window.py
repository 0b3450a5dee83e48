"""Files that no tier admits, fetched ahead into the window, in virtual time."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

import pytest
import trio
from trio.testing import MockClock

from monarch.errors import SourceError
from monarch.placement.policy import Lru
from monarch.transfer import ahead
from monarch.types import Ino
from tests.transfer.ahead_rig import AheadRig, until
from tests.transfer.sources import Latency
from tests.transfer.test_ahead import Rigs, clock, files, rigs

__all__ = ["clock", "rigs"]

SIZE = 1000


async def read_all(
    rig: AheadRig, content: Mapping[str, bytes], *, think_s: float, lead: int
) -> tuple[list[float], int]:
    """Reads the files in their order, as an announced order. Returns how long each took after the
    first ``lead`` files, and the most bytes of the window."""
    waits, most = [], 0
    for name, expected in content.items():
        began = trio.current_time()
        assert await rig.content(rig.ino(name)) == expected
        waits.append(trio.current_time() - began)
        rig.foreseen.awaited.discard(rig.ino(name))
        most = max(most, rig.window.bytes)
        assert most <= rig.window.most
        await trio.sleep(think_s)
    return waits[lead:], most


@pytest.mark.promise(187)
async def test_a_reader_of_files_that_no_tier_admits_does_not_wait_for_a_source_that_is_fast_enough(
    rigs: Rigs, clock: MockClock
) -> None:
    """The source needs 50 ms for a file, and the reader reads one each 5 ms."""
    content = files(400, SIZE)
    rig = rigs(content, capacity=1, window=64 * SIZE, model=Latency(0.05))
    async with rig.running():
        rig.foresee(*content)
        waits, most = await read_all(rig, content, think_s=0.005, lead=100)
        assert max(waits) == 0
        assert most > 32 * SIZE
        assert len(rig.window) == rig.window.bytes == 0
    assert set(rig.source.opens.values()) == {1} and len(rig.source.opens) == 400
    assert rig.window.dropped_files == 0
    assert len(rig.foreseen.coming) == rig.window.served_files > 300


@pytest.mark.parametrize("capacity", [1, 400 * SIZE], ids=["window", "tier"])
async def test_nothing_is_fetched_ahead_while_readers_are_faster(
    rigs: Rigs, clock: MockClock, capacity: int
) -> None:
    """Twenty readers get a file each 0.1 ms from the source; the daemon would be slower."""
    content = files(400, SIZE)
    rig = rigs(content, capacity=capacity, window=400 * SIZE, model=Latency(0.002))
    async with rig.running():
        for _ in range(20):
            rig.load.begin(trio.current_time())
        rig.load.ended(0.002)
        rig.foresee(*content)
        for _ in range(100):
            await trio.sleep(0.05)
            rig.load.ended(0.002)
        assert not rig.foreseen.coming
        # A file that waited would be fetched after its reader has read it.
        assert len(rig.foreseen.order) + len(rig.foreseen.refusals) == 400
        assert len(rig.foreseen.refusals) <= 1
        # The source has become slow.
        for _ in range(100):
            await trio.sleep(0.01)
            rig.load.ended(0.1)
        await until(lambda: len(rig.foreseen.coming) > 100)


async def test_a_few_pinned_files_are_fetched_while_readers_are_faster(
    rigs: Rigs, clock: MockClock
) -> None:
    """Readers that never pause must not keep them out for ever."""
    pinned = files(60, SIZE)
    content = {**pinned, **{f"other{number}": b"o" * SIZE for number in range(60)}}
    rig = rigs(content, capacity=200 * SIZE, model=Latency(0.002))
    async with rig.running():
        for _ in range(20):
            rig.load.begin(trio.current_time())
        rig.load.ended(0.002)
        rig.foreseen.must = [rig.ino(name) for name in pinned]
        rig.foresee(*(name for name in content if name not in pinned))
        for _ in range(10):
            await trio.sleep(0.05)
            rig.load.ended(0.002)
        assert 0 < len(rig.foreseen.coming) < 60, "they come slowly"
        for _ in range(100):
            await trio.sleep(0.05)
            rig.load.ended(0.002)
        assert set(rig.foreseen.coming) == {rig.ino(name) for name in pinned}


async def test_files_are_fetched_ahead_while_fast_readers_pause(
    rigs: Rigs, clock: MockClock
) -> None:
    content = files(50, SIZE)
    rig = rigs(content, capacity=50 * SIZE, model=Latency(0.002))
    async with rig.running():
        rig.load.ended(0.0001)
        rig.foresee(*content)
        await until(lambda: len(rig.foreseen.coming) == 50)
        assert len(rig.source.opens) == 50


async def test_files_that_a_tier_admits_pass_those_that_wait_for_the_window(
    rigs: Rigs, clock: MockClock
) -> None:
    content = {**files(100, 2 * SIZE), **{f"small{n}": b"s" * 10 for n in range(50)}}
    rig = rigs(content, capacity=600, window=10 * SIZE)
    async with rig.running():
        rig.foresee(*content)
        await until(lambda: rig.residency.resident_files(1) == 50)
        assert rig.window.bytes == 10 * SIZE
        assert not rig.foreseen.refusals, "the others wait"
        waits, _ = await read_all(rig, content, think_s=0.02, lead=10)
    assert max(waits) == 0
    assert set(rig.source.opens.values()) == {1}


@pytest.mark.promise(187)
async def test_files_that_no_reader_is_expected_to_open_leave_the_window(
    rigs: Rigs, clock: MockClock
) -> None:
    content = files(40, SIZE)
    rig = rigs(content, capacity=1, window=10 * SIZE)
    async with rig.running():
        inos = rig.foresee(*content)
        await until(lambda: rig.window.bytes == 10 * SIZE)
        await trio.sleep(200)
        assert rig.window.bytes == 10 * SIZE, "the order lives"
        rig.foreseen.awaited.clear()
        await until(lambda: len(rig.window) == 0, virtual_s=3)
        assert (rig.window.dropped_files, rig.window.dropped_bytes) == (10, 10 * SIZE)
        assert set(rig.foreseen.refusals) == set(inos), "what waited for room is given up, too"
        assert not any(map(rig.residency.is_copying, inos))
        assert await rig.content(inos[0]) == content["0"]
    assert rig.opens_of("0") == 2 and sum(rig.source.opens.values()) == 11


async def test_other_tasks_run_while_a_large_window_is_swept(
    rigs: Rigs, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files of 500 bytes it has a hundred thousand, and each check takes microseconds."""
    monkeypatch.setattr(ahead, "_SWEPT", 8)
    content = files(100, SIZE)
    rig = rigs(content, capacity=1, window=100 * SIZE)
    asked, is_announced = 0, rig.foreseen.is_announced

    def count(ino: Ino) -> bool:
        nonlocal asked
        asked += 1
        return is_announced(ino)

    async with rig.running():
        rig.foresee(*content)
        await until(lambda: len(rig.window) == 100)
        monkeypatch.setattr(rig.foreseen, "is_announced", count)
        most = before = 0
        until_s = trio.current_time() + 3
        while trio.current_time() < until_s:
            await trio.sleep(0.001)
            most, before = max(most, asked - before), asked
        assert most <= 8 and asked >= 200, "each file is checked in each sweep"
        rig.foreseen.awaited.clear()
        await until(lambda: len(rig.window) == 0, virtual_s=3)


@pytest.mark.promise(187)
async def test_a_file_that_was_opened_stays_in_the_window_for_a_read_that_comes_later(
    rigs: Rigs, clock: MockClock
) -> None:
    """With ``open: none`` the daemon knows of an open before it gets the read."""
    rig = rigs({"a": b"a" * SIZE}, capacity=1, window=10 * SIZE)
    async with rig.running():
        (ino,) = rig.foresee("a")
        await until(lambda: rig.window.bytes == SIZE)
        rig.foreseen.awaited.clear()
        await trio.sleep(1.5)
        assert await rig.content(ino) == b"a" * SIZE
    assert rig.opens_of("a") == 1


async def test_an_order_that_is_not_read_now_makes_room_for_another_one(
    rigs: Rigs, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a job that is stopped does not take the window, or the line before it, for ever."""
    monkeypatch.setattr(ahead, "_WINDOW_WAITING", 20)
    content = files(60, SIZE)
    rig = rigs(content, capacity=1, window=10 * SIZE)
    paused, others = list(content)[:40], list(content)[40:]
    async with rig.running():
        inos = rig.foresee(*paused)
        await until(lambda: rig.window.bytes == 10 * SIZE)
        rig.foreseen.idle |= set(inos)
        rig.foresee(*others)
        await until(lambda: all(map(rig.window.get, map(rig.ino, others[:10]))), virtual_s=10)
        order = {name: content[name] for name in others}
        waits, _ = await read_all(rig, order, think_s=1.0, lead=0)
        assert max(waits) == 0
        assert await rig.content(inos[0]) == content["0"]


async def test_a_file_that_changed_leaves_the_window_and_is_not_shown(
    rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs({"a": b"a" * SIZE, "b": b"b" * SIZE}, capacity=1, window=10 * SIZE)
    async with rig.running():
        first, second = rig.foresee("a", "b")
        await until(lambda: len(rig.foreseen.coming) == 2)
        for path, ino in (("a", first), ("b", second)):
            (rig.source_path / path).write_bytes(b"new")
            await rig.read_side.revalidation.look_again(ino)
        assert await rig.content(first) == b"new"
        await until(lambda: len(rig.window) == 0, virtual_s=3)
    assert rig.opens_of("a") == 2


async def test_nothing_stays_wanted_after_a_file_of_the_window_changed(
    rigs: Rigs, clock: MockClock
) -> None:
    """Its reader fetches another version than that of the window, which then leaves."""
    rig = rigs({"a": b"a" * SIZE}, capacity=1, window=10 * SIZE)
    async with rig.running():
        (ino,) = rig.foresee("a")
        await until(lambda: len(rig.foreseen.coming) == 1)
        (rig.source_path / "a").write_bytes(b"new")
        await rig.read_side.revalidation.look_again(ino)
        assert await rig.content(ino) == b"new"
        await until(lambda: len(rig.window) == 0, virtual_s=3)
        await until(lambda: rig.residency.wanted == 0, virtual_s=1)
        assert not rig.residency.is_copying(ino)


async def test_a_reader_shares_the_call_under_way_and_makes_one_that_has_not_begun(
    rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs({"a": b"a" * SIZE}, capacity=1, window=10 * SIZE)
    async with rig.running():
        (ino,) = rig.foresee("a")
        await trio.sleep(0.004)
        began = trio.current_time()
        assert await rig.content(ino) == b"a" * SIZE
        assert trio.current_time() - began == pytest.approx(0.006)
        assert len(rig.window) == 0
    assert rig.metrics.source_opens == [0, 1]


async def test_an_error_of_the_source_is_that_of_the_reader(rigs: Rigs, clock: MockClock) -> None:
    content = files(20, SIZE)
    rig = rigs(content, capacity=1, window=30 * SIZE)
    rig.source.failing[b"3"] = errno.EIO
    async with rig.running():
        rig.foresee(*content)
        await until(lambda: len(rig.foreseen.coming) == 19, virtual_s=0.5)
        assert rig.foreseen.refusals == [rig.ino("3")]
        with pytest.raises(SourceError) as failed:
            await rig.content(rig.ino("3"))
        assert failed.value.errno == errno.EIO


async def test_a_file_stays_for_a_second_reader_until_its_room_is_needed(
    rigs: Rigs, clock: MockClock
) -> None:
    content = files(20, SIZE)
    rig = rigs(content, capacity=1, window=10 * SIZE)
    rig.read_side.promotions.is_expected_again = lambda ino, job: True
    async with rig.running():
        rig.foresee(*content)
        await until(lambda: rig.window.bytes == 10 * SIZE)
        for _ in range(2):
            assert await rig.content(rig.ino("0")) == content["0"]
        assert rig.opens_of("0") == 1
        await until(lambda: rig.opens_of("10") == 1)
        assert rig.window.get(rig.ino("0")) is None
        assert rig.window.dropped_files == 0, "it was read"


async def test_a_file_that_a_reader_has_fetched_stays_for_another_job(
    rigs: Rigs, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = files(20, SIZE)
    rig = rigs(content, capacity=1, window=10 * SIZE)
    promotions, rig.foreseen.is_shared = rig.read_side.promotions, True
    promotions.is_expected_again = rig.foreseen.is_expected_again
    promotions.stage = rig.ahead.stage
    # The time that the daemon needs for a file: it is faster than the source.
    monkeypatch.setattr(ahead, "_FILE_S", 0.0)
    async with rig.running():
        for _ in range(2):
            assert await rig.content(rig.ino("0")) == content["0"]
        assert rig.opens_of("0") == 1
        for name in content:
            assert await rig.content(rig.ino(name)) == content[name]
            assert rig.window.bytes <= 10 * SIZE
        # Those read first have left it, and the others have not.
        for name in reversed(content):
            assert await rig.content(rig.ino(name)) == content[name]
        assert [rig.opens_of(name) for name in content] == 10 * [2] + 10 * [1]
        assert len(rig.window) == 10
        # The other job has ended.
        rig.foreseen.is_shared = False
        await until(lambda: len(rig.window) == 0)
        assert rig.window.bytes == 0 and rig.window.dropped_files == 0
        # A source that is faster than the daemon needs none of this.
        rig.foreseen.is_shared = True
        monkeypatch.setattr(ahead, "_FILE_S", 1.0)
        for _ in range(2):
            assert await rig.content(rig.ino("0")) == content["0"]
        assert rig.opens_of("0") == 4 and len(rig.window) == 0


async def test_with_lru_a_fetch_ahead_evicts_nothing_and_the_open_does(
    rigs: Rigs, clock: MockClock
) -> None:
    """As without fetches ahead, the tier has the files that were read last."""
    content = files(60, SIZE)
    rig = rigs(content, capacity=20 * SIZE, window=10 * SIZE, policy=Lru())

    def resident() -> set[Ino]:
        return set(rig.residency.resident_in(1))

    async with rig.running():
        for _ in range(2):
            rig.foreseen.coming.clear()
            before = resident()
            rig.foresee(*content)
            await until(lambda: rig.window.bytes == 10 * SIZE)
            assert before <= resident()
            for name in content:
                assert await rig.content(rig.ino(name)) == content[name]
                await trio.sleep(0.05)
            last = {rig.ino(name) for name in list(content)[-20:]}
            assert resident() == last
    assert set(rig.source.opens.values()) == {2}, "each file is fetched once an epoch"


@pytest.mark.promise(180)
async def test_a_file_that_leaves_the_window_for_a_tier_is_kept_from_the_datapath(
    rigs: Rigs, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of the datapath opens a file at the source whenever no mark and no copy keeps it
    from that."""
    content = files(60, SIZE)
    rig = rigs(content, capacity=20 * SIZE, window=10 * SIZE, policy=Lru())
    paths = {rig.ino(name): name.encode() for name in content}
    end_copy = rig.residency.end_copy

    def end_and_fetch(ino: Ino) -> None:
        end_copy(ino)
        if not rig.residency.tier_of(ino):
            os.close(rig.source._opened(paths[ino]))

    monkeypatch.setattr(rig.residency, "end_copy", end_and_fetch)
    async with rig.running():
        rig.foresee(*content)
        for name in content:
            assert await rig.content(rig.ino(name)) == content[name]
            await trio.sleep(0.05)
        assert rig.window.served_files == rig.metrics.evictions[1] == 40
        assert rig.residency.resident_files(1) == 20
    assert set(rig.source.opens.values()) == {1}


async def test_lru_with_a_small_buffer_evicts_nothing_for_bytes_that_cannot_be_kept(
    rigs: Rigs, clock: MockClock
) -> None:
    """A copy that is removed for a file whose bytes are not kept is lost for nothing: that file has
    to be read from the source again."""
    content = files(40, SIZE)
    limits = {"buffer_max": SIZE + SIZE // 2, "inline_max": SIZE}
    rig = rigs(content, capacity=20 * SIZE, policy=Lru(), limits=limits)
    names = list(content)
    async with rig.running() as nursery:
        for name in names[:20]:
            assert await rig.content(rig.ino(name)) == content[name]
            await until(lambda: rig.reader.buffer.used == 0)
        assert rig.residency.resident_files(1) == 20
        for name in names[20:]:
            nursery.start_soon(rig.content, rig.ino(name))
        await trio.sleep(30)
        assert rig.residency.resident_files(1) == 20
    assert set(rig.source.opens.values()) == {1}
    assert 1 <= rig.metrics.evictions[1] <= 20


async def test_a_file_of_no_known_order_is_not_fetched_into_the_window(
    rigs: Rigs, clock: MockClock
) -> None:
    """Such as a pinned file for which the tiers have no place."""
    content = files(10, SIZE)
    rig = rigs(content, capacity=1, window=64 * SIZE)
    async with rig.running():
        rig.foresee(*content)
        rig.foreseen.awaited.clear()
        await until(lambda: len(rig.foreseen.refusals) == 10)
    assert not rig.source.opens and len(rig.window) == 0
