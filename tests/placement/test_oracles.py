"""Admission by frequency and the recognition of scans, compared with independent models of them."""

from __future__ import annotations

import random
from collections import OrderedDict
from itertools import accumulate

import pytest

from monarch.placement.admission import Admission
from monarch.placement.frequency import MOST, Sketch
from monarch.placement.ledger import Ledger
from monarch.placement.parts import Parts
from monarch.placement.policy import Item, Lru, Placement, Victim
from monarch.placement.replacement import Replacement
from monarch.placement.residency import Residency
from monarch.types import Ino
from tests.foresight.streams import SIZE, Tree, workers
from tests.placement.readers import Readers
from tests.placement.scans import ScanByDefinition, histories
from tests.placement.tinylfu import ExactCounts, lru_hits, perfect_hits

FILES, OPENS = 800, 6000
# Two opens for each column of the sketch. It has at least a column for each file: a power of two.
SAMPLE = 2 * 1024


def tree() -> Tree:
    return Tree((4, FILES // 4), (1, 400))


def zipf(files: range, exponent: float, count: int, rng: random.Random) -> list[int]:
    ranked = rng.sample(files, len(files))
    weights = list(accumulate(rank**-exponent for rank in range(1, len(files) + 1)))
    return rng.choices(ranked, cum_weights=weights, k=count)


def late(hits: list[bool]) -> float:
    """The share of hits in the second half."""
    return sum(hits[len(hits) // 2 :]) / (len(hits) - len(hits) // 2)


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.4])
def test_a_sketch_counts_as_exact_counters_do_through_all_resets(exponent: float) -> None:
    files = range(1, FILES + 1)
    sketch, exact = Sketch(FILES), ExactCounts(SAMPLE)
    excess = looks = 0
    for number, ino in enumerate(zipf(files, exponent, 10_000, random.Random(1))):
        sketch.opened(Ino(ino))
        exact.add(ino)
        if number % 997 == 0:
            differences = [sketch.count(Ino(each)) - exact.of(each) for each in files]
            assert min(differences) >= 0, "a count is never too low"
            excess += sum(differences)
            looks += len(differences)
    assert exact.resets >= 8
    assert excess <= 0.1 * looks


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.2])
@pytest.mark.parametrize("capacity", [40, 200])
def test_lru_by_frequency_has_the_hits_of_exact_tinylfu(exponent: float, capacity: int) -> None:
    readers = Readers("lru", capacity, tree())
    order = zipf(readers.tree.files[0], exponent, OPENS, random.Random(capacity))
    found = late(readers.read(order))
    assert readers.pattern() == "skewed"
    exact = late(lru_hits(order, capacity, ExactCounts(SAMPLE)))
    # The publication's own sample: ten accesses for each item that fits.
    published = late(lru_hits(order, capacity, ExactCounts(10 * capacity)))
    assert abs(found - exact) <= 0.02
    assert found >= published - 0.02
    assert found > late(lru_hits(order, capacity, None))


