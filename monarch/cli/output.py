"""What the verbs share in talking to a person or a script: names, JSON and progress."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

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
from monarch.text import counted, escape_text
from monarch.types import Progress
from monarch.units import format_bytes

# Where nobody watches, a line now and then: a job's log is not a terminal.
_LINE_EVERY_S = 5.0
# A rate over less time than this says nothing.
_LEAST_RATE_S = 1.0


def stdout() -> Console:
    """The console for answers. Names must pass through :func:`escape` first."""
    return Console(highlight=False)


def stderr() -> Console:
    """The console for remarks and progress."""
    return Console(stderr=True, highlight=False)


def escape(name: bytes) -> str:
    """A name of the source as a terminal may show it: on one line, without control characters."""
    return escape_text(os.fsdecode(name))


def emit_json(value: Any) -> None:
    """Prints ``value`` as JSON in ASCII; bytes as by :func:`escape`, paths as text."""
    sys.stdout.write(json.dumps(value, indent=2, default=_as_text) + "\n")


def _as_text(value: object) -> str:
    if isinstance(value, bytes):
        return escape(value)
    if isinstance(value, Path):
        return escape_text(str(value))
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def age(ns: int) -> str:
    """How long ago a time is, in ns since the epoch: ``12 s``, ``5 min``, ``3 h``."""
    return duration(max(0.0, time.time() - ns / 1e9))


def duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 or not seconds else f"{seconds:.1g} s"


@contextmanager
def progress_bar(*, quiet: bool = False, of_bytes: bool = False) -> Iterator[Progress]:
    """Yields what long work calls with ``(done, total, words)``.

    A bar when stderr is a terminal, from the first call to the end; else a line every five seconds
    and one at the end. Work that calls nothing shows nothing. ``of_bytes`` is what ``done``
    counts: the bar then tells how long it will take.
    """
    console = stderr()
    if quiet:
        yield lambda done, total, words: None
        return
    lines = ProgressLines(sys.stderr, of_bytes=of_bytes)
    if not console.is_terminal:
        yield lines
        lines.finish()
        return
    bar = _Bar(console, of_bytes=of_bytes)
    try:
        yield bar
    finally:
        bar.close()


class Scanning:
    """Progress of a scan: shows it by ``bar`` with the source's name, and keeps how far it came."""

    def __init__(self, source: Path) -> None:
        self._source = escape_text(os.fspath(source))
        self.entries = 0
        self.bar: Progress = lambda done, total, words: None

    def __call__(self, done: int, total: int | None, words: str) -> None:
        self.entries = done
        self.bar(done, total, f"scanning {self._source}, {words}")

    def interrupted(self) -> str:
        """What an interrupted scan leaves, in words: nothing that the next one goes on from."""
        if not self.entries:
            return "nothing was scanned yet"
        return (
            f"the scan was {counted(self.entries, 'entry', 'entries')} far and is not kept: the"
            " next one begins anew"
        )


class _Bar:
    """A bar that begins with the first step and stays as it was at the last."""

    def __init__(self, console: Console, *, of_bytes: bool) -> None:
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
    """``1,080 of 2,000``, or what is known of it."""

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


def _grouped(number: int) -> str:
    return f"{number:,}"


class ProgressLines:
    """Progress as lines of text, at most one per interval and the last one always."""

    def __init__(
        self,
        stream: TextIO,
        *,
        of_bytes: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._told: Callable[[int], str] = format_bytes if of_bytes else _grouped
        self._clock = clock
        self._next_line_at = clock() + _LINE_EVERY_S
        self._waiting = ""
        self._began: tuple[float, int] | None = None

    def __call__(self, done: int, total: int | None, words: str) -> None:
        amount = self._told(done) if total is None else f"{self._told(done)} of {self._told(total)}"
        now = self._clock()
        if self._began is None:
            self._began = (now, done)
        rate = ""
        seconds, came = now - self._began[0], done - self._began[1]
        if seconds >= _LEAST_RATE_S and came > 0:
            rate = f", {self._told(round(came / seconds))}/s"
        self._waiting = f"{escape_text(words)}: {amount}{rate}\n"
        if now >= self._next_line_at:
            self.finish()
            self._next_line_at = now + _LINE_EVERY_S

    def finish(self) -> None:
        """Writes the last line, if it was held back."""
        self._stream.write(self._waiting)
        self._stream.flush()
        self._waiting = ""
