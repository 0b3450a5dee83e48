"""Objects that are made in advance for new files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from monarch.posix.thread_pool import ThreadPool
from monarch.writeback.objects import Objects
from monarch.writeback.tier_objects import MOST, Spares


class Disk(Objects):
    """``room``: the number of objects that may still be made."""

    room = 1 << 30

    def create(self, number: int) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= 1
        return super().create(number)


class Threads(ThreadPool):
    """``starts`` counts the calls."""

    starts = 0

    def start(self, function: Callable[..., object], *args: Any) -> None:
        self.starts += 1
        super().start(function, *args)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


async def taken(spares: Spares, count: int) -> list[int]:
    numbers = []
    for _ in range(count):
        number, fd = await spares.take()
        os.close(fd)
        numbers.append(number)
    return numbers


async def at_rest(spares: Spares) -> None:
    """Waits until no thread makes spares: a number without an object is given out only then."""
    await spares.number()


@pytest.mark.finding("W24")
@pytest.mark.fault("T13")
def test_a_hop_to_a_thread_makes_many_objects_in_advance(disk: Disk) -> None:
    async def run() -> None:
        spares = Spares(disk, threads := Threads(2, "test", abandon=True), 7)
        assert await taken(spares, 400) == [*range(7, 407)], "in order, and none left out"
        assert threads.starts <= 5 + 2 * 400 // MOST
        await at_rest(spares)
        spares.close()
        await at_rest(spares)

    trio.run(run)
    assert disk.numbers() == {*range(7, 407)}, "spares that were not used are gone"


def test_a_creator_of_one_file_leaves_no_more_than_two_spares(disk: Disk) -> None:
    async def run() -> None:
        spares = Spares(disk, ThreadPool(2, "test", abandon=True), 1)
        await taken(spares, 1)
        while disk.numbers() != {1, 2, 3}:
            await trio.sleep(0.01)

    trio.run(run)


@pytest.mark.fault("T13")
def test_a_disk_without_room_refuses_and_the_next_number_follows_when_there_is_some(
    disk: Disk,
) -> None:
    async def run() -> None:
        spares = Spares(disk, ThreadPool(2, "test", abandon=True), 1)
        disk.room = 5
        assert await taken(spares, 5) == [1, 2, 3, 4, 5]
        with pytest.raises(OSError, match="No space"):
            await spares.take()
        alone = await spares.number()
        assert alone == 6, "it has no object"
        disk.room = 100
        assert await taken(spares, 3) == [7, 8, 9]
        spares.close()

    trio.run(run)


@pytest.mark.fault("T13")
def test_objects_made_during_the_close_are_removed_too(disk: Disk) -> None:
    async def run() -> None:
        spares = Spares(disk, ThreadPool(2, "test", abandon=True), 1)
        await taken(spares, 3)
        spares.close()
        await at_rest(spares)

    trio.run(run)
    assert disk.numbers() == {1, 2, 3}