@pytest.mark.parametrize(("exponent", "capacity"), [(0.8, 200), (1.0, 40), (1.2, 40), (1.2, 200)])
def test_a_policy_that_evicts_nothing_comes_to_keep_the_most_frequent_files(
    exponent: float, capacity: int
) -> None:
    readers = Readers("no_evict", capacity, tree())
    order = zipf(readers.tree.files[0], exponent, 2 * OPENS, random.Random(capacity))
    found, best = readers.read(order), perfect_hits(order, capacity)
    last = slice(-OPENS // 2, None)
    assert sum(found[last]) >= sum(best[last]) - 0.04 * OPENS / 2


def test_another_popularity_is_followed_as_by_exact_tinylfu() -> None:
    rng, readers = random.Random(3), Readers("lru", 80, tree())
    files = readers.tree.files[0]
    order = [ino for _ in range(3) for ino in zipf(files, 1.0, OPENS // 2, rng)]
    found = late(readers.read(order))
    # The counts of the two are halved at other times.
    assert abs(found - late(lru_hits(order, 80, ExactCounts(SAMPLE)))) <= 0.06


class AlwaysSkewed:
    def skewed(self, ino: Ino) -> range:
        return range(FILES)

    def is_scan(self, ino: Ino) -> bool:
        return False


@pytest.mark.parametrize(("opens", "is_replaced"), [(MOST - 2, True), (MOST + 5, False)])
def test_files_whose_counts_are_at_the_limit_do_not_replace_each_other(
    opens: int, is_replaced: bool
) -> None:
    admission = Admission(AlwaysSkewed(), FILES, by_frequency=True, spares_copies=True)
    one, other = Ino(1), Ino(2)
    for _ in range(opens):
        admission.opened(one)
        admission.opened(other)
    ledger, residency = Ledger([SIZE]), Residency(FILES)
    replacement = Replacement(residency, ledger, Parts(residency, ledger, Lru()))
    placement = Placement(1, (Victim(other, SIZE),))
    item = Item(one, SIZE, 10**9)
    found = admission.decide(item, placement, range(1, 2), replacement, lambda ino: False)
    # With equal counts the open that is being decided makes the difference.
    assert found == (placement if is_replaced else None)


SCAN, JOB = 7, 8
# The first opens in a directory, of which docs/foresight.md says that they have no order.
UNKNOWN = 128
# An order that changes is followed by this many opens that may be taken for the old one.
CHANGED = 256


@pytest.mark.parametrize("seed", range(6))
def test_a_scan_is_what_the_definition_says_after_the_first_opens(seed: int) -> None:
    """Each open of each history is compared, but those for which the answer has just changed."""
    rng = random.Random(seed)
    compared = {True: 0, False: 0}
    for name, opens in histories(Tree((1, FILES)).files[0], rng):
        readers, definition = Readers("lru", FILES, Tree((1, FILES))), ScanByDefinition()
        for number, (process, ino) in enumerate(opens):
            if definition.is_settled(UNKNOWN if definition.is_scan else CHANGED):
                found = readers.foresight.is_scan(Ino(ino))
                assert found == definition.is_scan, f"{name}, open {number}"
                compared[found] += 1
            readers.foresight.opened(Ino(ino), JOB, process)
            definition.add(process, ino)
    assert min(compared.values()) > 1000


def lru_beside_a_scan(of_job: list[int], scanned: list[int], admitted: set[int]) -> int:
    """The hits of a job in an LRU cache of 400 files, if each of its opens is followed by one of a
    scan, whose files get places only at the opens that are ``admitted``."""
    cache, hits = OrderedDict.fromkeys(sorted(set(of_job))), 0
    for number, (mine, other) in enumerate(zip(of_job, scanned, strict=True)):
        hits += mine in cache
        for ino in (mine, other) if number in admitted else (mine,):
            cache[ino] = None
            cache.move_to_end(ino)
        while len(cache) > 400:
            cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("seed", range(3))
def test_a_scan_beside_a_job_costs_it_the_opens_before_it_is_recognised(seed: int) -> None:
    """The model knows which process scans, and that the first opens in a directory, and in the
    next one, have no order yet."""
    rng = random.Random(seed)
    readers = Readers("lru", 400, tree())
    own, scanned = readers.tree.files[1], list(readers.tree.files[0])
    readers.read(own, JOB, processes=4)
    readers.read(own, JOB, processes=4)
    of_job = [ino for _ in range(2) for ino in workers(rng.sample(own, len(own)), 4, 32, rng)]
    hits = 0
    for mine, other in zip(of_job, scanned, strict=True):
        hits += readers.read([mine], JOB, processes=4)[0]
        readers.read([other], SCAN)
    unknown = {*range(UNKNOWN), *range(FILES // 4, FILES // 4 + UNKNOWN)}
    known = lru_beside_a_scan(of_job, scanned, set())
    assert known == len(of_job)
    assert lru_beside_a_scan(of_job, scanned, unknown) <= hits < known
    assert readers.admission.spared >= FILES - len(unknown)
    assert hits > 1.5 * lru_beside_a_scan(of_job, scanned, set(range(FILES)))


@pytest.mark.parametrize("seed", range(4))
def test_no_training_job_is_taken_for_a_scan(seed: int) -> None:
    rng = random.Random(seed)
    files = tree().files[0]
    in_order = list(files)
    jobs = {
        "shuffled": (rng.sample(files, FILES), 1),
        "shuffled by workers": (workers(rng.sample(files, FILES), 4, 32, rng), 4),
        "in order by workers": (workers(in_order, 4, 32, rng), 4),
        "skewed": (zipf(files, 1.0, FILES, rng), 1),
        "one of four nodes, shuffled": (rng.sample(files, FILES // 4), 1),
    }
    for name, (order, processes) in jobs.items():
        readers = Readers("lru", 100, tree())
        readers.read(order, JOB, processes=processes)
        assert readers.admission.spared == 0, name
