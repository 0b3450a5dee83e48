"""What the verbs share in talking to a person or a script: names, JSON and progress."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from monarch.text import counted, escape_text
from monarch.types import Progress
from monarch.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

# Where nobody watches, a line now and then: a job's log is not a terminal.
_LINE_EVERY_S = 5.0
# A rate over less time than this says nothing.
_LEAST_RATE_S = 1.0


def stdout() -> Console:
    """The console for tables and styles. Names must pass through :func:`escape` first."""
    from rich.console import Console

    return Console(highlight=False)


def say(line: str) -> None:
    """Prints a line of the answer. Names must pass through :func:`escape` first."""
    click.echo(line)


def remark(line: str) -> None:
    """Prints a line beside the answer, to stderr."""
    click.echo(line, err=True)


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
    if quiet:
        yield lambda done, total, words: None
        return
    if not (sys.stderr.isatty() or os.environ.get("FORCE_COLOR")):
        lines = ProgressLines(sys.stderr, of_bytes=of_bytes)
        yield lines
        lines.finish()
        return
    # Imported here: what draws bars takes a tenth of a second to load.
    from monarch.cli.bars import Bar

    bar = Bar(of_bytes=of_bytes)
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
