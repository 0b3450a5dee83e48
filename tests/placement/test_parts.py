"""The accounts of partial copies: space, shares, and their place beside whole copies."""

from __future__ import annotations

import numpy as np
import pytest

from monarch.placement.controller import Controller
from monarch.placement.ledger import Ledger
from monarch.placement.parts import BLOCK
from monarch.placement.policy import FirstCome, Item, Lru, NoEvict, Policy
from monarch.placement.residency import SOURCE, Residency
from monarch.posix.buckets import BUCKETS, bucket
from monarch.types import Ino

BIG = Item(Ino(2), 100 * BLOCK, 77)
OVERHEAD = 1000


def curve(*items: Item) -> np.ndarray:
    sums = np.zeros(BUCKETS, np.uint64)
    for item in items:
        sums[bucket(item.key)] += np.uint64(item.size)
    return sums


def controller(policy: Policy, *capacities: int) -> tuple[Controller, Ledger]:
    ledger = Ledger(capacities)
    return Controller(Residency(100), ledger, policy), ledger


def test_granules_take_space_one_by_one_and_never_too_much() -> None:
    made, ledger = controller(FirstCome(), BIG.size + 10 * OVERHEAD)
    parts = made.parts
    admission = made.begin_part(BIG, overhead=OVERHEAD)
    assert admission is not None and (admission.tier, admission.blocks) == (1, None)
    assert ledger.used(1) == parts.held(BIG.ino) == OVERHEAD
    assert parts.reserve(BIG.ino, 5 * BLOCK)
    assert (ledger.used(1), ledger.reserved(1)) == (OVERHEAD, 5 * BLOCK)
    parts.stored(BIG.ino, 5 * BLOCK)
    assert parts.held(BIG.ino) == ledger.used(1) == 5 * BLOCK + OVERHEAD
    assert not parts.reserve(BIG.ino, BIG.size)
    assert parts.reserve(BIG.ino, BLOCK)
    parts.cancel(1, BLOCK)
    parts.lost(BIG.ino, BLOCK)
    assert ledger.used(1) == 4 * BLOCK + OVERHEAD and ledger.reserved(1) == 0
    assert parts.bytes(1) == ledger.used(1) and parts.inos(1) == [BIG.ino]


def test_a_drop_releases_the_space_also_while_granules_are_written() -> None:
    made, ledger = controller(FirstCome(), 2 * BIG.size)
    dropped: list[int] = []
    made.parts.on_drop = dropped.append
    made.begin_part(BIG, overhead=OVERHEAD)
    made.parts.reserve(BIG.ino, BLOCK)
    assert made.dropped(BIG.ino, BIG.size) == 1
    assert dropped == [BIG.ino] and ledger.used(1) == 0
    made.parts.cancel(1, BLOCK)
    assert ledger.reserved(1) == 0
    assert made.dropped(BIG.ino, BIG.size) == SOURCE
    assert made.parts.tier_of(BIG.ino) == SOURCE and made.parts.held(BIG.ino) == 0


def test_a_file_has_a_whole_copy_or_a_partial_one() -> None:
    made, ledger = controller(FirstCome(), 3 * BIG.size)
    assert made.begin_part(BIG, overhead=OVERHEAD)
    assert made.begin_part(BIG, overhead=OVERHEAD) is None
    assert made.is_placed(BIG.ino) and made.opened(BIG) is None and made.warm(BIG) is None
    made.dropped(BIG.ino, BIG.size)
    promote = made.opened(BIG)
    assert promote is not None
    assert made.begin_part(BIG, overhead=OVERHEAD) is None
    made.committed(BIG, promote.tier)
    assert made.begin_part(BIG, overhead=OVERHEAD) is None
    assert ledger.used(1) == BIG.size


def test_partial_copies_are_the_first_that_leave_for_written_files() -> None:
    made, _ = controller(FirstCome(), 3 * BIG.size)
    other = Item(Ino(1), BLOCK, 5)
    assert made.opened(other)
    made.committed(other, 1)
    assert made.begin_part(BIG, overhead=OVERHEAD)
    assert list(made.copies(1)) == [BIG.ino, other.ino]


