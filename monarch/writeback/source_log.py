"""Events at the source for the user: conflicts, and attributes that the source does not support."""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from dataclasses import dataclass

from monarch.text import errno_words

log = logging.getLogger(__name__)

_NAME_MAX = 255
# Digits of a journal's token in a conflict name.
_TOKEN_DIGITS = 6
# The conflicts, and the extended attributes, that are kept for the status.
_MOST_KEPT = 100


@dataclass(frozen=True, slots=True)
class Conflict:
    """``kept`` is the path of the bytes that were written on the mount, empty if there are none."""

    path: bytes
    kept: bytes
    why: str


class SourceLog:
    """``token`` of the journal and ``node`` are parts of conflict names.

    ``conflicts`` are the last ones, ``conflict_count`` counts all. ``dropped_xattrs`` are the last
    extended attributes, by path and name, that the source has not taken, with the reason. All
    methods may be called from any thread.
    """

    def __init__(self, token: str, node: str | None = None) -> None:
        # Two mounts of one node, or a new journal, also count changes from 1.
        self._ending = b".monarch-conflict-%s-%s-" % (
            os.fsencode(os.uname().nodename if node is None else node),
            token[:_TOKEN_DIGITS].encode("ascii"),
        )
        self._refused: set[tuple[str, int]] = set()
        self.conflicts: deque[Conflict] = deque(maxlen=_MOST_KEPT)
        self.conflict_count = 0
        self.dropped_xattrs: dict[tuple[bytes, bytes], str] = {}

    def conflict_name(self, name: bytes, seq: int) -> bytes:
        """The name for the version of change ``seq``, kept beside ``name``, which belongs to others
        now."""
        ending = b"%s%d" % (self._ending, seq)
        return name[: _NAME_MAX - len(ending)] + ending

    def note_conflict(self, path: bytes, why: str, *, kept: bytes = b"") -> None:
        """``kept`` is the name, in the directory of ``path``, of the bytes that were written. The
        same bytes are reported once."""
        if kept:
            directory, slash, _ = path.rpartition(b"/")
            kept = directory + slash + kept
        if kept and any(each.kept == kept for each in self.conflicts):
            return
        self.conflicts.append(Conflict(path, kept, why))
        self.conflict_count += 1
        where = f"; what was written here is kept as {os.fsdecode(kept)!r}" if kept else ""
        log.warning("source: conflict: %r %s%s", os.fsdecode(path), why, where)

    def forget(self) -> None:
        """Call this when the user has acknowledged the conflicts and dropped attributes."""
        self.conflicts.clear()
        self.dropped_xattrs.clear()
        self.conflict_count = 0

    def note_refused(self, what: str, error: OSError, path: bytes) -> None:
        """Warns that the source does not support ``what``: once for each reason."""
        number = error.errno or errno.EIO
        if (what, number) not in self._refused:
            self._refused.add((what, number))
            log.warning(
                "source: it does not take %s as they are here: %r: %s; reported once",
                what,
                os.fsdecode(path),
                errno_words(number),
            )

    def note_dropped(self, path: bytes, name: bytes, why: str) -> None:
        """Records that the source has not accepted the extended attribute ``name``."""
        self.dropped_xattrs[path, name] = why
        # Other threads change the table as well.
        for oldest in list(self.dropped_xattrs)[:-_MOST_KEPT]:
            self.dropped_xattrs.pop(oldest, None)

    def note_taken(self, path: bytes, name: bytes) -> None:
        """Records that the source has the value of ``name`` that was set on the mount."""
        self.dropped_xattrs.pop((path, name), None)

    def note_removed(self, path: bytes) -> None:
        """Call this when the file at ``path`` was removed on the mount, with its extended
        attributes."""
        for dropped in list(self.dropped_xattrs):
            if dropped[0] == path:
                self.dropped_xattrs.pop(dropped, None)
