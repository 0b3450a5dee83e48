"""Plots as SVG text for a page that needs no script, no font and no network.

All texts are escaped. Colours are classes of the page's style: ``c0``, ``c1`` and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from monarch.text import escape_text

_WIDTH, _HEIGHT = 860, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 30, 28, 40
_TICKS = 5


def as_html(text: str) -> str:
    """``text`` on one line, without control characters, and without a meaning in HTML."""
    return escape(escape_text(text), quote=True)


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a plot, of points whose x rises; None: there is no value, and the line has a
    gap."""

    name: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Axis:
    """``text`` is the label of a value. Values are 0 to ``most``, which is above 0."""

    name: str
    text: Callable[[float], str]
    most: float


def line_plot(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Lines over x; they have steps of nothing between their points."""
    body = []
    for number, each in enumerate(series):
        for run in _runs(each.points):
            points = " ".join(f"{_x(a, x):.1f},{_y(b, y):.1f}" for a, b in run)
            body.append(f'<polyline class="line c{number}" points="{points}"/>')
    return _plot(title, [each.name for each in series], x, y, body)


def bar_plot(title: str, names: Sequence[str], bars: Sequence[Series], x: Axis, y: Axis) -> str:
    """Bars at whole numbers of x, 1 to ``x.most``; those of several series are on each other."""
    width = (_WIDTH - _LEFT - _RIGHT) / x.most
    body = []
    below: dict[float, float] = {}
    for number, each in enumerate(bars):
        for place, value in each.points:
            if not value:
                continue
            base = below.get(place, 0.0)
            below[place] = base + value
            left = _LEFT + (place - 1) * width + 0.1 * width
            top, bottom = _y(base + value, y), _y(base, y)
            body.append(
                f'<rect class="bar c{number}" x="{left:.1f}" y="{top:.1f}"'
                f' width="{0.8 * width:.1f}" height="{bottom - top:.1f}"/>'
            )
    return _plot(title, names, x, y, body, is_counted=True)


def most_of(series: Sequence[Series], *, is_bytes: bool = False) -> float:
    """The end of an axis for all values: the next round number; 1 if there are none above 0.
    ``is_bytes``: it is round in a binary unit."""
    largest = max((b for each in series for _, b in each.points if b is not None), default=0.0)
    if largest <= 0 or not math.isfinite(largest):
        return 1.0
    unit = 1024.0 ** math.floor(math.log(largest, 1024)) if is_bytes else 1.0
    power = unit * 10.0 ** math.floor(math.log10(largest / unit))
    return float(next(step * power for step in (1, 2, 2.5, 5, 10, 20) if step * power >= largest))


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """The parts of a line between its gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for a, b in points:
        if b is not None:
            runs[-1].append((a, b))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _x(value: float, axis: Axis) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(1.0, max(0.0, value / axis.most))


def _y(value: float, axis: Axis) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(1.0, max(0.0, value / axis.most))


def _plot(
    title: str,
    names: Sequence[str],
    x: Axis,
    y: Axis,
    body: Sequence[str],
    *,
    is_counted: bool = False,
) -> str:
    """``is_counted``: the values of x are bars with numbers from 1 on."""
    parts = [
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{as_html(title)}</title>",
    ]
    for tick in range(_TICKS + 1):
        value = y.most * tick / _TICKS
        height = _y(value, y)
        parts += [
            f'<line class="grid" x1="{_LEFT}" y1="{height:.1f}" x2="{_WIDTH - _RIGHT}"'
            f' y2="{height:.1f}"/>',
            f'<text class="end" x="{_LEFT - 6}" y="{height + 4:.1f}">'
            f"{as_html(y.text(value))}</text>",
        ]
    parts += [
        f'<text class="middle" x="{place:.1f}" y="{_HEIGHT - _BOTTOM + 16}">{as_html(text)}</text>'
        for place, text in (_numbers(x) if is_counted else _values(x))
    ]
    parts += [
        f'<text class="middle" x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 6}">'
        f"{as_html(x.name)}</text>",
        f'<text x="4" y="14">{as_html(y.name)}</text>',
    ]
    left = _WIDTH - _RIGHT
    for number, name in reversed(list(enumerate(names))):
        left -= 26 + 7 * len(name)
        parts += [
            f'<rect class="bar c{number}" x="{left}" y="6" width="12" height="10"/>',
            f'<text x="{left + 16}" y="15">{as_html(name)}</text>',
        ]
    return "\n".join([*parts, *body, "</svg>"])


def _values(x: Axis) -> list[tuple[float, str]]:
    values = [x.most * tick / _TICKS for tick in range(_TICKS + 1)]
    return [(_x(value, x), x.text(value)) for value in values]


def _numbers(x: Axis) -> list[tuple[float, str]]:
    """The labels of at most some twenty bars."""
    width = (_WIDTH - _LEFT - _RIGHT) / x.most
    every = max(1, math.ceil(x.most / 20))
    return [
        (_LEFT + (number - 0.5) * width, x.text(number))
        for number in range(1, int(x.most) + 1, every)
    ]
