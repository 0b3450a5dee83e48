"""How often checkpoints are taken: CheckFreq's formula, and a run in virtual time."""

from __future__ import annotations

import math

import pytest

from monarch.frameworks.interval import FIRST_INTERVAL, Interval, choose_interval
from tests.equipment.checkpoint_runs import (
    FeedForward,
    InProportion,
    Ours,
    Outcome,
    P,
    Repository,
    Static,
    run,
)


@pytest.mark.parametrize(
    ("costs", "m", "seen_s", "interval"),
    [
        # Copied and written within the iteration: every iteration.
        ((0.1, 0.01, 0.02, 0.05, None), 1, 0.0, 1),
        # The measured case above: the write decides.
        ((0.044, 0.004, 0.003, 0.336, None), 1, 0.0, 8),
        ((0.044, 0.004, 0.003, 0.336, None), 2, 0.0, 4),
        # The copy does not fit behind forward and backward: 0.2 s are seen, the budget decides.
        ((0.1, 0.02, 0.28, 0.1, None), 1, 0.2, 58),
        # The same, but it was measured that no copy hides.
        ((0.1, 0.02, 0.28, 0.1, 0.28), 1, 0.28, 80),
        # The copy is seen, and the write decides.
        ((0.1, 0.02, 0.09, 0.61, None), 1, 0.01, 7),
    ],
)
def test_the_choice_follows_checkfreq(
    costs: tuple[float, float, float, float, float | None], m: int, seen_s: float, interval: int
) -> None:
    iteration_s, update_s, copy_s, write_s, visible_s = costs
    chosen = choose_interval(
        iteration_s=iteration_s,
        update_s=update_s,
        copy_s=copy_s,
        write_s=write_s,
        visible_s=visible_s,
        p=P,
        max_in_flight=m,
    )
    assert chosen == interval
    # Both promises: no checkpoint meets the one before it, and the budget is kept.
    assert m * interval * iteration_s + seen_s >= copy_s + write_s - 1e-9
    assert seen_s <= P * interval * iteration_s + 1e-9


@pytest.mark.parametrize(
    ("rule", "clean", "hiccup", "two"),
    [
        (Static, (116.7, 8, 149), (114.8, 8, 149), (37.7, 8, 149)),
        (Repository, (11.6, 32, 52), (11.4, 32, 52), (2.0, 18, 76)),
        (InProportion, (1.9, 52, 35), (1.9, 77, 30), (1.2, 36, 45)),
        (FeedForward, (1.9, 8, 101), (1.9, 8, 101), (0.9, 4, 202)),
    ],
)
def test_the_rules_compare_as_they_once_did(
    rule: type[Static],
    clean: tuple[float, int, int],
    hiccup: tuple[float, int, int],
    two: tuple[float, int, int],
) -> None:
    assert run(rule()) == Outcome(*clean)
    assert run(rule(), hiccup=True) == Outcome(*hiccup)
    assert run(rule(2), 2) == Outcome(*two)


@pytest.mark.parametrize(("m", "k"), [(1, 8), (2, 4)])
@pytest.mark.parametrize("hiccup", [False, True])
def test_storage_that_becomes_four_times_slower_costs_little_and_is_followed_back(
    m: int, k: int, hiccup: bool
) -> None:
    waiting = run(Ours(m), m, hiccup=hiccup)
    assert waiting.overhead <= 3
    assert waiting.k == k
    assert waiting.checkpoints >= 100 * m - 1
    # The promise of the Checkpointer is p and two points; what it does costs nothing.
    postponing = run(Ours(m), m, hiccup=hiccup, postpone=True)
    assert postponing.overhead <= 100 * P + 2
    assert postponing.overhead == 0
    assert postponing.k == k and postponing.checkpoints >= 97 * m


def test_an_interval_that_never_changes_fails_the_same_run() -> None:
    assert run(Static()).overhead > 100


def test_before_anything_is_known_a_checkpoint_comes_early() -> None:
    interval = Interval(p=P)
    assert interval.iterations == FIRST_INTERVAL
    interval.persisted(copy_s=1, write_s=100)
    assert interval.iterations == FIRST_INTERVAL, "no iteration was seen yet"


def fed(visible_s: float = 0.0) -> Interval:
    """After one interval of ten iterations of 0.1 s, and a checkpoint of 1 s."""
    interval = Interval(p=P)
    for _ in range(10):
        interval.iterated(0.1, update_s=0.01)
    interval.begun()
    interval.iterated(0.1, update_s=0.01, visible_s=visible_s)
    interval.persisted(copy_s=0.01, write_s=0.99)
    return interval


def window(interval: Interval, seconds: float, *, late: bool = False) -> int:
    """An interval whose iterations take ``seconds``, all but one beside a write."""
    interval.iterated(0.1)
    for _ in range(interval.iterations - 1):
        interval.iterated(seconds, quiet=False)
    interval.begun(late=late)
    return interval.iterations


def test_interference_that_lasts_three_intervals_makes_them_longer_and_its_end_shorter() -> None:
    interval = fed()
    assert interval.iterations == 10
    assert [window(interval, 0.12) for _ in range(7)] == [10, 10, 13, 13, 13, 16, 16]
    assert [window(interval, 0.1) for _ in range(3)] == [13, 10, 10]


def test_a_single_outlier_and_a_late_checkpoint_are_no_interference() -> None:
    interval = fed()
    seconds = [0.12, 0.12, 0.1, 0.12, 0.12, 0.1]
    assert {window(interval, each) for each in seconds} == {10}
    assert {window(interval, 0.5, late=True) for _ in range(5)} == {10}


def test_interference_that_never_ends_does_not_end_the_checkpoints() -> None:
    interval = fed()
    assert max(window(interval, 0.2) for _ in range(200)) == 80


def test_the_time_that_copies_take_from_the_training_stays_within_the_budget() -> None:
    interval = fed()
    for _ in range(3):
        for n in range(interval.iterations):
            interval.iterated(0.1, visible_s=0.0 if n else 0.14)
        interval.begun()
        interval.iterated(0.1)
        interval.persisted(copy_s=0.2, write_s=0.5)
    # 0.14 s in 40 iterations of 0.1 s are 3.5 %.
    assert interval.iterations == 40


@pytest.mark.parametrize(("p", "m"), [(0.0, 1), (-1.0, 1), (math.nan, 1), (0.1, 0)])
def test_a_budget_of_nothing_is_refused(p: float, m: int) -> None:
    with pytest.raises(ValueError, match="p must be above 0"):
        Interval(p=p, max_in_flight=m)
