"""Which paths of a mount may be written, and which names are those of temporary files.

Directories that lead to a pattern may be created if they do not exist.
"""

from __future__ import annotations

from collections.abc import Sequence

from monarch.config.path_pattern import PathPattern


def is_staged(name: bytes) -> bool:
    """Whether ``name`` is of a file being written to the source, before its final rename."""
    return name.startswith(b".monarch-") and name.endswith(b".part")


class WritePatterns:
    """The patterns of a mount; tells whether a path, relative to the mount, may be written."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [PathPattern(pattern) for pattern in patterns]

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def covers(self, path: bytes) -> bool:
        """Whether ``path`` may be created, written, renamed or removed."""
        return any(pattern.covers(_state(pattern, path)) for pattern in self._patterns)

    def leads_to(self, path: bytes) -> bool:
        """Whether a pattern can match a path beneath the directory ``path``."""
        return any(_state(pattern, path) for pattern in self._patterns)


def _state(pattern: PathPattern, path: bytes) -> int:
    state = pattern.start
    for name in path.split(b"/") if path else ():
        state = pattern.after(state, name)
    return state
