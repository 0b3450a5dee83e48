"""Patterns of paths: what `absorb` and `rules` of a mount name.

A pattern is a path relative to the mount. ``*``, ``?`` and ``[...]`` match within one name, ``**``
matches any number of directories. A pattern covers the paths that it matches and all paths beneath
them. ``?`` and ``[...]`` match one character of UTF-8, or one byte that is not UTF-8.
"""

from __future__ import annotations

import fnmatch
import re


def check_pattern(pattern: str) -> str:
    """Returns ``pattern``. Raises ValueError, with the correction, if it is not valid."""
    if not pattern or pattern.startswith("/"):
        raise ValueError(f"{pattern!r} must be relative to the mount, like ckpt/**")
    if any(part in ("", ".", "..") for part in pattern.rstrip("/").split("/")):
        raise ValueError(f"{pattern!r} holds an empty part, '.' or '..'; write it like ckpt/**")
    if "\0" in pattern:
        raise ValueError(f"{pattern!r} contains a NUL byte, which no path may")
    return pattern


class PathPattern:
    """A pattern, as an automaton: the names of a path are given one after the other.

    Its state is a number: bit i is set if the first i parts of the pattern match the names so far.
    State 0: no path beneath is covered. The states of all entries of a directory follow from that
    of the directory, so it can be kept for the next entry.
    """

    def __init__(self, pattern: str) -> None:
        parts = _text(pattern.encode("utf-8", "surrogateescape")).rstrip("/").split("/")
        while len(parts) > 1 and parts[-1] == "**":
            parts.pop()
        # None for `**`.
        self._parts = [
            None if part == "**" else re.compile(fnmatch.translate(part)) for part in parts
        ]
        self.start = self._closed(1)

    def covers(self, state: int) -> bool:
        """Whether the names so far, and so all paths beneath them, are covered."""
        return bool(state >> len(self._parts) & 1)

    def after(self, state: int, name: bytes) -> int:
        """The state after one more name."""
        if not state or self.covers(state):
            return state
        reached = 0
        text = _text(name)
        for index, part in enumerate(self._parts):
            if state >> index & 1:
                if part is None:
                    reached |= 1 << index
                elif part.match(text):
                    reached |= 2 << index
        return self._closed(reached)

    def _closed(self, state: int) -> int:
        """Adds the parts that match without a name: ``**`` matches no directory, too."""
        for index, part in enumerate(self._parts):
            if part is None and state >> index & 1:
                state |= 2 << index
        return state


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