def test_a_policy_knows_the_bytes_that_a_partial_copy_uses() -> None:
    lru = Lru()
    made, _ = controller(lru, 110 * BLOCK)
    made.begin_part(BIG, overhead=OVERHEAD)
    made.parts.reserve(BIG.ino, BLOCK)
    made.parts.stored(BIG.ino, BLOCK)
    made.parts.used(BIG.ino)
    assert lru._copies[BIG.ino] == (BLOCK + OVERHEAD, 1)


def test_a_complete_one_is_counted_as_the_whole_copy() -> None:
    residency, ledger = Residency(10), Ledger([2 * BIG.size])
    made = Controller(residency, ledger, FirstCome())
    made.begin_part(BIG, overhead=OVERHEAD)
    made.parts.reserve(BIG.ino, BIG.size)
    made.parts.stored(BIG.ino, BIG.size)
    made.part_completed(BIG.ino)
    assert residency.tier_of(BIG.ino) == 1 and ledger.used(1) == BIG.size
    assert len(made.parts) == 0
    assert made.dropped(BIG.ino, BIG.size) == 1 and ledger.used(1) == 0


@pytest.mark.parametrize("fits", [2, 49.5, 99])
def test_a_file_larger_than_the_tier_gets_the_blocks_that_fit(fits: float) -> None:
    capacity = int(fits * BLOCK) + OVERHEAD
    made, _ = controller(NoEvict(curve(BIG), [capacity]), capacity)
    admission = made.begin_part(BIG, overhead=OVERHEAD)
    assert admission is not None and admission.blocks is not None
    assert len(admission.blocks) == 100 and sum(admission.blocks) == int(fits)
    for _ in range(int(fits)):
        assert made.parts.reserve(BIG.ino, BLOCK)
        made.parts.stored(BIG.ino, BLOCK)
    assert not made.parts.reserve(BIG.ino, BLOCK)
    # The same blocks at the next mount, whatever it holds.
    for held in (OVERHEAD, OVERHEAD + int(fits) * BLOCK):
        again, _ = controller(NoEvict(curve(BIG), [capacity]), capacity)
        again.parts.load(BIG, tier=1, overhead=OVERHEAD, held=held)
        assert again.parts.admission(BIG.ino).blocks == admission.blocks


def test_a_share_is_what_the_policy_does_not_give_to_whole_files() -> None:
    small = Item(Ino(3), 20 * BLOCK, 78)
    capacity = 50 * BLOCK
    made, _ = controller(NoEvict(curve(BIG, small), [capacity]), capacity)
    admission = made.begin_part(BIG, overhead=0)
    assert admission is not None and admission.blocks is not None
    assert sum(admission.blocks) == 30
    # A second such file finds nothing left, and the small one its place.
    assert made.begin_part(Item(Ino(4), BIG.size, 79), overhead=0) is None
    assert made.opened(small) is not None


def test_a_file_that_the_policy_leaves_at_the_source_has_no_partial_copy() -> None:
    first, second = Item(Ino(3), 20 * BLOCK, 78), Item(Ino(4), 20 * BLOCK, 79)
    made, _ = controller(NoEvict(curve(first, second), [30 * BLOCK]), 30 * BLOCK)
    admitted = [made.begin_part(item, overhead=0) is not None for item in (first, second)]
    assert sorted(admitted) == [False, True]


def test_lru_evicts_a_partial_copy_as_a_whole() -> None:
    made, ledger = controller(Lru(), 110 * BLOCK)
    dropped: list[int] = []
    made.parts.on_drop = dropped.append
    made.begin_part(BIG, overhead=0)
    made.parts.reserve(BIG.ino, 30 * BLOCK)
    made.parts.stored(BIG.ino, 30 * BLOCK)
    promote = made.opened(Item(Ino(5), 90 * BLOCK, 5))
    assert promote is not None and promote.evict == (BIG.ino,) and dropped == [BIG.ino]
    assert ledger.used(1) == 0
    # No copy is removed for a partial one.
    made.committed(promote.item, 1)
    assert made.begin_part(BIG, overhead=0) is None
