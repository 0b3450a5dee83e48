"""Large files whose blocks other nodes keep, too, below the kernel. The other nodes are played."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from monarch.placement.parts import BLOCK
from monarch.text import MiB
from monarch.tiers.partial import GRANULE, Layout
from monarch.types import Attributes, Identity, Ino
from monarch.vfs.peer_reads import Granules, PeerReads
from tests.vfs.part_rig import CONTENT, SIZE, Makes, PartRig
from tests.vfs.rig import FakeFastPath

# This node keeps the first, the third and the last block of five.
MINE = (0, 2, 4)
OWN_BYTES = 2 * BLOCK + SIZE - 4 * BLOCK


class Others:
    """The other nodes: they have all other blocks, unless they fail."""

    def __init__(self, rig: PartRig) -> None:
        self.blocks = bytearray(b"\1\0\1\0\1")
        self.asked: list[tuple[int, int]] = []
        self.fail = False
        self.rig = rig
        rig.source.read_shared = self.read  # type: ignore[method-assign]
        rig.read_side.parts.is_shared = self.shares
        rig.controller.parts.blocks_of = lambda item: self.blocks
        rig.controller.keeps = lambda item: False

    def shares(self, attributes: Attributes) -> bool:
        return attributes.identity == self.rig.snapshot.attributes(attributes.ino).identity

    def read(self, ino: Ino, identity: Identity, offset: int, size: int) -> bytes | None:
        if identity != self.rig.snapshot.attributes(ino).identity:
            return None
        block = offset // BLOCK
        if self.fail or self.blocks[block]:
            return None
        assert (offset + size - 1) // BLOCK == block, "each block has another owner"
        self.asked.append((offset, size))
        return CONTENT[offset : offset + size]


def reads(rig: PartRig) -> PeerReads:
    return PeerReads(rig.filesystem.readers, rig.read_side, rig.tier_calls)


@asynccontextmanager
async def shared(rig: PartRig) -> AsyncIterator[tuple[Others, Ino]]:
    others = Others(rig)
    async with rig.running():
        ino = await rig.open("big")
        yield others, ino
        rig.filesystem.release(ino)
        await rig.stored()


@pytest.mark.promise(340)
async def test_each_node_reads_only_its_own_blocks_from_the_source(make: Makes) -> None:
    rig, rng = make(), random.Random(2)
    async with shared(rig) as (others, ino):
        for _ in range(2):
            places = [(offset, GRANULE) for offset in range(0, SIZE, GRANULE)]
            rng.shuffle(places)
            for offset, size in places:
                await rig.at(ino, offset, size)
            await rig.stored()
            assert rig.source_bytes() == OWN_BYTES, "once each"
        assert {offset // BLOCK for offset, _ in others.asked} == {1, 3}
        held = {index * GRANULE // BLOCK for index in rig.present(ino)}
        assert held == set(MINE)
        assert rig.ledger.used(1) == Layout(SIZE).overhead + OWN_BYTES


async def test_reads_across_the_border_of_blocks_have_bytes_of_both(make: Makes) -> None:
    rig = make()
    async with shared(rig) as (others, ino):
        for border in range(BLOCK, SIZE, BLOCK):
            await rig.at(ino, border - 5000, 10_000)
            await rig.at(ino, border - MiB // 2, MiB)
        await rig.at(ino, SIZE - 10, 4096)
        assert others.asked


@pytest.mark.promise(274)
async def test_bytes_that_no_other_node_gives_are_read_from_the_source_and_not_kept(
    make: Makes,
) -> None:
    rig = make()
    async with shared(rig) as (others, ino):
        others.fail = True
        for _ in range(2):
            await rig.at(ino, BLOCK + 100, 4096)
        assert rig.source_bytes() == 2 * 4096
        # This node owns the block from now on, in the place of its owner.
        others.blocks[1] = 1
        await rig.at(ino, BLOCK + 100, 4096)
        await rig.stored()
        assert BLOCK // GRANULE in rig.present(ino)


async def test_a_tier_that_is_too_small_gets_some_of_the_own_blocks(make: Makes) -> None:
    rig = make(capacity=Layout(SIZE).overhead + BLOCK + GRANULE)
    async with shared(rig) as (_, ino):
        for _ in range(2):
            for offset in range(0, SIZE, MiB):
                await rig.at(ino, offset, MiB)
            await rig.stored()
        held = {index * GRANULE // BLOCK for index in rig.present(ino)}
        assert len(held) == 1 and held < set(MINE)


@pytest.mark.promise(340)
async def test_a_file_without_a_place_here_still_comes_from_other_nodes(make: Makes) -> None:
    rig = make(capacity=1000)
    async with shared(rig) as (others, ino):
        for offset in range(0, SIZE, BLOCK):
            await rig.at(ino, offset, 4096)
        assert len(others.asked) == 2
        assert rig.source_bytes() == 3 * 4096
        assert await reads(rig).span(ino, 0, 4096) is None


async def test_a_file_that_was_changed_is_read_from_the_source(make: Makes) -> None:
    rig = make()
    async with shared(rig) as (others, ino):
        await rig.at(ino, BLOCK, 4096)
        changed = bytes(SIZE)
        rig.write("big", changed)
        # Its reader keeps the version that it has opened.
        await rig.at(ino, BLOCK + MiB, 4096)
        asked = len(others.asked)
        await rig.at(ino, 2 * BLOCK, 4096)
        rig.filesystem.release(ino)
        await rig.stored()
        await rig.open("big")
        assert await rig.read(ino, BLOCK, 4096) == changed[:4096]
        assert len(others.asked) == asked


@pytest.mark.promise(340)
async def test_another_node_gets_own_blocks_and_each_byte_is_read_once(make: Makes) -> None:
    rig = make()
    async with shared(rig) as (others, ino):
        read = reads(rig).span
        found = []

        async def ask(offset: int) -> None:
            found.append(await read(ino, offset, 2 * GRANULE))

        rig.threads.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask, 2 * BLOCK)
            await trio.testing.wait_all_tasks_blocked()
            rig.threads.gate.set()
        assert found == [CONTENT[2 * BLOCK : 2 * BLOCK + 2 * GRANULE]] * 3
        await rig.stored()
        assert rig.source_bytes() == 2 * GRANULE
        # Later the engine sends them.
        again = await read(ino, 2 * BLOCK, 2 * GRANULE)
        assert isinstance(again, Granules) and again.tier == 1
        # A block of another node is kept for it only while there is room.
        assert await read(ino, 3 * BLOCK, GRANULE) == CONTENT[3 * BLOCK : 3 * BLOCK + GRANULE]
        assert others.blocks[3] == 1
        rig.ledger.reserve(1, rig.ledger.room(1))
        assert await read(ino, BLOCK, GRANULE) is None
    # Without a reader of this node the file stays bound for a while.
    assert rig.read_side.bindings.get(ino) is not None


async def test_the_datapath_gets_no_descriptor_of_the_source(make: Makes) -> None:
    fast = FakeFastPath()
    rig = make(fast=fast)
    async with shared(rig) as (_, ino):
        await rig.at(ino, 0, 4096)
        await rig.stored()
        assert (fast.descriptors[ino], ino in fast.parts) == (-1, True)
