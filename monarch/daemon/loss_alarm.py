"""Remembers which written files lost their bytes, until the loss is acknowledged.

The list is kept in the state directory: a restart or an unmount does not end the alarm.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from monarch.posix.private_directory import replace_private

log = logging.getLogger(__name__)

_NAME = "lost.json"
# The list keeps at most this many names; the log has all.
_MOST = 10_000


class LossAlarm:
    """``state`` is the state directory. Calls are short file operations; none raises."""

    def __init__(self, state: Path) -> None:
        self._path = state / _NAME
        self._names = dict.fromkeys(self._read())
        # Names that were reported before: the drain reports each repeatedly.
        self._heard: set[bytes] = set()

    @property
    def names(self) -> tuple[bytes, ...]:
        """Paths in the mount, in the order in which they were reported."""
        return tuple(self._names)

    def report(self, names: Iterable[bytes]) -> None:
        """Adds ``names``, all files known to be lost since the daemon started."""
        new = [name for name in names if name not in self._heard]
        if not new:
            return
        self._heard.update(new)
        self._names.update(dict.fromkeys(new[: max(0, _MOST - len(self._names))]))
        self._write()

    def acknowledge(self) -> None:
        """Ends the alarm, until further files are lost."""
        self._names.clear()
        self._write()

    def _read(self) -> list[bytes]:
        try:
            raw = json.loads(self._path.read_bytes())
            return [os.fsencode(name) for name in raw]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, RecursionError) as error:
            log.warning("%s cannot be read (%s); its names are in older logs", _NAME, error)
            return []

    def _write(self) -> None:
        try:
            if not self._names:
                self._path.unlink(missing_ok=True)
                return
            names = [os.fsdecode(name) for name in self._names]
            replace_private(self._path, json.dumps(names))
        except OSError as error:
            log.warning(
                "%s cannot be written: %s; the loss is not remembered after the daemon ends",
                _NAME,
                error,
            )
