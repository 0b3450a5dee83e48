"""How rules for paths are carried out: pinned files are fetched last, excluded copies removed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from monarch.daemon.ruled_files import RuledFiles
from monarch.placement.rules import Part, Rule, Rules
from monarch.types import Ino

VAL, RAW = Rule("val", True, False, None), Rule("raw", False, True, None)
NVME = Rule("x", False, False, 2)
LARGE = range(1000, 2000)


class Files:
    """Rules and tiers as the task sees them: the files of each rule, and the tier of each copy."""

    def __init__(self, files: dict[Rule, list[int]], copies: dict[int, int]) -> None:
        self.rules = tuple(files)
        self.copies = copies
        self._files = files
        self.searches = 0

    def measure(self) -> Iterator[list[Part]]:
        for rule, inos in self._files.items():
            yield [Part(rule, np.array(inos))]
            yield []

    @property
    def misses_pinned(self) -> bool:
        pinned = (ino for rule, inos in self._files.items() if rule.pin for ino in inos)
        return any(ino not in self.copies for ino in pinned)

    def pinned(self) -> Iterator[list[Ino]]:
        self.searches += 1
        for rule, inos in self._files.items():
            if rule.pin:
                for start in range(0, len(inos), 10):
                    part = inos[start : start + 10]
                    yield [Ino(ino) for ino in part if not self.copies.get(ino)]


class Foreseen:
    def __init__(self, inos: list[int]) -> None:
        self.inos = inos
        self.answered: list[tuple[int, int]] = []

    def next(self, most: int) -> list[Ino]:
        given, self.inos = self.inos[:most], self.inos[most:]
        return [Ino(ino) for ino in given]

    def is_foreseen(self, ino: Ino) -> bool:
        return True

    def fetched(self, ino: Ino, nbytes: int) -> None:
        self.answered.append((ino, nbytes))

    def refused(self, ino: Ino) -> None:
        self.answered.append((ino, 0))


class Rig:
    def __init__(self, files: Files, foreseen: Foreseen) -> None:
        self.files, self.foreseen = files, foreseen
        self.counted = self.woken = 0
        self.ruled = RuledFiles(
            cast(Rules, files),
            foreseen,
            tier_of=lambda ino: files.copies.get(ino, 0),
            is_large=LARGE.__contains__,
            evict=lambda ino: files.copies.pop(ino),
            counted=self._count,
        )
        self.ruled.wake = self._wake

    def _count(self) -> None:
        self.counted += 1

    def _wake(self) -> None:
        self.woken += 1


@pytest.fixture
def clock() -> MockClock:
    return MockClock(autojump_threshold=0)


async def started(rig: Rig, nursery: trio.Nursery) -> None:
    nursery.start_soon(rig.ruled.run)
    await wait_all_tasks_blocked()


def test_pinned_files_are_given_out_after_all_that_is_foreseen() -> None:
    rig = Rig(Files({VAL: [1, 2, 3]}, {2: 1}), Foreseen([8, 9]))

    async def steps() -> None:
        async with trio.open_nursery() as nursery:
            await started(rig, nursery)
            assert rig.woken == 1
            assert [rig.ruled.next(1), rig.ruled.next(5)] == [[8], [9, 1, 3]]
            rig.ruled.fetched(Ino(8), 10)
            rig.ruled.fetched(Ino(1), 10)
            rig.ruled.refused(Ino(9))
            rig.ruled.refused(Ino(3))
            assert rig.foreseen.answered == [(8, 10), (9, 0)]
            assert rig.ruled.next(5) == []
            nursery.cancel_scope.cancel()

    trio.run(steps)


def test_of_large_pinned_files_one_is_given_out_at_a_time() -> None:
    rig = Rig(Files({VAL: [1, 1001, 1002, 2]}, {}), Foreseen([]))

    async def steps() -> None:
        async with trio.open_nursery() as nursery:
            await started(rig, nursery)
            assert rig.ruled.next(9) == [1, 1001]
            assert rig.ruled.next(9) == []
            rig.ruled.fetched(Ino(1001), 5)
            assert rig.ruled.next(9) == [1002, 2]
            nursery.cancel_scope.cancel()

    trio.run(steps)


def test_a_pinned_file_that_could_not_be_fetched_is_tried_again_later(clock: MockClock) -> None:
    files = Files({VAL: list(range(1, 31))}, {})
    rig = Rig(files, Foreseen([]))

    async def steps() -> None:
        async with trio.open_nursery() as nursery:
            await started(rig, nursery)
            for ino in rig.ruled.next(100):
                rig.ruled.refused(ino)
            assert rig.ruled.next(100) == []
            await trio.sleep(700)
            again = rig.ruled.next(100)
            assert again == list(range(1, 31)) and files.searches == 2
            for ino in again:
                files.copies[ino] = 1
                rig.ruled.fetched(ino, 1)
            await trio.sleep(700)
            assert rig.ruled.next(100) == [] and files.searches == 2, "all are there"
            del files.copies[7]
            await trio.sleep(700)
            assert rig.ruled.next(100) == [7]
            nursery.cancel_scope.cancel()

    trio.run(steps, clock=clock)


def test_few_of_many_pinned_files_are_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch.daemon.ruled_files._MOST_WAITING", 20)
    rig = Rig(Files({VAL: list(range(1, 101))}, {}), Foreseen([]))
    seen: list[int] = []

    async def steps() -> None:
        async with trio.open_nursery() as nursery:
            await started(rig, nursery)
            while len(seen) < 100:
                given = rig.ruled.next(1000)
                assert 0 < len(given) <= 30
                seen.extend(given)
                for ino in given:
                    rig.ruled.fetched(ino, 1)
                await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(steps)
    assert seen == list(range(1, 101))


def test_copies_that_a_rule_does_not_allow_are_removed_and_the_rest_stays() -> None:
    files = Files({RAW: [1, 2], NVME: [3, 4, 5]}, {1: 1, 3: 1, 4: 2, 9: 1})
    rig = Rig(files, Foreseen([]))
    trio.run(rig.ruled.run)
    assert files.copies == {4: 2, 9: 1}
    assert rig.counted == 1


def test_without_rules_nothing_is_done() -> None:
    rig = Rig(Files({}, {1: 1}), Foreseen([7]))
    trio.run(rig.ruled.run)
    assert (rig.counted, rig.ruled.next(2)) == (0, [7])
