"""File versions that changed just before they were fetched, and when to check them again.

A version is a size, times and an inode number. Two writes within one tick of the source's clock
make one version with two contents, and a file may be fetched between two writes. So a version
whose times are less than ``WINDOW_NS`` before its fetch is *young*: it is served, and checked
again after that time. If its times are in whole seconds, its bytes must be compared.

The moment of the fetch is needed in the time of the source's clock, which may differ from the local
clock by hours. Monarch knows the newest time that the source has reported, and how long ago that
was: a lower bound of the source's clock. A bound that is too low only marks more versions young.

Time is an argument, in nanoseconds of a monotonic clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from monarch.types import Identity, Ino

WINDOW_NS = 2_000_000_000
_SECOND_NS = 1_000_000_000
# The greatest drift between two clocks, as a fraction: one part in this number.
_DRIFT = 10_000


@dataclass(slots=True, eq=False)
class SourceClock:
    """A lower bound of the source's clock: its newest time known at ``_at_ns``."""

    _newest_ns: int
    _at_ns: int

    def observe(self, time_ns: int, at_ns: int) -> None:
        if time_ns > self.at(at_ns):
            self._newest_ns, self._at_ns = time_ns, at_ns

    def at(self, at_ns: int) -> int:
        passed = at_ns - self._at_ns
        return self._newest_ns + passed - abs(passed) // _DRIFT


@dataclass(frozen=True, slots=True)
class Doubt:
    """``by_bytes``: the bytes may have changed without a change of the version."""

    identity: Identity
    due_ns: int
    by_bytes: bool


class Doubts:
    """``on_added`` is called for each version that is to be checked later."""

    def __init__(self, clock: SourceClock) -> None:
        self.on_added: Callable[[], None] = lambda: None
        self._clock = clock
        self._doubts: dict[Ino, Doubt] = {}
        self._due: list[tuple[int, Ino]] = []

    def fetched(self, ino: Ino, identity: Identity, *, since_ns: int) -> None:
        """Records that a file was fetched as version ``identity``, at ``since_ns`` or later."""
        # A program can set the modification time; the change time is of the source's clock.
        changed = identity.ctime_ns or identity.mtime_ns
        self._clock.observe(changed, since_ns)
        now = self._clock.at(since_ns)
        newest = max(changed, identity.mtime_ns if identity.mtime_ns <= now else changed)
        if newest <= now - WINDOW_NS:
            return
        by_bytes = not (identity.mtime_ns % _SECOND_NS or changed % _SECOND_NS)
        before = self._doubts.get(ino)
        if before is not None and before.identity == identity:
            by_bytes |= before.by_bytes
        # The added part is for the drift of the clocks.
        self._put(ino, Doubt(identity, since_ns + WINDOW_NS + WINDOW_NS // 1000, by_bytes))

    def renew(self, ino: Ino, before: Identity, now: Identity) -> None:
        """A version has another identity by a change of its attributes: it is checked as that."""
        doubt = self._doubts.get(ino)
        if doubt is not None and doubt.identity == before:
            # With a time of its own: the earlier one may be in the hands of a caller of ``due``.
            self._put(ino, Doubt(now, doubt.due_ns + 1, doubt.by_bytes))

    def postpone(self, ino: Ino, identity: Identity, *, until_ns: int) -> None:
        """A copy of a version is to be compared again at ``until_ns``, unless it is already."""
        if ino not in self._doubts:
            self._put(ino, Doubt(identity, until_ns, by_bytes=False))

    def by_bytes(self, ino: Ino, identity: Identity) -> bool:
        """Whether a later mount must not trust a copy of that version."""
        doubt = self._doubts.get(ino)
        return doubt is not None and doubt.by_bytes and doubt.identity == identity

    def is_empty(self) -> bool:
        """Whether no version is to be checked at any time."""
        return not self._due

    def due(self, now_ns: int) -> list[tuple[Ino, Doubt]]:
        """The versions whose time has passed; each must be settled or put off."""
        found = []
        while self._due and self._due[0][0] <= now_ns:
            due_ns, ino = heapq.heappop(self._due)
            doubt = self._doubts.get(ino)
            if doubt is not None and doubt.due_ns == due_ns:
                found.append((ino, doubt))
        return found

    def settle(self, ino: Ino, doubt: Doubt) -> None:
        """Removes a version that was checked."""
        if self._doubts.get(ino) is doubt:
            del self._doubts[ino]

    def put_off(self, ino: Ino, doubt: Doubt, *, until_ns: int) -> None:
        """Postpones a version that could not be checked."""
        if self._doubts.get(ino) is doubt:
            self._put(ino, Doubt(doubt.identity, until_ns, doubt.by_bytes))

    def _put(self, ino: Ino, doubt: Doubt) -> None:
        self._doubts[ino] = doubt
        heapq.heappush(self._due, (doubt.due_ns, ino))
        self.on_added()
