"""What the benchmark concludes from its numbers, and when it says that it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import _bench

    module: ModuleType = _bench
    return module


def verdict(
    bench: ModuleType,
    values: Sequence[float],
    against: Sequence[float],
    *,
    bar: float | None = 1.1,
    more_is_better: bool = False,
) -> str:
    row = bench.Row("row", float, against=float, bar=bar, more_is_better=more_is_better)
    result: str = bench.Result(row, list(values), list(against)).verdict
    return result


def test_a_ratio_within_the_bar_is_good_and_one_beyond_it_is_missed(bench: ModuleType) -> None:
    assert verdict(bench, [1.05, 1.06, 1.04], [1, 1, 1]) == "good"
    assert verdict(bench, [1.15, 1.16, 1.14], [1, 1, 1]) == "missed"
    assert verdict(bench, [1.05, 1.06, 1.04], [1, 1, 1], more_is_better=True) == "missed"


def test_the_ratios_count_within_their_rounds_so_a_slow_round_proves_nothing(
    bench: ModuleType,
) -> None:
    assert verdict(bench, [1.05, 3.15, 2.1], [1, 3, 2]) == "good"


def test_ratios_that_scatter_by_more_than_a_tenth_give_no_verdict(bench: ModuleType) -> None:
    assert verdict(bench, [0.7, 1.0, 1.3], [1, 1, 1]) == "no verdict: CV 30%"


def test_fewer_than_three_rounds_give_no_verdict(bench: ModuleType) -> None:
    assert verdict(bench, [1.0, 1.0], [1, 1]) == "no verdict: fewer than 3 rounds"


def test_a_row_without_a_bar_is_told_and_not_judged(bench: ModuleType) -> None:
    assert verdict(bench, [9, 9, 9], [1, 1, 1], bar=None) == ""


def test_the_two_sides_of_a_row_take_turns_in_being_first(bench: ModuleType) -> None:
    order: list[str] = []

    def ours(lab: None) -> float:
        order.append("ours")
        return 2.0

    def theirs(lab: None) -> float:
        order.append("theirs")
        return 1.0

    row = bench.Row("row", ours, against=theirs)
    (result,) = bench.measure([row], lambda: None, 2)
    assert order == ["theirs", "ours", "ours", "theirs"]
    assert (result.values, result.against, result.ratios) == ([2, 2], [1, 1], [2, 2])


@pytest.mark.parametrize(
    ("value", "words"), [(0.01234, "0.0123"), (4.567, "4.57"), (1234.5, "1,234"), (14e4, "140k")]
)
def test_numbers_have_three_digits(bench: ModuleType, value: float, words: str) -> None:
    assert bench.number(value) == words
