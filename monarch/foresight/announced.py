"""Orders of reads that processes have announced, and the position of each reader in its order.

An order is a hint of an ordinary user. It may be wrong or hostile, so it is bounded in memory, and
nothing that a read returns depends on it. Files are opened out of order, since the workers of a
loader interleave and fetch ahead. So the position is a window behind a cursor: entries before the
cursor are read or skipped, and those of the window may be opened in any order.
"""

from __future__ import annotations

import errno
import heapq
import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from monarch.errors import Refused
from monarch.foresight.messages import FIRST_ENTRIES, Piece
from monarch.foresight.positions import Positions
from monarch.telemetry.foresight_report import AnnouncedReport
from monarch.text import MiB
from monarch.types import Ino

# Memory of an entry, of its position, and in addition of an entry of the window, in bytes: a place
# in a dictionary and two numbers. Measured with tracemalloc, and rounded up.
ENTRY_BYTES = 4
POSITION_BYTES = 8
WINDOW_BYTES = 176
# Entries before the cursor are removed when they are so many, and a quarter of all.
_TRIM = 1 << 12
# Entries that are taken from one order before the next order is considered.
_TURN = 16
# Places in ``_Turns`` that may be ignored.
_PLACES = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of all orders together and of those of one user.

    ``window``: the entries after the cursor that may be opened in any order. It must be above the
    number of samples that a loader has in flight: workers, times batches fetched ahead, times the
    samples of a batch. ``unmatched``: after so many opens of the mount without one of an order's
    window, the order is dropped. ``has_positions``: the next use of each file is known.
    """

    user_bytes: int = 32 * MiB
    all_bytes: int = 128 * MiB
    user_orders: int = 64
    all_orders: int = 256
    window: int = 8192
    unmatched: int = 1 << 18
    has_positions: bool = True

    @property
    def entry_bytes(self) -> int:
        return ENTRY_BYTES + POSITION_BYTES * self.has_positions


@dataclass(frozen=True, slots=True)
class Announcer:
    """The process that has announced an order: its user, its number, and its start time in clock
    ticks since boot. The number and the time are 0 for a process of another pid namespace."""

    uid: int
    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class OrderKey:
    """The identity of an order: its process, and the number that the process has chosen."""

    pid: int
    started: int
    number: int


class _Order:
    """An order. ``cursor``, ``indexed``, ``given`` and ``end`` are positions: numbers of entries
    before them. ``items`` begins with the entry at ``first``.

    The window is from ``cursor`` to ``indexed``. ``waiting`` has the first position in it of each
    file that was not opened, ``again`` the further ones, and ``seen`` the positions that were
    opened. ``out`` has those that ``give`` has given out and that were not opened.

    ``base`` is the time of the first entry, as a number of opens. ``positions`` is None without
    ``Limits.has_positions``. ``number`` is that of the order, of all so far. ``awaited``: none is
    given out before there are so many entries, or a reader begins; 0 from then on.
    """

    def __init__(
        self, announcer: Announcer, base: int, limits: Limits, number: int = 0, awaited: int = 0
    ) -> None:
        self.base = base
        self.number = number
        self.awaited = awaited
        # Where the order waits in ``_Turns``: the length of ``out``, and ``number``.
        self.place: tuple[int, int] | None = None
        self.positions = Positions() if limits.has_positions else None
        self._entry_bytes = limits.entry_bytes
        self.announcer = announcer
        self.items = array("I")
        self.first = self.cursor = self.indexed = self.given = 0
        self.waiting: dict[int, int] = {}
        self.again: dict[int, list[int]] = {}
        self.seen: set[int] = set()
        self.out: set[int] = set()
        # Positions that ``give`` has passed while an earlier one of the same file waited.
        self.due: deque[int] = deque()
        # Entries of the window that are not 0.
        self.held = 0
        self.opened = self.skipped = self.unmatched = 0
        # Whether its readers have paused for a while.
        self.is_idle = False

    @property
    def end(self) -> int:
        return self.first + len(self.items)

    def bytes_with(self, more: int, window: int) -> int:
        """The memory of the order with ``more`` further entries, in bytes."""
        entries = len(self.items) + more
        held = self._entry_bytes * more + ENTRY_BYTES * len(self.items)
        if self.positions is not None:
            held += self.positions.bytes
        return held + WINDOW_BYTES * min(entries, window)

    def extend(self, inos: array[int], window: int) -> None:
        if self.positions is not None:
            self.positions.extend(self.end, inos)
        self.items += inos
        if self.end >= self.awaited:
            self.awaited = 0
        self.advance(window)

    def open(self, ino: Ino, window: int) -> None:
        """Records an open of a file in ``waiting``."""
        position = self.waiting.pop(ino)
        self._promote(ino)
        self.seen.add(position)
        self.out.discard(position)
        self.opened += 1
        self.awaited = self.unmatched = 0
        if position == self.cursor or len(self.seen) > window // 2:
            self.advance(window)

    def advance(self, window: int) -> None:
        """Moves the cursor behind entries that were opened. If half of the window was opened, the
        readers have passed the others before these, and the cursor skips them.

        A call takes as many steps as the cursor moves, so an open takes few on the average.
        """
        while True:
            while self.cursor < self.indexed:
                ino = self.items[self.cursor - self.first]
                if ino and self.cursor not in self.seen:
                    if len(self.seen) <= window // 2:
                        break
                    self.skipped += 1
                self._pass(ino, self.indexed)
            before = self.indexed
            self._fill(window)
            # Entries that are 0 may have filled it.
            if self.indexed == before or self.cursor < before:
                break
        if self.cursor - self.first >= max(_TRIM, len(self.items) // 4):
            del self.items[: self.cursor - self.first]
            self.first = self.cursor
            if self.positions is not None:
                self.positions.trim(self.cursor)

    def reach(self, position: int, window: int) -> None:
        """Moves the cursor to ``position`` if that is after it."""
        end = min(position, self.indexed)
        while self.cursor < end:
            self._pass(self.items[self.cursor - self.first], end)
        if self.cursor < position:
            self.cursor = self.indexed = position
        self.awaited = self.unmatched = 0
        self.advance(window)

    def give(self, most: int, lead: int) -> Iterator[Ino]:
        """The next entries of the window, at most ``most``, until ``lead`` of those that were given
        out are not opened."""
        while most > 0 and self.can_give(lead):
            if self.due:
                at = self.due.popleft()
            else:
                at = max(self.given, self.cursor)
                self.given = at + 1
                if not self.items[at - self.first]:
                    self.given = self._behind_zeros(at, self.indexed)
                    continue
            ino = self.items[at - self.first] if at >= self.cursor else 0
            position = self.waiting.get(ino)
            if ino and position == at:
                self.out.add(position)
                most -= 1
                yield Ino(ino)

    def can_give(self, lead: int) -> bool:
        return self.has_more and len(self.out) < lead

    @property
    def has_more(self) -> bool:
        """Whether the window has entries that may be given out and were not."""
        return not self.awaited and (bool(self.due) or max(self.given, self.cursor) < self.indexed)

    @property
    def now(self) -> int:
        """The time of the cursor."""
        return self.base + self.cursor

    def next_use(self, ino: Ino) -> float:
        """The time of the next open of a file; infinite if it is not known."""
        position = self.waiting.get(ino)
        return self._later(ino) if position is None else self.base + position

    def use_after(self, ino: Ino) -> float:
        """The time of the open after the next one."""
        further = self.again.get(ino)
        return self._later(ino) if not further else self.base + further[0]

    def repeats_within(self, begin: float, end: float) -> bool:
        first = max(0, int(begin) - self.base)
        return self.positions is not None and self.positions.repeats_within(first, end - self.base)

    def _later(self, ino: Ino) -> float:
        """The time of the first open after the window."""
        found = self.positions.after(ino, self.indexed) if self.positions is not None else None
        return math.inf if found is None else self.base + found

    def _pass(self, ino: int, end: int) -> None:
        """Moves the cursor behind one entry of the window, or behind entries that are 0 and before
        ``end``."""
        if not ino:
            self.cursor = self._behind_zeros(self.cursor, end)
            return
        if self.cursor in self.seen:
            self.seen.remove(self.cursor)
        else:
            del self.waiting[ino]
            self._promote(ino)
            self.out.discard(self.cursor)
        self.held -= 1
        self.cursor += 1

    def _behind_zeros(self, position: int, end: int) -> int:
        """The position after an entry that is 0 and those that follow it, at most ``end``. An order
        may have millions of them in a row, so they are not read one by one."""
        position += 1
        while position < end and not self.items[position - self.first]:
            count = min(_TRIM, end - position)
            start = self.items.itemsize * (position - self.first)
            found = np.flatnonzero(np.frombuffer(self.items, np.uint32, count, start))
            position += int(found[0]) if len(found) else count
        return position

    def _promote(self, ino: int) -> None:
        """The next position of a file in the window takes the place of the one that was removed."""
        further = self.again.get(ino)
        if further:
            position = self.waiting[ino] = further.pop(0)
            if position < self.given:
                self.due.append(position)
            if not further:
                del self.again[ino]

    def _fill(self, window: int) -> None:
        """Extends the window to its size."""
        while self.indexed < self.end and self.held < window:
            ino = self.items[self.indexed - self.first]
            if not ino:
                self.indexed = self._behind_zeros(self.indexed, self.end)
                continue
            if self.waiting.setdefault(ino, self.indexed) != self.indexed:
                if ino in self.again:
                    self.again[ino].append(self.indexed)
                else:
                    # Smaller than an empty list to which a number is appended.
                    self.again[ino] = [self.indexed]
            self.held += 1
            self.indexed += 1


class _Turns:
    """The orders that can give entries, that with the fewest in ``out`` first, and of several that
    which began first. ``offer`` must be called after each change of an order.

    A heap: an order that has changed gets another place, and its earlier ones are ignored.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._waiting: dict[int, _Order] = {}

    def offer(self, order: _Order) -> None:
        place = len(order.out), order.number
        if order.has_more and (order.place is None or place < order.place):
            order.place = place
            self._waiting[order.number] = order
            heapq.heappush(self._heap, place)
            if len(self._heap) > 2 * len(self._waiting) + _PLACES:
                self._heap = [each.place for each in self._waiting.values() if each.place]
                heapq.heapify(self._heap)

    def remove(self, order: _Order) -> None:
        """Does nothing if the order does not wait."""
        order.place = None
        self._waiting.pop(order.number, None)

    def take(self, lead: int) -> _Order | None:
        """Removes the next order that can give an entry, and returns it; None if there is none."""
        while self._heap and self._heap[0][0] < lead:
            place = heapq.heappop(self._heap)
            order = self._waiting.get(place[1])
            if order is not None and order.place == place:
                self.remove(order)
                if order.can_give(lead):
                    return order
        return None


