"""How measured values are summed up and written."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

MB = 1_000_000


def variation(values: Sequence[float]) -> float:
    """The coefficient of variation; 0 for fewer than two values, or if all are the same."""
    if len(set(values)) < 2:
        return 0.0
    return statistics.stdev(values) / abs(statistics.mean(values))


def number(value: float) -> str:
    """Three digits, as people write them: 0.0123, 1.23, 45.6, 140k."""
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def with_unit(value: float, unit: str) -> str:
    return f"{number(value)} {unit}"


def spread(values: Sequence[float]) -> str:
    """The smallest and the largest value, and the variation."""
    if not values:
        return ""
    return f"{number(min(values))} - {number(max(values))}, {variation(values):.0%}"
