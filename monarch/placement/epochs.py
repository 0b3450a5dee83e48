"""Counts opens and hits per epoch, and detects where epochs begin: one byte per inode.

The rule: an epoch ends when a run of opens, none of them of an inode that is new in this epoch,
has touched enough different inodes: half of those seen in the epoch, but at least 2 and at most 64
(``telemetry/passes.py``). A run of 64 does not happen by chance within an epoch, so the next epoch
is detected after 64 opens, whatever the size of the data set.
The opens of that run and their hits then belong to the new epoch. So the counts are exact for
passes over two or more files that open each file once, in any order.

Repeated opens of the same few inodes stay in their epoch: only different inodes count. Limits of
the rule:

* A single file has no epochs, since opening it again looks like a pass: all its opens are in one.
* If the first few files are opened twice in turn (a script that reads two samples before it
  starts), they are an epoch while no other file has been seen.
* If a file is opened twice in a row at the end of a pass, the second open counts for the next.
* A pass that begins before the previous one is complete (a shuffle across epochs, two jobs on
  one data set) is split where the last new inode was seen; two jobs count as one.
* A job over fewer than 64 files of a much larger set ends no epoch until other files are opened.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

from monarch.telemetry import passes
from monarch.telemetry.passes import Pass
from monarch.types import Ino

_KEPT_EPOCHS = 100
_LAST_MARK = 255


@dataclass(frozen=True, slots=True)
class EpochCount:
    """The counts of one epoch; ``number`` is 1 for the first epoch since the mount."""

    number: int
    opens: int
    hits: int


class Epochs:
    """Counts for the inodes 1 to ``entries``."""

    def __init__(self, entries: int) -> None:
        self._seen_in = bytearray(entries + 1)  # mark of the epoch that saw the inode last
        self._mark = 1
        self._number = 1
        self._opens = 0
        self._hits = 0
        self._distinct = 0
        self._run: set[Ino] = set()
        self._run_opens = 0
        self._run_hits = 0
        self._finished: deque[EpochCount] = deque(maxlen=_KEPT_EPOCHS - 1)

    def epochs(self) -> list[EpochCount]:
        """The last 100 epochs, oldest first. The last is not finished: a run may still leave it."""
        return [*self._finished, EpochCount(self._number, self._opens, self._hits)]

    @property
    def number(self) -> int:
        """The number of the present epoch."""
        return self._number

    @property
    def is_undecided(self) -> bool:
        """Whether the last open may be found to belong to the next epoch."""
        return self._run_opens > 0

    def left(self, ino: Ino) -> None:
        """Records that a file was removed, or is written, so that it is not opened again: the end
        of the epoch is found among the others. Its opens count."""
        if ino < len(self._seen_in) and self._seen_in[ino] == self._mark:
            self._seen_in[ino] = 0
            self._distinct -= 1
            self._run.discard(ino)

    def opened(self, ino: Ino, hit: bool) -> None:
        self._opens += 1
        self._hits += hit
        if self._seen_in[ino] != self._mark:
            self._seen_in[ino] = self._mark
            self._distinct += 1
            self._forget_run()
            return
        self._run.add(ino)
        self._run_opens += 1
        self._run_hits += hit
        if passes.ends_pass(len(self._run), self._distinct):
            self._begin_epoch()

    def opened_all(self, inos: array[int]) -> None:
        """As ``opened`` for each of ``inos``, an array of type I, none of them a hit."""
        at = 0
        while at < len(inos) and passes.can_count():
            now = Pass(
                first=0,
                seen=self._seen_in,
                mark=self._mark,
                opens=self._opens,
                files=self._distinct,
                run=self._run,
                run_opens=self._run_opens,
            )
            at = now.count(inos, at)
            if now.files > self._distinct:
                # The run that may have had hits is over.
                self._run_hits = 0
            self._opens, self._distinct = now.opens, now.files
            self._run, self._run_opens = set(map(Ino, now.run)), now.run_opens
            if passes.ends_pass(len(self._run), self._distinct):
                self._begin_epoch()
        for ino in inos[at:]:
            self.opened(Ino(ino), hit=False)

    def _begin_epoch(self) -> None:
        self._finished.append(
            EpochCount(self._number, self._opens - self._run_opens, self._hits - self._run_hits)
        )
        self._number += 1
        self._opens = self._run_opens
        self._hits = self._run_hits
        self._distinct = len(self._run)
        if self._mark == _LAST_MARK:
            # Marks are reused: one of 255 epochs ago must not look like one of this epoch.
            self._seen_in[:] = bytes(len(self._seen_in))
            self._mark = 0
        self._mark += 1
        for ino in self._run:
            self._seen_in[ino] = self._mark
        self._forget_run()

    def _forget_run(self) -> None:
        # Its files may be gone.
        if self._run_opens:
            self._run = set()
            self._run_opens = 0
            self._run_hits = 0
