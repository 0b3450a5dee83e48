"""Counts opens and hits per epoch, and detects where epochs begin: one byte per inode.

The rule: an epoch ends when a run of opens, none of them of an inode that is new in this epoch,
has touched enough different inodes: half of those seen in the epoch, but at least 2 and at most 64.
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

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from monarch.types import Ino

_KEPT_EPOCHS = 100
_MIN_RUN_INODES = 2
# A run of this length without a new inode does not happen by chance within an epoch. So the next
# epoch is detected after 64 opens, whatever the size of the data set.
_MAX_RUN_INODES = 64
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
        enough = max(_MIN_RUN_INODES, min(_MAX_RUN_INODES, self._distinct // 2))
        if len(self._run) >= enough:
            self._begin_epoch()

    def opened_all(self, inos: Sequence[Ino]) -> None:
        """As ``opened`` for each of ``inos``, none of them a hit."""
        seen_in, mark = self._seen_in, self._mark
        # Those since the last file that was not new.
        new = 0
        for ino in inos:
            if seen_in[ino] != mark:
                seen_in[ino] = mark
                new += 1
                continue
            if new:
                self._opened_new(new)
                new = 0
            self.opened(ino, hit=False)
            mark = self._mark
        if new:
            self._opened_new(new)

    def _opened_new(self, count: int) -> None:
        self._opens += count
        self._distinct += count
        self._forget_run()

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
        if self._run:
            self._run = set()
            self._run_opens = 0
            self._run_hits = 0
