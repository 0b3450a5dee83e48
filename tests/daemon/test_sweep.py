"""The sweep between real tiers and records: files without a record, records without a file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio

from monarch.config.settings import LimitSettings, TierSettings
from monarch.daemon.sweep import Sweep
from monarch.placement.ledger import Ledger
from monarch.placement.parts import Parts
from monarch.placement.policy import FirstCome, Item
from monarch.placement.residency import Residency
from monarch.telemetry.metrics import Metrics
from monarch.tiers.contents import copy_name
from monarch.tiers.hierarchy import Hierarchy
from monarch.tiers.records import Record
from monarch.transfer.source_load import NoDatapath
from monarch.transfer.tier_monitor import TierMonitor
from monarch.types import Identity, Ino

COUNT, SIZE = 4, 10


class Rig:
    """Copies of four files, of which the records say that they are there."""

    def __init__(self, root: Path, *, doubts: bool) -> None:
        self.evicted: list[Ino] = []
        self.hierarchy = Hierarchy(
            [TierSettings(path=root / "tier", name="fast")],
            root,
            generation="g",
            inodes=lambda: iter(()),
            renewed={},
            columns=lambda inos: np.empty(0, np.void),
            mountpoint="/mnt",
            source="/pfs",
        )
        [self.tier] = self.hierarchy.tiers
        self.residency = Residency(COUNT)
        for number in range(1, COUNT + 1):
            self.put(Ino(number))
        self._doubts = doubts
        self.ledger = Ledger([10**6])
        self.parts = Parts(self.residency, self.ledger, FirstCome())
        self._monitor = TierMonitor(
            tiers=[self.tier],
            keep_free=[0],
            ledger=self.ledger,
            metrics=Metrics(["fast"]),
            limits=LimitSettings(),
            datapath=NoDatapath(),
        )
        self.sweep = self.new_sweep()

    def new_sweep(self) -> Sweep:
        return Sweep(
            self.hierarchy,
            self.residency,
            self._monitor,
            evict=self.evicted.append,
            parts=self.parts,
            doubts=self._doubts,
        )

    def put(self, ino: Ino) -> None:
        identity = Identity(SIZE, 1, 1, ino)
        staged = self.tier.stage(ino)
        staged.append(bytes(SIZE))
        digest = staged.commit(identity)
        self.hierarchy.records.put(ino, Record(self.tier.number, identity, digest))
        self.residency.place(ino, self.tier.number)

    def path(self, ino: int) -> Path:
        [generation] = (path for path in self.tier.own.iterdir() if (path / "01").is_dir())
        return generation / copy_name(Ino(ino))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, doubts=True)
    yield made
    made.hierarchy.close(clean=False)


def test_a_copy_without_its_file_is_dropped_and_a_file_without_a_record_removed(rig: Rig) -> None:
    stranger = rig.path(9)
    stranger.parent.mkdir(exist_ok=True)
    os.link(rig.path(1), stranger)
    rig.path(2).unlink()
    # Older than the sweep by more than one tick of the file system's clock.
    time.sleep(0.02)
    trio.run(rig.new_sweep().run)
    assert rig.evicted == [2]
    assert not stranger.exists()
    assert rig.path(1).exists()


def test_copies_of_a_tier_that_returns_are_verified_before_use(rig: Rig) -> None:
    assert rig.residency.unverified_files() == 0
    rig.path(3).unlink()
    trio.run(partial(rig.sweep.returned, rig.tier))
    assert rig.residency.unverified_files() == COUNT
    assert rig.evicted == [3]


def test_partial_copies_of_a_tier_that_returns_are_dropped(rig: Rig) -> None:
    rig.parts.load(Item(Ino(2), 10 * SIZE, 2), tier=1, overhead=0, held=SIZE)
    trio.run(partial(rig.sweep.returned, rig.tier))
    assert rig.evicted == [2]


def test_a_tier_keeps_the_copies_that_fit_into_a_smaller_capacity(rig: Rig) -> None:
    kept = rig.hierarchy.keep_within(rig.tier, 2 * SIZE + 1)
    assert len(kept.inos) == 2 and kept.bytes == 2 * SIZE
    assert rig.hierarchy.held(rig.tier).bytes == 2 * SIZE
    assert sum(len(paths) for paths in rig.tier.copies()) == 2
