"""Which copies leave for a file when reads are skewed, and when files are scanned once."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest

from monarch.foresight.announced import Announcer
from monarch.foresight.messages import Piece
from monarch.placement.frequency import MOST, Sketch
from monarch.types import Ino
from tests.foresight.streams import Tree, workers
from tests.placement.readers import Readers, lru, zipf

# Of one directory with 800 files.
FILES = 800
OPENS = 6000


def tree() -> Tree:
    return Tree((4, FILES // 4), (1, 400))


def share(hits: list[bool]) -> float:
    """The share of hits in the second half."""
    late = hits[len(hits) // 2 :]
    return sum(late) / len(late)


# --- Frequency ------------------------------------------------------------------------------------


def test_a_sketch_never_counts_too_few_opens_before_it_ages() -> None:
    rng = random.Random(1)
    sketch, opens = Sketch(1000), zipf(range(1, 1001), 2000, rng)
    for ino in opens:
        sketch.opened(Ino(ino))
    exact = Counter(opens)
    counted = {ino: sketch.count(Ino(ino)) for ino in range(1, 1001)}
    assert all(counted[ino] >= min(MOST, exact[ino]) for ino in counted)
    too_many = sum(counted[ino] > min(MOST, exact[ino]) for ino in counted)
    assert too_many <= 100, "collisions in all four rows are rare"


def test_the_counts_of_a_sketch_are_halved_and_never_pass_their_limit() -> None:
    sketch = Sketch(256)
    for _ in range(100):
        sketch.opened(Ino(7))
    assert sketch.count(Ino(7)) == MOST
    for number in range(2 * 256 - 100):
        sketch.opened(Ino(1000 + number % 3))
    assert sketch.count(Ino(7)) in (MOST // 2, MOST // 2 + 1)
    for number in range(2 * 256 * 4):
        sketch.opened(Ino(1000 + number % 3))
    assert sketch.count(Ino(7)) == 0


@pytest.mark.parametrize(("files", "most"), [(1, 1 << 10), (10_000, 1 << 16), (10**9, 1 << 22)])
def test_the_memory_of_a_sketch_is_bounded(files: int, most: int) -> None:
    assert sum(len(row) for row in Sketch(files)._rows) <= most


@pytest.mark.promise(193)
@pytest.mark.parametrize(
    ("policy", "capacity", "gain"),
    [("lru", 40, 0.03), ("lru", 200, 0.01), ("no_evict", 40, 0.06), ("no_evict", 200, 0.02)],
)
def test_a_skewed_stream_hits_more_often_than_with_lru(
    policy: str, capacity: int, gain: float
) -> None:
    rng = random.Random(capacity)
    readers = Readers(policy, capacity, tree())
    order = zipf(readers.tree.files[0], OPENS, rng)
    found = share(readers.read(order))
    assert readers.pattern() == "skewed"
    assert found >= share(lru(order, capacity)) + gain
    assert readers.admission.replaced > 0 and readers.admission.refused > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_skewed_stream_stays_recognised(seed: int) -> None:
    readers = Readers("lru", 40, tree())
    opens = zipf(readers.tree.files[0], OPENS, random.Random(seed))
    readers.read(opens[:1000])
    patterns: Counter[str] = Counter()
    for start in range(1000, OPENS, 50):
        readers.read(opens[start : start + 50])
        patterns[readers.pattern()] += 1
    assert patterns == {"skewed": (OPENS - 1000) // 50}


def test_a_shuffled_job_after_skewed_reads_is_recognised() -> None:
    rng = random.Random(9)
    readers = Readers("lru", 40, tree())
    files = readers.tree.files[0]
    readers.read(zipf(files, 2000, rng))
    assert readers.pattern() == "skewed"
    for _ in range(3):
        readers.read(rng.sample(files, FILES))
    assert readers.pattern() == "shuffled"


def test_with_the_key_switched_off_the_policy_decides_alone() -> None:
    order = zipf(tree().files[0], OPENS // 2, random.Random(3))
    readers = Readers("lru", 40, tree(), frequency=False)
    assert readers.read(order) == lru(order, 40)
    hash_only = Readers("no_evict", 40, tree(), frequency=False)
    hash_only.read(order)
    admitted = hash_only.resident()
    hash_only.read(order)
    assert hash_only.resident() == admitted


def test_when_other_files_become_popular_they_get_the_places() -> None:
    rng = random.Random(4)
    readers = Readers("no_evict", 40, tree())
    files = readers.tree.files[0]
    before = share(readers.read(zipf(files, OPENS, rng)))
    after = share(readers.read(zipf(files, 2 * OPENS, rng)))
    assert after >= before - 0.08


def test_files_that_are_read_once_take_no_place_of_files_that_are_read_often() -> None:
    rng = random.Random(5)
    readers = Readers("lru", 50, tree())
    files = readers.tree.files[0]
    hot = rng.sample(files, 40)
    readers.read(rng.choices(hot, k=1000))
    cold = [ino for ino in files if ino not in hot]
    mixed = [ino for ino in rng.sample(cold, 500) for ino in (ino, *rng.choices(hot, k=3))]
    readers.read(mixed)
    assert readers.pattern() == "skewed"
    assert len(readers.resident() & set(map(Ino, hot))) >= 39


def test_an_offer_that_may_remove_no_copy_counts_no_decision() -> None:
    readers = Readers("no_evict", 40, tree())
    readers.read(zipf(readers.tree.files[0], 2000, random.Random(8)))
    before = readers.admission.replaced, readers.admission.refused
    for item in readers.items.values():
        assert readers.controller.offered(item) is None or readers.ledger.room(1) >= 0
    assert (readers.admission.replaced, readers.admission.refused) == before


@pytest.mark.parametrize("policy", ["no_evict", "first_come"])
def test_hot_files_replace_copies_of_their_own_directory_only(policy: str) -> None:
    rng = random.Random(6)
    readers = Readers(policy, 300, tree())
    first, other = (set(map(Ino, files)) for files in readers.tree.files)
    readers.read(rng.sample(sorted(other), 100), job=2)
    readers.read(zipf(readers.tree.files[0], 2000, rng))
    before = readers.resident() & other
    bytes_before = readers.ledger.used(1)
    assert before
    readers.read(zipf(readers.tree.files[0], 3000, rng))
    assert readers.admission.replaced > 0
    assert readers.resident() & other == before
    assert readers.ledger.used(1) >= bytes_before
    assert readers.resident() & first


@pytest.mark.promise(193)
@pytest.mark.parametrize("policy", ["no_evict", "first_come", "lru"])
def test_other_streams_are_decided_as_without_frequency(policy: str) -> None:
    rng = random.Random(7)
    files = tree().files[0]
    shuffled = [ino for _ in range(3) for ino in workers(rng.sample(files, FILES), 4, 32, rng)]
    few = rng.sample(files, 100)
    for order in (shuffled, few):
        on, off = Readers(policy, 200, tree()), Readers(policy, 200, tree(), frequency=False)
        assert on.read(order) == off.read(order)
        assert on.resident() == off.resident()


# --- Scans ----------------------------------------------------------------------------------------

SCAN, JOB = 7, 8


def of_a_job(readers: Readers) -> set[Ino]:
    """Fills the tier with the 400 files of a job, and returns them."""
    files = readers.tree.files[1]
    for seed in range(2):
        readers.read(random.Random(seed).sample(files, len(files)), JOB)
    assert len(readers.resident()) == 400
    return readers.resident()


@pytest.mark.promise(194)
def test_a_scan_leaves_the_copies_of_a_job_in_place() -> None:
    readers = Readers("lru", 400, tree())
    before = of_a_job(readers)
    readers.read(readers.tree.files[0], SCAN)
    # Its order is recognised after a few windows of 64 opens, and again in the next directory.
    assert len(readers.resident() & before) >= 400 - 5 * 64
    assert readers.admission.spared == FILES - (400 - len(readers.resident() & before))


def test_with_the_key_switched_off_a_scan_removes_the_copies_of_a_job() -> None:
    readers = Readers("lru", 400, tree(), scans=False)
    before = of_a_job(readers)
    readers.read(readers.tree.files[0], SCAN)
    assert not readers.resident() & before


def test_a_scan_gets_copies_while_there_is_free_space() -> None:
    readers = Readers("lru", FILES, tree())
    readers.read(readers.tree.files[0], SCAN)
    assert len(readers.resident()) == FILES


@pytest.mark.promise(194)
@pytest.mark.parametrize("processes", [0, 2, 4])
def test_the_first_epoch_of_several_or_unknown_workers_in_order_gets_its_copies(
    processes: int,
) -> None:
    readers = Readers("lru", FILES, tree())
    of_a_job(readers)
    files = readers.tree.files[0]
    readers.read(files, SCAN, processes=processes)
    assert all(readers.read(files, SCAN, processes=processes)), "the second epoch hits"


@pytest.mark.promise(194)
def test_the_first_epoch_of_a_shuffled_job_gets_its_copies() -> None:
    readers = Readers("lru", FILES, tree())
    of_a_job(readers)
    files = readers.tree.files[0]
    readers.read(random.Random(1).sample(files, FILES), SCAN)
    assert all(readers.read(random.Random(2).sample(files, FILES), SCAN))


def test_one_process_that_reads_in_order_gets_its_copies_in_its_second_epoch() -> None:
    readers = Readers("lru", FILES, tree())
    of_a_job(readers)
    files = readers.tree.files[0]
    for _ in range(2):
        readers.read(files, SCAN)
    assert all(readers.read(files, SCAN)[128:]), "the third epoch hits"


def announce(readers: Readers, order: Sequence[int]) -> None:
    by, announced = Announcer(0, 1, 1), readers.foresight.announced
    announced.begin(by, 1)
    announced.extend(by, Piece(1, 0, array("I", order)))


@pytest.mark.promise(194)
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_job_that_has_announced_its_order_is_no_scan(epochs: int) -> None:
    readers = Readers("lru", FILES, tree())
    of_a_job(readers)
    files = list(readers.tree.files[0])
    announce(readers, files * epochs)
    readers.read(files, SCAN)
    assert readers.admission.spared == 0
    assert readers.resident() == set(files)


@pytest.mark.promise(194)
def test_a_scan_beside_a_job_that_has_announced_its_order_leaves_its_copies_in_place() -> None:
    readers = Readers("lru", 400, tree())
    before = of_a_job(readers)
    announce(readers, random.Random(3).sample(sorted(before), len(before)))
    readers.read(readers.tree.files[0], SCAN)
    assert len(readers.resident() & before) >= 400 - 5 * 64
    assert readers.admission.spared == FILES - (400 - len(readers.resident() & before))


@pytest.mark.promise(194)
def test_files_of_a_scan_that_another_job_has_announced_are_decided_as_such() -> None:
    readers = Readers("lru", 400, tree())
    of_a_job(readers)
    files = readers.tree.files[0]
    announced = set(random.Random(3).sample(files, FILES // 4))
    announce(readers, sorted(announced))
    readers.read(files[:600], SCAN)
    found = {ino for ino in files[600:] if readers.foresight.is_scan(Ino(ino))}
    assert found == set(files[600:]) - announced


def test_a_scan_of_files_that_another_job_reads_at_random_is_no_scan() -> None:
    readers = Readers("lru", FILES // 2, tree())
    files = readers.tree.files[0]
    for seed in range(2):
        readers.read(random.Random(seed).sample(files, FILES), JOB)
    readers.read(files, SCAN)
    assert readers.admission.spared == 0
