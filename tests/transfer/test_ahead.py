"""Files that are fetched before a reader opens them, in virtual time."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from monarch.errors import SourceError
from monarch.transfer import ahead as ahead_module
from monarch.transfer import tier_monitor
from monarch.transfer.tier_monitor import tier_error
from monarch.types import Ino
from tests.transfer.ahead_rig import AheadRig, InlinePool, until
from tests.transfer.sources import Bandwidth, Hanging, Latency

# A hundredth of the files and the bandwidth of the promise.
SIZE = 1100
RATE = 500_000

Rigs = Callable[..., AheadRig]


@pytest.fixture
def clock() -> MockClock:
    return MockClock(autojump_threshold=0)


@pytest.fixture
def rigs(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rigs]:
    """Makes a rig over the given files."""
    monkeypatch.setattr(tier_monitor, "ThreadPool", InlinePool)
    made: list[AheadRig] = []

    def make(files: Mapping[str, bytes], **settings: object) -> AheadRig:
        for name, content in files.items():
            (source / name).write_bytes(content)
            # No file is so new that its copy is checked again.
            os.utime(source / name, (10**9, 10**9))
        build = AheadRig
        rig = build(tmp_path / f"rig-{len(made)}", source, **settings)  # type: ignore[arg-type]
        made.append(rig)
        return rig

    before = len(os.listdir("/proc/self/fd"))
    yield make
    for rig in made:
        rig.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def files(count: int, size: int = SIZE) -> dict[str, bytes]:
    return {str(number): b"%d" % number * (size // len(b"%d" % number)) for number in range(count)}


async def epoch(rig: AheadRig, content: Mapping[str, bytes], *, ahead: bool) -> float:
    """The files that four readers read in a second of an epoch in a random order."""
    order = list(content)
    random.Random(1).shuffle(order)
    async with rig.running() as nursery:
        if ahead:
            rig.foresee(*order)
        remaining = iter(order)
        done = 0
        began = trio.current_time()

        async def reader() -> None:
            nonlocal done
            for name in remaining:
                assert await rig.content(rig.ino(name)) == content[name]
                done += 1

        for _ in range(4):
            nursery.start_soon(reader)
        await until(lambda: done == len(order), virtual_s=600)
        seconds = trio.current_time() - began
    assert set(rig.source.opens.values()) == {1}
    assert len(rig.source.opens) == len(order)
    return len(order) / seconds


async def test_an_epoch_of_a_known_order_is_three_times_as_fast_as_the_source(
    rigs: Rigs, clock: MockClock
) -> None:
    content = files(800)
    alone = await epoch(rigs(content), content, ahead=False)
    rig = rigs(content)
    assert await epoch(rig, content, ahead=True) >= 3 * alone
    assert 390 <= alone <= 400
    # Those that are read before the limit has risen are left to their readers.
    assert sum(rig.metrics.source_opens) == 800 and rig.metrics.source_opens[1] > 500


async def test_an_epoch_at_a_narrow_source_takes_as_long_as_without(
    rigs: Rigs, clock: MockClock
) -> None:
    content = files(800)
    narrow = lambda: Bandwidth(RATE, Latency(0.001))  # noqa: E731
    alone = await epoch(rigs(content, model=narrow()), content, ahead=False)
    assert await epoch(rigs(content, model=narrow()), content, ahead=True) >= 0.98 * alone


@pytest.mark.parametrize("sends_opens", [True, False])
async def test_a_reader_waits_for_the_fetch_under_way(
    rigs: Rigs, clock: MockClock, sends_opens: bool
) -> None:
    rig = rigs({"a": b"a" * 1000}, sends_opens=sends_opens)
    async with rig.running():
        (ino,) = rig.foresee("a")
        await trio.sleep(0.004)
        began = trio.current_time()
        assert await rig.content(ino) == b"a" * 1000
        assert trio.current_time() - began == pytest.approx(0.006)
        await until(lambda: rig.residency.tier_of(ino) == 1)
    assert rig.opens_of("a") == 1
    assert rig.metrics.source_opens == [0, 1]
    assert rig.foreseen.coming == {ino: 1000}


async def test_a_fetch_that_has_not_begun_is_made_by_the_reader(
    rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs({"a": b"a" * 1000, "b": b"b" * 1000}, model=Latency(1.0))
    # Another call has the only thread.
    rig.threads._free.total_tokens = 1
    async with rig.running() as nursery:
        nursery.start_soon(rig.content, rig.ino("b"))
        await trio.sleep(0.1)
        (ino,) = rig.foresee("a")
        await until(lambda: rig.engine.flight(ino) is not None)
        await trio.sleep(0.1)
        assert rig.opens_of("a") == 0
        assert await rig.content(ino) == b"a" * 1000
        await until(lambda: rig.residency.tier_of(ino) == 1)
        await until(lambda: rig.foreseen.refusals == [ino])
    assert rig.opens_of("a") == 1
    assert rig.metrics.source_opens == [2, 0]
    assert not rig.foreseen.coming


async def test_a_reader_that_waits_for_a_fetch_can_be_interrupted(
    rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs({"a": b"a" * 1000}, model=Latency(5.0))
    async with rig.running():
        (ino,) = rig.foresee("a")
        await until(lambda: rig.opens_of("a") == 1)
        began = trio.current_time()
        with trio.move_on_after(0.5) as scope:
            await rig.content(ino)
        assert scope.cancelled_caught and trio.current_time() - began == pytest.approx(0.5)
        # The fetch continues, and the next reader gets its bytes.
        assert await rig.content(ino) == b"a" * 1000
        assert rig.opens_of("a") == 1


async def test_a_reader_waits_no_longer_than_for_its_own_call(rigs: Rigs, clock: MockClock) -> None:
    rig = rigs(
        {"a": b"a" * 1000},
        model=Hanging(Latency(0.01), lambda now: True),
        limits={"source_timeout": 8.0},
    )
    async with rig.running():
        (ino,) = rig.foresee("a")
        await until(lambda: rig.opens_of("a") == 1)
        began = trio.current_time()
        with pytest.raises(SourceError) as failed:
            await rig.content(ino)
        assert failed.value.errno == errno.ETIMEDOUT
        assert 8.0 <= trio.current_time() - began <= 10.0


async def test_a_file_that_cannot_be_read_is_refused_and_its_reader_gets_the_error(
    rigs: Rigs,
    clock: MockClock,
) -> None:
    rig = rigs({"a": b"a" * 1000, "b": b"b" * 1000})
    rig.source.failing[b"a"] = errno.EIO
    async with rig.running():
        ino, other = rig.foresee("a", "b")
        await until(lambda: rig.opens_of("a") == 1)
        with pytest.raises(SourceError) as failed:
            await rig.content(ino)
        assert failed.value.errno == errno.EIO
        assert rig.foreseen.refusals == [ino]
        assert not rig.controller.is_wanted(ino) and not rig.residency.is_copying(ino)
        await until(lambda: rig.residency.tier_of(other) == 1, virtual_s=0.5)
    assert rig.opens_of("a") == 2 and rig.opens_of("b") == 1
    assert rig.metrics.promotion_failures == {"EIO": 1}


async def test_files_that_cannot_be_read_do_not_delay_others(rigs: Rigs, clock: MockClock) -> None:
    content = files(40)
    rig = rigs(content)
    for name in ("5", "20", "30"):
        rig.source.failing[name.encode()] = errno.EIO
    async with rig.running():
        for name in content:
            (ino,) = rig.foresee(name)
            done = lambda ino=ino: rig.residency.tier_of(ino) or ino in rig.foreseen.refusals  # noqa: E731
            await until(done, virtual_s=0.5)
    assert rig.metrics.promotion_failures == {"EIO": 3}


async def test_a_source_that_fails_altogether_is_left_alone(rigs: Rigs, clock: MockClock) -> None:
    content = files(100)
    rig = rigs(content)
    rig.source.failing = dict.fromkeys(map(str.encode, content), errno.EIO)
    async with rig.running():
        rig.foresee(*content)
        await trio.sleep(5)
        # After the first failures, a few after one second and after two more.
        assert 3 <= sum(rig.source.opens.values()) <= 20
        rig.source.failing.clear()
        await until(lambda: len(rig.foreseen.coming) + len(rig.foreseen.refusals) == 100)
    assert len(rig.foreseen.coming) >= 80


async def test_a_file_closed_to_the_daemon_is_refused(rigs: Rigs, clock: MockClock) -> None:
    rig = rigs({"a": b"a" * 1000})
    rig.source.failing[b"a"] = errno.EACCES
    async with rig.running():
        (ino,) = rig.foresee("a")
        await until(lambda: rig.foreseen.refusals == [ino])
    assert rig.metrics.closed_files == {ino}


async def test_a_file_that_changed_is_refused_and_compared(rigs: Rigs, clock: MockClock) -> None:
    rig = rigs({"a": b"a" * 1000})
    (rig.source_path / "a").write_bytes(b"other")
    async with rig.running():
        (ino,) = rig.foresee("a")
        await until(lambda: rig.foreseen.refusals == [ino])
        assert rig.changed == [ino]
        assert await rig.content(ino) == b"other"


async def test_a_file_that_is_evicted_while_it_is_fetched_gets_no_copy(
    rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs({"a": b"a" * 1000})
    async with rig.running():
        (ino,) = rig.foresee("a")
        await until(lambda: rig.opens_of("a") == 1)
        rig.read_side.promotions.evict(ino)
        await until(lambda: rig.foreseen.refusals == [ino])
        await trio.sleep(1)
        assert rig.residency.tier_of(ino) == 0
    assert rig.opens_of("a") == 1


async def test_a_file_without_a_place_in_any_tier_is_refused(rigs: Rigs, clock: MockClock) -> None:
    rig = rigs({"a": b"a" * 1000, "b": b"b" * 1000}, capacity=1500)
    async with rig.running():
        first, second = rig.foresee("a", "b")
        await until(lambda: rig.residency.tier_of(first) == 1)
        assert rig.foreseen.refusals == [second]
    assert rig.opens_of("b") == 0


async def test_numbers_that_are_no_files_are_refused(rigs: Rigs, clock: MockClock) -> None:
    rig = rigs({"a": b"a" * 1000})
    async with rig.running():
        numbers = [Ino(0), Ino(1), Ino(rig.names.entries + 1), Ino(1 << 40)]
        rig.foreseen.order += numbers
        rig.ahead.wake()
        await until(lambda: rig.foreseen.refusals == numbers)


async def test_a_further_name_of_a_file_is_refused(
    rigs: Rigs, source: Path, clock: MockClock
) -> None:
    (source / "a").write_bytes(b"a" * 1000)
    os.link(source / "a", source / "b")
    rig = rigs({})
    first, further = rig.ino("a"), Ino(rig.ino("a") + 1)
    assert first == rig.ino("b")
    async with rig.running():
        rig.foreseen.order.append(further)
        rig.ahead.wake()
        await until(lambda: bool(rig.foreseen.refusals or rig.foreseen.coming))
    assert rig.foreseen.refusals == [further] and rig.opens_of("a") == 0


async def test_a_file_that_is_open_or_has_a_copy_is_left_to_its_readers(
    rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs({"a": b"a" * 1000, "b": b"b" * 1000})
    async with rig.running() as nursery:
        nursery.start_soon(rig.content, rig.ino("a"))
        await trio.sleep(0.001)
        first, second = rig.foresee("a", "b")
        await until(lambda: rig.residency.tier_of(second) == 1)
        assert rig.foreseen.refusals == [first] and rig.foreseen.coming == {second: 1000}
        rig.foresee("b")
        await until(lambda: rig.foreseen.refusals == [first, second])
        await until(lambda: rig.residency.tier_of(first) == 1)
    assert rig.opens_of("a") == 1 and rig.opens_of("b") == 1


async def test_an_open_that_began_before_the_mark_was_set_is_left_to_its_reader(
    rigs: Rigs,
    clock: MockClock,
) -> None:
    rig = rigs({"a": b"a" * 1000})
    answers = iter([False, False, True])
    rig.ahead.is_open = lambda ino: next(answers)
    async with rig.running():
        (ino,) = rig.foresee("a")
        await until(lambda: rig.foreseen.refusals == [ino])
        assert not rig.residency.is_copying(ino) and not rig.controller.is_wanted(ino)
    assert rig.opens_of("a") == 0


async def test_the_buffer_is_half_left_to_readers(
    rigs: Rigs, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InlinePool, "seconds", 0.5)
    content = files(60, 100_000)
    rig = rigs(content, limits={"buffer_max": 1_000_000, "inline_max": 200_000})
    used = []
    async with rig.running():
        rig.foresee(*content)
        while len(rig.foreseen.coming) < len(content):
            used.append(rig.reader.buffer.used)
            await trio.sleep(0.005)
    assert 300_000 < max(used) <= 500_000


async def test_the_bandwidth_of_copies_is_kept(rigs: Rigs, clock: MockClock) -> None:
    content = files(40, 1_000_000)
    rig = rigs(content, limits={"source_bandwidth": 4_000_000})
    async with rig.running():
        rig.foresee(*content)
        await until(lambda: len(rig.foreseen.coming) == len(content))
        # 8 MiB may pass at once, and one file more.
        assert (40e6 - 8.4e6 - 1e6) / 4e6 <= trio.current_time() <= 8.5
        # A reader need not wait for it.
    assert not rig.foreseen.refusals


async def test_while_all_tiers_are_out_of_service_files_wait(rigs: Rigs, clock: MockClock) -> None:
    rig = rigs({"a": b"a" * 1000}, limits={"tier_probe": 5.0})
    async with rig.running():
        rig.monitor.failed(rig.tier, tier_error(OSError(errno.EIO, "broken")))
        (ino,) = rig.foresee("a")
        await trio.sleep(1)
        assert not rig.foreseen.refusals and not rig.foreseen.coming
        await until(lambda: rig.residency.tier_of(ino) == 1)
    assert rig.opens_of("a") == 1


async def test_a_source_that_hangs_has_threads_for_readers(rigs: Rigs, clock: MockClock) -> None:
    content = files(1000, 10)
    rig = rigs(content, model=Hanging(Latency(0.01), lambda now: 0.25 < now < 5), threads=32)
    async with rig.running():
        rig.foresee(*list(content)[:-1])
        await trio.sleep(6)
        assert rig.ahead.running <= 24 and rig.threads.running <= 24
        assert rig.ahead.running > 1
        began = trio.current_time()
        assert await rig.content(rig.ino("999")) == content["999"]
        assert trio.current_time() - began == pytest.approx(0.01)


async def test_a_large_file_is_opened_once_for_its_copy_and_its_readers(
    rigs: Rigs, clock: MockClock
) -> None:
    content = {name: name.encode() * 50_000 for name in "abcd"}
    rig = rigs(content, limits={"inline_max": 1000}, model=Latency(0.05))
    async with rig.running() as nursery:
        inos = rig.foresee(*content)
        await trio.sleep(0.01)
        assert sum(map(rig.opens_of, content)) == ahead_module._LARGE
        nursery.start_soon(rig.content, inos[0])
        assert await rig.content(inos[0]) == content["a"]
        await until(lambda: all(rig.residency.tier_of(ino) == 1 for ino in inos))
        assert await rig.content(inos[3]) == content["d"]
    assert [rig.opens_of(name) for name in content] == [1, 1, 1, 1]


async def test_large_files_of_a_job_that_has_ended_are_not_opened(
    rigs: Rigs, clock: MockClock
) -> None:
    """Two are copied at a time, and the others wait."""
    content = {name: name.encode() * 50_000 for name in "abcd"}
    rig = rigs(content, limits={"inline_max": 1000}, model=Latency(0.05))
    async with rig.running():
        inos = rig.foresee(*content)
        await until(lambda: rig.opens_of("b") == 1)
        rig.foreseen.over |= set(inos)
        await until(lambda: rig.foreseen.refusals == inos[2:])
        await until(lambda: all(rig.residency.tier_of(ino) == 1 for ino in inos[:2]))
    assert [rig.opens_of(name) for name in content] == [1, 1, 0, 0]


async def test_nothing_is_asked_while_nothing_is_foreseen(rigs: Rigs, clock: MockClock) -> None:
    rig = rigs({"a": b"a" * 1000})
    async with rig.running():
        await trio.sleep(100)
        questions = len(rig.foreseen.questions)
        assert questions <= 2
        (ino,) = rig.foresee("a")
        await until(lambda: rig.residency.tier_of(ino) == 1, virtual_s=0.1)


async def test_the_end_gives_up_what_is_under_way(rigs: Rigs, clock: MockClock) -> None:
    content = files(500)
    rig = rigs(content, model=Latency(1.0))
    async with rig.running():
        rig.foresee(*content)
        await until(lambda: rig.ahead.running > 0)
        with trio.fail_after(0.1):
            await rig.engine.finish()
        begun = len(rig.threads.began)
        await trio.sleep(30)
        # Nothing begins after the end.
        assert len(rig.threads.began) == begun
    assert os.listdir(rig.tier.own / "stage") == []


async def test_a_version_that_the_mount_does_not_know_is_not_shared(
    rigs: Rigs, clock: MockClock
) -> None:
    """A reader that knows a newer version than the fetch under way asks the source."""
    rig = rigs({"a": b"a" * 1000}, model=Latency(0.1))
    async with rig.running():
        (ino,) = rig.foresee("a")
        await until(lambda: rig.engine.flight(ino) is not None)
        flight = rig.engine.flight(ino)
        assert flight is not None
        flight.identity = replace(flight.identity, mtime_ns=1)
        assert await rig.content(ino) == b"a" * 1000
    assert rig.opens_of("a") == 2


@pytest.mark.promise(172)
async def test_a_file_whose_attributes_were_changed_is_fetched_like_any_other(
    rigs: Rigs, clock: MockClock
) -> None:
    content = files(20)
    rig = rigs(content)
    for name in content:
        rig.names.change(rig.ino(name), mode=0o640, mtime_ns=5, now_ns=5)
    async with rig.running():
        rig.foresee(*content)
        await until(lambda: all(rig.residency.tier_of(rig.ino(name)) for name in content))
        for name in content:
            assert await rig.content(rig.ino(name)) == content[name]
    assert set(rig.source.opens.values()) == {1}
