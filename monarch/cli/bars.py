"""Progress bars in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape as escape_markup
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as ProgressDisplay
from rich.text import Text

from monarch.cli.screen import shortened
from monarch.text import escape_text
from monarch.units import format_bytes


class Bar:
    """A progress bar. It appears at the first call and stays on the screen after the last."""

    def __init__(self, *, of_bytes: bool) -> None:
        console = Console(stderr=True, highlight=False)
        amount: tuple[ProgressColumn, ...] = (
            (DownloadColumn(binary_units=True), _Rate(of_bytes), TimeRemainingColumn())
            if of_bytes
            else (_Count(), _Rate(of_bytes), TimeElapsedColumn())
        )
        columns = (TextColumn("{task.description}"), BarColumn(20), *amount)
        self._display = ProgressDisplay(*columns, console=console)
        self._width = max(20, console.width - 50)
        self._task: TaskID | None = None

    def __call__(self, done: int, total: int | None, words: str) -> None:
        description = escape_markup(shortened(escape_text(words), self._width))
        if self._task is None:
            self._task = self._display.add_task(description, total=total)
            self._display.start()
        self._display.update(self._task, completed=done, total=total, description=description)

    def close(self) -> None:
        if self._task is not None:
            self._display.stop()


class _Count(ProgressColumn):
    """``1,080 of 2,000``, or only the count if the total is unknown."""

    def render(self, task: Task) -> Text:
        total = "" if task.total is None else f" of {task.total:,.0f}"
        return Text(f"{task.completed:,.0f}{total}")


class _Rate(ProgressColumn):
    def __init__(self, of_bytes: bool) -> None:
        super().__init__()
        self._of_bytes = of_bytes

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if speed is None:
            return Text("-/s")
        return Text(f"{format_bytes(speed)}/s" if self._of_bytes else f"{speed:,.0f}/s")
