"""Chunks of a pack that are read as a whole: what the source is asked, and what stays in memory."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from trio.testing import MockClock

from monarch.errors import SourceError
from monarch.foresight import foresight
from monarch.packmount.source import FetchedRun, PackSource
from monarch.packs.pack import chunk_name, large_name
from monarch.transfer import chunk_jobs, chunks, tier_monitor
from monarch.transfer.queue import Flight
from monarch.types import Ino
from tests.conftest import contents
from tests.transfer.ahead_rig import InlinePool, until
from tests.transfer.pack_rig import CountingPack, PackRig, packed
from tests.transfer.sources import Bandwidth, Latency

FILES, CHUNKS, SIZE = 120, 12, 1000
CHUNK_BYTES = FILES // CHUNKS * SIZE

Rigs = Callable[..., PackRig]


@pytest.fixture
def clock() -> MockClock:
    return MockClock(autojump_threshold=0)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 files of 1000 bytes in 12 chunks."""
    directory = tmp_path_factory.mktemp("pack")
    (directory / "source").mkdir()
    for number in range(FILES):
        name = f"{number:03d}"
        (directory / "source" / name).write_bytes(contents(name, SIZE))
    return packed(directory / "source", directory / "pack", chunk_bytes=CHUNK_BYTES)


@pytest.fixture
def rigs(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rigs]:
    """Makes a rig over the pack, or over another one."""
    monkeypatch.setattr(tier_monitor, "ThreadPool", InlinePool)
    made: list[PackRig] = []

    def make(source: Path = pack, **settings: object) -> PackRig:
        rig = PackRig(tmp_path / f"rig-{len(made)}", source, **settings)  # type: ignore[arg-type]
        made.append(rig)
        return rig

    before = len(os.listdir("/proc/self/fd"))
    yield make
    for rig in made:
        rig.close()
    assert len(os.listdir("/proc/self/fd")) <= before


async def read(rig: PackRig, order: Sequence[Ino]) -> None:
    for ino in order:
        name = rig.names.path(ino).decode()
        assert await rig.content(ino) == contents(name, SIZE), name


def in_groups(rig: PackRig, size: int, seed: int = 1) -> list[Ino]:
    """The order of an epoch: chunks in groups of ``size``, files at random within a group."""
    draw = random.Random(seed)
    chunks = rig.by_chunk()
    draw.shuffle(chunks)
    order: list[Ino] = []
    for start in range(0, len(chunks), size):
        group = [ino for chunk in chunks[start : start + size] for ino in chunk]
        draw.shuffle(group)
        order += group
    return order


# -- admitted chunks -------------------------------------------------------------------------------


