"""What of a pack cannot be read: named once in the log, and in the health of the mount."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A chunk, or a large file, of a pack. ``entries``: the number of files of the tree that cannot
    be read from it."""

    name: str
    what: str
    since_ns: int
    entries: int


@dataclass(eq=False, slots=True)
class _Found:
    name: bytes
    what: str
    since_ns: int
    entries: dict[int, int] = field(default_factory=dict)


class Damage:
    """May be used in any thread. A file that can be read again is no longer damaged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[bytes, _Found] = {}
        self._of: dict[int, bytes] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def found(self, number: int, name: bytes, what: str, entries: int = 1) -> None:
        """The file ``number`` of the tree cannot be read, because the file ``name`` of the pack
        ``what``: "is damaged". ``entries``: the files of the tree that this concerns."""
        with self._lock:
            known = self._found.get(name)
            if known is None:
                known = self._found[name] = _Found(name, what, time.time_ns())
                log.warning(
                    "%s of the pack %s: its files that are affected cannot be read (EIO)",
                    name.decode(),
                    what,
                )
            known.entries[number] = entries
            self._of[number] = name

    def is_read(self, number: int) -> None:
        """The file ``number`` was read, and its bytes are right."""
        with self._lock:
            name = self._of.pop(number, None)
            if name is None:
                return
            found = self._found[name]
            del found.entries[number]
            if not found.entries:
                del self._found[name]
                log.info("%s of the pack can be read again", name.decode())

    def files(self) -> list[DamagedFile]:
        """What is damaged now, the first found first."""
        with self._lock:
            return [
                DamagedFile(it.name.decode(), it.what, it.since_ns, sum(it.entries.values()))
                for it in self._found.values()
            ]
