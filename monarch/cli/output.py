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
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as ProgressDisplay

from monarch.text import escape_text
from monarch.types import Progress
from monarch.units import format_bytes

# Where nobody watches, a line now and then: a job's log is not a terminal.
_LINE_EVERY_S = 5.0


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

    A bar when stderr is a terminal, else a line every five seconds and one at the end. ``of_bytes``
    is what ``done`` counts: the bar then tells how fast it goes and how long it takes.
    """
    console = stderr()
    if quiet:
        yield lambda done, total, words: None
    elif console.is_terminal:
        amount = (
            (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
            if of_bytes
            else (MofNCompleteColumn(), TimeElapsedColumn())
        )
        columns = (TextColumn("{task.description}"), BarColumn(), *amount)
        with ProgressDisplay(*columns, console=console) as display:
            task = display.add_task("", total=None)

            def advance(done: int, total: int | None, words: str) -> None:
                description = escape_markup(escape_text(words))
                display.update(task, completed=done, total=total, description=description)

            yield advance
    else:
        lines = ProgressLines(sys.stderr, of_bytes=of_bytes)
        yield lines
        lines.finish()


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
        self._told: Callable[[int], str] = format_bytes if of_bytes else str
        self._clock = clock
        self._next_line_at = clock() + _LINE_EVERY_S
        self._waiting = ""

    def __call__(self, done: int, total: int | None, words: str) -> None:
        amount = self._told(done) if total is None else f"{self._told(done)} of {self._told(total)}"
        self._waiting = f"{escape_text(words)}: {amount}\n"
        if self._clock() >= self._next_line_at:
            self.finish()
            self._next_line_at = self._clock() + _LINE_EVERY_S

    def finish(self) -> None:
        """Writes the last line, if it was held back."""
        self._stream.write(self._waiting)
        self._stream.flush()
        self._waiting = ""
