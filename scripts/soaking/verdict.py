"""Whether a measured value grows over time, as a sentence with numbers.

A line is laid through the samples by the method of Theil and Sen: its slope is the median of the
slopes of all pairs, which a few outliers do not move. A value grows if both its growth along this
line and the difference between its last and its first third exceed a tolerance.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# With fewer samples there is no verdict.
_FEWEST = 8
# The number of pairs grows with the square of the samples; a few hundred samples are enough.
_MOST = 300


@dataclass(frozen=True, slots=True)
class Verdict:
    """``flat`` is None where there were too few samples. ``words`` is a sentence for people."""

    what: str
    flat: bool | None
    words: str
    first: float
    last: float
    slope: float


def theil_sen(times: Sequence[float], values: Sequence[float]) -> float:
    """The median slope of all pairs of samples; 0 if there are none."""
    step = max(1, len(times) // _MOST)
    points = list(zip(times, values, strict=True))[::step]
    slopes = [
        (later - earlier) / (end - begin)
        for number, (begin, earlier) in enumerate(points)
        for end, later in points[number + 1 :]
        if end > begin
    ]
    return statistics.median(slopes) if slopes else 0.0


def judge(
    what: str,
    times: Sequence[float],
    values: Sequence[float],
    *,
    warm_up: float,
    tolerance: float,
    share: float = 0.0,
    unit: str = "",
    per: tuple[float, str] = (3600.0, "hour"),
) -> Verdict:
    """Whether ``values`` at ``times`` (seconds, or the unit that ``per`` counts in) are flat.

    Samples before ``warm_up`` are left out. Growth up to ``tolerance``, or up to ``share`` of their
    median, counts as none.
    """
    kept = [(t, v) for t, v in zip(times, values, strict=True) if t >= warm_up]
    if len(kept) < _FEWEST:
        words = f"{what}: too few samples to tell ({len(kept)} after the warm-up)"
        return Verdict(what, None, words, 0.0, 0.0, 0.0)
    times, values = [t for t, _ in kept], [v for _, v in kept]
    third = len(values) // 3
    first, last = statistics.median(values[:third]), statistics.median(values[-third:])
    slope = theil_sen(times, values)
    grown = slope * (times[-1] - times[0])
    allowed = max(tolerance, share * statistics.median(values))
    flat = grown <= allowed or last - first <= allowed
    words = (
        f"{what}: {'flat' if flat else 'GROWS'}, {first:.4g} at first and {last:.4g}{unit} at last,"
        f" {slope * per[0]:+.3g}{unit} an {per[1]} over {len(values)} samples"
        f" (up to {allowed:.3g}{unit} over this time is called flat)"
    )
    return Verdict(what, flat, words, first, last, slope)
