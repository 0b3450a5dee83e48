"""Progress bars in a terminal."""

from __future__ import annotations

from rich import progress
from rich.console import Console
from rich.markup import escape as escape_markup

from monarch.cli.screen import shortened
from monarch.text import escape_text, format_bytes


class Bar:
    """A progress bar. It appears at the first call and stays on the screen after the last."""

    def __init__(self, *, of_bytes: bool) -> None:
        console = Console(stderr=True, highlight=False)
        rate = progress.TextColumn("{task.fields[rate]}/s")
        columns: tuple[progress.ProgressColumn, ...] = (
            (progress.DownloadColumn(binary_units=True), rate, progress.TimeRemainingColumn())
            if of_bytes
            else (progress.TextColumn("{task.fields[amount]}"), rate, progress.TimeElapsedColumn())
        )
        words = progress.TextColumn("{task.description}")
        self._display = progress.Progress(words, progress.BarColumn(20), *columns, console=console)
        self._width = max(20, console.width - 50)
        self._rate = format_bytes if of_bytes else "{:,.0f}".format
        self._task: progress.TaskID | None = None

    def __call__(self, done: int, total: int | None, words: str) -> None:
        description = escape_markup(shortened(escape_text(words), self._width))
        if self._task is None:
            self._task = self._display.add_task(description, total=total, amount="", rate="-")
            self._display.start()
        (task,) = self._display.tasks
        speed = task.finished_speed or task.speed
        self._display.update(
            self._task,
            completed=done,
            total=total,
            description=description,
            amount=f"{done:,}" if total is None else f"{done:,} of {total:,}",
            rate="-" if speed is None else self._rate(speed),
        )

    def close(self) -> None:
        if self._task is not None:
            self._display.stop()
