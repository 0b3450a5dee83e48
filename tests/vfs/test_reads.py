"""Reads below the kernel: from copies and the source, with an open and without one."""

from __future__ import annotations

import errno
import os

import pytest
import trio
import trio.testing

from monarch.errors import SourceError
from tests.vfs.conftest import FILES, Rigs
from tests.vfs.rig import FakeFastPath, Rig


async def test_a_copy_that_is_cut_while_it_is_read_is_read_on_at_the_source(rig: Rig) -> None:
    ino = rig.copy("large")
    await rig.open("large")
    assert await rig.read(ino, 0, 10) == b"l" * 10
    os.truncate(rig.copy_path(ino), 50)
    assert await rig.read(ino, 40, 20) == b"l" * 20
    assert rig.tier_calls.unreadable == [(1, errno.ESTALE)]
    assert rig.residency.tier_of(ino) == 0
    # It stays at the source.
    binding = rig.read_side.bindings.get(ino)
    assert binding is not None and binding.file is not None and binding.tier == 0
    assert await rig.read(ino, 99_990) == b"l" * 10
    rig.filesystem.release(ino)


async def test_two_reads_that_lose_a_copy_open_the_source_once(rig: Rig) -> None:
    ino = rig.copy("large")
    await rig.open("large")
    os.truncate(rig.copy_path(ino), 50)
    rig.threads.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(rig.read, ino, 40, 20)
        await trio.testing.wait_all_tasks_blocked()
        rig.threads.gate.set()
    binding = rig.read_side.bindings.get(ino)
    assert binding is not None and binding.file is not None
    # The copy counts once.
    assert rig.tier_calls.unreadable == [(1, errno.ESTALE)]
    rig.filesystem.release(ino)


@pytest.mark.fault("T3")
async def test_a_read_that_fails_after_another_one_has_lost_the_copy_has_its_bytes(
    rig: Rig,
) -> None:
    ino = rig.copy("large")
    await rig.open("large")
    os.truncate(rig.copy_path(ino), 50)
    rig.tier_calls.reading = trio.Event()
    got = []

    async def read() -> None:
        got.append(await rig.read(ino, 40, 20))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        waiting, rig.tier_calls.reading = rig.tier_calls.reading, None
        assert await rig.read(ino, 40, 20) == b"l" * 20
        waiting.set()
    assert got == [b"l" * 20]
    assert rig.tier_calls.unreadable == [(1, errno.ESTALE)]
    rig.filesystem.release(ino)


async def test_a_read_of_a_copy_that_another_read_has_lost_counts_for_the_tier(rig: Rig) -> None:
    ino = rig.copy("large")
    await rig.open("large")
    copy = os.open(rig.copy_path(ino), os.O_RDWR)
    os.truncate(copy, 50)
    rig.tier_calls.reading = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.read, ino, 40, 20)
        await trio.testing.wait_all_tasks_blocked()
        waiting, rig.tier_calls.reading = rig.tier_calls.reading, None
        await rig.read(ino, 60, 10)
        assert rig.metrics.read_bytes == [10, 0]
        os.write(copy, b"l" * 100)
        waiting.set()
    os.close(copy)
    assert rig.metrics.read_bytes == [10, 20]
    rig.filesystem.release(ino)


async def test_a_file_that_is_released_while_it_is_read_stays_open_for_the_read(rig: Rig) -> None:
    ino = await rig.open("large")
    rig.threads.gate = trio.Event()
    got = []

    async def read() -> None:
        got.append(await rig.read(ino, 0, 10))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        rig.filesystem.release(ino)
        rig.threads.gate.set()
    assert got == [b"l" * 10]
    assert not rig.read_side.bindings.is_open(ino)


async def test_a_read_behind_the_end_of_a_file_that_was_cut_fails(rig: Rig) -> None:
    ino = await rig.open("large")
    os.truncate(rig.source_path / "large", 10)
    with pytest.raises(SourceError) as failed:
        await rig.read(ino, 50_000, 10)
    assert failed.value.errno == errno.ESTALE
    assert await rig.read(ino, 5, 10) == b"l" * 5
    rig.filesystem.release(ino)


async def test_a_binding_without_an_open_ends_when_all_was_read(rigs: Rigs) -> None:
    rig = rigs(sends_opens=False)
    ino = rig.ino("small")
    assert await rig.read(ino, 0, 600) == b"s" * 600
    assert rig.read_side.bindings.open_files == 1 and rig.metrics.opens == [1, 0]
    # The kernel has locked the pages of a read that waits: nothing is stored.
    assert rig.caches.stored == {}
    assert await rig.read(ino, 600, 600) == b"s" * 400
    assert rig.read_side.bindings.open_files == 0


