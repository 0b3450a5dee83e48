"""Which paths of a mount may be written, and which names are those of temporary files.

A pattern is a path relative to the mount. ``*``, ``?`` and ``[...]`` match within one name, ``**``
matches any number of directories. A pattern covers the paths that it matches and all paths beneath
them. Directories that lead to a pattern may be created if they do not exist.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence


def is_staged(name: bytes) -> bool:
    """Whether ``name`` is of a file being written to the source, before its final rename."""
    return name.startswith(b".monarch-") and name.endswith(b".part")


def check_pattern(pattern: str) -> str:
    """Returns ``pattern``. Raises ValueError, with the correction, if it is not valid."""
    if not pattern or pattern.startswith("/"):
        raise ValueError(f"{pattern!r} must be relative to the mount, like ckpt/**")
    if any(part in ("", ".", "..") for part in pattern.rstrip("/").split("/")):
        raise ValueError(f"{pattern!r} holds an empty part, '.' or '..'; write it like ckpt/**")
    if "\0" in pattern:
        raise ValueError(f"{pattern!r} contains a NUL byte, which no path may")
    return pattern


class WritePatterns:
    """The patterns of a mount; tells whether a path, relative to the mount, may be written."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [_compiled(pattern) for pattern in patterns]

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def covers(self, path: bytes) -> bool:
        """Whether ``path`` may be created, written, renamed or removed."""
        parts = path.split(b"/") if path else []
        return any(_matches(pattern, parts) for pattern in self._patterns)

    def leads_to(self, path: bytes) -> bool:
        """Whether a pattern can match a path beneath the directory ``path``."""
        parts = path.split(b"/") if path else []
        return any(_leads(pattern, parts) for pattern in self._patterns)


def _compiled(pattern: str) -> list[re.Pattern[bytes] | None]:
    """One expression for each part, None for ``**``; a ``**`` at the end is dropped."""
    parts = pattern.rstrip("/").split("/")
    while len(parts) > 1 and parts[-1] == "**":
        parts.pop()
    texts = [fnmatch.translate(part).encode("utf-8", "surrogateescape") for part in parts]
    return [
        None if part == "**" else re.compile(text) for part, text in zip(parts, texts, strict=True)
    ]


def _matches(pattern: Sequence[re.Pattern[bytes] | None], parts: Sequence[bytes]) -> bool:
    """Whether the pattern matches these parts or a directory above them."""
    if not pattern:
        return True
    first, rest = pattern[0], pattern[1:]
    if first is None:
        return any(_matches(rest, parts[skipped:]) for skipped in range(len(parts) + 1))
    return bool(parts) and bool(first.match(parts[0])) and _matches(rest, parts[1:])


def _leads(pattern: Sequence[re.Pattern[bytes] | None], parts: Sequence[bytes]) -> bool:
    """Whether a path beneath these parts can match."""
    if not parts or not pattern or pattern[0] is None:
        return True
    return bool(pattern[0].match(parts[0])) and _leads(pattern[1:], parts[1:])
