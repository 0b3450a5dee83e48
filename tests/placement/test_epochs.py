"""Epochs are found from the opens alone."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Iterable

import pytest

from monarch.placement.epochs import EpochCount, Epochs
from monarch.types import Ino


def opened(epochs: Epochs, inos: Iterable[int], *, hit: bool = False) -> None:
    for ino in inos:
        epochs.opened(Ino(ino), hit)


def counts(epochs: Epochs) -> list[int]:
    return [epoch.opens for epoch in epochs.epochs()]


@pytest.mark.parametrize("files", [2, 3, 4, 5, 10, 63, 64, 65, 127, 128, 129, 1000])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_pass_is_an_epoch_of_exactly_its_opens_and_hits(files: int, shuffle: bool) -> None:
    epochs = Epochs(files)
    order = list(range(1, files + 1))
    rng = random.Random(files)
    for number in range(1, 6):
        if shuffle:
            rng.shuffle(order)
        for ino in order:
            epochs.opened(Ino(ino), hit=number > 1 and ino % 2 == 0)
    hits = files // 2
    assert epochs.epochs() == [
        EpochCount(number, files, hits if number > 1 else 0) for number in range(1, 6)
    ]
    assert epochs.epochs()[-1].number == 5


def test_a_file_opened_a_hundred_times_ends_no_epoch() -> None:
    epochs = Epochs(1000)
    opened(epochs, [1] * 100)
    opened(epochs, range(2, 501))
    opened(epochs, [500] * 100)
    opened(epochs, range(501, 1001))
    assert counts(epochs) == [1199]
    opened(epochs, range(1, 1001))
    assert counts(epochs) == [1199, 1000]


def read_by(epochs: Epochs, together: bool) -> Callable[[Iterable[int]], None]:
    """Records opens, all together or one by one."""
    if together:
        return lambda inos: epochs.opened_all(array("I", inos))
    return lambda inos: opened(epochs, inos)


@pytest.mark.parametrize("together", [False, True])
def test_files_that_are_gone_do_not_hide_the_next_epoch(together: bool) -> None:
    """Most of the files are removed after the first epoch; some of them in the run that may begin
    the second one."""
    epochs = Epochs(1000)
    read = read_by(epochs, together)
    read(range(1, 101))
    read([5, 6, 7])
    for ino in [*range(5, 91), *range(5, 91), 5000]:
        epochs.left(Ino(ino))
    assert counts(epochs) == [103]
    for _ in range(2):
        read([*range(1, 5), *range(91, 101)])
    assert counts(epochs) == [100, 17, 14]


@pytest.mark.parametrize("together", [False, True])
def test_a_run_whose_files_are_gone_ends_with_the_next_new_file(together: bool) -> None:
    epochs = Epochs(100)
    opened(epochs, range(1, 41))
    opened(epochs, [40, 40], hit=True)
    epochs.left(Ino(40))
    read = read_by(epochs, together)
    read(range(41, 61))
    assert not epochs.is_undecided
    read([*range(1, 40), *range(41, 61)])
    assert epochs.epochs() == [EpochCount(1, 62, 2), EpochCount(2, 59, 0)]


def test_sporadic_opens_of_the_same_files_stay_in_their_epoch() -> None:
    epochs = Epochs(1000)
    rng = random.Random(3)
    expected = []
    for _ in range(3):
        opens = 0
        for ino in range(1, 1001):
            again = rng.sample(range(1, ino), 3) if 200 < ino < 1000 and ino % 5 == 0 else []
            opened(epochs, [ino, *again])
            opens += 1 + len(again)
        expected.append(opens)
    assert counts(epochs) == expected


def test_a_job_over_other_files_starts_within_the_epoch_and_its_second_pass_ends_it() -> None:
    epochs = Epochs(1000)
    opened(epochs, range(1, 501))
    opened(epochs, range(501, 1001))
    opened(epochs, range(501, 1001))
    assert counts(epochs) == [1000, 500]


def test_one_file_alone_has_no_epochs() -> None:
    epochs = Epochs(10)
    opened(epochs, [7] * 5, hit=True)
    assert epochs.epochs() == [EpochCount(1, 5, 5)]


def test_nothing_opened_is_an_empty_first_epoch() -> None:
    assert Epochs(10).epochs() == [EpochCount(1, 0, 0)]


def test_the_last_hundred_epochs_are_kept_and_the_marks_may_come_round() -> None:
    epochs = Epochs(5)
    for _ in range(600):
        opened(epochs, [1, 2, 3, 4])
    assert epochs.epochs()[-1].number == 600
    assert [epoch.number for epoch in epochs.epochs()] == list(range(501, 601))
    assert set(counts(epochs)) == {4}


def test_an_inode_not_seen_for_many_epochs_is_new_again() -> None:
    epochs = Epochs(100)
    opened(epochs, [100])
    for _ in range(256):
        opened(epochs, [1, 2, 3, 4])
    before = epochs.epochs()[-1].number
    opened(epochs, [100])
    opened(epochs, [1])
    assert epochs.epochs()[-1].number == before
    assert counts(epochs)[-1] == 6


def test_one_byte_for_each_inode_and_no_more() -> None:
    epochs = Epochs(1_000_000)
    opened(epochs, range(1, 100_001))
    opened(epochs, range(1, 64))
    assert sys.getsizeof(epochs._seen_in) + sys.getsizeof(epochs._run) < 1_010_000


@pytest.mark.parametrize("seed", range(20))
def test_opens_that_are_counted_together_count_as_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    files = rng.choice([1, 2, 5, 70, 300, 1000])
    inos = [Ino(ino) for ino in opens_of_passes(rng, files)]
    one_by_one, together = Epochs(files), Epochs(files)
    opened(one_by_one, inos)
    while inos:
        count = rng.choice([1, 3, 100, 256, 700])
        together.opened_all(array("I", inos[:count]))
        inos = inos[count:]
    assert together.epochs() == one_by_one.epochs()
    assert together.is_undecided == one_by_one.is_undecided


def opens_of_passes(rng: random.Random, files: int) -> list[int]:
    """Passes, most of them complete, in which some files are opened again."""
    found: list[int] = []
    for _ in range(6):
        order = list(range(1, files + 1))
        rng.shuffle(order)
        for ino in order[: rng.choice([files, files, files // 2])]:
            found += [ino] * rng.choice([1, 1, 1, 1, 2])
    return found
