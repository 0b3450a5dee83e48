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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from monarch.settings import LogSettings
from monarch.text import escape_text
from monarch.units import MiB

# Three files of this size hold weeks of normal running, and cannot fill a state directory.
_FILE_BYTES = 10 * MiB
_OLD_FILES = 2


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.000Z warning monarch.tiers: message``; a traceback is indented."""

    def format(self, record: logging.LogRecord) -> str:
        message = escape_text(record.getMessage())
        line = f"{_time(record)} {record.levelname.lower()} {record.name}: {message}"
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


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """A log file that only its owner reads: it holds the names of the files."""

    def _open(self) -> Any:
        # `errors` for what an exception's text may still hold.
        return open(
            self.baseFilename, self.mode, encoding="utf-8", errors="backslashreplace", opener=_own
        )

    def handleError(self, record: logging.LogRecord) -> None:
        # A disk that is full under the log is no reason to flood stderr with tracebacks.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


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


def setup(settings: LogSettings, *, path: Path, foreground: bool) -> None:
    """Sends what the process logs to the file ``path`` and, in the foreground, to stderr too.

    Replaces what an earlier call set up. Raises OSError when the file cannot be written.
    """
    handlers: list[logging.Handler] = [
        _PrivateFile(path, maxBytes=_FILE_BYTES, backupCount=_OLD_FILES)
    ]
    if foreground:
        handlers.append(logging.StreamHandler(sys.stderr))
    formatter = JsonFormatter() if settings.format == "json" else TextFormatter()
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(settings.level.upper())


class Limiter:
    """Lets a warning through once per interval and key, with the number held back since.

    For faults that come with each read. Safe to use from any thread.
    """

    # A key is a tier or a kind of fault; if somebody uses file names, memory stays bounded.
    _MAX_KEYS = 1024

    def __init__(self, interval_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        # Key -> (time of the last line, how many held back since); the oldest line first.
        self._lines: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def warning(self, logger: logging.Logger, key: Hashable, msg: str, *args: Any) -> None:
        """Logs ``msg % args`` unless ``key`` was logged less than an interval ago."""
        now = self._clock()
        with self._lock:
            last, held_back = self._lines.get(key, (None, 0))
            if last is not None and now - last < self._interval_s:
                self._lines[key] = (last, held_back + 1)
                return
            self._lines[key] = (now, 0)
            self._lines.move_to_end(key)
            if len(self._lines) > self._MAX_KEYS:
                self._lines.popitem(last=False)
        if held_back:
            logger.warning(msg + " (%d more like this since the last)", *args, held_back)
        else:
            logger.warning(msg, *args)
