"""Layout of text for a terminal of any width: tables, fields and bars, as lines.

Words are not broken. A text that is too long keeps its end after "...". Columns without space are
left out, the least important first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

_GAP = 2
_LEAST_PATH = 14
_ELLIPSIS = "..."

# "5 GiB" stays on one line.
_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGTP]i)?B\b)")
_NO_BREAK = "\u00a0"

Cell = str | Text


@dataclass(frozen=True, slots=True)
class Column:
    """A column. Columns with a higher ``drop`` are left out first, those with 0 never.

    ``shrinks``: cells may be shortened at their start, as paths; ``prose``: at their end.
    """

    name: str
    right: bool = False
    shrinks: bool = False
    prose: bool = False
    drop: int = 0


def shortened(text: str, width: int) -> str:
    """``text`` in at most ``width`` cells: a longer text keeps its end, after "..."."""
    if cell_len(text) <= width:
        return text
    end = text
    while end and cell_len(end) > max(0, width - len(_ELLIPSIS)):
        end = end[1:]
    return (_ELLIPSIS + end)[: max(width, 0)]


def table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], width: int) -> list[Text]:
    """The header and the rows, each on one line, if possible no longer than ``width``."""
    cells = [[_text(cell) for cell in row] for row in rows]
    kept = list(range(len(columns)))
    natural = [max([cell_len(columns[i].name), *(row[i].cell_len for row in cells)]) for i in kept]
    least = [
        min(natural[i], max(_LEAST_PATH, cell_len(columns[i].name)))
        if columns[i].shrinks
        else natural[i]
        for i in kept
    ]
    while _total([least[i] for i in kept]) > width:
        droppable = [i for i in kept if columns[i].drop]
        if not droppable:
            break
        kept.remove(max(droppable, key=lambda i: columns[i].drop))
    shared = _shared([natural[i] for i in kept], [least[i] for i in kept], width)
    widths = dict(zip(kept, shared, strict=True))
    head = [Text(columns[i].name, style="bold") for i in range(len(columns))]
    return [_row(columns, row, kept, widths) for row in (head, *cells)]


def fields(pairs: Sequence[tuple[str, str]], width: int) -> list[Text]:
    """``name  value`` lines; a long value continues on the next line, indented."""
    indent = max((cell_len(name) for name, _ in pairs), default=0) + _GAP
    room = max(width - indent, 20)
    lines = []
    for name, value in pairs:
        for number, part in enumerate(_wrapped(value, room)):
            start = (name if number == 0 else "").ljust(indent)
            lines.append(Text.assemble((start, "bold"), part))
    return lines


def paragraph(text: str, width: int, *, indent: str = "", style: str = "") -> list[Text]:
    """``text`` on as many lines as needed; the lines after the first begin with ``indent``.

    A long path stays whole: it may be part of a command that the user copies.
    """
    first, *others = _wrapped(text, max(width - len(indent), 20), whole=True)
    return [Text(first, style=style), *(Text(indent + line, style=style) for line in others)]


def bar(fraction: float, cells: int, *, ascii_only: bool = False) -> str:
    """A line of ``cells`` characters, filled by ``fraction``; anything above 0 shows."""
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    filled = int(min(max(fraction, 0.0), 1.0) * cells)
    if fraction > 0:
        filled = max(filled, 1)
    return full * filled + empty * (cells - filled)


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * max(len(widths) - 1, 0)


def _shared(natural: Sequence[int], least: Sequence[int], width: int) -> list[int]:
    """The widths of the columns in the available space; the widest columns shrink first."""
    widths = list(natural)
    while _total(widths) > width:
        spare = [widths[i] - least[i] for i in range(len(widths))]
        widest = max(range(len(widths)), key=lambda i: (spare[i] > 0, widths[i]))
        if spare[widest] <= 0:
            break
        widths[widest] -= 1
    return widths


def _row(
    columns: Sequence[Column], row: Sequence[Text], kept: Sequence[int], widths: dict[int, int]
) -> Text:
    line = Text()
    for place, i in enumerate(kept):
        cell, room = row[i], widths[i]
        if cell.cell_len > room:
            cut = shortened(cell.plain[::-1], room)[::-1] if columns[i].prose else None
            cell = Text(cut or shortened(cell.plain, room), style=cell.style)
        pad = " " * (room - cell.cell_len)
        gap = " " * _GAP if place else ""
        line = Text.assemble(line, gap, *((pad, cell) if columns[i].right else (cell, pad)))
    line.rstrip()
    return line


def _wrapped(text: str, width: int, *, whole: bool = False) -> list[str]:
    lines = [""]
    for word in _NUMBER_AND_UNIT.sub(_NO_BREAK, text).split(" "):
        word = word.replace(_NO_BREAK, " ")
        word = word if whole else shortened(word, width)
        if lines[-1] and cell_len(lines[-1]) + 1 + cell_len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines
