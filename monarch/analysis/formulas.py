"""Closed forms of hit ratios and of the traffic of several nodes.

All of them are for epochs that read each file once, in a new random order. ``share`` is the
capacity of the cache, relative to the bytes of the data set.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# The fixed point of ``random_hits`` is reached from below; this is exact to about 1e-9.
_MOST_STEPS = 100_000
_LEAST_STEP = 1e-10


def no_evict_hits(share: float) -> float:
    """The hit ratio of a fixed set of residents, which no demand policy exceeds: a file that hits
    was resident when the epoch began (CoorDL's MinIO, VLDB 2021)."""
    return min(1.0, share)


def lru_hits(share: float) -> float:
    """The hit ratio of LRU: x + (1 - x) ln(1 - x).

    Between an open at the relative position u of an epoch and the next one at v, a share 1 - u(1 -
    v) of the files is opened. The open hits if this is less than x.
    """
    return share + (1 - share) * math.log(1 - share) if share < 1 else 1.0


def random_hits(share: float) -> float:
    """The hit ratio h of the eviction of random copies: the least solution of h = ((1 - exp(-a)) /
    a)**2 with a = (1 - h) / x.

    Each miss removes a given copy with the probability 1 / (x N), and (1 - h) N misses happen in
    an epoch. So a copy survives the distance d of two opens, in epochs, with the probability
    exp(-a d), and d = 1 - u + v.
    """
    if share >= 1:
        return 1.0
    if share <= 0:
        return 0.0
    hits = 0.0
    for _ in range(_MOST_STEPS):
        rate = (1 - hits) / share
        after = (-math.expm1(-rate) / rate) ** 2 if rate else 1.0
        if after - hits < _LEAST_STEP:
            break
        hits = after
    return hits


# The policies whose hit ratio has a closed form.
HITS = {
    "no_evict": no_evict_hits,
    "first_come": no_evict_hits,
    "belady": no_evict_hits,
    "lru": lru_hits,
    "random": random_hits,
}


class Shares(NamedTuple):
    """Where a node reads its files from after the first epoch, as shares of its bytes."""

    local: float
    remote: float
    source: float


def partitioned(share: float, nodes: int) -> Shares:
    """The shares for a cache that is divided among ``nodes``, of the capacity ``share`` on each
    node, when each node reads an equal part of the files (CoorDL, section 4.1)."""
    cached = min(1.0, nodes * share)
    return Shares(cached / nodes, cached * (nodes - 1) / nodes, 1 - cached)