class Announcements:
    """All announced orders. Belongs to the event loop.

    The methods for messages raise Refused: EINVAL for an order that does not exist and a piece out
    of its place, EPERM for an order of another user, ENOSPC above a limit. Nothing has changed
    then.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits if limits is not None else Limits()
        # Whether placement decides by the next uses of files: then no file is given out before the
        # daemon has the first entries of its order.
        self.awaits_entries = False
        self._orders: dict[OrderKey, _Order] = {}
        self._turns = _Turns()
        self._begun = 0
        # The order that had the file of the last query: the next file is often in the same.
        self._recent: _Order | None = None
        # The orders whose readers have not paused.
        self._busy: list[_Order] = []
        # The time of the latest order that has ended.
        self._past = 0
        self._opened = self._skipped = self._unknown = 0
        self._ended = self._deviated = self._refused = 0

    @property
    def has_orders(self) -> bool:
        """Whether an announced order is present."""
        return bool(self._orders)

    # -- messages --------------------------------------------------------------------------------

    def begin(self, announcer: Announcer, number: int, entries: int = 0) -> OrderKey:
        """Begins an order of ``entries``, 0: unknown; it replaces one of the same key."""
        key = _key(announcer, number)
        if key in self._orders:
            self._require(announcer, number)
            self.end(key)
        if (
            len(self._orders) >= self._limits.all_orders
            or sum(1 for _ in self._of_user(announcer.uid)) >= self._limits.user_orders
        ):
            raise Refused(errno.ENOSPC)
        self._begun += 1
        awaited = min(entries, FIRST_ENTRIES) if self.awaits_entries else 0
        order = _Order(announcer, self.now, self._limits, self._begun, awaited)
        self._orders[key] = order
        self._busy.append(order)
        return key

    def extend(self, announcer: Announcer, piece: Piece) -> int:
        """Appends entries; those that are 0 have a position but no file. Returns how many are not
        0."""
        order = self._require(announcer, piece.order)
        if piece.position != order.end:
            raise Refused(errno.EINVAL)
        limits, count = self._limits, len(piece.inos)
        grown = order.bytes_with(count, limits.window) - order.bytes_with(0, limits.window)
        if (
            self._bytes(self._of_user(announcer.uid)) + grown > limits.user_bytes
            or self._bytes(self._orders.values()) + grown > limits.all_bytes
        ):
            raise Refused(errno.ENOSPC)
        unknown = piece.inos.count(0)
        self._unknown += unknown
        order.extend(piece.inos, limits.window)
        self._turns.offer(order)
        return count - unknown

    def progress(self, announcer: Announcer, number: int, position: int) -> None:
        """The process has read all entries before ``position``. An earlier position than the known
        one changes nothing."""
        order = self._require(announcer, number)
        if position > order.end:
            raise Refused(errno.EINVAL)
        order.reach(position, self._limits.window)
        self._turns.offer(order)

    def key_of(self, announcer: Announcer, number: int) -> OrderKey:
        """The key of an existing order of the process."""
        self._require(announcer, number)
        return _key(announcer, number)

    def end(self, key: OrderKey) -> None:
        """Frees an order; does nothing if there is none."""
        if key in self._orders:
            self._ended += 1
            self._remove(key)

    def refused(self, messages: int) -> None:
        """Counts messages that were refused."""
        self._refused += messages

    # -- what is foreseen ------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._orders)

    def __contains__(self, key: OrderKey) -> bool:
        return key in self._orders

    def opened(self, ino: Ino) -> bool:
        """Records an open of a file; returns whether an order has it in its window. O(1) in the
        length of the orders, and at most ``all_orders`` queries."""
        if not self._orders:
            return False
        is_known, deviating, limits = False, [], self._limits
        for key, order in self._orders.items():
            # An order that is read, or whose next entries are not announced yet, cannot match.
            waiting = order.waiting
            if ino in waiting:
                order.open(ino, limits.window)
                self._turns.offer(order)
                is_known = True
            elif waiting:
                order.unmatched += 1
                if order.unmatched > limits.unmatched:
                    deviating.append(key)
        for key in deviating:
            self._deviated += 1
            self._remove(key)
        return is_known

    def next(self, most: int, lead: int) -> list[Ino]:
        """The next files to be opened, at most ``most``, the most urgent first. Each is given out
        once for each entry that names it.

        No order has more than ``lead`` files given out that are not opened; the window limits it,
        too. The order with the fewest of them has its turn first.
        """
        found: list[Ino] = []
        while len(found) < most and (order := self._turns.take(lead)) is not None:
            found += order.give(min(_TURN, most - len(found)), lead)
            self._turns.offer(order)
        return found

    def following(self, most: int) -> Iterator[array[int]]:
        """Of each order the entries after the cursor, at most ``most``."""
        for order in self._orders.values():
            at = order.cursor - order.first
            yield order.items[at : at + most]

    def is_waiting(self, ino: Ino) -> bool:
        """Whether the window of an order has the file and it was not opened."""
        if self._recent is None or ino not in self._recent.waiting:
            having = (order for order in self._orders.values() if ino in order.waiting)
            self._recent = next(having, None)
        return self._recent is not None

    def order_of(self, ino: Ino) -> OrderKey | None:
        """The first order whose window has the file, which was not opened; None if there is
        none."""
        return next((key for key, order in self._orders.items() if ino in order.waiting), None)

    @property
    def ended(self) -> int:
        """How many orders have ended."""
        return self._ended + self._deviated

    @property
    def now(self) -> int:
        """The present, as a number of opens: all orders are taken to be read at the same rate."""
        return max((order.now for order in self._orders.values()), default=self._past)

    def next_use(self, ino: Ino) -> float:
        """The time of the next open of a file, or of the one that is being answered; infinite if
        it is not known. An order whose readers have paused does not count: they may be stopped for
        long, while those of other orders continue."""
        return min((order.next_use(ino) for order in self._busy), default=math.inf)

    def use_after(self, ino: Ino) -> float:
        """The time of the open after ``next_use``."""
        return min((order.use_after(ino) for order in self._busy), default=math.inf)

    def repeats_within(self, begin: float, end: float) -> bool:
        """Whether an order has a file twice from ``begin`` to ``end``; which orders as in
        ``next_use``."""
        return any(order.repeats_within(begin, end) for order in self._busy)

    def readers_of(self, ino: Ino) -> int:
        """How many orders have a file in their windows, so that it will soon be opened."""
        return sum(ino in order.waiting for order in self._orders.values())

    def is_idle(self, ino: Ino) -> bool:
        """Whether only orders without a reader now have the file in their windows."""
        recent = self._recent if self.is_waiting(ino) else None
        if recent is None or not recent.is_idle:
            return False
        return not any(ino in order.waiting for order in self._busy)

    def mark(self, key: OrderKey, *, is_idle: bool) -> None:
        """Records whether the readers of an order have paused for a while."""
        self._orders[key].is_idle = is_idle
        self._busy = [order for order in self._orders.values() if not order.is_idle]

    def reads(self, key: OrderKey) -> int:
        """A number that grows with each entry of an order that is opened or passed."""
        order = self._orders[key]
        return order.cursor + order.opened

    def activity(self, key: OrderKey) -> int:
        """A number that changes with each entry of an order that is appended, opened or passed."""
        order = self._orders[key]
        return order.end + order.cursor + order.opened

    def report(self) -> AnnouncedReport:
        orders = self._orders.values()
        return AnnouncedReport(
            orders=len(orders),
            entries=sum(order.end - order.cursor for order in orders),
            bytes=self._bytes(orders),
            opened=self._opened + sum(order.opened for order in orders),
            skipped=self._skipped + sum(order.skipped for order in orders),
            unknown=self._unknown,
            ended=self._ended,
            deviated=self._deviated,
            refused=self._refused,
        )

    # -- how -------------------------------------------------------------------------------------

    def _require(self, announcer: Announcer, number: int) -> _Order:
        order = self._orders.get(_key(announcer, number))
        if order is None:
            raise Refused(errno.EINVAL)
        if order.announcer.uid != announcer.uid:
            raise Refused(errno.EPERM)
        return order

    def _of_user(self, uid: int) -> Iterator[_Order]:
        return (order for order in self._orders.values() if order.announcer.uid == uid)

    def _bytes(self, orders: Iterable[_Order]) -> int:
        return sum(order.bytes_with(0, self._limits.window) for order in orders)

    def _remove(self, key: OrderKey) -> None:
        order, self._recent = self._orders.pop(key), None
        self._turns.remove(order)
        if not order.is_idle:
            self._busy.remove(order)
        self._past = max(self._past, order.now)
        self._opened += order.opened
        self._skipped += order.skipped


def _key(announcer: Announcer, number: int) -> OrderKey:
    return OrderKey(announcer.pid, announcer.started, number)
