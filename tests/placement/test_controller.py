"""Promotion, deferral and failure: the space held meanwhile, and that no file is forgotten."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from monarch.placement.controller import Controller, Promote
from monarch.placement.ledger import Ledger
from monarch.placement.policy import Item, Lru
from monarch.placement.residency import Residency
from monarch.types import Ino
from tests.placement.simulate import Mount, items_of, policy_named, predicted


def promoted(promote: Promote | None) -> Promote:
    assert promote is not None
    return promote


def test_an_item_is_promoted_once_however_often_it_is_opened() -> None:
    mount = Mount("first_come", items_of([10, 10]), [100])
    first = promoted(mount.controller.opened(mount.items[0]))
    assert (first.ino, first.size, first.tier, first.evict) == (2, 10, 1, ())
    assert mount.controller.opened(mount.items[0]) is None
    assert mount.residency.is_copying(first.ino) and mount.residency.is_wanted(first.ino)
    mount.commit(first)
    assert mount.controller.opened(mount.items[0]) is None
    assert not mount.residency.is_copying(first.ino) and not mount.residency.is_wanted(first.ino)
    assert (mount.ledger.used(1), mount.ledger.reserved(1)) == (10, 0)


@pytest.mark.promise(180)
def test_a_copy_is_in_the_table_before_the_mark_of_a_running_one_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The datapath reads both meanwhile, and fetches a file that has neither."""
    mount = Mount("first_come", items_of([10]), [100])
    tiers, end_copy = list[int](), mount.residency.end_copy

    def ended(ino: Ino) -> None:
        tiers.append(mount.residency.tier_of(ino))
        end_copy(ino)

    monkeypatch.setattr(mount.residency, "end_copy", ended)
    mount.commit(promoted(mount.controller.opened(mount.items[0])))
    assert tiers == [1]


def test_deferred_files_reserve_no_room_and_get_their_turn() -> None:
    items = items_of([60, 60])
    mount = Mount("first_come", items, [100])
    mount.controller.deferred(promoted(mount.controller.opened(items[0])))
    assert mount.ledger.reserved(1) == 0
    assert mount.residency.wanted == 1
    by_ino = {item.ino: item for item in items}
    again = promoted(mount.controller.next_wanted(by_ino.get))
    assert again.item == items[0]
    assert mount.ledger.reserved(1) == 60
    assert mount.controller.next_wanted(by_ino.get) is None


def test_a_deferred_item_that_is_opened_again_need_not_wait_for_its_turn() -> None:
    mount = Mount("first_come", items_of([10]), [100])
    mount.controller.deferred(promoted(mount.controller.opened(mount.items[0])))
    assert mount.controller.opened(mount.items[0]) is not None


def test_with_a_queue_of_one_every_item_that_fits_becomes_resident() -> None:
    items = items_of([10] * 50)
    mount = Mount("first_come", items, [300])
    queue: list[Promote] = []
    for item in items:
        promote = mount.controller.opened(item)
        if promote is not None and queue:
            mount.controller.deferred(promote)
        elif promote is not None:
            queue.append(promote)
    assert mount.residency.wanted == 50
    by_ino = {item.ino: item for item in items}
    while queue:
        mount.commit(queue.pop())
        promote = mount.controller.next_wanted(by_ino.get)
        if promote is not None:
            queue.append(promote)
    assert mount.residency.resident_files(1) == 30
    assert mount.residency.wanted == 0


def test_a_copy_that_always_fails_does_not_keep_the_others_from_their_turn() -> None:
    items = items_of([10] * 3)
    mount = Mount("first_come", items, [100])
    for item in items:
        mount.controller.deferred(promoted(mount.controller.opened(item)))
    by_ino = {item.ino: item for item in items}
    turns = []
    for _ in range(6):
        promote = promoted(mount.controller.next_wanted(by_ino.get))
        turns.append(promote.ino)
        mount.controller.abandoned(promote.item, promote.tier, retry=True)
    assert Counter(turns) == {2: 2, 3: 2, 4: 2}


