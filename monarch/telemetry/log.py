"""The log of a daemon: one line an event, in text or JSON; file names are escaped so that they
cannot forge a line."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import stat
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, Literal, TextIO

from monarch.config.settings import LogSettings
from monarch.errors import Unanswered
from monarch.posix.bounded_calls import BoundedCalls
from monarch.text import MiB, escape_text

# Three files of this size hold weeks of normal operation and cannot fill a disk.
_FILE_BYTES = 10 * MiB
_OLD_FILES = 2
# How long the daemon waits for the writing of a line, in seconds.
_WAIT_S = 1.0
# The priorities of syslog with the lowest level of each.
_PRIORITIES = (
    *((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6)),
    (logging.NOTSET, 7),
)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.000Z warning monarch.tiers: message``; a traceback is indented."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_time(record)} {record.levelname.lower()} {self.event(record)}"

    def event(self, record: logging.LogRecord) -> str:
        """The line without time and level, which the journal of systemd adds itself."""
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else ()
        # The indent keeps a line of a traceback from looking like an event.
        line = f"{record.name}: {escape_text(record.getMessage())}"
        return "\n    ".join([line, *map(escape_text, trace)])


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message and, of an exception, its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escape_text(record.getMessage()),
        }
        if record.exc_info:
            trace = self.formatException(record.exc_info).splitlines()
            event["exception"] = "\n".join(map(escape_text, trace))
        return json.dumps(event)


class JournalFormatter(logging.Formatter):
    """``<4>monarch.tiers: message`` for the journal of systemd, which adds the time. Each line of
    an event has its syslog priority. A line of JSON stays one line."""

    def __init__(self, form: Literal["text", "json"]) -> None:
        super().__init__()
        self._format = TextFormatter().event if form == "text" else JsonFormatter().format

    def format(self, record: logging.LogRecord) -> str:
        priority = next(number for least, number in _PRIORITIES if record.levelno >= least)
        return "\n".join(f"<{priority}>{line}" for line in self._format(record).splitlines())


@dataclass(frozen=True, slots=True)
class Unwritable:
    """Why the log cannot be written, and since when."""

    what: str
    since_ns: int


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """A log file that only its owner may read, since it has file names.

    ``trouble`` is the error of the last failed write; ``missing`` counts the lines lost since then.
    """

    trouble: Unwritable | None = None
    missing = 0

    def __init__(self, path: Path) -> None:
        # A disk that hangs must not delay the caller that logs.
        self._calls = BoundedCalls("log", wait_s=_WAIT_S)
        super().__init__(path, maxBytes=_FILE_BYTES, backupCount=_OLD_FILES)

    def _open(self) -> Any:
        # `errors`: the text of an exception may contain surrogates.
        return open(
            self.baseFilename, self.mode, encoding="utf-8", errors="backslashreplace", opener=_own
        )

    def emit(self, record: logging.LogRecord) -> None:
        missing = self.missing
        try:
            self._calls.call(self._write, record)
        except Unanswered:
            self._note_missing("its disk does not answer")
        if self.missing == missing:
            self.trouble, self.missing = None, 0

    def _write(self, record: logging.LogRecord) -> None:
        super().emit(record)
        try:
            if self.stream is not None:
                self.stream.flush()
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        super().close()
        self._calls.close()

    def flush(self) -> None:
        """Does nothing: ``emit`` flushes each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        # A full disk must not flood stderr with tracebacks.
        self._note_missing(error.strerror or str(error))

    def _note_missing(self, why: str) -> None:
        self.missing += 1
        if self.trouble is None:
            self.trouble = Unwritable(why, time.time_ns())


class Logbook(logging.Handler):
    """The state of the log. ``exceptions`` counts internal errors, including those whose traceback
    was suppressed."""

    def __init__(self, file: _PrivateFile) -> None:
        super().__init__(logging.ERROR)
        self._file = file
        self.path = file.baseFilename
        self._logged = 0
        self._held_back_before = Limiter.exceptions_held_back

    @property
    def exceptions(self) -> int:
        return self._logged + Limiter.exceptions_held_back - self._held_back_before

    def emit(self, record: logging.LogRecord) -> None:
        self._logged += record.exc_info is not None

    def trouble(self) -> Unwritable | None:
        """Why lines cannot be written now; None if they can. Tries a write to find out."""
        if (trouble := self._file.trouble) is not None:
            words = "lines may be missing here: the log could not be written for a while (%s)"
            fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
            record = {**fields, "msg": words, "args": (trouble.what,)}
            self._file.handle(logging.makeLogRecord(record))
        return self._file.trouble


def _own(path: str, flags: int) -> int:
    # Following a link that another user planted could overwrite a file of this user. A fifo without
    # a reader is not waited for.
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        os.set_blocking(fd, True)
        # Not the mode of a device: `file: /dev/null` must not make /dev/null private.
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.fchmod(fd, 0o600)
    except OSError:
        os.close(fd)
        raise
    return fd


def setup(settings: LogSettings, *, path: Path, foreground: bool) -> Logbook:
    """Sends log records to the file ``path`` and, with ``foreground``, to stderr too; to no other
    file from now on. Raises OSError if the file cannot be written."""
    formatter = JsonFormatter() if settings.format == "json" else TextFormatter()
    file = _PrivateFile(path)
    file.setFormatter(formatter)
    logbook = Logbook(file)
    handlers: list[logging.Handler] = [file, logbook]
    if foreground:
        shown = logging.StreamHandler(sys.stderr)
        journal = _is_journal(sys.stderr)
        shown.setFormatter(JournalFormatter(settings.format) if journal else formatter)
        handlers.append(shown)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(settings.level.upper())
    return logbook


def _is_journal(stream: TextIO) -> bool:
    """Whether systemd has connected ``stream`` with its journal (systemd.exec(5))."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class Limiter:
    """Logs an event at most once per interval and key, with the number suppressed since.

    For faults that may occur with every read. Thread-safe.
    """

    _INTERVAL_S = 60.0
    # A key is a tier or a kind of fault. The limit bounds the memory if a caller uses file names.
    _MAX_KEYS = 1024
    # A count for the whole process: suppressed exceptions count as internal errors, too.
    exceptions_held_back: ClassVar[int] = 0
    _counting: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        # Key -> (time of the last line, number suppressed since); the oldest line first.
        self._lines: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def exception(self, key: Hashable, msg: str, *args: Any) -> None:
        """As ``warning``, at level error and with the traceback of the current exception."""
        self.warning(key, msg, *args, with_trace=True)

    def warning(self, key: Hashable, msg: str, *args: Any, with_trace: bool = False) -> None:
        """Logs ``msg % args`` unless ``key`` was logged less than an interval ago."""
        now = self._clock()
        with self._lock:
            last, held_back = self._lines.get(key, (None, 0))
            if last is not None and now - last < self._INTERVAL_S:
                self._lines[key] = (last, held_back + 1)
                if with_trace:
                    with Limiter._counting:
                        Limiter.exceptions_held_back += 1
                return
            self._lines[key] = (now, 0)
            self._lines.move_to_end(key)
            if len(self._lines) > self._MAX_KEYS:
                self._lines.popitem(last=False)
        if held_back:
            msg, args = msg + " (%d more like this since the last)", (*args, held_back)
        level = logging.ERROR if with_trace else logging.WARNING
        self._logger.log(level, msg, *args, exc_info=with_trace)
