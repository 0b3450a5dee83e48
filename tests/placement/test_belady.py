"""Eviction by next use, compared with Belady's rule as the textbook has it."""

from __future__ import annotations

import math
import random
import tracemalloc
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from monarch.config.settings import ForesightSettings
from monarch.foresight.announced import Announcer
from monarch.foresight.foresight import Foresight
from monarch.foresight.messages import Piece
from monarch.foresight.uses import KnownUses
from monarch.placement import belady
from monarch.placement.belady import Belady, ByUse
from monarch.placement.policy import Item
from monarch.types import ROOT_INO, Attributes, Ino
from tests.placement.simulate import Mount, belady_hits, items_of

JOB = 7
FILES, EPOCHS = 400, 6


class Tree:
    """Files in one directory, numbered from 2 on."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.entries = max(item.ino for item in items)
        self._sizes = {item.ino: item.size for item in items}

    def parent(self, slot: Ino) -> Ino:
        return ROOT_INO

    def path(self, ino: Ino) -> bytes:
        return b""

    def attributes(self, ino: Ino) -> Attributes:
        return Attributes(
            ino, ROOT_INO, 0o100644, 1, 0, 0, self._sizes.get(ino, 0), 0, 0, ino, 2, 0
        )

    def level(self, directory: Ino, depth: int) -> range:
        return range(2, self.entries + 1)

    def count_files(self, slots: range) -> int:
        return len(slots)


class Job:
    """A data set, tiers, and a job that reads it. ``announce`` sends the next part of its order."""

    def __init__(self, policy: str, sizes: Sequence[int], capacities: Sequence[int]) -> None:
        self.items = items_of(sizes)
        self.by_ino = {item.ino: item for item in self.items}
        self.foresight = Foresight(Tree(self.items), ForesightSettings(ahead=True))
        self.mount = Mount(
            policy, self.items, capacities, uses=KnownUses(self.foresight, with_learned=True)
        )
        self._announced = 0
        self._by = Announcer(1, 1, 1)
        self.promotions = 0

    @property
    def replaced(self) -> int:
        policy = self.mount.policy
        assert isinstance(policy, Belady)
        return policy.report().replaced_files

    def announce(self, order: Sequence[Ino]) -> None:
        if not self._announced:
            self.foresight.announced.begin(self._by, 1)
        for start in range(0, len(order), 97):
            part = array("I", order[start : start + 97])
            self.foresight.announced.extend(self._by, Piece(1, self._announced, part))
            self._announced += len(part)

    def read(self, order: Sequence[Ino]) -> list[bool]:
        hits = []
        for ino in order:
            passed = self.mount.read([self.by_ino[ino]])
            self.promotions += len(passed.promotions)
            self.foresight.opened(ino, JOB)
            hits += passed.hits
        return hits


def orders(kind: str, seed: int) -> list[list[Ino]]:
    """Epochs of a data set."""
    rng, files = random.Random(seed), [Ino(2 + n) for n in range(FILES)]
    if kind == "shuffled":
        return [rng.sample(files, FILES) for _ in range(EPOCHS)]
    if kind == "same":
        return [files] * EPOCHS
    if kind == "one of two nodes":
        return [rng.sample(files, FILES)[::2] for _ in range(EPOCHS)]
    assert kind == "with replacement"
    weights = [1 / (1 + n % 40) for n in range(FILES)]
    return [rng.choices(files, weights, k=FILES) for _ in range(EPOCHS)]


@pytest.mark.promise(188)
@pytest.mark.parametrize("kind", ["shuffled", "same", "with replacement"])
@pytest.mark.parametrize("policy", ["no_evict", "first_come", "lru"])
def test_with_a_known_order_the_hits_are_those_of_belady(kind: str, policy: str) -> None:
    """The tiers hold half of the data set, and two epochs are known."""
    for seed in range(2):
        epochs = orders(kind, seed)
        job = Job(policy, [10] * FILES, [10 * FILES // 8, 3 * 10 * FILES // 8])
        job.announce([ino for epoch in epochs for ino in epoch])
        hits = job.read([ino for epoch in epochs for ino in epoch])
        best = belady_hits([ino for epoch in epochs for ino in epoch], FILES // 2)
        # A fixed share is spread over the pass, and filled up in the second one.
        spread = FILES // 40 if (kind, policy) == ("same", "no_evict") else 0
        assert sum(best) - spread <= sum(hits) <= sum(best)
        if kind != "with replacement":
            assert job.replaced == 0, "each pass has as many hits with any copies"
            assert job.promotions == FILES // 2 or policy == "lru"


@pytest.mark.promise(188)
@pytest.mark.parametrize("kind", ["shuffled", "one of two nodes", "with replacement"])
def test_two_known_epochs_suffice(kind: str) -> None:
    """The order of the next epoch is announced when an epoch begins. A file that is read by this
    node in only some epochs is kept if the next epoch has it."""
    for seed in range(3):
        epochs = orders(kind, seed)
        capacity = len(epochs[0]) // 4
        job, without = (Job("no_evict", [10] * FILES, [10 * capacity]) for _ in range(2))
        hits = without_hits = 0
        job.announce(epochs[0])
        for now, following in zip(epochs, [*epochs[1:], []], strict=True):
            job.announce(following)
            hits += sum(job.read(now))
            without_hits += sum(without.read(now))
        best = sum(belady_hits([ino for epoch in epochs for ino in epoch], capacity))
        assert 0.98 * best <= hits <= best
        if kind == "shuffled":
            assert hits == best and job.replaced == 0
        else:
            assert hits > 1.2 * without_hits


def test_in_an_order_that_stays_the_same_the_hits_are_spread_over_the_pass() -> None:
    """So that they overlap with the misses (ADR 1)."""
    job = Job("no_evict", [10] * FILES, [10 * FILES // 2])
    order = [Ino(2 + n) for n in range(FILES)]
    job.announce(order * 3)
    hits = [job.read(order) for _ in range(3)]
    assert FILES // 2 - FILES // 40 <= sum(hits[1]) <= sum(hits[2]) == FILES // 2
    halves = sum(hits[2][: FILES // 2]), sum(hits[2][FILES // 2 :])
    assert min(halves) > 0.4 * max(halves)


def test_the_hits_of_such_an_order_are_spread_also_while_another_job_reads() -> None:
    """It reads files that no tier has a place for, in an unknown order."""
    sizes = [10] * FILES + [10**6] * FILES
    job = Job("no_evict", sizes, [10 * FILES // 2])
    order = [Ino(2 + n) for n in range(FILES)]
    job.announce(order * 3)
    hits = [[job.read([ino, Ino(ino + FILES)])[0] for ino in order] for _ in range(3)]
    assert FILES // 2 - FILES // 40 <= sum(hits[1]) <= sum(hits[2]) == FILES // 2
    halves = sum(hits[2][: FILES // 2]), sum(hits[2][FILES // 2 :])
    assert min(halves) > 0.4 * max(halves)


def test_with_an_unknown_order_all_is_as_with_the_other_policy() -> None:
    for policy in ("no_evict", "first_come", "lru"):
        job = Job(policy, [10] * FILES, [10 * FILES // 2])
        plain = Mount(policy, job.items, [10 * FILES // 2])
        for epoch in orders("shuffled", 3):
            hits = job.read(epoch)
            assert hits == plain.read([job.by_ino[ino] for ino in epoch]).hits
        assert job.mount.resident() == plain.resident()


def test_a_learned_order_keeps_its_copies_with_lru() -> None:
    """LRU alone has no hit in a cyclic order of more files than it holds."""
    job = Job("lru", [10] * FILES, [10 * FILES // 2])
    plain = Mount("lru", job.items, [10 * FILES // 2])
    order = orders("shuffled", 1)[0]
    hits = [sum(job.read(order)) for _ in range(6)]
    assert hits[0] == 0
    assert hits[-2:] == [FILES // 2] * 2
    assert sum(sum(plain.read([job.by_ino[ino] for ino in order]).hits) for _ in range(6)) == 0


def test_files_of_several_sizes_leave_in_the_order_of_their_next_use() -> None:
    """More bytes are read from copies than with a fixed set, and no tier is overfilled."""
    rng = random.Random(5)
    sizes = [rng.randrange(1, 60) for _ in range(FILES)]
    capacities = [sum(sizes) // 16, sum(sizes) // 8]
    epochs = orders("with replacement", 5)
    job = Job("no_evict", sizes, capacities)
    plain = Mount("no_evict", job.items, capacities)
    order = [ino for epoch in epochs for ino in epoch]
    job.announce(order)
    hits = job.read(order)
    plain_hits = plain.read([job.by_ino[ino] for ino in order]).hits
    size = lambda found: sum(job.by_ino[i].size for i, hit in zip(order, found, strict=True) if hit)  # noqa: E731
    assert size(hits) > 1.5 * size(plain_hits)
    for tier, capacity in enumerate(capacities, 1):
        assert job.mount.ledger.used(tier) <= capacity


def test_copies_of_an_order_that_has_ended_leave_for_files_that_the_policy_admits() -> None:
    """The tier has room for half of the files. Those of the first quarter are read in a known
    order, and fill it; then all are read in an unknown one."""
    job = Job("no_evict", [10] * FILES, [10 * FILES // 4])
    first = [Ino(2 + n) for n in range(FILES // 2)]
    job.announce(first * 2)
    job.read(first)
    plain = Mount("no_evict", job.items, [10 * FILES // 4])
    plain.read(job.items)
    assert job.mount.resident() != plain.resident()
    job.foresight.announced.end(job.foresight.announced.key_of(Announcer(1, 1, 1), 1))
    for seed in range(2):
        job.read(orders("shuffled", seed)[0])
    assert job.mount.resident() == plain.resident()


def test_an_order_that_begins_renews_few_copies_for_one_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of all copies has ended, so none has a known use. Then another order begins, which
    has a use for each: a decision for one file renews some of them, and the next ones the others.
    """
    monkeypatch.setattr(belady, "_MOST_RENEWED", 8)
    by_use, uses = ByUse(), {Ino(ino): 1000.0 - ino for ino in range(2, 102)}
    for ino in uses:
        by_use.put(ino, math.inf)
    asked: list[Ino] = []

    def next_use(ino: Ino) -> float:
        asked.append(ino)
        return uses[ino]

    by_use.renewals = 8
    assert by_use.farthest(next_use) is None and len(asked) == 8
    assert by_use.farthest(next_use) is None and len(asked) == 8
    for _ in range(20):
        by_use.renewals = 8
        found = by_use.farthest(next_use)
    assert found == (2, 998.0)


