"""Remembers which written files lost their bytes, until the loss is acknowledged.

In the state directory, so that neither a restart nor an unmount takes the alarm away unheard.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from monarch.footing import private_opener

log = logging.getLogger(__name__)

_NAME = "lost.json"
# As many names as a person may go through; beyond that the log has them.
_MOST = 10_000


class Lost:
    """``state`` is the state directory. Calls are short file operations, and none raises."""

    def __init__(self, state: Path) -> None:
        self._path = state / _NAME
        self._names = dict.fromkeys(self._read())
        # What the drain tells of, it goes on telling of.
        self._heard: set[bytes] = set()

    @property
    def names(self) -> tuple[bytes, ...]:
        """Paths in the mount, in the order in which they were told."""
        return tuple(self._names)

    def hear(self, names: Iterable[bytes]) -> None:
        """All that is known to be lost in this life of the daemon."""
        new = [name for name in names if name not in self._heard]
        if not new:
            return
        self._heard.update(new)
        self._names.update(dict.fromkeys(new[: max(0, _MOST - len(self._names))]))
        self._write()

    def acknowledge(self) -> None:
        """Somebody knows: there is no alarm until more is lost."""
        self._names.clear()
        self._write()

    def _read(self) -> list[bytes]:
        try:
            told = json.loads(self._path.read_bytes())
            return [os.fsencode(name) for name in told]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, RecursionError) as error:
            log.warning("%s cannot be read (%s); what it told of is in older logs", _NAME, error)
            return []

    def _write(self) -> None:
        staged = self._path.with_name(f"{_NAME}.part")
        try:
            if not self._names:
                self._path.unlink(missing_ok=True)
                return
            with open(staged, "w", encoding="ascii", opener=private_opener) as file:
                json.dump([os.fsdecode(name) for name in self._names], file)
                file.flush()
                os.fsync(file.fileno())
            staged.rename(self._path)
        except OSError as error:
            with suppress(OSError):
                staged.unlink()
            log.warning("%s cannot be written: %s; it is forgotten at the end", _NAME, error)
