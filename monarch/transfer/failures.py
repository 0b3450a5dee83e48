"""Pauses after copies that failed: of the file whose copy failed, or of all copies.

Pure: time is an argument, in seconds of a monotonic clock.

A file that cannot be read delays only its own copy. If copies of several files fail one after the
other and none succeeds, the source fails, and all copies rest. A file that failed before is no new
evidence against the source.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from monarch.types import Ino

# A pause doubles from the first value up to the second, in seconds.
_PAUSE_S = (1.0, 60.0)
# The number of files that fail in succession until all copies rest.
_FILES = 3
# Files whose failures are remembered; the one that failed first is forgotten first.
_REMEMBERED = 4096


@dataclass(slots=True)
class _Pause:
    until_s: float
    length_s: float


class Failures:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._files: OrderedDict[Ino, _Pause] = OrderedDict()
        self._in_succession = 0
        self._rest_until_s = -math.inf
        self._rest_s = _PAUSE_S[0]

    def failed(self, ino: Ino, now: float, *, is_tier: bool) -> None:
        """Records that the copy of a file failed; ``is_tier``: by the tier, not by the source."""
        is_new = not is_tier and ino not in self._files
        if not is_tier:
            self._pause(ino, now)
            self._in_succession += is_new
        is_general = is_tier or (is_new and self._in_succession >= _FILES)
        # Copies that ran at the same time fail for the same reason: they count as one failure.
        if is_general and not self.rests(now):
            self._rest_until_s = now + self._rest_s
            self._rest_s = min(2 * self._rest_s, _PAUSE_S[1])

    def _pause(self, ino: Ino, now: float) -> None:
        """Delays the next copy of a file."""
        before = self._files.get(ino)
        length_s = _PAUSE_S[0] if before is None else min(2 * before.length_s, _PAUSE_S[1])
        self._files[ino] = _Pause(now + length_s, length_s)
        if len(self._files) > _REMEMBERED:
            self._files.popitem(last=False)

    def succeeded(self, ino: Ino) -> None:
        """Records that a copy was made."""
        self._files.pop(ino, None)
        self._in_succession = 0
        self._rest_s = _PAUSE_S[0]

    def rests(self, now: float) -> bool:
        """Whether all copies rest."""
        return now < self._rest_until_s

    def is_resting(self, ino: Ino, now: float) -> bool:
        """Whether the copy of this file waits, since it failed not long ago."""
        pause = self._files.get(ino)
        return pause is not None and now < pause.until_s

    def end(self) -> None:
        """All copies rest from now on."""
        self._rest_until_s = math.inf
