"""TinyLFU with exact counts, for comparison: written from its publication alone (Einziger,
Friedman and Manes, ACM Transactions on Storage 13, 2017, sections 3 and 4).

The frequency of an item is the number of its accesses in the sample, capped; when the sample is
full, all frequencies and the size of the sample are halved (the reset operation). On a miss the
item is admitted if it was accessed more often than the victim of the cache. Here no hash function
makes two items share a counter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field


@dataclass
class ExactCounts:
    """``sample`` accesses are counted between two resets; a count is at most ``most``."""

    sample: int
    most: int = 15
    size: int = 0
    resets: int = 0
    counts: dict[Hashable, int] = field(default_factory=dict)

    def add(self, item: Hashable) -> None:
        self.counts[item] = min(self.most, self.counts.get(item, 0) + 1)
        self.size += 1
        if self.size >= self.sample:
            self.size //= 2
            self.resets += 1
            self.counts = {each: n // 2 for each, n in self.counts.items() if n > 1}

    def of(self, item: Hashable) -> int:
        return self.counts.get(item, 0)


def lru_hits(accesses: Iterable[Hashable], room: int, counts: ExactCounts | None) -> list[bool]:
    """Which accesses an LRU cache of ``room`` items serves; with ``counts`` the least recently used
    item gives way only to one that was accessed more often."""
    cache: OrderedDict[Hashable, None] = OrderedDict()
    hits = []
    for item in accesses:
        if counts is not None:
            counts.add(item)
        hits.append(item in cache)
        if item in cache:
            cache.move_to_end(item)
        elif len(cache) < room:
            cache[item] = None
        else:
            victim = next(iter(cache))
            if counts is None or counts.of(item) > counts.of(victim):
                del cache[victim]
                cache[item] = None
    return hits


def perfect_hits(accesses: list[Hashable], room: int) -> list[bool]:
    """Which accesses a cache serves that always has the items of the highest total frequency."""
    totals: dict[Hashable, int] = {}
    for item in accesses:
        totals[item] = totals.get(item, 0) + 1
    best = set(sorted(totals, key=lambda item: -totals[item])[:room])
    seen: set[Hashable] = set()
    hits = []
    for item in accesses:
        hits.append(item in best and item in seen)
        seen.add(item)
    return hits
