"""Carries out the rules for paths: counts their files, removes copies, and fetches pinned files.

Pinned files are fetched as files that a reader will open: the last of all, when no other file is
foreseen. A pinned file that could not be fetched, or has lost its copy, is tried again later.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable

import trio

from monarch.placement.rules import Part, Rules
from monarch.text import counted
from monarch.transfer.ahead import Foreseen
from monarch.types import Ino

log = logging.getLogger(__name__)

# Pinned files in memory that wait to be fetched, about.
_MOST_WAITING = 4096
# The pause between two searches for pinned files without a copy: doubles while no file is fetched.
_PAUSES_S = (60.0, 600.0)


class RuledFiles:
    """Belongs to the event loop. ``foreseen`` goes before pinned files. ``tier_of`` returns the
    tier of a file's copy, 0 if there is none; ``is_large`` whether its copy takes long; ``evict``
    removes a copy; ``counted`` is called once when the files of the rules are counted."""

    def __init__(
        self,
        rules: Rules,
        foreseen: Foreseen,
        *,
        tier_of: Callable[[Ino], int],
        is_large: Callable[[Ino], bool],
        evict: Callable[[Ino], object],
        counted: Callable[[], None],
    ) -> None:
        self._rules = rules
        self._foreseen = foreseen
        self._tier_of = tier_of
        self._is_large = is_large
        self._evict = evict
        self._counted = counted
        # Is called when ``next`` may return files again.
        self.wake: Callable[[], None] = _nothing
        self._waiting: deque[Ino] = deque()
        # Given out, and not answered yet.
        self._given: set[Ino] = set()
        self._large: set[Ino] = set()
        self._answered = trio.Event()
        self._fetched = 0

    # -- what FetchAhead calls -----------------------------------------------------------------

    def next(self, most: int) -> list[Ino]:
        inos = self._foreseen.next(most)
        return inos + self.pinned(most - len(inos))

    def pinned(self, most: int) -> list[Ino]:
        inos: list[Ino] = []
        while len(inos) < most and self._waiting:
            ino = self._waiting[0]
            if self._is_large(ino):
                if self._large:
                    # One at a time: large files that are foreseen do not wait for many.
                    break
                self._large.add(ino)
            inos.append(self._waiting.popleft())
            self._given.add(ino)
        return inos

    def is_foreseen(self, ino: Ino) -> bool:
        return ino in self._given or self._foreseen.is_foreseen(ino)

    def fetched(self, ino: Ino, nbytes: int) -> None:
        if ino in self._given:
            self._fetched += 1
            self._end(ino)
        else:
            self._foreseen.fetched(ino, nbytes)

    def refused(self, ino: Ino) -> None:
        if ino in self._given:
            self._end(ino)
        else:
            self._foreseen.refused(ino)

    def is_announced(self, ino: Ino) -> bool:
        return self._foreseen.is_announced(ino)

    def is_idle(self, ino: Ino) -> bool:
        return self._foreseen.is_idle(ino)

    def is_recognised(self, ino: Ino) -> bool:
        return self._foreseen.is_recognised(ino)

    def reader_of(self, ino: Ino) -> Hashable:
        return "pinned" if ino in self._given else self._foreseen.reader_of(ino)

    def is_expected_again(self, ino: Ino, job: int) -> bool:
        return self._foreseen.is_expected_again(ino, job)

    def _end(self, ino: Ino) -> None:
        self._given.discard(ino)
        self._large.discard(ino)
        self._answered.set()

    # -- the task ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Counts the files of all rules and removes copies that no rule allows; then fetches the
        pinned files, until cancelled. Other tasks run after each slice."""
        if not self._rules.rules:
            return
        removed = 0
        for parts in self._rules.measure():
            for part in parts:
                removed += self._remove_copies(part)
            await trio.sleep(0)
        self._counted()
        if removed:
            log.info("%s removed: a rule excludes them", counted(removed, "copy", "copies"))
        if any(rule.pin for rule in self._rules.rules):
            await self._fetch_pinned()

    def _remove_copies(self, part: Part) -> int:
        """Removes the copies that the rule does not allow; their number."""
        rule, removed = part.rule, 0
        if not rule.never and rule.tier is None:
            return 0
        for ino in part.inos.tolist():
            tier = self._tier_of(ino)
            if tier and tier != rule.tier:
                self._evict(ino)
                removed += 1
        return removed

    async def _fetch_pinned(self) -> None:
        pause_s, longest_s = _PAUSES_S
        while True:
            self._fetched = 0
            for inos in self._rules.pinned() if self._rules.misses_pinned else ():
                self._waiting.extend(inos)
                if inos:
                    self.wake()
                await trio.sleep(0)
                await self._until_waiting(_MOST_WAITING)
            await self._until_waiting(0)
            pause_s = _PAUSES_S[0] if self._fetched else min(2 * pause_s, longest_s)
            await trio.sleep(pause_s)

    async def _until_waiting(self, most: int) -> None:
        """Returns when at most ``most`` files wait or are being fetched."""
        while len(self._waiting) + len(self._given) > most:
            self._answered = trio.Event()
            await self._answered.wait()
            self.wake()


def _nothing() -> None:
    """Until ``wake`` is set."""