@pytest.mark.finding("C3")
def test_files_read_again_are_offered_until_there_is_room_and_nothing_is_evicted_for_them() -> None:
    items = items_of([60, 60])
    mount = Mount("first_come", items, [100])
    promote = promoted(mount.controller.opened(items[0]))
    assert mount.controller.offered(items[0]) is None
    mount.ledger.close(1)
    mount.controller.abandoned(promote.item, promote.tier, retry=True)
    # Its turn comes while the tier is out, and it is wanted no more.
    assert mount.controller.next_wanted({items[0].ino: items[0]}.get) is None
    assert mount.residency.wanted == 0
    assert mount.controller.offered(items[0]) is None
    mount.ledger.open(1)
    mount.commit(promoted(mount.controller.offered(items[0])))
    assert mount.controller.offered(items[0]) is None
    assert mount.controller.offered(items[1]) is None
    lru = Mount("lru", items, [100])
    lru.read(items[:1])
    assert lru.controller.offered(items[1]) is None
    assert lru.residency.tier_of(items[0].ino) == 1


def test_a_cancelled_copy_is_not_wanted_and_the_file_may_be_opened_again() -> None:
    mount = Mount("first_come", items_of([10]), [100])
    promote = promoted(mount.controller.opened(mount.items[0]))
    mount.controller.abandoned(promote.item, promote.tier, retry=False)
    assert mount.residency.wanted == 0
    assert mount.ledger.reserved(1) == 0
    assert mount.controller.opened(mount.items[0]) is not None


def test_an_inode_that_is_no_file_any_more_loses_its_mark() -> None:
    mount = Mount("first_come", items_of([10]), [100])
    mount.controller.deferred(promoted(mount.controller.opened(mount.items[0])))
    assert mount.controller.next_wanted(lambda _: None) is None
    assert mount.residency.wanted == 0


def test_a_dropped_copy_frees_its_room_and_is_promoted_anew() -> None:
    mount = Mount("first_come", items_of([100]), [100])
    mount.read(mount.items)
    assert mount.controller.dropped(Ino(2), 100) == 1
    assert mount.controller.dropped(Ino(2), 100) == 0
    assert mount.ledger.free(1) == 100
    assert mount.controller.opened(mount.items[0]) is not None


def test_warming_places_what_the_hash_would_not_admit_also_after_waiting() -> None:
    items = items_of([10] * 100)
    mount = Mount("no_evict", items, [500])
    outside = next(item for item in items if item.ino not in predicted(items, [500]))
    assert mount.controller.opened(outside) is None
    mount.controller.deferred(promoted(mount.controller.warm(outside)))
    promote = promoted(mount.controller.next_wanted({outside.ino: outside}.get))
    mount.commit(promote)
    assert mount.residency.tier_of(outside.ino) == 1
    assert mount.controller.warm(outside) is None


def test_warming_never_goes_past_the_capacity() -> None:
    items = items_of([10] * 100)
    mount = Mount("no_evict", items, [500])
    promotes = [promote for item in items if (promote := mount.controller.warm(item))]
    assert len(promotes) == 50
    assert mount.ledger.free(1) == 0


def test_an_eviction_makes_room_before_the_copy_starts() -> None:
    items = items_of([60, 60])
    mount = Mount("lru", items, [100])
    mount.read(items[:1])
    promote = promoted(mount.controller.opened(items[1]))
    assert promote.evict == (items[0].ino,)
    assert mount.residency.tier_of(items[0].ino) == 0
    assert (mount.ledger.used(1), mount.ledger.reserved(1)) == (0, 60)


def test_a_copy_being_made_is_never_evicted() -> None:
    residency, ledger, lru = Residency(3), Ledger([100]), Lru()
    controller = Controller(residency, ledger, lru)
    controller.load(np.array([2]), np.array([60]), tier=1)
    residency.start_copy(Ino(2))
    assert controller.opened(Item(Ino(3), 60, 3)) is None
    assert residency.tier_of(Ino(2)) == 1
    assert not residency.is_wanted(Ino(3))


def test_copies_of_an_earlier_run_count_and_can_be_evicted() -> None:
    items = items_of([60, 60])
    mount = Mount("lru", items, [100])
    mount.controller.load(np.array([2]), np.array([60]), tier=1)
    assert mount.ledger.used(1) == 60
    assert mount.controller.opened(items[0]) is None
    assert promoted(mount.controller.opened(items[1])).evict == (2,)