def test_the_memory_for_next_uses_does_not_grow_with_the_epochs() -> None:
    """The next uses of a job that trains for weeks advance with each open."""
    copies, by_use = 100, ByUse()
    uses: dict[Ino, float] = {}

    def read(opens: range) -> None:
        for time in opens:
            ino = Ino(2 + time * 37 % copies)
            uses[ino] = float(time + copies)
            by_use.put(ino, uses[ino])
            if not time % 7:
                by_use.renewals = 8
                assert by_use.farthest(uses.__getitem__) == (ino, uses[ino])

    read(range(10_000))
    tracemalloc.start()
    try:
        read(range(10_000, 60_000))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 500 * copies


class Passed(OrderedDict[Any, Any]):
    """Counts the entries that are passed to find some."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            Passed.count += 1
            yield key

    def items(self) -> Any:
        return ((key, self[key]) for key in self)


def test_each_of_many_copies_without_a_known_use_is_found_in_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They leave one after the other. A dict passes the places of all that have left before."""
    monkeypatch.setattr(belady, "OrderedDict", Passed)
    by_use, copies = ByUse(), [Ino(ino) for ino in range(2, 1002)]
    for ino in copies:
        by_use.put(ino, math.inf)
    Passed.count = 0
    by_use.renewals = 8
    for ino in copies:
        assert by_use.farthest(lambda _: math.inf) == (ino, math.inf)
        by_use.discard(ino)
    assert Passed.count == len(copies)


