"""Partial copies of a source or a tier that fails or hangs: which readers wait, and which fail.

The test holds and refuses calls of the source and of the tier. Nothing depends on time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.errors import SourceError
from monarch.text import MiB
from monarch.tiers.contents import part_name
from monarch.tiers.partial import GRANULE, Layout
from monarch.types import attributes_of
from monarch.vfs import unit_fetches
from tests.vfs.part_rig import CONTENT, SIZE, Makes, PartRig
from tests.vfs.rig import FakeFastPath

# A page in the middle of the bytes that are fetched ahead of a reader in order.
PLACE = 15 * MiB + 8192
STEP = GRANULE // 2
# After that a read counts as one that waits. One that does not wait takes milliseconds.
PATIENCE_S = 60.0


def reads_of(rig: PartRig, offset: int, size: int, do: Callable[[], object]) -> None:
    """From now on ``do`` is called before the source is read in that range: it may raise OSError,
    or return an event that the read waits for."""

    async def before(*args: object) -> None:
        start, length = args[-2:] if len(args) == 5 else (0, 0)
        assert isinstance(start, int) and isinstance(length, int)
        if start < offset + size and offset < start + length:
            event = do()
            if isinstance(event, trio.Event):
                await event.wait()

    rig.threads.before = before


def fail(error: int) -> Callable[[], object]:
    def do() -> object:
        raise OSError(error, os.strerror(error))

    return do


def files_of(rig: PartRig) -> list[Path]:
    return list(rig.tier.own.glob(f"copies-*/{part_name(rig.ino('big'))}"))


@pytest.mark.promise(11)
async def test_a_range_that_hangs_delays_no_reader_of_other_bytes(make: Makes) -> None:
    rig = make()
    end = trio.Event()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 9 * MiB)
        reads_of(rig, PLACE, 4096, lambda: end)
        with trio.fail_after(PATIENCE_S):
            for offset in range(9 * MiB, PLACE - MiB, STEP):
                await rig.at(ino, offset, STEP)
            for offset in range(PLACE + MiB, SIZE, STEP):
                await rig.at(ino, offset, min(STEP, SIZE - offset))
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(rig.at, ino, PLACE)
            await trio.testing.wait_all_tasks_blocked()
            end.set()
        # Each byte was fetched once.
        for offset in range(9 * MiB, SIZE, STEP):
            await rig.at(ino, offset, min(STEP, SIZE - offset))
        await rig.stored()
        assert rig.source_bytes() == SIZE - 9 * MiB
        rig.filesystem.release(ino)
        await rig.stored()


@pytest.mark.promise(11)
async def test_bytes_that_hang_delay_readers_of_the_same_unit_for_a_short_time(
    make: Makes, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    end = trio.Event()
    first = PLACE // GRANULE - 4
    async with rig.running():
        ino = await rig.open("big")
        for granule in range(first, first + 3):
            await rig.at(ino, granule * GRANULE)
        await rig.stored()
        assert rig.present(ino) >= {first, first + 1, first + 2}
        assert rig.source_reads() == 2, "the second read has taken two granules"
        reads_of(rig, PLACE, 4096, lambda: end)
        monkeypatch.setattr(unit_fetches, "_LATE_S", 0.0)
        with trio.fail_after(PATIENCE_S):
            # The first of four granules, of which the second hangs; then those behind it.
            for granule in (3, 3, 5, 6, 5):
                await rig.at(ino, (first + granule) * GRANULE)
        assert rig.source_bytes() == 6 * GRANULE, "each granule was fetched alone, once"
        async with trio.open_nursery() as nursery:
            for page in range(3):
                nursery.start_soon(rig.at, ino, PLACE + 4096 * page)
            await trio.testing.wait_all_tasks_blocked()
            end.set()
        await rig.stored()
        assert rig.present(ino) == set(range(first, first + 7)), "the unit is stored"
        assert rig.source_bytes() == 11 * GRANULE
        rig.filesystem.release(ino)
        await rig.stored()


@pytest.mark.promise(9)
async def test_an_error_of_a_range_reaches_the_readers_of_that_range_only(make: Makes) -> None:
    rig = make()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 9 * MiB)
        reads_of(rig, PLACE, 4096, fail(errno.EIO))
        for offset in (*range(9 * MiB, PLACE, 4096), *range(PLACE + 4096, 17 * MiB, 4096)):
            await rig.at(ino, offset)
        with pytest.raises(SourceError) as caught:
            await rig.read(ino, PLACE - 4096, 3 * 4096)
        assert caught.value.errno == errno.EIO
        # Readers that wait for the same granule, of which each needs another page.
        outcomes: list[int] = []

        async def read_page(offset: int) -> None:
            try:
                await rig.at(ino, offset)
                outcomes.append(0)
            except SourceError as error:
                outcomes.append(error.errno or 0)

        async with trio.open_nursery() as nursery:
            for page in (-1, 0, 0, 1):
                nursery.start_soon(read_page, PLACE + 4096 * page)
        assert sorted(outcomes) == [0, 0, errno.EIO, errno.EIO]
        rig.threads.before = None
        await rig.at(ino, PLACE)
        await rig.stored()
        assert PLACE // GRANULE in rig.present(ino)
        rig.filesystem.release(ino)
        await rig.stored()


async def test_a_fetch_ahead_that_hangs_outlives_its_readers(make: Makes) -> None:
    rig = make()
    end = trio.Event()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 9 * MiB)
        reads_of(rig, PLACE, 4096, lambda: end)
        for offset in range(9 * MiB, PLACE - MiB, STEP):
            await rig.at(ino, offset, STEP)
        await rig.stored()
        rig.filesystem.release(ino)
        end.set()
        await rig.stored()
        await rig.open("big")
        await rig.at(ino, PLACE)
        rig.filesystem.release(ino)
        await rig.stored()
        assert rig.ledger.reserved(1) == 0


@pytest.mark.promise(210)
async def test_a_tier_without_room_costs_no_more_than_the_bytes_that_are_read(make: Makes) -> None:
    rig = make()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 18 * MiB)
        await rig.stored()
        # Other programs have filled the disk.
        rig.ledger.see_room(1, 0)
        before = rig.source_bytes()
        for offset in range(9 * MiB, 15 * MiB, STEP):
            await rig.at(ino, offset, STEP)
            await rig.stored()
        assert rig.source_bytes() == before + 6 * MiB
        rig.filesystem.release(ino)
        await rig.stored()


@pytest.mark.promise(47)
async def test_no_reader_waits_for_the_creation_of_the_file(make: Makes) -> None:
    fast = FakeFastPath()
    rig = make(fast=fast)
    rig.tier_calls.gate = trio.Event()
    async with rig.running():
        ino = await rig.open("big")
        with trio.fail_after(PATIENCE_S):
            await rig.at(ino, 15 * MiB)
            await rig.at(ino, 12 * MiB)
        assert fast.parts == {} and files_of(rig) == []
        rig.tier_calls.gate.set()
        await rig.stored()
        assert fast.parts == {ino: (1, SIZE)}
        assert rig.present(ino) == {15 * MiB // GRANULE, 12 * MiB // GRANULE}
        rig.filesystem.release(ino)
        await rig.stored()


@pytest.mark.parametrize("again", [False, True], ids=["once", "begun again"])
async def test_one_that_is_evicted_before_its_file_exists_leaves_nothing(
    make: Makes, again: bool
) -> None:
    rig = make()
    rig.tier_calls.gate = trio.Event()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 15 * MiB)
        await trio.testing.wait_all_tasks_blocked()
        assert rig.read_side.promotions.evict(ino) == Layout(SIZE).overhead
        rig.filesystem.release(ino)
        if again:
            await rig.open("big")
            await rig.at(ino, 15 * MiB)
            rig.filesystem.release(ino)
        rig.tier_calls.gate.set()
        await rig.stored()
        assert files_of(rig) == [] and rig.tier_calls.failures == []
        assert rig.ledger.used(1) == rig.ledger.reserved(1) == 0
        await rig.open("big")
        await rig.at(ino, 15 * MiB)
        rig.filesystem.release(ino)
        await rig.stored()
        assert len(files_of(rig)) == 1


@pytest.mark.promise(1)
async def test_readers_of_a_partial_copy_get_no_bytes_of_a_later_version(
    make: Makes, big: Path
) -> None:
    """The source failed when the file was opened, so its old version is not open there."""
    rig = make()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 15 * MiB)
        rig.filesystem.release(ino)
        await rig.stored()
        rig.threads.before = lambda *args: refuse()
        await rig.open("big")
        rig.threads.before = None
        await rig.at(ino, 15 * MiB)
        rig.write("big", bytes(SIZE))
        known = rig.names.stored(ino)
        rig.names.refresh(ino, attributes_of((big / "big").stat(), ino, known.parent, known.mode))
        with pytest.raises(SourceError) as caught:
            await rig.read(ino, 11 * MiB, 4096)
        assert caught.value.errno == errno.ESTALE
        rig.filesystem.release(ino)
        await rig.stored()
        await rig.open("big")
        assert await rig.read(ino, 11 * MiB, 4096) == bytes(4096)
        rig.filesystem.release(ino)
        await rig.stored()


async def refuse() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


async def test_checks_wait_while_a_file_is_created_and_completed(make: Makes) -> None:
    """It has no header meanwhile, which is no damage."""
    rig = make()
    parts = rig.read_side.parts
    ended: list[str] = []

    async def check(what: str) -> None:
        await parts.settled(rig.ino("big"))
        ended.append(what)

    async with rig.running(), trio.open_nursery() as nursery:
        rig.tier_calls.gate = trio.Event()
        ino = await rig.open("big")
        await rig.at(ino, 15 * MiB)
        nursery.start_soon(check, "created")
        await trio.testing.wait_all_tasks_blocked()
        assert ended == []
        rig.tier_calls.gate.set()
        for offset in range(0, SIZE, MiB):
            await rig.at(ino, offset, min(MiB, SIZE - offset))
        await rig.stored()
        assert ended == ["created"]
        rig.tier_calls.gate = trio.Event()
        rig.filesystem.release(ino)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(check, "completed")
        await trio.testing.wait_all_tasks_blocked()
        assert ended == ["created"]
        rig.tier_calls.gate.set()
        await rig.stored()
        await trio.testing.wait_all_tasks_blocked()
        assert ended == ["created", "completed"] and rig.residency.tier_of(ino) == 1
        assert (await rig.open("big"), CONTENT[:10]) == (ino, await rig.read(ino, 0, 10))
        rig.filesystem.release(ino)


async def test_a_file_of_a_tier_that_hangs_is_closed(make: Makes) -> None:
    rig = make()

    def descriptors() -> int:
        (path,) = files_of(rig)
        opened = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum(os.path.lexists(fd) and os.readlink(fd) == str(path) for fd in opened)

    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 15 * MiB)
        await rig.stored()
        assert descriptors() == 1
        rig.tier_calls.hanging.add(1)
        rig.filesystem.release(ino)
        await rig.stored()
        assert descriptors() == 0
        rig.tier_calls.hanging.clear()
        before = rig.source_bytes()
        await rig.open("big")
        await rig.at(ino, 15 * MiB)
        assert rig.source_bytes() == before
        rig.filesystem.release(ino)
        await rig.stored()
