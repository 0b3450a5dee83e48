"""Partial copies below the kernel: what is read from the source, what is served, and their end."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.errors import SourceError
from monarch.placement.parts import BLOCK
from monarch.text import MiB
from monarch.tiers.contents import part_name
from monarch.tiers.partial import GRANULE, Layout
from monarch.types import Ino, attributes_of
from monarch.vfs.binding import WATCHED_FROM
from tests.vfs.part_rig import COUNT, FIRST, SIZE, Makes
from tests.vfs.rig import FakeFastPath


async def test_random_reads_bring_the_granules_that_they_need(make: Makes) -> None:
    rig = make()
    rng = random.Random(5)
    async with rig.running():
        ino = await rig.open("big")
        offsets = [rng.randrange(FIRST * 32, SIZE // 4096) * 4096 for _ in range(30)]
        for offset in offsets:
            await rig.at(ino, offset)
        await rig.stored()
        touched = {offset // GRANULE for offset in offsets}
        assert touched <= rig.present(ino)
        assert rig.source_bytes() <= 1.1 * len(touched) * GRANULE
        before = rig.source_bytes()
        for offset in offsets:
            await rig.at(ino, offset)
        assert rig.source_bytes() == before
        held = rig.ledger.used(1)
        assert held == Layout(SIZE).overhead + sum(
            Layout(SIZE).length(index, index + 1) for index in rig.present(ino)
        )
        rig.filesystem.release(ino)
        await rig.stored()
        # The next open finds them.
        await rig.open("big")
        await rig.at(ino, offsets[0])
        assert rig.source_bytes() == before and rig.ledger.used(1) == held
        rig.filesystem.release(ino)
        await rig.stored()


async def test_each_byte_is_fetched_once_by_many_readers(make: Makes) -> None:
    rig = make()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 15 * MiB)
        rig.threads.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            for place in (0, 100, 5000, GRANULE - 4096):
                nursery.start_soon(rig.at, ino, 10 * MiB + place)
            await trio.testing.wait_all_tasks_blocked()
            rig.threads.gate.set()
        # One read of each of the two granules.
        assert rig.source_reads() == 2 and rig.source_bytes() == 2 * GRANULE
        rig.filesystem.release(ino)
        await rig.stored()


async def test_neighbouring_granules_are_one_read_of_the_source(make: Makes) -> None:
    rig = make()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 15 * MiB)
        await rig.at(ino, 10 * MiB + 5, 3 * GRANULE)
        assert rig.source_reads() == 2 and rig.source_bytes() == 5 * GRANULE
        rig.filesystem.release(ino)
        await rig.stored()


async def test_the_unit_grows_while_reads_are_in_order(make: Makes) -> None:
    rig = make()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, SIZE - 100, 100)
        for offset in range(9 * MiB, SIZE, 4096 * 16):
            await rig.at(ino, offset, min(4096 * 16, SIZE - offset))
        # 11 MiB in ranges of 1, 2, 4, 8, 16, 32 and the last granules, in pieces of up to 8.
        assert rig.source_reads() <= 17
        assert rig.source_bytes() == SIZE - 9 * MiB
        rig.filesystem.release(ino)
        await rig.stored()


async def test_a_reader_in_order_gets_the_copy_that_follows_it(make: Makes) -> None:
    rig = make()
    async with rig.running():
        ino = await rig.open("big")
        assert ino not in rig.engine.flights
        for offset in range(0, 10 * MiB, MiB):
            await rig.at(ino, offset, MiB)
        assert rig.engine.flights[ino].file is not None
        assert rig.source_bytes() == 10 * MiB
        rig.engine.arrive(ino)
        rig.filesystem.release(ino)
        assert rig.residency.tier_of(ino) == 1


async def test_the_datapath_watches_the_file_until_the_decision_and_serves_the_granules(
    make: Makes,
) -> None:
    fast = FakeFastPath()
    rig = make(fast=fast)
    async with rig.running():
        ino = await rig.open("big")
        assert fast.watched == {ino: WATCHED_FROM}
        await rig.at(ino, 15 * MiB)
        await rig.stored()
        assert fast.parts == {ino: (1, SIZE)}
        rig.read_side.promotions.evict(ino)
        assert fast.parts == {}
        # The datapath reads all of the source again.
        await rig.at(ino, 15 * MiB)
        assert fast.watched == {ino: 0}
        rig.filesystem.release(ino)
        await rig.stored()
        await rig.open("big")
        for offset in range(0, 10 * MiB, MiB):
            await rig.at(ino, offset, MiB)
        assert fast.watched == {ino: 0} and fast.parts == {}
        rig.engine.fail(ino)
        rig.filesystem.release(ino)


async def test_a_complete_one_becomes_the_copy_at_its_last_release(make: Makes) -> None:
    rig = make()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 15 * MiB)
        for offset in range(0, SIZE, MiB):
            await rig.at(ino, offset, min(MiB, SIZE - offset))
        assert rig.source_bytes() == SIZE
        await rig.stored()
        assert rig.residency.tier_of(ino) == 0
        rig.filesystem.release(ino)
        await rig.stored()
        assert rig.residency.tier_of(ino) == 1
        assert rig.ledger.used(1) == SIZE and len(rig.controller.parts) == 0
        await rig.open("big")
        await rig.at(ino, 3 * MiB)
        assert rig.source_bytes() == SIZE
        rig.filesystem.release(ino)


async def test_one_that_is_evicted_while_it_is_completed_is_no_failure_of_the_tier(
    make: Makes, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    complete = rig.tier.complete_part

    def evicted(ino: Ino) -> None:
        rig.read_side.promotions.evict(ino)
        complete(ino)

    monkeypatch.setattr(rig.tier, "complete_part", evicted)
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 15 * MiB)
        for offset in range(0, SIZE, MiB):
            await rig.at(ino, offset, min(MiB, SIZE - offset))
        rig.filesystem.release(ino)
        await rig.stored()
        assert rig.tier_calls.failures == [] and rig.residency.tier_of(ino) == 0
        assert rig.ledger.used(1) == rig.ledger.reserved(1) == 0
        await rig.open("big")
        await rig.at(ino, 15 * MiB)
        rig.filesystem.release(ino)
        await rig.stored()


async def test_a_file_twice_the_tier_has_the_same_hits_in_each_pass(make: Makes) -> None:
    overhead = Layout(SIZE).overhead
    rig = make(capacity=8 * MiB + overhead)
    async with rig.running():
        ino = await rig.open("big")
        blocks = list(range(0, SIZE, BLOCK))
        rng = random.Random(1)
        missed = []
        for _ in range(3):
            before = rig.source_bytes()
            order = list(range(0, SIZE, GRANULE))
            rng.shuffle(order)
            # The first read must not be before the decision.
            order.remove(16 * MiB)
            for offset in (16 * MiB, *order):
                await rig.at(ino, offset, min(GRANULE, SIZE - offset))
            await rig.stored()
            missed.append(rig.source_bytes() - before)
        assert missed[0] == SIZE
        # Two blocks of the five fit.
        sizes = {min(BLOCK, SIZE - offset) for offset in blocks}
        assert missed[1] == missed[2]
        assert any(missed[1] == SIZE - BLOCK - size for size in sizes)
        assert rig.ledger.used(1) <= 8 * MiB + overhead
        rig.filesystem.release(ino)
        await rig.stored()


async def test_a_change_at_the_source_drops_it_and_mixes_nothing(make: Makes) -> None:
    rig = make()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 15 * MiB)
        await rig.stored()
        # Replaced: the reader keeps the version that it has opened.
        rig.write("big", bytes(SIZE))
        await rig.at(ino, 15 * MiB)
        await rig.at(ino, 11 * MiB)
        assert rig.controller.parts.tier_of(ino) == 0
        assert rig.ledger.used(1) == rig.ledger.reserved(1) == 0
        await rig.at(ino, 15 * MiB)
        rig.filesystem.release(ino)
        await rig.stored()
        # The next one has the new version.
        again = await rig.open("big")
        assert await rig.read(again, 15 * MiB, 100) == bytes(100)
        rig.filesystem.release(again)
        await rig.stored()


async def test_an_open_after_a_change_has_the_new_version(make: Makes) -> None:
    rig = make()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 15 * MiB)
        rig.filesystem.release(ino)
        await rig.stored()
        rig.write("big", bytes(SIZE))
        await rig.open("big")
        assert await rig.read(ino, 15 * MiB, 100) == bytes(100)
        rig.filesystem.release(ino)
        await rig.stored()


async def test_a_source_that_fails_gives_its_error_once_and_hits_go_on(make: Makes) -> None:
    rig = make()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 15 * MiB)
        await rig.stored()
        binding = rig.read_side.bindings.get(ino)
        assert binding is not None and binding.file is not None
        path = os.open(os.devnull, os.O_RDONLY)
        keep = os.dup(binding.file.fd)
        os.dup2(os.open(rig.source_path, os.O_RDONLY), binding.file.fd)
        with pytest.raises(SourceError) as caught:
            await rig.read(ino, 11 * MiB, 100)
        assert caught.value.errno == errno.EISDIR
        await rig.at(ino, 15 * MiB)
        os.dup2(keep, binding.file.fd)
        await rig.at(ino, 11 * MiB)
        os.close(keep)
        os.close(path)
        rig.filesystem.release(ino)
        await rig.stored()


async def test_a_partial_copy_that_cannot_be_read_is_dropped(make: Makes) -> None:
    rig = make()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 15 * MiB)
        await rig.stored()
        (path,) = rig.tier.own.glob(f"copies-*/{part_name(ino)}")
        os.truncate(path, 0)
        await rig.at(ino, 15 * MiB)
        await rig.at(ino, 12 * MiB)
        assert rig.tier_calls.unreadable == [(1, errno.ESTALE)]
        assert rig.ledger.used(1) == 0
        rig.filesystem.release(ino)
        await rig.stored()


async def test_a_damaged_granule_of_an_earlier_term_is_fetched_again(make: Makes) -> None:
    rig = make(verify="open")
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 15 * MiB)
        await rig.at(ino, 12 * MiB)
        rig.filesystem.release(ino)
        await rig.stored()
        (path,) = rig.tier.own.glob(f"copies-*/{part_name(ino)}")
        with path.open("r+b") as file:
            file.seek(15 * MiB + 50)
            file.write(b"rotten")
        before, held = rig.source_bytes(), rig.ledger.used(1)
        await rig.open("big")
        await rig.at(ino, 12 * MiB)
        assert rig.source_bytes() == before
        await rig.at(ino, 15 * MiB)
        await rig.stored()
        assert rig.source_bytes() == before + GRANULE and rig.ledger.used(1) == held
        rig.filesystem.release(ino)
        await rig.stored()


async def test_evict_removes_it_and_warm_replaces_it(make: Makes) -> None:
    rig = make()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 15 * MiB)
        rig.filesystem.release(ino)
        await rig.stored()
        held = rig.ledger.used(1)
        assert rig.read_side.promotions.evict(ino) == held > 0
        assert rig.ledger.used(1) == 0
        assert not list(rig.tier.own.glob(f"copies-*/{part_name(ino)}"))
        await rig.open("big")
        await rig.at(ino, 15 * MiB)
        assert rig.read_side.promotions.warm(ino)
        assert len(rig.controller.parts) == 0 and ino in rig.engine.flights
        await rig.at(ino, 15 * MiB)
        rig.engine.fail(ino)
        rig.filesystem.release(ino)
        await rig.stored()


@pytest.mark.parametrize("why", ["no room on the disk", "young"])
async def test_granules_that_may_not_be_stored_are_served_and_not_counted(
    make: Makes, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    rig = make()
    ino = rig.ino("big")
    if why == "young":
        monkeypatch.setattr(rig.doubts, "by_bytes", lambda ino, identity: True)
    else:
        rig.tier_calls.has_room = False
    async with rig.running():
        await rig.open("big")
        await rig.at(ino, 15 * MiB)
        await rig.stored()
        assert rig.present(ino) == set()
        assert rig.ledger.used(1) == Layout(SIZE).overhead and rig.ledger.reserved(1) == 0
        rig.filesystem.release(ino)
        await rig.stored()


async def test_the_granules_that_wait_for_a_slow_tier_are_limited(make: Makes) -> None:
    rig = make(buffer_max="8MiB")
    parts = rig.read_side.parts
    # Nothing is stored before ``run`` begins.
    ino = await rig.open("big")
    await rig.at(ino, 15 * MiB)
    for offset in range(9 * MiB, SIZE, 2 * GRANULE):
        await rig.at(ino, offset, min(GRANULE, SIZE - offset))
    # One is the creation of the file.
    assert parts.pending <= 1 + 2 * MiB // GRANULE
    before = rig.source_bytes()
    await rig.at(ino, SIZE - 4096)
    assert rig.source_bytes() == before + 4096
    async with rig.running():
        await rig.stored()
        assert 0 < len(rig.present(ino)) <= 2 * MiB // GRANULE
        # What was read meanwhile is fetched again, and kept.
        await rig.at(ino, SIZE - 4096)
        await rig.stored()
        assert COUNT - 1 in rig.present(ino)
        rig.filesystem.release(ino)
        await rig.stored()


async def test_switched_off_the_whole_file_is_copied_at_its_open(make: Makes) -> None:
    rig = make(parts=False)
    async with rig.running():
        ino = await rig.open("big")
        assert ino in rig.engine.flights
        await rig.at(ino, 15 * MiB)
        assert rig.source_bytes() == 4096 and len(rig.controller.parts) == 0
        rig.engine.arrive(ino)
        rig.filesystem.release(ino)


@pytest.mark.promise(172)
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
async def test_a_partial_copy_of_a_file_that_the_drain_changes_is_made_anew(
    make: Makes, big: Path, is_open: bool
) -> None:
    """It counts as no damage. A process that has the file open continues at the source."""
    rig = make()
    async with rig.running():
        ino = await rig.open("big")
        await rig.at(ino, 12 * MiB)
        await rig.stored()
        if not is_open:
            rig.filesystem.release(ino)
            await rig.stored()
        rig.names.change(ino, mode=0o640, now_ns=1)
        before = rig.names.stored(ino)
        (big / "big").chmod(0o640)
        fresh = attributes_of((big / "big").stat(), ino, before.parent, 0o100640)
        rig.names.refresh(ino, fresh)
        rig.read_side.renewals.renewed(ino, before.identity, fresh.identity)
        if is_open:
            await rig.at(ino, 12 * MiB)
            await rig.at(ino, 16 * MiB)
            rig.filesystem.release(ino)
            await rig.stored()
        await rig.open("big")
        await rig.at(ino, 12 * MiB)
        await rig.stored()
        assert rig.present(ino) and not rig.metrics.errors and rig.metrics.changes == 0
        assert rig.tier_calls.unreadable == []
        rig.filesystem.release(ino)
        await rig.stored()
