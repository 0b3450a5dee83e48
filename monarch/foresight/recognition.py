"""Recognises the order of a window of opens by hypothesis tests.

A *position* is the place of a file in some order of ``n`` files: that of the snapshot, or that of
the last epoch. The null hypothesis of each test is that the positions of a window are drawn
uniformly at random. The tests do not depend on how many workers open files in turn: workers of a
``DataLoader`` permute a window, but do not spread it.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Literal

Pattern = Literal["unknown", "sequential", "strided", "same order", "shuffled", "skewed"]

# Opens in a window, and the least number of files for which patterns are recognised.
WINDOW = 64
LEAST_FILES = 64
_LEAST_WINDOW = 16

# The share of a window that is ignored at each end: it may be noise, such as another program that
# opens files. A twentieth of noise exceeds it in one window of 2,000.
_NOISE = 0.1

# Error rates of the tests of one window. A stream is tested once a window for weeks, and a wrong
# "local" costs bytes at the source; a wrong "not uniform" only delays.
_ALPHA_LOCAL = 1e-9
_ALPHA_UNIFORM = 1e-3
_ALPHA_ADVANCES = 1e-3
_ALPHA_REPEATS = 1e-4

# The places that a reader may be found to leave out before one: more are between two readers.
_MOST_LEFT_OUT = 3

# A step of the readers above which an order counts as strided.
_STRIDED = 1.5
# The share of the gaps of a strided order that must be equal to the stride.
_EQUAL_GAPS = 0.6


def window_of(n: int) -> int:
    """The number of opens in a window for ``n`` files: small sets have short windows, so that they
    are recognised before they have been read."""
    return max(_LEAST_WINDOW, min(WINDOW, n // 4))


@dataclass(frozen=True, slots=True)
class Locality:
    """The part of an order that a window covers, without noise: positions ``low`` to ``high``."""

    low: int
    high: int
    middle: int


def locality(positions: Sequence[int], n: int) -> Locality | None:
    """Where the positions lie, if they are too close together for a random choice of ``n``.

    The distance of two order statistics of m uniform numbers, k ranks apart, is Beta(k, m + 1 - k)
    distributed (David and Nagaraja, Order Statistics, 2.5), so P(distance <= x) is the probability
    of at least k successes in m trials of probability x.
    """
    m = len(positions)
    ordered = sorted(positions)
    cut = int(m * _NOISE)
    low, high = ordered[cut], ordered[m - 1 - cut]
    # The positions are whole numbers: two neighbours are one place apart.
    if (high - low + 1) / n >= _local_share(m, m - 1 - 2 * cut):
        return None
    return Locality(low, high, ordered[m // 2])


def is_uniform(positions: Sequence[int], n: int) -> bool:
    """Whether the window passes as uniformly random in random order: the Kolmogorov-Smirnov test
    of the positions, and the number of ascents, whose variance is (m + 1) / 12 (Knuth, The Art of
    Computer Programming 3, 5.1.3)."""
    m = len(positions)
    # The distances are in ranks. Those of whole numbers are half a place too long.
    scale = m / n
    ahead = [position * scale - rank for rank, position in enumerate(sorted(positions))]
    if max(max(ahead), 1 - scale - min(ahead)) > m * _uniform_distance(m):
        return False
    deviation = abs(_excess_ascents(positions))
    return math.erfc(max(0.0, deviation - 0.5) / math.sqrt(2)) >= _ALPHA_UNIFORM


def advances(positions: Sequence[int], before: Sequence[int]) -> bool:
    """Whether the window continues in its order, and is no random choice of one part of it.

    Either files that are neighbours are opened one after the other more often than by chance: each
    of several readers advances in a part of its own, so the ascents of the inverse order count, of
    this window and the one ``before``. Or the window is further than that one, by the rank sum test
    (Mann and Whitney, Annals of Mathematical Statistics 18, 1947): many readers that open one file
    each permute a window.
    """
    both = list(dict.fromkeys((*before, *positions)))
    times = sorted(range(len(both)), key=both.__getitem__)
    excess = max(_excess_ascents(times), _excess_rank(positions, before))
    return math.erfc(excess / math.sqrt(2)) / 2 < _ALPHA_ADVANCES


def _excess_rank(positions: Sequence[int], before: Sequence[int]) -> float:
    """The pairs of ``before`` and ``positions`` that ascend, above their mean, in standard
    deviations of two random choices of the same positions."""
    m, n = len(positions), len(before)
    if not m or not n:
        return 0.0
    ordered = sorted(before)
    pairs = sum(bisect_left(ordered, position) for position in positions)
    return (pairs - m * n / 2) / math.sqrt(m * n * (m + n + 1) / 12)


def _excess_ascents(numbers: Sequence[int]) -> float:
    """The ascents of a permutation above their mean, in standard deviations of a random one."""
    m = len(numbers)
    ascents: int = sum(map(operator.lt, numbers, numbers[1:]))
    return (ascents - (m - 1) / 2) / math.sqrt((m + 1) / 12)


def stride(positions: Sequence[int]) -> tuple[int, int]:
    """The step of a local window and the remainder of its positions: (1, 0) for one that leaves no
    position out regularly."""
    places = sorted(positions)
    gaps = sorted(map(operator.sub, places[1:], places))
    # If most gaps are equal, the middle one is among them.
    step = gaps[len(gaps) // 2] if gaps else 1
    if step < _STRIDED or gaps.count(step) < _EQUAL_GAPS * len(gaps):
        return 1, 0
    remainder, matching = Counter(place % step for place in places).most_common(1)[0]
    return (step, remainder) if matching >= (1 - 2 * _NOISE) * len(places) else (1, 0)


def left_out(
    places: Sequence[int],
    read: Set[int],
    order: Sequence[int],
    *,
    step: int = 1,
    share: float = 1.0,
) -> int:
    """The places of an ``order`` of positions that its readers leave out: those right before each
    of ``places`` with a position that is not in ``read``. Several readers count as one. Places are
    ``step`` apart, and a ``share`` of them has files."""
    count, most = 0, math.ceil(_MOST_LEFT_OUT / share)
    for place in places:
        if place >= step and order[place - step] in read:
            # The usual case, which takes no loop.
            continue
        # No file is left out before the first one.
        for before in range(place - step, max(-1, place - step * most - 1), -step):
            if order[before] in read:
                break
            count += 1
    return count


def is_skewed(opens: int, repeats: int, n: int) -> bool:
    """Whether files come again too often for ``opens`` draws of ``n`` with equal weights: then the
    number of repeats is about Poisson distributed, with the mean opens - n (1 - (1 - 1/n)**opens)
    (Feller, An Introduction to Probability Theory 1, IV.2)."""
    if repeats <= _NOISE * opens:
        return False
    mean = opens + n * math.expm1(opens * math.log1p(-1 / n))
    return poisson_tail(mean, repeats) < _ALPHA_REPEATS


def binomial_tail(trials: int, least: int, probability: float) -> float:
    """P(at least ``least`` successes) of a binomial distribution."""
    if least <= 0 or probability >= 1:
        return 1.0
    if probability <= 0:
        return 0.0
    hit, miss = math.log(probability), math.log1p(-probability)
    return math.fsum(
        math.exp(math.log(math.comb(trials, k)) + k * hit + (trials - k) * miss)
        for k in range(least, trials + 1)
    )


def poisson_tail(mean: float, least: int) -> float:
    """P(at least ``least``) of a Poisson distribution; above 500 by the normal approximation."""
    if least <= 0:
        return 1.0
    if mean > 500:
        return 0.5 * math.erfc((least - 0.5 - mean) / math.sqrt(2 * mean))
    below = term = math.exp(-mean)
    for k in range(1, least):
        term *= mean / k
        below += term
        if k > mean and term < 1e-18:
            break
    return max(0.0, 1.0 - below)


@cache
def _local_share(m: int, ranks: int) -> float:
    """The share of an order in which ``ranks`` + 1 of m uniform positions lie with the probability
    ``_ALPHA_LOCAL``."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if binomial_tail(m, ranks, middle) < _ALPHA_LOCAL:
            low = middle
        else:
            high = middle
    return low


@cache
def _uniform_distance(m: int) -> float:
    """The Kolmogorov-Smirnov distance that m uniform numbers exceed with the probability
    ``_ALPHA_UNIFORM``: the first term of the limit, with Stephens' correction for small m (Journal
    of the Royal Statistical Society B 32, 1970)."""
    limit = math.sqrt(-math.log(_ALPHA_UNIFORM / 2) / 2)
    return limit / (math.sqrt(m) + 0.12 + 0.11 / math.sqrt(m))
