"""Whether what was measured again and again stays what it was, said in words with numbers.

A line is laid through the samples by Theil and Sen: the median of the slopes of all pairs, which
a few samples that lie far off do not move. What it says has grown over the whole time must be more
than a tolerance, and the last third must lie above the first by as much: then it grows.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Fewer say nothing.
_FEWEST = 8
# Pairs grow with the square of the samples; a few hundred samples say what all of them do.
_MOST = 300


@dataclass(frozen=True, slots=True)
class Verdict:
    """``flat`` is None where there was too little to tell. ``words`` is a sentence for a person."""

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
    """Whether ``values`` at ``times`` (seconds, or whatever ``per`` counts in) are flat.

    What came before ``warm_up`` is left out. Growth up to ``tolerance``, or up to ``share`` of
    their median, is none.
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