async def test_a_binding_without_an_open_ends_when_no_read_comes(
    rigs: Rigs, autojump_clock: trio.testing.MockClock
) -> None:
    rig = rigs(sends_opens=False)
    ino = rig.ino("large")
    async with trio.open_nursery() as nursery:
        for task in rig.filesystem.tasks().values():
            nursery.start_soon(task)
        for _ in range(3):
            await rig.read(ino, 0, 10)
            await trio.sleep(0.9)
            assert rig.read_side.bindings.open_files == 1
        await trio.sleep(0.6)
        assert rig.read_side.bindings.open_files == 0
        nursery.cancel_scope.cancel()


async def test_without_opens_two_versions_are_not_mixed(rigs: Rigs) -> None:
    rig = rigs(sends_opens=False)
    ino = rig.ino("large")
    await rig.read(ino, 0, 10)
    rig.write("large", b"n" * 100_000, in_place=True)
    for offset in (10, 20):
        with pytest.raises(SourceError) as failed:
            await rig.read(ino, offset, 10)
        assert failed.value.errno == errno.ESTALE
    rig.filesystem.bindings.close()


def replaced_large(rig: Rig) -> None:
    rig.write("large", b"n" * 100_000)
    os.chmod(rig.source_path / "large", rig.names.attributes(rig.ino("large")).mode & 0o7777)


@pytest.mark.promise(40)
@pytest.mark.parametrize("is_replaced_while_bound", [False, True])
async def test_without_opens_bytes_read_while_another_node_reads_are_not_mixed(
    rigs: Rigs, autojump_clock: trio.testing.MockClock, is_replaced_while_bound: bool
) -> None:
    rig = rigs(sends_opens=False)
    ino = rig.ino("large")
    async with trio.open_nursery() as nursery:
        for task in rig.filesystem.tasks().values():
            nursery.start_soon(task)
        async with rig.filesystem.readers.bound(ino, stays=True):
            if is_replaced_while_bound:
                replaced_large(rig)
                await rig.read_side.revalidation.look_again(ino)
            assert await rig.read(ino, 0, 10) == b"l" * 10
            assert rig.residency.is_changed(ino) == is_replaced_while_bound
        await trio.sleep(2)
        assert rig.read_side.bindings.open_files == 0
        if not is_replaced_while_bound:
            replaced_large(rig)
        for offset in (0, 10):
            with pytest.raises(SourceError) as failed:
                await rig.read(ino, offset, 10)
            assert failed.value.errno == errno.ESTALE
        nursery.cancel_scope.cancel()


@pytest.mark.promise(40)
async def test_without_opens_a_new_version_that_is_bound_for_another_node_can_be_read_to_its_end(
    rigs: Rigs, autojump_clock: trio.testing.MockClock
) -> None:
    rig = rigs(sends_opens=False)
    ino = rig.ino("large")
    async with trio.open_nursery() as nursery:
        for task in rig.filesystem.tasks().values():
            nursery.start_soon(task)
        # Nothing of it was read before.
        replaced_large(rig)
        await rig.read_side.revalidation.look_again(ino)
        async with rig.filesystem.readers.bound(ino, stays=True):
            assert await rig.read(ino, 0, 10) == b"n" * 10
        await trio.sleep(2)
        assert rig.read_side.bindings.open_files == 0
        assert await rig.read(ino, 10, 10) == b"n" * 10
        nursery.cancel_scope.cancel()
    rig.filesystem.bindings.close()


async def test_without_opens_a_file_of_another_size_is_read_once_the_kernel_knows(
    rigs: Rigs, autojump_clock: trio.testing.MockClock
) -> None:
    rig = rigs(sends_opens=False)
    ino = rig.ino("small")
    rig.write("small", b"s" * 2000)
    os.chmod(rig.source_path / "small", rig.names.attributes(ino).mode & 0o7777)
    async with trio.open_nursery() as nursery:
        for task in rig.filesystem.tasks().values():
            nursery.start_soon(task)
        for _ in range(2):
            with pytest.raises(SourceError) as failed:
                await rig.read(ino)
            assert failed.value.errno == errno.ESTALE
        assert rig.caches.attributes == [ino]
        await trio.sleep(0.5)
        assert await rig.read(ino) == b"s" * 2000
        nursery.cancel_scope.cancel()


async def test_a_read_that_the_datapath_passes_on_is_answered_without_an_open(rigs: Rigs) -> None:
    rig = rigs(fast=FakeFastPath())
    ino = rig.copy("small")
    assert await rig.read(ino) == FILES["small"]
    assert not rig.read_side.bindings.is_open(ino)
    # The datapath counts its own opens.
    assert rig.metrics.opens == [0, 0] and rig.metrics.reads == [0, 1]
