"""Which paths of a mount may be written, and what never is a file of the source.

A pattern is a path relative to the mount, as an administrator writes it; ``*``, ``?`` and
``[...]`` stand for parts of one name, ``**`` for any number of directories. What a pattern names is
covered with everything beneath it, and the directories that lead to a pattern may be made, if they
are not there yet.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence


def is_staged(name: bytes) -> bool:
    """Whether it is on its way to the source and has not its own name yet (writeback/home.py)."""
    return name.startswith(b".monarch-") and name.endswith(b".part")


def check_pattern(pattern: str) -> None:
    """Raises ValueError with what is wrong and what to write."""
    if not pattern or pattern.startswith("/"):
        raise ValueError(f"{pattern!r} must be relative to the mount, like ckpt/**")
    if any(part in ("", ".", "..") for part in pattern.rstrip("/").split("/")):
        raise ValueError(f"{pattern!r} holds an empty part, '.' or '..'; write it like ckpt/**")
    if "\0" in pattern:
        raise ValueError(f"{pattern!r} holds a NUL byte; no path can")


class Covered:
    """Answers for paths relative to the mount whether they may be written."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [_compiled(pattern) for pattern in patterns]

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def covers(self, path: bytes) -> bool:
        """Whether what has this name may be changed: made, written, renamed, removed."""
        parts = path.split(b"/") if path else []
        return any(_matches(pattern, parts) for pattern in self._patterns)

    def leads_to(self, path: bytes) -> bool:
        """Whether a pattern may name something beneath this directory."""
        parts = path.split(b"/") if path else []
        return any(_leads(pattern, parts) for pattern in self._patterns)


def _compiled(pattern: str) -> list[re.Pattern[bytes] | None]:
    """One expression for each part, None for ``**``. What ends in ``**`` needs none at its end."""
    parts = pattern.rstrip("/").split("/")
    while len(parts) > 1 and parts[-1] == "**":
        parts.pop()
    return [None if part == "**" else _of_name(part) for part in parts]


def _of_name(part: str) -> re.Pattern[bytes]:
    return re.compile(fnmatch.translate(part).encode("utf-8", "surrogateescape"), re.DOTALL)


def _matches(pattern: Sequence[re.Pattern[bytes] | None], parts: Sequence[bytes]) -> bool:
    """Whether the pattern names these parts or a directory above them."""
    if not pattern:
        return True
    first, rest = pattern[0], pattern[1:]
    if first is None:
        return any(_matches(rest, parts[skipped:]) for skipped in range(len(parts) + 1))
    return bool(parts) and bool(first.match(parts[0])) and _matches(rest, parts[1:])


def _leads(pattern: Sequence[re.Pattern[bytes] | None], parts: Sequence[bytes]) -> bool:
    """Whether something beneath these parts may match."""
    if not parts or not pattern or pattern[0] is None:
        return True
    return bool(pattern[0].match(parts[0])) and _leads(pattern[1:], parts[1:])
