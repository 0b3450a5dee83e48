"""Output of the verbs for a person or a script: names, JSON and progress."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from monarch.text import counted, escape_text, format_bytes
from monarch.types import READING_CHANGES, SHOWING_CHANGES, Progress

if TYPE_CHECKING:
    from rich.console import Console

# Interval of progress lines when the output is not a terminal, such as the log of a job.
_LINE_EVERY_S = 5.0
# A rate over less time than this is not meaningful.
_LEAST_RATE_S = 1.0


def stdout() -> Console:
    """The console for tables and styles. Names must pass through :func:`escape` first."""
    from rich.console import Console

    return Console(highlight=False)


def say(line: str) -> None:
    """Prints a line to stdout. Names must pass through :func:`escape` first."""
    click.echo(line)


def remark(line: str) -> None:
    """Prints a line to stderr."""
    click.echo(line, err=True)


def escape(name: bytes) -> str:
    """A file name as safe text for a terminal: on one line, without control characters."""
    return escape_text(os.fsdecode(name))


def show(value: Any, as_json: bool, *lines: str) -> None:
    """Prints ``value`` as JSON, or else ``lines``, in which names are escaped already."""
    if as_json:
        emit_json(value)
        return
    for line in lines:
        say(line)


def emit_json(value: Any) -> None:
    """Prints ``value`` as JSON in ASCII; bytes become text by :func:`escape`."""
    sys.stdout.write(json.dumps(value, indent=2, default=_in_json) + "\n")


def _in_json(value: Any) -> str | dict[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, bytes):
        return escape(value)
    if isinstance(value, Path):
        return escape_text(str(value))
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def age(ns: int) -> str:
    """The age of a time, in ns since the epoch, as text: ``12 s``, ``5 min``, ``3 h``."""
    return duration(max(0.0, time.time() - ns / 1e9))


def duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 or not seconds else f"{seconds:.1g} s"


@contextmanager
def progress_bar(*, quiet: bool = False, of_bytes: bool = False) -> Iterator[Progress]:
    """Yields a function that long work calls with ``(done, total, words)``.

    It shows a bar if stderr is a terminal, else a line every five seconds and one at the end.
    Without a call, nothing is shown. ``of_bytes``: ``done`` counts bytes, and the bar shows the
    time left.
    """
    if quiet:
        yield lambda done, total, words: None
        return
    if not (sys.stderr.isatty() or os.environ.get("FORCE_COLOR")):
        lines = ProgressLines(sys.stderr, of_bytes=of_bytes)
        yield lines
        lines.finish()
        return
    # Imported here: the module takes a tenth of a second to load.
    from monarch.cli.bars import Bar

    bar = Bar(of_bytes=of_bytes)
    try:
        yield bar
    finally:
        bar.close()


class Scanning:
    """Shows the progress of a scan by ``bar``, with the name of the source, and keeps the count."""

    def __init__(self, source: Path) -> None:
        self._source = escape_text(os.fspath(source))
        self.entries = 0
        self.bar: Progress = lambda done, total, words: None
        # Is called when the count has changed, so that the source has answered.
        self.advanced: Callable[[], None] = lambda: None

    def __call__(self, done: int, total: int | None, words: str) -> None:
        if words in (READING_CHANGES, SHOWING_CHANGES):
            # A mount does this before or after a scan, without the source.
            self.bar(done, total, words)
            return
        if done != self.entries:
            self.advanced()
        self.entries = done
        self.bar(done, total, f"scanning {self._source}, {words}")

    def interrupted(self) -> str:
        """A sentence about the work that an interrupted scan lost."""
        if not self.entries:
            return "nothing was scanned yet"
        return (
            f"the scan had read {counted(self.entries, 'entry', 'entries')}, which are not kept:"
            " the next one starts again"
        )


class ProgressLines:
    """Progress as lines of text: at most one per interval, and always the last."""

    def __init__(
        self,
        stream: TextIO,
        *,
        of_bytes: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._amount: Callable[[int], str] = format_bytes if of_bytes else "{:,}".format
        self._clock = clock
        self._next_line_at = clock() + _LINE_EVERY_S
        self._waiting = ""
        self._began: tuple[float, int] | None = None

    def __call__(self, done: int, total: int | None, words: str) -> None:
        amount = self._amount(done) + ("" if total is None else f" of {self._amount(total)}")
        now = self._clock()
        if self._began is None:
            self._began = (now, done)
        rate = ""
        seconds, more = now - self._began[0], done - self._began[1]
        # Less than one in two seconds would be none.
        if seconds >= _LEAST_RATE_S and (per_s := round(more / seconds)) > 0:
            rate = f", {self._amount(per_s)}/s"
        self._waiting = f"{escape_text(words)}: {amount}{rate}\n"
        if now >= self._next_line_at:
            self.finish()
            self._next_line_at = now + _LINE_EVERY_S

    def finish(self) -> None:
        """Writes the last line, if it was not written yet."""
        self._stream.write(self._waiting)
        self._stream.flush()
        self._waiting = ""