def test_an_answer_to_no_promotion_is_refused() -> None:
    mount = Mount("first_come", items_of([10]), [100])
    with pytest.raises(ValueError, match="inode 2 is not being copied"):
        mount.controller.committed(mount.items[0], 1)
    promote = promoted(mount.controller.opened(mount.items[0]))
    mount.controller.deferred(promote)
    with pytest.raises(ValueError, match="inode 2 is not being copied"):
        mount.controller.deferred(promote)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """A transfer engine that does everything it may do, in any order."""

    @initialize(
        name=st.sampled_from(["no_evict", "first_come", "lru"]),
        sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12),
        capacities=st.lists(st.integers(0, 120), min_size=1, max_size=3),
    )
    def mount(self, name: str, sizes: list[int], capacities: list[int]) -> None:
        self.items = {item.ino: item for item in items_of(sizes)}
        self.residency = Residency(len(sizes) + 1)
        self.ledger = Ledger(capacities)
        policy = policy_named(name, list(self.items.values()), capacities)
        self.controller = Controller(self.residency, self.ledger, policy)
        self.flying: dict[Ino, Promote] = {}
        self.copies: dict[Ino, int] = {}

    def some_item(self, pick: int) -> Item:
        return self.items[Ino(2 + pick % len(self.items))]

    def take(self, promote: Promote | None) -> None:
        if promote is not None:
            assert promote.ino not in self.flying
            self.flying[promote.ino] = promote
            for ino in promote.evict:
                assert self.copies.pop(ino) == promote.tier

    @rule(pick=st.integers(0, 11))
    def open(self, pick: int) -> None:
        self.take(self.controller.opened(self.some_item(pick)))

    @rule(pick=st.integers(0, 11))
    def warm(self, pick: int) -> None:
        self.take(self.controller.warm(self.some_item(pick)))

    @rule()
    def next_wanted(self) -> None:
        self.take(self.controller.next_wanted(self.items.get))

    @rule(pick=st.integers(0, 11), how=st.sampled_from(["commit", "defer", "retry", "give up"]))
    def settle(self, pick: int, how: str) -> None:
        if not self.flying:
            return
        promote = self.flying.pop(sorted(self.flying)[pick % len(self.flying)])
        if how == "commit":
            self.controller.committed(promote.item, promote.tier)
            self.copies[promote.ino] = promote.tier
        elif how == "defer":
            self.controller.deferred(promote)
        else:
            self.controller.abandoned(promote.item, promote.tier, retry=how == "retry")
        assert self.residency.is_wanted(promote.ino) == (how in ("defer", "retry"))

    @rule(pick=st.integers(0, 11))
    def drop(self, pick: int) -> None:
        item = self.some_item(pick)
        assert self.controller.dropped(item.ino, item.size) == self.copies.pop(item.ino, 0)

    @rule(tier=st.integers(1, 3), in_service=st.booleans())
    def service(self, tier: int, in_service: bool) -> None:
        if tier in self.ledger.tiers:
            (self.ledger.open if in_service else self.ledger.close)(tier)

    @invariant()
    def accounts_are_exact_and_no_tier_is_overfull(self) -> None:
        for tier in self.ledger.tiers:
            held = [ino for ino, where in self.copies.items() if where == tier]
            coming = [flight.size for flight in self.flying.values() if flight.tier == tier]
            assert self.ledger.used(tier) == sum(self.items[ino].size for ino in held)
            assert self.ledger.reserved(tier) == sum(coming)
            assert self.ledger.used(tier) + self.ledger.reserved(tier) <= self.ledger.capacity(tier)
            assert self.residency.resident_files(tier) == len(held)
        for ino in self.items:
            assert self.residency.tier_of(ino) == self.copies.get(ino, 0)
            assert self.residency.is_copying(ino) == (ino in self.flying)
            assert not (self.residency.tier_of(ino) and self.residency.is_wanted(ino))

    def teardown(self) -> None:
        if not hasattr(self, "controller"):
            return
        for flight in self.flying.values():
            self.controller.abandoned(flight.item, flight.tier, retry=False)
        for ino in list(self.copies):
            self.controller.dropped(ino, self.items[ino].size)
        for tier in self.ledger.tiers:
            assert self.ledger.used(tier) == self.ledger.reserved(tier) == 0
            assert self.residency.resident_files(tier) == 0


AnyOrderOfEvents.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
