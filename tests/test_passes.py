"""Many opens that are counted at once, compared with opens that are counted one by one."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest

from monarch.telemetry import passes
from monarch.telemetry.passes import Pass

FIRST = 7


@dataclass
class OneByOne:
    """What a pass counts, with sets and lists."""

    window_size: int
    files: int
    opens: int = 0
    seen: set[int] = field(default_factory=set)
    new: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    run_opens: int = 0
    repeats: int = 0
    window: list[int] = field(default_factory=list)
    last_window: list[int] = field(default_factory=list)
    windows: int = 0

    def opened(self, number: int) -> None:
        is_again = number in self.window
        if is_again and (number in self.run or len(self.seen) < self.files):
            return
        self._count(number)
        if self.window_size and not is_again:
            self.window.append(number)
        if len(self.window) == self.window_size > 0:
            self.last_window, self.window = self.window, []
            self.windows += 1

    def _count(self, number: int) -> None:
        self.opens += 1
        if number not in self.seen:
            self.seen.add(number)
            self.new.append(number)
            self.repeats += len(self.run)
            self.run, self.run_opens = [], 0
            return
        self.run_opens += 1
        if number not in self.run:
            self.run.append(number)

    @property
    def is_over(self) -> bool:
        return passes.ends_pass(len(self.run), len(self.seen))


def opens_of(rng: random.Random, files: int) -> list[int]:
    """Numbers of files, some of them again and again."""
    order = rng.sample(range(files), files)
    numbers = [number for number in order for _ in range(rng.choice([1, 1, 1, 2]))]
    for _ in range(rng.choice([0, 5, files // 3])):
        numbers.insert(rng.randrange(len(numbers) + 1), rng.choice(order[:5]))
    return numbers + rng.choices(order, k=files)


@pytest.mark.parametrize("seed", range(30))
def test_a_pass_counts_many_opens_as_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    files, size = rng.choice([1, 3, 60, 500]), rng.choice([0, 0, 1, 16, 64])
    numbers = opens_of(rng, files)
    opens = array("I", (FIRST + number for number in numbers))
    keep = rng.choice([0, size, len(opens)])
    model = OneByOne(size, files)
    now = Pass(
        first=FIRST,
        seen=bytearray(files),
        mark=3,
        window_size=size,
        opens=0,
        files=0,
        run=(),
        all_files=files,
    )
    at, windows, new = 0, 0, list[int]()
    while at < len(opens) and not passes.ends_pass(len(list(now.run)), now.files):
        some = opens[: rng.randrange(at + 1, len(opens) + 1)]
        before, at = at, now.count(some, at, keep=keep)
        assert at > before
        for number in numbers[before:at]:
            model.opened(number)
        new += now.new
        is_complete = size > 0 and len(list(now.window)) == size
        windows += now.windows + is_complete
        assert windows == model.windows
        assert list(now.window) == (model.last_window if is_complete else model.window)
        if now.windows and not is_complete:
            assert now.last_window == model.last_window
        assert (now.opens, now.files, now.repeats) == (model.opens, len(model.seen), model.repeats)
        assert (list(now.run), now.run_opens) == (model.run, model.run_opens)
        assert now.seen == bytes(3 * (number in model.seen) for number in range(files))
        assert at == len(some) or is_complete or model.is_over, "it stops for a reason"
        if is_complete:
            assert model.is_over or len(some) - at < keep
            # The caller ends the window.
            now.window = ()
    assert new == model.new


def test_numbers_that_are_out_of_range_are_refused() -> None:
    def counted(opens: list[int], at: int = 0, **fields: object) -> int:
        given = {"first": 5, "seen": bytearray(3), "mark": 1, "opens": 0, "files": 0, "run": ()}
        return Pass(**{**given, **fields}).count(array("I", opens), at)

    assert counted([5, 6, 7]) == 3
    assert counted([], 0) == 0
    for refused in ([4], [8], [0], [2**32 - 1]):
        with pytest.raises(ValueError):
            counted([5, *refused])
    with pytest.raises(ValueError):
        counted([5], 2)
    with pytest.raises(ValueError):
        counted([5], run=range(passes.MOST_RUN))
    with pytest.raises(ValueError):
        counted([5], window=(1, 2), window_size=2)
