"""The order in which files that wait for a place are fetched ahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import pytest

from monarch.transfer.waiting import Waiting
from monarch.types import Ino


def waiting(held: Counter[Hashable], **files: range) -> Waiting:
    made = Waiting(held)
    for reader, inos in files.items():
        for ino in inos:
            made.append(reader, Ino(ino))
    return made


def popped(files: Waiting, count: int) -> list[int]:
    return [int(files.pop()) for _ in range(count)]


def test_readers_take_turns_and_the_files_of_each_stay_in_their_order() -> None:
    files = waiting(Counter(), a=range(100, 1000), b=range(2, 5))
    assert files.first() == 100
    assert popped(files, 8) == [100, 2, 101, 3, 102, 4, 103, 104]
    assert len(files) == 900 + 3 - 8


def test_the_reader_of_which_the_fewest_bytes_are_held_is_the_next() -> None:
    held: Counter[Hashable] = Counter(a=500, b=200)
    files = waiting(held, a=range(10, 20), b=range(20, 30))
    assert popped(files, 3) == [20, 21, 22]
    held["b"] = 600
    assert popped(files, 2) == [10, 11]
    del held["a"], held["b"]
    assert sorted(popped(files, 2)) == [12, 23]


def test_files_that_are_not_expected_any_more_are_removed() -> None:
    files = waiting(Counter(), a=range(6), b=range(10, 12))
    assert sorted(files.keep(lambda ino: ino % 2 == 1)) == [0, 2, 4, 10]
    assert sorted(files) == [1, 3, 5, 11] and len(files) == 4
    assert sorted(files.keep(lambda ino: ino > 9)) == [1, 3, 5]
    assert popped(files, 1) == [11] and not files
    with pytest.raises(ValueError):
        files.first()
    files.append("a", Ino(1))
    files.clear()
    assert not len(files) and not list(files)
