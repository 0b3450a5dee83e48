"""Tiers that hang, fail and move, watched in virtual time."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.config.settings import LimitSettings
from monarch.errors import TierError
from monarch.placement.ledger import Ledger
from monarch.telemetry.metrics import Metrics
from monarch.text import MiB
from monarch.tiers.ownership import Owner
from monarch.tiers.tier import Tier
from monarch.transfer.source_load import CallTotals, NoDatapath
from monarch.transfer.tier_monitor import TierMonitor
from monarch.types import Ino
from tests.equipment.virtual_clock import until, virtual_clock

_INO = Ino(5)


@dataclass
class Rig:
    """Two tiers with a tier monitor, and its reports."""

    tiers: list[Tier]
    ledger: Ledger
    monitor: TierMonitor = field(init=False)
    bypassed: dict[int, bool] = field(default_factory=dict)
    returned: list[int] = field(default_factory=list)
    out: list[int] = field(default_factory=list)
    served: dict[int, CallTotals] = field(default_factory=dict)


class FakeDatapath(NoDatapath):
    """A datapath that was sent to Python for some tiers, and has served copies of others."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def bypass(self, tier: int, bypassed: bool) -> None:
        self._rig.bypassed[tier] = bypassed

    def totals(self, tier: int) -> CallTotals:
        return self._rig.served.get(tier, CallTotals(0, 0.0))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory that no disk is behind: a busy one would take hours of virtual time."""
    directory = Path(tempfile.mkdtemp(dir=next(filter(os.path.isdir, ("/dev/shm", tmp_path)))))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def clock() -> Iterator[trio.testing.MockClock]:
    with virtual_clock(patience_s=0.05) as clock:
        yield clock


@asynccontextmanager
async def watching(memory: Path, *, keep_free: int = 0) -> AsyncIterator[Rig]:
    tiers = [Tier(n, f"t{n}", memory / f"t{n}", owner=Owner("mount")) for n in (1, 2)]
    for tier in tiers:
        tier.use("g")
    ledger = Ledger([10**6, 10**6])

    async def returned(tier: Tier) -> None:
        rig.returned.append(tier.number)

    rig = Rig(tiers, ledger)
    rig.monitor = TierMonitor(
        tiers=tiers,
        keep_free=[keep_free, 0],
        ledger=ledger,
        metrics=Metrics(["t1", "t2"]),
        # Few looks in much time: threads that do work need real time for it.
        limits=LimitSettings(tier_timeout=50),
        datapath=FakeDatapath(rig),
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(rig.monitor.run, on_outage=rig.out.append, on_return=returned))
        yield rig
        nursery.cancel_scope.cancel()
    for tier in tiers:
        tier.close()


async def test_a_call_that_hangs_is_noticed_while_it_lasts_and_the_other_tier_continues(
    memory: Path, clock: trio.testing.MockClock
) -> None:
    answer = threading.Event()
    async with watching(memory) as rig, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(rig.monitor.call, rig.tiers[0], answer.wait)
        with pytest.raises(OSError) as passed_by:
            await rig.monitor.ask(1, answer.wait)
        assert passed_by.value.errno == errno.ETIMEDOUT
        assert rig.monitor.out_of_service()[1].slow
        assert (rig.out, rig.bypassed) == ([1], {1: True})
        assert not rig.monitor.is_read(1)
        assert not rig.ledger.is_open(1)
        assert await rig.monitor.call(rig.tiers[1], os.getpid) == os.getpid()
        # As long as something may still be written there it is not tried at all.
        await trio.sleep(200)
        assert 1 in rig.monitor.out_of_service()
        answer.set()
        with trio.fail_after(100):
            while rig.monitor.out_of_service():
                await trio.sleep(1)
        assert rig.bypassed == {1: False}
        assert rig.ledger.is_open(1)


async def test_a_long_call_may_last_longer(memory: Path, clock: trio.testing.MockClock) -> None:
    answer = threading.Event()
    async with watching(memory) as rig, trio.open_nursery() as nursery:

        async def copy(tier: Tier) -> None:
            await rig.monitor.call(tier, answer.wait, files=400, size=400 * MiB)

        nursery.start_soon(copy, rig.tiers[0])
        await trio.sleep(600)
        assert rig.monitor.out_of_service() == {}
        await trio.sleep(600)
        assert 1 in rig.monitor.out_of_service()
        answer.set()


async def test_the_end_waits_for_calls_but_not_for_those_that_hang(
    memory: Path, clock: trio.testing.MockClock
) -> None:
    answer, hangs = threading.Event(), threading.Event()
    done = []
    async with watching(memory) as rig:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def change() -> None:
                    done.append(await rig.monitor.call(rig.tiers[1], answer.wait))

                nursery.start_soon(change)
                await trio.sleep(1)
                scope.cancel()
                trio.lowlevel.current_trio_token().run_sync_soon(answer.set)
        assert done == [True]
        assert not rig.monitor.is_stuck
        with trio.CancelScope() as scope:
            scope.cancel()
            rig.monitor.abort_at_deadline()
            with pytest.raises(TierError):
                await rig.monitor.call(rig.tiers[0], hangs.wait)
        assert rig.monitor.is_stuck
    hangs.set()


async def test_a_long_end_does_not_take_the_tiers_for_hanging(
    memory: Path, clock: trio.testing.MockClock
) -> None:
    """The drain of written files may take minutes after the last copies."""
    async with watching(memory) as rig:
        rig.monitor.abort_at_deadline()
        await trio.sleep(1000)
        assert rig.monitor.out_of_service() == {} and not rig.monitor.is_stuck


async def test_a_tier_whose_copies_are_slow_to_open_elsewhere_is_slow(
    memory: Path, clock: trio.testing.MockClock
) -> None:
    async with watching(memory) as rig:
        rig.served = {1: CallTotals(100, 200.0), 2: CallTotals(3, 200.0)}
        await trio.sleep(21)
        # The mean of a hundred is 2 s; three are too few to tell.
        assert rig.monitor.out_of_service() == {}
        rig.served = {1: CallTotals(200, 1200.0)}
        await trio.sleep(11)
        assert rig.monitor.out_of_service()[1].slow
        with trio.fail_after(100):
            while rig.monitor.out_of_service():
                await trio.sleep(1)


async def test_a_tier_that_is_gone_is_detached_and_attached_again_as_the_same(
    memory: Path, clock: trio.testing.MockClock
) -> None:
    async with watching(memory) as rig:
        tier = rig.tiers[0]
        root, generation, name = tier._root, tier.directory, tier.id
        shutil.rmtree(tier.path)
        await trio.sleep(11)
        await until(lambda: 1 in rig.monitor.out_of_service())
        assert rig.monitor.out_of_service()[1].moved
        with pytest.raises(NotADirectoryError):
            tier.stage(_INO)
        await trio.sleep(100)
        assert not tier.path.exists()
        tier.path.mkdir()
        with trio.fail_after(100):
            while rig.monitor.out_of_service():
                await trio.sleep(1)
        assert (tier._root, tier.directory, tier.id) == (root, generation, name)
        assert rig.returned == [1]
        tier.stage(_INO).close()


async def test_another_tier_in_the_place_of_one_is_not_taken_for_it(
    memory: Path, clock: trio.testing.MockClock
) -> None:
    async with watching(memory) as rig:
        tier = rig.tiers[0]
        os.rename(tier.path, memory / "elsewhere")
        other = Tier(1, "t1", tier.path, owner=Owner("mount"))
        other.close()
        await trio.sleep(120)
        assert "is another tier than before" in rig.monitor.out_of_service()[1].why
        shutil.rmtree(tier.path)
        os.rename(memory / "elsewhere", tier.path)
        with trio.fail_after(100):
            while rig.monitor.out_of_service():
                await trio.sleep(1)


async def test_a_disk_that_others_have_filled_is_full_before_the_first_call(
    memory: Path, clock: trio.testing.MockClock
) -> None:
    async with watching(memory, keep_free=1 << 60) as rig:
        await trio.sleep(11)
        await until(lambda: 1 in rig.monitor.out_of_service())
        assert rig.monitor.out_of_service()[1].full
        assert rig.monitor.is_read(1)
        assert rig.ledger.room(1) < 0
        assert await rig.monitor.take_room(rig.tiers[1], 100)
        assert not await rig.monitor.take_room(rig.tiers[1], 1 << 60)
