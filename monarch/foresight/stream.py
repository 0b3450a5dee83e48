"""One stream of opens: a job that reads the files of a subtree, its order and its epochs.

A stream tests one window of its opens after the other. Two windows in a row with the same result
change the recognised pattern, so one window that fails a test by chance changes nothing.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence, Set

from monarch.foresight import recognition
from monarch.foresight.marks import GIVEN, GONE, Marks
from monarch.foresight.past_order import PastOrder
from monarch.foresight.recognition import LEAST_FILES, Locality, Pattern
from monarch.telemetry import passes
from monarch.telemetry.passes import Pass
from monarch.types import Ino

# Files that are given out ahead of the readers: from the first number, doubled for each window that
# was foreseen, up to the second.
_LEAST_AHEAD, _MOST_AHEAD = 64, 1024
# The share of a window that must have been foreseen for the distance to grow.
_FORESEEN = 0.75
# The share of the files that the readers pass that they must read, about: a job may read, in the
# order of the names, a random choice of the files. It is counted over some 16 windows.
_READ_SHARE = 0.75
_FADING = 15 / 16
# A reader may come so many windows later to the file before that of another reader; and the windows
# before that which count, too.
_LATER, _EARLIER = 4, 4
# The share of a window that must be in the order of the last epoch for it to be compared.
_KNOWN = 0.75

# A subtree is filled when a random order was recognised and this share of it was read. Until then,
# the files given out and not read are at most a share of those read: the job may read no more.
_FILL_SHARE = 0.2
_EARLY_FILL = 0.1
# Files to be filled for each open, and the most that may be saved up: a fill ends with its readers.
_FILL_PER_OPEN, _MOST_FILL = 32, 2048

# Many opens are at least so many windows: every window of fewer opens is tested.
_MANY_WINDOWS = 3

# A window with a larger share of repeats may be the begin of an epoch. The repeats of the other
# windows show, if they are more than this share of the opens, that the epochs read different files.
_NEXT_EPOCH = 0.9
_MIXED = 0.1

# Windows after which a skewed stream must have shown repeats since the count began.
_LEAST_SKEWED = 4

# Entries of a subtree whose kind is read at once: a millisecond.
_KINDS = 1 << 15
_LOCAL: frozenset[Pattern] = frozenset(("sequential", "strided", "same order"))


class Seen:
    """A set of the numbers below ``size``, one byte each: ``of`` is 1 for those in the set."""

    __slots__ = ("count", "of")

    def __init__(self, size: int) -> None:
        self.of = bytearray(size)
        self.count = 0

    def __contains__(self, number: int) -> bool:
        return bool(self.of[number])

    def add(self, number: int) -> bool:
        """Adds a number; False if it was there."""
        if self.of[number]:
            return False
        self.of[number] = 1
        self.count += 1
        return True

    def remove(self, number: int) -> None:
        """Does nothing if the number is not in the set."""
        self.count -= self.of[number]
        self.of[number] = 0

    def clear(self) -> None:
        self.of = bytearray(len(self.of))
        self.count = 0


class Subtree:
    """The files at one depth of a directory: consecutive inode numbers. Shared by its streams.

    ``read`` counts the files that were opened since the mount, ``ahead`` those that were given out
    and not opened since, and ``gone`` those that were removed or written; ``marks`` has them.
    """

    def __init__(
        self,
        directory: Ino,
        depth: int,
        files: range,
        marks: Marks,
        count_files: Callable[[range], int] = len,
    ) -> None:
        self.directory = directory
        self.depth = depth
        self.files = files
        # Subdirectories, links and further names of files are among the entries.
        self._regular, self._counted, self._count_files = len(files), 0, count_files
        self.read = self.ahead = self.gone = 0
        self._marks = marks
        self._next_fill = 0
        # Whether a stream keeps the order of its epochs: 12 bytes for each file.
        self.is_order_kept = False
        self.streams = 0

    @property
    def count(self) -> int:
        """The number of regular files that may be opened; entries that ``look`` has not passed
        count as such."""
        return self._regular - self.gone

    def look(self) -> None:
        """Counts the regular files among the next entries, for ``count``."""
        entries = self.files[self._counted : self._counted + _KINDS]
        if entries:
            self._regular -= len(entries) - self._count_files(entries)
            self._counted += len(entries)

    def give(self, position: int, *, again: bool = False) -> Ino | None:
        """The file at a position, if it was not read or given out before. ``again``: if it is not
        given out now."""
        ino = Ino(self.files.start + position)
        mark = self._marks.of[ino]
        if mark & (GIVEN | GONE) or (mark and not again):
            return None
        self._marks.set(ino, mark | GIVEN)
        return ino

    def fill(self, most: int) -> list[Ino]:
        """The next files in the order of the snapshot that were not read or given out."""
        allowed = len(self.files)
        if self.read < _FILL_SHARE * self.count:
            allowed = int(_EARLY_FILL * self.read) - self.ahead
        given: list[Ino] = []
        while len(given) < min(most, allowed) and self._next_fill < len(self.files):
            ino = self.give(self._next_fill)
            self._next_fill += 1
            if ino is not None:
                given.append(ino)
        return given

    @property
    def is_filled(self) -> bool:
        return self._next_fill >= len(self.files)


class Stream:
    """The opens of one job in one subtree. With ``keeps_order`` it compares each epoch with the
    one before, for 12 bytes a file."""

    def __init__(self, subtree: Subtree, *, keeps_order: bool) -> None:
        self.subtree = subtree
        self.pattern: Pattern = "unknown"
        self.epoch = 1
        # Opens of this epoch, and those of files that this epoch had opened before.
        self.opens = 0
        self.repeats = 0
        # Both at the last test of this epoch, and the repeats within it.
        self._tested = 0, 0
        self._inner_repeats = 0
        self._had_mixed_epoch = False
        self._n = len(subtree.files)
        self._start = subtree.files.start
        # The files that were opened since the last test, and the processes that did it; then the
        # latest windows, of which the last one is tested.
        self._latest: dict[int, None] = {}
        self._processes: set[int] = set()
        self._recent: deque[list[int]] = deque(maxlen=_EARLIER + 1 + _LATER)
        # The places of each of these windows in the order of the last epoch, and that order.
        self._places: deque[list[int]] = deque(maxlen=self._recent.maxlen)
        self._placed_in: PastOrder | None = None
        self._window_size = recognition.window_of(self._n)
        # Whether one process has opened all files of the last window.
        self._has_one_process = False
        self._seen = Seen(self._n)
        # The latest opens, none of a file that is new in this epoch.
        self._run: dict[int, None] = {}
        self._vote: Pattern = "unknown"
        self._voted: Locality | None = None
        # The order of this epoch so far, and that of the last one.
        self._order = array("I") if keeps_order else None
        self._last: PastOrder | None = None
        self.step, self._remainder = 1, 0
        # In the order that was recognised: where the readers are, how far ahead files are given
        # out, and up to where they were.
        self._front = self._given = -1
        self.distance = _LEAST_AHEAD
        # The files of that order that the readers have passed, and those of them that they have
        # read.
        self._passed = self._read = 0.0
        # Whether ``fill`` may return files, and how many.
        self.is_filling = False
        self._fill_credit = 0

    @property
    def share(self) -> float:
        """The share of the subtree that this epoch has read."""
        return self._seen.count / max(1, self.subtree.count)

    @property
    def _is_whole(self) -> bool:
        """Whether this epoch has opened all files."""
        return self._seen.count >= self.subtree.count

    @property
    def is_mixed(self) -> bool:
        """Whether the epochs cannot be distinguished, since files come again before all others were
        opened: each epoch reads another part of the files. Then also later numbers are wrong."""
        most = max(self._window_size, _MIXED * self.opens)
        return self._had_mixed_epoch or self._inner_repeats > most

    @property
    def reach(self) -> int:
        """How many files ahead of the readers are given out; 0 without a known order, if the
        readers leave out many of its files, and at the end of an epoch."""
        if self.pattern not in _LOCAL or self._front < 0 or self._is_sparse:
            return 0
        last = self._last if self.pattern == "same order" else None
        entries = self._n if last is None else len(last.positions)
        left = (entries - 1 - self._front) // (self.step if self.pattern == "strided" else 1)
        # The readers are where they were when the last window was complete.
        files = self.subtree.count if last is None else min(entries, self.subtree.count)
        unread = files - self._seen.count
        return max(0, min(self.distance, left, unread))

    @property
    def _is_sparse(self) -> bool:
        """Whether the readers leave out many files of the order. At first, each of many readers has
        begun behind files that another one reads later: a window of files is allowed for it."""
        return _READ_SHARE * self._passed > self._read + self._window_size

    @property
    def is_scan(self) -> bool:
        """Whether one process reads the files for the first time, in the order of the names."""
        return self.pattern == "sequential" and self.epoch == 1 and self._has_one_process

    def opened(self, ino: Ino, process: int = 0) -> bool:
        """Records an open of one of the files by a ``process`` (0: unknown); whether a window is
        complete."""
        position, latest = ino - self._start, self._latest
        if position not in latest:
            latest[position] = None
            self._processes.add(process)
        elif not self._is_whole or position in self._run:
            # Some formats open a file twice for one sample. After all files, it is one of the next
            # epoch.
            return False
        self.opens += 1
        if self._seen.add(position):
            if self._order is not None:
                self._order.append(position)
            if self._run:
                self.repeats += len(self._run)
                self._run.clear()
        else:
            self._repeated(position)
        if self.is_filling:
            self._fill_credit = min(_MOST_FILL, self._fill_credit + _FILL_PER_OPEN)
        return self._ends_window()

    def opened_all(self, inos: array[int], processes: Set[int]) -> bool:
        """As ``opened`` for each of ``inos``, an array of type I, by several ``processes`` (0:
        unknown); whether any window is complete. Only the last window of many opens is tested: a
        test takes as long as some hundred opens, and readers this fast gain nothing by fetches
        ahead."""
        is_complete, at, size = False, 0, self._window_size
        keep = len(inos) if len(inos) < _MANY_WINDOWS * size else size
        while at < len(inos) and self._can_count():
            at, is_new = self._count(inos, at, keep, processes)
            is_complete |= is_new
        process = next(iter(processes)) if len(processes) == 1 else 0
        for ino in inos[at:]:
            is_complete |= self.opened(Ino(ino), process)
        return is_complete

    def _can_count(self) -> bool:
        """Whether many opens can be counted at once."""
        is_usual = self.pattern != "skewed" and len(self._run) < passes.MOST_RUN
        return is_usual and passes.can_count()

    def _count(self, inos: array[int], at: int, keep: int, processes: Set[int]) -> tuple[int, bool]:
        """Counts opens from the index ``at`` on, up to the end of an epoch, or of a window that
        fewer than ``keep`` opens follow, which is tested. The index of the next open, and whether a
        window is complete."""
        now = Pass(
            first=self._start,
            seen=self._seen.of,
            mark=1,
            window_size=self._window_size,
            opens=self.opens,
            files=self._seen.count,
            run=self._run,
            repeats=self.repeats,
            window=self._latest,
            all_files=self.subtree.count,
        )
        at = now.count(inos, at, keep=keep)
        if self.is_filling:
            credit = self._fill_credit + _FILL_PER_OPEN * (now.opens - self.opens)
            self._fill_credit = min(_MOST_FILL, credit)
        self.opens, self._seen.count, self.repeats = now.opens, now.files, now.repeats
        self._run, self._latest = dict.fromkeys(now.run), dict.fromkeys(now.window)
        if self._order is not None:
            self._order.extend(now.new)
        if now.windows:
            self._recent.clear()
            self._recent.append(now.last_window)
            self._placed_in = None
            self._processes.clear()
        self._processes |= processes
        if passes.ends_pass(len(self._run), self._seen.count):
            self._begin_epoch()
        return at, self._ends_window() or bool(now.windows)

    def _ends_window(self) -> bool:
        """Whether the opens since the last window are a window, which then ends and is tested."""
        latest = self._latest
        if len(latest) < self._window_size:
            return False
        self._recent.append(list(latest))
        latest.clear()
        self._judge()
        self._has_one_process = len(self._processes) == 1 and 0 not in self._processes
        self._processes.clear()
        return True

    def left(self, ino: Ino) -> None:
        """Records that one of the files is gone: this epoch has not opened it."""
        position = ino - self._start
        self._seen.remove(position)
        self._run.pop(position, None)

    def close(self) -> None:
        """Must be called when the stream is given up."""
        if self._order is not None:
            self.subtree.is_order_kept = False

    # -- epochs ----------------------------------------------------------------------------------

    def _repeated(self, position: int) -> None:
        """Counts an open of a file that this epoch has opened before. An epoch ends with a run of
        such opens (``telemetry/passes.py``)."""
        self._run[position] = None
        if self.pattern == "skewed":
            # It has no epochs. After more opens most files have repeats in whatever order they are
            # read, so the test would say little.
            is_over = self.opens >= self.subtree.count
        else:
            is_over = passes.ends_pass(len(self._run), self._seen.count)
        if is_over:
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        if self._order is not None:
            self._last = PastOrder(self._order, self._n)
            self._order = array("I", self._run)
        self._had_mixed_epoch = self.is_mixed
        self.epoch += 1
        self.opens, self.repeats = len(self._run), 0
        self._tested, self._inner_repeats = (self.opens, 0), 0
        self._seen.clear()
        for position in self._run:
            self._seen.add(position)
        self._run.clear()
        if self.pattern in _LOCAL:
            self._front = self._given = -1

    # -- recognition -----------------------------------------------------------------------------

    def _judge(self) -> None:
        self.subtree.look()
        self._find_places()
        self._count_inner_repeats()
        vote, found = self._look()
        if vote in _LOCAL:
            if found is not None:
                self._count_passed(vote)
            before = self._voted if self._vote == vote else None
            if found is not None and before is not None and found.middle <= before.middle:
                # The same files again, or another epoch: it does not advance.
                vote = "unknown"
            if found is not None and self.pattern == vote:
                self._follow(found)
        if vote == self._vote and vote != self.pattern:
            self._recognised(vote, found)
        self._vote, self._voted = vote, found

    def _find_places(self) -> None:
        """Finds the places of the last window, and of those before if they may have others now."""
        last = self._last
        if last is None:
            return
        if last.extend() or self._placed_in is not last:
            self._places.clear()
            self._places.extend(map(last.places, self._recent))
            self._placed_in = last
        else:
            self._places.append(last.places(self._recent[-1]))

    def _count_passed(self, pattern: Pattern) -> None:
        """Counts the files of an order that a window has, and those that it leaves out, as soon as
        the other readers have had their time for them. Before that they count for now."""
        recent = self._recent
        number = max(0, len(recent) - 1 - _LATER)
        window, read = recent[number], set[int]().union(*recent)
        order: Sequence[int] = range(self._n)
        places, step, share = window, self.step, 1.0
        if pattern == "same order" and self._last is not None:
            order, places, step = self._last.order, self._places[number], 1
        else:
            # Not all places have a file that can be read.
            share = max(LEAST_FILES, self.subtree.count) / self._n
        count = len(places)
        passed = count + recognition.left_out(places, read, order, step=step, share=share)
        if len(recent) <= _LATER + 1:
            self._passed = self._read = 0.0
        self._passed = _FADING * self._passed + share * passed
        self._read = _FADING * self._read + count

    def _count_inner_repeats(self) -> None:
        opens, repeats = self._tested
        self._tested = self.opens, self.repeats + len(self._run)
        opens, repeats = self._tested[0] - opens, self._tested[1] - repeats
        if repeats <= _NEXT_EPOCH * opens:
            self._inner_repeats += repeats

    def _look(self) -> tuple[Pattern, Locality | None]:
        """What the tests say of the window; where it is, if it is local."""
        window, earlier = self._recent[-1], self._recent[-2] if len(self._recent) > 1 else []
        # In a small directory the workers may have batches in all parts, so no window is local.
        is_small = self._window_size < recognition.WINDOW
        spread: Pattern = "shuffled"
        if self._last is not None and len(self._last.positions) >= LEAST_FILES:
            known = self._places[-1]
            if len(known) >= _KNOWN * len(window):
                found = recognition.locality(known, len(self._last.positions))
                before = self._places[-2] if len(self._places) > 1 else []
                if (is_small or found is not None) and recognition.advances(known, before):
                    if found is not None:
                        return "same order", found
                    spread = "same order"
        ordered = sorted(window)
        found = recognition.locality(ordered, self._n)
        step, remainder = recognition.stride(ordered)
        if (is_small or found is not None) and recognition.advances(window, earlier):
            if found is not None:
                self.step, self._remainder = step, remainder
                return "sequential" if step == 1 else "strided", found
            if spread == "shuffled":
                spread = "sequential"
        # Most of the files may be gone.
        files = max(LEAST_FILES, self.subtree.count)
        if recognition.is_skewed(self.opens, self.repeats + len(self._run), files):
            return "skewed", None
        if self.pattern == "skewed" and self.opens < _LEAST_SKEWED * self._window_size:
            # The count has just begun anew.
            return "skewed", None
        is_even = step == 1 and recognition.is_uniform(window, self._n)
        return spread if is_even else "unknown", None

    def _recognised(self, pattern: Pattern, found: Locality | None) -> None:
        self.pattern = pattern
        self.distance = _LEAST_AHEAD
        self._fill_credit = 0
        is_spread = found is None and pattern not in ("unknown", "skewed")
        self.is_filling = is_spread and not self.subtree.is_filled
        self._front = self._given = -1 if found is None else found.high

    def _follow(self, found: Locality) -> None:
        """Records the position of the readers, and adapts the distance."""
        reached = self._front + self.distance * (self.step if self.pattern == "strided" else 1)
        places = window = self._recent[-1]
        if self.pattern == "same order" and self._last is not None:
            places = self._places[-1]
        # A worker that is behind the others is foreseen, too.
        foreseen = sum(found.low <= place <= reached for place in places)
        if found.low <= reached and foreseen >= _FORESEEN * len(window):
            self.distance = min(_MOST_AHEAD, 2 * self.distance)
        else:
            self.distance = _LEAST_AHEAD
            self._given = found.high
        self._front = found.high
        self._given = max(self._given, self._front)

    # -- the files to fetch ----------------------------------------------------------------------

    def uses(self, ino: Ino) -> tuple[float, float]:
        """The next open of a file of the same order, and the one after it, as numbers of opens
        since the first epoch that had this order; infinite without such an order."""
        position = ino - self.subtree.files.start
        if self.pattern != "same order" or self._last is None:
            return math.inf, math.inf
        place = self._last.place(position)
        if place is None:
            return math.inf, math.inf
        n = len(self._last.positions)
        first = (self.epoch + (position in self._seen)) * n + place
        return first, first + n

    def expects(self, ino: Ino) -> bool:
        """Whether the recognised order has the file before the readers, or a little behind, and
        this epoch has not opened it."""
        position = ino - self.subtree.files.start
        if self.pattern not in _LOCAL or position in self._seen:
            return False
        place, step = position, self.step if self.pattern == "strided" else 1
        if self.pattern == "same order" and self._last is not None:
            known = self._last.place(position)
            place = -1 if known is None else known
        return place >= 0 and self._front - self.distance * step <= place <= self._given

    def awaits(self, ino: Ino) -> bool:
        """Whether the job will open a file in this epoch, or in the next one if it has opened all
        files, provided that it opens each file once an epoch."""
        position = ino - self._start
        if self.pattern == "skewed":
            return False
        return position not in self._seen or (self._is_whole and position not in self._run)

    def ahead(self, most: int) -> list[Ino]:
        """The next files of the order that was recognised, up to ``distance`` ahead of the
        readers. Each is given out once an epoch."""
        given: list[Ino] = []
        if self._front < 0 or self._is_sparse:
            return given
        if self.pattern == "same order" and self._last is not None:
            order = self._last.positions
            end = min(len(order), self._front + 1 + self.distance)
            while len(given) < most and self._given + 1 < end:
                self._given += 1
                self._give(int(order[self._given]), given)
        elif self.pattern in ("sequential", "strided"):
            end = min(self._n, self._front + 1 + self.distance * self.step)
            while len(given) < most and self._given + 1 < end:
                self._given += 1
                if self._given % self.step == self._remainder:
                    self._give(self._given, given)
        return given

    def fill(self, most: int) -> list[Ino]:
        """Files of the subtree of a random order, to be fetched in any order."""
        if not self.is_filling or self._fill_credit <= 0:
            return []
        given = self.subtree.fill(min(most, self._fill_credit))
        self._fill_credit -= len(given)
        self.is_filling = not self.subtree.is_filled
        return given

    def _give(self, position: int, given: list[Ino]) -> None:
        if position not in self._seen:
            ino = self.subtree.give(position, again=True)
            if ino is not None:
                given.append(ino)
