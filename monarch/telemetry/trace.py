"""The format of a trace: the opens of a mount in their order, one JSON object a line.

docs/trace.md describes it, and ``read_trace`` is its reader. The functions that make lines are
called for each open, so they format text and do not encode objects.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from monarch.errors import MonarchError
from monarch.telemetry.report import Report
from monarch.text import MOST_BYTES

VERSION = 1
# The first bytes of a compressed file.
GZIP = b"\x1f\x8b"
# The header has two paths of 4096 bytes each, and a line of a file one; escaped bytes take six
# characters.
MOST_LINE = 1 << 18


@dataclass(frozen=True, slots=True)
class TraceHeader(Report):
    """The first line. ``tiers`` are the names that opens refer to, the source first; ``open`` is
    "open" or "none" (the mode of the mount), ``snapshot`` identifies the names of the files."""

    monarch_trace: int
    mountpoint: str
    source: str
    snapshot: str
    started_ns: int
    tiers: list[str]
    open: str


@dataclass(frozen=True, slots=True)
class TracedOpen:
    """One open. ``time_s`` counts from the begin of the trace; ``path`` is relative to the mount.

    ``tier`` is None if it is unknown what served the open, ``latency_s`` if it is unknown how long
    it took, ``epoch`` if epochs are not counted, ``job`` (the session of the process) if the
    process is unknown.
    """

    time_s: float
    path: str
    bytes: int
    epoch: int | None
    tier: str | None
    latency_s: float | None
    job: int | None


@dataclass(frozen=True, slots=True)
class TraceEnd(Report):
    """The last line: why the trace ended, and the numbers of opens in it and of lost ones."""

    end: str
    opens: int
    lost: int


@dataclass(frozen=True, slots=True)
class TraceProgress(Report):
    """A part of the trace of this number that is being recorded: the numbers of opens so far, and
    whole lines of the file."""

    number: int
    opens: int
    lost: int
    text: str


@dataclass(frozen=True, slots=True)
class TraceStopped(Report):
    """Whether the trace that was to be stopped was running."""

    was_running: bool


class Trace:
    """A trace that is read: ``header`` at once, then the opens by iteration, once. ``end`` is None
    until all were read, and after that if the trace was cut off. ``lost`` opens are missing so far,
    also after the last one. Raises MonarchError for a line that is not of the format, and at the
    latest after the last open for compressed bytes that are damaged."""

    def __init__(self, lines: Iterator[str], name: str) -> None:
        self._lines = lines
        self._name = name
        self._number = 0
        self.lost = 0
        self.end: TraceEnd | None = None
        self._is_cut_off = False
        raw = self._next()
        if raw is None or "monarch_trace" not in raw:
            raise MonarchError(f"{name} is not a trace of monarch")
        if raw["monarch_trace"] != VERSION:
            raise MonarchError(
                f"{name} is a trace of version {raw['monarch_trace']!r}",
                hint=f"this version of monarch reads version {VERSION}",
            )
        self.header: TraceHeader = self._decode(TraceHeader, raw)
        if not self.header.tiers:
            raise self._damaged()

    def __iter__(self) -> Iterator[TracedOpen]:
        files: dict[int, tuple[str, int]] = {}
        end: TraceEnd | None = None
        while (raw := self._next()) is not None:
            if end is not None:
                raise self._damaged()
            match raw:
                case {"t": float() | int() as time_s, "file": int(file), **rest} if file in files:
                    yield self._open(time_s, *files[file], rest)
                case {"file": int(file), "path": str(path), "bytes": int(size)} if (
                    0 <= size <= MOST_BYTES
                ):
                    files[file] = path, size
                case {"end": str(), **_rest}:
                    # The checksum of compressed bytes follows it.
                    end = self._decode(TraceEnd, raw)
                case {"lost": int(count), **_rest} if count >= 0:
                    self.lost += count
                case _:
                    raise self._damaged()
        self.end = None if self._is_cut_off else end

    def _open(self, time_s: float, path: str, size: int, raw: Mapping[str, Any]) -> TracedOpen:
        match raw:
            case {
                "epoch": int() | None as epoch,
                "tier": str() | None as tier,
                "latency": float() | int() | None as latency_s,
                "job": int() | None as job,
            }:
                return TracedOpen(time_s, path, size, epoch, tier, latency_s, job)
        raise self._damaged()

    def _next(self) -> dict[str, Any] | None:
        """The next object; None at the end of the file. The last line may be cut off."""
        try:
            line = next(self._lines, "")
        except EOFError:
            self._is_cut_off = True
            line = ""
        except (zlib.error, gzip.BadGzipFile) as error:
            raise MonarchError(f"{self._name} is damaged: {error}") from error
        if not line.endswith("\n") and len(line) < MOST_LINE:
            return None
        self._number += 1
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            raw = None
        if not isinstance(raw, dict) or not line.isascii():
            raise self._damaged()
        return raw

    def _decode(self, kind: type[Any], raw: Mapping[str, Any]) -> Any:
        try:
            return kind.from_dict(raw)
        except ValueError as error:
            raise self._damaged() from error

    def _damaged(self) -> MonarchError:
        return MonarchError(f"{self._name}, line {self._number}, is not of a trace of monarch")


@contextmanager
def read_trace(path: Path) -> Iterator[Trace]:
    """Opens a trace, compressed or not, whatever its name. Its memory is that of the names of its
    files. Raises OSError, and MonarchError as ``Trace``."""
    with open_text(path, "r") as file:
        # A line without an end may be larger than the memory.
        yield Trace(iter(partial(file.readline, MOST_LINE), ""), str(path))


@contextmanager
def open_text(
    path: Path, mode: Literal["r", "w"], descriptor: int | None = None
) -> Iterator[TextIO]:
    """Opens a file of lines in ASCII; bytes that are not ASCII are read as surrogate escapes. A new
    file is compressed if its name ends with ``.gz``. ``descriptor``: the file is open already, and
    stays open. Raises OSError."""
    is_new = descriptor is None
    with open(path if descriptor is None else descriptor, f"{mode}b", closefd=is_new) as file:
        is_packed = path.suffix == ".gz"
        if isinstance(file, io.BufferedReader):
            is_packed = file.peek(len(GZIP)).startswith(GZIP)
        if not is_packed:
            with io.TextIOWrapper(file, encoding="ascii", errors="surrogateescape") as plain:
                yield plain
            return
        # The least compression: a trace must be written as fast as files are opened.
        with gzip.open(
            file, f"{mode}t", compresslevel=1, encoding="ascii", errors="surrogateescape"
        ) as packed:
            assert isinstance(packed, io.TextIOBase)
            yield cast(TextIO, packed)


# -- lines -----------------------------------------------------------------------------------------


def object_line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def file_line(file: int, path: str, size: int) -> str:
    """Comes before the first open of a file, whose number in this trace is ``file``."""
    return f'{{"file":{file},"path":{json.dumps(path)},"bytes":{size}}}\n'


def lost_line(count: int) -> str:
    return f'{{"lost":{count}}}\n'


def open_line(
    time_s: float, file: int, epoch: int | None, tier: str, latency_s: float | None, job: int
) -> str:
    """Times are in seconds. ``tier`` is JSON; ``job`` is 0 if it is unknown."""
    latency = "null" if latency_s is None else f"{latency_s:.6f}"
    return (
        f'{{"t":{time_s:.6f},"file":{file},"epoch":{"null" if epoch is None else epoch},'
        f'"tier":{tier},"latency":{latency},"job":{job or "null"}}}\n'
    )