def test_each_of_many_copies_of_an_order_that_has_ended_is_found_in_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As above, for files that the policy admits in their place."""
    monkeypatch.setattr(belady, "OrderedDict", Passed)
    job = Job("no_evict", [10] * FILES, [10 * FILES // 4])
    first = [Ino(2 + n) for n in range(FILES // 2)]
    job.announce(first * 2)
    job.read(first)
    job.foresight.announced.end(job.foresight.announced.key_of(Announcer(1, 1, 1), 1))
    Passed.count = 0
    job.read(orders("shuffled", 1)[0])
    assert 0 < job.replaced == Passed.count


@pytest.mark.promise(188)
@pytest.mark.parametrize("policy", ["no_evict", "first_come", "lru"])
def test_copies_of_a_job_that_was_killed_leave_for_those_of_the_next_job(policy: str) -> None:
    """The first job ends in its first epoch, with the tiers full of files that it would have read
    again. So their recorded uses are sooner than those of the second job's files."""
    job = Job(policy, [10] * FILES, [10 * FILES // 4])
    rng, files = random.Random(1), [Ino(2 + n) for n in range(FILES)]
    first, second = files[: FILES // 2], files[FILES // 2 :]
    order = [ino for _ in range(2) for ino in rng.sample(first, len(first))]
    job.announce(order)
    job.read(order[: FILES // 2])
    announced = job.foresight.announced
    announced.end(announced.key_of(Announcer(1, 1, 1), 1))
    epochs = [rng.sample(second, len(second)) for _ in range(3)]
    announced.begin(Announcer(2, 2, 2), 1)
    entries = array("I", [ino for epoch in epochs for ino in epoch])
    announced.extend(Announcer(2, 2, 2), Piece(1, 0, entries))
    hits = [sum(job.read(epoch)) for epoch in epochs]
    assert hits == [0, FILES // 4, FILES // 4]


@pytest.mark.promise(188)
@pytest.mark.parametrize("policy", ["no_evict", "first_come", "lru"])
def test_copies_of_a_job_that_is_stopped_leave_for_those_of_a_job_that_reads(policy: str) -> None:
    """As by SIGSTOP, for longer than a minute, with the tiers full of files that it would read
    again."""
    job = Job(policy, [10] * FILES, [10 * FILES // 4])
    rng, files = random.Random(1), [Ino(2 + n) for n in range(FILES)]
    first, second = files[: FILES // 2], files[FILES // 2 :]
    order = [ino for _ in range(2) for ino in rng.sample(first, len(first))]
    job.announce(order)
    job.read(order[: FILES // 2])
    announced = job.foresight.announced
    key = announced.key_of(Announcer(1, 1, 1), 1)
    announced.mark(key, is_idle=True)
    epochs = [rng.sample(second, len(second)) for _ in range(3)]
    announced.begin(Announcer(2, 2, 2), 1)
    entries = array("I", [ino for epoch in epochs for ino in epoch])
    announced.extend(Announcer(2, 2, 2), Piece(1, 0, entries))
    hits = [sum(job.read(epoch)) for epoch in epochs]
    assert hits == [0, FILES // 4, FILES // 4]
    assert announced.next_use(order[-1]) == math.inf
    announced.mark(key, is_idle=False)
    assert announced.next_use(order[-1]) < math.inf
