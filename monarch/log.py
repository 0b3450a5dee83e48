"""The log of a daemon: one line an event, in text or JSON, that no file name can forge."""

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

from monarch.settings import LogSettings
from monarch.text import escape_text
from monarch.units import MiB

# Three files of this size hold weeks of normal running, and cannot fill a state directory.
_FILE_BYTES = 10 * MiB
_OLD_FILES = 2
# Of syslog, by the least level that has each.
_PRIORITIES = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
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
        """The part that the journal of systemd does not know by itself."""
        line = f"{record.name}: {escape_text(record.getMessage())}"
        if record.exc_info:
            trace = self.formatException(record.exc_info).splitlines()
            # Indented, no line of a traceback can pass for an event.
            line = "\n    ".join([line, *map(escape_text, trace)])
        return line


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
    """``<4>monarch.tiers: message`` for the journal of systemd, which has a clock of its own.

    Each line of an event bears its priority, in the numbers of syslog. A line of JSON stays one.
    """

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
    """A log file that only its owner reads: it holds the names of the files.

    ``trouble`` is what it could not write the last line for; ``missing`` counts lines since then.
    """

    trouble: Unwritable | None = None
    missing = 0

    def _open(self) -> Any:
        # `errors` for what an exception's text may still hold.
        return open(
            self.baseFilename, self.mode, encoding="utf-8", errors="backslashreplace", opener=_own
        )

    def emit(self, record: logging.LogRecord) -> None:
        missing = self.missing
        super().emit(record)
        if self.missing == missing:
            self.trouble, self.missing = None, 0

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        # A disk that is full under the log is no reason to flood stderr with tracebacks.
        self.missing += 1
        if self.trouble is None:
            self.trouble = Unwritable(error.strerror or str(error), time.time_ns())


class Logbook(logging.Handler):
    """What the log knows of itself: where it is, whether it can be written, what it had to tell.

    ``exceptions`` counts the internal errors, those whose traceback was held back included.
    """

    def __init__(self, file: _PrivateFile) -> None:
        super().__init__(logging.ERROR)
        self._file = file
        self.path = file.baseFilename
        self._told = 0
        self._held_back_before = Limiter.exceptions_held_back

    @property
    def exceptions(self) -> int:
        return self._told + Limiter.exceptions_held_back - self._held_back_before

    def emit(self, record: logging.LogRecord) -> None:
        self._told += record.exc_info is not None

    def trouble(self) -> Unwritable | None:
        """Why lines are missing now. Tries again, so a disk that has room again is noticed."""
        if self._file.trouble is not None:
            told = "lines may be missing here: the log could not be written for a while (%s)"
            self._file.handle(
                logging.LogRecord(
                    __name__, logging.WARNING, "", 0, told, (self._file.trouble.what,), None
                )
            )
        return self._file.trouble


def _own(path: str, flags: int) -> int:
    # Through a link planted in a directory of others we would write into a file of ours.
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # Not that of a device: `file: /dev/null` must not take it from everybody.
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.fchmod(fd, 0o600)
    except OSError:
        os.close(fd)
        raise
    return fd


def setup(settings: LogSettings, *, path: Path, foreground: bool) -> Logbook:
    """Sends what the process logs to the file ``path`` and, in the foreground, to stderr too.

    Replaces what an earlier call set up. Raises OSError when the file cannot be written.
    """
    formatter = JsonFormatter() if settings.format == "json" else TextFormatter()
    file = _PrivateFile(path, maxBytes=_FILE_BYTES, backupCount=_OLD_FILES)
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
    """Lets an event through once per interval and key, with the number held back since.

    For faults that come with each read. Safe to use from any thread.
    """

    # A key is a tier or a kind of fault; if somebody uses file names, memory stays bounded.
    _MAX_KEYS = 1024
    # Of the whole process, so that what is not in the log is counted all the same.
    exceptions_held_back: ClassVar[int] = 0
    _counting: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, interval_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        # Key -> (time of the last line, how many held back since); the oldest line first.
        self._lines: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def warning(self, logger: logging.Logger, key: Hashable, msg: str, *args: Any) -> None:
        """Logs ``msg % args`` unless ``key`` was logged less than an interval ago."""
        self._log(logger, logging.WARNING, key, msg, args, exc_info=False)

    def exception(self, logger: logging.Logger, key: Hashable, msg: str, *args: Any) -> None:
        """The same as an error, with the traceback of the exception that is being handled."""
        self._log(logger, logging.ERROR, key, msg, args, exc_info=True)

    def _log(
        self,
        logger: logging.Logger,
        level: int,
        key: Hashable,
        msg: str,
        args: tuple[Any, ...],
        *,
        exc_info: bool,
    ) -> None:
        now = self._clock()
        with self._lock:
            last, held_back = self._lines.get(key, (None, 0))
            if last is not None and now - last < self._interval_s:
                self._lines[key] = (last, held_back + 1)
                if exc_info:
                    with Limiter._counting:
                        Limiter.exceptions_held_back += 1
                return
            self._lines[key] = (now, 0)
            self._lines.move_to_end(key)
            if len(self._lines) > self._MAX_KEYS:
                self._lines.popitem(last=False)
        if held_back:
            msg, args = msg + " (%d more like this since the last)", (*args, held_back)
        logger.log(level, msg, *args, exc_info=exc_info)
