"""The engine between a real source and real tiers, in virtual time."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.config.settings import LimitSettings
from monarch.placement.controller import Controller, Promote
from monarch.placement.ledger import Ledger
from monarch.placement.policy import FirstCome, Item
from monarch.placement.residency import Residency
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.metrics import Metrics
from monarch.tiers import lots
from monarch.tiers.doubts import Doubts, SourceClock
from monarch.tiers.ownership import Owner
from monarch.tiers.records import Records
from monarch.tiers.source import Source, SourceFile
from monarch.tiers.tier import Staged, Tier
from monarch.transfer import engine, source_reader
from monarch.transfer.engine import Engine
from monarch.transfer.source_load import NoDatapath, SourceLoad
from monarch.transfer.source_reader import SourceReader, Turn, read_turn
from monarch.transfer.tier_monitor import TierMonitor
from monarch.transfer.window import Window
from monarch.types import Attributes, Ino
from tests.conftest import contents
from tests.equipment.virtual_clock import virtual_clock

SIZE = 10_000
COUNT = 12


class Names:
    """The files 1 to COUNT of a directory, as they were when this was made."""

    def __init__(self, source: Path) -> None:
        self._known = {
            Ino(number): self._seen(number, source / str(number)) for number in range(1, COUNT + 1)
        }

    def _seen(self, number: int, path: Path) -> Attributes:
        status = path.stat()
        return Attributes(
            ino=Ino(number),
            parent=Ino(1),
            mode=status.st_mode,
            nlink=1,
            uid=0,
            gid=0,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            source_ino=status.st_ino,
            blocks=status.st_blocks,
            rdev=0,
        )

    def source_paths(self, ino: Ino) -> list[bytes]:
        return [str(ino).encode()]

    def path_text(self, ino: Ino) -> str:
        return repr(str(ino))

    def attributes(self, ino: Ino) -> Attributes:
        return self._known[ino]

    stored = attributes


@dataclass
class Rig:
    """An engine at work, and what it works with."""

    engine: Engine
    monitor: TierMonitor
    controller: Controller
    residency: Residency
    ledger: Ledger
    metrics: Metrics
    names: Names
    tier: Tier
    records: Records
    changed: list[Ino]
    source_load: SourceLoad
    source: Source
    reader: SourceReader

    def want(self, number: int) -> bool:
        """As a reader's or a person's wish; whether a copy of it was begun."""
        attributes = self.names.attributes(Ino(number))
        promote = self.controller.warm(Item(attributes.ino, attributes.size, attributes.source_ino))
        if promote is None:
            return False
        return self.engine.submit(promote, attributes.identity)

    def resident(self) -> list[int]:
        return list(self.residency.resident_in(1))

    def stages(self) -> list[str]:
        return os.listdir(self.tier.own / "stage")


async def until(holds: Callable[[], bool], *, virtual_s: float = 300.0) -> None:
    with trio.fail_after(virtual_s):
        while not holds():
            await trio.sleep(0.05)


@pytest.fixture
def clock() -> Iterator[trio.testing.MockClock]:
    with virtual_clock() as clock:
        yield clock


async def _never(tier: Tier) -> None:
    raise AssertionError("no tier leaves its path")


@asynccontextmanager
async def running(
    source: Path, tmp_path: Path, *, capacity: int = 10**6, **limits: int
) -> AsyncIterator[Rig]:
    for number in range(1, COUNT + 1):
        (source / str(number)).write_bytes(contents(str(number), SIZE))
    tier = Tier(1, "fast", tmp_path / "tier", owner=Owner("mount"))
    tier.use("g")
    records = Records(tmp_path, "g", [tier.id])
    opened = Source(os.fsencode(source))
    residency, ledger = Residency(COUNT), Ledger([capacity])
    source_load = SourceLoad(NoDatapath())
    names, metrics, changed = Names(source), Metrics(["fast"]), list[Ino]()
    controller = Controller(residency, ledger, FirstCome())
    given_limits = LimitSettings(
        # No call hangs, but a disk that is busy may take hours of virtual time.
        **{"inline_max": 100, "buffer_max": 10**6, "tier_timeout": 10**6, **limits}
    )
    # By a clock that is far ahead, all files have rested.
    doubts = Doubts(SourceClock(time.time_ns() + 10**13, time.monotonic_ns()))
    threads = ThreadPool(4, "source", abandon=True)
    reader = SourceReader(opened, names, threads, source_load, metrics, given_limits, doubts)
    monitor = TierMonitor(
        tiers=[tier],
        keep_free=[0],
        ledger=ledger,
        metrics=metrics,
        limits=given_limits,
        datapath=NoDatapath(),
    )
    window = Window(controller, reader.buffer, 0)
    made = Engine(monitor, records, controller, reader, changed.append, window)
    rig = Rig(
        made,
        monitor,
        controller,
        residency,
        ledger,
        metrics,
        names,
        tier,
        records,
        changed,
        source_load,
        opened,
        reader,
    )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(made.run, on_return=_never))
            yield rig
            nursery.cancel_scope.cancel()
        assert ledger.reserved(1) == 0
        if (tier.own / "stage").exists():
            assert rig.stages() == []
    finally:
        records.close(clean=True)
        tier.close()
        opened.close()


@pytest.mark.parametrize("inline_max", [100, 100_000])
async def test_a_submitted_file_becomes_resident_with_its_bytes(
    source: Path, tmp_path: Path, inline_max: int, clock: trio.testing.MockClock
) -> None:
    async with running(source, tmp_path, inline_max=inline_max) as rig:
        for number in range(1, COUNT + 1):
            assert rig.want(number)
        await until(lambda: rig.residency.wanted == 0)
        assert rig.resident() == list(range(1, COUNT + 1))
        for number in range(1, COUNT + 1):
            record = rig.records.get(Ino(number))
            assert record is not None
            assert record.identity == rig.names.attributes(Ino(number)).identity
            fd = rig.tier.open(Ino(number), record.identity)
            assert os.pread(fd, 2 * SIZE, 0) == contents(str(number), SIZE)
            os.close(fd)
            rig.tier.verify(Ino(number), record.identity, record.digest)
        assert (rig.ledger.used(1), rig.ledger.reserved(1)) == (COUNT * SIZE, 0)
        assert rig.metrics.source_opens == [0, COUNT]
        assert rig.metrics.source_bytes == [0, COUNT * SIZE]
        assert (rig.engine.queued, rig.engine.running) == (0, 0)


async def test_a_second_wish_for_a_copy_under_way_begins_no_second_flight(
    source: Path, tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running(source, tmp_path) as rig:
        assert rig.want(1)
        assert not rig.want(1)
        await until(lambda: rig.resident() == [1])
        assert rig.metrics.source_opens == [0, 1]


@dataclass
class Reads:
    """Stands for ``read_turn``: counts concurrent reads, and those that reach a file's end."""

    now: int = 0
    most: int = 0
    bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, file: SourceFile, offset: int, count: int) -> Turn:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        # The later a piece, the sooner it is here: they come in the wrong order.
        time.sleep(0.02 - 0.002 * (offset // PIECE % 8))
        with self.lock:
            self.now -= 1
            self.bytes += count
        return read_turn(file, offset, count)


PIECE = 1000


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Files of ten pieces."""
    monkeypatch.setattr(source_reader, "TURN_BYTES", PIECE)
    monkeypatch.setattr(source_reader, "_BESIDE_READERS", PIECE)
    counted = Reads()
    monkeypatch.setattr(source_reader, "read_turn", counted)
    return counted


@pytest.mark.finding("C5")
async def test_several_pieces_of_a_large_file_are_read_at_once_and_written_in_order(
    source: Path, tmp_path: Path, reads: Reads
) -> None:
    async with running(source, tmp_path) as rig:
        rig.want(1)
        await until(lambda: rig.resident() == [1])
        record = rig.records.get(Ino(1))
        assert record is not None
        rig.tier.verify(Ino(1), record.identity, record.digest)
        fd = rig.tier.open(Ino(1), record.identity)
        assert os.pread(fd, 2 * SIZE, 0) == contents("1", SIZE)
        os.close(fd)
        assert (reads.bytes, rig.metrics.source_bytes) == (SIZE, [0, SIZE])
        assert 3 <= reads.most <= 4  # of four threads


@pytest.mark.finding("C5")
@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"source_concurrency": 4, "copy_workers": 1}, 3),
        ({"source_concurrency": 1, "copy_workers": 1}, 1),
        ({"buffer_max": 2 * PIECE, "copy_workers": 1}, 3),
    ],
)
async def test_concurrent_reads_stay_within_the_limits(
    source: Path, tmp_path: Path, reads: Reads, limits: dict[str, int], most: int
) -> None:
    async with running(source, tmp_path, **limits) as rig:
        rig.want(1)
        rig.want(2)
        await until(lambda: rig.resident() == [1, 2])
        assert reads.most <= most
        assert rig.reader.buffer.used == rig.reader._ahead == 0


@pytest.mark.finding("C4")
@pytest.mark.promise(37)
async def test_while_a_reader_waits_one_copy_reads_one_piece_at_a_time_and_few_of_them(
    source: Path, tmp_path: Path, reads: Reads
) -> None:
    async with running(source, tmp_path) as rig:
        rig.source_load.begin(trio.current_time())
        rig.reader.expect()
        for number in range(1, COUNT + 1):
            rig.want(number)
        await trio.sleep(0.5)
        # A twentieth of the time, and pieces of a fiftieth of a second.
        assert reads.most == 1
        assert reads.bytes <= 4 * PIECE
        rig.source_load.end(trio.current_time())
        await until(lambda: len(rig.resident()) == COUNT)


@pytest.mark.finding("C4")
async def test_a_copy_that_follows_a_reader_does_not_wait_for_it_to_pause(
    source: Path, tmp_path: Path, reads: Reads
) -> None:
    async with running(source, tmp_path) as rig:
        rig.source_load.begin(trio.current_time())
        rig.reader.expect()
        attributes = rig.names.attributes(Ino(1))
        file = rig.source.open(b"1")
        file.note_read(0, SIZE)
        item = Item(attributes.ino, attributes.size, attributes.source_ino)
        promote = rig.controller.warm(item)
        assert promote is not None
        rig.engine.submit(promote, attributes.identity, file=file)
        file.release()
        await until(lambda: rig.resident() == [1])
        assert reads.bytes == SIZE
        rig.source_load.end(trio.current_time())


async def test_a_piece_that_cannot_be_read_gives_the_copy_up_and_leaves_nothing(
    source: Path, tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = True

    def fails(file: SourceFile, offset: int, count: int) -> Turn:
        if broken and offset == 4 * PIECE:
            raise OSError(errno.EIO, "broken")
        return reads(file, offset, count)

    monkeypatch.setattr(source_reader, "read_turn", fails)
    async with running(source, tmp_path) as rig:
        rig.want(1)
        await until(lambda: rig.metrics.promotion_failures == {"EIO": 1})
        assert rig.reader.buffer.used == rig.reader._ahead == 0
        broken = False
        await until(lambda: rig.resident() == [1])


@pytest.mark.promise(37)
async def test_copies_keep_to_the_bandwidth_that_they_are_given(
    source: Path, tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running(source, tmp_path, source_bandwidth=SIZE) as rig:
        # Two turns of 4 MiB go at once; from then on each file takes a second.
        rig.reader._bucket.take(8 << 20, trio.current_time())
        started = trio.current_time()
        for number in range(1, 4):
            rig.want(number)
        await until(lambda: len(rig.resident()) == 3)
        assert trio.current_time() - started == pytest.approx(3, rel=0.1)


async def test_a_tier_that_fails_rests_and_takes_copies_again_when_it_can(
    source: Path, tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running(source, tmp_path) as rig:
        stage = tmp_path / "tier" / "monarch" / "mount" / "stage"
        stage.rmdir()
        rig.want(1)
        await until(lambda: rig.monitor.out_of_service() != {})
        assert "No such file" in rig.monitor.out_of_service()[1].why
        assert not rig.ledger.is_open(1)
        assert rig.ledger.reserved(1) == 0
        # No copy is tried while it is out, so nothing fails again and again.
        await trio.sleep(25)
        assert rig.metrics.promotion_failures == {"ENOENT": 1}
        assert not rig.want(2)
        stage.mkdir()
        await until(lambda: rig.monitor.out_of_service() == {})
        assert rig.want(2)
        await until(lambda: rig.resident() == [2])


@pytest.mark.parametrize("inline_max", [100, 100_000], ids=["large", "small"])
async def test_a_full_disk_of_the_state_directory_is_not_blamed_on_the_tier(
    source: Path, tmp_path: Path, inline_max: int, clock: trio.testing.MockClock
) -> None:
    async with running(source, tmp_path, inline_max=inline_max) as rig:
        # The disk of the records is full.
        kept, full = os.dup(rig.records._fd), os.open("/dev/full", os.O_RDWR)
        os.dup2(full, rig.records._fd)
        os.close(full)
        rig.want(1)
        await until(lambda: rig.monitor.out_of_service() != {})
        outage = rig.monitor.out_of_service()[1]
        assert outage.is_read and not outage.full
        assert outage.state == os.fspath(tmp_path)
        assert "state directory" in outage.why and "No space left" in outage.why
        await until(lambda: rig.engine.running == rig.engine.queued == 0)
        assert rig.resident() == []
        os.dup2(kept, rig.records._fd)
        os.close(kept)
        await until(lambda: rig.monitor.out_of_service() == {})
        assert rig.want(2)
        await until(lambda: 2 in rig.resident())


async def test_failures_at_the_same_time_are_one_reason_to_rest(
    source: Path, tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running(source, tmp_path) as rig:
        for number in range(1, COUNT + 1):
            rig.want(number)
        stage = tmp_path / "tier" / "monarch" / "mount" / "stage"
        stage.rmdir()
        await until(lambda: rig.engine.running == rig.engine.queued == 0)
        # Those that still waited for the tier were not even begun.
        assert sum(rig.metrics.promotion_failures.values()) <= LimitSettings().copy_workers
        stage.mkdir()
        # The tier is out; once their rest is over, those that wait for it learn so.
        started = trio.current_time()
        await until(lambda: rig.residency.wanted == 0)
        assert trio.current_time() - started < 3


async def test_a_changed_file_is_not_copied_and_its_change_is_reported(
    source: Path, tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running(source, tmp_path) as rig:
        (source / "3").write_bytes(b"another")
        (source / "4").unlink()
        for number in (3, 4, 5):
            rig.want(number)
        await until(lambda: rig.residency.wanted == 0)
        assert sorted(rig.changed) == [3, 4]
        assert rig.resident() == [5]
        assert rig.ledger.used(1) == SIZE
        assert rig.records.get(Ino(3)) is None


async def test_an_idle_engine_copies_a_file_that_became_wanted_when_it_is_woken(
    source: Path, tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running(source, tmp_path) as rig:
        await trio.sleep(10)
        rig.residency.want(Ino(1))
        rig.engine.wake()
        await until(lambda: rig.resident() == [1])


@pytest.mark.finding("C3")
async def test_a_wanted_file_waits_while_the_queue_is_full_and_is_copied_later(
    source: Path, tmp_path: Path, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_QUEUE_LIMIT", 1)
    async with running(source, tmp_path, source_bandwidth=SIZE) as rig:
        rig.reader._bucket.take(8 << 20, trio.current_time())
        turns = 0
        next_wanted = rig.controller.next_wanted

        def counted(
            lookup: Callable[[Ino], Item | None], must_wait: Callable[[Ino], bool]
        ) -> Promote | None:
            nonlocal turns
            turns += 1
            # Asked again and again without a pause, the loop would never come to the copy itself.
            assert turns < 1000
            return next_wanted(lookup, must_wait)

        monkeypatch.setattr(rig.controller, "next_wanted", counted)
        assert rig.want(1)
        assert not rig.want(2)
        await until(lambda: rig.resident() == [1, 2])


async def test_a_file_that_does_not_fit_is_refused_and_the_others_are_copied(
    source: Path, tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running(source, tmp_path, capacity=3 * SIZE + SIZE // 2) as rig:
        begun = [number for number in range(1, COUNT + 1) if rig.want(number)]
        assert begun == [1, 2, 3]
        await until(lambda: rig.resident() == begun)
        assert rig.ledger.used(1) == 3 * SIZE


async def test_memory_for_files_on_their_way_is_bounded(
    source: Path, tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running(source, tmp_path, inline_max=SIZE, buffer_max=2 * SIZE) as rig:
        most = 0
        for number in range(1, COUNT + 1):
            rig.want(number)
        with trio.fail_after(300):
            while rig.residency.wanted:
                held = [
                    flight.content
                    for number in range(1, COUNT + 1)
                    if (flight := rig.engine.flight(Ino(number))) and flight.content is not None
                ]
                most = max(most, sum(map(len, held)))
                await trio.sleep(0.0005)
        assert 0 < most <= 2 * SIZE
        assert rig.resident() == list(range(1, COUNT + 1))


async def test_a_copy_that_is_cancelled_while_its_tier_writes_is_no_internal_error(
    source: Path,
    tmp_path: Path,
    clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(source_reader, "TURN_BYTES", 1000)
    writing, cancelled = threading.Event(), threading.Event()
    append = Staged.append

    def slow(self: Staged, data: bytes | memoryview) -> None:
        writing.set()
        cancelled.wait(60)
        append(self, data)

    monkeypatch.setattr(lots, "_write_copies", None)
    monkeypatch.setattr(Staged, "append", slow)
    async with running(source, tmp_path) as rig:
        assert rig.want(1)
        await until(writing.is_set)
        # The tier answers when all tasks have been notified of the cancellation.
        threading.Timer(0.2, cancelled.set).start()
    assert "internal error" not in caplog.text


async def test_copies_that_are_cancelled_leave_nothing_behind(
    source: Path, tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with running(source, tmp_path, source_bandwidth=1) as rig:
        rig.reader._bucket.take(8 << 20, trio.current_time())
        for number in range(1, COUNT + 1):
            rig.want(number)
        await until(lambda: rig.stages() != [])
    assert os.listdir(tmp_path / "tier" / "monarch" / "mount" / "stage") == []
    assert rig.resident() == []
