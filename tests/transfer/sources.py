"""Models of a source in virtual time, and readers of a known order beside fetches ahead.

A model returns when a call that begins now ends. The order of the calls is that of their begin.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from monarch.transfer.concurrency import Call, Concurrency

KB = 1000
MB = 1000 * KB

# How often the caller of a ``Concurrency`` looks, and how long a reader needs for one file.
_LOOK_S = 0.01
_THINK_S = 0.0002


class Model(Protocol):
    """A source: the end of a call for ``nbytes`` that begins at ``now``."""

    def end(self, nbytes: int, now: float) -> float: ...


@dataclass
class Latency:
    """Every call takes ``seconds``, however many run; ``deviation`` is relative."""

    seconds: float
    deviation: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def end(self, nbytes: int, now: float) -> float:
        if not self.deviation:
            return now + self.seconds
        sigma = math.sqrt(math.log(1 + self.deviation**2))
        return now + self.seconds * self._random.lognormvariate(-(sigma**2) / 2, sigma)


@dataclass
class Bandwidth:
    """Calls pass one after the other through a line of ``rate`` bytes a second, after ``model``."""

    rate: float
    model: Model
    _free_s: float = 0.0

    def end(self, nbytes: int, now: float) -> float:
        self._free_s = max(self._free_s, now) + nbytes / self.rate
        return self.model.end(nbytes, self._free_s)


@dataclass
class Servers:
    """``count`` servers take the calls in turn; each call takes as long as ``model`` says."""

    count: int
    model: Model

    def __post_init__(self) -> None:
        self._free = [0.0] * self.count

    def end(self, nbytes: int, now: float) -> float:
        end = self.model.end(nbytes, max(heapq.heappop(self._free), now))
        heapq.heappush(self._free, end)
        return end


@dataclass
class Changing:
    """``before`` until ``at_s``, then ``after``."""

    before: Model
    after: Model
    at_s: float

    def end(self, nbytes: int, now: float) -> float:
        return (self.before if now < self.at_s else self.after).end(nbytes, now)


@dataclass
class Hanging:
    """As ``model``, but the calls that ``hangs`` names by their begin never end."""

    model: Model
    hangs: Callable[[float], bool]

    def end(self, nbytes: int, now: float) -> float:
        return math.inf if self.hangs(now) else self.model.end(nbytes, now)


class Fixed(Concurrency):
    """A fixed number of fetches ahead, for comparison."""

    def __init__(self, count: int) -> None:
        super().__init__(10**6)
        self._count = count

    def may_begin(self, now: float) -> bool:
        return self.running < self._count


@dataclass
class Run:
    """``readers`` read files of ``sizes`` in their order, and wait for a file that is fetched; the
    ``concurrency`` decides how many of the next files are fetched, None: none.

    ``others`` read files that are not foreseen, of the same sizes, one after the other.
    ``history`` has the running fetches ahead at each look, ``waits`` the duration of each read of
    the source by a reader.
    """

    source: Model
    sizes: list[int]
    readers: int
    concurrency: Concurrency | None
    others: int = 0
    now: float = 0.0
    done: int = 0
    history: list[tuple[float, int]] = field(default_factory=list)
    limits: list[tuple[float, int]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    fetches: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._position = 0
        self._ahead = 0
        self._arrived: set[int] = set()
        # The readers that wait for each file under way.
        self._under_way: dict[int, list[Callable[[], None]]] = {}
        self._read_s = 0.0
        self._in_flight = 0
        for _ in range(self.readers):
            self._at(0.0, self._next)
        for number in range(self.others):
            self._at(0.0, partial(self._read_another, random.Random(number)))
        if self.concurrency is not None:
            self._at(0.0, self._look)

    def until(self, seconds: float = math.inf) -> Run:
        while self._events and self._events[0][0] <= seconds:
            if self.readers and self.done == len(self.sizes):
                break
            self.now, _, act = heapq.heappop(self._events)
            act()
            self._begin_ahead()
        return self

    @property
    def files_per_s(self) -> float:
        return self.done / self.now

    def limit_at(self, since_s: float, until_s: float = math.inf) -> tuple[int, float, int]:
        """The least, the mean and the greatest limit in a time, without pauses and probes."""
        found = [limit for at, limit in self.limits if since_s <= at < until_s]
        return min(found), sum(found) / len(found), max(found)

    def _at(self, when: float, act: Callable[[], None]) -> None:
        if when < math.inf:
            heapq.heappush(self._events, (when, next(self._order), act))

    def _next(self) -> None:
        if self._position == len(self.sizes):
            return
        file = self._position
        self._position += 1
        if file in self._arrived:
            self._finished()
        elif file in self._under_way:
            self._under_way[file].append(self._finished)
        else:
            began = self.now
            self._in_flight += 1

            def end() -> None:
                self._has_read(began)
                self._finished()

            self._fetch(file, end)

    def _has_read(self, began: float) -> None:
        self._in_flight -= 1
        self._read_s += self.now - began
        self.waits.append(self.now - began)

    def _read_another(self, choice: random.Random) -> None:
        began = self.now
        self._in_flight += 1

        def end() -> None:
            self._has_read(began)
            self._at(self.now + _THINK_S, partial(self._read_another, choice))

        self._at(self.source.end(choice.choice(self.sizes), began), end)

    def _finished(self) -> None:
        self.done += 1
        self._at(self.now + _THINK_S, self._next)

    def _fetch(self, file: int, end: Callable[[], None]) -> None:
        self.fetches[file] = self.fetches.get(file, 0) + 1
        waiting = self._under_way[file] = []

        def arrive() -> None:
            del self._under_way[file]
            self._arrived.add(file)
            end()
            for continues in waiting:
                continues()

        self._at(self.source.end(self.sizes[file], self.now), arrive)

    def _begin_ahead(self) -> None:
        concurrency = self.concurrency
        if concurrency is None:
            return
        self._ahead = max(self._ahead, self._position)
        while self._ahead < len(self.sizes) and concurrency.may_begin(self.now):
            file, self._ahead = self._ahead, self._ahead + 1
            call = concurrency.began(self.now)

            def end(call: Call = call, size: int = self.sizes[file]) -> None:
                concurrency.ended(call, size, self.now)

            self._fetch(file, end)

    def _look(self) -> None:
        assert self.concurrency is not None
        self.concurrency.look(len(self.waits), self._read_s, self._in_flight, self.now)
        self.history.append((self.now, self.concurrency.running))
        if type(self.concurrency) is Concurrency:
            self.limits.append((self.now, self.concurrency._limit))
        self._at(self.now + _LOOK_S, self._look)