async def test_the_first_open_of_an_admitted_chunk_makes_copies_of_all_its_files(
    rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs()
    chunk = rig.by_chunk()[3]
    async with rig.running():
        await read(rig, chunk[4:5])
        await until(lambda: all(map(rig.residency.tier_of, chunk)))
        assert rig.source.reads == {3: 1} and rig.source.nbytes == CHUNK_BYTES
        await read(rig, chunk)
    assert rig.source.reads == {3: 1}
    assert rig.residency.resident_files(1) == len(chunk)


async def test_an_epoch_in_any_order_reads_each_admitted_chunk_once(
    rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs()
    order = [ino for chunk in rig.by_chunk() for ino in chunk]
    random.Random(1).shuffle(order)
    async with rig.running():
        await read(rig, order)
        await until(lambda: rig.residency.resident_files(1) == FILES)
    assert rig.source.reads == dict.fromkeys(range(CHUNKS), 1)


@pytest.mark.promise(231)
async def test_in_a_random_order_of_files_no_byte_is_read_that_does_not_stay(
    rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs(in_tier=0.3)
    order = [ino for chunk in rig.by_chunk() for ino in chunk]
    random.Random(1).shuffle(order)
    async with rig.running():
        await read(rig, order)
        await until(lambda: rig.residency.wanted == 0)
        admitted = rig.residency.resident_files(1)
        assert admitted in range(FILES // CHUNKS, int(0.3 * FILES) + 1)
        assert rig.source.nbytes == FILES * SIZE
        # Whole chunks: each file that is not of one is read again.
        await read(rig, order)
    assert rig.source.nbytes == (2 * FILES - admitted) * SIZE
    assert sorted(Counter(rig.source.reads.values())) == [1, 2 * FILES // CHUNKS]


async def test_whole_chunks_for_files_that_do_not_stay_are_many_more_bytes(
    rigs: Rigs, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of the test before are counted one by one."""

    def of_its_chunk(self: CountingPack, numbers: npt.NDArray[np.uint32]) -> FetchedRun:
        PackSource.fetch_run(self, self.files.members(int(self.files.chunk[numbers[0]])))
        return PackSource.fetch_run(self, numbers)

    monkeypatch.setattr(CountingPack, "fetch_run", of_its_chunk)
    rig = rigs(in_tier=0.3)
    order = [ino for chunk in rig.by_chunk() for ino in chunk]
    random.Random(1).shuffle(order)
    async with rig.running():
        await read(rig, order)
    assert rig.source.nbytes > 3 * FILES * SIZE


async def test_readers_of_one_chunk_wait_for_its_read(rigs: Rigs, clock: MockClock) -> None:
    rig = rigs(model=Latency(5.0))
    chunk = rig.by_chunk()[0]
    done = 0

    async def reader(ino: Ino) -> None:
        nonlocal done
        await read(rig, [ino])
        done += 1

    async with rig.running() as nursery:
        for number in range(100):
            nursery.start_soon(reader, chunk[number % len(chunk)])
        await until(lambda: done == 100)
    assert rig.source.reads == {0: 1}


async def test_a_chunk_that_does_not_fit_into_the_tier_is_not_read(
    rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs()
    chunk = rig.by_chunk()[0]
    # Other copies have used all but half of a chunk since the mount.
    assert rig.ledger.reserve(1, rig.ledger.free(1) - CHUNK_BYTES // 2)
    async with rig.running():
        await read(rig, chunk[:3])
        await until(lambda: rig.residency.resident_files(1) == 3)
        assert rig.source.nbytes == 3 * SIZE
        rig.ledger.cancel(1, rig.ledger.reserved(1))


async def test_a_disk_that_is_full_in_the_middle_of_a_chunk_keeps_what_fits(
    rigs: Rigs, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs()
    chunk = rig.by_chunk()[0]
    left = [4]

    async def take_room(tier: object, size: int) -> bool:
        left[0] -= 1
        return left[0] >= 0

    monkeypatch.setattr(rig.monitor, "take_room", take_room)
    async with rig.running():
        await read(rig, chunk)
        await until(lambda: rig.residency.wanted == 0)
        assert rig.residency.resident_files(1) == 4
        assert rig.source.reads == {0: 1}


async def test_files_evicted_from_a_chunk_come_back_without_the_others(
    rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs()
    chunk = rig.by_chunk()[0]
    async with rig.running():
        await read(rig, chunk[:1])
        await until(lambda: rig.residency.resident_files(1) == len(chunk))
        for ino in chunk[2::4]:
            rig.read_side.promotions.evict(ino)
        before = rig.source.nbytes
        await read(rig, chunk)
        await until(lambda: rig.residency.resident_files(1) == len(chunk))
    assert rig.source.nbytes - before == len(chunk[2::4]) * SIZE


async def test_a_warm_reads_whole_chunks(rigs: Rigs, clock: MockClock) -> None:
    rig = rigs(in_tier=0.5)
    order = [ino for chunk in rig.by_chunk() for ino in chunk]
    promotions = rig.read_side.promotions
    async with rig.running():
        for ino in order[: FILES // 2]:
            await until(promotions.has_place)
            assert promotions.warm(ino)
        await until(lambda: rig.residency.wanted == 0)
        assert rig.residency.resident_files(1) == FILES // 2
    assert rig.source.reads == dict.fromkeys(range(CHUNKS // 2), 1)


async def test_announced_files_that_come_with_chunks_are_asked_for_together(
    rigs: Rigs, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three pieces at a time, although they are short: the others are asked for meanwhile.
    monkeypatch.setattr(chunks, "_DEPTH_SHARE", 3 / 128)
    rig = rigs(model=Latency(1.0))
    asked: list[int] = []
    next_files = rig.foresight.next

    def noting(most: int) -> list[Ino]:
        found = next_files(most)
        asked.append(len(found))
        return found

    monkeypatch.setattr(rig.foresight, "next", noting)
    rig.announce(in_groups(rig, 1))
    async with rig.running():
        await until(lambda: rig.residency.resident_files(1) == FILES)
    # Each call costs as much as a dozen further files of the same call.
    assert 0 < sum(1 for count in asked if count) <= FILES // 8
    assert rig.source.nbytes == FILES * SIZE


@pytest.mark.promise(232)
@pytest.mark.parametrize("in_tier", [1.0, 0.0])
async def test_no_byte_of_an_order_is_read_twice_if_the_chunks_begin_after_the_fetches(
    rigs: Rigs, clock: MockClock, monkeypatch: pytest.MonkeyPatch, in_tier: float
) -> None:
    """The tasks of a mount begin in any order."""
    rig = rigs(in_tier=in_tier, window=5 * CHUNK_BYTES, model=Latency(1.0))
    assert rig.chunks is not None
    run = rig.chunks.run

    async def run_later() -> None:
        await trio.sleep(0.5)
        await run()

    monkeypatch.setattr(rig.chunks, "run", run_later)
    order = in_groups(rig, 1)
    rig.announce(order)
    async with rig.running():
        # As soon as each chunk is read.
        await trio.sleep(60)
        await read(rig, order)
        await until(lambda: rig.residency.wanted == 0)
    assert rig.source.nbytes == FILES * SIZE
    assert rig.source.reads == dict.fromkeys(range(CHUNKS), 1)


# -- chunks of several pieces ----------------------------------------------------------------------

LARGE_FILES, LARGE_CHUNKS, LARGE_SIZE = 40, 4, 50_000
LARGE_CHUNK = LARGE_FILES // LARGE_CHUNKS * LARGE_SIZE


@pytest.fixture(scope="module")
def large_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 files of 50 KB in 4 chunks, for which no reader waits."""
    directory = tmp_path_factory.mktemp("large-pack")
    (directory / "source").mkdir()
    for number in range(LARGE_FILES):
        name = f"{number:03d}"
        (directory / "source" / name).write_bytes(contents(name, LARGE_SIZE))
    return packed(directory / "source", directory / "pack", chunk_bytes=LARGE_CHUNK)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files in a piece, two pieces at a time."""
    for module in (chunk_jobs, chunks):
        monkeypatch.setattr(module, "PIECE_BYTES", 2 * LARGE_SIZE)
    monkeypatch.setattr(chunks, "_LEAST_DEPTH", (2, 2))


async def read_large(rig: PackRig, order: Iterable[Ino]) -> None:
    for ino in order:
        name = rig.names.path(ino).decode()
        assert await rig.content(ino) == contents(name, LARGE_SIZE), name


@pytest.mark.usefixtures("small_pieces")
async def test_a_file_of_a_later_piece_is_read_alone_and_not_again(
    large_pack: Path, rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs(large_pack, model=Latency(5.0))
    chunk = rig.by_chunk()[0]
    async with rig.running():
        began = trio.current_time()
        await read_large(rig, chunk[6:7])
        # The call for its extent alone: the third piece after the two that were begun at once
        # would have come later.
        assert trio.current_time() - began == pytest.approx(5.0)
        await until(lambda: all(map(rig.residency.tier_of, chunk)))
        # Two pieces at a time.
        assert trio.current_time() - began == pytest.approx(15.0, abs=0.5)
    assert rig.source.nbytes == LARGE_CHUNK
    assert rig.source.reads == {0: 6}
    assert rig.threads.most_running == 3


@pytest.mark.parametrize(
    ("alone", "pieces"),
    [
        # The bytes of 2 files in the gap, between those of 8.
        ({1, 2}, 1),
        # No more bytes in the gaps of a piece than in its files: two and two files.
        ({1, 2, 4, 5, 7, 8}, 2),
    ],
)
async def test_a_piece_continues_behind_files_that_were_read_alone(
    large_pack: Path,
    rigs: Rigs,
    clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    alone: set[int],
    pieces: int,
) -> None:
    monkeypatch.setattr(chunk_jobs, "_GAP_BYTES", 2 * LARGE_SIZE)
    rig = rigs(large_pack, model=Latency(5.0))
    chunk = rig.by_chunk()[0]
    assert rig.chunks is not None
    rig.chunks.leave_to_readers(
        {chunk[place] for place in alone}.__contains__, set[Ino]().__contains__
    )
    rest = [ino for place, ino in enumerate(chunk) if place not in alone]
    async with rig.running():
        rig.chunks.open(chunk[0])
        await until(lambda: all(map(rig.residency.tier_of, rest)))
    assert rig.source.reads == {0: pieces}
    assert rig.source.nbytes <= 2 * len(rest) * LARGE_SIZE


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("alone", "at_once"), [(set[int](), 2), ({1, 2, 4, 5, 7, 8}, 3)])
async def test_of_short_pieces_more_are_read_at_a_time(
    large_pack: Path, rigs: Rigs, clock: MockClock, alone: set[int], at_once: int
) -> None:
    rig = rigs(large_pack, model=Latency(5.0))
    chunk = rig.by_chunk()[0]
    assert rig.chunks is not None
    rig.chunks.leave_to_readers(
        {chunk[place] for place in alone}.__contains__, set[Ino]().__contains__
    )
    rest = [ino for place, ino in enumerate(chunk) if place not in alone]
    async with rig.running():
        rig.chunks.open(chunk[0])
        await until(lambda: all(map(rig.residency.tier_of, rest)))
    # Two pieces of two files each, or three of one file.
    assert rig.threads.most_running == at_once


async def test_the_next_piece_is_read_while_files_are_handed_over(
    large_pack: Path, rigs: Rigs, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_jobs, "PIECE_BYTES", 8 * LARGE_SIZE)
    monkeypatch.setattr(chunks, "_LEAST_DEPTH", (1, 1))
    # Other tasks run after each file.
    monkeypatch.setattr(chunks, "_STRIDE", 1)
    rig = rigs(large_pack, model=Latency(5.0))
    chunk = rig.by_chunk()[0]
    running: dict[Ino, int] = {}
    end_fetch = rig.engine.end_fetch

    def noting(flight: Flight, *rest: Any) -> bool:
        running[flight.ino] = rig.threads.running
        return end_fetch(flight, *rest)

    monkeypatch.setattr(rig.engine, "end_fetch", noting)
    async with rig.running():
        assert rig.chunks is not None
        assert rig.chunks.warm(chunk[0])
        await until(lambda: all(map(rig.residency.tier_of, chunk)))
    # At the last file of the first of two pieces.
    assert running[chunk[7]] == 1


@pytest.mark.usefixtures("small_pieces")
async def test_readers_of_a_piece_that_is_read_wait_for_it(
    large_pack: Path, rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs(large_pack, model=Latency(5.0))
    chunk = rig.by_chunk()[0]
    async with rig.running() as nursery:
        nursery.start_soon(read_large, rig, chunk[:1])
        await until(lambda: rig.engine.flight(chunk[1]) is not None)
        await read_large(rig, chunk[1:2])
        # The first file alone, and two pieces.
        assert rig.source.nbytes == 5 * LARGE_SIZE
        await until(lambda: all(map(rig.residency.tier_of, chunk)))
    assert rig.source.reads == {0: 6}


@pytest.mark.promise(231)
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("readers", [1, 4])
async def test_no_byte_is_read_twice_in_a_random_order_of_files(
    large_pack: Path, rigs: Rigs, clock: MockClock, readers: int
) -> None:
    rig = rigs(large_pack, model=Bandwidth(1e6, Latency(0.001)))
    order = [ino for chunk in rig.by_chunk() for ino in chunk]
    random.Random(1).shuffle(order)
    places, done = iter(order), 0

    async def reader() -> None:
        nonlocal done
        await read_large(rig, places)
        done += 1

    async with rig.running() as nursery:
        for _ in range(readers):
            nursery.start_soon(reader)
        await until(lambda: done == readers)
        await until(lambda: rig.residency.resident_files(1) == LARGE_FILES)
    assert rig.source.nbytes == LARGE_FILES * LARGE_SIZE


@pytest.mark.usefixtures("small_pieces")
async def test_a_piece_is_read_when_there_is_memory_for_it(
    large_pack: Path, rigs: Rigs, clock: MockClock
) -> None:
    most = 3 * LARGE_SIZE
    rig = rigs(large_pack, limits={"buffer_max": most, "inline_max": LARGE_SIZE})
    order = [ino for chunk in rig.by_chunk() for ino in chunk]
    async with rig.running():
        for ino in order:
            await read_large(rig, [ino])
            assert rig.reader.buffer.used <= most
        await until(lambda: rig.residency.resident_files(1) == LARGE_FILES)
    # A file that is read alone while the memory is full is read again for its copy.
    assert rig.source.nbytes <= 1.5 * LARGE_FILES * LARGE_SIZE


@pytest.mark.usefixtures("small_pieces")
async def test_the_end_of_a_mount_begins_no_further_piece(
    large_pack: Path, rigs: Rigs, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, pieces = chunk_jobs.Pieces.cut, 0

    def counted(self: chunk_jobs.Pieces, job: chunk_jobs.Job) -> chunk_jobs.Piece | None:
        nonlocal pieces
        pieces += 1
        return cut(self, job)

    monkeypatch.setattr(chunk_jobs.Pieces, "cut", counted)
    rig = rigs(large_pack, model=Latency(5.0))
    first = [chunk[0] for chunk in rig.by_chunk()]
    async with rig.running() as nursery:
        for ino in first:
            nursery.start_soon(rig.content, ino)
        # Each of these files alone, and two pieces of one chunk.
        await until(lambda: sum(rig.source.reads.values()) == LARGE_CHUNKS + 2)
    assert pieces == 2


async def test_no_chunk_is_read_without_a_reader_where_that_is_switched_off(
    rigs: Rigs, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foresight, "_LEAD", 0)
    rig = rigs(in_tier=1.0, window=5 * CHUNK_BYTES)
    assert rig.chunks is not None
    rig.chunks.looks_ahead = False
    order = in_groups(rig, 2)
    async with rig.running():
        rig.announce(order)
        await trio.sleep(60)
        assert not rig.source.reads
        await read(rig, order[:1])
        await until(lambda: rig.residency.resident_files(1) == FILES // CHUNKS)


@pytest.mark.parametrize("in_tier", [1.0, 0.0])
async def test_the_chunks_of_an_announced_order_are_read_without_a_reader(
    rigs: Rigs, clock: MockClock, monkeypatch: pytest.MonkeyPatch, in_tier: float
) -> None:
    """Beyond the files that are foreseen one by one."""
    monkeypatch.setattr(foresight, "_LEAD", 5)
    rig = rigs(in_tier=in_tier, window=5 * CHUNK_BYTES)
    order = in_groups(rig, 2)
    async with rig.running():
        rig.announce(order)
        if in_tier:
            await until(lambda: rig.residency.resident_files(1) == FILES)
        else:
            # As many as there is room for, the first needed first.
            await until(lambda: len(rig.window) == 5 * FILES // CHUNKS)
            await trio.sleep(10)
        chunks = set(rig.source.reads)
        assert len(chunks) == (CHUNKS if in_tier else 5)
        assert {rig.of_pack.chunk_of(ino) for ino in order[: 2 * FILES // CHUNKS]} <= chunks
        await read(rig, order)
    assert rig.source.nbytes == FILES * SIZE


@pytest.mark.promise(232)
@pytest.mark.usefixtures("small_pieces")
async def test_a_chunk_in_several_pieces_keeps_no_later_one_of_the_order_waiting(
    large_pack: Path, rigs: Rigs, clock: MockClock
) -> None:
    """Its files are asked for, too, before a piece has them."""
    rig = rigs(large_pack, in_tier=0, window=5 * LARGE_CHUNK, model=Latency(1.0))
    order = in_groups(rig, 1)
    async with rig.running():
        rig.announce(order)
        # There is room for all chunks, and no reader.
        await until(lambda: len(rig.window) == LARGE_FILES)
        assert rig.source.nbytes == LARGE_FILES * LARGE_SIZE
        await read_large(rig, order)
    assert rig.source.nbytes == LARGE_FILES * LARGE_SIZE


# -- failures --------------------------------------------------------------------------------------


async def test_a_damaged_file_fails_alone_and_the_others_of_its_chunk_are_kept(
    pack: Path, rigs: Rigs, clock: MockClock, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    os.system(f"cp -r {pack} {damaged}")
    rig = rigs(damaged)
    chunk = rig.by_chunk()[2]
    bad = rig.of_pack.missing(2)[5]
    with (damaged / chunk_name(2).decode()).open("r+b") as file:
        file.seek(bad.offset)
        file.write(b"\xff")
    async with rig.running():
        for _ in range(2):
            with pytest.raises(SourceError) as caught:
                await rig.content(bad.ino)
            assert caught.value.errno == 5
        await read(rig, [ino for ino in chunk if ino != bad.ino])
        await until(lambda: rig.residency.resident_files(1) == len(chunk) - 1)
    (found,) = rig.source.damage.files()
    assert (found.name, found.entries) == (chunk_name(2).decode(), 1)
    # The chunk, and twice the file.
    assert rig.source.reads == {2: 3}


async def test_a_chunk_that_cannot_be_read_is_left_to_its_readers_for_a_while(
    rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs()
    chunk = rig.by_chunk()[0]
    rig.source.failing = {0}
    async with rig.running():
        for ino in chunk[:3]:
            with pytest.raises(SourceError):
                await rig.content(ino)
        # Of the chunk once, then of each file.
        assert rig.source.reads == {0: 4}
        assert rig.residency.wanted == 0
        rig.source.failing = set()
        await trio.sleep(60)
        await read(rig, chunk)
        await until(lambda: rig.residency.resident_files(1) == len(chunk))
    assert rig.source.reads == {0: 5}


async def test_the_end_of_a_mount_in_the_middle_of_a_chunk_leaves_nothing(
    rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs(model=Latency(5.0))
    chunk = rig.by_chunk()[0]
    async with rig.running() as nursery:
        nursery.start_soon(rig.content, chunk[0])
        await until(lambda: rig.engine.flight(chunk[1]) is not None)
    # What the rig requires: no byte reserved or held, no flight.
    assert rig.residency.wanted == len(chunk) or rig.residency.wanted == 0
    assert not rig.tier.count_copies()


# -- announced orders ------------------------------------------------------------------------------


@pytest.mark.promise(232)
@pytest.mark.parametrize("group", [1, 4, 12])
async def test_an_announced_order_of_groups_reads_each_chunk_once_an_epoch(
    rigs: Rigs, clock: MockClock, group: int
) -> None:
    most = (group + 1) * CHUNK_BYTES
    rig = rigs(in_tier=0, window=most)
    order = in_groups(rig, group) + in_groups(rig, group, seed=2)
    async with rig.running():
        rig.announce(order)
        for number, ino in enumerate(order):
            await read(rig, [ino])
            assert rig.window.bytes <= most
            if number == FILES - 1:
                assert set(rig.source.reads.values()) <= {1, 2}
        assert rig.window.bytes == 0
    assert rig.source.reads == dict.fromkeys(range(CHUNKS), 2)
    assert rig.source.nbytes == 2 * FILES * SIZE


@pytest.mark.promise(187)
async def test_without_opens_no_chunk_is_read_ahead_for_files_whose_pages_the_kernel_has(
    rigs: Rigs, clock: MockClock
) -> None:
    """No reader would take them from the window. The tier has room for half of the files."""
    rig = rigs(in_tier=0.5, window=3 * CHUNK_BYTES, sends_opens=False)
    orders = [in_groups(rig, 2, seed) for seed in range(3)]
    async with rig.running():
        for number, order in enumerate(orders):
            key = rig.announce(order)
            for ino in order:
                if number:
                    # The kernel reads its pages. The open is counted all the same.
                    rig.foresight.opened(ino, 0)
                    await trio.sleep(0.001)
                else:
                    await read(rig, [ino])
            await trio.sleep(10)
            rig.foresight.announced.end(key)
            assert rig.source.nbytes == FILES * SIZE, number
        assert 0 < rig.residency.resident_files(1) < FILES


@pytest.mark.promise(187)
async def test_without_opens_a_chunk_is_read_once_more_if_the_kernel_has_dropped_its_pages(
    rigs: Rigs, clock: MockClock
) -> None:
    """Its first reader shows it."""
    rig = rigs(in_tier=0, window=3 * CHUNK_BYTES, sends_opens=False)
    async with rig.running():
        for number in range(1, 4):
            order = in_groups(rig, 2, seed=number)
            key = rig.announce(order)
            await read(rig, order)
            rig.foresight.announced.end(key)
            assert rig.source.reads == dict.fromkeys(range(CHUNKS), number)
            assert rig.source.nbytes == number * FILES * SIZE


MANY_FILES, MANY_CHUNKS = 400, 100


@pytest.fixture(scope="module")
def pack_of_many_chunks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 files of 1000 bytes in 100 chunks."""
    directory = tmp_path_factory.mktemp("many-chunks")
    (directory / "source").mkdir()
    for number in range(MANY_FILES):
        name = f"{number:03d}"
        (directory / "source" / name).write_bytes(contents(name, SIZE))
    chunk_bytes = MANY_FILES // MANY_CHUNKS * SIZE
    return packed(directory / "source", directory / "pack", chunk_bytes=chunk_bytes)


@pytest.mark.promise(232)
@pytest.mark.parametrize("group", [1, 8, 40])
async def test_of_many_chunks_each_is_read_once_in_groups_and_again_in_a_random_order(
    pack_of_many_chunks: Path, rigs: Rigs, clock: MockClock, group: int
) -> None:
    async def read_in(order: Sequence[Ino], rig: PackRig) -> None:
        async with rig.running():
            rig.announce(order)
            await read(rig, order)

    window = (group + 1) * MANY_FILES // MANY_CHUNKS * SIZE
    in_order, at_random = (rigs(pack_of_many_chunks, in_tier=0, window=window) for _ in range(2))
    await read_in(in_groups(in_order, group), in_order)
    assert in_order.source.reads == dict.fromkeys(range(MANY_CHUNKS), 1)
    await read_in(in_groups(at_random, MANY_CHUNKS), at_random)
    assert at_random.source.reads.total() > 1.5 * MANY_CHUNKS


@pytest.mark.promise(232)
async def test_without_memory_for_a_group_the_files_are_read_one_by_one(
    rigs: Rigs, clock: MockClock
) -> None:
    most = 2 * CHUNK_BYTES
    rig = rigs(in_tier=0, window=most)
    order = in_groups(rig, CHUNKS)
    async with rig.running():
        rig.announce(order)
        for ino in order:
            await read(rig, [ino])
            assert rig.window.bytes <= most
    assert rig.source.nbytes <= 1.05 * FILES * SIZE
    assert min(rig.source.reads.values()) > 1


async def test_readers_in_step_share_the_bytes_of_a_chunk(rigs: Rigs, clock: MockClock) -> None:
    rig = rigs(in_tier=0, window=4 * CHUNK_BYTES)
    order = in_groups(rig, 2)
    places = iter(order)
    async with rig.running() as nursery:
        rig.announce(order)
        done = 0

        async def reader() -> None:
            nonlocal done
            for ino in places:
                await read(rig, [ino])
                done += 1

        for _ in range(4):
            nursery.start_soon(reader)
        await until(lambda: done == FILES)
    assert rig.source.reads == dict.fromkeys(range(CHUNKS), 1)


async def test_the_files_of_an_order_that_ends_leave_the_memory(
    rigs: Rigs, clock: MockClock
) -> None:
    rig = rigs(in_tier=0, window=4 * CHUNK_BYTES)
    order = in_groups(rig, 2)
    async with rig.running():
        key = rig.announce(order)
        await read(rig, order[:1])
        await until(lambda: rig.window.bytes > 2 * CHUNK_BYTES)
        rig.foresight.announced.end(key)
        await until(lambda: rig.window.bytes == 0)
        assert rig.window.dropped_files > 0


# -- large files -----------------------------------------------------------------------------------


@pytest.mark.promise(233)
@pytest.mark.parametrize("is_damaged", [False, True])
async def test_a_damaged_large_file_gets_no_copy(
    rigs: Rigs, clock: MockClock, tmp_path: Path, is_damaged: bool
) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "large").write_bytes(contents("large", 3 * CHUNK_BYTES))
    directory = packed(tmp_path / "tree", tmp_path / "pack", chunk_bytes=CHUNK_BYTES)
    if is_damaged:
        with (directory / large_name(0).decode()).open("r+b") as file:
            file.write(b"x")
    rig = rigs(directory, limits={"inline_max": CHUNK_BYTES})
    async with rig.running():
        await rig.content(rig.ino("large"))
        await until(lambda: not rig.residency.wanted)
        assert rig.residency.resident_files(1) == (not is_damaged)
    assert len(rig.source.damage.files()) == is_damaged
