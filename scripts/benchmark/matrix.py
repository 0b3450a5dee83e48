"""Tables and figures of a benchmark of many contenders: one line a row, one column a contender."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from scripts.benchmark.quantities import number, variation
from scripts.benchmark.rows import SCATTER_LIMIT, Result
from scripts.benchmark.table import STYLES


class Matrix:
    """The results of contenders by line. ``judged`` are those with a bar, also the derived ones.

    Lines whose names begin with the same one of ``groups`` share a figure, whose file is named
    ``subject``-group. With ``log`` the axis of the ratios is logarithmic.
    """

    def __init__(
        self,
        title: str,
        results: Sequence[Result[Any]],
        *,
        subject: str,
        groups: Sequence[str],
        caption: str,
        log: bool = False,
    ) -> None:
        self.title = title
        self._subject, self._names, self._caption, self._log = subject, groups, caption, log
        self.contenders = list(
            dict.fromkeys(result.row.contender for result in results if not result.row.derived)
        )
        self._cells = {
            (result.row.name, result.row.contender): result
            for result in results
            if not result.row.derived
        }
        self.lines = list(dict.fromkeys(name for name, _ in self._cells))
        self.judged = [result for result in results if result.row.bar is not None]

    def unit(self, line: str) -> str:
        return next(result.row.unit for (name, _), result in self._cells.items() if name == line)

    def native(self, line: str) -> str:
        values = [
            value
            for (name, _), result in self._cells.items()
            if name == line
            for value in result.against
        ]
        return number(median(values)) if values else ""

    def ratio(self, line: str, contender: str) -> float | None:
        result = self._cells.get((line, contender))
        return median(result.ratios) if result and result.ratios else None

    def cell(self, line: str, contender: str) -> tuple[str, str]:
        """The text of a cell and its verdict."""
        result = self._cells.get((line, contender))
        if result is None:
            return "", ""
        value = number(median(result.values))
        if not result.ratios:
            return value, result.verdict
        mark = "~" if variation(result.ratios) > SCATTER_LIMIT else ""
        return f"{mark}{median(result.ratios):.2f} ({value})", result.verdict

    def table(self) -> Table:
        made = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
        made.caption, made.caption_justify = self._caption, "left"
        made.add_column("what, unit", no_wrap=True)
        for name in ("native", *self.contenders):
            made.add_column(name, justify="right")
        for line in self.lines:
            cells = []
            for contender in self.contenders:
                words, verdict = self.cell(line, contender)
                style = STYLES.get(verdict)
                cells.append(f"[{style}]{words}[/]" if style else words)
            made.add_row(f"{line}, {self.unit(line)}", self.native(line), *cells)
        return made

    def markdown(self) -> str:
        """The table of the ratios and that of the bars, for a document."""
        rows = [["", "native", *self.contenders], ["---"] * (len(self.contenders) + 2)]
        for line in self.lines:
            cells = [self.cell(line, contender)[0] for contender in self.contenders]
            rows.append([f"{line}, {self.unit(line)}", self.native(line), *cells])
        bars = [["bar", "mode", "ratio or value", "bar", "verdict"], ["---"] * 5]
        for result in self.judged:
            row = result.row
            bars.append(
                [
                    row.name,
                    row.contender,
                    f"{median(result.judged):.3g} (CV {result.scatter:.0%})",
                    f"{'≥' if row.more_is_better else '≤'} {row.bar:.2f}",
                    result.verdict,
                ]
            )
        tables = ("\n".join(f"| {' | '.join(row)} |" for row in rows_) for rows_ in (rows, bars))
        return f"{self.title}. {self._caption}\n\n" + "\n\n".join(tables) + "\n"

    # -- figures -----------------------------------------------------------------------------------

    def plot(self, path: Path) -> None:
        """One figure of all groups, or, where ``path`` has no suffix, a directory of figures."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot

        groups = self._groups()
        if path.suffix:
            figure, axes = pyplot.subplots(
                len(groups), 1, figsize=(12, 3.6 * len(groups)), layout="constrained", squeeze=False
            )
            for axis, (name, lines) in zip(axes[:, 0], groups.items(), strict=True):
                self._draw(axis, name, lines)
            figure.suptitle(textwrap.fill(self.title, 130), fontsize=9)
            self._finish(figure, path)
            return
        path.mkdir(parents=True, exist_ok=True)
        for name, lines in groups.items():
            figure, axis = pyplot.subplots(figsize=(12, 4.5), layout="constrained")
            self._draw(axis, name, lines)
            self._finish(figure, path / f"{self._subject}-{name.replace(' ', '-')}.png")

    def _finish(self, figure: Any, path: Path) -> None:
        from matplotlib import pyplot

        # The same contender has the same colour in all panels.
        named: dict[str, Any] = {}
        for axis in figure.axes:
            handles, labels = axis.get_legend_handles_labels()
            named |= dict(zip(labels, handles, strict=True))
        ordered = [contender for contender in self.contenders if contender in named]
        figure.legend(
            [named[contender] for contender in ordered],
            ordered,
            fontsize=8,
            ncols=len(ordered),
            loc="outside lower center",
        )
        figure.savefig(path, dpi=130)
        pyplot.close(figure)

    def _groups(self) -> dict[str, list[str]]:
        """Lines that are compared with native, by their group."""
        groups: dict[str, list[str]] = {}
        for line in self.lines:
            if any(self.ratio(line, contender) is not None for contender in self.contenders):
                for name in self._names:
                    if line.startswith(name):
                        groups.setdefault(name, []).append(line)
        return groups

    def _draw(self, axis: Any, name: str, lines: Sequence[str]) -> None:
        from matplotlib import colormaps

        shown = [
            contender
            for contender in self.contenders
            if any(self.ratio(line, contender) for line in lines)
        ]
        width = 0.85 / len(shown)
        for place, contender in enumerate(shown):
            heights = [self.ratio(line, contender) or 0.0 for line in lines]
            positions = [index + (place + 0.5) * width - 0.425 for index in range(len(lines))]
            colour = colormaps["tab10"](self.contenders.index(contender) % 10)
            bars = axis.bar(positions, heights, width * 0.92, label=contender, color=colour)
            labels = [f"{height:.2f}" if height else "" for height in heights]
            axis.bar_label(bars, labels, fontsize=6, rotation=90, padding=2)
        axis.axhline(1.0, color="#808080", linewidth=0.8)
        words = [f"{line.removeprefix(name).lstrip(',: ')}\n{self.unit(line)}" for line in lines]
        axis.set_xticks(range(len(lines)), words, fontsize=8)
        axis.set_ylabel(f"{name}: x native", fontsize=8)
        if self._log:
            axis.set_yscale("log")
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
